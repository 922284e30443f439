"""Contexts, the toggle for deterministic mode, and streams."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

import poolgrad_numba as pg
from poolgrad_numba import aclnn
from poolgrad_numba.aclnn import executor as executor_module
from support import python
from test_aclnn import OPERATORS, arguments, as_tensors, expected, phases, result_name, run

DETERMINISTIC = aclnn.ACL_OPT_DETERMINISTIC
NAME = "aclnnAvgPool3dBackward"


@pytest.fixture(autouse=True)
def fresh_runtime():
    assert aclnn.aclInit() == 0
    yield
    assert aclnn.aclFinalize() == 0


def latched():
    """The mode that phase 1 latches here and now."""
    _, executor, status = phases(NAME)[0](**arguments(NAME))
    assert status == 0
    return executor.plan.problem.deterministic


def in_thread(function):
    """What a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(30)
    return found[0]


# -- process, device, contexts ---------------------------------------------------------------------------------------


def test_init_and_finalize_come_in_turn():
    assert aclnn.aclInit() == aclnn.ACL_ERROR_REPEAT_INITIALIZE
    assert aclnn.aclFinalize() == 0
    assert aclnn.aclFinalize() == aclnn.ACL_ERROR_UNINITIALIZE
    assert aclnn.aclInit(None) == 0


@pytest.mark.parametrize("device", [1, -1, "0", None, 0.0, False, np.array([0, 0])])
def test_there_is_one_device(device):
    assert aclnn.aclrtSetDevice(device) == aclnn.ACL_ERROR_RT_INVALID_DEVICEID
    assert aclnn.aclrtResetDevice(device) == aclnn.ACL_ERROR_RT_INVALID_DEVICEID
    assert aclnn.aclrtCreateContext(device) == (None, aclnn.ACL_ERROR_RT_INVALID_DEVICEID)
    assert "deviceId: got" in aclnn.aclGetRecentErrMsg()


def test_setting_the_device_makes_a_default_context_current():
    assert in_thread(aclnn.aclrtGetCurrentContext) == (None, aclnn.ACL_ERROR_RT_CONTEXT_NULL)
    assert aclnn.aclrtSetDevice(0) == 0
    default, status = aclnn.aclrtGetCurrentContext()
    assert status == 0
    assert in_thread(lambda: (aclnn.aclrtSetDevice(0), aclnn.aclrtGetCurrentContext())) == (0, (default, 0))
    assert aclnn.aclrtResetDevice(0) == 0
    assert aclnn.aclrtGetCurrentContext() == (None, aclnn.ACL_ERROR_RT_CONTEXT_NULL)
    assert aclnn.aclrtSetCurrentContext(default) == aclnn.ACL_ERROR_RT_CONTEXT_NULL


def test_a_default_context_that_was_destroyed_is_made_anew():
    aclnn.aclrtSetDevice(0)
    first, _ = aclnn.aclrtGetCurrentContext()
    assert aclnn.aclrtDestroyContext(first) == 0
    assert aclnn.aclrtSetDevice(0) == 0
    second, status = aclnn.aclrtGetCurrentContext()
    assert status == 0
    assert second is not first


def test_contexts_are_bound_to_threads():
    first, _ = aclnn.aclrtCreateContext(0)
    second, _ = aclnn.aclrtCreateContext(0)
    assert aclnn.aclrtGetCurrentContext() == (second, 0)
    assert aclnn.aclrtSetCurrentContext(first) == 0
    assert aclnn.aclrtGetCurrentContext() == (first, 0)
    assert in_thread(aclnn.aclrtGetCurrentContext)[1] == aclnn.ACL_ERROR_RT_CONTEXT_NULL
    assert in_thread(lambda: (aclnn.aclrtSetCurrentContext(second), aclnn.aclrtGetCurrentContext())) == (0, (second, 0))
    assert aclnn.aclrtDestroyContext(first) == 0
    assert aclnn.aclrtDestroyContext(first) == aclnn.ACL_ERROR_RT_CONTEXT_NULL
    assert aclnn.aclrtGetCurrentContext() == (None, aclnn.ACL_ERROR_RT_CONTEXT_NULL)
    for bad in (None, 5, object()):
        assert aclnn.aclrtSetCurrentContext(bad) == aclnn.ACL_ERROR_RT_CONTEXT_NULL
        assert aclnn.aclrtDestroyContext(bad) == aclnn.ACL_ERROR_RT_CONTEXT_NULL


# -- the toggle ------------------------------------------------------------------------------------------------------


