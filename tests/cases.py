"""Named cases, shared by tests and benchmarks: what is timed is what is checked.

A name says the corner. ``small`` cases run through the naive oracle in the tests; the others are for benchmarks.
"""

from dataclasses import dataclass, field

import numpy as np

import reference
from poolgrad_numba.bench import cases as speed

MAX2D = "max_pool2d_with_indices_backward"
ADAPTIVE2D = "adaptive_max_pool2d_backward"
ADAPTIVE3D = "adaptive_max_pool3d_backward"
AVG3D = "avg_pool3d_backward"
OPERATORS = (MAX2D, ADAPTIVE2D, ADAPTIVE3D, AVG3D)

DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), reference.BFLOAT16)
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True)
class Case:
    name: str
    operator: str
    input_shape: tuple[int, ...]
    parameters: dict = field(default_factory=dict, hash=False)
    output_size: tuple[int, ...] = ()  # adaptive operators only
    small: bool = True

    @property
    def spatial(self):
        return int(self.operator[self.operator.index("d_") - 1])

    @property
    def indexed(self):
        return "max" in self.operator

    @property
    def output_shape(self):
        if self.output_size:
            return self.input_shape[: -self.spatial] + self.output_size
        p = self.parameters
        per_axis = [
            reference.as_axes(value, self.spatial)
            for value in (
                p["kernel_size"],
                p.get("stride") or p["kernel_size"],
                p.get("padding", 0),
                p.get("dilation", 1),
                p.get("ceil_mode", False),
            )
        ]
        sizes = (
            reference.pooled_size(*axis) for axis in zip(self.input_shape[-self.spatial :], *per_axis, strict=True)
        )
        return self.input_shape[: -self.spatial] + tuple(sizes)

    @property
    def plan_parameters(self):
        """Keywords of ``make_plan`` beyond shape, dtypes and mode."""
        return {"output_size": self.output_size} if self.output_size else self.parameters

    def gradient(self, dtype=np.float32, seed=0):
        """Small integers: sums are exact in every dtype, so results compare with ==."""
        return np.random.default_rng(seed).integers(-4, 5, self.output_shape).astype(dtype)

    def rough_gradient(self, dtype=np.float32, seed=0):
        """Values of many magnitudes: sums round, so their order shows in the bits."""
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(self.output_shape) * 2.0 ** rng.integers(-6, 7, self.output_shape)
        return values.astype(dtype)

    def indices(self, dtype=np.int64, seed=0):
        """Indices that a real forward makes; ``None`` for averages."""
        if not self.indexed:
            return None
        x = (
            np.random.default_rng(seed)
            .integers(0, 50, self.input_shape)
            .reshape(-1, *self.input_shape[-self.spatial :])
        )
        if self.output_size:
            found = reference.adaptive_max_pool_indices(x, self.output_size)
        else:
            found = reference.max_pool_indices(x, **self.parameters)
        return found.reshape(self.output_shape).astype(dtype)

    def wild_indices(self, dtype=np.int64, seed=0):
        """Legal indices that no forward makes."""
        if not self.indexed:
            return None
        cells = int(np.prod(self.input_shape[-self.spatial :]))
        return np.random.default_rng(seed).integers(0, cells, self.output_shape).astype(dtype)

    def operands(self, grad, indices):
        """Positional arguments of the public function."""
        return (grad, self.input_shape, indices) if self.indexed else (grad, self.input_shape)


def _max2d(name, shape, kernel_size, stride=None, padding=0, dilation=1, *, ceil_mode=False, small=True):
    parameters = {
        "kernel_size": kernel_size,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": ceil_mode,
    }
    return Case(name, MAX2D, shape, parameters, small=small)


def _avg3d(name, shape, kernel_size, stride=None, padding=0, *, small=True, **more):
    return Case(
        name, AVG3D, shape, {"kernel_size": kernel_size, "stride": stride, "padding": padding, **more}, small=small
    )


def _large(case):
    return Case(case.name, case.operator, case.input_shape, dict(case.parameters), case.output_size, small=False)


