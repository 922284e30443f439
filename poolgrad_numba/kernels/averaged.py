"""The averaged map: ``out[window(o)] += grad[o] / divisor(o)``, for average pooling of any rank.

``grad`` is (planes, OD, OH, OW) and ``out`` (planes, D, H, W); kernels get both flat, and scratch too, of which each
worker has its own part. An axis is the tuple (outputs, cells, kernel, stride, padding); geometry is (depth axis, height
axis, width axis, (count_include_pad, divisor_override or 0)). A term is ``grad[o] / divisor(o)``, computed once, by a
division, not a product with a reciprocal. Canonical order is ascending in the flat output index.

**Shifted sums.** Along an axis, cell ``i`` has the position ``q, r = divmod(i + padding, stride)``, and the terms that
reach it are those of the outputs ``q - t`` with ``t * stride + r < kernel``: for all cells of one phase ``r``, the same
run of the terms, shifted by ``t``. So terms are laid out in slabs (one depth each) with zeros around them, and the
cells of one phase are sums of shifted runs. To *gather* is to sum all ``kd * kh * kw`` of them, in canonical order; a
zero from around the terms changes no bit, as a sum from +0.0 is never -0.0. To *spread* is to sum along W, then H, then
D: ``kw + kh + kd`` additions a cell in another order.

A **brick** is a band of positions of H by a block of positions of W. Its slabs are made one depth after the other and
kept, in a ring, for as long as cells need them: all in cache.

**Rows.** Each output's term is added to its run of cells, row by row: as canonical, and better where strides are long.
"""

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.lanes import (
    MOST_LANES,
    add_run,
    divide_block,
    list_steps,
    round_block,
    round_pairs,
    sum_runs,
    zero_run,
)
from poolgrad_numba.kernels.numeric import widen

BLOCK = 4096  # cells of a row that are added to at a time, row by row
PHASES = 4  # of W, whose sums are made together and then stored by turns


@helper
def unpack(numbers):
    """Give the geometry as tuples, and (rows, columns, spread); an array is the only form in which prange takes it."""
    n = numbers
    return (
        (n[0], n[1], n[2], n[3], n[4]),
        (n[5], n[6], n[7], n[8], n[9]),
        (n[10], n[11], n[12], n[13], n[14]),
        (n[15], n[16]),
    ), (n[17], n[18], n[19])


# -- terms -------------------------------------------------------------------------------------------------------


@helper
def extent(o, axis, include_pad):
    """Cells of window ``o`` of an axis that count in the divisor: with padding, but never the ceil_mode overhang."""
    _, size, k, s, p = axis
    start = o * s - p
    end = min(start + k, size + p)
    return end - start if include_pad else min(end, size) - max(start, 0)


@helper
def whole_windows(start, stop, axis, divide):
    """Bounds in [start, stop) of the outputs whose windows have their whole extent: one divisor serves them all."""
    _, size, k, s, p = axis
    include_pad, override = divide
    if override != 0:
        return start, stop
    first = 0 if include_pad else (p + s - 1) // s
    room = (size + p if include_pad else size) + p - k
    past = room // s + 1 if room >= 0 else 0
    first = min(max(first, start), stop)
    return first, min(max(past, first), stop)


# -- shifted sums --------------------------------------------------------------------------------------------------


@helper
def span(axis):
    """Of an axis: (zeros before the first term, positions of cells, phases that have cells)."""
    _, size, k, s, p = axis
    return (k + s - 1) // s - 1, (size - 1 + p) // s + 1, min(s, size + p)


@helper
def taps(r, axis):
    """Terms that reach a cell of phase ``r``."""
    k, s = axis[2], axis[3]
    return max(k - r + s - 1, 0) // s


@helper
def lay(grad, p, od, slabs, at, brick, geometry):
    """Fill the zeroed slab at ``at`` with the terms of plane ``p``, depth ``od``, that reach the brick.

    Its row j holds the outputs of row ``q0 - lh + j``, from column ``c0 - lw`` on.
    """
    depth, height, width, divide = geometry
    q0, rows, c0, columns = brick
    OH, OW, lh, lw = height[0], width[0], span(height)[0], span(width)[0]
    pitch = lw + columns
    top, left = max(q0 - lh, 0), max(c0 - lw, 0)
    bottom, right = min(q0 + rows, OH), min(c0 + columns, OW)
    tall, wide = whole_windows(top, bottom, height, divide), whole_windows(left, right, width, divide)
    oh = top
    while oh < bottom:  # blocks with one divisor each: all at once where windows are whole, else output by output
        below = tall[1] if tall[0] == oh < tall[1] else oh + 1
        ow = left
        while ow < right:
            after = wide[1] if wide[0] == ow < wide[1] else ow + 1
            divisor = divide[1]
            if divisor == 0:
                divisor = extent(od, depth, divide[0]) * extent(oh, height, divide[0]) * extent(ow, width, divide[0])
            source = ((p * depth[0] + od) * OH + oh) * OW + ow
            target = at + (oh - q0 + lh) * pitch + ow - c0 + lw
            divide_block(grad, source, OW, divisor, slabs, target, pitch, below - oh, after - ow)
            ow = after
        oh = below


