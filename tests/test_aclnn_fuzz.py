"""Hostile sequences of calls of the two-phase face, against a model of what each must return and write.

Values are small integers and divisors powers of two, so that sums are exact in both modes and every result can be
compared bit for bit with the oracle.
"""

import gc
import math
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import poolgrad_numba as pg
import reference
from poolgrad_numba import aclnn
from poolgrad_numba.aclnn import status as statuses

KNOWN = {int(member) for kind in (aclnn.aclnnStatus, aclnn.aclError) for member in kind}
NULLPTR, INVALID, INNER = aclnn.ACLNN_ERR_PARAM_NULLPTR, aclnn.ACLNN_ERR_PARAM_INVALID, aclnn.ACLNN_ERR_INNER
NO_CONTEXT, NOT_SET = aclnn.ACL_ERROR_RT_CONTEXT_NULL, aclnn.ACL_ERROR_RT_SYS_PARAM_NOT_SET
ENDED_STREAM = aclnn.ACL_ERROR_RT_STREAM_CONTEXT
DETERMINISTIC = aclnn.ACL_OPT_DETERMINISTIC

SENTINEL = -77  # fills what nobody may write
TYPES = {np.dtype(np.float32): aclnn.ACL_FLOAT, np.dtype(np.float16): aclnn.ACL_FLOAT16,
         np.dtype(np.float64): aclnn.ACL_DOUBLE, np.dtype(np.int32): aclnn.ACL_INT32,
         np.dtype(np.int8): aclnn.ACL_INT8}  # fmt: skip
PLAIN = (aclnn.ACL_FORMAT_UNDEFINED, aclnn.ACL_FORMAT_NCHW, aclnn.ACL_FORMAT_ND, aclnn.ACL_FORMAT_NCDHW)
PRIVATE = (aclnn.ACL_FORMAT_NC1HWC0, aclnn.ACL_FORMAT_NDC1HWC0)
LAYOUTS = ("array", "contiguous", "offset", "gaps", "channels last")
OPERATORS = {
    "max_pool2d_with_indices_backward": "aclnnMaxPool2dWithIndicesBackward",
    "adaptive_max_pool2d_backward": "aclnnAdaptiveMaxPool2dBackward",
    "adaptive_max_pool3d_backward": "aclnnAdaptiveMaxPool3dBackward",
    "avg_pool3d_backward": "aclnnAvgPool3dBackward",
}
WINDOW_ARRAYS = ("kernelSize", "stride", "padding", "dilation")
ALL_ARGUMENTS = ("gradOutput", "self", "indices", *WINDOW_ARRAYS, "ceilMode", "countIncludePad", "divisorOverride")
JUNK = (None, 0, -1, 2**70, 1.5, "junk", b"junk", (), [None], {}, object(), float("nan"), True)
PICKS = st.integers(0, 10_000)
EXECUTORS = []  # a weak reference to each one that any machine made


# -- what a call is made of --------------------------------------------------------------------------------------


class Storage:
    """Values in flat storage: ``base`` holds it all, ``view`` the values, and the rest is never to be written."""

    def __init__(self, values, layout, label):
        shape, dtype = values.shape, values.dtype
        axes = list(range(values.ndim))
        if layout == "channels last" and values.ndim >= 3:
            axes.append(axes.pop(-3 if values.ndim < 5 else 1))
        strides, step = [0] * values.ndim, 2 if layout == "gaps" else 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= max(shape[axis], 1)
        offset = 5 if layout == "offset" else 0
        self.base = np.full(offset + step + 3, SENTINEL, dtype)
        self.view = np.ndarray(shape, dtype, self.base, offset * dtype.itemsize, [s * dtype.itemsize for s in strides])
        self.view[...] = values
        self.layout = layout
        self.tensor = self.view
        if layout != "array":
            steps = None if layout == "contiguous" else aclnn.aclCreateIntArray(strides)
            self.tensor = aclnn.aclCreateTensor(
                aclnn.aclCreateIntArray(shape), TYPES[dtype], steps, offset, label, [self.base.size], self.base
            )
            assert self.tensor is not None, aclnn.aclGetRecentErrMsg()
        rest = np.ones(self.base.size, bool)
        np.ndarray(shape, bool, rest, offset, strides)[...] = False
        self.rest = np.flatnonzero(rest)


