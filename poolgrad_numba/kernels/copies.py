"""Copies that benchmarks measure against: they read and write as many bytes as an operator must, and do nothing else.

``source`` and ``target`` are flat uint64 arrays. What the longer one has beyond the other is only read, or filled.
"""

import numpy as np

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.streams import fence, stream

_BLOCK = 1024  # words
_LINE = 8  # words


@helper
def _parts(worker, workers, source, target):
    """Return this worker's parts, both cut at cache lines."""
    a, z = share(worker, workers, source.size // _LINE)
    read = source[a * _LINE : z * _LINE]
    a, z = share(worker, workers, target.size // _LINE)
    return read, target[a * _LINE : z * _LINE]


@helper
def _checksum(words):
    total = np.uint64(0)
    for i in range(words.size):
        total ^= words[i]
    return total


@Kernel
def copy_plain(worker, workers, source, target):
    """Each worker copies its part with ordinary stores."""
    source, target = _parts(worker, workers, source, target)
    both = min(source.size, target.size)
    read, written, rest = source[:both], target[:both], target[both:]
    for i in range(both):
        written[i] = read[i] ^ np.uint64(1)  # not a plain copy, for which LLVM would call memcpy, which may stream
    for i in range(rest.size):
        rest[i] = np.uint64(i)
    return np.int64(_checksum(source[both:]) & np.uint64(1))


@Kernel
def copy_streaming(worker, workers, source, target):
    """Each worker copies its part with non-temporal stores. ``target`` starts at a cache line."""
    source, target = _parts(worker, workers, source, target)
    both = min(source.size, target.size)
    stream(source[:both], target[:both])
    for start in range(both, target.size, _BLOCK):
        part = target[start : min(start + _BLOCK, target.size)]
        stream(source[: part.size], part)  # from cache
    fence()
    return np.int64(_checksum(source[both:]) & np.uint64(1))
