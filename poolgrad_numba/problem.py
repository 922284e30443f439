"""What one call asks for, checked: a `Problem` holds its shapes, dtypes, window, mode and thread limit.

Checks come in this order: parameters, ranks and shapes, dtypes. Index values are checked by the kernels, the memory
of a run's arrays in ``operands.py``. Every message names the argument, what it got and what was wanted.
"""

from __future__ import annotations

import marshal
import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from poolgrad_numba import config
from poolgrad_numba.errors import PARAM_NULLPTR, PoolGradError, PoolGradTypeError, PoolGradValueError
from poolgrad_numba.geometry import effective_kernel, pooled_size
from poolgrad_numba.values import flag, integer, integers, is_sequence, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Shape = tuple[int, ...]

VALUE_DTYPES: Final = tuple(np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16))
INDEX_DTYPES: Final = tuple(np.dtype(t) for t in (np.int32, np.int64))
_LARGEST_PARAMETER: Final = 2**31 - 1  # keeps every product of the kernels' window arithmetic inside 63 bits


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
    adaptive : bool
        Whether the windows follow from the input's and the output's sizes alone.
    parameters : tuple of str
        Its parameters beyond ``grad_output``, ``input_shape`` and ``indices``.
    """

    name: str
    spatial: int
    indexed: bool
    adaptive: bool = False
    parameters: tuple[str, ...] = ()


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
    def channels(self) -> int:
        """Planes of one image."""
        return self.input_shape[-1 - self.signature.spatial]

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


def _per_axis(name: str, value: Any, axes: int, least: int) -> Shape:
    """Read an int, or a sequence of 1 or ``axes`` ints, as one int per axis."""
    if value is None:
        raise PoolGradTypeError(f"{name}: got None, wanted an integer or {axes} of them", status=PARAM_NULLPTR)
    numbers = integers(name, value) if is_sequence(value) else (integer(name, value),)
    if len(numbers) not in (1, axes):
        raise PoolGradValueError(f"{name}: got {len(numbers)} values, wanted 1 or {axes}, one per spatial axis")
    for number in numbers:
        if not least <= number <= _LARGEST_PARAMETER:
            bound = f"at least {least}" if number < least else f"at most {_LARGEST_PARAMETER}"
            raise PoolGradValueError(f"{name}: got {show(number)}, wanted {bound}")
    return numbers if len(numbers) == axes else numbers * axes


def _is_empty(value: Any) -> bool:
    return value.shape == (0,) if isinstance(value, np.ndarray) else isinstance(value, list | tuple) and not value


def _divisor(value: Any) -> int | None:
    if value is None:
        return None
    divisor = integer("divisor_override", value)
    if divisor == 0 or abs(divisor) > sys.maxsize:
        raise PoolGradValueError(
            f"divisor_override: got {show(divisor)}, wanted None or a non-zero integer of at most 63 bits"
        )
    return divisor


def _window(signature: Signature, parameters: Mapping[str, Any]) -> Window:
    """Check a windowed operator's parameters."""
    axes = signature.spatial
    kernel = _per_axis("kernel_size", parameters.get("kernel_size"), axes, 1)
    stride = parameters.get("stride")
    stride = kernel if stride is None or _is_empty(stride) else _per_axis("stride", stride, axes, 1)
    padding = _per_axis("padding", parameters.get("padding", 0), axes, 0)
    dilation = _per_axis("dilation", parameters.get("dilation", 1), axes, 1)
    for k, p, d in zip(kernel, padding, dilation, strict=True):
        if 2 * p > effective_kernel(k, d):
            raise PoolGradValueError(
                f"padding: got {p}, wanted at most half of the window's {effective_kernel(k, d)} cells"
            )
    if math.prod(kernel) > sys.maxsize:
        raise PoolGradValueError(f"kernel_size: got {kernel}, wanted at most {sys.maxsize} cells in a window")
    return Window(
        kernel,
        stride,
        padding,
        dilation,
        flag("ceil_mode", parameters.get("ceil_mode", False)),
        flag("count_include_pad", parameters.get("count_include_pad", True)),
        _divisor(parameters.get("divisor_override")),
    )


# -- shapes ------------------------------------------------------------------------------------------------------


def _input_shape(signature: Signature, value: Any) -> Shape:
    if hasattr(type(value), "shape") and len(getattr(value, "shape", ())) > 1:
        raise PoolGradTypeError(f"input_shape: got an array of shape {show(value.shape)}, wanted that shape itself")
    shape = integers("input_shape", value)
    spatial = signature.spatial
    if len(shape) not in (spatial + 1, spatial + 2):
        axes = ", ".join("DHW"[-spatial:])
        raise PoolGradValueError(
            f"input_shape: got {show(shape)} of rank {len(shape)}, wanted (N, C, {axes}) or (C, {axes})"
        )
    if min(shape) < 0:
        raise PoolGradValueError(f"input_shape: got {show(shape)}, wanted no negative size")
    if min(shape[-spatial:]) < 1:
        raise PoolGradValueError(f"input_shape: got {show(shape)}, wanted spatial sizes of at least 1")
    if math.prod(size or 1 for size in shape) * 8 > sys.maxsize:
        raise PoolGradValueError(f"input_shape: got {show(shape)}, more cells than memory can address")
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


