"""The two-phase face: every row of the status table for every operator, workspaces, and what comes out."""

import enum
import gc
import inspect
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest

import cases
import poolgrad_numba as pg
from poolgrad_numba import aclnn
from support import call, same_bits

ACL_TYPES = {
    np.dtype(np.float32): aclnn.ACL_FLOAT,
    np.dtype(np.float16): aclnn.ACL_FLOAT16,
    np.dtype(ml_dtypes.bfloat16): aclnn.ACL_BF16,
    np.dtype(np.float64): aclnn.ACL_DOUBLE,
    np.dtype(np.int32): aclnn.ACL_INT32,
    np.dtype(np.int64): aclnn.ACL_INT64,
    np.dtype(np.int8): aclnn.ACL_INT8,
    np.dtype(np.uint8): aclnn.ACL_UINT8,
    np.dtype(np.bool_): aclnn.ACL_BOOL,
}
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
OPERATORS = {
    "aclnnMaxPool2dWithIndicesBackward": (cases.MAX2D, FLOATS[:1], (np.dtype(np.int32),)),
    "aclnnAdaptiveMaxPool2dBackward": (cases.ADAPTIVE2D, FLOATS, (np.dtype(np.int32), np.dtype(np.int64))),
    "aclnnAdaptiveMaxPool3dBackward": (cases.ADAPTIVE3D, FLOATS, (np.dtype(np.int32),)),
    "aclnnAvgPool3dBackward": (cases.AVG3D, FLOATS, ()),
}
EACH = pytest.mark.parametrize("name", OPERATORS)


def phases(name):
    return getattr(aclnn, f"{name}GetWorkspaceSize"), getattr(aclnn, name)


def tensor(array, label=aclnn.ACL_FORMAT_ND):
    made = aclnn.aclCreateTensor(array.shape, ACL_TYPES[array.dtype], None, 0, label, [array.size], array)
    assert made is not None, aclnn.aclGetRecentErrMsg()
    return made


def result_name(name):
    return "output" if "Avg" in name else "gradInput"


def arguments(name, dtype=np.float32, index_dtype=np.int32, lead=(2, 3)):
    """Good arguments of phase 1 as arrays, by C name and in C order."""
    spatial = 3 if "3d" in name else 2
    size, output = (4, 6, 8)[-spatial:], (2, 3, 4)[-spatial:]
    rng = np.random.default_rng(0)
    given = {
        "gradOutput": rng.integers(-8, 9, lead + output).astype(dtype),
        "self": np.zeros(lead + size, dtype),
        "indices": rng.integers(0, np.prod(size), lead + output).astype(index_dtype),
        "kernelSize": [2] * spatial,
        "stride": [],
        "padding": [0] * spatial,
        "dilation": [1, 1],
        "ceilMode": False,
        "countIncludePad": True,
        "divisorOverride": 0,
        result_name(name): np.full(lead + size, 7, dtype),
    }
    return {parameter: given[parameter] for parameter in inspect.signature(phases(name)[0]).parameters}


def as_tensors(given):
    return {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}


def expected(name, given, *, deterministic=True):
    operands = [given["gradOutput"], given["self"].shape]
    if "indices" in given:
        operands.append(given["indices"])
    parameters = {"kernel_size": 2} if "kernelSize" in given else {}
    return getattr(pg, OPERATORS[name][0])(*operands, **parameters, deterministic=deterministic)


def run(name, given, stream=None, workspace=...):
    """Both phases; (status of the first failing one or of the last, text)."""
    first, second = phases(name)
    size, executor, status = first(**given)
    if status:
        assert (size, executor) == (0, None)
        return status, aclnn.aclGetRecentErrMsg()
    assert isinstance(size, int)
    workspace = np.empty(size, np.uint8) if workspace is ... else workspace
    return second(workspace, size, executor, stream), aclnn.aclGetRecentErrMsg()


@pytest.fixture(autouse=True)
def fresh_runtime():
    aclnn.aclInit()
    yield
    assert aclnn.aclFinalize() == 0