class Target:
    """Where a call writes, what it must write there (``None`` for a bad index), and the stream that it waits on."""

    def __init__(self, result, inputs, expected):
        self.result, self.inputs, self.expected = result, inputs, expected
        self.before = [storage.base.tobytes() for storage in inputs]
        self.stream = None

    def clear(self):
        self.result.base[...] = SENTINEL

    def check_untouched(self):
        assert (self.result.base == SENTINEL).all(), "a refused run wrote"

    def check_written(self):
        assert (self.result.base[self.result.rest] == SENTINEL).all(), "a run wrote beside its view"
        assert [storage.base.tobytes() for storage in self.inputs] == self.before, "a run changed an input"
        if self.expected is not None:
            np.testing.assert_array_equal(self.result.view, self.expected)


class Call:
    """One call of a first phase: its arguments in C's order, and the failures that it may have, none if good."""

    def __init__(self, operator, arguments, target, storages):
        self.operator, self.arguments, self.target, self.storages = operator, arguments, target, storages
        self.wanted = set()

    def first_phase(self):
        return getattr(aclnn, OPERATORS[self.operator] + "GetWorkspaceSize")(*self.arguments.values())


@st.composite
def problems(draw):
    """(operator, input shape, parameters, values and indices, their layouts, format label)."""
    operator = draw(st.sampled_from(sorted(OPERATORS)))
    spatial = int(operator[operator.index("d_") - 1])
    lead = draw(st.sampled_from([(1,), (2,), (1, 1), (2, 1), (1, 3), (0, 2)]))
    size = draw(st.tuples(*[st.sampled_from([2, 3, 4, 1])] * spatial))
    parameters = {}
    if "adaptive" in operator:
        output = draw(st.tuples(*[st.integers(1, 4)] * spatial))
        if draw(st.integers(0, 15)) == 0:
            output = (0, *output[1:])
    else:
        kernel = draw(st.tuples(*[st.sampled_from([1, 2])] * spatial))
        stride = draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 3)] * spatial)))
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        parameters = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": draw(st.booleans())}
        output = tuple(
            reference.pooled_size(n, k, s, p, 1, parameters["ceil_mode"])
            for n, k, s, p in zip(size, kernel, stride or kernel, padding, strict=True)
        )
        if operator.startswith("avg"):
            parameters["count_include_pad"] = draw(st.booleans())
            parameters["divisor_override"] = draw(st.sampled_from([None, None, 1, 2, -4]))
    half = operator != "max_pool2d_with_indices_backward" and draw(st.integers(0, 3)) == 0
    dtype = np.dtype(np.float16 if half else np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    grad = rng.integers(-8, 9, (*lead, *output)).astype(dtype)
    indices = None
    if not operator.startswith("avg"):
        indices = rng.integers(0, math.prod(size), grad.shape).astype(np.int32)
        if grad.size and draw(st.integers(0, 2)) == 0:
            wrong = draw(st.sampled_from([-1, math.prod(size), -(2**31), 2**31 - 1]))
            indices.flat[draw(st.integers(0, grad.size - 1))] = wrong
    layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 4))
    return operator, (*lead, *size), parameters, grad, indices, layouts, draw(st.sampled_from(PLAIN))


