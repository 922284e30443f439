"""Numbers as the kernels need them: IEEE arithmetic, atomic addition, 16-bit floats, accumulators.

float32 and float64 accumulate in themselves; float16 (as ``uint16``) and bfloat16 (as ``int16``) in float32.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

_ARM = ("aarch64", "arm64")


def machine(context):
    """(architecture, features) that code is generated for, as LLVM spells them."""
    triple, _cpu, features = context.codegen().magic_tuple()
    return str(triple).split("-", maxsplit=1)[0], features.split(",")


# LLVM switches F16C off, whatever else says "+f16c", when one of these is off.
_F16C_NEEDS = {f"-{name}" for name in ("f16c", "avx", "sse4.2", "sse4.1", "ssse3", "sse3", "sse2", "sse")}


def half_in_hardware(context: Any) -> bool:
    """Whether code for this target converts float16 by instructions: F16C, or any AArch64."""
    architecture, features = machine(context)
    return architecture in _ARM or (
        architecture == "x86_64" and "+f16c" in features and _F16C_NEEDS.isdisjoint(features)
    )


# -- floating-point environment ----------------------------------------------------------------------------------

# Round to nearest even, keep subnormals, no traps. MXCSR (x86-64) has a mask bit for each of six exceptions; in FPCR
# (AArch64) all is off, the alternative half format too.
_IEEE_MXCSR = 0x1F80
_IEEE_FPCR = 0


def _mxcsr(builder, name, slot):
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(f"llvm.x86.sse.{name}", fnty=ir.FunctionType(ir.VoidType(), [pointer]))
    builder.call(function, [builder.bitcast(slot, pointer)])


def _set_mode(context, builder, mode):
    """Write the control register from a 64-bit value."""
    architecture, _ = machine(context)
    if architecture == "x86_64":
        slot = builder.alloca(ir.IntType(32))
        builder.store(builder.trunc(mode, ir.IntType(32)), slot)
        _mxcsr(builder, "ldmxcsr", slot)
    elif architecture in _ARM:
        signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.module.declare_intrinsic("llvm.aarch64.set.fpcr", fnty=signature), [mode])


def _get_mode(context, builder):
    """Read the control register as a 64-bit value; 0 where there is none that is known."""
    architecture, _ = machine(context)
    if architecture == "x86_64":
        slot = builder.alloca(ir.IntType(32))
        _mxcsr(builder, "stmxcsr", slot)
        return builder.zext(builder.load(slot), ir.IntType(64))
    if architecture in _ARM:
        signature = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.module.declare_intrinsic("llvm.aarch64.get.fpcr", fnty=signature), [])
    return ir.Constant(ir.IntType(64), 0)


@intrinsic
def enter_ieee_mode(typingctx):
    """Give this thread IEEE arithmetic whatever it had set; returns its former mode for `leave_ieee_mode`.

    MXCSR on x86-64, FPCR on AArch64; elsewhere nothing is done, and the thread's own mode holds.
    """

    def generate(context, builder, signature, args):
        former = _get_mode(context, builder)
        ieee = _IEEE_MXCSR if machine(context)[0] == "x86_64" else _IEEE_FPCR
        _set_mode(context, builder, ir.Constant(ir.IntType(64), ieee))
        return former

    return types.uint64(), generate


@intrinsic
def leave_ieee_mode(typingctx, former):
    """Give the thread back the mode that `enter_ieee_mode` returned."""

    def generate(context, builder, signature, args):
        _set_mode(context, builder, args[0])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


# -- atomic addition -------------------------------------------------------------------------------------------


@intrinsic
def atomic_add(typingctx, array, index, value):
    """``array[index] += value`` as one indivisible step; ``index`` must be inside, ``value`` of the array's dtype."""
    if array.ndim != 1 or array.layout != "C" or value != array.dtype:
        return None

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.atomic_rmw("fadd", builder.gep(data, [args[1]]), args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(array, types.uint64, value), generate


# -- 16-bit floats ---------------------------------------------------------------------------------------------


def _bits(source, target):
    """Make an intrinsic that reads the bits of one number as another type of the same width."""

    @intrinsic
    def reinterpret(typingctx, x):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(target))

        return (target(source), generate) if x == source else None

    return reinterpret


bits_of_float = _bits(types.float32, types.uint32)
float_of_bits = _bits(types.uint32, types.float32)


@register_jitable
def _half_to_float_integer(h):
    # Numba computes with integers in 64 bits: np.uint32 on the outside cuts the result back.
    magnitude = np.uint32(h & 0x7FFF)
    if magnitude < 0x0400:  # zero and subnormals count in units of 2**-24; the product is exact
        value = bits_of_float(np.float32(magnitude) * np.float32(2.0**-24))
    elif magnitude < 0x7C00:
        value = np.uint32((magnitude << 13) + (112 << 23))
    else:  # infinities and NaN
        value = np.uint32((magnitude << 13) + (224 << 23))
    return float_of_bits(np.uint32(value | ((h & 0x8000) << 16)))