# -- results -------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("lead", [(2, 3), (3,), (1, 1)])
@pytest.mark.parametrize("wrap", [as_tensors, dict], ids=["tensors", "arrays"])
@pytest.mark.parametrize("on_stream", [False, True])
def test_results_of_every_dtype(name, lead, wrap, on_stream):
    _, dtypes, index_dtypes = OPERATORS[name]
    for dtype in dtypes:
        for index_dtype in index_dtypes or (np.int32,):
            given = arguments(name, dtype, index_dtype, lead)
            stream = aclnn.aclrtCreateStream()[0] if on_stream else None
            status, text = run(name, wrap(given), stream)
            assert status == 0, text
            assert aclnn.aclrtSynchronizeStream(stream) == 0
            assert same_bits(given[result_name(name)], expected(name, given))
            if stream is not None:
                assert aclnn.aclrtDestroyStream(stream) == 0


@EACH
def test_strided_views_of_flat_storage(name):
    """Channels-last tensors with an offset, as a C program describes them."""
    given = arguments(name)

    def channels_last(array):
        spatial = array.shape[2:]
        storage = np.full(array.size + 5, 77, array.dtype)
        axes = (0, *range(2, array.ndim), 1)
        storage[5:] = array.transpose(axes).reshape(-1)
        counts = (*spatial, array.shape[1])
        inner = [int(np.prod(counts[axis + 1 :])) for axis in range(len(counts))]
        strides = [int(np.prod(counts)), inner[-1], *inner[:-1]]
        made = aclnn.aclCreateTensor(
            array.shape, ACL_TYPES[array.dtype], strides, 5, aclnn.ACL_FORMAT_NHWC, [storage.size], storage
        )
        assert np.array_equal(made.array, array)
        return made, storage

    wrapped, storages = {}, {}
    for argument, value in given.items():
        wrapped[argument] = value
        if isinstance(value, np.ndarray):
            wrapped[argument], storages[argument] = channels_last(value)
    assert run(name, wrapped) == (0, aclnn.aclGetRecentErrMsg())
    assert np.array_equal(wrapped[result_name(name)].array, expected(name, given))
    assert (storages[result_name(name)][:5] == 77).all()


def test_divisor_override_of_0_leaves_it_unset():
    name = "aclnnAvgPool3dBackward"
    for divisor in (0, -5, 3):
        given = {**arguments(name), "divisorOverride": divisor}
        assert run(name, given)[0] == 0
        want = pg.avg_pool3d_backward(given["gradOutput"], given["self"].shape, 2, divisor_override=divisor or None)
        assert np.array_equal(given["output"], want)


def test_flags_and_arrays_reach_the_operator():
    shape = (1, 1, 1, 1, 5)
    given = {
        "gradOutput": np.ones((1, 1, 1, 1, 3), np.float32), "self": np.empty(shape, np.float32),
        "kernelSize": aclnn.aclCreateIntArray([1, 1, 3]), "stride": aclnn.aclCreateIntArray([1, 1, 2]),
        "padding": aclnn.aclCreateIntArray([0, 0, 1]), "ceilMode": 1, "countIncludePad": False, "divisorOverride": 0,
        "output": np.empty(shape, np.float32),
    }  # fmt: skip
    assert run("aclnnAvgPool3dBackward", given)[0] == 0
    want = pg.avg_pool3d_backward(given["gradOutput"], shape, (1, 1, 3), (1, 1, 2), (0, 0, 1), True, False)
    assert np.array_equal(given["output"], want)


def test_adaptive_shapes_beyond_float32_integers():
    """The accelerator's limit of 2**24 on ragged adaptive shapes is of its index arithmetic; there is none here."""
    cells = 2**24 + 3
    own = np.broadcast_to(np.float32(0), (1, 1, cells))
    given = {
        "gradOutput": np.ones((1, 1, 2), np.float32),
        "self": own,
        "indices": np.array([[[cells - 1, cells - 2]]], np.int32),
        "gradInput": np.empty(own.shape, np.float32),
    }
    assert run("aclnnAdaptiveMaxPool2dBackward", given)[0] == 0
    assert given["gradInput"][0, 0, -2:].tolist() == [1, 1]
    assert given["gradInput"].sum() == 2


# -- the status table ------------------------------------------------------------------------------------------------


