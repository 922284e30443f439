"""The averaged map: ``out[window(o)] += grad[o] / divisor(o)``, for average pooling of any rank.

``grad`` is (planes, OD*OH, OW) and ``out`` (planes, D*H, W): rows along the last axis. An axis is the tuple
(outputs, cells, kernel, stride, padding); geometry is (depth axis, height axis, width axis, (count_include_pad,
divisor_override or 0)). A term is ``grad[o] / divisor(o)``, computed once. Canonical order is ascending in the flat
output index.

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
from poolgrad_numba.kernels.lanes import MOST_LANES, divide_run, round_pairs, round_run, sum_runs
from poolgrad_numba.kernels.numeric import accumulator, finish, narrow, widen

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
def whole_windows(start, stop, width, include_pad):
    """Bounds in [start, stop) of the outputs whose windows have their whole extent: one divisor serves them all."""
    _, W, kw, sw, pw = width
    first = 0 if include_pad else (pw + sw - 1) // sw
    room = (W + pw if include_pad else W) + pw - kw
    past = room // sw + 1 if room >= 0 else 0
    first = min(max(first, start), stop)
    return first, min(max(past, first), stop)


@helper
def divide_row(grad, terms, rows, start, whole, stop, geometry):
    """terms[o - start] = grad[o] / divisor(o) for outputs [start, stop) of one row.

    ``rows`` is the extent of its windows along D and H; ``whole`` is what `whole_windows` gives. A division, not a
    product with a reciprocal.
    """
    _, _, width, (include_pad, override) = geometry
    kind = terms.dtype.type
    if override != 0:
        divide_run(grad[start:stop], kind(override), terms)
        return
    a, z = whole
    divide_run(grad[a:z], kind(rows * width[2]), terms[a - start : z - start])
    for o in range(start, a):
        terms[o - start] = widen(grad[o]) / kind(rows * extent(o, width, include_pad))
    for o in range(z, stop):
        terms[o - start] = widen(grad[o]) / kind(rows * extent(o, width, include_pad))


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
def lay(grad, slab, od, brick, geometry):
    """Fill a slab: the terms of depth ``od`` that reach the brick, with zeros around them.

    Row j of the slab holds the outputs of row ``q0 - lh + j``, from column ``c0 - lw`` on.
    """
    depth, height, width, (include_pad, _) = geometry
    q0, rows, c0, columns = brick
    OH, OW, lh, lw = height[0], width[0], span(height)[0], span(width)[0]
    pitch = lw + columns
    a = max(c0 - lw, 0)
    z = max(min(c0 + columns, OW), a)
    before = a - (c0 - lw)
    whole = whole_windows(a, z, width, include_pad)
    deep = extent(od, depth, include_pad)
    for j in range(lh + rows):
        oh = q0 - lh + j
        cells = slab[j * pitch : (j + 1) * pitch]
        if 0 <= oh < OH:
            cells[:before] = 0
            terms = cells[before : before + z - a]
            divide_row(grad[od * OH + oh], terms, deep * extent(oh, height, include_pad), a, whole, z, geometry)
            cells[before + z - a :] = 0
        else:
            cells[:] = 0


@helper
def spread_slab(slab, ring, slot, size, slots, starts, brick, geometry):
    """Sum a slab along W, then H, for each phase of the two, into the slot of each phase's ring."""
    _, height, width, _ = geometry
    _, rows, _, columns = brick
    (lh, _, RH), (lw, _, RW) = span(height), span(width)
    pitch = lw + columns
    terms, wide = slab[0], slab[1]
    for rw in range(RW):
        n = taps(rw, width)
        for t in range(n):
            starts[t] = lw + t + 1 - n
        sum_runs(terms, 0, starts[:n], wide[: (lh + rows - 1) * pitch + columns])
        for rh in range(RH):
            n = taps(rh, height)
            for t in range(n):
                starts[t] = (lh + t + 1 - n) * pitch
            at = ((rh * RW + rw) * slots + slot) * size
            sum_runs(wide, 0, starts[:n], ring[at : at + (rows - 1) * pitch + columns])