CASES = (
    _max2d("max_overlapping", (2, 3, 9, 8), 3, 2, 1),
    _max2d("max_disjoint", (2, 3, 8, 6), 2),
    _max2d("max_unbatched", (3, 7, 9), 3, 1),
    _max2d("max_asymmetric", (2, 2, 11, 17), (2, 5), (3, 2), (1, 2)),
    _max2d("max_dilated", (1, 2, 13, 12), 3, 2, 1, 2),
    _max2d("max_ceil", (1, 3, 8, 7), 3, 2, 0, ceil_mode=True),
    _max2d("max_gaps", (1, 2, 12, 13), 2, 5),
    _max2d("max_one_cell", (2, 1, 1, 1), 1),
    _max2d("max_one_plane", (1, 1, 70, 81), 3, 1, 1),
    Case("adaptive2d_divisible", ADAPTIVE2D, (2, 3, 8, 12), output_size=(4, 3)),
    Case("adaptive2d_ragged", ADAPTIVE2D, (2, 3, 11, 7), output_size=(4, 5)),
    Case("adaptive2d_global", ADAPTIVE2D, (3, 9, 10), output_size=(1, 1)),
    Case("adaptive2d_enlarging", ADAPTIVE2D, (1, 2, 3, 4), output_size=(7, 9)),
    Case("adaptive2d_one_plane", ADAPTIVE2D, (1, 1, 90, 75), output_size=(31, 33)),
    Case("adaptive3d_divisible", ADAPTIVE3D, (2, 2, 4, 6, 8), output_size=(2, 3, 2)),
    Case("adaptive3d_ragged", ADAPTIVE3D, (2, 2, 5, 7, 6), output_size=(2, 3, 5)),
    Case("adaptive3d_unbatched", ADAPTIVE3D, (3, 4, 5, 6), output_size=(3, 2, 4)),
    Case("adaptive3d_enlarging", ADAPTIVE3D, (1, 1, 2, 3, 2), output_size=(5, 4, 3)),
    Case("adaptive3d_one_plane", ADAPTIVE3D, (1, 1, 13, 21, 22), output_size=(7, 9, 8)),
    _avg3d("avg_overlapping", (2, 2, 5, 6, 7), 3, 1, 1),
    _avg3d("avg_strided", (2, 2, 7, 9, 8), 3, 2, 1),
    _avg3d("avg_disjoint", (1, 3, 4, 6, 8), 2),
    _avg3d("avg_unbatched", (3, 4, 5, 6), 2, 1),
    _avg3d("avg_asymmetric", (1, 2, 6, 9, 11), (2, 3, 5), (1, 2, 3), (1, 0, 2)),
    _avg3d("avg_asymmetric_nopad", (1, 2, 6, 9, 11), (2, 3, 5), (1, 2, 3), (1, 0, 2), count_include_pad=False),
    _avg3d("avg_ceil", (1, 2, 6, 7, 8), 3, 2, 1, ceil_mode=True),
    _avg3d("avg_ceil_nopad", (1, 2, 6, 7, 8), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    _avg3d("avg_divisor", (1, 2, 5, 6, 7), 3, 2, 1, divisor_override=-7),
    _avg3d("avg_gaps", (1, 2, 7, 8, 9), 1, 3),
    _avg3d("avg_global", (2, 2, 3, 4, 5), (3, 4, 5)),
    _avg3d("avg_window_longer_than_output", (1, 1, 3, 4, 40), (2, 3, 21), 1, (1, 1, 10)),
    _avg3d("avg_one_plane", (1, 1, 9, 17, 33), 3, 1, 1),
    _avg3d("avg_long_row", (1, 1, 1, 2, 9001), (1, 1, 3), (1, 1, 2), (0, 0, 1)),
    *(_large(case) for case in speed.BASE_CASES),
)  # fmt: skip

SMALL_CASES = tuple(case for case in CASES if case.small)
LARGE_CASES = tuple(case for case in CASES if not case.small)
