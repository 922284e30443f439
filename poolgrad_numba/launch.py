"""The only door to the kernels: how many threads, and whether threads may be used at all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numba

from poolgrad_numba import process
from poolgrad_numba import threads as numba_threads
from poolgrad_numba.errors import PoolGradError

if TYPE_CHECKING:
    from poolgrad_numba.kernels._jit import Kernel

# The workqueue layer aborts the process when a second thread launches; omp and tbb take any number.
_workqueue_lock = process.Lock()


def launch(kernel: Kernel, workers: int, *arrays: Any) -> int:
    """Run a kernel with that many workers, each on a thread of its own where threads may be used.

    Returns the sum of what the workers return. Numba's and OpenMP's thread limits are the same afterwards as before.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise PoolGradError("NUMBA_DISABLE_JIT is set, and kernels run compiled only")
    threads = min(workers, numba_threads.most())  # a plan may come from a larger machine, or from before a fork
    if threads == 1 or not numba_threads.start():
        return int(kernel(workers, 1, *arrays))
    if numba.threading_layer() != "workqueue":
        return numba_threads.call(kernel, workers, threads, *arrays)
    if not _started_by_python():
        return int(kernel(workers, 1, *arrays))
    with _workqueue_lock.held:
        return int(kernel(workers, threads, *arrays))


def _started_by_python() -> bool:
    """Whether this thread is Python's own; another may be workqueue's, in the middle of a loop that must not nest."""
    here = threading.get_ident()
    return any(t.ident == here and not isinstance(t, threading._DummyThread) for t in threading.enumerate())  # noqa: SLF001
