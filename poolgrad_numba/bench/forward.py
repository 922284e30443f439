"""Forward pooling in plain NumPy, to make the operands of a gradient from real input."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from poolgrad_numba.geometry import adaptive_window, pooled_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


def sliding_axis(size: int, kernel: int, stride: int, padding: int) -> NDArray[np.int64]:
    """Cells of each window along an axis, (outputs, taps); -1 for a tap in the padding."""
    outputs = pooled_size(size, kernel, stride, padding, ceil_mode=False)
    cells = np.arange(outputs)[:, None] * stride - padding + np.arange(kernel)
    return np.where((cells >= 0) & (cells < size), cells, -1)


def adaptive_axis(size: int, outputs: int) -> NDArray[np.int64]:
    """Cells of each adaptive window along an axis, (outputs, taps); -1 for a tap past the end of a shorter window."""
    bounds = np.array([adaptive_window(o, size, outputs) for o in range(outputs)])
    starts, ends = bounds[:, :1], bounds[:, 1:]
    cells = starts + np.arange((ends - starts).max())
    return np.where(cells < ends, cells, -1)


def max_pool(values: NDArray[Any], axes: Sequence[NDArray[np.int64]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Pool the last ``len(axes)`` axes: the largest value of each window, and its flat index inside the plane.

    Of equal values the first in row-major order counts, of NaN the last, as PyTorch has it: taps are visited in that
    order, and a larger value or a NaN takes over.
    """
    size = values.shape[-len(axes) :]
    planes = values.reshape(*values.shape[: -len(axes)], math.prod(size))
    shape = (*planes.shape[:-1], *(len(axis) for axis in axes))
    best = np.full(shape, -np.inf, values.dtype)
    where = np.full(shape, -1)
    for flat, inside in _taps(axes, size):
        found = planes[..., flat]
        takes = inside & ((found > best) | np.isnan(found) | (where < 0))
        best = np.where(takes, found, best)
        where = np.where(takes, flat, where)
    return best, where


def average_pool(values: NDArray[Any], axes: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """Pool the last ``len(axes)`` axes: the mean of each window's cells, those in the padding left out."""
    size = values.shape[-len(axes) :]
    planes = values.reshape(*values.shape[: -len(axes)], math.prod(size))
    total = np.zeros((*planes.shape[:-1], *(len(axis) for axis in axes)), values.dtype)
    cells = np.zeros(total.shape[-len(axes) :], values.dtype)
    for flat, inside in _taps(axes, size):
        total += np.where(inside, planes[..., flat], 0)
        cells += inside
    return total / cells


def _taps(
    axes: Sequence[NDArray[np.int64]], size: Sequence[int]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Visit the taps of all windows at once, in row-major order: each window's cell, and whether it has one."""
    for taps in product(*(range(axis.shape[1]) for axis in axes)):
        cells = np.meshgrid(*(axis[:, tap] for axis, tap in zip(axes, taps, strict=True)), indexing="ij")
        inside = np.logical_and.reduce([cell >= 0 for cell in cells])
        yield np.ravel_multi_index(cells, tuple(size), mode="wrap").astype(np.int64), inside
