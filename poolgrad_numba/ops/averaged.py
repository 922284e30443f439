"""How the averaged map can be run: the candidates of average pooling, in order of preference for each mode."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from poolgrad_numba.kernels import averaged as kernels
from poolgrad_numba.kernels.lanes import MOST_LANES
from poolgrad_numba.launch import launch
from poolgrad_numba.operands import Block, Operands
from poolgrad_numba.plan import Candidate, Plan, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poolgrad_numba.kernels._jit import Kernel
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


@lru_cache(maxsize=1024)
def _numbers(problem: Problem, *, spread: bool) -> NDArray[np.int64]:
    """What the kernels know: the three axes, how to divide, the brick, and whether to spread."""
    window = _window(problem)
    divide = (window.count_include_pad, window.divisor_override or 0)
    return np.array(
        [*(number for axis in axes(problem) for number in axis), *divide, *brick(problem), spread], np.int64
    )


def _launch(kernel: Kernel, plan: Plan, operands: Operands, scratch: list[NDArray[Any]], *, spread: bool) -> int:
    """Run a kernel, which takes all arrays flat."""
    grad, out = operands.grad.reshape(-1), operands.out.reshape(-1)
    return launch(kernel, plan.workers, grad, out, *scratch, _numbers(plan.problem, spread=spread))


# -- bricks ------------------------------------------------------------------------------------------------------

_SUMS: Final = 2_048  # cells that are summed at a time: with the runs that they come from, they fit in L1
_RING: Final = 65_536  # cells of all slabs of a ring together: 256 KiB of float32, half of an L2


def _spans(problem: Problem) -> tuple[tuple[int, int, int], ...]:
    """Of each axis: (zeros before the first term, positions of cells, phases), as the kernels have them."""
    return tuple((-(-k // s) - 1, (size - 1 + p) // s + 1, min(s, size + p)) for _, size, k, s, p in axes(problem))


def _slots(problem: Problem) -> int:
    """Depths whose terms reach the cells of one depth."""
    outputs, _, kernel, stride, _ = axes(problem)[0]
    return min(-(-kernel // stride), outputs)


def brick(problem: Problem) -> tuple[int, int]:
    """(rows, columns) of positions that are worked on at a time, in equal parts: from the shape alone."""
    _, (above, rows, _), (before, columns, _) = _spans(problem)
    columns = -(-columns // -(-columns // _SUMS))
    pitch = before + columns
    most = max(_SUMS // pitch, 8 * above, 1)  # rows above a brick are laid out again for it: an eighth more at most
    most = min(most, max(_RING // (_slots(problem) * pitch) - above, above, 1))
    return -(-rows // -(-rows // min(most, rows))), columns


def _bricks(problem: Problem) -> int:
    """Bricks of one plane."""
    rows, columns = brick(problem)
    _, (_, most_rows, _), (_, most_columns, _) = _spans(problem)
    return -(-most_rows // rows) * -(-most_columns // columns)


class _ShiftedSums(Candidate):
    """Bricks; see `kernels.averaged`."""

    spread: ClassVar[bool]

    def pieces(self, problem: Problem) -> int:
        """Depths of all bricks, and to spread, of all groups of phases."""
        (_, _, phases_h), (_, _, phases_w) = _spans(problem)[1:]
        groups = phases_h * -(-phases_w // kernels.PHASES) if self.spread else 1
        return problem.planes * _bricks(problem) * groups * problem.input_size[0]

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """For each worker a ring, two slabs to spread, sums, and where their runs start."""
        (above, _, _), (before, _, phases) = _spans(problem)[1:]
        rows, columns = brick(problem)
        pitch, wide = before + columns, problem.accumulator
        slab = (above + rows) * pitch + MOST_LANES
        taps = (_slots(problem), above + 1, before + 1)
        ring = min(phases, kernels.PHASES) * (rows * pitch + MOST_LANES) if self.spread else slab
        return (
            Block((workers * _slots(problem) * ring,), wide),
            Block((workers * 2 * slab if self.spread else 0,), wide),
            Block((workers * kernels.PHASES * (max(_SUMS, pitch) + MOST_LANES),), wide),
            Block((workers * (max(taps) if self.spread else math.prod(taps)),), np.dtype(np.int64)),
        )

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Fill the bricks."""
        return _launch(kernels.shifted_sums, plan, operands, scratch, spread=self.spread)


