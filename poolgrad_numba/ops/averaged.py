"""How the averaged map can be run: the candidates of average pooling, in order of preference for each mode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.kernels import averaged as kernels
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


def _term_rows(problem: Problem) -> tuple[int, int]:
    """Shape of one plane's terms: (OD*OH, OW)."""
    OD, OH, OW = problem.output_size
    return OD * OH, OW


def _rows(problem: Problem, operands: Operands) -> tuple[NDArray[Any], NDArray[Any]]:
    """Give ``grad_output`` and the result as planes of rows."""
    D, H, W = problem.input_size
    return (
        operands.grad.reshape(problem.planes, *_term_rows(problem)),
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


class PlaneGather(Candidate):
    """Whole planes, canonical order."""

    name = "plane_gather"
    how = "each worker owns whole planes and gathers each cell's terms in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where planes are too few for the threads, or too large for scratch in cache."""
        return judge_planes(problem, scratch_cells=problem.outputs)

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A plane of terms for each worker."""
        return Block((workers, *_term_rows(problem)), problem.accumulator), _rounding_room(problem, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Divide and gather, plane by plane."""
        rows = _rows(plan.problem, operands)
        return launch(kernels.plane_gather, plan.workers, *rows, *scratch, geometry(plan.problem))


class TileGather(Candidate):
    """Runs of rows, canonical order."""

    name = "tile_gather"
    how = "each worker owns a run of input rows and gathers each cell's terms in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:  # noqa: ARG002
        """Never refuse."""
        return Verdict(True, "rows split every plane, for one more pass over the terms")

    def pieces(self, problem: Problem) -> int:
        """Blocks of rows."""
        return _row_pieces(problem)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """The terms of a round of planes."""
        rows = _term_rows(problem)
        terms = Block((_planes_a_round(problem, (rows,)), *rows), problem.accumulator)
        return terms, _rounding_room(problem, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Divide, then gather, a round of planes at a time."""
        grad, out = _rows(plan.problem, operands)
        terms, room = scratch
        numbers = geometry(plan.problem)
        for planes, used in _rounds(plan.problem, terms):
            launch(kernels.divide, plan.workers, grad[planes], terms[used], numbers)
            launch(kernels.gather, plan.workers, terms[used], out[planes], room, numbers)
        return 0


def _judge_spread(problem: Problem) -> Verdict:
    gather, spread = additions(problem)
    counts = f"{gather:.0f} additions a cell by gathering, {spread:.1f} by spreading"
    return Verdict(spread < gather, counts)


class PlaneSpread(Candidate):
    """Whole planes, axis by axis."""

    name = "plane_spread"
    how = "each worker owns whole planes and spreads terms along W, then H, then D, another order of additions"
    canonical = False

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where gathering takes no more additions, or planes are too few or too large."""
        verdict = _judge_spread(problem)
        cells = math.prod(_wide_rows(problem)) + math.prod(_high_rows(problem))
        planes = judge_planes(problem, scratch_cells=cells)
        joint = "and" if planes.takes else "but"
        return Verdict(planes.takes, f"{verdict.why}, {joint} {planes.why}") if verdict.takes else verdict

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A row of terms and a plane spread along W and along H, for each worker."""
        return _spread_scratch(problem, workers, workers)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Divide and spread, plane by plane."""
        rows = _rows(plan.problem, operands)
        return launch(kernels.plane_spread, plan.workers, *rows, *scratch, geometry(plan.problem))


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
            launch(kernels.spread_width, plan.workers, grad[planes], terms, wide[used], numbers)
            launch(kernels.spread_height, plan.workers, wide[used], high[used], numbers)
            launch(kernels.spread_depth, plan.workers, high[used], out[planes], room, numbers)
        return 0


def _spread_scratch(problem: Problem, workers: int, slots: int) -> tuple[Block, ...]:
    return (
        Block((workers, problem.output_size[2]), problem.accumulator),
        Block((slots, *_wide_rows(problem)), problem.accumulator),
        Block((slots, *_high_rows(problem)), problem.accumulator),
        _rounding_room(problem, workers),
    )


FAST: Final = (PlaneSpread(), TileSpread(), PlaneGather(), TileGather())
DETERMINISTIC: Final = (PlaneGather(), TileGather())