def faults(name):
    """(what is wrong, changed arguments, status, a piece of the text) for every failing check of phase 1."""
    given = arguments(name)
    spatial = 3 if "3d" in name else 2
    out = result_name(name)
    tensors = [n for n, v in given.items() if isinstance(v, np.ndarray)]
    arrays = [n for n in ("kernelSize", "stride", "padding", "dilation") if n in given]
    null, invalid = aclnn.ACLNN_ERR_PARAM_NULLPTR, aclnn.ACLNN_ERR_PARAM_INVALID
    for n in (*tensors, *arrays):
        yield f"{n} None", {n: None}, null, f"{n}: got None"
    for n in tensors:
        for dtype in (np.float64, np.int64 if n != "indices" else np.float32, np.int8, np.uint8, np.bool_, np.uint64):
            if np.dtype(dtype) in OPERATORS[name][2] and n == "indices":
                continue
            yield (
                f"{n} {np.dtype(dtype)}",
                {n: np.zeros(given[n].shape, dtype)},
                invalid,
                f"{n}: got dtype {np.dtype(dtype)}",
            )
        yield f"{n} a list", {n: given[n].tolist()}, invalid, f"{n}: got list, wanted an aclTensor"
        private = tensor(given[n], aclnn.ACL_FORMAT_NC1HWC0)
        yield f"{n} private format", {n: private}, invalid, f"{n}: got the private format ACL_FORMAT_NC1HWC0"
        destroyed = tensor(given[n])
        aclnn.aclDestroyTensor(destroyed)
        yield f"{n} destroyed", {n: destroyed}, invalid, f"{n}: got an aclTensor that was destroyed"
    if "aclnnMax" not in name:
        yield (
            "self another dtype",
            {"self": given["self"].astype(np.float16)},
            invalid,
            "self: got dtype float16, wanted",
        )
    for n in ("self", out):
        labels = {m: tensor(given[m], aclnn.ACL_FORMAT_NCHW) for m in ("gradOutput", "self", out)}
        labels[n] = tensor(given[n], aclnn.ACL_FORMAT_NHWC)
        yield f"{n} another format", labels, invalid, f"{n}: got format ACL_FORMAT_NHWC, wanted gradOutput's"
    for rank in (1, 2, 3 if spatial == 3 else 5, 6, 20):
        shape = (1,) * rank
        both = {"self": np.empty(shape, np.float32), out: np.empty(shape, np.float32)}
        yield f"self of rank {rank}", both, invalid, f"self: got {shape}"
        yield (
            f"gradOutput of rank {rank}",
            {"gradOutput": np.empty(shape, np.float32)},
            invalid,
            "gradOutput: got shape",
        )
    longer = (*given["self"].shape[:-1], 9)
    yield f"{out} not self", {out: np.empty(longer, np.float32)}, invalid, f"{out}: got shape {longer}, wanted self's"
    for axis, what in ((0, "N"), (1, "C")):
        shape = list(given["gradOutput"].shape)
        shape[axis] += 1
        other = np.zeros(shape, np.float32)
        indices = {"indices": np.zeros(shape, np.int32)} if "indices" in given else {}
        yield f"{what} differs", {"gradOutput": other, **indices}, invalid, f"gradOutput: got shape {tuple(shape)}"
    zero = (2, 3, *(0,) * spatial)
    both = {"self": np.empty(zero, np.float32), out: np.empty(zero, np.float32)}
    yield "spatial size 0", both, invalid, "wanted spatial sizes of at least 1"
    storage = np.zeros(1, np.float32)
    huge = (1, 1, *(1,) * (spatial - 2), 65_536, 32_768)
    flat = aclnn.aclCreateTensor(
        huge, aclnn.ACL_FLOAT, [0] * len(huge), 0, aclnn.ACL_FORMAT_ND, [1], storage
    )  # fmt: skip
    yield "plane too large", {"self": flat, out: flat}, invalid, "= 2147483648, wanted at most 2147483647"
    folded = tensor(given[out])
    folded.array = np.broadcast_to(np.zeros(1, np.float32), given[out].shape)
    yield f"{out} read-only", {out: folded}, invalid, f"{out}: got a read-only array"
    yield f"{out} is gradOutput's memory", {out: _overlapping(given, out)}, invalid, f"{out}: got an array that shares"
    if "indices" in given:
        shape = given["indices"].shape
        wrong = np.zeros((*shape[:-1], shape[-1] + 1), np.int32)
        yield "indices differ", {"indices": wrong}, invalid, f"indices: got shape {wrong.shape}, wanted gradOutput's"
    for n in arrays:
        yield f"{n} of 4 values", {n: [1, 1, 1, 1]}, invalid, f"{n}: got 4 values"
        yield f"{n} of floats", {n: [1.5] * spatial}, invalid, f"{n}: got 1.5, wanted an integer"
        yield f"{n} no sequence", {n: 2}, invalid, f"{n}: got 2, wanted a sequence"
        yield f"{n} negative", {n: [-1] * spatial}, invalid, f"{n.rstrip('s')}"
        gone = aclnn.aclCreateIntArray([1] * spatial)
        aclnn.aclDestroyIntArray(gone)
        yield f"{n} destroyed", {n: gone}, invalid, f"{n}: got an aclIntArray that was destroyed"
    if arrays:
        yield "kernelSize empty", {"kernelSize": []}, invalid, "kernelSize: got 0 values"
        yield "kernelSize 0", {"kernelSize": [0] * spatial}, invalid, "kernelSize: got 0, wanted at least 1"
        yield "kernelSize huge", {"kernelSize": [2**62] * spatial}, invalid, "kernelSize: got 4611686018427387904"
        yield "stride 0", {"stride": [0] * spatial}, invalid, "stride: got 0, wanted at least 1"
        yield "padding above half", {"padding": [2] * spatial}, invalid, "padding: got 2, wanted at most half"
        odd = {"kernelSize": [3] * spatial, "padding": [2] * spatial}
        yield "padding above half, rounded down", odd, invalid, "padding: got 2, wanted at most half of kernelSize 3"
        yield "a wrong output size", {"stride": [1] * spatial}, invalid, "by floor((size + 2*padding"
        yield "kernelSize beyond self", {"kernelSize": [50] * spatial}, invalid, "too small for the window"
        yield "ceilMode no bool", {"ceilMode": 2}, invalid, "ceilMode: got 2, wanted true or false"
        yield "ceilMode None", {"ceilMode": None}, invalid, "ceilMode: got None, wanted true or false"
        yield "ceilMode an array", {"ceilMode": np.array([0, 1])}, invalid, "ceilMode: got array"
    if "dilation" in given:
        yield "dilation 2", {"dilation": [2, 2]}, invalid, "dilation: got 2, wanted 1"
        yield "dilation 0", {"dilation": [0, 0]}, invalid, "dilation: got 0, wanted 1"
    if "divisorOverride" in given:
        yield "divisorOverride no integer", {"divisorOverride": 1.0}, invalid, "divisorOverride: got 1.0"
        yield "divisorOverride huge", {"divisorOverride": 2**63}, invalid, "divisorOverride: got 9223372036854775808"
        yield "countIncludePad text", {"countIncludePad": "no"}, invalid, "countIncludePad: got 'no'"


