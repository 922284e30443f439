"""Runs of cells, with vectors: what the averaged map spends its time on.

A run is given as a flat array and the place of its first cell in it, and not as a slice: making slices took longer than
the work on short rows, to run and to compile. Nothing here checks a place.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from poolgrad_numba.kernels.numeric import narrow_value, widen_value

# Bytes of sums at a time: eight AVX2 registers, as many as keep two additions of four cycles each under way.
_BYTES = 256
MOST_LANES = _BYTES // 4  # how far a sum may read and write past the end of its run


def _flat(*arrays):
    return all(isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" for array in arrays)


def _outlined(build):
    """Make what an intrinsic generates one LLVM function a module, which is called: `build` writes its body.

    LLVM optimises each level of a kernel anew: inlined at a dozen places, these bodies took 11 s to compile, not 2.
    `build(context, builder, kinds, args)` gets arrays as pointers to their first cells.
    """

    def generate(context, builder, signature, args):
        plain = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, args, strict=True)
        ]
        kinds = [getattr(kind, "dtype", kind) for kind in signature.args]
        name = f"poolgrad.{build.__qualname__.split('.')[0]}.{'.'.join(map(str, kinds))}"
        if name not in builder.module.globals:
            function = ir.Function(
                builder.module, ir.FunctionType(ir.VoidType(), [value.type for value in plain]), name
            )
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block("entry"))
            build(context, inside, kinds, function.args)
            inside.ret_void()
        builder.call(builder.module.globals[name], plain)
        return context.get_dummy_value()

    return generate


def _cells(context, builder, data):
    """Give (load, store) of the cells behind a pointer; a store takes a vector, and a cell's place."""
    cell = data.type.pointee
    size = context.get_abi_sizeof(cell)

    def at(place, lanes):
        return builder.bitcast(builder.gep(data, [place]), ir.VectorType(cell, lanes).as_pointer())

    def load(place, lanes):
        return builder.load(at(place, lanes), align=size)

    def store(cells, place):
        builder.store(cells, at(place, cells.type.count), align=size)

    return load, store


def _word(number):
    return ir.Constant(ir.IntType(64), number)


def _by_lanes(builder, count, body):
    """Do ``body(i, lanes)`` for all of ``range(count)``, in vectors of 8 or 4 cells.

    The last vector overlaps the one before instead of leaving cells over: rows are short, and a loop over the rest
    took longer than the vectors. So ``body`` may meet a cell twice.
    """
    with builder.if_else(builder.icmp_signed(">=", count, _word(8))) as (long, short):
        with long:
            last = builder.sub(count, _word(8))
            with cgutils.for_range_slice(builder, _word(0), last, _word(8)) as (i, _):
                body(i, 8)
            body(last, 8)
        with short, builder.if_else(builder.icmp_signed(">=", count, _word(4))) as (half, single):
            with half:
                body(_word(0), 4)
                body(builder.sub(count, _word(4)), 4)
            with single, cgutils.for_range(builder, count) as loop:
                body(loop.index, 1)


@intrinsic
def sum_runs(typingctx, source, first, starts, begin, end, target, at, count):
    """Sum the runs of ``count`` cells that start at ``first + starts[j]``, begin <= j < end, in that order from +0.0.

    Works on blocks of up to `MOST_LANES` cells: up to one block less a cell beyond the end of the target is written
    too, and as much read; there must be room. Each cell is a sum of its own in a lane of its own, so that the width
    of the machine's vectors cannot matter.
    """
    if not _flat(source, starts, target) or source.dtype != target.dtype:
        return None

    def build(context, builder, kinds, args):
        source, first, starts, begin, end, target, at, count = args
        load, _ = _cells(context, builder, source)
        load_start, _ = _cells(context, builder, starts)
        _, store = _cells(context, builder, target)
        cell = source.type.pointee
        lanes = _BYTES // context.get_abi_sizeof(cell)
        zeros = ir.Constant(ir.VectorType(cell, lanes), [0.0] * lanes)
        total = cgutils.alloca_once(builder, zeros.type)  # LLVM keeps it in registers
        with cgutils.for_range_slice(builder, _word(0), count, _word(lanes)) as (i, _):
            builder.store(zeros, total)
            here = builder.add(first, i)
            with cgutils.for_range_slice(builder, begin, end, _word(1)) as (j, _):
                start = builder.extract_element(load_start(j, 1), ir.Constant(ir.IntType(32), 0))
                run = load(builder.add(here, start), lanes)
                builder.store(builder.fadd(builder.load(total), run), total)
            store(builder.load(total), builder.add(at, i))

    whole = types.int64
    return types.void(source, whole, starts, whole, whole, target, whole, whole), _outlined(build)


