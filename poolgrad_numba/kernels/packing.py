"""Transposition, by which operands with the channels innermost become planes, and results go back.

Arrays are flat, of unsigned integers as wide as the cells that they carry.
"""

from poolgrad_numba.kernels._jit import Kernel, share
from poolgrad_numba.kernels.lanes import TURNED, turn_tile

STRIP = 64  # rows: of 4-byte cells, four cache lines of each column of the target


@Kernel
def transpose(worker, workers, source, target, rows, columns):
    """target[b, c, r] = source[b, r, c]; each worker owns a run of strips of `STRIP` rows, of all blocks.

    In tiles, of which the last overlap those before; what is too narrow for them goes cell by cell.
    """
    strips = (rows + STRIP - 1) // STRIP
    first, last = share(worker, workers, source.size // (rows * columns) * strips)
    for strip in range(first, last):
        block, top = strip // strips * rows * columns, strip % strips * STRIP
        height = min(STRIP, rows - top)
        if height < TURNED or columns < TURNED:
            for c in range(columns):
                for r in range(top, top + height):
                    target[block + c * rows + r] = source[block + r * columns + c]
            continue
        for c in range(0, columns, TURNED):
            left = min(c, columns - TURNED)
            for r in range(0, height, TURNED):
                row = top + min(r, height - TURNED)
                turn_tile(source, block + row * columns + left, columns, target, block + left * rows + row, rows)
    return 0
