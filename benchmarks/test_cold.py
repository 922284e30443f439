"""A process's first call, with an empty kernel cache and with a filled one; ``extra_info`` tells the two apart."""

import pytest

from poolgrad_numba.bench import cold
from poolgrad_numba.bench.cases import COLD


@pytest.mark.parametrize("mode", cold.MODES)
@pytest.mark.parametrize("name", COLD)
def test_cold(benchmark, name, mode):
    benchmark.group = "cold start"
    rows = benchmark.pedantic(cold.cold_start, args=(lambda _: None, [name], [mode]), rounds=1, iterations=1)
    empty, filled = rows
    benchmark.extra_info.update(op=empty["op"], case=name, mode=mode, empty=empty["first"], filled=filled["first"])
    assert 0 < filled["first"] < empty["first"]