def _overlapping(given, out):
    shared = np.zeros(given[out].size + given["gradOutput"].size, np.float32)
    given["gradOutput"] = shared[: given["gradOutput"].size].reshape(given["gradOutput"].shape)
    return shared[1 : 1 + given[out].size].reshape(given[out].shape)


@EACH
def test_every_failing_check_has_its_status_and_text(name):
    texts = {}
    for what, changed, status, piece in faults(name):
        given = {**arguments(name), **changed}
        if "memory" in what:
            shared = changed[result_name(name)].base
            given["gradOutput"] = shared[: given["gradOutput"].size].reshape(given["gradOutput"].shape)
        got, text = run(name, given)
        assert got == status, f"{what}: {got} {text}"
        assert text.startswith(f"{name}: "), text
        assert piece in text, f"{what}: {text}"
        texts.setdefault(text, []).append(what)
        good = arguments(name)
        assert run(name, good)[0] == 0, f"after {what}"
        assert same_bits(good[result_name(name)], expected(name, good))
    shared = {text: whats for text, whats in texts.items() if len(whats) > 1}
    assert not shared, "each failing check has its own text"


@pytest.mark.parametrize("name", [n for n in OPERATORS if "Max" in n])
@pytest.mark.parametrize("on_stream", [False, True])
def test_bad_index_values_are_found_while_running(name, on_stream):
    given = arguments(name)
    given["indices"].reshape(-1)[[5, 11]] = [-1, 10**6]
    stream = aclnn.aclrtCreateStream()[0] if on_stream else None
    status, text = run(name, given, stream)
    if on_stream:
        assert status == 0
        status = aclnn.aclrtSynchronizeStream(stream)
        text = aclnn.aclGetRecentErrMsg()
        assert aclnn.aclrtSynchronizeStream(stream) == 0, "reported once"
        assert aclnn.aclrtDestroyStream(stream) == 0
    assert status == aclnn.ACLNN_ERR_PARAM_INVALID
    assert text.startswith(f"{name}: indices: got -1 at position (0, 0,")


