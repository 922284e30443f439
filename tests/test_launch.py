"""The door to the kernels: thread limits, layers, forks."""

import ctypes.util
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


def fake(calls):
    return SimpleNamespace(
        serial=lambda *arguments: calls.append(("serial", *arguments)) or 5,
        parallel=lambda *arguments: calls.append(("parallel", *arguments)) or 5,
    )


def test_one_worker_starts_no_threads():
    calls = []
    assert door.launch(fake(calls), 1, "array") == 5
    assert calls == [("serial", 1, "array")]


def test_workers_run_on_as_many_threads():
    calls = []
    assert door.launch(fake(calls), 3, "array") == 5
    assert calls == [("parallel", 3, 3, "array")]


def test_a_plan_from_a_larger_machine_runs():
    calls = []
    door.launch(fake(calls), 1000)
    assert calls == [("parallel", 1000, numba.config.NUMBA_NUM_THREADS)]


def test_asking_for_the_configuration_or_a_plan_starts_no_thread():
    python("""
import poolgrad_numba as pg
from poolgrad_numba.threads import are_up
pg.get_config()
pg.make_plan("avg_pool3d_backward", input_shape=(8, 8, 8, 16, 16), kernel_size=2)
assert not are_up()
""")


def test_a_layer_that_is_not_there_is_a_clear_error():
    out = python("""
import numba, numpy as np, poolgrad_numba as pg
def run(threads):
    shape = (8, 8, 8, 64, 64)
    return pg.avg_pool3d_backward(np.ones((8, 8, 4, 32, 32), np.float32), shape, 2, num_threads=threads)
assert (run(1) == 0.125).all()
try:
    run(2)
except pg.PoolGradError as error:
    assert "num_threads=1 needs none" in str(error) and error.status == 361001
    print("refused")
else:
    assert numba.threading_layer() == "tbb"
    print("refused")
""", NUMBA_THREADING_LAYER="tbb")  # fmt: skip
    assert out.strip() == "refused"


def test_compilation_switched_off_is_a_clear_error():
    python("""
import numpy as np, poolgrad_numba as pg
try:
    pg.avg_pool3d_backward(np.ones((1, 1, 1, 1), np.float32), (1, 1, 1, 1), 1)
except pg.PoolGradError as error:
    assert "NUMBA_DISABLE_JIT" in str(error)
else:
    raise SystemExit(1)
""", NUMBA_DISABLE_JIT="1")  # fmt: skip


@pytest.mark.trap("T33")
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


@pytest.mark.trap("T41")
@pytest.mark.skipif(ctypes.util.find_library("gomp") is None, reason="no libgomp on this machine")
def test_t41_openmp_told_to_shrink_its_team():
    """As some image libraries do on import; fewer threads then do all of the work, to the same bits."""
    python("""
import ctypes, ctypes.util
import numba, numpy as np
import cases, reference
from support import plan_for, same_bits
openmp = ctypes.CDLL(ctypes.util.find_library("gomp"))
openmp.omp_set_dynamic(1)
assert openmp.omp_get_dynamic() == 1
case = cases.Case("large", cases.ADAPTIVE2D, (1, 1, 400, 400), output_size=(90, 90))
grad, indices = case.rough_gradient(), case.wild_indices()
want = reference.indexed(grad, case.input_shape, indices, 2)
plan = plan_for(case, deterministic=True, num_threads=8, algorithm="tile_reduce")
assert plan.workers == 8
for _ in range(50):
    out = np.full(case.input_shape, np.nan, np.float32)
    assert same_bits(plan.run(grad, indices, out=out), want)
assert numba.threading_layer() == "omp"
assert openmp.omp_get_dynamic() == 1
""", NUMBA_THREADING_LAYER="omp")  # fmt: skip
