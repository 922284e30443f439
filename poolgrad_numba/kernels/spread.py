"""The averaged map axis by axis: terms are spread along W, then H, then D, in another order than the canonical one.

kw + kh + kd additions a cell in place of kw * kh * kd. Geometry and shapes are those of `averaged`.
"""

from poolgrad_numba.kernels._jit import Kernel, helper, share
from poolgrad_numba.kernels.averaged import BLOCK, blocks, covering, divide_run, part, unpack
from poolgrad_numba.kernels.numeric import accumulator, finish


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
        if o0 < o1:
            divide_run(grad[row], terms[o0:o1], row, o0, o1, geometry)
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


# -- each plane owned by one worker ------------------------------------------------------------------------------


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


# -- all planes' rows shared out over the workers, one kernel a stage ----------------------------------------------


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
