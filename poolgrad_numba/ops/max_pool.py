"""Gradients of max pooling and adaptive max pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poolgrad_numba.ops import indexed
from poolgrad_numba.plan import Operator, apply, register
from poolgrad_numba.problem import Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


def _declare(name: str, aclnn: str, spatial: int, parameters: tuple[str, ...] = ()) -> Operator:
    signature = Signature(name, spatial, indexed=True, adaptive=not parameters, parameters=parameters)
    return register(Operator(signature, aclnn, fast=indexed.FAST, deterministic=indexed.DETERMINISTIC))


_MAX_POOL2D = _declare(
    "max_pool2d_with_indices_backward",
    "aclnnMaxPool2dWithIndicesBackward",
    2,
    ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
)
_ADAPTIVE_MAX_POOL2D = _declare("adaptive_max_pool2d_backward", "aclnnAdaptiveMaxPool2dBackward", 2)
_ADAPTIVE_MAX_POOL3D = _declare("adaptive_max_pool3d_backward", "aclnnAdaptiveMaxPool3dBackward", 3)


def max_pool2d_with_indices_backward(
    grad_output: ArrayLike,
    input_shape: Sequence[int],
    indices: ArrayLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    out: NDArray[Any] | None = None,
    deterministic: bool | None = None,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """Gradient of 2-d max pooling: each output's gradient goes to the input cell that its index names.

    ``grad_input[n, c, indices[n, c, o]] += grad_output[n, c, o]`` over the flat outputs ``o`` of each plane.

    Parameters
    ----------
    grad_output : array_like, (N, C, Ho, Wo) or (C, Ho, Wo)
        float32, float64, float16 or bfloat16 (``ml_dtypes``); any strides.
    input_shape : sequence of int
        (N, C, H, W) or (C, H, W), of the forward's input.
    indices : array_like of int32 or int64
        ``grad_output``'s shape; each is ``h*W + w`` inside its own plane. Any cell of the plane counts, also one
        outside the output's window.
    kernel_size, stride, padding, dilation : int or sequence of int
        The window, in cells; one value for both axes or one for each. ``stride`` is ``kernel_size`` if not given.
        They only decide which shape ``grad_output`` must have.
    ceil_mode : bool
        Whether a last window may hang over the end.
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
    PoolGradIndexError
        An index outside its plane; the first in row-major order is named.

    Notes
    -----
    The definition is that of ``torch.ops.aten.max_pool2d_with_indices_backward`` and
    ``aclnnMaxPool2dWithIndicesBackward``.

    Examples
    --------
    >>> import numpy as np, poolgrad_numba as pg
    >>> grad = np.float32([[[1, 2], [3, 4]]])
    >>> indices = np.array([[[5, 6], [9, 15]]])
    >>> pg.max_pool2d_with_indices_backward(grad, (1, 4, 4), indices, kernel_size=2)
    array([[[0., 0., 0., 0.],
            [0., 1., 2., 0.],
            [0., 3., 0., 0.],
            [0., 0., 0., 4.]]], dtype=float32)
    """
    parameters = {
        "kernel_size": kernel_size,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": ceil_mode,
    }
    return apply(_MAX_POOL2D, grad_output, indices, input_shape, parameters, out, (deterministic, num_threads))


def adaptive_max_pool2d_backward(
    grad_output: ArrayLike,
    input_shape: Sequence[int],
    indices: ArrayLike,
    *,
    out: NDArray[Any] | None = None,
    deterministic: bool | None = None,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """Gradient of 2-d adaptive max pooling: each output's gradient goes to the input cell that its index names.

    ``grad_input[n, c, indices[n, c, o]] += grad_output[n, c, o]`` over the flat outputs ``o`` of each plane.

    Parameters
    ----------
    grad_output : array_like, (N, C, Ho, Wo) or (C, Ho, Wo)
        float32, float64, float16 or bfloat16 (``ml_dtypes``); any strides. ``Ho`` and ``Wo`` may be any sizes, also
        0 or more than the input's.
    input_shape : sequence of int
        (N, C, H, W) or (C, H, W), of the forward's input.
    indices : array_like of int32 or int64
        ``grad_output``'s shape; each is ``h*W + w`` inside its own plane.
    out, deterministic, num_threads
        As in `max_pool2d_with_indices_backward`.

    Returns
    -------
    ndarray
        ``grad_input``, of ``input_shape`` and ``grad_output``'s dtype.

    Raises
    ------
    PoolGradValueError, PoolGradTypeError, PoolGradIndexError
        As in `max_pool2d_with_indices_backward`.

    Notes
    -----
    The definition is that of ``torch.ops.aten.adaptive_max_pool2d_backward`` and
    ``aclnnAdaptiveMaxPool2dBackward``.

    Examples
    --------
    >>> import numpy as np, poolgrad_numba as pg
    >>> grad = np.float32([[[1, 10, 100]]])
    >>> pg.adaptive_max_pool2d_backward(grad, (1, 1, 5), np.array([[[1, 1, 3]]]))
    array([[[  0.,  11.,   0., 100.,   0.]]], dtype=float32)
    """
    return apply(_ADAPTIVE_MAX_POOL2D, grad_output, indices, input_shape, {}, out, (deterministic, num_threads))


def adaptive_max_pool3d_backward(
    grad_output: ArrayLike,
    input_shape: Sequence[int],
    indices: ArrayLike,
    *,
    out: NDArray[Any] | None = None,
    deterministic: bool | None = None,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """Gradient of 3-d adaptive max pooling: each output's gradient goes to the input cell that its index names.

    ``grad_input[n, c, indices[n, c, o]] += grad_output[n, c, o]`` over the flat outputs ``o`` of each plane.

    Parameters
    ----------
    grad_output : array_like, (N, C, Do, Ho, Wo) or (C, Do, Ho, Wo)
        float32, float64, float16 or bfloat16 (``ml_dtypes``); any strides. The spatial sizes may be any, also 0 or
        more than the input's.
    input_shape : sequence of int
        (N, C, D, H, W) or (C, D, H, W), of the forward's input.
    indices : array_like of int32 or int64
        ``grad_output``'s shape; each is ``(d*H + h)*W + w`` inside its own plane.
    out, deterministic, num_threads
        As in `max_pool2d_with_indices_backward`.

    Returns
    -------
    ndarray
        ``grad_input``, of ``input_shape`` and ``grad_output``'s dtype.

    Raises
    ------
    PoolGradValueError, PoolGradTypeError, PoolGradIndexError
        As in `max_pool2d_with_indices_backward`.

    Notes
    -----
    The definition is that of ``torch.ops.aten.adaptive_max_pool3d_backward`` and
    ``aclnnAdaptiveMaxPool3dBackward``.

    Examples
    --------
    >>> import numpy as np, poolgrad_numba as pg
    >>> grad = np.ones((1, 1, 1, 2), np.float32)
    >>> pg.adaptive_max_pool3d_backward(grad, (1, 2, 1, 2), np.array([[[[3, 3]]]])).ravel()
    array([0., 0., 0., 2.], dtype=float32)
    """
    return apply(_ADAPTIVE_MAX_POOL3D, grad_output, indices, input_shape, {}, out, (deterministic, num_threads))
