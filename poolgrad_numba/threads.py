"""Numba's threads: how many there may be, how they are started, and whether they were lost in a fork."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numba

from poolgrad_numba import process
from poolgrad_numba.errors import PoolGradError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A forked child has none of its parent's threads. Where Numba's were up, a launch would kill or hang it, and they
# cannot be started anew. Where another library may have used the very GNU OpenMP that Numba uses, a launch would wait
# for the forking thread's lost team; a new thread has no such memory.
_lost = False
_openmp_before_fork: set[str] = set()
_new_thread: ThreadPoolExecutor | None = None


def _after_fork() -> None:
    global _lost, _openmp_before_fork  # noqa: PLW0603
    _lost = _lost or are_up()
    if not _lost:
        _openmp_before_fork = set(process.libraries("gomp"))


def most() -> int:
    """Threads that may be used at all: as many as Numba was set up with, or one where they were lost in a fork."""
    return 1 if _lost else int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def limit() -> int:
    """Numba's own limit, which it keeps a thread; starts no thread."""
    if not are_up() or _lost:
        return most()
    # Not numba.get_num_threads(): it takes a lock each time, which an interrupt at the wrong moment leaves taken.
    return int(sys.modules["numba.np.ufunc.parallel"]._get_num_threads())  # noqa: SLF001


def are_up() -> bool:
    """Whether Numba's threads have been started in this process, or in the one that it was forked from."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    return bool(parallel and getattr(parallel, "_is_initialized", False))


process.in_child(_after_fork)
if process.was_forked():
    _after_fork()
    if _lost:
        # The threads may be this very process's, started after the fork; nothing tells, and a wrong guess is fatal.
        warnings.warn(
            "poolgrad_numba uses one thread here: this process was forked, and Numba's threads were started before "
            "poolgrad_numba was imported, perhaps in the parent. Import it before anything runs in parallel.",
            RuntimeWarning,
            stacklevel=2,
        )


def start() -> bool:
    """Start the threads where they are not up; whether they may be used."""
    global _new_thread  # noqa: PLW0603
    if not are_up() and not _lost:
        openmp = _openmp()
        if openmp is not None and _file_of(openmp.omp_get_max_threads) in _openmp_before_fork:
            _new_thread = ThreadPoolExecutor(1, "poolgrad_numba")
        try:
            with _settings_kept(openmp):
                numba.get_num_threads()
        except ValueError as error:
            raise PoolGradError(f"Numba cannot start threads ({error}); num_threads=1 needs none") from error
    return not _lost


def call(parallel: Callable[..., int], *arguments: Any) -> int:
    """Call compiled code that uses the threads, from this thread or one that can."""
    if _new_thread is None or threading.get_native_id() != os.getpid():
        return int(parallel(*arguments))
    running = _new_thread.submit(parallel, *arguments)
    try:
        return int(running.result())
    finally:
        wait([running])  # an interrupt, too, comes through only when the result is no longer written


def _openmp() -> ctypes.CDLL | None:
    """Find the OpenMP library that Numba's omp layer calls, where it can be reached.

    That is not always the one that it was linked to: PyTorch, where it was imported before, makes its own the
    process's.
    """
    try:
        from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: PLC0415  (not on every platform)
    except ImportError:
        return None
    for place in (None, omppool.__file__):
        try:
            openmp = ctypes.CDLL(place)
            openmp.omp_get_max_threads, openmp.omp_get_max_active_levels  # noqa: B018
        except (OSError, TypeError, AttributeError):  # Windows has no library of all that is loaded
            continue
        return openmp
    return None


def _file_of(function: Any) -> str | None:
    address = ctypes.cast(function, ctypes.c_void_p).value
    found = process.libraries("gomp").items()
    return next((path for path, parts in found if any(address in part for part in parts)), None)


@contextmanager
def _settings_kept(openmp: ctypes.CDLL | None) -> Iterator[None]:
    """Undo what starting the omp layer does to the calling thread's OpenMP settings, which other libraries share.

    It asks for a team of Numba's size and for nested teams; its own loops need neither.
    """
    if openmp is None:
        yield
        return
    threads, levels = openmp.omp_get_max_threads(), openmp.omp_get_max_active_levels()
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)
        openmp.omp_set_max_active_levels(levels)