@helper
def spread_slab(slabs, slab, wide, ring, slot, size, slots, starts, begin, phases, brick, geometry):
    """Sum the slab at ``slab`` along W, into ``wide``, then along H into the ring, for some phases of the two."""
    _, height, width, _ = geometry
    _, rows, _, columns = brick
    rh, rw, count = phases
    lh, lw = span(height)[0], span(width)[0]
    pitch = lw + columns
    for r in range(count):
        n = taps(rw + r, width)
        list_steps(starts, begin, lw + 1 - n, 1, n)
        sum_runs(slabs, slab, starts, begin, begin + n, slabs, wide, (lh + rows - 1) * pitch + columns)
        n = taps(rh, height)
        list_steps(starts, begin, (lh + 1 - n) * pitch, pitch, n)
        at = slot + r * slots * size
        sum_runs(slabs, wide, starts, begin, begin + n, ring, at, (rows - 1) * pitch + columns)


@helper
def list_runs(starts, begin, d, rh, rw, r, size, slots, spread, pitch, geometry):
    """List where in the ring the runs start whose sums are the cells of depth ``d``, phases ``rh`` and ``rw + r``."""
    depth, height, width, _ = geometry
    q, rd = (d + depth[4]) // depth[3], (d + depth[4]) % depth[3]
    n = begin
    for od in range(max(q - taps(rd, depth) + 1, 0), min(q + 1, depth[0])):  # ascending: canonical
        if spread:
            starts[n] = (r * slots + od % slots) * size
            n += 1
            continue
        at = od % slots * size + span(height)[0] * pitch + span(width)[0]
        for th in range(taps(rh, height) - 1, -1, -1):
            across = taps(rw + r, width)
            list_steps(starts, n, at - th * pitch + 1 - across, 1, across)
            n += across
    return n


