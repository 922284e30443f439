"""Numba's threads: how many there may be, how they are started, and whether they were lost in a fork."""

from __future__ import annotations

import ctypes
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numba

from poolgrad_numba import process
from poolgrad_numba.errors import PoolGradError

if TYPE_CHECKING:
    from collections.abc import Iterator

# A forked child has none of its parent's threads. Where Numba's were up, a launch would kill or hang it, and they
# cannot be started anew. Where another library may have used the very GNU OpenMP that Numba uses, starting them would
# hang it.
_lost = False
_openmp_before_fork: set[str] = set()


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
    return int(numba.get_num_threads()) if are_up() and not _lost else most()


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
    global _lost  # noqa: PLW0603
    if not are_up() and not _lost:
        openmp = _openmp()
        if openmp is not None and _file_of(openmp.omp_get_max_threads) in _openmp_before_fork:
            _lost = True
            return False
        try:
            with _settings_kept(openmp):
                numba.get_num_threads()
        except ValueError as error:
            raise PoolGradError(f"Numba cannot start threads ({error}); num_threads=1 needs none") from error
    return not _lost


def _openmp() -> ctypes.CDLL | None:
    """Load the OpenMP library that Numba's omp layer was linked to, where it can be reached."""
    try:
        from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: PLC0415  (not on every platform)

        openmp = ctypes.CDLL(omppool.__file__)
        openmp.omp_get_max_threads, openmp.omp_get_max_active_levels  # noqa: B018
    except (ImportError, OSError, AttributeError):
        return None
    return openmp


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