@helper
def list_runs(starts, d, rh, rw, size, slots, spread, pitch, geometry):
    """List where in the ring the runs start whose sums are the cells of depth ``d``, phases ``rh`` and ``rw``."""
    depth, height, width, _ = geometry
    q, rd = (d + depth[4]) // depth[3], (d + depth[4]) % depth[3]
    n = 0
    for od in range(max(q - taps(rd, depth) + 1, 0), min(q + 1, depth[0])):  # ascending: canonical
        if spread:
            starts[n] = ((rh * span(width)[2] + rw) * slots + od % slots) * size
            n += 1
            continue
        for th in range(taps(rh, height) - 1, -1, -1):
            for tw in range(taps(rw, width) - 1, -1, -1):
                starts[n] = od % slots * size + (span(height)[0] - th) * pitch + span(width)[0] - tw
                n += 1
    return starts[:n]


@helper
def within(first, step, size, columns):
    """Bounds of those i in range(columns) whose ``first + i * step`` lies in range(size)."""
    a = min(max(step - 1 - first, 0) // step, columns)
    return a, max(min((size - 1 - first) // step + 1, columns), a)


@helper
def put(sums, row, first, step):
    """row[first + i * step] = sums[i], rounded once."""
    if step == 1:
        round_run(sums, row[first : first + sums.size])
    else:
        target = row[first::step]
        for i in range(sums.size):
            target[i] = narrow(sums[i], row)


@helper
def put_rows(sums, out, first_row, rows, rw, phases, brick, geometry):
    """Store rows of sums of phases [rw, rw + phases): position ``c0 + i`` of phase r is cell ``(c0+i) * sw + r - pw``.

    ``first_row`` and further, by the stride, are the rows of the plane's depth that they belong to, if it has these.
    """
    _, (_, H, _, sh, _), (_, W, _, sw, pw), _ = geometry
    _, _, c0, columns = brick
    pitch = span(geometry[2])[0] + columns
    first = c0 * sw + rw - pw  # the cell of position c0, phase rw
    a, z = within(first, sw, W, columns)
    pairs = sw == 2 and phases == 2
    if pairs:  # stored by turns, as one run of the row, which vectors can write
        b, y = within(first + 1, sw, W, columns)
        start, stop = max(a, b), max(min(y, z), max(a, b))
    for j in range(rows):
        h = first_row + j * sh
        if not 0 <= h < H:
            continue
        row, at = out[h], j * pitch
        if pairs:
            run = row[first + 2 * start : first + 2 * stop]
            round_pairs(sums[0, at + start : at + stop], sums[1, at + start : at + stop], run)
            put(sums[0, at + a : at + start], row, first + a * sw, sw)
            put(sums[0, at + stop : at + z], row, first + stop * sw, sw)
            put(sums[1, at + b : at + start], row, first + 1 + b * sw, sw)
            put(sums[1, at + stop : at + y], row, first + 1 + stop * sw, sw)
            continue
        put(sums[0, at + a : at + z], row, first + a * sw, sw)
        for r in range(1, phases):
            b, y = within(first + r, sw, W, columns)
            put(sums[r, at + b : at + y], row, first + r + b * sw, sw)


@helper
def sum_cells(out, d, ring, sums, starts, size, slots, spread, brick, geometry):
    """Fill the brick's cells of depth ``d`` from the ring."""
    _, height, width, _ = geometry
    _, H, _, sh, ph = height
    q0, rows, _, columns = brick
    pitch = span(width)[0] + columns
    together = max((sums.shape[1] - MOST_LANES) // pitch, 1)  # short rows are summed in one run
    RW = span(width)[2]
    for rh in range(span(height)[2]):
        for rw in range(0, RW, PHASES):
            phases = min(PHASES, RW - rw)
            for row in range(0, rows, together):
                n = min(together, rows - row)
                for r in range(phases):
                    runs = list_runs(starts, d, rh, rw + r, size, slots, spread, pitch, geometry)
                    sum_runs(ring, row * pitch, runs, sums[r, : (n - 1) * pitch + columns])
                put_rows(sums, out[d * H : (d + 1) * H], (q0 + row) * sh + rh - ph, n, rw, phases, brick, geometry)


@Kernel
def shifted_sums(worker, workers, grad, out, ring, slabs, sums, starts, numbers):
    """Each worker owns a run of (plane, brick, depth), and fills those cells.

    ring: (workers, slabs that cells of one depth need). slabs: (workers, 2, a slab), to spread. sums: (workers,
    `PHASES`, sums made at a time). starts: (workers, terms that reach a cell).
    """
    geometry, (most_rows, most_columns, spread) = unpack(numbers)
    depth, height, width, _ = geometry
    (_, QH, RH), (_, QW, RW) = span(height), span(width)
    slots = min(taps(0, depth), depth[0])
    size = ring.shape[1] // (slots * RH * RW if spread else slots)
    D, bands, columns = depth[1], (QH + most_rows - 1) // most_rows, (QW + most_columns - 1) // most_columns
    items = bands * columns * D
    first, last = share(worker, workers, out.shape[0] * items)
    ready = 0  # depths whose slabs are in the ring, or are no longer needed
    for item in range(first, last):
        p, d, column, band = item // items, item % D, item // D % columns, item // (D * columns) % bands
        q0, c0 = band * most_rows, column * most_columns
        brick = q0, min(most_rows, QH - q0), c0, min(most_columns, QW - c0)
        q = (d + depth[4]) // depth[3]
        if item == first or d == 0:
            ready = max(q - taps(0, depth) + 1, 0)
        while ready <= min(q, depth[0] - 1):
            slot = ready % slots
            if spread:
                lay(grad[p], slabs[worker, 0], ready, brick, geometry)
                spread_slab(slabs[worker], ring[worker], slot, size, slots, starts[worker], brick, geometry)
            else:
                lay(grad[p], ring[worker, slot * size : (slot + 1) * size], ready, brick, geometry)
            ready += 1
        sum_cells(out[p], d, ring[worker], sums[worker], starts[worker], size, slots, spread, brick, geometry)
    return 0


# -- rows --------------------------------------------------------------------------------------------------------


@helper
def covering(i, axis):
    """First and past-the-last output whose window holds cell ``i`` of an axis; empty where strides leave gaps."""
    outputs, _, k, s, p = axis
    first = max(i + p - k + s, 0) // s
    return first, min((i + p) // s + 1, outputs)


@Kernel
def add_rows(worker, workers, grad, out, term, scratch, numbers):
    """Each worker owns a run of blocks of input rows, and adds to each output by output, in canonical order.

    term: (workers, 1). scratch: (workers, a block) for 16-bit values, else (workers, 0).
    """
    geometry, _ = unpack(numbers)
    depth, height, width, (include_pad, _) = geometry
    OH, H, (_, W, kw, sw, pw) = height[0], height[1], width
    n = (W + BLOCK - 1) // BLOCK
    first, last = share(worker, workers, out.shape[0] * out.shape[1] * n)
    for item in range(first, last):
        p, row, base = item // (n * out.shape[1]), item // n % out.shape[1], item % n * BLOCK
        target = out[p, row, base : min(base + BLOCK, W)]
        end = base + target.size
        cells = accumulator(target, scratch[worker])
        cells[:] = 0
        od0, od1 = covering(row // H, depth)
        oh0, oh1 = covering(row % H, height)
        a, _ = covering(base, width)
        _, z = covering(end - 1, width)
        for od in range(od0, od1):
            for oh in range(oh0, oh1):
                for o in range(a, z):
                    rows = extent(od, depth, include_pad) * extent(oh, height, include_pad)
                    divide_row(grad[p, od * OH + oh], term[worker], rows, o, (o, o), o + 1, geometry)
                    run = cells[max(o * sw - pw - base, 0) : max(min(o * sw - pw + kw, end) - base, 0)]
                    for i in range(run.size):
                        run[i] += term[worker, 0]
        finish(cells, target)
    return 0
