"""When whole planes are a good split of the work, for both maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poolgrad_numba.plan import Verdict, useful_workers

if TYPE_CHECKING:
    from poolgrad_numba.problem import Problem

LARGEST_SCRATCH: Final = 262_144  # 1 MiB of float32 a worker: beyond it, the scratch of a plane leaves L2
# Bytes of a result from which on it is streamed past the caches. A smaller one may still be there for whoever reads it
# next, which is worth as much as streaming saves.
LEAST_STREAMED: Final = 8 << 20
_BUSY: Final = 0.75


def judge_planes(problem: Problem, scratch_cells: int = 0) -> Verdict:
    """Judge a split by whole planes: refuse where it leaves threads idle or needs scratch beyond the cache."""
    planes, threads = problem.planes, problem.num_threads
    if threads == 1:
        return Verdict(True, "one thread needs no finer split")
    if scratch_cells > LARGEST_SCRATCH:
        return Verdict(False, f"{scratch_cells} cells of scratch a worker would leave the cache")
    if useful_workers(problem) == 1:
        return Verdict(True, "the whole is too small to be worth a finer split")
    rounds = -(-planes // threads)
    busy = planes / (rounds * threads)
    if busy < _BUSY:
        return Verdict(False, f"{planes} in all, whole planes keep {threads} threads only {busy:.0%} busy")
    return Verdict(True, f"{planes} planes keep {threads} threads {busy:.0%} busy")