def test_the_toggles_statuses():
    def there():
        return (
            aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, 1),
            aclnn.aclrtCtxGetSysParamOpt(DETERMINISTIC),
        )

    assert in_thread(there) == (107002, (0, 107002))
    aclnn.aclrtCreateContext(0)
    assert aclnn.aclrtCtxGetSysParamOpt(DETERMINISTIC) == (0, 107021)
    assert aclnn.aclrtGetSysParamOpt(DETERMINISTIC) == (0, 0)
    for value in (0, 1, 2, 3, np.int32(1)):
        assert aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, value) == 0
        assert aclnn.aclrtCtxGetSysParamOpt(0) == (value, 0)
        assert aclnn.aclrtSetSysParamOpt(DETERMINISTIC, value) == 0
        assert aclnn.aclrtGetSysParamOpt(0) == (value, 0)
    for setter in (aclnn.aclrtCtxSetSysParamOpt, aclnn.aclrtSetSysParamOpt):
        for value in (-1, 4, 1.0, "1", None, True, [1], np.array([0, 1])):
            assert setter(DETERMINISTIC, value) == 107000
            assert "value: got" in aclnn.aclGetRecentErrMsg()
        for option in (1, -1, 0.0, None, "0", [0], False, np.array([0, 1])):
            assert setter(option, 1) == 100000
            assert "opt: got" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclrtCtxGetSysParamOpt(7) == (0, 100000)
    assert aclnn.aclrtGetSysParamOpt(7) == (0, 100000)
    assert aclnn.aclrtCtxGetSysParamOpt(DETERMINISTIC) == (1, 0)


def test_the_context_comes_before_the_process_and_that_before_the_python_configuration():
    aclnn.aclrtCreateContext(0)
    assert latched() is False
    with pg.config_context(deterministic=True):
        assert latched() is True
        aclnn.aclrtSetSysParamOpt(DETERMINISTIC, 0)
        assert latched() is False
        aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, 2)
        assert latched() is True
    assert latched() is True
    assert in_thread(latched) is False, "the process's value, in a thread without a context"
    aclnn.aclrtSetSysParamOpt(DETERMINISTIC, 1)
    aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, 0)
    assert latched() is False
    assert in_thread(latched) is True


def test_two_contexts_in_two_threads():
    barrier, found = threading.Barrier(2), {}

    def work(value):
        aclnn.aclrtCreateContext(0)
        barrier.wait(10)
        assert aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, value) == 0
        barrier.wait(10)
        found[value] = latched()

    threads = [threading.Thread(target=work, args=(value,)) for value in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: False, 1: True}


def test_the_mode_is_latched_in_phase_1(monkeypatch):
    """A change between the phases, also one in another context, changes nothing."""
    ran = []
    real = executor_module._run

    def recording(declaration, plan, *rest):
        ran.append(plan.problem.deterministic)
        return real(declaration, plan, *rest)

    monkeypatch.setattr(executor_module, "_run", recording)
    aclnn.aclrtCreateContext(0)
    given = {**arguments(NAME), "kernelSize": [3] * 3, "stride": [1] * 3}
    given["gradOutput"] = np.ones((2, 3, 2, 4, 6), np.float32)
    for mode in (1, 0):
        aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, mode)
        size, executor, status = phases(NAME)[0](**given)
        assert status == 0, aclnn.aclGetRecentErrMsg()
        aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, 1 - mode)
        aclnn.aclrtCreateContext(0)
        aclnn.aclrtSetSysParamOpt(DETERMINISTIC, 1 - mode)
        assert phases(NAME)[1](np.empty(size, np.uint8), size, executor, None) == 0
    assert ran == [True, False]


# -- streams ---------------------------------------------------------------------------------------------------------


def slow_first(monkeypatch, seconds=0.05):
    """Make each run slow to start, so that what is queued is still pending."""
    real = executor_module._run

    def slow(*args):
        time.sleep(seconds)
        return real(*args)

    monkeypatch.setattr(executor_module, "_run", slow)


def queue(name, given, stream):
    size, executor, status = phases(name)[0](**given)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    return phases(name)[1](np.empty(size, np.uint8), size, executor, stream)


def test_phase_2_returns_at_once_and_the_result_is_there_after_synchronize(monkeypatch):
    allowed, real = threading.Event(), executor_module._run

    def wait(*args):
        assert allowed.wait(30)
        return real(*args)

    monkeypatch.setattr(executor_module, "_run", wait)
    stream, status = aclnn.aclrtCreateStream()
    assert status == 0
    given = arguments(NAME)
    assert queue(NAME, given, stream) == 0  # which would wait for ever if it ran here
    assert (given["output"] == 7).all()
    allowed.set()
    assert aclnn.aclrtSynchronizeStream(stream) == 0
    assert np.array_equal(given["output"], expected(NAME, given))
    assert aclnn.aclrtDestroyStream(stream) == 0


