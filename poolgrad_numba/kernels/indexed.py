"""The indexed map: ``out[p, index[p, o]] += grad[p, o]``, for max pooling of any rank.

``grad`` and ``index`` are (planes, outputs), ``out`` is (planes, cells); an index is flat inside its plane. (Only
`interleaved_scatter` takes them otherwise.)
Every kernel compares each index as an unsigned 64-bit number with the range that it may write, counts those that
are outside the plane, and writes nothing for them.
"""

import numpy as np

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.lanes import widened
from poolgrad_numba.kernels.numeric import accumulator, atomic_add, finish, narrow, widen
from poolgrad_numba.kernels.streams import LINE, cells_to_line, fence, stream_out

STEP = 8192  # cells that a window takes in at a time
PART = 128  # outputs of a plane that are added between two pieces of the plane before, on its way out


@helper
def add_outputs(grad, index, cells):
    """Add a run of outputs to the cells of their plane, in ascending order; return how many lie outside."""
    bad = 0
    inside = np.uint64(cells.size)
    for o in range(grad.size):
        i = np.uint64(index[o])
        if i < inside:
            cells[i] += widen(grad[o])
        else:
            bad += 1
    return bad


@Kernel
def plane_scatter(worker, workers, grad, index, out, scratch):
    """Each plane is owned by one worker, which adds its outputs in ascending order.

    scratch: (workers, cells) in the accumulation type for 16-bit values, else (workers, 0).
    """
    bad = 0
    first, last = share(worker, workers, out.shape[0])
    for p in range(first, last):
        acc = accumulator(out[p], scratch[worker])[: out.shape[1]]
        acc[:] = 0  # here, while the plane is about to be in cache, not in a pass of its own
        bad += add_outputs(grad[p], index[p], acc)
        finish(acc, out[p])
    return bad