@intrinsic
def zero_run(typingctx, target, at, count):
    """Zero a run of cells."""
    if not _flat(target):
        return None

    def build(context, builder, kinds, args):
        target, at, count = args
        _, store = _cells(context, builder, target)
        cell = target.type.pointee

        def body(i, lanes):
            store(ir.Constant(ir.VectorType(cell, lanes), [0.0] * lanes), builder.add(at, i))

        _by_lanes(builder, count, body)

    return types.void(target, types.int64, types.int64), _outlined(build)


@intrinsic
def divide_run(typingctx, source, place, divisor, target, at, count):
    """target[at + i] = source[place + i] / divisor, in the target's type: a division, not a product."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, place, divisor, target, at, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)
        divisor = context.cast(builder, divisor, kinds[2], kinds[3])

        def body(i, lanes):
            wide = widen_value(context, builder, kinds[0], load(builder.add(place, i), lanes))
            divisors = ir.Constant(wide.type, ir.Undefined)
            for lane in range(lanes):
                divisors = builder.insert_element(divisors, divisor, ir.Constant(ir.IntType(32), lane))
            store(builder.fdiv(wide, divisors), builder.add(at, i))

        _by_lanes(builder, count, body)

    return types.void(source, types.int64, types.int64, target, types.int64, types.int64), _outlined(build)


@intrinsic
def round_run(typingctx, source, place, target, at, step, count):
    """target[at + i * step] = source[place + i], rounded once to what ``target`` stores."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, place, target, at, step, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)

        def rounded(i, lanes):
            return narrow_value(context, builder, kinds[2], load(builder.add(place, i), lanes))

        with builder.if_else(builder.icmp_signed("==", step, _word(1))) as (dense, sparse):
            with dense:
                _by_lanes(builder, count, lambda i, lanes: store(rounded(i, lanes), builder.add(at, i)))
            with sparse, cgutils.for_range(builder, count) as loop:
                store(rounded(loop.index, 1), builder.add(at, builder.mul(loop.index, step)))

    whole = types.int64
    return types.void(source, whole, target, whole, whole, whole), _outlined(build)


@intrinsic
def round_pairs(typingctx, source, even, odd, target, at, count):
    """target[at + 2 * i], target[at + 2 * i + 1] = source[even + i], source[odd + i], rounded as by `round_run`."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, even, odd, target, at, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)

        def body(i, lanes):
            by_turns = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for lane in pair]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * lanes), by_turns)
            pairs = builder.shuffle_vector(load(builder.add(even, i), lanes), load(builder.add(odd, i), lanes), mask)
            pairs = narrow_value(context, builder, kinds[3], pairs)
            store(pairs, builder.add(at, builder.shl(i, _word(1))))

        _by_lanes(builder, count, body)

    whole = types.int64
    return types.void(source, whole, whole, target, whole, whole), _outlined(build)


@intrinsic
def add_run(typingctx, target, at, number, divisor, count):
    """target[at + i] += number / divisor."""
    if not _flat(target) or number != target.dtype:
        return None

    def build(context, builder, kinds, args):
        target, at, number, divisor, count = args
        load, store = _cells(context, builder, target)
        term = builder.fdiv(number, context.cast(builder, divisor, kinds[3], kinds[2]))
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(at, loop.index)
            cell = load(place, 1)
            one = builder.insert_element(ir.Constant(cell.type, ir.Undefined), term, ir.Constant(ir.IntType(32), 0))
            store(builder.fadd(cell, one), place)

    whole = types.int64
    return types.void(target, whole, number, whole, whole), _outlined(build)