def test_a_stream_runs_in_order(monkeypatch):
    order = []
    monkeypatch.setattr(executor_module, "_run", lambda d, p, arrays, s: order.append(float(arrays.grad.flat[0])))
    streams = [aclnn.aclrtCreateStream()[0] for _ in range(2)]
    for i in range(50):
        given = arguments(NAME)
        given["gradOutput"].flat[0] = i
        assert queue(NAME, given, streams[i % 2]) == 0
    for stream in streams:
        assert aclnn.aclrtSynchronizeStream(stream) == 0
    assert [i for i in order if i % 2 == 0] == list(range(0, 50, 2))
    assert [i for i in order if i % 2 == 1] == list(range(1, 50, 2))


def test_two_streams_overlap_in_time(monkeypatch):
    meeting = threading.Barrier(2)
    real = executor_module._run

    def meet(*args):
        meeting.wait(20)  # breaks, and fails the run, unless both streams are running
        return real(*args)

    monkeypatch.setattr(executor_module, "_run", meet)
    streams = [aclnn.aclrtCreateStream()[0] for _ in range(2)]
    work = [arguments(NAME) for _ in streams]
    for stream, given in zip(streams, work, strict=True):
        assert queue(NAME, given, stream) == 0
    for stream, given in zip(streams, work, strict=True):
        assert aclnn.aclrtSynchronizeStream(stream) == 0
        assert np.array_equal(given["output"], expected(NAME, given))


@pytest.mark.parametrize("name", [n for n in OPERATORS if "Max" in n])
def test_an_error_surfaces_at_the_next_synchronize_and_later_work_runs(name):
    stream, other = aclnn.aclrtCreateStream()[0], aclnn.aclrtCreateStream()[0]
    bad, worse, good = arguments(name), arguments(name), arguments(name)
    bad["indices"].flat[4] = -3
    worse["indices"].flat[0] = -4
    for given in (bad, worse, good):
        assert queue(name, given, stream) == 0
    assert aclnn.aclrtSynchronizeStream(other) == 0, "another stream has no part in it"
    assert aclnn.aclrtSynchronizeStream(stream) == aclnn.ACLNN_ERR_PARAM_INVALID
    assert f"{name}: indices: got -3" in aclnn.aclGetRecentErrMsg()
    assert np.array_equal(good["gradInput"], expected(name, good))
    assert aclnn.aclrtSynchronizeStream(stream) == 0
    assert queue(name, bad, stream) == 0
    assert aclnn.aclrtDestroyStream(stream) == aclnn.ACLNN_ERR_PARAM_INVALID, "never lost"


def test_a_failure_that_no_synchronize_reported_is_finalizes_status():
    name = "aclnnAdaptiveMaxPool2dBackward"
    bad, stream = arguments(name), aclnn.aclrtCreateStream()[0]
    bad["indices"].flat[4] = -3
    assert queue(name, bad, stream) == 0
    assert aclnn.aclFinalize() == aclnn.ACLNN_ERR_PARAM_INVALID
    assert "indices: got -3" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclInit() == 0


def test_buffers_live_until_their_run(monkeypatch):
    slow_first(monkeypatch, 0.1)
    stream = aclnn.aclrtCreateStream()[0]
    given = arguments(NAME)
    output, want = given["output"], expected(NAME, given)
    tensors = as_tensors(given)
    size, executor, _ = phases(NAME)[0](**tensors)
    workspace = np.empty(size, np.uint8)
    alive = weakref.ref(workspace)
    assert phases(NAME)[1](workspace, size, executor, stream) == 0
    for tensor in (tensors["gradOutput"], tensors["self"], tensors["output"]):
        assert aclnn.aclDestroyTensor(tensor) == 0
    given.clear()
    tensors.clear()
    del workspace, executor
    gc.collect()
    assert aclnn.aclrtSynchronizeStream(stream) == 0
    assert np.array_equal(output, want)
    gc.collect()
    assert alive() is None, "and no longer"


@pytest.mark.parametrize("end", ["destroy", "finalize", "forget"])
def test_pending_work_is_drained_never_lost(monkeypatch, end):
    slow_first(monkeypatch, 0.05)
    stream = aclnn.aclrtCreateStream()[0]
    work = [arguments(NAME) for _ in range(5)]
    for given in work:
        assert queue(NAME, given, stream) == 0
    if end == "destroy":
        assert aclnn.aclrtDestroyStream(stream) == 0
    elif end == "finalize":
        assert aclnn.aclFinalize() == 0
        assert aclnn.aclInit() == 0
    else:
        del stream
        gc.collect()
        deadline = time.monotonic() + 20
        while (work[-1]["output"] == 7).any() and time.monotonic() < deadline:
            time.sleep(0.01)
    for given in work:
        assert np.array_equal(given["output"], expected(NAME, given))


