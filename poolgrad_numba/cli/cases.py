"""Real input for the demo, and the four gradients that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import poolgrad_numba
from poolgrad_numba.bench import forward
from poolgrad_numba.cli import oracle
from poolgrad_numba.cli.common import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from poolgrad_numba import Plan

_MAX_WINDOW = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}
_AVERAGE_WINDOW = {"kernel_size": (3, 3, 3), "stride": (2, 2, 2), "padding": (1, 1, 1)}
# No multiples or divisors of the input's sizes, so that adaptive windows differ in size and overlap.
_PHOTOGRAPH_OUTPUT = (250, 210)
_SCAN_OUTPUT = (14, 60, 80)


class Case(NamedTuple):
    """One operator with the operands and parameters that the demo gives it.

    ``planned`` are the parameters as `make_plan` takes them, ``what`` describes the pooling in a few words, and
    ``expect`` works out the right answer.
    """

    operator: str
    what: str
    operands: tuple[Any, ...]
    parameters: dict[str, Any]
    planned: dict[str, Any]
    expect: Callable[[], oracle.Expected]

    def run(self, *, deterministic: bool, num_threads: int) -> NDArray[Any]:
        """Call the public function."""
        function = getattr(poolgrad_numba, self.operator)
        result: NDArray[Any] = function(
            *self.operands, **self.parameters, deterministic=deterministic, num_threads=num_threads
        )
        return result

    def plan(self, *, deterministic: bool, num_threads: int) -> Plan:
        """Give the plan that such a call uses."""
        return poolgrad_numba.make_plan(
            self.operator,
            input_shape=self.operands[1],
            dtype=self.operands[0].dtype,
            deterministic=deterministic,
            num_threads=num_threads,
            **self.planned,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that any implementation must read or write: grad_output, indices and the result."""
        inputs = [operand for operand in self.operands if isinstance(operand, np.ndarray)]
        return int(sum(array.nbytes for array in inputs) + np.prod(self.operands[1]) * inputs[0].itemsize)


def load_photograph() -> NDArray[np.float32]:
    """Read the photograph of Grace Hopper that ships with Matplotlib: (colours, H, W), 0 to 1."""
    from matplotlib import cbook, image  # noqa: PLC0415  (an extra)

    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    pixels = _shipped("photograph", Path(str(path)), image.imread)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), np.float32) / np.float32(255)


def load_scan() -> NDArray[np.float32]:
    """Read the magnetic resonance scan of a head that ships with NiBabel: (volumes, slices, H, W)."""
    import nibabel  # noqa: PLC0415  (an extra)

    path = Path(nibabel.__file__).parent / "tests" / "data" / "example4d.nii.gz"
    volumes = _shipped(
        "brain scan", path, lambda file: nibabel.Nifti1Image.from_filename(file).get_fdata(dtype=np.float32)
    )
    return np.ascontiguousarray(volumes.T, np.float32)


def _shipped(what: str, path: Path, read: Callable[[Path], NDArray[Any]]) -> NDArray[Any]:
    try:
        return read(path)
    except OSError as error:
        raise CommandError(f"cannot read the {what}, which should have come with its package: {error}") from error


def roughness_gradient(values: NDArray[Any]) -> NDArray[Any]:
    """Gradient of half the sum of squared differences between neighbours, along all axes but the first."""
    gradient = np.zeros_like(values)
    for axis in range(1, values.ndim):
        steps = np.diff(values, axis=axis)
        edge = [(0, 0)] * values.ndim
        edge[axis] = (1, 1)
        gradient -= np.diff(np.pad(steps, edge), axis=axis)
    return gradient


def make_cases(photograph: NDArray[Any], scan: NDArray[Any]) -> tuple[Case, ...]:
    """Pool the two inputs forward, and set up the four gradients."""
    size = photograph.shape[1:]
    sliding = _sliding(size, _MAX_WINDOW)
    adaptive = [forward.adaptive_axis(n, o) for n, o in zip(size, _PHOTOGRAPH_OUTPUT, strict=True)]
    adaptive_3d = [forward.adaptive_axis(n, o) for n, o in zip(scan.shape[1:], _SCAN_OUTPUT, strict=True)]
    average = roughness_gradient(forward.average_pool(scan, _sliding(scan.shape[1:], _AVERAGE_WINDOW)))
    volume, indices = forward.max_pool(scan, adaptive_3d)
    return (
        _max_case(
            "max_pool2d_with_indices_backward",
            "photograph, 3x3 windows, stride 2",
            (*forward.max_pool(photograph, sliding), photograph.shape),
            _MAX_WINDOW,
        ),
        _max_case(
            "adaptive_max_pool2d_backward",
            "photograph, adaptive windows",
            (*forward.max_pool(photograph, adaptive), photograph.shape),
        ),
        _max_case(
            "adaptive_max_pool3d_backward",
            "brain scan, adaptive windows",
            (roughness_gradient(volume), indices, scan.shape),
        ),
        Case(
            "avg_pool3d_backward",
            "brain scan, 3x3x3 windows, stride 2",
            (average, scan.shape),
            {**_AVERAGE_WINDOW, "count_include_pad": False},
            {**_AVERAGE_WINDOW, "count_include_pad": False},
            lambda: oracle.averaged(average, scan.shape, **_AVERAGE_WINDOW),
        ),
    )


def _sliding(size: Sequence[int], window: Mapping[str, tuple[int, ...]]) -> list[NDArray[np.int64]]:
    return [forward.sliding_axis(*axis) for axis in zip(size, *window.values(), strict=True)]


def _max_case(
    operator: str,
    what: str,
    operands: tuple[NDArray[Any], NDArray[np.int64], tuple[int, ...]],
    window: dict[str, Any] | None = None,
) -> Case:
    grad, indices, shape = operands
    planned = {"output_size": grad.shape[1:]} if window is None else window
    return Case(
        operator, what, (grad, shape, indices), window or {}, planned, lambda: oracle.indexed(grad, indices, shape)
    )
