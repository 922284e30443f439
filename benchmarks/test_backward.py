"""Timings of the backward operators: `python -m pytest benchmarks --benchmark-enable`.

The speed cases and providers of `poolgrad-numba bench`, one at a time. Each provider's result is checked once, against
the deterministic one, before it is timed; ``extra_info`` holds the fields of that command's rows.
"""

from functools import lru_cache

import pytest

import poolgrad_numba as pg
from poolgrad_numba.bench import measure
from poolgrad_numba.bench.cases import CASES
from poolgrad_numba.bench.peers import JAX, TORCH, torch_threads
from poolgrad_numba.bench.providers import ALLOCATING, COPY, COPY_STREAMING, DETERMINISTIC, FAST, PLAN, PREALLOCATED
from poolgrad_numba.bench.workload import Workload
from poolgrad_numba.cli.info import versions

THREADS = pg.get_config().num_threads
TURNS = [
    *((name, form) for name in (FAST, DETERMINISTIC, TORCH) for form in (PREALLOCATED, ALLOCATING)),
    (JAX, ALLOCATING),
    *((name, PREALLOCATED) for name in (PLAN, COPY, COPY_STREAMING)),
]


@lru_cache(maxsize=1)  # the turns of a case follow each other
def cast(case):
    work = Workload(case)
    providers, left_out = measure.cast_of(work, THREADS)
    return work, {(one.name, one.form): one for one in providers}, dict(left_out)


@pytest.mark.parametrize(("provider", "form"), TURNS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.dtype}-{c.index_dtype}-{c.layout}")
def test_backward(benchmark, case, provider, form):
    with torch_threads(THREADS):
        work, providers, left_out = cast(case)
        if (provider, form) not in providers:
            pytest.skip(f"{provider}: {left_out[provider]}")
        chosen = providers[provider, form]
        facts = measure.identity(work, chosen, THREADS, versions())
        benchmark.group = f"{case.name}, {case.dtype}, {case.index_dtype}, {case.layout}, {form}"
        benchmark.extra_info.update(facts)
        benchmark(chosen.run)
        if benchmark.stats is not None:  # where benchmarks are enabled
            benchmark.extra_info.update(measure.row(facts, benchmark.stats.stats.data, work.bytes_moved, {}))
