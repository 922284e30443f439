"""Status codes, the enumerations that C programs use, and the text of the last failure in each thread."""

from __future__ import annotations

import threading
from enum import IntEnum


class aclnnStatus(IntEnum):
    """What the two phases of an operator return."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002
    ACLNN_ERR_RUNTIME_ERROR = 361001
    ACLNN_ERR_INNER = 561000
    ACLNN_ERR_INNER_NULLPTR = 561103


class aclError(IntEnum):
    """What the functions of the runtime return."""

    ACL_SUCCESS = 0
    ACL_ERROR_INVALID_PARAM = 100000
    ACL_ERROR_UNINITIALIZE = 100001
    ACL_ERROR_REPEAT_INITIALIZE = 100002
    ACL_ERROR_RT_PARAM_INVALID = 107000
    ACL_ERROR_RT_INVALID_DEVICEID = 107001
    ACL_ERROR_RT_CONTEXT_NULL = 107002
    ACL_ERROR_RT_STREAM_CONTEXT = 107003
    ACL_ERROR_RT_SYS_PARAM_NOT_SET = 107021


class aclDataType(IntEnum):
    """Types of a tensor's elements."""

    ACL_FLOAT = 0
    ACL_FLOAT16 = 1
    ACL_INT8 = 2
    ACL_INT32 = 3
    ACL_UINT8 = 4
    ACL_INT64 = 9
    ACL_DOUBLE = 11
    ACL_BOOL = 12
    ACL_BF16 = 27


class aclFormat(IntEnum):
    """Layout labels of a tensor; the private ones, in blocks of channels, are refused."""

    ACL_FORMAT_UNDEFINED = -1
    ACL_FORMAT_NCHW = 0
    ACL_FORMAT_NHWC = 1
    ACL_FORMAT_ND = 2
    ACL_FORMAT_NC1HWC0 = 3
    ACL_FORMAT_NDHWC = 27
    ACL_FORMAT_NCDHW = 30
    ACL_FORMAT_NDC1HWC0 = 32
    ACL_FORMAT_NCL = 47


PRIVATE_FORMATS = (aclFormat.ACL_FORMAT_NC1HWC0, aclFormat.ACL_FORMAT_NDC1HWC0)


class aclSysParamOpt(IntEnum):
    """Options of a context or of the process."""

    ACL_OPT_DETERMINISTIC = 0


_recent = threading.local()


def fail(status: int, text: str) -> int:
    """Keep the text for `aclGetRecentErrMsg` of this thread, and give the status."""
    _recent.text = text
    return status


def aclGetRecentErrMsg() -> str:
    """Return the text of the last failure that a function of this face reported in this thread; empty if none."""
    return getattr(_recent, "text", "")
