"""The picture of the demo: each input beside its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poolgrad_numba.cli.common import write_safely

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from poolgrad_numba.cli.cases import Case


def save(
    path: Path,
    inputs: tuple[NDArray[Any], NDArray[Any]],
    cases: Sequence[Case],
    gradients: Sequence[NDArray[Any]],
) -> None:
    """Draw the photograph and its two gradients above a slice of the scan and its two, and write a PNG file."""
    photograph, scan = inputs
    middle = scan.shape[1] // 2
    ratios = [image.shape[-2] / image.shape[-1] for image in inputs]
    figure = Figure(figsize=(13, 4.2 * sum(ratios) + 1.5), layout="compressed")
    FigureCanvasAgg(figure)  # no window system is needed
    axes = figure.subplots(2, 3, height_ratios=ratios)

    axes[0, 0].imshow(photograph.transpose(1, 2, 0))
    axes[0, 0].set_title("photograph\nthe input", loc="left")
    axes[1, 0].imshow(scan[0, middle], cmap="gray", origin="lower")
    axes[1, 0].set_title(f"brain scan\nthe input, slice {middle + 1} of {scan.shape[1]}", loc="left")
    for axis, gradient in zip(axes[0, 1:], gradients[:2], strict=True):
        axis.imshow(np.clip(gradient / _scale(gradient, 0.8), 0, 1).transpose(1, 2, 0))
    maps = (gradients[2][0].sum(axis=0), gradients[3][0, middle])
    for axis, gradient in zip(axes[1, 1:], maps, strict=True):
        limit = _scale(gradient, 0.98)
        axis.imshow(gradient, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower")
    notes = (
        "gradient: one pixel of each window",
        "gradient: one pixel of each window",
        "gradient, sum over slices: red > 0, blue < 0",
        "gradient, same slice: red > 0, blue < 0",
    )
    for axis, case, note in zip([*axes[0, 1:], *axes[1, 1:]], cases, notes, strict=True):
        axis.set_title(f"{case.operator}\n{note}", loc="left")
    for axis in axes.flat:
        axis.set_axis_off()
    write_safely(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _scale(gradient: NDArray[Any], share: float) -> float:
    """The magnitude that this share of the non-zero cells stays below."""
    magnitudes = np.abs(gradient[gradient != 0])
    return float(np.quantile(magnitudes, share)) if magnitudes.size else 1.0
