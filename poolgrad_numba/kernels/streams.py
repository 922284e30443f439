"""Stores that go past the caches: a line that is written whole need not be read from memory first.

Where a result is larger than the caches, an ordinary store reads the line that it overwrites, which is as much traffic
again: a streaming copy took 0.4 to 0.5 of the time of a plain one.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from poolgrad_numba.kernels.lanes import round_block
from poolgrad_numba.kernels.numeric import machine

LINE = 64  # bytes
STAGE = 512  # 16-bit cells that are rounded at a time, on their way out


@intrinsic
def cells_to_line(typingctx, array):
    """Return how many cells of a 1-d array lie before the first cache line that starts in it (perhaps beyond it)."""
    if array.ndim != 1 or array.layout != "C":
        return None

    def generate(context, builder, signature, args):
        data, cell = _data(context, builder, signature.args[0], args[0])
        return _cells_to_line(builder, data, cell)

    return types.int64(array), generate


@intrinsic
def stream(typingctx, source, target):
    """Copy ``source`` to ``target``, both 1-d, of one dtype and size; whole lines by non-temporal stores.

    Nobody else may read ``target`` before this thread's `fence`.
    """
    if not all(array.ndim == 1 and array.layout == "C" for array in (source, target)) or source.dtype != target.dtype:
        return None

    def generate(context, builder, signature, args):
        (read, cell), (written, _) = (
            _data(context, builder, kind, value) for kind, value in zip(signature.args, args, strict=True)
        )
        array = context.make_array(signature.args[1])(context, builder, args[1])
        size = builder.extract_value(array.shape, 0)
        word, per_line = size.type, ir.Constant(size.type, LINE // cell)
        lead = _cells_to_line(builder, written, cell)
        lead = builder.select(builder.icmp_signed("<", lead, size), lead, size)
        lines = builder.udiv(builder.sub(size, lead), per_line)
        past = builder.add(lead, builder.mul(lines, per_line))

        def copy_cells(start, stop):
            with cgutils.for_range_slice(builder, start, stop, ir.Constant(word, 1)) as (i, _):
                builder.store(builder.load(builder.gep(read, [i])), builder.gep(written, [i]))

        copy_cells(ir.Constant(word, 0), lead)
        vector = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        sources, targets = (builder.bitcast(builder.gep(data, [lead]), vector) for data in (read, written))
        streamed = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, lines) as loop:
            line = builder.load(builder.gep(sources, [loop.index]), align=cell)
            builder.store(line, builder.gep(targets, [loop.index]), align=LINE).set_metadata("nontemporal", streamed)
        copy_cells(past, size)
        return context.get_dummy_value()

    return types.void(source, target), generate


def _data(context, builder, kind, value):
    """Pointer to an array's first cell, and a cell's bytes."""
    data = context.make_array(kind)(context, builder, value).data
    return data, context.get_abi_sizeof(context.get_value_type(kind.dtype))


def _cells_to_line(builder, data, cell):
    word = ir.IntType(64)
    behind = builder.and_(builder.neg(builder.ptrtoint(data, word)), ir.Constant(word, LINE - 1))
    return builder.udiv(behind, ir.Constant(word, cell))


@intrinsic
def fence(typingctx):
    """Make this thread's non-temporal stores visible before whatever it stores next, such as that it is done."""

    def generate(context, builder, signature, args):
        if machine(context)[0] == "x86_64":
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", fnty=function), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def stream_out(cells, out, stage):
    """Stream accumulated ``cells`` into ``out``; 16-bit results by way of ``stage``, `STAGE` cells of theirs."""
    raise NotImplementedError("compiled code only")


@overload(stream_out)
def _stream_out(cells, out, stage):
    if out.dtype == cells.dtype:
        return lambda cells, out, stage: stream(cells, out)

    def by_stages(cells, out, stage):
        for start in range(0, out.size, stage.size):
            target, source = out[start : start + stage.size], cells[start : start + stage.size]
            round_block(source, 0, 0, stage, 0, 0, 1, 1, target.size)
            stream(stage[: target.size], target)

    return by_stages
