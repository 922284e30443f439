"""Tensors and integer arrays as C programs make them: views over flat storage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from poolgrad_numba.aclnn.status import aclDataType, aclError, aclFormat, fail
from poolgrad_numba.errors import PoolGradError, PoolGradValueError
from poolgrad_numba.values import integer, integers, show

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES: Final = {
    aclDataType.ACL_FLOAT: np.dtype(np.float32),
    aclDataType.ACL_FLOAT16: np.dtype(np.float16),
    aclDataType.ACL_INT8: np.dtype(np.int8),
    aclDataType.ACL_INT32: np.dtype(np.int32),
    aclDataType.ACL_UINT8: np.dtype(np.uint8),
    aclDataType.ACL_INT64: np.dtype(np.int64),
    aclDataType.ACL_DOUBLE: np.dtype(np.float64),
    aclDataType.ACL_BOOL: np.dtype(np.bool_),
    aclDataType.ACL_BF16: np.dtype(ml_dtypes.bfloat16),
}


class aclTensor:
    """A view of flat storage, with a format label; made by `aclCreateTensor`."""

    __slots__ = ("array", "format")

    def __init__(self, array: NDArray[Any], format_: aclFormat) -> None:
        self.array: NDArray[Any] | None = array
        self.format = format_


class aclIntArray:
    """A fixed array of integers; made by `aclCreateIntArray`."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values: tuple[int, ...] | None = values


def aclCreateTensor(
    viewDims: Any,
    dataType: int,
    strides: Any,
    offset: int,
    format: int,  # noqa: A002  (C's name)
    storageDims: Any,
    data: Any,
) -> aclTensor | None:
    """Make a tensor: a view over flat storage.

    Parameters
    ----------
    viewDims : sequence of int or aclIntArray
        Shape of the view.
    dataType : aclDataType
        Type of the elements.
    strides : sequence of int, aclIntArray or None
        Steps between neighbours along each axis, in elements; not negative. ``None``: contiguous.
    offset : int
        Position of the view's first element in the storage, in elements.
    format : aclFormat
        A label; it moves no data.
    storageDims : sequence of int, aclIntArray or None
        Shape of the storage, whose product must fit into ``data``. ``None``: all of it.
    data : buffer or ndarray
        The storage, C-contiguous: an array of that very type, or raw bytes (an unsigned array, a bytearray). It is
        used in place and kept alive.

    Returns
    -------
    aclTensor or None
        ``None`` for a bad argument or a view that leaves the storage; `aclGetRecentErrMsg` says which.

    Examples
    --------
    >>> import numpy as np
    >>> from poolgrad_numba.aclnn import ACL_FLOAT, ACL_FORMAT_ND, aclCreateTensor, aclDestroyTensor
    >>> tensor = aclCreateTensor([1, 2, 2], ACL_FLOAT, None, 0, ACL_FORMAT_ND, [4], np.zeros(4, np.float32))
    >>> aclDestroyTensor(tensor)
    0
    """
    try:
        dtype = DTYPES[_member("dataType", dataType, aclDataType)]
        label = _member("format", format, aclFormat)
        shape = _dims("viewDims", viewDims)
        storage = _storage(data, dtype, storageDims)
        steps = _strides(strides, shape)
        first = integer("offset", offset)
        if first < 0:
            raise PoolGradValueError(f"offset: got {show(first)}, wanted at least 0")
        last = first + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if math.prod(shape) and last >= storage.size:
            raise PoolGradValueError(
                f"viewDims: got {show(shape)} with strides {show(steps)} and offset {show(first)}, which reaches "
                f"element {show(last)} of a storage of {storage.size}"
            )
        if not math.prod(shape):
            return aclTensor(np.empty(shape, dtype), label)
        view = np.ndarray(shape, dtype, storage, first * dtype.itemsize, [step * dtype.itemsize for step in steps])
    except Exception as error:  # noqa: BLE001  (nothing here raises)
        fail(aclError.ACL_ERROR_INVALID_PARAM, str(error))
        return None
    return aclTensor(view, label)


def _member(name: str, value: Any, enumeration: Any) -> Any:
    number = integer(name, value)
    if number not in {int(member) for member in enumeration}:
        names = ", ".join(f"{member.name} {int(member)}" for member in enumeration)
        raise PoolGradValueError(f"{name}: got {show(number)}, wanted one of {names}")
    return enumeration(number)


def _dims(name: str, value: Any) -> tuple[int, ...]:
    dims = int_array(name, value)
    if any(size < 0 for size in dims):
        raise PoolGradValueError(f"{name}: got {show(dims)}, wanted no negative size")
    return dims


def _strides(value: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    if value is None:
        return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    steps = _dims("strides", value)
    if len(steps) != len(shape):
        raise PoolGradValueError(f"strides: got {len(steps)} values, wanted {len(shape)}, one per axis of viewDims")
    return steps


def _storage(data: Any, dtype: np.dtype[Any], dims: Any) -> NDArray[Any]:
    if data is None:
        raise PoolGradValueError("data: got None, wanted a buffer")
    raw = data if isinstance(data, np.ndarray) else np.frombuffer(memoryview(data), np.uint8)
    if raw.dtype.hasobject or not raw.flags.c_contiguous:
        raise PoolGradValueError("data: got Python objects or strides, wanted C-contiguous bytes")
    if isinstance(data, np.ndarray) and raw.dtype != dtype and raw.dtype.kind not in "uV":
        raise PoolGradValueError(f"data: got an array of {raw.dtype}, wanted {dtype} as dataType says, or raw bytes")
    count = raw.nbytes // dtype.itemsize
    wanted = count if dims is None else math.prod(_dims("storageDims", dims))
    if wanted > count:
        raise PoolGradValueError(f"storageDims: got {wanted} elements, wanted at most the {count} that data holds")
    flat = raw.view(np.ndarray).reshape(-1)
    return flat.view(np.uint8)[: wanted * dtype.itemsize].view(dtype) if flat.size else np.empty(0, dtype)


def aclDestroyTensor(tensor: aclTensor | None) -> int:
    """Let go of a tensor's storage; runs under way keep it until they end."""
    if isinstance(tensor, aclTensor):
        tensor.array = None
    return aclError.ACL_SUCCESS


def aclCreateIntArray(values: Any) -> aclIntArray | None:
    """Make an array of integers; ``None``, with a message, where there is a value that is none."""
    try:
        return aclIntArray(integers("values", values))
    except PoolGradError as error:
        fail(aclError.ACL_ERROR_INVALID_PARAM, str(error))
        return None


def aclDestroyIntArray(array: aclIntArray | None) -> int:
    """Let go of an array of integers."""
    if isinstance(array, aclIntArray):
        array.values = None
    return aclError.ACL_SUCCESS


def int_array(name: str, value: Any) -> tuple[int, ...]:
    """Read an aclIntArray or a plain sequence."""
    if not isinstance(value, aclIntArray):
        return integers(name, value)
    if value.values is None:
        raise PoolGradValueError(f"{name}: got an aclIntArray that was destroyed")
    return value.values