@Kernel
def interleaved_scatter(worker, workers, grad, index, out, scratch, channels):
    """Each image, channels last, is owned by one worker, which adds its outputs in ascending order.

    grad and index are (images, outputs x channels), out is (images, cells x channels).
    scratch: (workers, cells x channels) in the accumulation type for 16-bit values, else (workers, 0).
    """
    inside = np.uint64(out.shape[1] // channels)
    bad = 0
    first, last = share(worker, workers, out.shape[0])
    for n in range(first, last):
        acc = accumulator(out[n], scratch[worker])[: out.shape[1]]
        acc[:] = 0
        for start in range(0, index.shape[1], channels):
            g, ix = grad[n, start : start + channels], index[n, start : start + channels]
            for c in range(channels):
                i = np.uint64(ix[c])
                if i < inside:
                    acc[i * np.uint64(channels) + np.uint64(c)] += widen(g[c])
                else:
                    bad += 1
        finish(acc, out[n])
    return bad


@helper
def line_up(target, room):
    """Return how many cells of ``room`` to skip, so that the rest crosses cache lines where ``target`` does."""
    if target.itemsize != room.itemsize:
        return 0
    line = LINE // target.itemsize
    return (line - cells_to_line(target)) % line


@Kernel
def plane_stream(worker, workers, grad, index, out, scratch, terms, stage):
    """Each plane is owned by one worker, which adds its outputs in ascending order in cache, and streams it out.

    By turns: some outputs of one plane are added, then as large a part of the plane before is streamed out and zeroed,
    so that reading, adding and writing overlap; 0.9 of the time of one after the other.
    scratch: (workers, 2, cells and a line more). For 16-bit values, else (workers, 0): terms (workers, `PART`), for as
    many outputs widened by vectors, and stage (workers, `STAGE`).
    """
    outputs, cells = grad.shape[1], out.shape[1]
    parts = max((outputs + PART - 1) // PART, 1)
    line = LINE // out.itemsize
    piece = (cells + line * parts - 1) // (line * parts) * line  # whole lines of a plane, to go with each part
    bad = 0
    first, last = share(worker, workers, out.shape[0])
    scratch[worker] = 0
    for p in range(first, last + 1):
        target, coming = out[max(p - 1, first)], out[min(p, last - 1)]
        done = scratch[worker, (p + 1) % 2, line_up(target, scratch) :]
        acc = scratch[worker, p % 2, line_up(coming, scratch) :]
        start, stop = 0, cells_to_line(target)
        for part in range(parts):
            if p < last:
                a, z = part * PART, min((part + 1) * PART, outputs)
                values = widened(grad[p, a:z], terms[worker])[: z - a]
                bad += add_outputs(values, index[p, a:z], acc[:cells])
            if p > first:
                stop = min(stop + piece, cells) if part + 1 < parts else cells
                stream_out(done[start:stop], target[start:stop], stage[worker])
                done[start:stop] = 0
                start = stop
    fence()
    return bad


@helper
def first_from(index, cell):
    """Find the first output that points to ``cell`` or beyond, by halving: right where indices ascend."""
    low, high = 0, index.size
    while low < high:
        middle = (low + high) // 2
        if index[middle] < cell:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def advance(acc, out, stage, reach, index, window, end):
    """Move the window over a plane's cells on, until it holds ``index``; give the window.

    A window is (cell at acc[0], first cell not yet streamed out, cell up to which acc is in use). Cells that lie more
    than ``reach`` before ``index`` are done; no cell beyond ``end`` is taken in.
    """
    base, done, top = window
    line = LINE // out.itemsize
    while top <= index:
        keep = max(done, min(index - reach, top))
        part = out[done:keep]
        whole = (part.size - cells_to_line(part)) // line * line + cells_to_line(part)
        if whole > 0:  # up to where a line ends, lest a line go out in two halves
            stream_out(acc[done - base : done - base + whole], out[done : done + whole], stage)
            done += whole
        if top - base + STEP > acc.size:
            for i in range(top - done):
                acc[i] = acc[done - base + i]
            base = done
        step = min(STEP, end - top)
        acc[top - base : top - base + step] = 0
        top += step
    return base, done, top


@helper
def sweep_band(grad, index, out, acc, stage, reach, band, bands):
    """Fill one band of a plane's cells; give how many outputs lie outside the plane, or -1 for indices that jump back.

    An output belongs to the band at whose beginning the outputs from it on may first point into it, and it is looked at
    there: it must point into that band, or into the one before where that looks at it, too.
    """
    cells, outputs = out.size, index.size
    before = max(band - 1, 0) * cells // bands
    start, end = share(band, bands, cells)
    first = first_from(index, start - reach) if band > 0 else 0
    mine = first_from(index, end - reach) if band + 1 < bands else outputs
    earlier = first_from(index, start + reach) if band > 0 else 0
    last = first_from(index, end + reach) if band + 1 < bands else outputs
    if band > 1 and first_from(index, before - reach) > first:
        return -1
    base, done, top = start, start, start
    bad = 0
    o = first
    while o < max(last, mine):
        acc_from, live = done - base, np.uint64(top - done)
        g, ix, sums = grad[o : max(last, mine)], index[o : max(last, mine)], acc[acc_from:]
        n = g.size
        for i in range(n):
            cell = np.uint64(ix[i]) - np.uint64(done)
            if cell >= live:
                n = i
                break
            sums[cell] += widen(g[i])
        o += n
        if o >= max(last, mine):
            break
        i = np.int64(index[o])
        if done <= i < end:
            base, done, top = advance(acc, out, stage, reach, i, (base, done, top), end)
            continue
        if i < 0 or i >= cells:
            bad += o < mine
        elif start <= i < done or (o < mine and (i >= end or i < before or o >= earlier)):
            return -1
        o += 1
    while True:  # what is in the window, and then zeros
        stream_out(acc[done - base : top - base], out[done:top], stage)
        if top == end:
            return bad
        base, done = top, top
        top = min(top + STEP, end)
        acc[: top - base] = 0


@Kernel
def sweep(worker, workers, grad, index, out, scratch, stage, reach, bands, failed):
    """Each worker owns bands of planes' cells, over which a window moves, as the outputs point further on.

    In each cell outputs are added in ascending order. Indices ascend but for ``reach`` where a forward made them; where
    they do not, ``failed`` is set, and ``out`` is not filled. scratch: (workers, window). stage: as for `plane_stream`.
    """
    bad = 0
    first, last = share(worker, workers, out.shape[0] * bands)
    for item in range(first, last):
        p, band = item // bands, item % bands
        found = sweep_band(grad[p], index[p], out[p], scratch[worker], stage[worker], reach, band, bands)
        if found < 0:
            failed[worker] = 1
            break
        bad += found
    fence()
    return bad


@Kernel
def segment_ranges(worker, workers, index, cells, segment, tile, low, high, visits):
    """Record each segment's lowest and highest index; segments are runs of ``segment`` outputs of one plane.

    low, high: (planes, segments). visits[worker]: how many outputs `tile_reduce` would look at, tile by tile.
    """
    planes, segments = low.shape
    outputs = index.shape[1]
    bad = 0
    visits[worker] = 0
    first, last = share(worker, workers, planes * segments)
    for s in range(first, last):
        p, start = s // segments, s % segments * segment
        part = index[p, start : min(start + segment, outputs)]
        lowest, highest = np.int64(part[0]), np.int64(part[0])
        for o in range(part.size):
            i = np.int64(part[o])
            lowest, highest = min(lowest, i), max(highest, i)
        if lowest < 0 or highest >= cells:
            for o in range(part.size):
                bad += np.uint64(part[o]) >= np.uint64(cells)
        else:
            visits[worker] += (highest // tile - lowest // tile + 1) * part.size
        low[p, s % segments], high[p, s % segments] = lowest, highest
    return bad


@Kernel
def tile_reduce(worker, workers, grad, index, out, segment, tile, low, high, scratch):
    """Each tile, a run of ``tile`` cells of one plane, is owned by one worker, which adds what reaches it in order.

    Segments whose index range misses the tile are skipped. scratch: (workers, tile) or (workers, 0).
    """
    planes, cells = out.shape
    tiles = (cells + tile - 1) // tile
    first, last = share(worker, workers, planes * tiles)
    for t in range(first, last):
        p, base = t // tiles, t % tiles * tile
        end = min(base + tile, cells)
        target, lows, highs = out[p, base:end], low[p], high[p]
        acc = accumulator(target, scratch[worker])[: target.size]
        acc[:] = 0
        inside = np.uint64(end - base)
        for s in range(lows.size):
            if lows[s] < end and highs[s] >= base:
                g, ix = grad[p, s * segment : (s + 1) * segment], index[p, s * segment : (s + 1) * segment]
                for o in range(ix.size):
                    i = np.uint64(np.int64(ix[o]) - base)
                    if i < inside:
                        acc[i] += widen(g[o])
        finish(acc, target)
    return 0


@Kernel
def fill_zero(worker, workers, cells):
    """Each worker zeroes its part of the flat array ``cells``."""
    first, last = share(worker, workers, cells.size)
    cells[first:last] = 0
    return 0


@Kernel
def atomic_scatter(worker, workers, grad, index, acc):
    """Outputs are shared out over workers, which add atomically into the zeroed ``acc`` (planes, cells)."""
    planes, outputs = grad.shape
    cells = np.uint64(acc.shape[1])
    bad = 0
    first, last = share(worker, workers, planes * outputs)
    for p in range(first // outputs, planes):
        start, stop = max(first - p * outputs, 0), min(last - p * outputs, outputs)
        if start >= stop:
            break
        g, ix, plane = grad[p, start:stop], index[p, start:stop], acc[p]
        for o in range(ix.size):
            i = np.uint64(ix[o])
            if i < cells:
                atomic_add(plane, i, widen(g[o]))
            else:
                bad += 1
    return bad


@Kernel
def round_cells(worker, workers, acc, out):
    """Each worker rounds its part of the flat ``acc`` into the 16-bit ``out``."""
    first, last = share(worker, workers, out.size)
    source, target = acc[first:last], out[first:last]
    for i in range(target.size):
        target[i] = narrow(source[i], target)
    return 0
