"""What the operators must give, by plain loops over the outputs; shares no code with the kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


class Expected(NamedTuple):
    """The right answer for a gradient.

    Attributes
    ----------
    canonical : ndarray
        Terms added in the values' own dtype, in ascending flat output index: the bits of deterministic mode.
    exact : ndarray of float64
        The same sums in float64.
    bound : ndarray of float64
        How far fast mode may be from them: ``(n + 1) * eps`` times the sum of the magnitudes of a cell's ``n`` terms.
    """

    canonical: NDArray[Any]
    exact: NDArray[np.float64]
    bound: NDArray[np.float64]

    def holds(self, result: NDArray[Any], *, deterministic: bool) -> bool:
        """Whether a result keeps what its mode promises."""
        if result.shape != self.canonical.shape or result.dtype != self.canonical.dtype:
            return False
        if deterministic:
            return result.tobytes() == self.canonical.tobytes()
        return bool(np.all(np.abs(result - self.exact) <= self.bound))

    def difference(self, result: NDArray[Any]) -> float:
        """Largest difference of a result from the canonical one."""
        return float(np.max(np.abs(result.astype(np.float64) - self.canonical)))


def indexed(grad: NDArray[Any], indices: NDArray[np.int64], input_shape: Sequence[int]) -> Expected:
    """Gradient of max pooling, (C, spatial...): each output is added to the cell that its index names."""
    channels, size = input_shape[0], input_shape[1:]
    every = np.arange(channels)
    terms = grad.reshape(channels, -1).T
    places = ((every, cells) for cells in indices.reshape(channels, -1).T)
    parts = _accumulate(terms, terms.astype(np.float64), places, (channels, math.prod(size)))
    return Expected(*(part.reshape(input_shape) for part in parts))


def averaged(
    grad: NDArray[Any],
    input_shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Expected:
    """Gradient of average pooling, (C, spatial...), with padding that does not count in the divisor."""
    places, divisors = [], []
    for output in np.ndindex(grad.shape[1:]):
        window = []
        for o, size, k, s, p in zip(output, input_shape[1:], kernel_size, stride, padding, strict=True):
            window.append(slice(max(o * s - p, 0), min(o * s - p + k, size)))
        places.append((slice(None), *window))
        divisors.append(math.prod(cells.stop - cells.start for cells in window))
    column = (len(divisors),) + (1,) * grad.ndim
    divisor = np.array(divisors).reshape(column)
    terms = grad.reshape(grad.shape[0], -1).T.reshape(len(divisors), grad.shape[0], *column[2:])
    return _accumulate(terms / divisor.astype(grad.dtype), terms / divisor, places, input_shape)


def _accumulate(
    terms: NDArray[Any], exact: NDArray[Any], places: Iterable[tuple[Any, ...]], shape: Sequence[int]
) -> Expected:
    """Add one output's terms after the other to its place: in the terms' dtype, and the exact ones in float64."""
    canonical = np.zeros(shape, terms.dtype)
    sums, magnitudes, counts = np.zeros((3, *shape))
    for place, term, value in zip(places, terms, exact, strict=True):
        canonical[place] += term
        sums[place] += value
        magnitudes[place] += abs(value)
        counts[place] += 1
    return Expected(canonical, sums, (counts + 1) * np.finfo(terms.dtype).eps * magnitudes)
