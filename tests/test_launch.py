"""The door to the kernels: thread limits, layers, forks."""

import ctypes.util
import sys

import numba
import numpy as np
import pytest

import cases
import children
from poolgrad_numba import launch as door
from support import LAYERS, plan_for, python, same_bits

CASE = next(case for case in cases.SMALL_CASES if case.name == "adaptive2d_one_plane")


def fake(calls):
    return lambda *arguments: calls.append(arguments) or 5


def test_one_worker_starts_no_threads():
    calls = []
    assert door.launch(fake(calls), 1, "array") == 5
    assert calls == [(1, 1, "array")]


def test_workers_run_on_as_many_threads():
    calls = []
    assert door.launch(fake(calls), 3, "array") == 5
    assert calls == [(3, 3, "array")]


def test_a_plan_from_a_larger_machine_runs():
    calls = []
    door.launch(fake(calls), 1000)
    assert calls == [(1000, numba.config.NUMBA_NUM_THREADS)]


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
@pytest.mark.parametrize("layer", LAYERS)
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


@pytest.mark.trap("T39")
@pytest.mark.skipif(children.OPENMP is None, reason="no GNU OpenMP on this machine")
@pytest.mark.parametrize("layer", LAYERS)
def test_openmps_own_settings_stay(layer):
    """Starting Numba's omp layer alone sets the calling thread's team size and allows nested teams."""
    python("""
import ctypes, threading
import numba, children
openmp = ctypes.CDLL(children.OPENMP)
def settings():
    names = "max_threads", "max_active_levels", "dynamic", "nested"
    return [getattr(openmp, "omp_get_" + name)() for name in names]
openmp.omp_set_num_threads(5)
here, there = settings(), children.on_a_thread(settings)
assert here[0] == 5 and there[0] == 3, (here, there)
for _ in range(2):
    children.digest()
    assert settings() == here, settings()
    assert children.on_a_thread(settings) == there
    assert children.on_a_thread(lambda: (children.digest(), settings())[1]) == there
assert numba.get_num_threads() == 8
""", NUMBA_THREADING_LAYER=layer, OMP_NUM_THREADS="3", NUMBA_NUM_THREADS="8")  # fmt: skip


@pytest.mark.skipif(children.OPENMP is None, reason="no GNU OpenMP on this machine")
@pytest.mark.parametrize("layer", LAYERS)
def test_calls_from_inside_an_openmp_region_of_another_library(layer):
    python("""
import children
from concurrent.futures import ThreadPoolExecutor
region = children.openmp_region(children.digest, 4)
assert len(region) == 4 and set(region) == {children.digest()}
with ThreadPoolExecutor(3) as pool:  # pools in pools
    nested = list(pool.map(lambda _: children.openmp_region(children.digest, 2), range(6)))
assert {digest for found in nested for digest in found} == set(region)
""", NUMBA_THREADING_LAYER=layer)  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_calls_from_inside_numbas_own_parallel_loop(layer):
    """workqueue aborts the process when loops nest, so that a call runs on one thread there."""
    python("""
import numba, numpy as np, children
want = children.digest()
found = []
def call():
    found.append(children.digest())
@numba.njit(parallel=True)
def loop(n):
    total = 0
    for i in numba.prange(n):
        with numba.objmode():
            call()
        total += i
    return total
assert loop(8) == 28
assert found == [want] * 8
assert numba.get_num_threads() == 8 and children.digest() == want
""", NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="8")  # fmt: skip


INTERRUPTED = """
import os, signal, threading, time
import numba, numpy as np
import poolgrad_numba as pg
from poolgrad_numba.aclnn import *
import children
want = children.digest()
shape = (1, 1, 20, 200, 200)
plan = pg.make_plan("avg_pool3d_backward", input_shape=shape, kernel_size=7, stride=1, padding=3, num_threads=2,
                    algorithm="gather", deterministic=True)
grad, out = np.ones(plan.output_shape, np.float32), np.empty(shape, np.float32)
workspace = np.empty(plan.workspace_size, np.uint8)

def press_ctrl_c_during(call):
    start = time.perf_counter()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except KeyboardInterrupt:
        assert time.perf_counter() - start > 0.04
    else:
        raise SystemExit("not interrupted")
    assert numba.get_num_threads() == 8
    assert children.digest() == want

plan.run(grad, out=out, workspace=workspace)
whole = out.copy()
for _ in range(3):
    press_ctrl_c_during(lambda: [plan.run(grad, out=out, workspace=workspace) for _ in range(1000)])
    assert plan.run(grad, out=out, workspace=workspace).tobytes() == whole.tobytes()

stream, status = aclrtCreateStream()
for _ in range(20):
    size, executor, status = aclnnAvgPool3dBackwardGetWorkspaceSize(
        grad, out, [7] * 3, [1] * 3, [3] * 3, False, True, 0, out)
    assert status == 0, aclGetRecentErrMsg()
    assert aclnnAvgPool3dBackward(np.empty(size, np.uint8), size, executor, stream) == 0
press_ctrl_c_during(lambda: [aclrtSynchronizeStream(stream) for _ in range(100_000)])
assert aclrtSynchronizeStream(stream) == 0 and aclrtDestroyStream(stream) == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("layer", LAYERS)
def test_an_interrupt_during_a_long_call_leaves_a_usable_process(layer):
    python(INTERRUPTED, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="8")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupts_at_any_moment_leave_a_usable_process(tmp_path):
    """While a kernel is compiled, cached, loaded or run: the next call is right, and the thread limit is as before."""
    python("""
import random, signal, time, warnings
import numba
import children
want = children.on_a_thread(children.digest)  # signals reach the main thread only
signal.signal(signal.SIGALRM, signal.default_int_handler)
from poolgrad_numba.kernels import _jit
rng = random.Random(0)
interrupts, kept = 0, []
end = time.monotonic() + 8
while time.monotonic() < end:
    if rng.random() < 0.3:  # forget what was compiled, in memory alone; an interrupt while LLVM frees it breaks LLVM
        for kernel in _jit.KERNELS:
            kept.append(kernel._dispatcher)
            kernel._dispatcher = None
        kept += _jit._in_turn.dispatcher, _jit._on_threads.dispatcher
        _jit._in_turn._found = _jit._on_threads._found = None
    try:
        signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-4.5, -0.5))
        while True:
            children.digest()
    except KeyboardInterrupt:
        interrupts += 1
    assert numba.get_num_threads() == 4
    assert children.digest() == want
assert interrupts > 5, interrupts
""", NUMBA_NUM_THREADS="4")  # fmt: skip


@pytest.mark.parametrize("lock", ["_jit.global_compiler_lock", "_jit._making"])
def test_a_call_from_the_midst_of_a_compilation_compiles(lock):
    """As a signal's handler makes it, on a thread that holds the compiler's lock or ours."""
    python(f"""
import children
from poolgrad_numba.kernels import _jit
with {lock}:
    children.digest()
""")
