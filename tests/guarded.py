"""Memory between two pages that nobody may touch, so that jitted code that reads or writes past its end dies at once.

AddressSanitizer does not see jitted code; the processor's page table does. Linux and macOS only.
"""

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
CANARY = 0xA5  # fills whatever is not the caller's
_NONE, _READ, _WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _protect(address, size, protection):
    if _mprotect(address, size, protection):
        raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """``size`` bytes flush against the right or the left guard page, or ``gap`` bytes away from it.

    What lies between payload and page edges holds a canary pattern, as does the payload at first. Arrays keep the
    memory alive.
    """

    def __init__(self, size, *, right=True, gap=0):
        room = max(-(-(size + gap) // PAGE), 1) * PAGE
        private = mmap.mmap(-1, room + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = room - size - gap if right else gap
        self.room = np.frombuffer(private, np.uint8, room, PAGE)
        self.room[:] = CANARY
        self.payload = self.room[start : start + size]
        self._slack = self.room[:start], self.room[start + size :]
        _protect(self.room.ctypes.data - PAGE, PAGE, _NONE)
        _protect(self.room.ctypes.data + room, PAGE, _NONE)

    def array(self, shape, dtype, strides=None, offset=0):
        """An array in the payload, which must hold it."""
        return np.ndarray(shape, dtype, self.payload, offset, strides)

    def freeze(self):
        """From now on whoever writes into the payload dies."""
        _protect(self.room.ctypes.data, self.room.size, _READ)

    def intact(self):
        """Whether all canaries around the payload live."""
        return all((part == CANARY).all() for part in self._slack)
