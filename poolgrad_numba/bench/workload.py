"""The arrays that a case runs on: operands, result, and what a copy of as many bytes needs."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.bench import forward
from poolgrad_numba.bench.cases import CHANNELS_LAST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poolgrad_numba.bench.cases import SpeedCase

_DISTINCT: Final = 2**19  # cells of the forward's input; more planes than that holds repeat it, as it takes seconds
_LINE: Final = 64  # bytes of a cache line, at which the copies' target starts
_WORD: Final = np.dtype(np.uint64)


class Workload:
    """Operands of a case, made from normal data; ``out`` and the copies' arrays are shared by those who take turns.

    Attributes
    ----------
    grad, indices : ndarray
        ``indices`` is ``None`` for an average.
    out : ndarray
        A result array, as NumPy allocates it.
    sample : ndarray
        The forward's input, the first planes of it; all others repeat them.
    """

    def __init__(self, case: SpeedCase) -> None:
        self.case = case
        plan = case.plan(deterministic=True, num_threads=1)
        self.dtype = plan.problem.dtype
        rng = np.random.default_rng(0)
        self.grad = self.arranged(rng.standard_normal(plan.output_shape, np.float32).astype(self.dtype))
        self.out = self.arranged(np.zeros(case.input_shape, self.dtype))
        size = case.input_shape[-case.spatial :]
        planes = math.prod(case.input_shape[: -case.spatial])
        self.sample = rng.standard_normal((min(planes, -(-_DISTINCT // math.prod(size))), *size), np.float32)
        self.indices: NDArray[Any] | None = None
        if case.indexed:
            found = forward.max_pool(self.sample, _windows(case, plan.output_shape[-case.spatial :]))[1]
            self.indices = self.arranged(np.resize(found, plan.output_shape).astype(case.index_dtype))

    def arranged(self, array: NDArray[Any]) -> NDArray[Any]:
        """Give the array in the case's layout."""
        if self.case.layout != CHANNELS_LAST:
            return np.ascontiguousarray(array)
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)

    @property
    def operands(self) -> tuple[NDArray[Any], ...]:
        """What a plan's run takes."""
        return (self.grad,) if self.indices is None else (self.grad, self.indices)

    @property
    def bytes_moved(self) -> int:
        """Bytes of the inputs and of the result."""
        return sum(array.nbytes for array in (*self.operands, self.out))

    @cached_property
    def expected(self) -> NDArray[np.float32]:
        """The deterministic result."""
        plan = self.case.plan(deterministic=True, num_threads=1)
        return plan.run(*self.operands).astype(np.float32)

    @cached_property
    def copied(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Source and target of a copy: as many bytes as the operands have, and as the result has."""
        source = sum(array.nbytes for array in self.operands)
        # Written, as pages that never were are all the same page, which would be read from cache.
        return np.ones(_words(source), _WORD), _aligned_words(_words(self.out.nbytes))


def _windows(case: SpeedCase, outputs: Sequence[int]) -> list[NDArray[np.int64]]:
    size = case.input_shape[-case.spatial :]
    if case.output_size:
        return [forward.adaptive_axis(*axis) for axis in zip(size, outputs, strict=True)]
    window = (case.parameters[name] for name in ("kernel_size", "stride", "padding"))
    per_axis = zip(size, *([value] * case.spatial for value in window), strict=True)
    return [forward.sliding_axis(*axis) for axis in per_axis]


def _words(size: int) -> int:
    return -(-size // _WORD.itemsize)


def _aligned_words(words: int) -> NDArray[np.uint64]:
    room = np.ones(words + _LINE // _WORD.itemsize, _WORD)
    start = -room.ctypes.data % _LINE // _WORD.itemsize
    return room[start : start + words]
