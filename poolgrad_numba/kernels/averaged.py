"""The averaged map: ``out[window(o)] += grad[o] / divisor(o)``, for average pooling of any rank.

``grad`` is (planes, OD*OH, OW) and ``out`` (planes, D*H, W): rows along the last axis. An axis is the tuple
(outputs, cells, kernel, stride, padding); geometry is (depth axis, height axis, width axis, (count_include_pad,
divisor_override or 0)), and comes in as the flat array ``numbers`` of these 17. A block is at most `BLOCK` cells of
one row: what is split over workers, and what fits in L1.

A term is ``grad[o] / divisor(o)``, computed once. Canonical order is ascending in the flat output index.

The **gather** lays a plane's terms out on a grid with zeros around them. Along an axis, cell ``i`` has the position
``q, r = divmod(i + padding, stride)``, and the terms that reach it are those of the outputs ``q - t`` with
``t * stride + r < kernel``: for all cells of one phase ``r``, the same run of the grid, shifted by ``t``. So the cells
of one phase are sums of shifted runs, ascending in the output as ``t`` falls, and a zero from around the terms changes
no bit (a sum from +0.0 is never -0.0).

The **rows** add each output's term to its run of cells, row by row: as canonical, and better where strides are long.
"""

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.lanes import sum_shifted
from poolgrad_numba.kernels.numeric import accumulator, finish, narrow, widen

BLOCK = 4096
GATHER = 2048  # cells that the gather sums at a time: with the runs that it reads, they fit in L1


@helper
def blocks(length):
    """Blocks in a row of ``length`` cells."""
    return (length + BLOCK - 1) // BLOCK


@helper
def unpack(numbers):
    """Give the geometry as tuples; an array is the only form in which prange takes it."""
    n = numbers
    return (
        (n[0], n[1], n[2], n[3], n[4]),
        (n[5], n[6], n[7], n[8], n[9]),
        (n[10], n[11], n[12], n[13], n[14]),
        (n[15], n[16]),
    )