def make_call(operator, shape, parameters, grad, indices, layouts, label):
    """Make the tensors of a problem, and the call that it asks for."""
    storages = {"gradOutput": Storage(grad, layouts[0], label)}
    inputs = [storages["gradOutput"]]
    storages["self"] = Storage(np.zeros(shape, grad.dtype), layouts[1], label)
    spatial = int(operator[operator.index("d_") - 1])
    expected = None
    if indices is not None:
        inputs.append(storages.setdefault("indices", Storage(indices, layouts[2], PLAIN[0])))
        if not ((indices < 0) | (indices >= math.prod(shape[-spatial:]))).any():
            expected = reference.apply(operator, grad, shape, indices) if grad.size else np.zeros(shape, grad.dtype)
    elif min(grad.shape[-spatial:]) > 0:
        expected = reference.apply(operator, grad, shape, **parameters) if grad.size else np.zeros(shape, grad.dtype)
    name = "output" if indices is None else "gradInput"
    storages[name] = Storage(np.full(shape, SENTINEL, grad.dtype), layouts[3], label)
    given = {name: storage.tensor for name, storage in storages.items()}
    if parameters:
        given |= {
            "kernelSize": aclnn.aclCreateIntArray(parameters["kernel_size"]),
            "stride": aclnn.aclCreateIntArray(parameters["stride"]),
            "padding": aclnn.aclCreateIntArray(parameters["padding"]),
            "ceilMode": parameters["ceil_mode"],
        }
        if indices is None:
            given["countIncludePad"] = parameters["count_include_pad"]
            given["divisorOverride"] = parameters["divisor_override"] or 0
        else:
            given["dilation"] = [1]
    arguments = {key: given[key] for key in (*ALL_ARGUMENTS, name) if key in given}
    call = Call(operator, arguments, Target(storages[name], inputs, expected), storages)
    if parameters and min(grad.shape[-spatial:]) < 1:  # the window does not fit
        call.wanted.add(INVALID)
    return call


def is_destroyed(argument):
    name = {aclnn.aclTensor: "array", aclnn.aclIntArray: "values"}.get(type(argument))
    return name is not None and getattr(argument, name) is None


# -- what can be wrong with one -----------------------------------------------------------------------------------


@st.composite
def faults(draw):
    """Functions that spoil a call and give the status that it then must have."""
    kind = draw(st.sampled_from(sorted(FAULTS)))
    return FAULTS[kind], draw(PICKS)


def _choose(options, pick):
    options = list(options)
    return options[pick % len(options)]


def _replace(call, name, values):
    """Swap a tensor for another of the same layout."""
    call.arguments[name] = Storage(values, call.storages[name].layout, PLAIN[0]).tensor
    return INVALID


def none_fault(call, pick):
    name = _choose([n for n in call.arguments if n in call.storages or n in WINDOW_ARRAYS], pick)
    call.arguments[name] = None
    return NULLPTR


