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
    return np.array([*(number for axis in axes(problem) for number in axis), *divide, *brick(problem), spread], np.int64)


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
        """Depths of all bricks."""
        return problem.planes * _bricks(problem) * problem.input_size[0]

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """For each worker a ring, two slabs to spread, sums, and where their runs start."""
        (above, _, phases_h), (before, _, phases_w) = _spans(problem)[1:]
        rows, columns = brick(problem)
        pitch, wide = before + columns, problem.accumulator
        slab = (above + rows) * pitch + MOST_LANES
        taps = (_slots(problem), above + 1, before + 1)
        ring = phases_h * phases_w * (rows * pitch + MOST_LANES) if self.spread else slab
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
        return _cheaper(problem, gather_cycles(problem), "gathering", row_cycles(problem), "row by row")


class Spread(_ShiftedSums):
    """Axis by axis."""

    name = "spread"
    how = "terms are laid out and summed along W, then H, then D, another order of additions"
    canonical = False
    spread = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where gathering is faster, or runs are short."""
        gather = gather_cycles(problem)
        if gather > row_cycles(problem):
            return _cheaper(problem, gather, "gathering", row_cycles(problem), "row by row")
        return _cheaper(problem, spread_cycles(problem), "spreading", gather, "gathering")


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


def _cheaper(problem: Problem, ours: float, how: str, other: float, instead: str) -> Verdict:
    estimate = f"an estimated {ours / problem.cells:.1f} cycles a cell by {how}, {other / problem.cells:.1f} by {instead}"
    return Verdict(ours <= other, estimate.replace("by row by row", "row by row"))


def gather_cycles(problem: Problem) -> float:
    """Estimate what the gather of a plane takes."""
    return 1.0


def spread_cycles(problem: Problem) -> float:
    """Estimate what the spread of a plane takes."""
    return 0.0


def row_cycles(problem: Problem) -> float:
    """Estimate what adding output by output takes: 20 cycles an output and row, and its cells in vectors of 8."""
    depth, height, width = axes(problem)
    reach = math.prod(-(-kernel // stride) for _, _, kernel, stride, _ in (depth, height))
    return depth[1] * height[1] * reach * width[0] * (20 + width[2] / 8)


DETERMINISTIC: Final = (Gather(), AddRows())
FAST: Final = (Spread(), *DETERMINISTIC)
