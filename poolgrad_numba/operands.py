"""The arrays of one run: read, checked, packed where kernels cannot take them as they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from poolgrad_numba import memory
from poolgrad_numba.errors import PARAM_NULLPTR, PoolGradIndexError, PoolGradTypeError, PoolGradValueError
from poolgrad_numba.kernels.packing import transpose
from poolgrad_numba.launch import launch
from poolgrad_numba.problem import check_run
from poolgrad_numba.values import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from poolgrad_numba.problem import Problem

_NOTHING: Final[NDArray[np.uint8]] = np.empty(0, np.uint8)
_ALIGNMENT: Final = 64  # a cache line, and the widest vector


class Operands(NamedTuple):
    """The arrays of a run; ``indices`` is ``None`` for averages. Kernels get planes: (planes, outputs or cells)."""

    grad: NDArray[Any]
    indices: NDArray[Any] | None
    out: NDArray[Any]


class Block(NamedTuple):
    """One scratch array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its bytes, rounded up so that the next block is aligned too."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- checks ------------------------------------------------------------------------------------------------------


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Give an input as a plain array, without a copy where it is one."""
    if value is None:
        raise PoolGradTypeError(f"{name}: got None, wanted an array", status=PARAM_NULLPTR)
    _refuse_mask(name, value)
    try:
        return np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:
        raise PoolGradTypeError(f"{name}: got {type(value).__name__}, which is no array: {error}") from error


def as_out(value: Any) -> NDArray[Any]:
    """Give the array behind an ``out``: the memory itself, without what a subclass does to it."""
    if not isinstance(value, np.ndarray):
        raise PoolGradTypeError(f"out: got {type(value).__name__}, wanted a NumPy array")
    _refuse_mask("out", value)
    return value.view(np.ndarray)


def _refuse_mask(name: str, value: Any) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise PoolGradTypeError(f"{name}: got a masked array, whose mask would be lost; wanted a plain one")


def check(problem: Problem, grad: NDArray[Any], indices: NDArray[Any] | None, out: NDArray[Any] | None) -> None:
    """Check a run's arrays against the problem that was planned."""
    if indices is None and problem.signature.indexed:
        raise PoolGradTypeError("indices: got None, wanted an array", status=PARAM_NULLPTR)
    if indices is not None and not problem.signature.indexed:
        raise PoolGradTypeError(f"indices: got an array, but {problem.signature.name} takes none")
    given = {"grad_output": grad, "indices": indices, "out": out}
    arrays = {name: array for name, array in given.items() if array is not None}
    check_run(problem, arrays)
    if out is None:
        return
    if not out.flags.writeable:
        raise PoolGradValueError("out: got a read-only array, wanted a writable one")
    if out.size and overlaps_itself(out):
        raise PoolGradValueError(f"out: got strides {out.strides}, by which its own elements share memory")
    if any(share_memory(out, arrays[name]) for name in arrays if name != "out"):
        raise PoolGradValueError("out: got an array that shares memory with an input, wanted memory of its own")


def overlaps_itself(array: NDArray[Any]) -> bool:
    """Whether two elements may share memory: strides, smallest first, must each clear what lies below."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def share_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays share a byte; where that is too hard to tell, they are taken to."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # the stub knows -1 and 0 only
    except np.exceptions.TooHardError:
        return True


def index_error(problem: Problem, indices: NDArray[Any]) -> PoolGradIndexError:
    """Find the first bad index in row-major order and say where it is."""
    step = 1 << 20  # bounds the memory that the search takes
    for start in range(0, indices.size, step):
        chunk = indices.flat[start : start + step]
        bad = (chunk < 0) | (chunk >= problem.cells)
        if bad.any():
            first = int(bad.argmax())
            position = tuple(int(i) for i in np.unravel_index(start + first, indices.shape))
            size = "*".join("DHW"[-problem.signature.spatial :])
            return PoolGradIndexError(
                f"indices: got {int(chunk[first])} at position {position}, wanted 0 to {problem.cells - 1} "
                f"({size} = {problem.cells}: an index is flat inside its own plane, not over the whole tensor)"
            )
    return PoolGradIndexError("indices: got values outside the plane that changed while the operator ran")


# -- memory ------------------------------------------------------------------------------------------------------


def is_plain(array: NDArray[Any]) -> bool:
    """Whether kernels can take an array as it is."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def packing(arrays: Iterable[NDArray[Any] | None]) -> tuple[Block, ...]:
    """Room for those arrays that kernels cannot take as they are."""
    odd = [array for array in arrays if array is not None and not is_plain(array)]
    return tuple(Block(array.shape, array.dtype.newbyteorder("=")) for array in odd)


def buffer_size(blocks: Sequence[Block]) -> int:
    """Bytes that hold the blocks, wherever the buffer starts."""
    size = sum(block.nbytes for block in blocks)
    return size + _ALIGNMENT - 1 if size else 0


