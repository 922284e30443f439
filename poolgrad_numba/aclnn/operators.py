"""The operators: one declaration and two functions each, named and ordered as in C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from poolgrad_numba.aclnn.executor import Declaration, aclOpExecutor, execute, prepare

if TYPE_CHECKING:
    from poolgrad_numba.aclnn.runtime import aclrtStream

_FLOAT: Final = (np.dtype(np.float32),)
_FLOATS: Final = (*_FLOAT, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_INT32: Final = (np.dtype(np.int32),)
_INTS: Final = (*_INT32, np.dtype(np.int64))

_MAX2D: Final = Declaration(
    "aclnnMaxPool2dWithIndicesBackward", "max_pool2d_with_indices_backward", _FLOAT, _INT32
)  # fmt: skip
_ADAPTIVE2D: Final = Declaration("aclnnAdaptiveMaxPool2dBackward", "adaptive_max_pool2d_backward", _FLOATS, _INTS)
_ADAPTIVE3D: Final = Declaration("aclnnAdaptiveMaxPool3dBackward", "adaptive_max_pool3d_backward", _FLOATS, _INT32)
_AVG3D: Final = Declaration("aclnnAvgPool3dBackward", "avg_pool3d_backward", _FLOATS, result="output")

FirstPhase = tuple[int, aclOpExecutor | None, int]


def aclnnMaxPool2dWithIndicesBackwardGetWorkspaceSize(
    gradOutput: Any,
    self: Any,
    indices: Any,
    kernelSize: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceilMode: bool,
    gradInput: Any,
) -> FirstPhase:
    """First phase of the gradient of 2-d max pooling: check, latch the mode, and size the workspace.

    Parameters
    ----------
    gradOutput, self, indices, gradInput : aclTensor or ndarray
        (N, C, Ho, Wo), (N, C, H, W), as gradOutput, and as self; or all without N. FLOAT, and INT32 indices flat in
        their planes. Of ``self`` only shape and dtype count.
    kernelSize, stride, padding, dilation : aclIntArray or sequence of int
        Of 1 or 2 values. An empty ``stride`` is ``kernelSize``; ``padding`` is at most half of ``kernelSize``,
        ``dilation`` 1.
    ceilMode : bool
        Whether a last window may hang over the end.

    Returns
    -------
    workspaceSize, executor, status
        ``0, None`` and a status other than 0 for a bad argument; `aclGetRecentErrMsg` names it.
    """
    tensors = {"gradOutput": gradOutput, "self": self, "indices": indices, "gradInput": gradInput}
    arrays = {"kernelSize": kernelSize, "stride": stride, "padding": padding, "dilation": dilation}
    return prepare(_MAX2D, tensors, arrays, {"ceilMode": ceilMode})


def aclnnMaxPool2dWithIndicesBackward(
    workspace: Any, workspaceSize: int, executor: aclOpExecutor, stream: aclrtStream | None
) -> int:
    """Second phase: run, at once or in turn on a stream. Returns the status; see the first phase."""
    return execute(_MAX2D, workspace, workspaceSize, executor, stream)


def aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(
    gradOutput: Any, self: Any, indices: Any, gradInput: Any
) -> FirstPhase:
    """First phase of the gradient of 2-d adaptive max pooling: check, latch the mode, and size the workspace.

    Parameters
    ----------
    gradOutput, self, indices, gradInput : aclTensor or ndarray
        (N, C, Ho, Wo), (N, C, H, W), as gradOutput, and as self; or all without N. FLOAT, FLOAT16 or BF16, and INT32
        or INT64 indices flat in their planes. Of ``self`` only shape and dtype count.

    Returns
    -------
    workspaceSize, executor, status
        ``0, None`` and a status other than 0 for a bad argument; `aclGetRecentErrMsg` names it.
    """
    tensors = {"gradOutput": gradOutput, "self": self, "indices": indices, "gradInput": gradInput}
    return prepare(_ADAPTIVE2D, tensors)


def aclnnAdaptiveMaxPool2dBackward(
    workspace: Any, workspaceSize: int, executor: aclOpExecutor, stream: aclrtStream | None
) -> int:
    """Second phase: run, at once or in turn on a stream. Returns the status; see the first phase."""
    return execute(_ADAPTIVE2D, workspace, workspaceSize, executor, stream)


def aclnnAdaptiveMaxPool3dBackwardGetWorkspaceSize(
    gradOutput: Any, self: Any, indices: Any, gradInput: Any
) -> FirstPhase:
    """First phase of the gradient of 3-d adaptive max pooling: check, latch the mode, and size the workspace.

    Parameters
    ----------
    gradOutput, self, indices, gradInput : aclTensor or ndarray
        (N, C, Do, Ho, Wo), (N, C, D, H, W), as gradOutput, and as self; or all without N. FLOAT, FLOAT16 or BF16, and
        INT32 indices flat in their planes. Of ``self`` only shape and dtype count.

    Returns
    -------
    workspaceSize, executor, status
        ``0, None`` and a status other than 0 for a bad argument; `aclGetRecentErrMsg` names it.
    """
    tensors = {"gradOutput": gradOutput, "self": self, "indices": indices, "gradInput": gradInput}
    return prepare(_ADAPTIVE3D, tensors)


def aclnnAdaptiveMaxPool3dBackward(
    workspace: Any, workspaceSize: int, executor: aclOpExecutor, stream: aclrtStream | None
) -> int:
    """Second phase: run, at once or in turn on a stream. Returns the status; see the first phase."""
    return execute(_ADAPTIVE3D, workspace, workspaceSize, executor, stream)


def aclnnAvgPool3dBackwardGetWorkspaceSize(
    gradOutput: Any,
    self: Any,
    kernelSize: Any,
    stride: Any,
    padding: Any,
    ceilMode: bool,
    countIncludePad: bool,
    divisorOverride: int,
    output: Any,
) -> FirstPhase:
    """First phase of the gradient of 3-d average pooling: check, latch the mode, and size the workspace.

    Parameters
    ----------
    gradOutput, self, output : aclTensor or ndarray
        (N, C, Do, Ho, Wo), (N, C, D, H, W), and as self; or all without N. FLOAT, FLOAT16 or BF16. Of ``self`` only
        shape and dtype count.
    kernelSize, stride, padding : aclIntArray or sequence of int
        Of 1 or 3 values. An empty ``stride`` is ``kernelSize``; ``padding`` is at most half of ``kernelSize``.
    ceilMode, countIncludePad : bool
        Whether a last window may hang over the end; whether padding counts in the divisor.
    divisorOverride : int
        A divisor for all windows; 0 leaves it unset.

    Returns
    -------
    workspaceSize, executor, status
        ``0, None`` and a status other than 0 for a bad argument; `aclGetRecentErrMsg` names it.
    """
    tensors = {"gradOutput": gradOutput, "self": self, "output": output}
    arrays = {"kernelSize": kernelSize, "stride": stride, "padding": padding}
    scalars = {"ceilMode": ceilMode, "countIncludePad": countIncludePad, "divisorOverride": divisorOverride}
    return prepare(_AVG3D, tensors, arrays, scalars)


def aclnnAvgPool3dBackward(
    workspace: Any, workspaceSize: int, executor: aclOpExecutor, stream: aclrtStream | None
) -> int:
    """Second phase: run, at once or in turn on a stream. Returns the status; see the first phase."""
    return execute(_AVG3D, workspace, workspaceSize, executor, stream)