def _check_shapes(shapes: Mapping[str, Shape], output_shape: Shape, window: Window | None, input_shape: Shape) -> None:
    """Compare the operands' shapes with the pooling's output and with each other."""
    grad = shapes["grad_output"]
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
    indices = shapes.get("indices", grad)
    if indices != grad:
        hint = ""
        if len(indices) != len(grad):
            hint = f" ({'indices' if len(indices) > len(grad) else 'grad_output'} has the extra axis)"
        raise PoolGradValueError(f"indices: got shape {indices}, wanted grad_output's {grad}{hint}")
    if shapes.get("out", input_shape) != input_shape:
        raise PoolGradValueError(f"out: got shape {shapes['out']}, wanted input_shape {input_shape}")


# -- dtypes ------------------------------------------------------------------------------------------------------


def check_dtype(name: str, dtype: Any, allowed: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    """Give the allowed dtype that this one is, whatever its byte order."""
    try:
        # None would mean float64 to NumPy, also in comparisons.
        native = None if dtype is None else np.dtype(dtype).newbyteorder("=")
    except Exception:  # noqa: BLE001  (NumPy parses strings, lists and dicts here, and raises all sorts)
        native = None
    if native is not None and native in allowed:
        return allowed[allowed.index(native)]  # not the caller's own, which may carry metadata
    wanted = ", ".join(candidate.name for candidate in allowed)
    got = dtype if isinstance(dtype, np.dtype) else show(dtype)
    raise PoolGradTypeError(f"{name}: got dtype {got}, wanted one of {wanted}")


# -- the whole ---------------------------------------------------------------------------------------------------


def describe(
    signature: Signature,
    input_shape: Any,
    parameters: Mapping[str, Any],
    settings: tuple[Any, Any],
    dtypes: Mapping[str, Any],
    shapes: Mapping[str, Shape] | None = None,
) -> Problem:
    """Check what a call or a plan asks for, and describe it.

    ``settings`` are the call's own mode and thread limit; ``dtypes`` those of the values and, for max pooling, of the
    indices, under the names that messages give them, values first. ``shapes`` are those of a call's operands, by name;
    a plan has none yet, and for an adaptive operator then has ``output_size`` among its parameters.
    """
    allowed = (("output_size",) if shapes is None else ()) if signature.adaptive else signature.parameters
    unknown = sorted(set(parameters) - set(allowed))
    if unknown:
        raise PoolGradTypeError(f"{signature.name}: got {', '.join(unknown)}, wanted only {', '.join(allowed)}")
    spatial, window = signature.spatial, None
    size: Shape = ()
    if not signature.adaptive:
        window = _window(signature, parameters)
    elif shapes is not None:
        size = shapes["grad_output"][-spatial:]
    else:
        size = _per_axis("output_size", parameters.get("output_size"), spatial, 0)
    resolved = config.resolve(*settings)
    shape = _input_shape(signature, input_shape)
    output_shape = shape[:-spatial] + size if window is None else _pooled_shape(window, shape, spatial)
    if shapes is not None:
        _check_shapes(shapes, output_shape, window, shape)
    names = list(dtypes)
    dtype = check_dtype(names[0], dtypes[names[0]], VALUE_DTYPES)
    index_dtype = check_dtype(names[1], dtypes[names[1]], INDEX_DTYPES) if signature.indexed else None
    return Problem(
        signature, shape, output_shape, dtype, index_dtype, window, resolved.deterministic, resolved.num_threads
    )


def call_key(
    signature: Signature,
    input_shape: Any,
    parameters: Mapping[str, Any],
    settings: tuple[Any, Any],
    dtypes: Mapping[str, Any],
    shapes: Mapping[str, Shape],
) -> tuple[Any, ...] | None:
    """Give a key that tells whether `describe` was asked this before, at a tenth of its price; ``None`` if it cannot.

    Only plain numbers and lists or tuples of them have one: marshalled, since 1, 1.0 and True are equal as keys.
    """
    values = (input_shape, *parameters.values())
    if not all(map(_is_builtin, values)):
        return None
    try:
        held = config.resolve(*settings)
    except PoolGradError:
        return None
    return signature.name, marshal.dumps(values, 2), held, *dtypes.values(), *shapes.values()


def _is_builtin(value: Any) -> bool:
    kind = type(value)
    if kind is tuple or kind is list:
        return all(type(number) is int for number in value)
    return kind is int or kind is bool or value is None


def check_run(problem: Problem, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Check the operands of a run, by name, against the problem that was planned: shapes, then dtypes."""
    _check_shapes(
        {name: array.shape for name, array in arrays.items()},
        problem.output_shape,
        problem.window,
        problem.input_shape,
    )
    for name, array in arrays.items():
        allowed = problem.index_dtype if name == "indices" else problem.dtype
        if allowed is not None:
            check_dtype(name, array.dtype, (allowed,))