@register_jitable
def _float_to_half_integer(x):
    bits = bits_of_float(x)
    u = np.uint32(bits & 0x7FFFFFFF)
    if u > 0x7F800000:
        value = np.uint32(0x7E00)  # NaN
    elif u >= 143 << 23:  # 65536 and above; what lies between 65520 and 65536 rounds up to infinity below
        value = np.uint32(0x7C00)
    elif u >= 113 << 23:
        value = np.uint32((u + 0x0FFF + ((u >> 13) & 1) - (112 << 23)) >> 13)
    else:  # below 2**-14: adding 0.5 lets the addition itself round at half's last subnormal bit, 2**-24
        value = np.uint32(bits_of_float(float_of_bits(u) + np.float32(0.5)) - (126 << 23))
    return np.uint16(value | ((bits >> 16) & 0x8000))


def _each_lane(context, builder, function, signature, x):
    """Call a compiled function that raises nothing on a number, or on each lane of a vector."""
    compiled = context.compile_subroutine(builder, function, signature).fndesc

    def call(number):  # its status is left alone: where the caller's would be kept, an outlined function has none
        return context.call_internal_no_propagate(builder, compiled, signature, [number])[1]

    if not isinstance(x.type, ir.VectorType):
        return call(x)
    result = ir.Constant(ir.VectorType(context.get_value_type(signature.return_type), x.type.count), ir.Undefined)
    for lane in range(x.type.count):
        place = ir.Constant(ir.IntType(32), lane)
        result = builder.insert_element(result, call(builder.extract_element(x, place)), place)
    return result


def _like(x, element):
    """Give the type of ``x``, a number or a vector, with another element."""
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def _splat(kind, number):
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def widen_value(context, builder, stored, x):
    """Give a number, or a vector of them, of the stored type in the accumulation type."""
    if stored == types.uint16:
        # Without F16C LLVM would call a library routine that is not there, and the process would die.
        if half_in_hardware(context):
            return builder.fpext(builder.bitcast(x, _like(x, ir.HalfType())), _like(x, ir.FloatType()))
        return _each_lane(context, builder, lambda h: _half_to_float_integer(h), types.float32(types.uint16), x)
    if stored == types.int16:
        bits = builder.zext(x, _like(x, ir.IntType(32)))
        return builder.bitcast(builder.shl(bits, _splat(bits.type, 16)), _like(x, ir.FloatType()))
    return x


def narrow_value(context, builder, stored, x):
    """Round an accumulated number, or a vector of them, to the stored type, to nearest even."""
    if stored == types.uint16:
        if half_in_hardware(context):
            return builder.bitcast(builder.fptrunc(x, _like(x, ir.HalfType())), _like(x, ir.IntType(16)))
        return _each_lane(context, builder, lambda x: _float_to_half_integer(x), types.uint16(types.float32), x)
    if stored == types.int16:
        kind = _like(x, ir.IntType(32))
        u = builder.bitcast(x, kind)
        high = builder.lshr(u, _splat(kind, 16))
        half_way = builder.add(_splat(kind, 0x7FFF), builder.and_(high, _splat(kind, 1)))
        rounded = builder.lshr(builder.add(u, half_way), _splat(kind, 16))
        magnitude = builder.and_(u, _splat(kind, 0x7FFFFFFF))
        nan = builder.icmp_unsigned(">", magnitude, _splat(kind, 0x7F800000))  # must not round to infinity
        quiet = builder.or_(high, _splat(kind, 0x0040))
        return builder.trunc(builder.select(nan, quiet, rounded), _like(x, ir.IntType(16)))
    return x


@intrinsic
def widen(typingctx, x):
    """Give a stored value in the accumulation type."""
    wide = x if isinstance(x, types.Float) else types.float32

    def generate(context, builder, signature, args):
        return widen_value(context, builder, signature.args[0], args[0])

    return wide(x), generate


@intrinsic
def narrow(typingctx, x, out):
    """Give an accumulated value as ``out`` stores it, rounded once, to nearest even."""

    def generate(context, builder, signature, args):
        return narrow_value(context, builder, signature.return_type, args[0])

    return out.dtype(x, out), generate


# -- accumulators ----------------------------------------------------------------------------------------------


def accumulator(out, scratch):
    """Where to add up the cells of ``out``: ``out`` itself, or for 16-bit results ``scratch``."""
    raise NotImplementedError("compiled code only")


@overload(accumulator)
def _accumulator(out, scratch):
    if out.dtype == scratch.dtype:
        return lambda out, scratch: out
    return lambda out, scratch: scratch


def finish(cells, out):
    """Round what `accumulator` gave into ``out``; nothing to do where it was ``out`` itself."""
    raise NotImplementedError("compiled code only")


@overload(finish)
def _finish(cells, out):
    if out.dtype == cells.dtype:
        return lambda cells, out: None

    def round_into(cells, out):
        for i in range(out.size):
            out[i] = narrow(cells[i], out)

    return round_into