class Gather(_ShiftedSums):
    """Canonical order."""

    name = "gather"
    how = "terms are laid out, and each cell is the sum of those that reach it, in canonical order"
    canonical = True
    spread = False

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where runs are short: long strides, small planes."""
        return _cheaper(problem, gather_cycles(problem), "by gathering", row_cycles(problem), "row by row")


class Spread(_ShiftedSums):
    """Axis by axis."""

    name = "spread"
    how = "terms are laid out and summed along W, then H, then D, another order of additions"
    canonical = False
    spread = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where gathering is faster, or runs are short."""
        spread, gather, rows = spread_cycles(problem), gather_cycles(problem), row_cycles(problem)
        if gather <= rows:
            return _cheaper(problem, spread, "by spreading", gather, "by gathering")
        return _cheaper(problem, spread, "by spreading", rows, "row by row")


class AddRows(Candidate):
    """Runs of rows, output by output."""

    name = "add_rows"
    how = "each worker owns a run of input rows and adds each output's term to its cells, in canonical order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:  # noqa: ARG002
        """Never refuse."""
        return Verdict(True, "takes any window, and little memory")

    def pieces(self, problem: Problem) -> int:
        """Blocks of rows."""
        D, H, W = problem.input_size
        return problem.planes * D * H * -(-W // kernels.BLOCK)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A block of sums for each worker."""
        return (Block((workers * min(kernels.BLOCK, problem.input_size[2]),), problem.accumulator),)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Add, row by row."""
        return _launch(kernels.add_rows, plan, operands, scratch, spread=False)


# -- costs -------------------------------------------------------------------------------------------------------
# Cycles of one plane, estimated from medians of one AVX2 core; only how they compare matters. On planes of 16 x 56 x 56
# the estimates are within a quarter of what was measured for windows of 1 to 125 cells and strides of 1 to 3.

_PART: Final = 500  # for each phase of a brick: to find its runs, to start its loops
_VECTOR: Final = 20  # for each vector of 8 cells: to divide, to store
_TAP: Final = 1.45  # for each vector and term that is added to it from L1 or L2
_PASS: Final = 22  # for each vector that is spread: to write and read it twice more
_ROW: Final = 300  # for each row of cells, and each row of outputs that reaches it
_OUTPUT: Final = 40  # for each output of such a row


def _cheaper(problem: Problem, ours: float, how: str, other: float, instead: str) -> Verdict:
    cells = problem.cells
    return Verdict(ours <= other, f"an estimated {ours / cells:.1f} cycles a cell {how}, {other / cells:.1f} {instead}")


def _vectors(problem: Problem) -> tuple[float, float]:
    """(phases of all bricks and depths, vectors that are summed for them), of one plane."""
    (_, _, phases_h), (before, _, phases_w) = _spans(problem)[1:]
    rows, columns = brick(problem)
    parts = _bricks(problem) * problem.input_size[0] * phases_h * phases_w
    lanes = MOST_LANES * problem.accumulator.itemsize // 4
    return parts, parts * -(-(rows * (before + columns)) // lanes) * 8


def gather_cycles(problem: Problem) -> float:
    """Estimate what the gather of a plane takes."""
    parts, vectors = _vectors(problem)
    taps = math.prod(min(kernel / stride, outputs) for outputs, _, kernel, stride, _ in axes(problem))
    return parts * _PART + vectors * (_VECTOR + _TAP * taps)


def spread_cycles(problem: Problem) -> float:
    """Estimate what the spread of a plane takes: later axes are summed before the earlier ones have grown."""
    parts, vectors = _vectors(problem)
    phases_h, phases_w = (phases for _, _, phases in _spans(problem)[1:])
    again = vectors / (phases_h * phases_w) * (phases_h * -(-phases_w // kernels.PHASES) - 1)  # terms, for each group
    taps = [min(kernel / stride, outputs) for outputs, _, kernel, stride, _ in axes(problem)]
    depth, height = (min(outputs / cells, 1) for outputs, cells, *_ in axes(problem)[:2])
    additions = taps[2] * depth * height + taps[1] * depth + taps[0]
    return parts * _PART + vectors * (_VECTOR + _PASS + _TAP * additions) + again * _VECTOR / 2


def row_cycles(problem: Problem) -> float:
    """Estimate what adding output by output takes."""
    depth, height, width = axes(problem)
    reach = math.prod(min(-(-kernel // stride), outputs) for outputs, _, kernel, stride, _ in (depth, height))
    return depth[1] * height[1] * reach * (_ROW + width[0] * (_OUTPUT + width[2] / 8))


DETERMINISTIC: Final = (Gather(), AddRows())
FAST: Final = (Spread(), *DETERMINISTIC)