@helper
def covering(i, axis):
    """First and past-the-last output whose window holds cell ``i`` of an axis; empty where strides leave gaps."""
    outputs, _, k, s, p = axis
    first = max(i + p - k + s, 0) // s
    return first, min((i + p) // s + 1, outputs)


@helper
def extent(o, axis, include_pad):
    """Cells of window ``o`` of an axis that count in the divisor: with padding, but never the ceil_mode overhang."""
    _, size, k, s, p = axis
    start = o * s - p
    end = min(start + k, size + p)
    return end - start if include_pad else min(end, size) - max(start, 0)


@helper
def divide_part(grad, terms, divisor):
    """Fill ``terms`` with grad / divisor, in the accumulation type: a division, not a product with a reciprocal."""
    divisor = terms.dtype.type(divisor)
    for i in range(grad.size):
        terms[i] = widen(grad[i]) / divisor


@helper
def divide_run(grad, terms, row, start, stop, geometry):
    """terms[o - start] = grad[o] / divisor(o) for outputs [start, stop) of row ``row`` of a plane."""
    depth, height, width, (include_pad, override) = geometry
    _, W, kw, sw, pw = width
    if override != 0:
        divide_part(grad[start:stop], terms, override)
        return
    rows = extent(row // height[0], depth, include_pad) * extent(row % height[0], height, include_pad)
    # Windows [a, z) have their whole extent, so one divisor serves them all; the few others follow one by one.
    a = 0 if include_pad else (pw + sw - 1) // sw
    room = (W + pw if include_pad else W) + pw - kw
    z = room // sw + 1 if room >= 0 else 0
    a = min(max(a, start), stop)
    z = min(max(z, a), stop)
    divide_part(grad[a:z], terms[a - start : z - start], rows * kw)
    for o in range(start, a):
        divide_part(grad[o : o + 1], terms[o - start : o - start + 1], rows * extent(o, width, include_pad))
    for o in range(z, stop):
        divide_part(grad[o : o + 1], terms[o - start : o - start + 1], rows * extent(o, width, include_pad))


@helper
def span(axis):
    """Positions of an axis of the grid: (zeros before the first term, positions of cells after those)."""
    _, size, k, s, p = axis
    return (k + s - 1) // s - 1, (size - 1 + p) // s + 1


@helper
def taps(r, axis):
    """Terms that reach a cell of phase ``r``."""
    k, s = axis[2], axis[3]
    return max(k - r + s - 1, 0) // s


@helper
def grid_rows(geometry):
    """(rows, cells of a row) of the grid."""
    depth, height, width, _ = geometry
    (ld, qd), (lh, qh), (lw, qw) = span(depth), span(height), span(width)
    return (ld + qd) * (lh + qh), lw + qw


@helper
def lay_rows(grad, grid, first, last, geometry):
    """Fill blocks [first, last) of the rows of one plane's flat ``grid``: its terms, and zeros around them."""
    depth, height, width, _ = geometry
    OD, OH, OW = depth[0], height[0], width[0]
    (ld, _), (lh, qh), (lw, _) = span(depth), span(height), span(width)
    pitch = grid_rows(geometry)[1]
    n = blocks(pitch)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        end = min(base + BLOCK, pitch)
        cells = grid[row * pitch + base : row * pitch + end]
        od, oh = row // (lh + qh) - ld, row % (lh + qh) - lh
        a, z = max(base - lw, 0), min(end - lw, OW)
        if 0 <= od < OD and 0 <= oh < OH and a < z:
            cells[: a + lw - base] = 0
            divide_run(grad[od * OH + oh], cells[a + lw - base : z + lw - base], od * OH + oh, a, z, geometry)
            cells[z + lw - base :] = 0
        else:
            cells[:] = 0


@helper
def gather_blocks(geometry):
    """How the gather cuts a plane: (rows of a block, its columns, blocks of rows of a phase, of columns).

    Rows of one phase are neighbours on the grid: short ones are summed together, in one run.
    """
    qh, qw = span(geometry[1])[1], span(geometry[2])[1]
    pitch = grid_rows(geometry)[1]
    rows = max(GATHER // pitch, 1)
    columns = qw if rows > 1 else min(qw, GATHER)
    return rows, columns, (qh + rows - 1) // rows, (qw + columns - 1) // columns


@helper
def gather_items(geometry):
    """Parts into which the gather of one plane can be split."""
    _, _, n, m = gather_blocks(geometry)
    return geometry[0][1] * geometry[1][3] * n * m


@helper
def list_shifts(shifts, d, h, w, area, pitch):
    """Fill the shifts of ``d * h * w`` taps in canonical order, the earliest output first; gives their part."""
    n = 0
    for td in range(d - 1, -1, -1):
        for th in range(h - 1, -1, -1):
            for tw in range(w - 1, -1, -1):
                shifts[n] = td * area + th * pitch + tw
                n += 1
    return shifts[:n]


@helper
def gather_part(grid, out, sums, shifts, first, last, geometry):
    """Fill items [first, last) of one plane's rows from its grid. sums: (stride of the width, room for a block)."""
    depth, height, width, _ = geometry
    _, H, _, sh, ph = height
    _, W, _, sw, pw = width
    (ld, _), (lh, qh), (lw, qw) = span(depth), span(height), span(width)
    pitch = grid_rows(geometry)[1]
    area = (lh + qh) * pitch
    rows, columns, n, m = gather_blocks(geometry)
    for item in range(first, last):
        d, rh = item // (m * n * sh), item // (m * n) % sh
        q0, c0 = item // m % n * rows, item % m * columns
        q1, c1 = min(q0 + rows, qh), min(c0 + columns, qw)
        qd, rd = (d + depth[4]) // depth[3], (d + depth[4]) % depth[3]
        start = (qd + ld) * area + (q0 + lh) * pitch + c0 + lw
        length = (q1 - q0 - 1) * pitch + c1 - c0
        for rw in range(sw):
            reach = list_shifts(shifts, taps(rd, depth), taps(rh, height), taps(rw, width), area, pitch)
            sum_shifted(grid, start, reach, sums[rw, :length])
        for q in range(q0, q1):
            h = q * sh + rh - ph
            if 0 <= h < H:
                row = out[d * H + h]
                for rw in range(sw):
                    a = max(c0, (max(pw - rw, 0) + sw - 1) // sw)
                    z = min(c1, (W - 1 + pw - rw) // sw + 1)
                    if a < z:
                        place = (q - q0) * pitch - c0
                        put(sums[rw, place + a : place + z], row, a * sw + rw - pw, sw)


@helper
def put(sums, row, start, step):
    """row[start + i * step] = sums[i], rounded once."""
    if step == 1:
        target = row[start : start + sums.size]
        for i in range(sums.size):
            target[i] = narrow(sums[i], row)
    else:
        target = row[start::step]
        for i in range(sums.size):
            target[i] = narrow(sums[i], row)


@helper
def add_rows(grad, out, term, scratch, first, last, geometry):
    """Fill blocks [first, last) of one plane's input rows, output by output in canonical order."""
    depth, height, width, _ = geometry
    OH, H, (_, W, kw, sw, pw) = height[0], height[1], width
    n = blocks(W)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        target = out[row, base : min(base + BLOCK, W)]
        end = base + target.size
        cells = accumulator(target, scratch)
        cells[:] = 0
        od0, od1 = covering(row // H, depth)
        oh0, oh1 = covering(row % H, height)
        a, _ = covering(base, width)
        _, z = covering(end - 1, width)
        for od in range(od0, od1):
            for oh in range(oh0, oh1):
                for o in range(a, z):
                    divide_run(grad[od * OH + oh], term, od * OH + oh, o, o + 1, geometry)
                    run = cells[max(o * sw - pw - base, 0) : max(min(o * sw - pw + kw, end) - base, 0)]
                    for i in range(run.size):
                        run[i] += term[0]
        finish(cells, target)


# -- each plane owned by one worker: scratch of one plane a worker, which stays in cache ------------------------


@Kernel
def plane_gather(worker, workers, grad, out, grid, sums, shifts, numbers):
    """Each plane is owned by one worker, which lays its terms out and gathers. grid: (workers, cells)."""
    geometry = unpack(numbers)
    rows, pitch = grid_rows(geometry)
    first, last = share(worker, workers, grad.shape[0])
    for p in range(first, last):
        lay_rows(grad[p], grid[worker], 0, rows * blocks(pitch), geometry)
        gather_part(grid[worker], out[p], sums[worker], shifts[worker], 0, gather_items(geometry), geometry)
    return 0


# -- all planes' rows shared out over the workers, one kernel a stage: scratch of every plane -------------------


@helper
def part(p, first, last, items):
    """Return what of plane ``p``'s items lies in [first, last) of all planes' items."""
    return max(first - p * items, 0), min(last - p * items, items)


@Kernel
def lay(worker, workers, grad, grid, numbers):
    """First stage of the gather inside planes: each worker owns a run of the grids' rows. grid: (planes, cells)."""
    geometry = unpack(numbers)
    rows, pitch = grid_rows(geometry)
    items = rows * blocks(pitch)
    first, last = share(worker, workers, grad.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        lay_rows(grad[p], grid[p], a, z, geometry)
    return 0


@Kernel
def gather(worker, workers, grid, out, sums, shifts, numbers):
    """Second stage: each worker owns a run of blocks of input rows and gathers them in canonical order."""
    geometry = unpack(numbers)
    items = gather_items(geometry)
    first, last = share(worker, workers, out.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        gather_part(grid[p], out[p], sums[worker], shifts[worker], a, z, geometry)
    return 0


@Kernel
def add_outputs(worker, workers, grad, out, term, scratch, numbers):
    """Each worker owns a run of input rows and adds to them output by output. term: (workers, 1)."""
    geometry = unpack(numbers)
    items = out.shape[1] * blocks(out.shape[2])
    first, last = share(worker, workers, out.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        add_rows(grad[p], out[p], term[worker], scratch[worker], a, z, geometry)
    return 0
