"""The door to the kernels: thread limits, layers, forks."""

import os
import sys
from types import SimpleNamespace

import numba
import numpy as np
import pytest

import cases
from poolgrad_numba import launch as door
from support import plan_for, python, same_bits

CASE = next(case for case in cases.SMALL_CASES if case.name == "adaptive2d_one_plane")


def fake(calls, error=None):
    def flavour(name):
        def run(workers, *arrays):
            calls.append((name, workers, numba.get_num_threads()))
            if error:
                raise error
            return 5

        return run

    return SimpleNamespace(serial=flavour("serial"), parallel=flavour("parallel"))


def test_one_worker_starts_no_threads():
    calls = []
    assert door.launch(fake(calls), 1) == 5
    assert calls[0][:2] == ("serial", 1)


def test_workers_run_on_as_many_threads_and_the_limit_returns():
    before, calls = numba.get_num_threads(), []
    assert door.launch(fake(calls), 3) == 5
    assert calls == [("parallel", 3, 3)]
    assert numba.get_num_threads() == before
    with pytest.raises(MemoryError):
        door.launch(fake(calls, MemoryError()), 2)
    assert numba.get_num_threads() == before


def test_a_plan_from_a_larger_machine_runs():
    calls = []
    door.launch(fake(calls), 1000)
    assert calls == [("parallel", 1000, numba.config.NUMBA_NUM_THREADS)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_computes_the_same_bytes(tmp_path):
    out = python(f"""
import os
import cases
from support import plan_for
case = next(case for case in cases.SMALL_CASES if case.name == {CASE.name!r})
plan = plan_for(case, deterministic=True, num_threads=2, algorithm="tile_reduce")
assert plan.workers == 2
grad, indices = case.rough_gradient(), case.indices()
want = plan.run(grad, indices).tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if plan.run(grad, indices).tobytes() == want else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert plan.run(grad, indices).tobytes() == want
""")  # fmt: skip
    assert out.split() == ["0"]


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_layers_give_the_same_bytes_from_several_threads(layer, tmp_path):
    grad, indices = CASE.rough_gradient(), CASE.indices()
    want = plan_for(CASE, deterministic=True, num_threads=1).run(grad, indices)
    path = tmp_path / "result.npy"
    python(f"""
from concurrent.futures import ThreadPoolExecutor
import numba, numpy as np
import cases
from support import plan_for
case = next(case for case in cases.SMALL_CASES if case.name == {CASE.name!r})
plan = plan_for(case, deterministic=True, num_threads=2, algorithm="tile_reduce")
grad, indices = case.rough_gradient(), case.indices()
with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda _: plan.run(grad, indices), range(32)))
assert all(r.tobytes() == results[0].tobytes() for r in results)
assert numba.threading_layer() == {layer!r}
np.save({str(path)!r}, results[0])
""", NUMBA_THREADING_LAYER=layer)  # fmt: skip
    assert same_bits(np.load(path), want)


def test_this_suite_runs_with_more_threads_than_one():
    assert numba.config.NUMBA_NUM_THREADS >= 8, f"set before Numba was imported? {sys.modules.keys() & {'numba'}}"
