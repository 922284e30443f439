"""How the averaged map can be run: the candidates of average pooling, in order of preference for each mode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.kernels import averaged as kernels
from poolgrad_numba.kernels import spread as spread_kernels
from poolgrad_numba.kernels.lanes import MOST_LANES
from poolgrad_numba.launch import launch
from poolgrad_numba.operands import Block, Operands
from poolgrad_numba.ops.splits import judge_planes
from poolgrad_numba.plan import Candidate, Plan, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poolgrad_numba.problem import Problem, Window

Axis = tuple[int, int, int, int, int]


def _window(problem: Problem) -> Window:
    if problem.window is None:
        raise TypeError(f"{problem.signature.name} has no window")
    return problem.window


def axes(problem: Problem) -> tuple[Axis, Axis, Axis]:
    """(outputs, cells, kernel, stride, padding) of the depth, height and width axis."""
    window = _window(problem)
    missing = 3 - problem.signature.spatial
    kernel = (1,) * missing + window.kernel_size
    stride = (1,) * missing + window.stride
    padding = (0,) * missing + window.padding
    depth, height, width = zip(problem.output_size, problem.input_size, kernel, stride, padding, strict=True)
    return depth, height, width


def geometry(problem: Problem) -> NDArray[np.int64]:
    """What the kernels know of the window: the three axes, and how to divide."""
    window = _window(problem)
    divide = (window.count_include_pad, window.divisor_override or 0)
    return np.array([*(number for axis in axes(problem) for number in axis), *divide], np.int64)


def additions(problem: Problem) -> tuple[float, float]:
    """Additions a cell of the gather and of the spread; 3 stands for the spread's passes over its intermediates."""
    taps = [min(-(-kernel // stride), outputs) for outputs, _, kernel, stride, _ in axes(problem)]
    depth, height = (outputs / cells for outputs, cells, *_ in axes(problem)[:2])
    return math.prod(taps), taps[2] * depth * height + taps[1] * depth + taps[0] + 3


def _wide_rows(problem: Problem) -> tuple[int, int]:
    """Shape of one plane spread along W: (OD*OH, W)."""
    OD, OH, _ = problem.output_size
    return OD * OH, problem.input_size[2]


def _high_rows(problem: Problem) -> tuple[int, int]:
    """Shape of one plane spread along W and H: (OD*H, W)."""
    return problem.output_size[0] * problem.input_size[1], problem.input_size[2]


def spans(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Of each axis of the gather's grid: (zeros before the first term, positions of cells after those)."""
    return tuple((-(-k // s) - 1, (size - 1 + p) // s + 1) for _, size, k, s, p in axes(problem))


def _grid(problem: Problem) -> tuple[int, int]:
    """Shape of one plane's grid, with room for what a sum reads beyond its end."""
    return 1, math.prod(lead + positions for lead, positions in spans(problem)) + MOST_LANES


def _rows(problem: Problem, operands: Operands) -> tuple[NDArray[Any], NDArray[Any]]:
    """Give ``grad_output`` and the result as planes of rows."""
    OD, OH, OW = problem.output_size
    D, H, W = problem.input_size
    return (
        operands.grad.reshape(problem.planes, OD * OH, OW),
        operands.out.reshape(problem.planes, D * H, W),
    )


def _rounding_room(problem: Problem, workers: int) -> Block:
    """Room for a block of sums for each worker; 16-bit results only."""
    block = 0 if problem.dtype == problem.accumulator else min(kernels.BLOCK, problem.input_size[2])
    return Block((workers, block), problem.accumulator)


# Tiles work on so many planes at a time that their scratch stays below this, and on one plane at least.
_ROUND_BYTES: Final = 64 << 20


def _planes_a_round(problem: Problem, rows: tuple[tuple[int, int], ...]) -> int:
    """Planes whose scratch, ``rows`` of each, is made at a time."""
    plane = sum(map(math.prod, rows)) * problem.accumulator.itemsize
    return max(1, min(problem.planes, _ROUND_BYTES // plane))


def _rounds(problem: Problem, scratch: NDArray[Any]) -> list[tuple[slice, slice]]:
    """Planes of each round, and the part of the scratch that they fill; its first axis is planes."""
    step = len(scratch)
    starts = range(0, problem.planes, step)
    return [(slice(p, p + step), slice(0, min(step, problem.planes - p))) for p in starts]


def _row_pieces(problem: Problem) -> int:
    D, H, W = problem.input_size
    return problem.planes * D * H * -(-W // kernels.BLOCK)


def _gather_scratch(problem: Problem, workers: int, grids: int) -> tuple[Block, ...]:
    _, _, kernel, stride, _ = zip(*axes(problem), strict=True)
    taps = math.prod(-(-k // s) for k, s in zip(kernel, stride, strict=True))
    return (
        Block((grids, _grid(problem)[1]), problem.accumulator),
        Block((workers, stride[2], kernels.GATHER + MOST_LANES), problem.accumulator),
        Block((workers, taps), np.dtype(np.int64)),
    )


def gather_parts(problem: Problem) -> tuple[int, int]:
    """(Parts into which the gather of a plane is cut, cells that it sums for each part and phase of the width)."""
    depth, height, _ = axes(problem)
    rows, (lead, columns) = spans(problem)[1][1], spans(problem)[2]
    together = min(max(kernels.GATHER // (lead + columns), 1), rows)
    run = min((together - 1) * (lead + columns) + columns, kernels.GATHER)
    pieces = -(-columns // kernels.GATHER) if together == 1 else 1
    return depth[1] * height[3] * -(-rows // together) * pieces, run


def gather_cycles(problem: Problem) -> float:
    """Estimate what the gather of a plane takes: half a cycle a vector and tap, 4 to put a vector, 60 a run."""
    parts, run = gather_parts(problem)
    vectors = -(-run // MOST_LANES) * 8
    taps = math.prod(kernel / stride for _, _, kernel, stride, _ in axes(problem))
    return parts * axes(problem)[2][3] * (60 + vectors * (taps / 2 + 4))


def row_cycles(problem: Problem) -> float:
    """Estimate what adding output by output takes: 20 cycles an output and row, and its cells in vectors of 8."""
    depth, height, width = axes(problem)
    reach = math.prod(-(-kernel // stride) for _, _, kernel, stride, _ in (depth, height))
    return depth[1] * height[1] * reach * width[0] * (20 + width[2] / 8)


_MOST_PHASES: Final = 16  # of the width, each with its own block of sums: all of them should fit in L1


def _judge_gather(problem: Problem) -> Verdict:
    """Refuse where runs are short: small planes with long strides."""
    phases = axes(problem)[2][3]
    if phases > _MOST_PHASES:
        return Verdict(False, f"a stride of {phases} along the rows leaves runs of few cells")
    gather, rows = gather_cycles(problem), row_cycles(problem)
    estimate = f"an estimated {gather:.0f} cycles a plane, and {rows:.0f} row by row"
    return Verdict(gather <= rows, estimate)


class PlaneGather(Candidate):
    """Whole planes, canonical order."""

    name = "plane_gather"
    how = "each worker owns whole planes, lays their terms out and sums shifted runs of them, in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where the grid wastes work, planes are too few for the threads, or too large for scratch in cache."""
        return _both(_judge_gather(problem), judge_planes(problem, scratch_cells=_grid(problem)[1]))

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A grid, a block of sums and a list of shifts for each worker."""
        return _gather_scratch(problem, workers, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Lay out and gather, plane by plane."""
        rows = _rows(plan.problem, operands)
        return launch(kernels.plane_gather, plan.workers, *rows, *scratch, geometry(plan.problem))


class TileGather(Candidate):
    """Blocks of rows, canonical order."""

    name = "tile_gather"
    how = "workers share the rows of every plane: terms are laid out, then shifted runs summed in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where the grid wastes work."""
        return _judge_gather(problem)

    def pieces(self, problem: Problem) -> int:
        """Blocks of rows."""
        return problem.planes * gather_parts(problem)[0]

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """The grids of a round of planes; a block of sums and a list of shifts for each worker."""
        return _gather_scratch(problem, workers, _planes_a_round(problem, (_grid(problem),)))

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Lay out, then gather, a round of planes at a time."""
        grad, out = _rows(plan.problem, operands)
        grid, *room = scratch
        numbers = geometry(plan.problem)
        for planes, used in _rounds(plan.problem, grid):
            launch(kernels.lay, plan.workers, grad[planes], grid[used], numbers)
            launch(kernels.gather, plan.workers, grid[used], out[planes], *room, numbers)
        return 0


class RowAdd(Candidate):
    """Runs of rows, output by output."""

    name = "row_add"
    how = "each worker owns a run of input rows and adds each output's term to its cells, in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:  # noqa: ARG002
        """Never refuse."""
        return Verdict(True, "takes any window, and little memory")

    def pieces(self, problem: Problem) -> int:
        """Blocks of rows."""
        return _row_pieces(problem)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """One term, and a block of sums for each worker."""
        return Block((workers, 1), problem.accumulator), _rounding_room(problem, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Add, row by row."""
        rows = _rows(plan.problem, operands)
        return launch(kernels.add_outputs, plan.workers, *rows, *scratch, geometry(plan.problem))


def _both(first: Verdict, second: Verdict) -> Verdict:
    """Give both reasons, unless the first is enough to refuse."""
    joint = "and" if second.takes else "but"
    return Verdict(second.takes, f"{first.why}, {joint} {second.why}") if first.takes else first


def _judge_spread(problem: Problem) -> Verdict:
    """Refuse where gathering is faster: its additions, in registers, cost a ninth of the spread's, in memory.

    The gather's own work counts as 53 of its additions. (Planes of 16 x 56 x 56: 27 taps 36 and 48 ms, 125 taps 80
    and 64 ms; one of 128**3: 343 taps 74 and 42 ms.)
    """
    gather, spread = additions(problem)
    counts = f"{gather:.0f} additions a cell by gathering, {spread:.1f} by spreading"
    return Verdict(9 * spread < 53 + gather, counts)


class PlaneSpread(Candidate):
    """Whole planes, axis by axis."""

    name = "plane_spread"
    how = "each worker owns whole planes and spreads terms along W, then H, then D, another order of additions"
    canonical = False

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where gathering takes no more additions, or planes are too few or too large."""
        cells = math.prod(_wide_rows(problem)) + math.prod(_high_rows(problem))
        return _both(_judge_spread(problem), judge_planes(problem, scratch_cells=cells))

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A row of terms and a plane spread along W and along H, for each worker."""
        return _spread_scratch(problem, workers, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Divide and spread, plane by plane."""
        rows = _rows(plan.problem, operands)
        return launch(spread_kernels.plane_spread, plan.workers, *rows, *scratch, geometry(plan.problem))


class TileSpread(Candidate):
    """Runs of rows, axis by axis."""

    name = "tile_spread"
    how = "workers share the rows of each stage: terms are spread along W, then H, then D, another order of additions"
    canonical = False

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where gathering takes no more additions."""
        return _judge_spread(problem)

    def pieces(self, problem: Problem) -> int:
        """Blocks of rows."""
        return _row_pieces(problem)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A row of terms for each worker, and a round of planes spread along W and along H."""
        return _spread_scratch(problem, workers, _planes_a_round(problem, (_wide_rows(problem), _high_rows(problem))))

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """One kernel an axis, a round of planes at a time."""
        grad, out = _rows(plan.problem, operands)
        terms, wide, high, room = scratch
        numbers = geometry(plan.problem)
        for planes, used in _rounds(plan.problem, wide):
            launch(spread_kernels.spread_width, plan.workers, grad[planes], terms, wide[used], numbers)
            launch(spread_kernels.spread_height, plan.workers, wide[used], high[used], numbers)
            launch(spread_kernels.spread_depth, plan.workers, high[used], out[planes], room, numbers)
        return 0


def _spread_scratch(problem: Problem, workers: int, slots: int) -> tuple[Block, ...]:
    return (
        Block((workers, problem.output_size[2]), problem.accumulator),
        Block((slots, *_wide_rows(problem)), problem.accumulator),
        Block((slots, *_high_rows(problem)), problem.accumulator),
        _rounding_room(problem, workers),
    )


DETERMINISTIC: Final = (PlaneGather(), TileGather(), RowAdd())
FAST: Final = (PlaneSpread(), TileSpread(), *DETERMINISTIC)
