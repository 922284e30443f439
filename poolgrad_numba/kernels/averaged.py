"""The averaged map: ``out[window(o)] += grad[o] / divisor(o)``, for average pooling of any rank.

``grad`` is (planes, OD*OH, OW) and ``out`` (planes, D*H, W): rows along the last axis. An axis is the tuple
(outputs, cells, kernel, stride, padding); geometry is (depth axis, height axis, width axis, (count_include_pad,
divisor_override or 0)), and comes in as the flat array ``numbers`` of these 17. A block is at most `BLOCK` cells of
one row: what is split over workers, and what fits in L1.

A term is ``grad[o] / divisor(o)``, computed once. The gather adds a cell's terms in canonical order, ascending in the
flat output index; the spread adds them axis by axis: kw + kh + kd additions a cell in place of kw * kh * kd.
"""

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.numeric import accumulator, finish, widen

BLOCK = 4096


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
def divide_block(grad, terms, row, b, geometry):
    """terms[o] = grad[o] / divisor(o) over block ``b`` of output row ``row`` of a plane."""
    depth, height, width, (include_pad, override) = geometry
    OW, W, kw, sw, pw = width
    start, stop = b * BLOCK, min((b + 1) * BLOCK, OW)
    if override != 0:
        divide_part(grad[start:stop], terms[start:stop], override)
        return
    rows = extent(row // height[0], depth, include_pad) * extent(row % height[0], height, include_pad)
    # Windows [a, z) have their whole extent, so one divisor serves them all; the few others follow one by one.
    a = 0 if include_pad else (pw + sw - 1) // sw
    room = (W + pw if include_pad else W) + pw - kw
    z = room // sw + 1 if room >= 0 else 0
    a = min(max(a, start), stop)
    z = min(max(z, a), stop)
    divide_part(grad[a:z], terms[a:z], rows * kw)
    for o in range(start, a):
        divide_part(grad[o : o + 1], terms[o : o + 1], rows * extent(o, width, include_pad))
    for o in range(z, stop):
        divide_part(grad[o : o + 1], terms[o : o + 1], rows * extent(o, width, include_pad))


@helper
def add_part(source, target):
    """Add ``source`` to ``target``, cell by cell."""
    for i in range(target.size):
        target[i] += source[i]


@helper
def add_windows(terms, cells, base, width):
    """cells[w - base] += terms[o] for each output o of one row whose window holds w; ascending in o for every cell."""
    OW, _, kw, sw, pw = width
    end = base + cells.size
    first, _ = covering(base, width)
    _, last = covering(end - 1, width)
    if kw > last - first:  # long windows, few outputs: one run of cells for each output
        for o in range(first, last):
            start = o * sw - pw
            run = cells[max(start - base, 0) : min(start + kw, end) - base]
            term = terms[o]
            for i in range(run.size):
                run[i] += term
        return
    for tap in range(kw - 1, -1, -1):  # a later tap of the window is an earlier output of the cell
        a = max(base + pw - tap + sw - 1, 0) // sw
        z = min((end - 1 + pw - tap) // sw + 1, OW) if end - 1 + pw >= tap else 0
        if a >= z:
            continue
        source = terms[a:z]
        start = a * sw - pw + tap - base
        if sw == 1:
            add_part(source, cells[start : start + source.size])
        else:
            target = cells[start::sw]
            for i in range(source.size):
                target[i] += source[i]


@helper
def divide_rows(grad, terms, first, last, geometry):
    """Fill the terms of blocks [first, last) of one plane's output rows."""
    n = blocks(grad.shape[1])
    for item in range(first, last):
        row = item // n
        divide_block(grad[row], terms[row], row, item % n, geometry)


@helper
def gather_rows(terms, out, scratch, first, last, geometry):
    """Fill blocks [first, last) of one plane's input rows from its terms (OD*OH, OW), in canonical order."""
    depth, height, width, _ = geometry
    OH, H, W = height[0], height[1], width[1]
    n = blocks(W)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        target = out[row, base : min(base + BLOCK, W)]
        cells = accumulator(target, scratch)
        cells[:] = 0
        od0, od1 = covering(row // H, depth)
        oh0, oh1 = covering(row % H, height)
        for od in range(od0, od1):
            for oh in range(oh0, oh1):
                add_windows(terms[od * OH + oh], cells, base, width)
        finish(cells, target)


@helper
def widen_rows(grad, terms, wide, first, last, geometry):
    """Spread along W: fill blocks [first, last) of ``wide`` (OD*OH, W) from the plane's output rows.

    terms: one worker's room for a row of terms; each block divides only those that reach it.
    """
    width = geometry[2]
    W = width[1]
    n = blocks(W)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        cells = wide[row, base : min(base + BLOCK, W)]
        cells[:] = 0
        o0, _ = covering(base, width)
        _, o1 = covering(base + cells.size - 1, width)
        for b in range(o0 // BLOCK, blocks(o1)):
            divide_block(grad[row], terms, row, b, geometry)
        add_windows(terms, cells, base, width)


@helper
def heighten_rows(wide, high, first, last, geometry):
    """Spread along H: fill blocks [first, last) of ``high`` (OD*H, W) from ``wide`` (OD*OH, W)."""
    _, height, width, _ = geometry
    OH, H, W = height[0], height[1], width[1]
    n = blocks(W)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        end = min(base + BLOCK, W)
        cells = high[row, base:end]
        cells[:] = 0
        oh0, oh1 = covering(row % H, height)
        for oh in range(oh0, oh1):
            add_part(wide[row // H * OH + oh, base:end], cells)


@helper
def deepen_rows(high, out, scratch, first, last, geometry):
    """Spread along D: fill blocks [first, last) of one plane's input rows from ``high`` (OD*H, W)."""
    depth, height, width, _ = geometry
    H, W = height[1], width[1]
    n = blocks(W)
    for item in range(first, last):
        row, base = item // n, item % n * BLOCK
        end = min(base + BLOCK, W)
        target = out[row, base:end]
        cells = accumulator(target, scratch)
        cells[:] = 0
        od0, od1 = covering(row // H, depth)
        for od in range(od0, od1):
            add_part(high[od * H + row % H, base:end], cells)
        finish(cells, target)


# -- each plane owned by one worker: scratch of one plane a worker, which stays in cache ------------------------


@Kernel
def plane_gather(worker, workers, grad, out, terms, scratch, numbers):
    """Each plane is owned by one worker, which divides once and gathers. terms: (workers, OD*OH, OW)."""
    geometry = unpack(numbers)
    first, last = share(worker, workers, grad.shape[0])
    for p in range(first, last):
        divide_rows(grad[p], terms[worker], 0, grad.shape[1] * blocks(grad.shape[2]), geometry)
        gather_rows(terms[worker], out[p], scratch[worker], 0, out.shape[1] * blocks(out.shape[2]), geometry)
    return 0


@Kernel
def plane_spread(worker, workers, grad, out, terms, wide, high, scratch, numbers):
    """Each plane is owned by one worker, which spreads along W, H and D. wide, high: one plane a worker."""
    geometry = unpack(numbers)
    n = blocks(out.shape[2])
    first, last = share(worker, workers, grad.shape[0])
    for p in range(first, last):
        widen_rows(grad[p], terms[worker], wide[worker], 0, wide.shape[1] * n, geometry)
        heighten_rows(wide[worker], high[worker], 0, high.shape[1] * n, geometry)
        deepen_rows(high[worker], out[p], scratch[worker], 0, out.shape[1] * n, geometry)
    return 0


# -- all planes' rows shared out over the workers, one kernel a stage: scratch of every plane -------------------


@helper
def part(p, first, last, items):
    """Return what of plane ``p``'s items lies in [first, last) of all planes' items."""
    return max(first - p * items, 0), min(last - p * items, items)


@Kernel
def divide(worker, workers, grad, terms, numbers):
    """First stage of the gather inside planes: each worker owns a run of the term rows (planes, OD*OH, OW)."""
    geometry = unpack(numbers)
    items = grad.shape[1] * blocks(grad.shape[2])
    first, last = share(worker, workers, grad.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        divide_rows(grad[p], terms[p], a, z, geometry)
    return 0


@Kernel
def gather(worker, workers, terms, out, scratch, numbers):
    """Second stage: each worker owns a run of input rows and gathers them in canonical order."""
    geometry = unpack(numbers)
    items = out.shape[1] * blocks(out.shape[2])
    first, last = share(worker, workers, out.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        gather_rows(terms[p], out[p], scratch[worker], a, z, geometry)
    return 0


@Kernel
def spread_width(worker, workers, grad, terms, wide, numbers):
    """First stage of the spread inside planes: each worker owns a run of the rows of ``wide`` (planes, OD*OH, W)."""
    geometry = unpack(numbers)
    items = wide.shape[1] * blocks(wide.shape[2])
    first, last = share(worker, workers, wide.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        widen_rows(grad[p], terms[worker], wide[p], a, z, geometry)
    return 0


@Kernel
def spread_height(worker, workers, wide, high, numbers):
    """Second stage: each worker owns a run of the rows of ``high`` (planes, OD*H, W)."""
    geometry = unpack(numbers)
    items = high.shape[1] * blocks(high.shape[2])
    first, last = share(worker, workers, high.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        heighten_rows(wide[p], high[p], a, z, geometry)
    return 0


@Kernel
def spread_depth(worker, workers, high, out, scratch, numbers):
    """Third stage: each worker owns a run of input rows."""
    geometry = unpack(numbers)
    items = out.shape[1] * blocks(out.shape[2])
    first, last = share(worker, workers, out.shape[0] * items)
    for p in range(first // items, (last + items - 1) // items):
        a, z = part(p, first, last, items)
        deepen_rows(high[p], out[p], scratch[worker], a, z, geometry)
    return 0
