"""Memory for large arrays: what earlier ones have given back is taken again.

A new array's pages are faults and zeros that the system makes first: a gradient of 98 MiB took 11 ms, and 6 ms in
memory that was there already. What is kept is marked free, so that the system takes it back when it runs short.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAST: Final = 2**25  # bytes; glibc itself keeps freed arrays that are smaller
_MOST: Final = 2**29  # bytes that are kept in all
_MARK_FREE: Final[int | None] = getattr(mmap, "MADV_FREE", None)  # Linux, macOS
_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)

# The oldest first. No lock: a finalizer runs at any moment, also of one who holds the lock; single steps are enough.
_kept: list[mmap.mmap] = []


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Give a new C-ordered array of whatever was in its memory before, as ``np.empty`` does.

    Its memory comes back when it and all of its views are gone.
    """
    size = math.prod(shape) * dtype.itemsize
    block = _block(size) if _LEAST <= size <= _MOST and _MARK_FREE is not None else None
    if block is None:
        return np.empty(shape, dtype)
    # NumPy makes this array, and not the block behind it, the base of all views.
    lease: NDArray[np.uint8] = np.ndarray(size, np.uint8, block)
    weakref.finalize(lease, _give_back, block).atexit = False
    return np.ndarray(shape, dtype, lease)


def _block(size: int) -> mmap.mmap | None:
    for block in reversed(_kept.copy()):
        if size <= len(block) <= size + size // 8:
            with suppress(ValueError):  # another thread was faster
                _kept.remove(block)
                return block
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # NumPy's error says more
        return None
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without them
            block.madvise(_HUGE_PAGES)
    return block


def _give_back(block: mmap.mmap) -> None:
    try:
        block.madvise(_MARK_FREE)  # type: ignore[arg-type]
    except OSError:  # an old kernel, which would have to keep it
        return
    _kept.append(block)
    with suppress(IndexError):
        while sum(map(len, _kept)) > _MOST:
            _kept.pop(0)
