"""The two-phase face: the accelerator's call sequence, line by line, on a CPU.

C's names are kept; what C gives back through pointers is returned as ``value..., status``, the status last. Nothing
here raises for a bad argument: it returns a status, and `aclGetRecentErrMsg` gives the text.
"""

from poolgrad_numba.aclnn.executor import aclDestroyAclOpExecutor, aclOpExecutor, aclSetAclOpExecutorRepeatable
from poolgrad_numba.aclnn.operators import (
    aclnnAdaptiveMaxPool2dBackward,
    aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize,
    aclnnAdaptiveMaxPool3dBackward,
    aclnnAdaptiveMaxPool3dBackwardGetWorkspaceSize,
    aclnnAvgPool3dBackward,
    aclnnAvgPool3dBackwardGetWorkspaceSize,
    aclnnMaxPool2dWithIndicesBackward,
    aclnnMaxPool2dWithIndicesBackwardGetWorkspaceSize,
)
from poolgrad_numba.aclnn.runtime import (
    aclFinalize,
    aclInit,
    aclrtContext,
    aclrtCreateContext,
    aclrtCreateStream,
    aclrtCtxGetSysParamOpt,
    aclrtCtxSetSysParamOpt,
    aclrtDestroyContext,
    aclrtDestroyStream,
    aclrtGetCurrentContext,
    aclrtGetSysParamOpt,
    aclrtResetDevice,
    aclrtSetCurrentContext,
    aclrtSetDevice,
    aclrtSetSysParamOpt,
    aclrtStream,
    aclrtSynchronizeStream,
)
from poolgrad_numba.aclnn.status import (
    aclDataType,
    aclError,
    aclFormat,
    aclGetRecentErrMsg,
    aclnnStatus,
    aclSysParamOpt,
)
from poolgrad_numba.aclnn.tensor import (
    aclCreateIntArray,
    aclCreateTensor,
    aclDestroyIntArray,
    aclDestroyTensor,
    aclIntArray,
    aclTensor,
)

ACLNN_SUCCESS = aclnnStatus.ACLNN_SUCCESS
ACLNN_ERR_PARAM_NULLPTR = aclnnStatus.ACLNN_ERR_PARAM_NULLPTR
ACLNN_ERR_PARAM_INVALID = aclnnStatus.ACLNN_ERR_PARAM_INVALID
ACLNN_ERR_RUNTIME_ERROR = aclnnStatus.ACLNN_ERR_RUNTIME_ERROR
ACLNN_ERR_INNER = aclnnStatus.ACLNN_ERR_INNER
ACLNN_ERR_INNER_NULLPTR = aclnnStatus.ACLNN_ERR_INNER_NULLPTR

ACL_SUCCESS = aclError.ACL_SUCCESS
ACL_ERROR_INVALID_PARAM = aclError.ACL_ERROR_INVALID_PARAM
ACL_ERROR_UNINITIALIZE = aclError.ACL_ERROR_UNINITIALIZE
ACL_ERROR_REPEAT_INITIALIZE = aclError.ACL_ERROR_REPEAT_INITIALIZE
ACL_ERROR_RT_PARAM_INVALID = aclError.ACL_ERROR_RT_PARAM_INVALID
ACL_ERROR_RT_INVALID_DEVICEID = aclError.ACL_ERROR_RT_INVALID_DEVICEID
ACL_ERROR_RT_CONTEXT_NULL = aclError.ACL_ERROR_RT_CONTEXT_NULL
ACL_ERROR_RT_STREAM_CONTEXT = aclError.ACL_ERROR_RT_STREAM_CONTEXT
ACL_ERROR_RT_SYS_PARAM_NOT_SET = aclError.ACL_ERROR_RT_SYS_PARAM_NOT_SET

ACL_FLOAT = aclDataType.ACL_FLOAT
ACL_FLOAT16 = aclDataType.ACL_FLOAT16
ACL_INT8 = aclDataType.ACL_INT8
ACL_INT32 = aclDataType.ACL_INT32
ACL_UINT8 = aclDataType.ACL_UINT8
ACL_INT64 = aclDataType.ACL_INT64
ACL_DOUBLE = aclDataType.ACL_DOUBLE
ACL_BOOL = aclDataType.ACL_BOOL
ACL_BF16 = aclDataType.ACL_BF16