def test_a_destroyed_stream_takes_no_more():
    stream = aclnn.aclrtCreateStream()[0]
    assert aclnn.aclrtDestroyStream(stream) == 0
    given = arguments(NAME)
    assert queue(NAME, given, stream) == aclnn.ACLNN_ERR_PARAM_INVALID
    assert "stream: got" in aclnn.aclGetRecentErrMsg()
    assert (given["output"] == 7).all()
    assert aclnn.aclrtSynchronizeStream(stream) == aclnn.ACL_ERROR_RT_STREAM_CONTEXT
    assert aclnn.aclrtDestroyStream(stream) == aclnn.ACL_ERROR_RT_STREAM_CONTEXT
    assert "destroyed" in aclnn.aclGetRecentErrMsg()
    for bad in (5, "stream", object()):
        assert aclnn.aclrtSynchronizeStream(bad) == aclnn.ACL_ERROR_RT_PARAM_INVALID
        assert aclnn.aclrtDestroyStream(bad) == aclnn.ACL_ERROR_RT_PARAM_INVALID
    assert aclnn.aclrtSynchronizeStream(None) == 0


def test_one_stream_from_several_threads():
    stream = aclnn.aclrtCreateStream()[0]
    work = [arguments(name) for name in OPERATORS for _ in range(10)]
    names = [name for name in OPERATORS for _ in range(10)]

    def submit(k):
        for i in range(k, len(work), 4):
            assert queue(names[i], work[i], stream) == 0
        assert aclnn.aclrtSynchronizeStream(stream) == 0

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, given in zip(names, work, strict=True):
        assert np.array_equal(given[result_name(name)], expected(name, given))


def test_one_executor_from_several_threads_is_used_once():
    for _ in range(20):
        given = arguments(NAME)
        size, executor, _ = phases(NAME)[0](**given)
        barrier, found = threading.Barrier(4), []

        def use(size=size, executor=executor, barrier=barrier, found=found):
            barrier.wait(10)
            found.append(phases(NAME)[1](np.empty(size, np.uint8), size, executor, None))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(found) == [0, *[aclnn.ACLNN_ERR_INNER] * 3]


def test_messages_are_a_threads_own():
    assert run(NAME, {**arguments(NAME), "self": None})[0] == aclnn.ACLNN_ERR_PARAM_NULLPTR
    assert "self: got None" in aclnn.aclGetRecentErrMsg()
    assert in_thread(aclnn.aclGetRecentErrMsg) == ""


def test_work_pending_at_the_end_of_the_process_is_done(tmp_path):
    path = tmp_path / "result"
    python(f"""
import time
import numpy as np
from poolgrad_numba import aclnn
from poolgrad_numba.aclnn import executor
real = executor._run
def slow(*args):
    time.sleep(0.2)
    return real(*args)
executor._run = slow
out = np.memmap({str(path)!r}, np.float32, "w+", shape=(1, 1, 2, 2, 2))
stream, _ = aclnn.aclrtCreateStream()
for _ in range(3):
    size, ex, status = aclnn.aclnnAvgPool3dBackwardGetWorkspaceSize(
        np.full((1, 1, 1, 1, 1), 8, np.float32), out, [2], [], [0], False, True, 0, out)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    assert aclnn.aclnnAvgPool3dBackward(np.empty(size, np.uint8), size, ex, stream) == 0
assert not out.any()
""")
    assert np.fromfile(path, np.float32).tolist() == [1] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_is_told_that_the_stream_is_not_its_own():
    out = python("""
import os
import numpy as np
from poolgrad_numba import aclnn
def use(stream):
    g, x = np.full((1, 1, 1, 1, 1), 8, np.float32), np.zeros((1, 1, 2, 2, 2), np.float32)
    size, ex, _ = aclnn.aclnnAvgPool3dBackwardGetWorkspaceSize(g, x, [2], [], [0], False, True, 0, x)
    return aclnn.aclnnAvgPool3dBackward(np.empty(size, np.uint8), size, ex, stream), x.sum()
stream, _ = aclnn.aclrtCreateStream()
assert use(stream)[0] == 0 and aclnn.aclrtSynchronizeStream(stream) == 0
child = os.fork()
if child == 0:
    told = (use(stream)[0], aclnn.aclrtSynchronizeStream(stream), aclnn.aclrtDestroyStream(stream))
    fresh, _ = aclnn.aclrtCreateStream()
    good = use(None) == (0, 8) and use(fresh)[0] == 0 and aclnn.aclrtSynchronizeStream(fresh) == 0
    os._exit(0 if told == (161002, 107003, 107003) and good and aclnn.aclInit() == 0 == aclnn.aclFinalize() else 9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert use(stream)[0] == 0 and aclnn.aclrtSynchronizeStream(stream) == 0
""")
    assert out.split() == ["0"]
