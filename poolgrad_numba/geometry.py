"""Pure integer arithmetic of pooling: output sizes and window bounds, one axis at a time."""

from __future__ import annotations


def effective_kernel(kernel: int, dilation: int) -> int:
    """Cells that a dilated window spans."""
    return dilation * (kernel - 1) + 1


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, *, ceil_mode: bool) -> int:
    """Windows along one axis of ``size`` cells; below 1 where none fits.

    With ``ceil_mode`` a last window may hang over the end, but it must start inside the input or its
    leading padding.
    """
    room = size + 2 * padding - effective_kernel(kernel, dilation)
    outputs = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (outputs - 1) * stride >= size + padding:
        outputs -= 1
    return outputs


def adaptive_window(o: int, size: int, outputs: int) -> tuple[int, int]:
    """First and past-the-last cell of adaptive window ``o``: floor(o*size/outputs), ceil((o+1)*size/outputs)."""
    return o * size // outputs, -((o + 1) * size // -outputs)