def open_workspace(workspace: Any, size: int, others: Iterable[NDArray[Any] | None]) -> NDArray[np.uint8]:
    """Check the caller's scratch, or allocate it."""
    if workspace is None:
        return memory.empty((size,), _NOTHING.dtype) if size else _NOTHING
    try:
        view = memoryview(workspace)
        buffer: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
    except Exception as error:
        raise PoolGradTypeError(f"workspace: got {type(workspace).__name__}, wanted a buffer: {error}") from error
    if "O" in view.format:
        raise PoolGradTypeError(f"workspace: got a buffer of Python objects ({show(view.format)}), wanted one of bytes")
    if view.readonly:
        raise PoolGradValueError("workspace: got a read-only buffer, wanted a writable one")
    if buffer.size < size:
        raise PoolGradValueError(
            f"workspace: got {buffer.size} bytes, wanted {size}, as workspace_size_for(...) gives for these arrays "
            "(one that is not C-contiguous is packed into the workspace)"
        )
    if any(share_memory(buffer, other) for other in others if other is not None):
        raise PoolGradValueError("workspace: got a buffer that shares memory with an operand")
    return buffer


def carve(buffer: NDArray[np.uint8], blocks: Sequence[Block]) -> list[NDArray[Any]]:
    """Cut scratch arrays out of a buffer, each aligned."""
    offset = -buffer.ctypes.data % _ALIGNMENT if buffer.size else 0
    arrays: list[NDArray[Any]] = []
    for block in blocks:
        if block.nbytes:
            arrays.append(np.ndarray(block.shape, block.dtype, buffer, offset))
            offset += block.nbytes
        else:
            arrays.append(np.empty(block.shape, block.dtype))
    return arrays


def pack(arrays: Operands, rooms: Sequence[NDArray[Any]], threads: int) -> Operands:
    """Give the operands as kernels can take them; ``rooms``, in the order of `packing`, hold those that differ."""
    if not rooms:
        return arrays
    free = iter(rooms)

    def packed(array: NDArray[Any]) -> NDArray[Any]:
        if is_plain(array):
            return array
        room = next(free)
        copy(room, array, threads)
        return room

    grad = packed(arrays.grad)
    indices = None if arrays.indices is None else packed(arrays.indices)
    return Operands(grad, indices, arrays.out if is_plain(arrays.out) else next(free))


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Give the dtype that kernels know a dtype by: 16-bit floats go as integers, uint16 float16, int16 bfloat16."""
    if dtype.itemsize > 2:
        return dtype
    return np.dtype(np.uint16 if dtype == np.float16 else np.int16)


# Below this many cells NumPy's own copy, on one thread, is done before the threads are.
_GRAIN: Final = 65_536


def copy(target: NDArray[Any], source: NDArray[Any], threads: int) -> None:
    """Copy between a plain array and another of the same shape, dtype and byte order aside.

    By threads where the other is one block of axes turned behind another, as channels-last operands are: ten times as
    fast on two threads as NumPy, which goes through one of the two a cell a cache line.
    """
    other, plain = (target, source) if is_plain(source) else (source, target)
    turn = _turned(other) if plain.size >= _GRAIN and is_plain(plain) and other.dtype == plain.dtype else None
    if turn is None:
        np.copyto(target, source)
        return
    columns, rows, inner = turn
    kind = f"u{plain.itemsize}"
    flat = {id(other): inner.view(kind).reshape(-1), id(plain): plain.view(kind).reshape(-1)}
    read = flat[id(source)]
    read.flags.writeable = False
    shape = (rows, columns) if source is other else (columns, rows)
    launch(transpose, threads, read, flat[id(target)], *shape)


def _turned(array: NDArray[Any]) -> tuple[int, int, NDArray[Any]] | None:
    """Find axes [a, b) and [b, end) that lie in memory the other way round: the cells of each, and the array so."""
    if not array.flags.aligned:
        return None
    axes = tuple(range(array.ndim))
    for a in axes:
        for b in axes[a + 1 :]:
            inner = array.transpose(*axes[:a], *axes[b:], *axes[a:b])
            if inner.flags.c_contiguous:
                return math.prod(array.shape[a:b]), math.prod(array.shape[b:]), inner
    return None


def interleaved(arrays: Operands, spatial: int) -> Operands:
    """View operands, of so many spatial axes each, with their channels last."""

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        return np.moveaxis(array, -1 - spatial, -1)

    return Operands(turned(arrays.grad), None if arrays.indices is None else turned(arrays.indices), turned(arrays.out))


def as_rows(arrays: Operands, rows: int) -> Operands:
    """View packed operands as kernels take them, (planes, outputs or cells), or the like for images.

    Inputs are always read-only: Numba would compile once more for those that the caller made so.
    """

    def view(array: NDArray[Any], *, readonly: bool) -> NDArray[Any]:
        flat = array.view(carrier(array.dtype)).reshape(rows, -1)
        flat.flags.writeable = not readonly
        return flat

    return Operands(
        view(arrays.grad, readonly=True),
        None if arrays.indices is None else view(arrays.indices, readonly=True),
        view(arrays.out, readonly=False),
    )
