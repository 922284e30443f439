"""The only door to the kernels: how many threads, and whether threads may be started at all."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numba

from poolgrad_numba.config import most_threads, pool_is_up
from poolgrad_numba.errors import PoolGradError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from poolgrad_numba.kernels._jit import Kernel

# The workqueue layer aborts the process when a second thread launches; omp and tbb take any number.
_workqueue_lock = threading.RLock()
_forked = False


def _after_fork() -> None:
    global _forked, _workqueue_lock  # noqa: PLW0603
    # A child of a process whose omp pool has started dies when it launches, so it runs the serial form: same bits.
    _forked = pool_is_up()
    _workqueue_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def launch(kernel: Kernel, workers: int, *arrays: Any) -> int:
    """Run a kernel with that many workers, each on a thread of its own where threads may be used.

    Returns the sum of what the workers return. Numba's thread limit is the same afterwards as before.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise PoolGradError("NUMBA_DISABLE_JIT is set, and kernels run compiled only")
    if workers == 1 or _forked:
        return int(kernel.serial(workers, *arrays))
    try:
        previous = numba.get_num_threads()  # starts the threads where they are not up
    except ValueError as error:
        raise PoolGradError(f"Numba cannot start threads ({error}); num_threads=1 needs none") from error
    with _layer_lock():
        numba.set_num_threads(min(workers, most_threads()))  # a plan may come from a larger machine
        try:
            return int(kernel.parallel(workers, *arrays))
        finally:
            numba.set_num_threads(previous)


def _layer_lock() -> AbstractContextManager[object]:
    return _workqueue_lock if numba.threading_layer() == "workqueue" else nullcontext()