@EACH
@pytest.mark.parametrize("lead", [(0, 3), (2, 0), (0,)])
def test_an_empty_batch_is_a_success_that_does_nothing(name, lead):
    given = arguments(name, lead=lead)
    first, second = phases(name)
    size, executor, status = first(**given)
    assert (size, status) == (0, 0)
    assert second(None, 0, executor, None) == 0


@pytest.mark.parametrize("name", [n for n in OPERATORS if "Adaptive" in n])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_empty_gradient_zero_fills(name, dtype):
    given = arguments(name, dtype)
    for argument in ("gradOutput", "indices"):
        given[argument] = given[argument][..., :0]
    size, executor, status = phases(name)[0](**given)
    assert (size, status) == (0, 0)
    assert (given["gradInput"] == 7).all(), "the first phase writes nothing"
    assert phases(name)[1](None, 0, executor, None) == 0
    assert not given["gradInput"].any()


# -- executors and workspaces ----------------------------------------------------------------------------------------


def needing_scratch():
    """Arguments whose plan needs a workspace: 16-bit sums are kept in float32."""
    return "aclnnAdaptiveMaxPool2dBackward", arguments("aclnnAdaptiveMaxPool2dBackward", np.float16)


@EACH
def test_an_executor_is_used_up_even_by_a_failure(name):
    first, second = phases(name)
    given = arguments(name)
    size, executor, _ = first(**given)
    workspace = np.empty(size, np.uint8)
    assert second(workspace, size, executor, "no stream") == aclnn.ACLNN_ERR_PARAM_INVALID
    assert "stream: got 'no stream'" in aclnn.aclGetRecentErrMsg()
    assert second(workspace, size, executor, None) == aclnn.ACLNN_ERR_INNER
    assert "used before" in aclnn.aclGetRecentErrMsg()
    assert (given[result_name(name)] == 7).all()
    size, executor, _ = first(**given)
    assert second(workspace, size, executor, None) == 0
    given[result_name(name)][...] = 7
    assert second(workspace, size, executor, None) == aclnn.ACLNN_ERR_INNER
    assert (given[result_name(name)] == 7).all()


@EACH
def test_unknown_executors(name):
    second = phases(name)[1]
    assert second(None, 0, None, None) == aclnn.ACLNN_ERR_PARAM_NULLPTR
    for unknown in (object(), 5, "executor", second):
        assert second(None, 0, unknown, None) == aclnn.ACLNN_ERR_INNER
        assert aclnn.aclSetAclOpExecutorRepeatable(unknown) == aclnn.ACLNN_ERR_INNER
        assert aclnn.aclDestroyAclOpExecutor(unknown) == aclnn.ACLNN_ERR_INNER
    assert aclnn.aclSetAclOpExecutorRepeatable(None) == aclnn.ACLNN_ERR_INNER_NULLPTR
    assert aclnn.aclDestroyAclOpExecutor(None) == aclnn.ACLNN_ERR_INNER_NULLPTR
    other = next(n for n in OPERATORS if n != name)
    size, executor, _ = phases(other)[0](**arguments(other))
    assert second(np.empty(size, np.uint8), size, executor, None) == aclnn.ACLNN_ERR_INNER
    assert phases(other)[1](np.empty(size, np.uint8), size, executor, None) == 0, "the wrong operator used nothing up"


