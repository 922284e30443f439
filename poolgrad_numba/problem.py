"""What one call asks for, checked: a `Problem` holds its shapes, dtypes, window, mode and thread limit.

All checks of arguments are here. Their order: parameters, ranks and shapes, dtypes; index values are checked by the
kernels. Every message names the argument, what it got and what was wanted.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from poolgrad_numba import config
from poolgrad_numba.errors import (
    PARAM_NULLPTR,
    PoolGradIndexError,
    PoolGradTypeError,
    PoolGradValueError,
)
from poolgrad_numba.geometry import effective_kernel, pooled_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Shape = tuple[int, ...]

VALUE_DTYPES: Final = tuple(np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16))
INDEX_DTYPES: Final = tuple(np.dtype(t) for t in (np.int32, np.int64))
_LARGEST_PARAMETER: Final = 2**31 - 1  # keeps every product of the kernels' window arithmetic inside 63 bits
_LARGEST_BYTES: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class Signature:
    """What the checks need to know of an operator.

    Attributes
    ----------
    name : str
        The public function's name.
    spatial : int
        Number of spatial axes, 1 to 3.
    indexed : bool
        Whether it takes ``indices`` (max pooling) or averages.
    parameters : tuple of str
        Its parameters beyond ``grad_output``, ``input_shape`` and ``indices``; an adaptive operator has none.
    """

    name: str
    spatial: int
    indexed: bool
    parameters: tuple[str, ...] = ()

    @property
    def adaptive(self) -> bool:
        """Whether the windows follow from the two sizes alone."""
        return not self.parameters


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window, one entry per spatial axis, and how it is averaged."""

    kernel_size: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None

    def output_size(self, size: Shape) -> Shape:
        """Windows per axis of an input of ``size`` cells per axis."""
        axes = zip(size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return tuple(pooled_size(*axis, ceil_mode=self.ceil_mode) for axis in axes)


@dataclass(frozen=True)
class Problem:
    """One call, described and checked: frozen and hashable, the key of the plan cache.

    ``output_shape`` is the pooling's output, the shape of ``grad_output`` and ``indices``.
    """

    signature: Signature
    input_shape: Shape
    output_shape: Shape
    dtype: np.dtype[Any]
    index_dtype: np.dtype[Any] | None
    window: Window | None
    deterministic: bool
    num_threads: int

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def input_size(self) -> Shape:
        """(D, H, W) of the input; axes that the operator lacks are 1."""
        return self._lift(self.input_shape)

    @cached_property
    def output_size(self) -> Shape:
        """(Do, Ho, Wo); axes that the operator lacks are 1."""
        return self._lift(self.output_shape)

    @cached_property
    def planes(self) -> int:
        """Number of (n, c) slices."""
        return math.prod(self.input_shape[: -self.signature.spatial])

    @cached_property
    def cells(self) -> int:
        """Input cells of one plane."""
        return math.prod(self.input_size)

    @cached_property
    def outputs(self) -> int:
        """Outputs of one plane."""
        return math.prod(self.output_size)

    @cached_property
    def accumulator(self) -> np.dtype[Any]:
        """The type that sums are kept in: float64 for float64, float32 for all others."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def _lift(self, shape: Shape) -> Shape:
        spatial = self.signature.spatial
        return (1,) * (3 - spatial) + shape[-spatial:]


# -- parameters --------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise PoolGradTypeError(f"{name}: got {value!r}, wanted an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise PoolGradTypeError(f"{name}: got {value!r}, wanted an integer") from None


def _per_axis(name: str, value: Any, axes: int, least: int) -> Shape:
    """Give an int, or a sequence of 1 or ``axes`` ints, as one int per axis."""
    if value is None:
        raise PoolGradTypeError(f"{name}: got None, wanted an integer or {axes} of them", status=PARAM_NULLPTR)
    if isinstance(value, str | bytes):
        raise PoolGradTypeError(f"{name}: got {value!r}, wanted an integer or {axes} of them")
    try:
        values = list(value)
    except TypeError:
        values = [value]
    if len(values) not in (1, axes):
        raise PoolGradValueError(f"{name}: got {len(values)} values, wanted 1 or {axes}, one per spatial axis")
    numbers = tuple(_integer(name, v) for v in values)
    for number in numbers:
        if number < least:
            raise PoolGradValueError(f"{name}: got {number}, wanted at least {least}")
        if number > _LARGEST_PARAMETER:
            raise PoolGradValueError(f"{name}: got {number}, wanted at most {_LARGEST_PARAMETER}")
    return numbers if len(numbers) == axes else numbers * axes


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise PoolGradTypeError(f"{name}: got {value!r}, wanted True or False")


def _is_unset(stride: Any) -> bool:
    return stride is None or (hasattr(stride, "__len__") and np.ndim(stride) == 1 and len(stride) == 0)


def _window(signature: Signature, parameters: Mapping[str, Any]) -> Window | None:
    """Check an operator's parameters; ``None`` for an adaptive operator, which has no window of its own."""
    if signature.adaptive:
        return None
    axes = signature.spatial
    kernel = _per_axis("kernel_size", parameters.get("kernel_size"), axes, 1)
    stride = parameters.get("stride")
    stride = kernel if _is_unset(stride) else _per_axis("stride", stride, axes, 1)
    padding = _per_axis("padding", parameters.get("padding", 0), axes, 0)
    dilation = _per_axis("dilation", parameters.get("dilation", 1), axes, 1)
    for k, p, d in zip(kernel, padding, dilation, strict=True):
        if 2 * p > effective_kernel(k, d):
            raise PoolGradValueError(
                f"padding: got {p}, wanted at most half of the window's {effective_kernel(k, d)} cells"
            )
    if math.prod(kernel) > sys.maxsize:
        raise PoolGradValueError(f"kernel_size: got {kernel}, wanted at most {sys.maxsize} cells in a window")
    divisor = parameters.get("divisor_override")
    if divisor is not None:
        divisor = _integer("divisor_override", divisor)
        if divisor == 0 or abs(divisor) > sys.maxsize:
            raise PoolGradValueError(
                f"divisor_override: got {divisor}, wanted None or a non-zero integer of at most 63 bits"
            )
    return Window(
        kernel,
        stride,
        padding,
        dilation,
        _flag("ceil_mode", parameters.get("ceil_mode", False)),
        _flag("count_include_pad", parameters.get("count_include_pad", True)),
        divisor,
    )


# -- shapes ------------------------------------------------------------------------------------------------------


def _layout(spatial: int) -> str:
    return f"(N, C, {', '.join('DHW'[-spatial:])}) or (C, {', '.join('DHW'[-spatial:])})"


def _input_shape(signature: Signature, value: Any) -> Shape:
    if value is None:
        raise PoolGradTypeError("input_shape: got None, wanted a sequence of integers", status=PARAM_NULLPTR)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        sizes = list(value)
    except TypeError:
        raise PoolGradTypeError(f"input_shape: got {value!r}, wanted a sequence of integers") from None
    shape = tuple(_integer("input_shape", size) for size in sizes)
    spatial = signature.spatial
    if len(shape) not in (spatial + 1, spatial + 2):
        raise PoolGradValueError(f"input_shape: got {shape} of rank {len(shape)}, wanted {_layout(spatial)}")
    if min(shape) < 0:
        raise PoolGradValueError(f"input_shape: got {shape}, wanted no negative size")
    if min(shape[-spatial:]) < 1:
        raise PoolGradValueError(f"input_shape: got {shape}, wanted spatial sizes of at least 1")
    if math.prod(size or 1 for size in shape) * 8 > _LARGEST_BYTES:
        raise PoolGradValueError(f"input_shape: got {shape}, more cells than memory can address")
    return shape


def _pooled_shape(window: Window, input_shape: Shape, spatial: int) -> Shape:
    """Shape of the output; the error says how it follows from the input's."""
    sizes = window.output_size(input_shape[-spatial:])
    if min(sizes) < 1:
        raise PoolGradValueError(
            f"input_shape: got {input_shape}, too small for the window: {_derivation(window)} leaves an output of "
            f"{sizes}, wanted at least 1 on each axis"
        )
    return input_shape[:-spatial] + sizes


def _derivation(window: Window) -> str:
    rounding = "ceil" if window.ceil_mode else "floor"
    return (
        f"{rounding}((size + 2*padding - dilation*(kernel_size - 1) - 1) / stride) + 1 with "
        f"kernel_size={window.kernel_size}, stride={window.stride}, padding={window.padding}, "
        f"dilation={window.dilation}"
    )


def _check_operand_shapes(
    shapes: tuple[Shape, Shape | None], output_shape: Shape, window: Window | None, input_shape: Shape
) -> None:
    """Compare the shapes of ``grad_output`` and ``indices`` with the pooling's output and with each other."""
    grad, indices = shapes
    if len(grad) != len(input_shape):
        extra = "grad_output" if len(grad) > len(input_shape) else "input_shape"
        raise PoolGradValueError(
            f"grad_output: got shape {grad} of rank {len(grad)} for input_shape {input_shape}, wanted the same rank "
            f"({extra} has {abs(len(grad) - len(input_shape))} more: a batch axis on one side only?)"
        )
    if grad != output_shape:
        how = "the same batch and channels" if window is None else _derivation(window)
        raise PoolGradValueError(
            f"grad_output: got shape {grad}, wanted {output_shape}: from input_shape {input_shape} by {how}"
        )
    if indices is not None and indices != grad:
        hint = ""
        if len(indices) != len(grad):
            hint = f" ({'indices' if len(indices) > len(grad) else 'grad_output'} has the extra axis)"
        raise PoolGradValueError(f"indices: got shape {indices}, wanted grad_output's {grad}{hint}")


# -- dtypes ------------------------------------------------------------------------------------------------------


def _check_dtype(name: str, dtype: Any, allowed: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    try:
        # None would mean float64 to NumPy, also in comparisons.
        native: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype).newbyteorder("=")
    except TypeError:
        native = None
    if native is not None and native in allowed:
        return native
    wanted = ", ".join(candidate.name for candidate in allowed)
    raise PoolGradTypeError(f"{name}: got dtype {dtype}, wanted one of {wanted}")


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Give an operand as an array, without a copy where it is one."""
    if value is None:
        raise PoolGradTypeError(f"{name}: got None, wanted an array", status=PARAM_NULLPTR)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PoolGradTypeError(f"{name}: got {type(value).__name__}, which is no array: {error}") from error


# -- the whole ---------------------------------------------------------------------------------------------------


def describe(
    signature: Signature,
    input_shape: Any,
    parameters: Mapping[str, Any],
    dtypes: tuple[Any, Any],
    settings: tuple[Any, Any],
    shapes: tuple[Shape, Shape | None] | None = None,
) -> Problem:
    """Check what a call or a plan asks for, and describe it.

    ``dtypes`` are those of the values and of the indices, ``settings`` the call's own mode and thread limit, and
    ``shapes`` those of the operands; without them the output's shape follows from the parameters, which for an
    adaptive operator then hold ``output_size``.
    """
    allowed = signature.parameters or (() if shapes else ("output_size",))
    unknown = sorted(set(parameters) - set(allowed))
    if unknown:
        raise PoolGradTypeError(f"{signature.name}: got {', '.join(unknown)}, wanted only {', '.join(allowed)}")
    window = _window(signature, parameters)
    resolved = config.resolve(*settings)
    shape = _input_shape(signature, input_shape)
    spatial = signature.spatial
    if window is not None:
        output_shape = _pooled_shape(window, shape, spatial)
    elif shapes is not None:
        output_shape = shape[:-spatial] + shapes[0][-spatial:]
    else:
        output_shape = shape[:-spatial] + _per_axis("output_size", parameters.get("output_size"), spatial, 0)
    if shapes is not None:
        _check_operand_shapes(shapes, output_shape, window, shape)
    dtype = _check_dtype("grad_output" if shapes else "dtype", dtypes[0], VALUE_DTYPES)
    index_dtype = None
    if signature.indexed:
        index_dtype = _check_dtype("indices" if shapes else "index_dtype", dtypes[1], INDEX_DTYPES)
    return Problem(
        signature, shape, output_shape, dtype, index_dtype, window, resolved.deterministic, resolved.num_threads
    )


def check_operands(problem: Problem, grad: NDArray[Any], indices: NDArray[Any] | None) -> None:
    """Check a run's operands against the problem that was planned."""
    if indices is None and problem.signature.indexed:
        raise PoolGradTypeError("indices: got None, wanted an array", status=PARAM_NULLPTR)
    if indices is not None and not problem.signature.indexed:
        raise PoolGradTypeError(f"indices: got an array, but {problem.signature.name} takes none")
    shapes = grad.shape, None if indices is None else indices.shape
    _check_operand_shapes(shapes, problem.output_shape, problem.window, problem.input_shape)
    _check_dtype("grad_output", grad.dtype, (problem.dtype,))
    if indices is not None and problem.index_dtype is not None:
        _check_dtype("indices", indices.dtype, (problem.index_dtype,))


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


def check_out(problem: Problem, out: Any, operands: tuple[NDArray[Any], ...]) -> None:
    """Check an ``out`` that the caller gave."""
    if not isinstance(out, np.ndarray):
        raise PoolGradTypeError(f"out: got {type(out).__name__}, wanted a NumPy array")
    if out.shape != problem.input_shape:
        raise PoolGradValueError(f"out: got shape {out.shape}, wanted input_shape {problem.input_shape}")
    _check_dtype("out", out.dtype, (problem.dtype,))
    if not out.flags.writeable:
        raise PoolGradValueError("out: got a read-only array, wanted a writable one")
    if out.size and overlaps_itself(out):
        raise PoolGradValueError(f"out: got strides {out.strides}, by which its own elements share memory")
    for operand in operands:
        if share_memory(out, operand):
            raise PoolGradValueError("out: got an array that shares memory with an input, wanted memory of its own")


def index_error(problem: Problem, indices: NDArray[Any]) -> PoolGradIndexError:
    """Find the first bad index in row-major order and say where it is."""
    flat = indices.reshape(-1)
    step = 1 << 20  # bounds the memory that the search takes
    for start in range(0, flat.size, step):
        chunk = flat[start : start + step]
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
