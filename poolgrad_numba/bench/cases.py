"""The speed cases as data: what is timed, and what the tests' table of large cases is made from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poolgrad_numba import OPS, make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poolgrad_numba import Plan

MAX2D: Final = "max_pool2d_with_indices_backward"
ADAPTIVE2D: Final = "adaptive_max_pool2d_backward"
ADAPTIVE3D: Final = "adaptive_max_pool3d_backward"
AVG3D: Final = "avg_pool3d_backward"

CONTIGUOUS: Final = "contiguous"
CHANNELS_LAST: Final = "channels_last"


@dataclass(frozen=True)
class SpeedCase:
    """A problem to time; variants of one problem share its name.

    Attributes
    ----------
    name : str
        Says where the problem comes from, or its corner.
    operator : str
        Name of the public function.
    input_shape : tuple of int
        (N, C, spatial...).
    parameters : mapping
        The operator's own keywords.
    output_size : tuple of int
        For an adaptive operator, which has no parameters.
    dtype, index_dtype : str
        Of the values and of the indices; an average's index dtype is ``None``.
    layout : str
        ``contiguous``, or ``channels_last``: all operands are views of arrays with the channels innermost.
    """

    name: str
    operator: str
    input_shape: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    output_size: tuple[int, ...] = ()
    dtype: str = "float32"
    index_dtype: str | None = "int64"
    layout: str = CONTIGUOUS

    @property
    def indexed(self) -> bool:
        """Whether the operator takes indices."""
        return OPS[self.operator].signature.indexed

    @property
    def spatial(self) -> int:
        """How many axes are pooled."""
        return OPS[self.operator].signature.spatial

    def plan(self, *, deterministic: bool, num_threads: int | None) -> Plan:
        """Plan the case."""
        options = {"output_size": self.output_size} if self.output_size else self.parameters
        return make_plan(
            self.operator,
            input_shape=self.input_shape,
            dtype=self.dtype,
            index_dtype=self.index_dtype,
            deterministic=deterministic,
            num_threads=num_threads,
            **options,
        )


def _window(kernel_size: int, stride: int, padding: int = 0, **more: Any) -> dict[str, Any]:
    return {"kernel_size": kernel_size, "stride": stride, "padding": padding, **more}


def _average(name: str, shape: tuple[int, ...], parameters: dict[str, Any]) -> SpeedCase:
    return SpeedCase(name, AVG3D, shape, parameters, index_dtype=None)


_PLANE = (1, 1, 4096, 4096)
_VIDEO = (2, 64, 16, 56, 56)
_VOLUME = (1, 1, 128, 128, 128)

BASE_CASES: Final = (
    SpeedCase("resnet_stem", MAX2D, (32, 64, 112, 112), _window(3, 2, 1)),
    SpeedCase("vgg", MAX2D, (16, 64, 224, 224), _window(2, 2)),
    SpeedCase("sppf5", MAX2D, (8, 256, 40, 40), _window(5, 1, 2)),
    SpeedCase("sppf13", MAX2D, (8, 256, 40, 40), _window(13, 1, 6)),
    SpeedCase("one_plane", MAX2D, _PLANE, _window(3, 1, 1)),
    SpeedCase("one_plane_s2", MAX2D, _PLANE, _window(3, 2, 1), index_dtype="int32"),
    SpeedCase("adaptive_head", ADAPTIVE2D, (32, 512, 14, 14), output_size=(7, 7)),
    SpeedCase("adaptive_ragged", ADAPTIVE2D, (8, 256, 57, 57), output_size=(7, 7)),
    SpeedCase("adaptive3d_video", ADAPTIVE3D, (4, 64, 16, 56, 56), output_size=(8, 7, 7)),
    _average("avg_video", _VIDEO, _window(3, 1, 1)),
    _average("avg_video_s2", _VIDEO, _window(3, 2, 1)),
    _average("avg_video_s2_nopad", _VIDEO, _window(3, 2, 1, count_include_pad=False)),
    _average("avg_disjoint", _VIDEO, _window(2, 2)),
    _average("avg_volume", _VOLUME, _window(7, 1, 3)),
    _average("avg_volume_k3", _VOLUME, _window(3, 1, 1)),
    _average("avg_volume_k5", (4, 8, 64, 64, 64), _window(5, 1, 2)),
    SpeedCase("tiny", MAX2D, (1, 16, 28, 28), _window(2, 2)),
)
BY_NAME: Final = {case.name: case for case in BASE_CASES}

VARIANTS: Final = (
    *(
        replace(BY_NAME[name], **change)  # type: ignore[arg-type]
        for name in ("resnet_stem", "avg_video")
        for change in ({"dtype": "float16"}, {"dtype": "bfloat16"}, {"layout": CHANNELS_LAST})
    ),
    replace(BY_NAME["resnet_stem"], index_dtype="int32"),
)
CASES: Final = (*BASE_CASES, *VARIANTS)

# One case for each operator.
QUICK: Final = ("tiny", "adaptive_head", "adaptive3d_video", "avg_disjoint")
COLD: Final = ("resnet_stem", "adaptive_head", "adaptive3d_video", "avg_video")