def junk_fault(call, pick):
    name = _choose(call.storages, pick)
    call.arguments[name] = _choose(JUNK[1:], pick // 7)
    return INVALID


def destroyed_fault(call, pick):
    name = _choose(call.storages, pick)
    if not isinstance(call.arguments[name], aclnn.aclTensor):
        return junk_fault(call, pick)
    assert aclnn.aclDestroyTensor(call.arguments[name]) == 0
    return INVALID


def dtype_fault(call, pick):
    name = _choose(call.storages, pick)
    view = call.storages[name].view
    other = np.float32 if view.dtype == np.float16 else np.float16  # allowed, but not the other tensors'
    return _replace(call, name, np.zeros_like(view, _choose((other, np.float64, other, np.int8), pick // 5)))


def rank_fault(call, pick):
    name = _choose(call.storages, pick)
    view = call.storages[name].view
    return _replace(call, name, view.reshape(_choose([(1, 1, 1, *view.shape), (view.size,)], pick // 5)))


def shape_fault(call, pick):
    name = _choose(call.storages, pick)
    shape = list(call.storages[name].view.shape)
    # By another amount for each tensor, so that two faults cannot agree.
    shape[_choose(range(len(shape)), pick // 5)] += 1 + list(call.storages).index(name)
    return _replace(call, name, np.zeros(shape, call.storages[name].view.dtype))


def private_fault(call, pick):
    name = _choose(call.storages, pick)
    call.arguments[name] = Storage(call.storages[name].view, "contiguous", _choose(PRIVATE, pick // 5)).tensor
    return INVALID


def format_fault(call, pick):
    names = [n for n in call.storages if n != "indices"]
    for name, label in zip(names, np.roll(PLAIN, pick), strict=False):
        call.arguments[name] = Storage(call.storages[name].view, "contiguous", int(label)).tensor
    return INVALID


def read_only_fault(call, pick):
    name = list(call.storages)[-1]
    call.arguments[name] = call.storages[name].view.copy()
    call.arguments[name].flags.writeable = False
    return INVALID


def shared_fault(call, pick):
    """Let the result overlap an input, or itself."""
    name = list(call.storages)[-1]
    view = call.storages[name].view
    if view.size < 2:
        return read_only_fault(call, pick)
    one = np.zeros(1, view.dtype)
    call.arguments[name] = aclnn.aclCreateTensor(
        view.shape, TYPES[view.dtype], [0] * view.ndim, 0, _label(call), None, one
    )
    assert call.arguments[name] is not None
    return INVALID


def _label(call):
    tensor = call.arguments["gradOutput"]
    return tensor.format if isinstance(tensor, aclnn.aclTensor) else PLAIN[0]


def window_fault(call, pick):
    names = [n for n in WINDOW_ARRAYS if n in call.arguments]
    if not names:
        return shape_fault(call, pick)
    name = _choose(names, pick)
    wrong = [[-1], [1] * 4, [2**70], [1.0], ["1"], "1", 1.5, {1}, [[1]], [True], 7, object()]
    if name != "padding":
        wrong.append([0])
    wrong += {"padding": [[3]], "dilation": [[2], []], "kernelSize": [[]]}.get(name, [])
    call.arguments[name] = _choose(wrong, pick // 5)
    return INVALID


def destroyed_array_fault(call, pick):
    if "kernelSize" not in call.arguments:
        return dtype_fault(call, pick)
    array = call.arguments[_choose(("stride", "kernelSize", "stride", "padding"), pick)]
    aclnn.aclDestroyIntArray(array)
    return INVALID


def scalar_fault(call, pick):
    names = [n for n in ("ceilMode", "countIncludePad", "divisorOverride") if n in call.arguments]
    if not names:
        return rank_fault(call, pick)
    call.arguments[_choose(names, pick)] = _choose([2**70, "x", 0.5, [], object(), (1,)], pick // 5)
    return INVALID


FAULTS = {name: function for name, function in globals().items() if name.endswith("_fault")}


# -- the machine -------------------------------------------------------------------------------------------------


class Context:
    def __init__(self, handle):
        self.handle, self.alive, self.options = handle, True, {}


class Stream:
    def __init__(self, handle):
        self.handle, self.alive, self.queue = handle, True, []


class Run:
    """An executor, and what is known of it."""

    def __init__(self, call, executor, size):
        self.call, self.executor, self.size = call, executor, size
        self.over = self.repeatable = False


def stream_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("aclrtStream")]


def checked(status, *expected):
    """A status is one of the known codes, the expected one, and a failing one has a text."""
    assert isinstance(status, int)
    assert status in KNOWN
    text = aclnn.aclGetRecentErrMsg()
    assert isinstance(text, str)
    assert not status or text, f"{status} has no text"
    if expected:
        assert status in expected, f"{status}, wanted {expected}: {text}"
    statuses._recent.text = ""  # so that the next failure must bring its own
    return status


def forget_everything():
    """Leave no option, default context or current context of another test."""
    aclnn.aclInit()
    aclnn.aclFinalize()
    aclnn.aclrtResetDevice(0)
    context, _ = aclnn.aclrtCreateContext(0)
    aclnn.aclrtDestroyContext(context)
    pg.set_config(deterministic=None)
    statuses._recent.text = ""


class Sequences(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        forget_everything()
        self.initialised, self.configured, self.options = False, False, {}
        self.contexts, self.current, self.default = [], None, None
        self.tensors, self.arrays, self.streams, self.calls, self.runs = [None], [None], [], [], []

    def teardown(self):
        for stream in self.streams:
            if stream.alive:
                self.end_stream(stream, aclnn.aclrtDestroyStream(stream.handle))
        assert not stream_threads()
        forget_everything()

    @invariant()
    def threads_are_those_of_live_streams(self):
        assert len(stream_threads()) <= sum(stream.alive for stream in self.streams)

    # -- process, device, contexts and options

    @rule(path=st.sampled_from([None, "", "nowhere.json"]))
    def init(self, path):
        checked(aclnn.aclInit(path), aclnn.ACL_ERROR_REPEAT_INITIALIZE if self.initialised else 0)
        self.initialised = True

    @rule()
    def finalize(self):
        status = aclnn.aclFinalize()
        if not self.initialised:
            checked(status, aclnn.ACL_ERROR_UNINITIALIZE)
            return
        checked(status)
        self.initialised, self.options = False, {}
        self.end_default()
        for stream in self.streams:
            if stream.alive:
                self.end_stream(stream, None)

    def end_default(self):
        if self.default is not None:
            self.default.alive = False
        self.default = None

    @rule(device=st.sampled_from([0, 0, 0, 1, -1, *JUNK]))
    def set_device(self, device):
        status = aclnn.aclrtSetDevice(device)
        if type(device) is not int or device:
            checked(status, aclnn.ACL_ERROR_RT_INVALID_DEVICEID)
            return
        checked(status, 0)
        handle, status = aclnn.aclrtGetCurrentContext()
        checked(status, 0)
        if self.default is None or not self.default.alive:
            self.default = Context(handle)
            self.contexts.append(self.default)
        assert handle is self.default.handle
        self.current = self.default

    @rule(device=st.sampled_from([0, 0, 1, *JUNK]))
    def reset_device(self, device):
        good = type(device) is int and not device
        checked(aclnn.aclrtResetDevice(device), 0 if good else aclnn.ACL_ERROR_RT_INVALID_DEVICEID)
        if good:
            self.end_default()

    @rule(device=st.sampled_from([0, 0, 0, 2, *JUNK]))
    def create_context(self, device):
        handle, status = aclnn.aclrtCreateContext(device)
        if type(device) is not int or device:
            checked(status, aclnn.ACL_ERROR_RT_INVALID_DEVICEID)
            assert handle is None
            return
        checked(status, 0)
        self.current = Context(handle)
        self.contexts.append(self.current)

    @precondition(lambda self: self.contexts)
    @rule(pick=PICKS, end=st.booleans())
    def set_or_destroy_context(self, pick, end):
        context = _choose(self.contexts, pick)
        function = aclnn.aclrtDestroyContext if end else aclnn.aclrtSetCurrentContext
        checked(function(context.handle), 0 if context.alive else NO_CONTEXT)
        if end:
            context.alive = False
        elif context.alive:
            self.current = context

    @rule(junk=st.sampled_from(JUNK))
    def junk_handles(self, junk):
        checked(aclnn.aclrtDestroyContext(junk), NO_CONTEXT)
        checked(aclnn.aclrtSetCurrentContext(junk), NO_CONTEXT)
        checked(aclnn.aclrtDestroyStream(junk), aclnn.ACL_ERROR_RT_PARAM_INVALID)
        checked(aclnn.aclrtSynchronizeStream(junk), 0 if junk is None else aclnn.ACL_ERROR_RT_PARAM_INVALID)
        for function in (aclnn.aclSetAclOpExecutorRepeatable, aclnn.aclDestroyAclOpExecutor):
            checked(function(junk), aclnn.ACLNN_ERR_INNER_NULLPTR if junk is None else INNER)
        for function in (aclnn.aclDestroyTensor, aclnn.aclDestroyIntArray):
            checked(function(None), 0)
            checked(function(junk))

    @property
    def context(self):
        return self.current if self.current is not None and self.current.alive else None

    @rule(
        process=st.booleans(), opt=st.sampled_from([0, 0, 0, 0, 1, *JUNK]), value=st.sampled_from([0, 1, 2, 3, *JUNK])
    )
    def set_option(self, process, opt, value):
        status = (aclnn.aclrtSetSysParamOpt if process else aclnn.aclrtCtxSetSysParamOpt)(opt, value)
        if type(opt) is not int or opt:
            checked(status, aclnn.ACL_ERROR_INVALID_PARAM)
        elif type(value) is not int or not 0 <= value <= 3:
            checked(status, aclnn.ACL_ERROR_RT_PARAM_INVALID)
        elif not process and self.context is None:
            checked(status, NO_CONTEXT)
        else:
            checked(status, 0)
            (self.options if process else self.context.options)[opt] = value

    @rule(process=st.booleans(), opt=st.sampled_from([0, 0, 0, 0, 1, *JUNK]))
    def get_option(self, process, opt):
        value, status = (aclnn.aclrtGetSysParamOpt if process else aclnn.aclrtCtxGetSysParamOpt)(opt)
        if type(opt) is not int or opt:
            checked(status, aclnn.ACL_ERROR_INVALID_PARAM)
        elif process:
            checked(status, 0)
            assert value == self.options.get(0, 0)
        elif self.context is None:
            checked(status, NO_CONTEXT)
        else:
            checked(status, 0 if 0 in self.context.options else NOT_SET)
            assert value == self.context.options.get(0, 0)

    @rule(deterministic=st.sampled_from([None, False, True]))
    def configure(self, deterministic):
        self.set_configuration(deterministic)

    def set_configuration(self, deterministic):
        pg.set_config(deterministic=deterministic)
        self.configured = bool(deterministic)

    @rule()
    def current_context(self):
        handle, status = aclnn.aclrtGetCurrentContext()
        checked(status, NO_CONTEXT if self.context is None else 0)
        assert handle is (None if self.context is None else self.context.handle)

    @rule()
    def another_thread_has_no_context(self):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, 1)))
        thread.start()
        thread.join()
        assert seen == [NO_CONTEXT]
        assert aclnn.aclGetRecentErrMsg() == ""  # texts belong to threads

    @property
    def mode(self):
        value = None if self.context is None else self.context.options.get(0)
        value = self.options.get(0) if value is None else value
        return self.configured if value is None else value > 0

    # -- tensors and arrays

    @rule(
        dims=st.one_of(st.lists(st.integers(-1, 4), max_size=5), st.sampled_from(JUNK)),
        dtype=st.sampled_from([*TYPES.values(), 5, *JUNK]),
        strides=st.one_of(st.none(), st.lists(st.integers(-1, 9), max_size=5), st.sampled_from(JUNK)),
        offset=st.sampled_from([0, 0, 1, 7, *JUNK]),
        label=st.sampled_from([*PLAIN, *PRIVATE, 99, *JUNK]),
        storage=st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=2), st.sampled_from(JUNK)),
        data=st.sampled_from([None, "junk", b"read only", bytearray(64), np.zeros(32, np.float32), np.zeros(0)]),
    )
    def create_any_tensor(self, dims, dtype, strides, offset, label, storage, data):
        tensor = aclnn.aclCreateTensor(dims, dtype, strides, offset, label, storage, data)
        if tensor is None:
            assert aclnn.aclGetRecentErrMsg()
        else:
            assert isinstance(tensor, aclnn.aclTensor)
            if tensor.array.size:
                low, high = np.lib.array_utils.byte_bounds(tensor.array)
                raw = np.frombuffer(data, np.uint8)
                assert raw.ctypes.data <= low <= high <= raw.ctypes.data + raw.size
        statuses._recent.text = ""
        self.tensors.append(tensor)

    @rule(
        axes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4),
        offset=st.integers(0, 3),
        spare=st.integers(-2, 1),
        data=st.booleans(),
    )
    def create_tensor_at_the_edge(self, axes, offset, spare, data):
        """Storage that ends just before, at or behind the view's last element."""
        shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
        positions = (np.dot(position, strides) for position in np.ndindex(*shape))
        last = offset + int(max(positions)) if math.prod(shape) else -2
        size = max(last + 1 + spare, 0)
        storage = np.zeros(size if data else 64, np.int32)
        tensor = aclnn.aclCreateTensor(shape, aclnn.ACL_INT32, strides, offset, PLAIN[0], [size], storage)
        assert (tensor is None) == (last >= size)
        assert tensor is not None or aclnn.aclGetRecentErrMsg()
        statuses._recent.text = ""
        self.tensors.append(tensor)

    @rule(values=st.one_of(st.lists(st.integers(-1, 4), max_size=4), st.sampled_from(JUNK)))
    def create_int_array(self, values):
        array = aclnn.aclCreateIntArray(values)
        assert array is not None or aclnn.aclGetRecentErrMsg()
        statuses._recent.text = ""
        self.arrays.append(array)

    @rule(pick=PICKS, array=st.booleans())
    def destroy_any(self, pick, array):
        if array:
            checked(aclnn.aclDestroyIntArray(_choose(self.arrays, pick)), 0)
        else:
            checked(aclnn.aclDestroyTensor(_choose(self.tensors, pick)), 0)

    # -- streams

    @rule()
    def create_stream(self):
        if sum(stream.alive for stream in self.streams) < 4:
            handle, status = aclnn.aclrtCreateStream()
            checked(status, 0)
            self.streams.append(Stream(handle))

    @precondition(lambda self: self.streams)
    @rule(pick=PICKS)
    def synchronize(self, pick):
        stream = _choose(self.streams, pick)
        self.settle(stream, aclnn.aclrtSynchronizeStream(stream.handle))

    @precondition(lambda self: self.streams)
    @rule(pick=PICKS)
    def destroy_stream(self, pick):
        stream = _choose(self.streams, pick)
        self.end_stream(stream, aclnn.aclrtDestroyStream(stream.handle))

    def settle(self, stream, status):
        """All that was queued has run; ``status`` is ``None`` where nobody could ask for it."""
        fails = any(target.expected is None for target in stream.queue)
        if not stream.alive:
            checked(status, ENDED_STREAM)
        elif status is not None:
            checked(status, INVALID if fails else 0)
        for target in stream.queue:
            target.check_written()
            target.stream = None
        stream.queue.clear()

    def end_stream(self, stream, status):
        self.settle(stream, status)
        stream.alive = False

    # -- first phases

    @rule(problem=problems())
    def good_first_phase(self, problem):
        self.first_phase(problem, [])

    @rule(problem=problems(), spoil=st.lists(faults(), min_size=1, max_size=2))
    def spoilt_first_phase(self, problem, spoil):
        self.first_phase(problem, spoil)

    @rule(problem=problems(), on=st.sampled_from(["none", "stream"]), pick=PICKS)
    def whole_call(self, problem, on, pick):
        if self.first_phase(problem, []):
            self.launch(self.runs[-1], "good", on, 15, pick)

    @rule(
        problem=problems(),
        own=st.sampled_from([None, 0, 1, 2, 3]),
        process=st.sampled_from([None, 0, 1, 2, 3]),
        configured=st.booleans(),
        end=st.booleans(),
    )
    def call_in_a_mode(self, problem, own, process, configured, end):
        """Options, then a first phase, which latches the mode."""
        self.set_configuration(configured)
        if process is not None:
            checked(aclnn.aclrtSetSysParamOpt(DETERMINISTIC, process), 0)
            self.options[0] = process
        if own is not None:
            handle, status = aclnn.aclrtCreateContext(0)
            checked(status, 0)
            checked(aclnn.aclrtCtxSetSysParamOpt(DETERMINISTIC, own), 0)
            self.current = Context(handle)
            self.current.options[0] = own
            self.contexts.append(self.current)
        self.first_phase(problem, [])
        if end and self.context is not None:
            checked(aclnn.aclrtDestroyContext(self.current.handle), 0)
            self.current.alive = False

    def first_phase(self, problem, spoil):
        call = make_call(*problem)
        statuses._recent.text = ""
        for function, pick in spoil:
            call.wanted.add(function(call, pick))
        self.tensors += [a for a in call.arguments.values() if isinstance(a, aclnn.aclTensor)]
        self.arrays += [a for a in call.arguments.values() if isinstance(a, aclnn.aclIntArray)]
        return self.enter(call)

    @precondition(lambda self: self.calls)
    @rule(pick=PICKS)
    def first_phase_again(self, pick):
        """The same tensors once more, if they still are."""
        self.enter(_choose(self.calls, pick))

    def enter(self, call):
        wanted = call.wanted | ({INVALID} if any(map(is_destroyed, call.arguments.values())) else set())
        if call.target.stream is None:
            call.target.clear()
        size, executor, status = call.first_phase()
        checked(status, *(wanted or {0}))
        if call.target.stream is None:
            call.target.check_untouched()
        if status:
            assert (size, executor) == (0, None)
            return False
        assert type(size) is int
        assert (size == 0) or call.target.inputs[0].view.size
        assert executor.plan.problem.deterministic == self.mode
        EXECUTORS.append(weakref.ref(executor))
        self.calls.append(call)
        self.runs.append(Run(call, executor, size))
        return True

    # -- executors and second phases

    @precondition(lambda self: self.runs)
    @rule(pick=PICKS)
    def make_repeatable(self, pick):
        run = _choose(self.runs, pick)
        checked(aclnn.aclSetAclOpExecutorRepeatable(run.executor), INNER if run.over else 0)
        run.repeatable = run.repeatable or not run.over

    @precondition(lambda self: self.runs)
    @rule(pick=PICKS)
    def destroy_executor(self, pick):
        run = _choose(self.runs, pick)
        checked(aclnn.aclDestroyAclOpExecutor(run.executor), INNER if run.over else 0)
        run.over = True

    @precondition(lambda self: self.runs)
    @rule(pick=PICKS)
    def forget_executor(self, pick):
        self.runs.pop(pick % len(self.runs))

    @precondition(lambda self: self.runs)
    @rule(
        pick=PICKS,
        workspace=st.sampled_from([*["good"] * 4, "missing", "short", "claimed short", "read-only", "junk", "shared"]),
        on=st.sampled_from(["none", "stream", "stream", "stream", "junk"]),
        other=st.integers(0, 15),
    )
    def second_phase(self, pick, workspace, on, other):
        self.launch(_choose(self.runs, pick), workspace, on, other, pick)

    @precondition(lambda self: any(not run.over for run in self.runs))
    @rule(pick=PICKS, on=st.sampled_from(["none", "stream", "stream"]), times=st.integers(1, 3), keep=st.booleans())
    def good_second_phases(self, pick, on, times, keep):
        """The usual way, and then once or twice more."""
        run = _choose([run for run in self.runs if not run.over], pick)
        if keep:
            checked(aclnn.aclSetAclOpExecutorRepeatable(run.executor), 0)
            run.repeatable = True
        for _ in range(times):
            self.launch(run, "good", on, 15, pick)

    def launch(self, run, workspace, on, other, pick):
        target, size = run.call.target, run.size
        stream = _choose(self.streams, pick // 3) if self.streams and on == "stream" else None
        if target.stream is not None:  # runs with the same result must not overlap
            stream, on = target.stream, "stream"
        handle = stream.handle if stream is not None else None if on != "junk" else _choose(JUNK[1:], pick)

        scratch, claimed = self.workspace(workspace, size, target)
        function = OPERATORS[run.call.operator]
        if other == 0:
            function = _choose([name for name in OPERATORS.values() if name != function], pick)
        if target.stream is None:
            target.clear()
            before = target.result.base.tobytes()
        status = getattr(aclnn, function)(scratch, claimed, run.executor, handle)

        wanted = 0
        if other == 0 or run.over:
            wanted = INNER
        else:
            run.over = not run.repeatable
            if size and workspace != "good":
                wanted = NULLPTR if workspace == "missing" else INVALID
            elif on == "junk" or (stream is not None and not stream.alive):
                wanted = INVALID
        if wanted:
            checked(status, wanted)
            if target.stream is None:
                assert target.result.base.tobytes() == before, "a refused run wrote"
        elif stream is None:
            checked(status, INVALID if target.expected is None else 0)
            target.check_written()
        else:
            checked(status, 0)
            target.stream = stream
            stream.queue.append(target)

    def workspace(self, kind, size, target):
        """(workspace, claimed size) of a kind; where none is needed, all are good."""
        if kind == "missing":
            return None, size
        if kind == "short":
            return np.empty(max(size - 1, 0), np.uint8), size
        if kind == "claimed short":
            return np.empty(size, np.uint8), size - 1
        if kind == "read-only":
            return bytes(size), size
        if kind == "junk":
            return object(), size
        if kind == "shared":
            return target.result.base if target.result.base.nbytes >= size else np.empty(0, np.uint8), size
        return np.empty(size, np.uint8), size

    @rule(name=st.sampled_from(sorted(OPERATORS.values())), junk=st.sampled_from(JUNK))
    def second_phase_of_nothing(self, name, junk):
        status = getattr(aclnn, name)(None, 0, junk, None)
        checked(status, NULLPTR if junk is None else INNER)


def run_machine(**options):
    EXECUTORS.clear()
    try:
        run_state_machine_as_test(Sequences, settings=settings(**options))
    finally:
        forget_everything()
    deadline = time.monotonic() + 5
    while stream_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stream_threads()
    assert EXECUTORS
    gc.collect()
    assert not [executor for executor in EXECUTORS if executor() is not None]


def test_sequences():
    run_machine(max_examples=200, stateful_step_count=80)


@pytest.mark.slow
def test_many_sequences():
    run_machine(max_examples=1000, stateful_step_count=120, derandomize=False, database=None)
