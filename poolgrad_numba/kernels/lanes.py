"""Sums of shifted runs, with a block of sums in vector registers: what the averaged map spends its time on."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Bytes of sums at a time: eight AVX2 registers, as many as keep two additions of four cycles each under way.
_BYTES = 256
MOST_LANES = _BYTES // 4  # how far a sum may read and write past the end of its run


@intrinsic
def sum_shifted(typingctx, source, first, shifts, target):
    """target[i] = source[first + i - shifts[0]] + source[first + i - shifts[1]] + ..., added in that order from +0.0.

    Works on blocks of up to `MOST_LANES` cells: up to one block less a cell beyond the end of ``target`` is written
    too, and as much read; there must be room. Each cell is a sum of its own in a lane of its own, so that the width
    of the machine's vectors cannot matter.
    """
    if not all(array.ndim == 1 and array.layout == "C" for array in (source, shifts, target)):
        return None

    def generate(context, builder, signature, args):
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, args, strict=True)
            if isinstance(kind, types.Array)
        ]
        cells, offsets, sums = (array.data for array in arrays)
        shift_count, cell_count = (builder.extract_value(array.shape, 0) for array in arrays[1:])
        cell = cells.type.pointee
        size = 4 if isinstance(cell, ir.FloatType) else 8
        lanes = _BYTES // size
        vector = ir.VectorType(cell, lanes)
        total = cgutils.alloca_once(builder, vector)  # LLVM keeps it in registers
        step = ir.Constant(cell_count.type, lanes)
        with cgutils.for_range_slice(builder, ir.Constant(cell_count.type, 0), cell_count, step) as (i, _):
            builder.store(ir.Constant(vector, [0.0] * lanes), total)
            here = builder.gep(cells, [builder.add(args[1], i)])
            with cgutils.for_range(builder, shift_count) as loop:
                shift = builder.load(builder.gep(offsets, [loop.index]))
                run = builder.bitcast(builder.gep(here, [builder.neg(shift)]), vector.as_pointer())
                builder.store(builder.fadd(builder.load(total), builder.load(run, align=size)), total)
            place = builder.bitcast(builder.gep(sums, [i]), vector.as_pointer())
            builder.store(builder.load(total), place, align=size)
        return context.get_dummy_value()

    return types.void(source, types.int64, shifts, target), generate
