"""Transposition, by which operands with the channels innermost become planes, and results go back.

Arrays are flat, of unsigned integers as wide as the cells that they carry.
"""

from poolgrad_numba.kernels._jit import Kernel, share

TILE = 64


@Kernel
def transpose(worker, workers, source, target, rows, columns):
    """target[b, c, r] = source[b, r, c]; each worker owns a run of strips of `TILE` rows, of all blocks."""
    strips = (rows + TILE - 1) // TILE
    first, last = share(worker, workers, source.size // (rows * columns) * strips)
    for strip in range(first, last):
        block, r0 = strip // strips * rows * columns, strip % strips * TILE
        height = min(TILE, rows - r0)
        for c0 in range(0, columns, TILE):
            for c in range(c0, min(c0 + TILE, columns)):
                start = block + c * rows + r0
                line, cells = target[start : start + height], source[block + r0 * columns + c :: columns]
                for r in range(height):
                    line[r] = cells[r]
    return 0
