"""Runs and blocks of cells, with vectors: what the averaged map spends its time on.

A run is given as a flat array and the place of its first cell in it, and not as a slice: making slices took longer than
the work on short rows, to run and to compile. A block is rows of a run each, one ``pitch`` or ``stride`` apart. Nothing
here checks a place.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from poolgrad_numba.kernels.numeric import narrow_value, widen_value

# Bytes of sums at a time: eight AVX2 registers, as many as keep two additions of four cycles each under way.
_BYTES = 256
MOST_LANES = _BYTES // 4  # how far a sum may read and write past the end of its run


def _flat(*arrays):
    return all(isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" for array in arrays)


def _outlined(build, *, small=True):
    """Make what an intrinsic generates one LLVM function a module, which is called: `build` writes its body.

    LLVM optimises each level of a kernel anew: inlined at a dozen places, these bodies took 11 s to compile, not 2.
    Most have their vectors already and are kept ``small``: unrolled and vectorised again they took 1 s more, and ran no
    faster.
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
            if small:
                function.attributes.add("optsize")
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


def _block(builder, rows, count, body):
    """Do ``body(row, i, lanes)`` for all of ``range(rows)`` and ``range(count)``, as `_by_lanes` does."""
    with cgutils.for_range(builder, rows) as loop:
        _by_lanes(builder, count, lambda i, lanes: body(loop.index, i, lanes))


def _in_row(builder, at, row, pitch, i):
    return builder.add(builder.add(at, builder.mul(row, pitch)), i)


@intrinsic
def zero_run(typingctx, target, at, count):
    """Zero a run of cells."""
    if not _flat(target):
        return None

    def build(context, builder, kinds, args):
        target, at, count = args
        _, store = _cells(context, builder, target)

        def body(i, lanes):
            store(ir.Constant(ir.VectorType(target.type.pointee, lanes), [0.0] * lanes), builder.add(at, i))

        _by_lanes(builder, count, body)

    return types.void(target, types.int64, types.int64), _outlined(build)


@intrinsic
def list_steps(typingctx, target, at, first, step, count):
    """target[at + i] = first + i * step."""

    def build(context, builder, kinds, args):
        target, at, first, step, count = args
        with cgutils.for_range(builder, count) as loop:
            number = builder.add(first, builder.mul(loop.index, step))
            builder.store(number, builder.gep(target, [builder.add(at, loop.index)]))

    whole = types.int64
    return types.void(target, whole, whole, whole, whole), _outlined(build)


@intrinsic
def widen_run(typingctx, source, target):
    """target[i] = source[i], in the accumulation type, for all of the source."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, target, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)
        _by_lanes(builder, count, lambda i, lanes: store(widen_value(context, builder, kinds[0], load(i, lanes)), i))

    def generate(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        whole = (*signature.args, types.int64)
        size = builder.extract_value(array.shape, 0)
        return _outlined(build)(context, builder, types.void(*whole), (*args, size))

    return types.void(source, target), generate


def widened(values, room):
    """Give stored values in the accumulation type: as they are, or in as much of ``room`` as they need."""
    raise NotImplementedError("compiled code only")


@overload(widened, jit_options={"_nrt": False})
def _widened(values, room):
    if values.dtype == room.dtype:
        return lambda values, room: values

    def fill(values, room):
        widen_run(values, room)
        return room

    return fill


@intrinsic
def divide_block(typingctx, source, place, stride, divisor, target, at, pitch, rows, count):
    """target[at + row * pitch + i] = source[place + row * stride + i] / divisor, in the target's type."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, place, stride, divisor, target, at, pitch, rows, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)
        divisor = context.cast(builder, divisor, kinds[3], kinds[4])

        def body(row, i, lanes):
            cells = load(_in_row(builder, place, row, stride, i), lanes)
            wide = widen_value(context, builder, kinds[0], cells)
            divisors = ir.Constant(wide.type, ir.Undefined)
            for lane in range(lanes):
                divisors = builder.insert_element(divisors, divisor, ir.Constant(ir.IntType(32), lane))
            store(builder.fdiv(wide, divisors), _in_row(builder, at, row, pitch, i))

        _block(builder, rows, count, body)

    whole = types.int64
    return types.void(source, whole, whole, whole, target, whole, whole, whole, whole), _outlined(build)


@intrinsic
def round_block(typingctx, source, place, pitch, target, at, stride, step, rows, count):
    """target[at + row * stride + i * step] = source[place + row * pitch + i], rounded once to ``target``'s dtype."""
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, place, pitch, target, at, stride, step, rows, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)

        def rounded(row, i, lanes):
            return narrow_value(context, builder, kinds[3], load(_in_row(builder, place, row, pitch, i), lanes))

        def body(row, i, lanes):
            store(rounded(row, i, lanes), _in_row(builder, at, row, stride, i))

        with builder.if_else(builder.icmp_signed("==", step, _word(1))) as (dense, sparse):
            with dense:
                _block(builder, rows, count, body)
            with sparse, cgutils.for_range(builder, rows) as row, cgutils.for_range(builder, count) as column:
                i = builder.mul(column.index, step)
                store(rounded(row.index, column.index, 1), _in_row(builder, at, row.index, stride, i))

    whole = types.int64
    return types.void(source, whole, whole, target, whole, whole, whole, whole, whole), _outlined(build)


@intrinsic
def round_pairs(typingctx, source, even, odd, pitch, target, at, stride, rows, count):
    """Store ``source[even + row * pitch + i]`` and ``source[odd + row * pitch + i]`` by turns, as by `round_block`.

    They go to ``target[at + row * stride + 2 * i]`` and to the cell after it.
    """
    if not _flat(source, target):
        return None

    def build(context, builder, kinds, args):
        source, even, odd, pitch, target, at, stride, rows, count = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)

        def body(row, i, lanes):
            by_turns = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for lane in pair]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * lanes), by_turns)
            first, second = (load(_in_row(builder, place, row, pitch, i), lanes) for place in (even, odd))
            pairs = narrow_value(context, builder, kinds[4], builder.shuffle_vector(first, second, mask))
            store(pairs, _in_row(builder, at, row, stride, builder.shl(i, _word(1))))

        _block(builder, rows, count, body)

    whole = types.int64
    return types.void(source, whole, whole, whole, target, whole, whole, whole, whole), _outlined(build)


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
    return types.void(target, whole, number, whole, whole), _outlined(build, small=False)


TURNED = 8  # rows and columns of `turn_tile`


@intrinsic
def turn_tile(typingctx, source, place, stride, target, at, pitch):
    """target[at + c * pitch + r] = source[place + r * stride + c], for r and c in range(`TURNED`)."""
    if not _flat(source, target) or source.dtype != target.dtype:
        return None

    def build(context, builder, kinds, args):
        source, place, stride, target, at, pitch = args
        load, _ = _cells(context, builder, source)
        _, store = _cells(context, builder, target)
        rows = [load(_in_row(builder, place, _word(r), stride, _word(0)), TURNED) for r in range(TURNED)]
        half = TURNED // 2
        halves = [
            ir.Constant(ir.VectorType(ir.IntType(32), TURNED), [i + j for i in range(k, k + half) for j in (0, TURNED)])
            for k in (0, half)
        ]
        for _ in range(3):  # each time rows i and i + 4 go by turns; after three times columns are rows
            rows = [builder.shuffle_vector(rows[i], rows[i + half], mask) for i in range(half) for mask in halves]
        for c, row in enumerate(rows):
            store(row, _in_row(builder, at, _word(c), pitch, _word(0)))

    whole = types.int64
    return types.void(source, whole, whole, target, whole, whole), _outlined(build)
