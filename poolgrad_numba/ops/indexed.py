"""How the indexed map can be run: the candidates of max pooling, in order of preference for each mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.geometry import effective_kernel
from poolgrad_numba.kernels import indexed as kernels
from poolgrad_numba.kernels.streams import LINE, STAGE
from poolgrad_numba.launch import launch
from poolgrad_numba.operands import Block, Operands, carrier
from poolgrad_numba.plan import Candidate, Plan, Verdict, useful_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poolgrad_numba.problem import Problem

# Measured on one 4096 x 4096 plane, k3 s1: tiles of 65,536 cells cost 1.2 times what tiles of 131,072 do, since the
# outputs at their edges are looked at twice. 131,072 cells of float32 scratch are half of a 1 MiB L2.
_SMALLEST_TILE: Final = 4_096
_LARGEST_TILE: Final = 131_072
# Outputs whose index range is recorded together: at most about 4096 segments a plane, since every tile scans them all.
_SMALLEST_SEGMENT: Final = 128
_LARGEST_SEGMENT: Final = 16_384
# An atomic addition costs some 5 ns. At one output for 256 cells tiles were 1.4 times as fast, at one for 4096 atomic
# additions were 1.2 times as fast: they read the indices once.
_SPARSE: Final = 1_024
# Cells of a plane. 196 took 2.4 times as long as in place, 1600 as long, 3249 half as long; two planes of 65,536
# float32 sums are 512 KiB, the L2 of many a core.
_SMALLEST_STREAMED: Final = 2_048
_LARGEST_STREAMED: Final = 65_536
_LARGEST_WINDOW: Final = 131_072  # cells: 512 KiB of float32, an L2
_LARGEST_SCRATCH: Final = 262_144  # cells: 1 MiB of float32 a worker, beyond which a plane of sums leaves L2
# Bytes of a result from which on it is streamed past the caches. A smaller one may still be there for whoever reads it
# next, which is worth as much as streaming saves.
_LEAST_STREAMED: Final = 8 << 20
_BUSY: Final = 0.75
# How many times as long one thread takes to pack channels-last operands, scatter, and unpack, as to scatter them where
# they lie: 43.6 ms against 11.1 on 32 images of 64 x 112 x 112; in 16 bits 28.4 against 16.7. (To split the channels of
# an image between threads made it three times slower: they fetch each other's cache lines.)
_INTERLEAVED_GAIN: Final = 4
_INTERLEAVED_GAIN_16: Final = 2


def _in_place(problem: Problem) -> bool:
    """Whether sums can be kept in the result itself; 16-bit results need float32 scratch."""
    return problem.dtype == problem.accumulator


def tile_cells(cells: int) -> int:
    """Cells of a tile: from the plane's size alone, about 32 tiles a plane, whole cache lines."""
    tile = min(max(-(-cells // 32), _SMALLEST_TILE), _LARGEST_TILE)
    return -(-tile // 64) * 64


def segment_outputs(outputs: int) -> int:
    """Outputs of a segment: from the plane's size alone."""
    return min(max(-(-outputs // 4096), _SMALLEST_SEGMENT), _LARGEST_SEGMENT)


def _judge_planes(problem: Problem) -> Verdict:
    """Judge a split by whole planes: refuse where it leaves threads idle."""
    planes, threads = problem.planes, problem.num_threads
    if threads == 1:
        return Verdict(True, "one thread needs no finer split")
    if useful_workers(problem) == 1:
        return Verdict(True, "the whole is too small to be worth a finer split")
    rounds = -(-planes // threads)
    busy = planes / (rounds * threads)
    if busy < _BUSY:
        return Verdict(False, f"{planes} in all, whole planes keep {threads} threads only {busy:.0%} busy")
    return Verdict(True, f"{planes} planes keep {threads} threads {busy:.0%} busy")


def _judge_streaming(problem: Problem) -> Verdict:
    """Judge whether to go past the caches: refuse where the result would stay there, or planes are small."""
    size = problem.planes * problem.cells * problem.dtype.itemsize
    if size < _LEAST_STREAMED:
        return Verdict(False, f"a result of {size} bytes stays in cache for whoever reads it next")
    if problem.cells < _SMALLEST_STREAMED:
        return Verdict(False, f"planes of {problem.cells} cells are done before streaming pays")
    return Verdict(True, f"a result of {size} bytes would leave the cache anyway")


class PlaneScatter(Candidate):
    """Whole planes."""

    name = "plane_scatter"
    how = "each worker owns whole planes and adds their outputs in ascending order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where planes are too few for the threads, or too large for scratch in cache."""
        if not _in_place(problem) and problem.cells > _LARGEST_SCRATCH:
            # As fast as tiles on one 4096 x 4096 float16 plane, but with 64 MiB of scratch in place of 0.6.
            return Verdict(False, f"a worker would need {problem.cells} cells of float32 scratch, a tile needs fewer")
        return _judge_planes(problem)

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A plane of float32 for each worker, for 16-bit results."""
        return (Block((workers, 0 if _in_place(problem) else problem.cells), problem.accumulator),)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Check, zero and add in one kernel."""
        return launch(kernels.plane_scatter, plan.workers, *operands, scratch[0])


class InterleavedScatter(Candidate):
    """Whole images, where channels lie last."""

    name = "interleaved_scatter"
    how = "each worker owns whole images, channels last in memory, and adds their outputs in ascending order"
    canonical = True
    interleaved = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where images are so few that all threads on packed planes are faster."""
        images, threads = self.pieces(problem), problem.num_threads
        gain = _INTERLEAVED_GAIN if _in_place(problem) else _INTERLEAVED_GAIN_16
        if min(images, threads) * gain < threads:
            return Verdict(False, f"{images} in all, whole images occupy too few of {threads} threads")
        return Verdict(True, f"not for packed operands; to pack others first takes a thread {gain} times as long")

    def pieces(self, problem: Problem) -> int:
        """Images."""
        return problem.planes // max(problem.channels, 1)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """An image of float32 for each worker, for 16-bit results."""
        sums = 0 if _in_place(problem) else problem.channels * problem.cells
        return (Block((workers, sums), problem.accumulator),)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Check, zero and add in one kernel."""
        return launch(kernels.interleaved_scatter, plan.workers, *operands, scratch[0], plan.problem.channels)


class PlaneStream(Candidate):
    """Whole planes, past the caches."""

    name = "plane_stream"
    how = "each worker owns whole planes, adds their outputs in ascending order in cache, and streams the sums out"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where the result stays in cache, or planes are too large or too few for the threads."""
        if problem.cells > _LARGEST_STREAMED:
            return Verdict(False, f"two planes of {problem.cells} sums would leave L2")
        streaming = _judge_streaming(problem)
        return _judge_planes(problem) if streaming.takes else streaming

    def pieces(self, problem: Problem) -> int:
        """Planes."""
        return problem.planes

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """Two planes of sums for each worker, and for 16-bit values room to widen and to round some."""
        part, stage = (0, 0) if _in_place(problem) else (kernels.PART, STAGE)
        return (
            Block((workers, 2, problem.cells + LINE // problem.accumulator.itemsize), problem.accumulator),
            Block((workers, part), problem.accumulator),
            Block((workers, stage), carrier(problem.dtype)),
        )

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Check, add and stream in one kernel."""
        return launch(kernels.plane_stream, plan.workers, *operands, *scratch)


class TileReduce(Candidate):
    """Runs of cells inside a plane."""

    name = "tile_reduce"
    how = "each worker owns tiles of input cells and adds the outputs that reach them in ascending order"
    canonical = True

    def judge(self, problem: Problem) -> Verdict:
        """Never refuse."""
        tile = tile_cells(problem.cells)
        return Verdict(True, f"tiles of {tile} cells split every plane, for one more pass over the indices")

    def pieces(self, problem: Problem) -> int:
        """Tiles of all planes."""
        return problem.planes * -(-problem.cells // tile_cells(problem.cells))

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """Lowest and highest index of each segment, visits and a tile of float32 for each worker."""
        segments = (problem.planes, -(-problem.outputs // segment_outputs(problem.outputs)))
        tile = 0 if _in_place(problem) else tile_cells(problem.cells)
        int64 = np.dtype(np.int64)
        return (
            Block(segments, int64),
            Block(segments, int64),
            Block((workers,), int64),
            Block((workers, tile), problem.accumulator),
        )

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Check and record index ranges, then fill the tiles."""
        problem, (low, high, visits, room) = plan.problem, scratch
        tile, segment = tile_cells(problem.cells), segment_outputs(problem.outputs)
        ranges = (operands.indices, problem.cells, segment, tile, low, high, visits)
        bad = launch(kernels.segment_ranges, plan.workers, *ranges)
        if bad:
            return bad
        # Indices that no forward pass makes can reach every tile from every segment. Where looking at each output
        # once a tile costs more than once a worker, a tile a worker is the better split; the bits are the same.
        if _in_place(problem) and int(visits.sum()) > plan.workers * problem.planes * problem.outputs:
            tile = max(tile, -(-problem.cells // plan.workers))
        return launch(kernels.tile_reduce, plan.workers, *operands, segment, tile, low, high, room)


class Sweep(Candidate):
    """Bands of planes, past the caches."""

    name = "sweep"
    how = (
        "each worker owns bands of cells, adds the outputs that reach them in ascending order in a window that moves "
        "on, and streams the sums out; tile_reduce runs instead if indices jump back further than a forward's"
    )
    canonical = True
    _instead = TileReduce()

    def judge(self, problem: Problem) -> Verdict:
        """Refuse where the result stays in cache, or the window would not."""
        window = _reach(problem) + 2 * kernels.STEP
        if window > _LARGEST_WINDOW:
            return Verdict(False, f"a window of {window} sums would leave L2")
        streaming = _judge_streaming(problem)
        if not streaming.takes:
            return streaming
        return Verdict(True, f"a window of {window} sums goes over planes of {problem.cells} cells")

    def pieces(self, problem: Problem) -> int:
        """Bands of all planes."""
        return problem.planes * _bands(problem)

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """A window, room to round, and whether it failed, for each worker; and what runs then."""
        window = min(_kept(problem) + 2 * kernels.STEP + LINE, problem.cells + kernels.STEP)
        return (
            Block((workers, window), problem.accumulator),
            Block((workers, 0 if _in_place(problem) else STAGE), carrier(problem.dtype)),
            Block((workers,), np.dtype(np.int64)),
            *self._instead.scratch(problem, workers),
        )

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Check, add and stream in one kernel."""
        problem, (window, stage, failed) = plan.problem, scratch[:3]
        failed[:] = 0
        arguments = (window, stage, _kept(problem), _bands(problem), failed)
        bad = launch(kernels.sweep, plan.workers, *operands, *arguments)
        return self._instead.run(plan, operands, scratch[3:]) if failed.any() else bad


def _reach(problem: Problem) -> int:
    """How far before an output's cell a later output's may lie, if a forward made the indices."""
    D, H, W = problem.input_size
    OD, OH, _ = problem.output_size
    if problem.window is None:
        depth, height, width = (-(-n // max(o, 1)) + 1 for n, o in zip((D, H, W), problem.output_size, strict=True))
    else:
        window = problem.window
        sizes = [effective_kernel(k, d) for k, d in zip(window.kernel_size, window.dilation, strict=True)]
        depth, height, width = (1,) * (3 - len(sizes)) + tuple(sizes)
    rows = H if OD > 1 else min(height, H)
    return (min(depth, D) - 1) * H * W + (rows * W if OD * OH > 1 else (rows - 1) * W + min(width, W))


def _kept(problem: Problem) -> int:
    """How much of that a window keeps: where it is less, more indices will be found to jump back."""
    return min(_reach(problem), _LARGEST_WINDOW - 2 * kernels.STEP - LINE)


def _bands(problem: Problem) -> int:
    """Into how many bands each plane is cut."""
    planes, threads = problem.planes, problem.num_threads
    return 1 if planes % threads == 0 or planes >= 4 * threads else threads


class AtomicScatter(Candidate):
    """Outputs, wherever they point."""

    name = "atomic_scatter"
    how = "workers share the outputs and add them with atomic additions, in whatever order they come"
    canonical = False

    def judge(self, problem: Problem) -> Verdict:
        """Take sparse outputs: an atomic addition costs some 5 ns, a second pass over the indices much less."""
        if problem.num_threads == 1:
            return Verdict(False, "one thread collides with nobody")
        if not _in_place(problem):
            return Verdict(False, "16-bit results would need all cells in float32 first")
        share = problem.cells // max(problem.outputs, 1)
        if share < _SPARSE:
            return Verdict(
                False,
                f"one output for every {share} cells, and atomic additions pay from {_SPARSE} on",
            )
        return Verdict(True, f"one output for every {share} cells, so that zeroing is nearly all of the work")

    def pieces(self, problem: Problem) -> int:
        """Cells, of which the zeroing is split; or outputs."""
        return problem.planes * problem.cells

    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:  # noqa: ARG002
        """All cells in float32, for 16-bit results."""
        return (Block((problem.planes, 0 if _in_place(problem) else problem.cells), problem.accumulator),)

    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Zero, add, and round 16-bit results."""
        grad, indices, out = operands
        acc = out if _in_place(plan.problem) else scratch[0]
        launch(kernels.fill_zero, plan.workers, acc.reshape(-1))
        bad = launch(kernels.atomic_scatter, plan.workers, grad, indices, acc) if grad.size else 0
        if acc is not out:
            launch(kernels.round_cells, plan.workers, acc.reshape(-1), out.reshape(-1))
        return bad


DETERMINISTIC: Final = (InterleavedScatter(), PlaneStream(), Sweep(), PlaneScatter(), TileReduce())
FAST: Final = (*DETERMINISTIC[:-1], AtomicScatter(), DETERMINISTIC[-1])
