"""What the averaged map spends its time on: sums of runs, with a block of sums in registers, and runs cell by cell."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from poolgrad_numba.kernels.numeric import narrow_value, widen_value

# Bytes of sums at a time: eight AVX2 registers, as many as keep two additions of four cycles each under way.
_BYTES = 256
MOST_LANES = _BYTES // 4  # how far a sum may read and write past the end of its run


@intrinsic
def sum_runs(typingctx, source, first, starts, target):
    """target[i] = source[first + starts[0] + i] + source[first + starts[1] + i] + ..., in that order from +0.0.

    Works on blocks of up to `MOST_LANES` cells: up to one block less a cell beyond the end of ``target`` is written
    too, and as much read; there must be room. Each cell is a sum of its own in a lane of its own, so that the width
    of the machine's vectors cannot matter.
    """
    if not all(array.ndim == 1 and array.layout == "C" for array in (source, starts, target)):
        return None

    def generate(context, builder, signature, args):
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, args, strict=True)
            if isinstance(kind, types.Array)
        ]
        cells, offsets, sums = (array.data for array in arrays)
        run_count, cell_count = (builder.extract_value(array.shape, 0) for array in arrays[1:])
        cell = cells.type.pointee
        size = 4 if isinstance(cell, ir.FloatType) else 8
        lanes = _BYTES // size
        vector = ir.VectorType(cell, lanes)
        total = cgutils.alloca_once(builder, vector)  # LLVM keeps it in registers
        step = ir.Constant(cell_count.type, lanes)
        with cgutils.for_range_slice(builder, ir.Constant(cell_count.type, 0), cell_count, step) as (i, _):
            builder.store(ir.Constant(vector, [0.0] * lanes), total)
            here = builder.gep(cells, [builder.add(args[1], i)])
            with cgutils.for_range(builder, run_count) as loop:
                start = builder.load(builder.gep(offsets, [loop.index]))
                run = builder.bitcast(builder.gep(here, [start]), vector.as_pointer())
                builder.store(builder.fadd(builder.load(total), builder.load(run, align=size)), total)
            place = builder.bitcast(builder.gep(sums, [i]), vector.as_pointer())
            builder.store(builder.load(total), place, align=size)
        return context.get_dummy_value()

    return types.void(source, types.int64, starts, target), generate


# -- cell by cell ------------------------------------------------------------------------------------------------


def _by_lanes(builder, count, body):
    """Do ``body(i, lanes)`` for all of ``range(count)``, in vectors of 8 or 4 cells.

    The last vector overlaps the one before instead of leaving cells over: rows are short, and a loop over the rest
    took longer than the vectors. So ``body`` may meet a cell twice.
    """

    def number(value):
        return ir.Constant(count.type, value)

    def at_least(value):
        return builder.icmp_signed(">=", count, number(value))

    with builder.if_else(at_least(8)) as (long, short):
        with long:
            with cgutils.for_range_slice(builder, number(0), builder.sub(count, number(8)), number(8)) as (i, _):
                body(i, 8)
            body(builder.sub(count, number(8)), 8)
        with short, builder.if_else(at_least(4)) as (half, single):
            with half:
                body(number(0), 4)
                body(builder.sub(count, number(4)), 4)
            with single, cgutils.for_range(builder, count) as loop:
                body(loop.index, 1)


def _runs(context, builder, signature, args):
    """Give (load, store, count) of each array argument; load and store take a cell's place."""

    def run(kind, value):
        array = context.make_array(kind)(context, builder, value)
        cell = array.data.type.pointee
        size = context.get_abi_sizeof(cell)

        def at(i, lanes):
            return builder.bitcast(builder.gep(array.data, [i]), ir.VectorType(cell, lanes).as_pointer())

        def load(i, lanes):
            return builder.load(at(i, lanes), align=size)

        def store(cells, i):
            builder.store(cells, at(i, cells.type.count), align=size)

        return load, store, builder.extract_value(array.shape, 0)

    return [run(kind, value) for kind, value in zip(signature.args, args, strict=True) if isinstance(kind, types.Array)]


def _are_runs(*arrays):
    return all(array.ndim == 1 and array.layout == "C" for array in arrays)


@intrinsic
def divide_run(typingctx, source, divisor, target):
    """target[i] = source[i] / divisor, in the accumulation type. The two share no memory."""
    if not _are_runs(source, target) or divisor != target.dtype:
        return None

    def generate(context, builder, signature, args):
        (load, _, _), (_, store, count) = _runs(context, builder, signature, args)

        def body(i, lanes):
            wide = widen_value(context, builder, source.dtype, load(i, lanes))
            whole = ir.Constant(wide.type, ir.Undefined)
            for lane in range(lanes):
                whole = builder.insert_element(whole, args[1], ir.Constant(ir.IntType(32), lane))
            store(builder.fdiv(wide, whole), i)

        _by_lanes(builder, count, body)
        return context.get_dummy_value()

    return types.void(source, divisor, target), generate


@intrinsic
def round_run(typingctx, source, target):
    """target[i] = source[i], rounded once to what ``target`` stores. The two share no memory."""
    if not _are_runs(source, target):
        return None

    def generate(context, builder, signature, args):
        (load, _, _), (_, store, count) = _runs(context, builder, signature, args)
        _by_lanes(
            builder, count, lambda i, lanes: store(narrow_value(context, builder, target.dtype, load(i, lanes)), i)
        )
        return context.get_dummy_value()

    return types.void(source, target), generate


@intrinsic
def round_pairs(typingctx, even, odd, target):
    """target[2 * i], target[2 * i + 1] = even[i], odd[i], rounded as by `round_run`; for each i of ``even``."""
    if not _are_runs(even, odd, target):
        return None

    def generate(context, builder, signature, args):
        (load_even, _, count), (load_odd, _, _), (_, store, _) = _runs(context, builder, signature, args)

        def body(i, lanes):
            by_turns = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for lane in pair]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * lanes), by_turns)
            pairs = builder.shuffle_vector(load_even(i, lanes), load_odd(i, lanes), mask)
            store(narrow_value(context, builder, target.dtype, pairs), builder.shl(i, ir.Constant(i.type, 1)))

        _by_lanes(builder, count, body)
        return context.get_dummy_value()

    return types.void(even, odd, target), generate