@EACH
def test_repeatable_and_destroyed_executors(name):
    first, second = phases(name)
    given = arguments(name)
    size, executor, _ = first(**given)
    workspace = np.empty(size, np.uint8)
    assert aclnn.aclSetAclOpExecutorRepeatable(executor) == 0
    for value in (1, 2, 3):
        given["gradOutput"][...] = value
        assert second(workspace, size, executor, None) == 0
        assert np.array_equal(given[result_name(name)], expected(name, given))
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    assert second(workspace, size, executor, None) == aclnn.ACLNN_ERR_INNER
    assert "destroyed" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclDestroyAclOpExecutor(executor) == aclnn.ACLNN_ERR_INNER
    assert aclnn.aclSetAclOpExecutorRepeatable(executor) == aclnn.ACLNN_ERR_INNER


@pytest.mark.parametrize("on_stream", [False, True])
def test_workspaces_are_real(on_stream):
    name, given = needing_scratch()
    first, second = phases(name)
    stream = aclnn.aclrtCreateStream()[0] if on_stream else None
    size = first(**given)[0]
    assert size > 0
    rows = [
        (None, size, aclnn.ACLNN_ERR_PARAM_NULLPTR, f"workspace: got None, wanted {size} bytes"),
        (np.empty(size - 1, np.uint8), size, aclnn.ACLNN_ERR_PARAM_INVALID, f"workspace: got {size - 1} bytes"),
        (np.empty(0, np.uint8), size, aclnn.ACLNN_ERR_PARAM_INVALID, "workspace: got 0 bytes"),
        (np.empty(size, np.uint8), size - 1, aclnn.ACLNN_ERR_PARAM_INVALID, f"workspaceSize: got {size - 1}"),
        (np.empty(size, np.uint8), None, aclnn.ACLNN_ERR_PARAM_INVALID, "workspaceSize: got None"),
        (bytes(size), size, aclnn.ACLNN_ERR_PARAM_INVALID, "read-only"),
        (np.empty(size, object), size, aclnn.ACLNN_ERR_PARAM_INVALID, "Python objects"),
        (12345, size, aclnn.ACLNN_ERR_PARAM_INVALID, "workspace: got int, wanted a buffer"),
    ]
    for workspace, claimed, status, piece in rows:
        executor = first(**given)[1]
        assert second(workspace, claimed, executor, stream) == status
        assert piece in aclnn.aclGetRecentErrMsg()
        assert aclnn.aclrtSynchronizeStream(stream) == 0
        assert (given["gradInput"] == 7).all(), "nothing is written"
    poisoned = np.full(size + 128, 0xA5, np.uint8)
    executor = first(**given)[1]
    assert second(poisoned[64:-64], size, executor, stream) == 0
    assert aclnn.aclrtSynchronizeStream(stream) == 0
    assert same_bits(given["gradInput"], expected(name, given))
    assert (poisoned[:64] == 0xA5).all()
    assert (poisoned[-64:] == 0xA5).all()
    assert (poisoned[64:-64] != 0xA5).any(), "what was asked for is what the run uses"


