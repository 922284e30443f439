"""The indexed map: ``out[p, index[p, o]] += grad[p, o]``, for max pooling of any rank.

``grad`` and ``index`` are (planes, outputs), ``out`` is (planes, cells); an index is flat inside its plane.
Every kernel compares each index as an unsigned 64-bit number with the range that it may write, counts those that
are outside the plane, and writes nothing for them.
"""

import numpy as np

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.numeric import accumulator, atomic_add, finish, narrow, widen
from poolgrad_numba.kernels.streams import LINE, cells_to_line, fence, stream_out

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


@helper
def line_up(target, room):
    """Return how many cells of ``room`` to skip, so that the rest crosses cache lines where ``target`` does."""
    if target.itemsize != room.itemsize:
        return 0
    line = LINE // target.itemsize
    return (line - cells_to_line(target)) % line


@Kernel
def plane_stream(worker, workers, grad, index, out, scratch, stage):
    """Each plane is owned by one worker, which adds its outputs in ascending order in cache, and streams it out.

    By turns: some outputs of one plane are added, then as large a part of the plane before is streamed out and zeroed,
    so that reading, adding and writing overlap; 0.9 of the time of one after the other.
    scratch: (workers, 2, cells and a line more). stage: (workers, `STAGE`) for 16-bit values, else (workers, 0).
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
                bad += add_outputs(grad[p, a:z], index[p, a:z], acc[:cells])
            if p > first:
                stop = min(stop + piece, cells) if part + 1 < parts else cells
                stream_out(done[start:stop], target[start:stop], stage[worker])
                done[start:stop] = 0
                start = stop
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
