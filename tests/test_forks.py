"""Forks and other children: the same bytes, and nobody dies or hangs."""

import json
import os

import pytest

import children
from support import LAYERS, python

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform"),
    pytest.mark.trap("T34"),
]

MOST = 8
HAVE_THREADS = {
    "parent",
    "parent afterwards",
    "forkserver",
    "fork of a forkserver's child",
    "spawn",
    "fork of a spawned child",
}


@pytest.mark.parametrize("layer", LAYERS)
def test_t34_children_of_every_kind_give_the_same_bytes(layer):
    """Those that were forked after the threads were up run on one thread, without a word."""
    out = python("import children; children.main()", timeout=300,
                 NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS=str(MOST))  # fmt: skip
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))  # TBB may print a line, too
    assert found["layer"] == layer
    assert set(children.WAYS) < set(found["answers"])
    expected = found["answers"]["parent"][0]
    for way, (digest, warnings, threads) in found["answers"].items():
        assert (way, digest, warnings) == (way, expected, 0)
        assert (way, threads) == (way, MOST if way in HAVE_THREADS else 1)


def test_a_child_forked_before_any_thread_may_use_threads():
    out = python(
        """
import children
print(children.fork()[2], children.answer()[2])
""",
        NUMBA_NUM_THREADS="3",
    )
    assert out.split() == ["3", "3"]


def test_a_child_says_truly_how_it_runs():
    python(
        """
import children
import poolgrad_numba as pg
from support import plan_for
case = children.BY_NAME["adaptive2d_one_plane"]
options = {"num_threads": 8, "algorithm": "tile_reduce"}
def say():
    plan = plan_for(case, **options)
    return pg.get_config().num_threads, plan.workers, "1 worker," in plan.explain()
before = say()
assert before[1] > 1, before
children.answer()
assert children.fork(say) == [1, 1, True]
assert say() == before
""",
        NUMBA_NUM_THREADS="8",
    )


IMPORTED_IN_THE_CHILD = """
import os, warnings
{before}
def work():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import children
    digest, silent, threads = children.answer()
    return digest, [str(w.message) for w in caught], silent, threads
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, repr(work()).encode())
    os._exit(0)
import time
deadline = time.monotonic() + 60
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        raise SystemExit("the child hangs")
    time.sleep(0.05)
assert ended[1] == 0, os.waitstatus_to_exitcode(ended[1])
digest, said, silent, threads = eval(os.read(reading, 10000))
assert silent == 0
import children
assert children.digest() == digest
print(threads, len(said), *said)
"""


def test_a_child_that_imports_after_its_parent_ran_numbas_threads():
    """It cannot know whether the threads are its own, so it uses none, and says so once."""
    out = python(
        IMPORTED_IN_THE_CHILD.format(
            before="""
import numba
@numba.njit(parallel=True)
def loop(n):
    total = 0
    for i in numba.prange(n):
        total += i
    return total
assert loop(1000) == 499500
"""
        )
    )
    assert out.startswith("1 1 poolgrad_numba uses one thread here: this process was forked"), out


@pytest.mark.skipif(children.OPENMP is None, reason="no GNU OpenMP on this machine")
def test_a_child_of_a_process_in_which_another_library_ran_openmp():
    """GNU OpenMP waits for ever, on the thread that forked, for the team which that had in the parent."""
    team = "import children; children.openmp_region(lambda: None)\n"
    assert python(
        IMPORTED_IN_THE_CHILD.format(before=team), NUMBA_THREADING_LAYER="omp", NUMBA_NUM_THREADS="3"
    ).split() == ["3", "0"]
    out = python(f"""
{team}
print(*children.fork()[1:])
print(*children.answer()[1:])
""", NUMBA_THREADING_LAYER="omp", NUMBA_NUM_THREADS="3")  # fmt: skip
    assert out.split() == ["0", "3", "0", "3"]


@pytest.mark.trap("T34")
def test_t34_a_child_forked_while_another_thread_compiles(tmp_path):
    """The child has its own compilation to do, and must not wait for one that nobody there is at."""
    out = python("""
import os, threading, time
import numpy as np
import poolgrad_numba as pg
from numba.core.compiler_lock import global_compiler_lock

def average(dtype):
    return pg.avg_pool3d_backward(np.ones((1, 1, 1, 1), dtype), (1, 2, 2, 2), 2, num_threads=1)

compiling = threading.Thread(target=average, args=(np.float32,))
compiling.start()
while global_compiler_lock._lock.acquire(blocking=False):
    global_compiler_lock._lock.release()
    time.sleep(0.001)
child = os.fork()
if child == 0:
    os._exit(0 if (average(np.float64) == 0.125).all() else 5)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        print(os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    print("hung")
compiling.join()
""", NUMBA_CACHE_DIR=str(tmp_path))  # fmt: skip
    assert out.split() == ["0"]