LARGE = {
    "aclnnMaxPool2dWithIndicesBackward": (1, 2, 512, 512),
    "aclnnAdaptiveMaxPool2dBackward": (1, 2, 512, 512),
    "aclnnAdaptiveMaxPool3dBackward": (1, 2, 32, 128, 128),
    "aclnnAvgPool3dBackward": (1, 2, 32, 128, 128),
}


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in OPERATORS for d in FLOATS[:2] if d in OPERATORS[n][1]])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
def test_a_run_allocates_nothing_that_grows(name, dtype, strided, mode):
    shape = LARGE[name]
    output = shape[:2] + tuple(n // 2 for n in shape[2:])
    order = "F" if strided else "C"
    given = {
        **arguments(name, dtype),
        "gradOutput": np.ones(output, dtype, order=order),
        "self": np.empty(shape, dtype),
        result_name(name): np.empty(shape, dtype, order=order),
    }
    if "indices" in given:
        given["indices"] = np.zeros(output, np.int32, order=order)
    first, second = phases(name)
    aclnn.aclrtSetSysParamOpt(aclnn.ACL_OPT_DETERMINISTIC, mode)
    size, executor, status = first(**given)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    workspace = np.empty(size, np.uint8)
    aclnn.aclSetAclOpExecutorRepeatable(executor)
    assert second(workspace, size, executor, None) == 0
    tracemalloc.start()
    try:
        assert second(workspace, size, executor, None) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384, f"{peak} bytes"


# -- tensors ---------------------------------------------------------------------------------------------------------

STORAGE = np.arange(24, dtype=np.float32)


@pytest.mark.parametrize(
    ("changed", "piece"),
    [
        ({"viewDims": [2, 13]}, "reaches element 25 of a storage of 24"),
        ({"offset": 1, "viewDims": [24]}, "reaches element 24"),
        ({"viewDims": [2, 3], "strides": [22, 1]}, "reaches element 24"),
        ({"viewDims": [2, 3], "strides": [2**62, 2**62]}, "reaches element"),
        ({"offset": -1}, "offset: got -1"),
        ({"offset": 2.0}, "offset: got 2.0"),
        ({"viewDims": [-2, 3]}, "viewDims: got"),
        ({"viewDims": None}, "viewDims: got None"),
        ({"viewDims": 6}, "viewDims: got 6"),
        ({"strides": [1]}, "strides: got 1 values, wanted 2"),
        ({"strides": [-3, 1]}, "strides: got"),
        ({"storageDims": [5, 5]}, "storageDims: got 25 elements, wanted at most the 24"),
        ({"storageDims": [3], "viewDims": [4]}, "reaches element 3 of a storage of 3"),
        ({"dataType": 5}, "dataType: got 5, wanted one of ACL_FLOAT 0"),
        ({"dataType": "FLOAT"}, "dataType: got 'FLOAT'"),
        ({"format": 4}, "format: got 4, wanted one of ACL_FORMAT_UNDEFINED -1"),
        ({"data": None}, "data: got None"),
        ({"data": 7}, "memoryview"),
        ({"data": np.arange(24.0)}, "data: got an array of float64, wanted float32 as dataType says"),
        ({"data": np.arange(24, dtype=np.int32)}, "data: got an array of int32"),
        ({"data": np.arange(24.0)[::2]}, "data: got Python objects or strides"),
        ({"data": np.empty(24, object)}, "data: got Python objects or strides"),
        ({"data": np.arange(24.0).tolist()}, "memoryview"),
    ],
)
def test_bad_tensors(changed, piece):
    good = {
        "viewDims": [2, 3],
        "dataType": aclnn.ACL_FLOAT,
        "strides": None,
        "offset": 0,
        "format": aclnn.ACL_FORMAT_ND,
        "storageDims": [24],
        "data": STORAGE,
    }
    assert aclnn.aclCreateTensor(**{**good, **changed}) is None
    assert piece in aclnn.aclGetRecentErrMsg()
    made = aclnn.aclCreateTensor(**good)
    assert made.array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(made.array, STORAGE)
    assert aclnn.aclDestroyTensor(made) == 0
    assert aclnn.aclDestroyTensor(made) == 0
    assert aclnn.aclDestroyTensor(None) == 0


def test_tensors_over_bytes_and_views():
    memory = bytearray(48)
    made = aclnn.aclCreateTensor(
        aclnn.aclCreateIntArray([2, 2]), aclnn.ACL_BF16, [4, 1], 3, aclnn.ACL_FORMAT_NCHW, None, memory
    )
    made.array[...] = 1
    assert np.frombuffer(memory, ml_dtypes.bfloat16).astype(float).nonzero()[0].tolist() == [3, 4, 7, 8]
    empty = aclnn.aclCreateTensor([0, 4], aclnn.ACL_FLOAT, None, 0, aclnn.ACL_FORMAT_ND, [0], np.empty(0, np.float32))
    assert empty.array.shape == (0, 4)


def test_raw_storage_is_taken_as_the_type_says():
    for raw in (STORAGE.view(np.uint32), STORAGE.view(np.uint8), STORAGE.tobytes(), STORAGE.view("V4")):
        made = aclnn.aclCreateTensor([24], aclnn.ACL_FLOAT, None, 0, aclnn.ACL_FORMAT_ND, None, raw)
        assert made.array.tolist() == STORAGE.tolist()


def test_int_arrays():
    for bad in (None, 5, [1, 2.5], "12", {1, 2}):
        assert aclnn.aclCreateIntArray(bad) is None
        assert aclnn.aclGetRecentErrMsg()
    made = aclnn.aclCreateIntArray(np.array([1, 2]))
    assert made.values == (1, 2)
    assert aclnn.aclDestroyIntArray(made) == 0
    assert aclnn.aclDestroyIntArray(None) == 0


# -- names -----------------------------------------------------------------------------------------------------------


def test_enumerations_are_exported_as_plain_names():
    enumerations = [v for v in vars(aclnn).values() if isinstance(v, type) and issubclass(v, enum.IntEnum)]
    assert len(enumerations) == 5
    for enumeration in enumerations:
        for member in enumeration:
            assert getattr(aclnn, member.name) is member
            assert member.name in aclnn.__all__
    codes = {"ACLNN_SUCCESS": 0, "ACLNN_ERR_PARAM_NULLPTR": 161001, "ACLNN_ERR_PARAM_INVALID": 161002,
             "ACLNN_ERR_RUNTIME_ERROR": 361001, "ACLNN_ERR_INNER": 561000, "ACLNN_ERR_INNER_NULLPTR": 561103,
             "ACL_FLOAT": 0, "ACL_FLOAT16": 1, "ACL_INT8": 2, "ACL_INT32": 3, "ACL_UINT8": 4, "ACL_INT64": 9,
             "ACL_DOUBLE": 11, "ACL_BOOL": 12, "ACL_BF16": 27, "ACL_FORMAT_UNDEFINED": -1, "ACL_FORMAT_NCHW": 0,
             "ACL_FORMAT_NHWC": 1, "ACL_FORMAT_ND": 2, "ACL_FORMAT_NC1HWC0": 3, "ACL_FORMAT_NDHWC": 27,
             "ACL_FORMAT_NCDHW": 30, "ACL_FORMAT_NDC1HWC0": 32, "ACL_FORMAT_NCL": 47,
             "ACL_OPT_DETERMINISTIC": 0}  # fmt: skip
    assert {name: int(getattr(aclnn, name)) for name in codes} == codes


def test_every_operator_with_a_name_there_has_its_two_functions():
    for operator in pg.OPS.values():
        first, second = phases(operator.aclnn)
        assert list(inspect.signature(second).parameters) == ["workspace", "workspaceSize", "executor", "stream"]
        assert first.__doc__
        assert second.__doc__
        assert OPERATORS[operator.aclnn][0] == operator.signature.name


def test_out_of_memory_is_a_runtime_error(monkeypatch):
    from poolgrad_numba.plan import Plan

    def exhausted(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(Plan, "run_checked", exhausted)
    status, text = run("aclnnAvgPool3dBackward", arguments("aclnnAvgPool3dBackward"))
    assert status == aclnn.ACLNN_ERR_RUNTIME_ERROR
    assert "none left" in text


def test_the_python_face_and_this_one_agree_on_a_named_case():
    case = next(c for c in cases.SMALL_CASES if c.name == "avg_asymmetric_nopad")
    p, grad = case.parameters, case.rough_gradient()
    out = np.empty(case.input_shape, np.float32)
    given = (grad, out, p["kernel_size"], p["stride"], p["padding"], False, False, 0, out)
    size, executor, status = aclnn.aclnnAvgPool3dBackwardGetWorkspaceSize(*given)
    assert status == 0
    assert aclnn.aclnnAvgPool3dBackward(bytearray(size), size, executor, None) == 0
    assert same_bits(out, call(case, grad))


@EACH
@pytest.mark.parametrize("destroy", [False, True])
def test_a_used_or_destroyed_executor_keeps_no_storage_alive(name, destroy):
    first, second = phases(name)
    given = arguments(name)
    alive = weakref.ref(given[result_name(name)])
    size, executor, _ = first(**given)
    del given
    assert alive() is not None
    if destroy:
        assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    else:
        assert second(np.empty(size, np.uint8), size, executor, None) == 0
    gc.collect()
    assert alive() is None
