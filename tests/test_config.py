"""Who may set the mode and the thread limit, and which setting holds."""

import asyncio
import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import poolgrad_numba as pg
from poolgrad_numba import config
from support import forget_environment, python


def setting():
    current = pg.get_config()
    return current.deterministic, current.num_threads


def test_default_is_fast_and_numbas_own_limit():
    import numba

    assert setting() == (False, numba.get_num_threads())
    numba.set_num_threads(2)
    try:
        assert setting() == (False, 2)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pg.get_config().deterministic = True


def test_each_layer_beats_the_one_below(monkeypatch):
    monkeypatch.setenv("POOLGRAD_DETERMINISTIC", "1")
    monkeypatch.setenv("POOLGRAD_NUM_THREADS", "2")
    forget_environment()
    assert setting() == (True, 2)
    pg.set_config(deterministic=False, num_threads=3)
    assert setting() == (False, 3)
    with pg.config_context(deterministic=True, num_threads=4):
        assert setting() == (True, 4)
        call = pg.make_plan("adaptive_max_pool2d_backward", input_shape=(1, 2, 2), output_size=1, deterministic=False,
                            num_threads=5).problem  # fmt: skip
        assert (call.deterministic, call.num_threads) == (False, 5)
        plain = pg.make_plan("adaptive_max_pool2d_backward", input_shape=(1, 2, 2), output_size=1).problem
        assert (plain.deterministic, plain.num_threads) == (True, 4)
    pg.set_config(deterministic=None)
    assert setting() == (True, 3)
    pg.set_config(num_threads=None)
    assert setting() == (True, 2)


def test_what_is_not_given_stays():
    pg.set_config(deterministic=True)
    pg.set_config(num_threads=2)
    assert setting() == (True, 2)
    with pg.config_context(num_threads=1):
        assert setting() == (True, 1)
        with pg.config_context(deterministic=False) as inner:
            assert (inner.deterministic, inner.num_threads) == (False, 1)
        with pg.config_context(num_threads=None):
            assert setting() == (True, 2)
        assert setting() == (True, 1)


def test_context_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), pg.config_context(deterministic=True):
        raise ZeroDivisionError
    assert pg.get_config().deterministic is False


@pytest.mark.parametrize("name", ["POOLGRAD_DETERMINISTIC", "POOLGRAD_NUM_THREADS"])
@pytest.mark.parametrize("value", ["", "true", "yes", " 1", "-1", "1.0", "٣", "2x", "1" * 5000])
def test_malformed_environment_is_an_error_at_every_call(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    forget_environment()
    for _ in range(2):
        with pytest.raises(pg.PoolGradValueError, match=name):
            pg.get_config()
    operands = np.ones((1, 1, 1), np.float32), (1, 2, 2), np.zeros((1, 1, 1), int)
    with pytest.raises(pg.PoolGradValueError, match=name):
        pg.adaptive_max_pool2d_backward(*operands)
    pg.adaptive_max_pool2d_backward(*operands, deterministic=True, num_threads=1)  # nothing depends on it


@pytest.mark.parametrize("value", ["2", "10"])
def test_deterministic_variable_takes_0_and_1_only(monkeypatch, value):
    monkeypatch.setenv("POOLGRAD_DETERMINISTIC", value)
    forget_environment()
    with pytest.raises(pg.PoolGradValueError, match="wanted 0 or 1"):
        pg.get_config()


def test_malformed_environment_does_not_break_the_import():
    python("import poolgrad_numba", POOLGRAD_DETERMINISTIC="maybe", POOLGRAD_NUM_THREADS="0")


def test_environment_of_a_fresh_process():
    out = python(
        "import poolgrad_numba as pg; print(pg.get_config())", POOLGRAD_DETERMINISTIC="1", POOLGRAD_NUM_THREADS="1"
    )
    assert out.strip() == "Config(deterministic=True, num_threads=1)"


@pytest.mark.parametrize("value", [0, 1, "1", "yes", 1.0, [], np.int64(1)])
def test_mode_must_be_a_bool(value):
    for setter in (pg.set_config, lambda **kw: pg.config_context(**kw).__enter__()):
        with pytest.raises(pg.PoolGradTypeError, match="deterministic"):
            setter(deterministic=value)
    with pytest.raises(pg.PoolGradTypeError, match="deterministic"):
        config.resolve(value)
    assert pg.get_config().deterministic is False


def test_numpy_bools_and_integers_are_fine():
    pg.set_config(deterministic=np.bool_(True), num_threads=np.int8(2))
    assert setting() == (True, 2)
    assert type(pg.get_config().deterministic) is bool


def test_a_refused_setting_changes_nothing():
    pg.set_config(deterministic=True, num_threads=2)
    with pytest.raises(pg.PoolGradValueError):
        pg.set_config(deterministic=False, num_threads=0)
    assert setting() == (True, 2)


def test_context_holds_in_its_own_thread_only():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with pg.config_context(deterministic=True, num_threads=1):
            inside.set()
            leave.wait(10)
            seen.append(setting())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    assert pg.get_config().deterministic is False
    leave.set()
    thread.join()
    assert seen == [(True, 1)]


def test_process_settings_hold_in_every_thread():
    pg.set_config(deterministic=True, num_threads=2)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: setting(), range(16))) == {(True, 2)}


def test_contexts_of_asyncio_tasks_do_not_mix():
    async def task(mode, threads):
        with pg.config_context(deterministic=mode, num_threads=threads):
            for _ in range(5):
                await asyncio.sleep(0)
                assert setting() == (mode, threads)
        return setting()

    async def main():
        return await asyncio.gather(*(task(bool(i % 2), 1 + i % 3) for i in range(12)))

    assert {mode for mode, _ in asyncio.run(main())} == {False}


FAIR = """
import os
for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.pop(name, None)
os.environ.update({environment})
import numba, poolgrad_numba as pg
from poolgrad_numba import process
assert not numba.config.NUMBA_NUM_THREADS < 2, "needs two cores"
{before}
print(pg.get_config().num_threads)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("environment", "before", "threads"),
    [
        ({}, "", len(os.sched_getaffinity(0))),
        ({}, "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})", 1),
        ({}, "process.quota = lambda: 0.9", 1),
        ({"OMP_NUM_THREADS": "1"}, "", 1),
        ({"OMP_NUM_THREADS": " 1 ,2"}, "", 1),
        ({"OMP_NUM_THREADS": "0"}, "", len(os.sched_getaffinity(0))),  # OpenMP ignores what makes no sense
        ({"OMP_NUM_THREADS": "1.5"}, "", len(os.sched_getaffinity(0))),
        ({"OMP_NUM_THREADS": "100000"}, "", len(os.sched_getaffinity(0))),
        ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "5"}, "", 5),
        ({"OMP_NUM_THREADS": "1", "POOLGRAD_NUM_THREADS": "2"}, "", 2),
        ({}, "numba.set_num_threads(1)", 1),
        ({"NUMBA_NUM_THREADS": "5"}, "numba.set_num_threads(3)", 3),
    ],
)
def test_who_says_nothing_gets_a_fair_share(environment, before, threads):
    """Numba's own limit, unless affinity, quota or OpenMP's limit are lower and nobody spoke to Numba."""
    assert int(python(FAIR.format(environment=environment, before=before))) == threads