@helper
def within(first, step, size, columns):
    """Bounds of those i in range(columns) whose ``first + i * step`` lies in range(size)."""
    a = min(max(step - 1 - first, 0) // step, columns)
    return a, max(min((size - 1 - first) // step + 1, columns), a)


@helper
def put_rows(sums, at, room, out, plane, first_row, rows, rw, phases, brick, geometry):
    """Store rows of sums of phases [rw, rw + phases): position ``c0 + i`` of phase r is cell ``(c0+i) * sw + r - pw``.

    ``plane`` is the place of the cells of one depth in ``out``, of which ``first_row`` and further, by the stride, are
    the rows, as far as there are such. The sums of each phase have ``room`` cells.
    """
    _, (_, H, _, sh, _), (_, W, _, sw, pw), _ = geometry
    _, _, c0, columns = brick
    pitch = span(geometry[2])[0] + columns
    top, bottom = within(first_row, sh, H, rows)
    at, rows = at + top * pitch, bottom - top
    first = c0 * sw + rw - pw  # the cell of position c0, phase rw
    row, stride = plane + (first_row + top * sh) * W + first, sh * W
    a, z = within(first, sw, W, columns)
    if sw != 2 or phases != 2:
        for r in range(phases):
            a, z = within(first + r, sw, W, columns)
            round_block(sums, at + r * room + a, pitch, out, row + r + a * sw, stride, sw, rows, z - a)
        return
    # Two phases go by turns, as one run of each row, which vectors can write; a cell on either side may be left.
    b, y = within(first + 1, sw, W, columns)
    start = max(a, b)
    stop = max(min(y, z), start)
    round_pairs(sums, at + start, at + room + start, pitch, out, row + 2 * start, stride, rows, stop - start)
    for r in range(2):
        a, z = within(first + r, sw, W, columns)
        here, there = at + r * room, row + r
        round_block(sums, here + a, pitch, out, there + a * 2, stride, 2, rows, start - a)
        round_block(sums, here + stop, pitch, out, there + stop * 2, stride, 2, rows, z - stop)


@Kernel
def shifted_sums(worker, workers, grad, out, ring, slabs, sums, starts, numbers):
    """Each worker owns a run of (plane, brick, group of phases, depth), and fills those cells.

    Gathering, all phases are one group; spreading, up to `PHASES` of W and one of H are, since each has its own ring.
    ring: the slabs that cells of one depth need. slabs: two, to spread. sums: `PHASES` runs of sums made at a time.
    starts: where the terms are that reach a cell.
    """
    geometry, (most_rows, most_columns, spread) = unpack(numbers)
    depth, height, width, _ = geometry
    _, H, _, sh, ph = height
    (_, QH, RH), (lw, QW, RW) = span(height), span(width)
    my_ring, my_slabs = worker * (ring.size // workers), worker * (slabs.size // workers)
    my_sums, my_starts = worker * (sums.size // workers), worker * (starts.size // workers)
    slots = min(taps(0, depth), depth[0])
    size = ring.size // workers // (slots * min(RW, PHASES) if spread else slots)
    room = sums.size // workers // PHASES
    D, blocks = depth[1], (QW + most_columns - 1) // most_columns
    wide_groups = (RW + PHASES - 1) // PHASES
    groups = RH * wide_groups if spread else 1
    bricks = (QH + most_rows - 1) // most_rows * blocks
    items = bricks * groups * D
    first, last = share(worker, workers, out.size // (D * H * width[1]) * items)
    ready = 0  # depths whose slabs are in the ring, or are no longer needed
    for item in range(first, last):
        p, d, group, part = item // items, item % D, item // D % groups, item // (D * groups) % bricks
        q0, c0 = part // blocks * most_rows, part % blocks * most_columns
        rows, columns = min(most_rows, QH - q0), min(most_columns, QW - c0)
        brick = q0, rows, c0, columns
        low, high = (group, group + 1) if spread else (0, RH * wide_groups)
        q = (d + depth[4]) // depth[3]
        if item == first or d == 0:
            ready = max(q - taps(0, depth) + 1, 0)
            if spread:  # what lies around the terms stays zero for the whole brick
                zero_run(slabs, my_slabs, slabs.size // workers)
            else:
                zero_run(ring, my_ring, ring.size // workers)
        while ready <= min(q, depth[0] - 1):
            slot = my_ring + ready % slots * size
            if spread:
                wide = my_slabs + slabs.size // workers // 2
                rw = group % wide_groups * PHASES
                phases = group // wide_groups, rw, min(PHASES, RW - rw)
                lay(grad, p, ready, slabs, my_slabs, brick, geometry)
                spread_slab(slabs, my_slabs, wide, ring, slot, size, slots, starts, my_starts, phases, brick, geometry)
            else:
                lay(grad, p, ready, ring, slot, brick, geometry)
            ready += 1
        pitch = lw + columns
        together = max((room - MOST_LANES) // pitch, 1)  # short rows are summed in one run
        for which in range(low, high):
            rh, rw = which // wide_groups, which % wide_groups * PHASES
            phases = min(PHASES, RW - rw)
            for row in range(0, rows, together):
                n = min(together, rows - row)
                for r in range(phases):
                    end = list_runs(starts, my_starts, d, rh, rw, r, size, slots, spread, pitch, geometry)
                    at, length = my_sums + r * room, (n - 1) * pitch + columns
                    sum_runs(ring, my_ring + row * pitch, starts, my_starts, end, sums, at, length)
                plane = (p * D + d) * H * width[1]
                first_row = (q0 + row) * sh + rh - ph
                put_rows(sums, my_sums, room, out, plane, first_row, n, rw, phases, brick, geometry)
    return 0


# -- rows --------------------------------------------------------------------------------------------------------


@helper
def covering(i, axis):
    """First and past-the-last output whose window holds cell ``i`` of an axis; empty where strides leave gaps."""
    outputs, _, k, s, p = axis
    first = max(i + p - k + s, 0) // s
    return first, min((i + p) // s + 1, outputs)


@Kernel
def add_rows(worker, workers, grad, out, sums, numbers):
    """Each worker owns a run of blocks of input rows, and adds to each output by output, in canonical order.

    sums: a block.
    """
    geometry, _ = unpack(numbers)
    (OD, D, _, _, _), (OH, H, _, _, _), (OW, W, kw, sw, pw), (include_pad, override) = geometry
    depth, height, width, _ = geometry
    my_sums = worker * (sums.size // workers)
    n = (W + BLOCK - 1) // BLOCK
    first, last = share(worker, workers, out.size // W * n)
    for item in range(first, last):
        line, base = item // n, item % n * BLOCK
        p, d, h = line // (D * H), line // H % D, line % H
        end = min(base + BLOCK, W)
        zero_run(sums, my_sums, end - base)
        od0, od1 = covering(d, depth)
        oh0, oh1 = covering(h, height)
        a, _ = covering(base, width)
        _, z = covering(end - 1, width)
        for od in range(od0, od1):
            for oh in range(oh0, oh1):
                rows = extent(od, depth, include_pad) * extent(oh, height, include_pad)
                row = ((p * OD + od) * OH + oh) * OW
                for o in range(a, z):
                    start, stop = max(o * sw - pw, base), min(o * sw - pw + kw, end)
                    divisor = override if override != 0 else rows * extent(o, width, include_pad)
                    add_run(sums, my_sums + start - base, widen(grad[row + o]), divisor, stop - start)
        round_block(sums, my_sums, 0, out, line * W + base, 0, 1, 1, end - base)
    return 0
