"""``poolgrad-numba warmup``: compile kernels, so that later processes load them from the cache."""

from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from poolgrad_numba import OPS, make_plan
from poolgrad_numba.cli.info import cache_path
from poolgrad_numba.kernels._jit import KERNELS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

_CELLS = 4  # cells along each axis
_BATCH = (2, 2)  # enough images, and planes, to split over two workers


class Job(NamedTuple):
    """One run of one algorithm."""

    operator: str
    dtype: str
    index_dtype: str
    deterministic: bool
    algorithm: str


def execute(arguments: argparse.Namespace) -> int:
    """Run every algorithm once, and say what that compiled."""
    work = jobs(arguments)
    before, start = counts(), time.perf_counter()
    with progress(len(work)) as advance:
        for job in work:
            advance(f"{job.algorithm}, {job.dtype}")
            run(job, threads=2)
        run(work[0], threads=1)  # the loop over workers that every kernel runs in on one thread
    compiled, loaded = (now - then for now, then in zip(counts(), before, strict=True))
    seconds = time.perf_counter() - start
    place = cache_path()
    line = f"{compiled} kernels compiled, {loaded} loaded from the cache, in {seconds:.1f} s; "
    line += "no place for a cache, so other processes compile anew" if place is None else f"cache: {place}"
    print(line)
    return 0


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is done next: a bar on a terminal, where rich is there; else nothing."""
    try:
        from rich.console import Console  # noqa: PLC0415  (an extra)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415
        from rich.progress import TimeElapsedColumn as Elapsed  # noqa: PLC0415
    except ImportError:
        yield lambda _: None
        return
    console = Console(highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what)
            bar.advance(task)

        yield advance


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """List the runs that cover what was asked for."""
    found = []
    for operator, dtype, mode in product(arguments.ops, arguments.dtypes, arguments.modes):
        deterministic = mode == "deterministic"
        index_dtypes = arguments.index_dtypes if OPS[operator].signature.indexed else ["int64"]
        names = [candidate.name for candidate in OPS[operator].candidates(deterministic=deterministic)]
        for index_dtype, name in product(index_dtypes, names):
            found.append(Job(operator, dtype, index_dtype, deterministic, name))
    return found


def run(job: Job, *, threads: int) -> int:
    """Run one job on tiny input; gives the number of workers, which on one core is 1 whatever was asked for."""
    signature = OPS[job.operator].signature
    size = (_CELLS,) * signature.spatial
    options: dict[str, Any] = {"output_size": size} if signature.adaptive else {"kernel_size": 1}
    if signature.indexed:
        options["index_dtype"] = job.index_dtype
    plan = make_plan(
        job.operator,
        input_shape=(*_BATCH, *size),
        dtype=job.dtype,
        algorithm=job.algorithm,
        deterministic=job.deterministic,
        num_threads=threads,
        **options,
    )
    grad = np.zeros(plan.output_shape, plan.problem.dtype)
    plan.run(grad, np.zeros(plan.output_shape, plan.problem.index_dtype) if signature.indexed else None)
    return plan.workers


def counts() -> tuple[int, int]:
    """Kernels that this process has compiled, and those that it has loaded from the cache."""
    stats = [kernel.dispatcher.stats for kernel in KERNELS]
    return (
        sum(sum(stat.cache_misses.values()) for stat in stats),
        sum(sum(stat.cache_hits.values()) for stat in stats),
    )
