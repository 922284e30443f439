"""Gradients of average pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poolgrad_numba.ops import averaged
from poolgrad_numba.plan import Operator, apply, register
from poolgrad_numba.problem import Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

_AVG_POOL3D = register(
    Operator(
        Signature(
            "avg_pool3d_backward",
            3,
            indexed=False,
            parameters=("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
        ),
        "aclnnAvgPool3dBackward",
        fast=averaged.FAST,
        deterministic=averaged.DETERMINISTIC,
    )
)


def avg_pool3d_backward(
    grad_output: ArrayLike,
    input_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: NDArray[Any] | None = None,
    deterministic: bool | None = None,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """Gradient of 3-d average pooling: each output's gradient is shared equally by the cells of its window.

    ``grad_input[n, c, window(o)] += grad_output[n, c, o] / divisor(o)`` over the outputs ``o`` of each plane.

    Parameters
    ----------
    grad_output : array_like, (N, C, Do, Ho, Wo) or (C, Do, Ho, Wo)
        float32, float64, float16 or bfloat16 (``ml_dtypes``); any strides.
    input_shape : sequence of int
        (N, C, D, H, W) or (C, D, H, W), of the forward's input.
    kernel_size, stride, padding : int or sequence of int
        The window, in cells; one value for all axes or one for each. ``stride`` is ``kernel_size`` if not given.
    ceil_mode : bool
        Whether a last window may hang over the end. The overhang never counts in the divisor.
    count_include_pad : bool
        Whether cells of the padding count in the divisor.
    divisor_override : int, optional
        A divisor for all windows; may be negative, not 0.
    out : ndarray, optional
        Where to put the result; of ``input_shape`` and ``grad_output``'s dtype, sharing no memory with an input.
    deterministic : bool, optional
        ``True``: the same bits always. ``False``: fast. Otherwise as `config_context`, `set_config` or the
        environment say; fast in the end.
    num_threads : int, optional
        The most threads to use; likewise.

    Returns
    -------
    ndarray
        ``grad_input``, of ``input_shape`` and ``grad_output``'s dtype; 16-bit sums are kept in float32 and rounded
        once.

    Raises
    ------
    PoolGradValueError
        A parameter out of range, or shapes that do not fit together.
    PoolGradTypeError
        A dtype that is not listed above, or a parameter that is no integer.

    Notes
    -----
    The definition is that of ``torch.ops.aten.avg_pool3d_backward`` and ``aclnnAvgPool3dBackward``.

    Examples
    --------
    >>> import numpy as np, poolgrad_numba as pg
    >>> grad = np.ones((1, 1, 1, 3), np.float32)
    >>> pg.avg_pool3d_backward(grad, (1, 1, 1, 5), kernel_size=(1, 1, 2), ceil_mode=True).ravel()
    array([0.5, 0.5, 0.5, 0.5, 1. ], dtype=float32)
    """
    parameters = {
        "kernel_size": kernel_size,
        "stride": stride,
        "padding": padding,
        "ceil_mode": ceil_mode,
        "count_include_pad": count_include_pad,
        "divisor_override": divisor_override,
    }
    return apply(_AVG_POOL3D, grad_output, None, input_shape, parameters, out, (deterministic, num_threads))