ACL_FORMAT_UNDEFINED = aclFormat.ACL_FORMAT_UNDEFINED
ACL_FORMAT_NCHW = aclFormat.ACL_FORMAT_NCHW
ACL_FORMAT_NHWC = aclFormat.ACL_FORMAT_NHWC
ACL_FORMAT_ND = aclFormat.ACL_FORMAT_ND
ACL_FORMAT_NC1HWC0 = aclFormat.ACL_FORMAT_NC1HWC0
ACL_FORMAT_NDHWC = aclFormat.ACL_FORMAT_NDHWC
ACL_FORMAT_NCDHW = aclFormat.ACL_FORMAT_NCDHW
ACL_FORMAT_NDC1HWC0 = aclFormat.ACL_FORMAT_NDC1HWC0
ACL_FORMAT_NCL = aclFormat.ACL_FORMAT_NCL

ACL_OPT_DETERMINISTIC = aclSysParamOpt.ACL_OPT_DETERMINISTIC

__all__ = [
    "ACLNN_ERR_INNER",
    "ACLNN_ERR_INNER_NULLPTR",
    "ACLNN_ERR_PARAM_INVALID",
    "ACLNN_ERR_PARAM_NULLPTR",
    "ACLNN_ERR_RUNTIME_ERROR",
    "ACLNN_SUCCESS",
    "ACL_BF16",
    "ACL_BOOL",
    "ACL_DOUBLE",
    "ACL_ERROR_INVALID_PARAM",
    "ACL_ERROR_REPEAT_INITIALIZE",
    "ACL_ERROR_RT_CONTEXT_NULL",
    "ACL_ERROR_RT_INVALID_DEVICEID",
    "ACL_ERROR_RT_PARAM_INVALID",
    "ACL_ERROR_RT_STREAM_CONTEXT",
    "ACL_ERROR_RT_SYS_PARAM_NOT_SET",
    "ACL_ERROR_UNINITIALIZE",
    "ACL_FLOAT",
    "ACL_FLOAT16",
    "ACL_FORMAT_NC1HWC0",
    "ACL_FORMAT_NCDHW",
    "ACL_FORMAT_NCHW",
    "ACL_FORMAT_NCL",
    "ACL_FORMAT_ND",
    "ACL_FORMAT_NDC1HWC0",
    "ACL_FORMAT_NDHWC",
    "ACL_FORMAT_NHWC",
    "ACL_FORMAT_UNDEFINED",
    "ACL_INT32",
    "ACL_INT64",
    "ACL_INT8",
    "ACL_OPT_DETERMINISTIC",
    "ACL_SUCCESS",
    "ACL_UINT8",
    "aclCreateIntArray",
    "aclCreateTensor",
    "aclDataType",
    "aclDestroyAclOpExecutor",
    "aclDestroyIntArray",
    "aclDestroyTensor",
    "aclError",
    "aclFinalize",
    "aclFormat",
    "aclGetRecentErrMsg",
    "aclInit",
    "aclIntArray",
    "aclOpExecutor",
    "aclSetAclOpExecutorRepeatable",
    "aclSysParamOpt",
    "aclTensor",
    "aclnnAdaptiveMaxPool2dBackward",
    "aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize",
    "aclnnAdaptiveMaxPool3dBackward",
    "aclnnAdaptiveMaxPool3dBackwardGetWorkspaceSize",
    "aclnnAvgPool3dBackward",
    "aclnnAvgPool3dBackwardGetWorkspaceSize",
    "aclnnMaxPool2dWithIndicesBackward",
    "aclnnMaxPool2dWithIndicesBackwardGetWorkspaceSize",
    "aclnnStatus",
    "aclrtContext",
    "aclrtCreateContext",
    "aclrtCreateStream",
    "aclrtCtxGetSysParamOpt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyContext",
    "aclrtDestroyStream",
    "aclrtGetCurrentContext",
    "aclrtGetSysParamOpt",
    "aclrtResetDevice",
    "aclrtSetCurrentContext",
    "aclrtSetDevice",
    "aclrtSetSysParamOpt",
    "aclrtStream",
    "aclrtSynchronizeStream",
]
