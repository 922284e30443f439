"""What can be wrong with a call: each fault spoils a legal `calls.Call` and knows which errors must come of it.

A fault gives ``False`` where it does not apply. Two of one group could undo each other, so a call gets one of each at
most; beyond that, no fault repairs what another one spoiled.
"""

import sys

import ml_dtypes
import numpy as np

import poolgrad_numba as pg
from guarded import Guarded
from support import algorithms
from test_hostile import EVIL, HUGE, ODD, ODD_ARRAYS

ANY, VALUE, TYPE, INDEX = pg.PoolGradError, pg.PoolGradValueError, pg.PoolGradTypeError, pg.PoolGradIndexError

FAULTS = {}
BAD_VALUE_DTYPES = ("i4", "u1", "?", "c8", "g", "O", "S4", "U2", "M8[s]", "V4", "f4,i4", ml_dtypes.float8_e4m3fn)
BAD_INDEX_DTYPES = ("i2", "u4", "u8", "f4", "f8", "?", "O", "S4", "m8[s]")
BAD_DTYPES = (None, "float33", "f4,,", 3, object(), np.int16, complex, "O", *EVIL)
ODD_SHAPES = (None, 4, 4.0, "44", b"44", object(), {4, 5}, {4: 5}, type, np.float32(3), *EVIL)


def fault(error, group=None, *, when=lambda signature: True):
    """Declare a fault: the error that must come, and for which signatures it makes sense."""

    def declare(function):
        FAULTS[function.__name__] = (function, error, group or function.__name__, when)
        return function

    return declare


def faults_of(signature):
    return [name for name, (*_, when) in FAULTS.items() if when(signature)]


def indexed(signature):
    return signature.indexed


def has(*names):
    return lambda signature: any(name in signature.parameters for name in names)


# -- parameters and settings ---------------------------------------------------------------------------------------


def _sizes(call):
    """Parameters that are integers per axis."""
    return [name for name in ("kernel_size", "stride", "padding", "dilation", "output_size") if name in call.parameters]


@fault(VALUE, "parameter")
def parameter_out_of_range(call):
    if not _sizes(call):
        return False
    name = call.rng.choice(_sizes(call))
    bad = [-1, np.int8(-1), -(2**31), 2**31, np.int64(2**40), 2**63, np.uint64(2**63), -(2**63) - 1, 2**64 + 1, HUGE]
    if name not in ("padding", "output_size"):
        bad += [0, np.uint8(0)]
    number, axes = call.rng.choice(bad), [1] * call.signature.spatial
    axes[call.rng.randrange(len(axes))] = number
    call.parameters[name] = call.rng.choice([number, [number], tuple(axes)])
    return None


@fault(ANY, "parameter")
def parameter_of_odd_type(call):
    if not call.parameters:
        return False
    name = call.rng.choice(list(call.parameters))
    odd = [*ODD, True, np.bool_(1), np.float64(2), np.datetime64(2, "s"), 2.5]
    if name in ("ceil_mode", "count_include_pad"):
        odd = [*ODD, 0, 1, None, np.int8(1), [True], (), "True"]
    call.parameters[name] = call.rng.choice(odd)
    return None


@fault(VALUE, "parameter")
def parameter_of_wrong_length(call):
    if not _sizes(call):
        return False
    name = call.rng.choice(_sizes(call))
    lengths = {0, 2, 3, 4, 7} - {call.signature.spatial, 0 if name == "stride" else None}
    call.parameters[name] = (1,) * call.rng.choice(sorted(lengths))
    return None


@fault(VALUE, "parameter", when=has("padding"))
def padding_beyond_half_the_window(call):
    axis, window = call.rng.randrange(call.signature.spatial), call.window
    padding = list(window["padding"])
    padding[axis] = (call.dilation[axis] * (window["kernel_size"][axis] - 1) + 1) // 2 + call.rng.choice([1, 2, 1000])
    call.parameters["padding"] = padding


@fault(VALUE, "parameter", when=has("kernel_size"))
def window_beyond_the_input(call):
    axis = call.rng.randrange(call.signature.spatial)
    kernel = list(call.window["kernel_size"])
    kernel[axis] = call.size[axis] + 2 * call.window["padding"][axis] + 1 + call.rng.choice([0, 1, 2**30])
    call.parameters |= {"kernel_size": kernel, "stride": 1}


@fault(VALUE, "parameter", when=has("divisor_override"))
def divisor_out_of_range(call):
    call.parameters["divisor_override"] = call.rng.choice([0, np.int8(0), 2**63, -(2**63), np.uint64(2**63), 2**70])


@fault(TYPE, "parameter")
def parameter_unknown(call):
    if not call.planned:
        return False
    call.parameters[call.rng.choice(["kernel", "output_sizes", "dilations"])] = 1
    return None


@fault(VALUE)
def threads_out_of_range(call):
    call.settings["num_threads"] = call.rng.choice([0, -1, -HUGE, np.int8(-1), np.uint8(0)])


@fault(TYPE)
def setting_of_odd_type(call):
    name, odd = call.rng.choice([("num_threads", [2.0, "2", True, [1]]), ("deterministic", [0, 1, "1", 1.0, []])])
    call.settings[name] = call.rng.choice([*odd, *EVIL])


@fault(ANY)
def algorithm_unknown(call):
    if not call.planned:
        return False
    fast_only = ["plane_", ""]
    if call.settings["deterministic"] is True:
        fast, canonical = (set(algorithms(call.name, deterministic=mode)) for mode in (False, True))
        fast_only = sorted(fast - canonical)
    call.algorithm = call.rng.choice(["nope", 3, b"x", ["x"], True, *fast_only])
    return None


# -- shapes --------------------------------------------------------------------------------------------------------


@fault(VALUE, "shape")
def input_shape_out_of_range(call):
    shape, spatial = list(call.shape), call.signature.spatial
    bad = {0: -1, 1: 2**62, 2: 2**63, 3: HUGE, 4: 0}
    number = bad[call.rng.randrange(5)]
    axis = call.rng.randrange(len(shape)) if number else len(shape) - 1 - call.rng.randrange(spatial)
    shape[axis] = number
    call.input_shape = shape


@fault(VALUE, "shape")
def input_shape_of_other_rank(call):
    call.input_shape = call.rng.choice([call.shape[1:], (1, *call.shape), (), (call.shape[-1],), [1] * 9])


@fault(VALUE, "shape")
def input_shape_of_other_planes(call):
    shape = list(call.shape)
    shape[call.rng.randrange(len(shape) - call.signature.spatial)] += call.rng.choice([1, 2**20])
    call.input_shape = shape


@fault(ANY, "shape")
def input_shape_of_odd_type(call):
    floats, array = [float(n) for n in call.shape], np.zeros((1,) * len(call.shape))
    call.input_shape = call.rng.choice([*ODD_SHAPES, floats, [*call.shape[:-1], True], np.array(floats), array])


def _reshaped(call, name, first_axis=0):
    """Replace an array by one that has one axis or one cell too many, or too few."""
    array = call.plain(name)
    if array is None:
        return False
    shape, axis = list(array.shape), call.rng.randrange(first_axis, array.ndim)
    other = list(shape)
    other[axis] += call.rng.choice([-1, 1] if shape[axis] else [1])
    choices = [other, other, [1, *shape], [*shape, 1], shape[1:], [], [max(array.size, 1)]]
    call.replace(name, np.zeros(call.rng.choice(choices), array.dtype))
    return None


@fault(VALUE, "shape")
def gradient_of_other_shape(call):
    # The outputs of an adaptive operator are the gradient's own, unless a plan or the indices say otherwise.
    free = call.signature.adaptive and not call.planned
    array = call.plain("grad_output")
    if free and array is not None:
        shape = list(array.shape)
        shape[0] += 1
        return call.replace("grad_output", np.zeros(call.rng.choice([shape, [1, *shape], shape[1:], []]), array.dtype))
    return _reshaped(call, "grad_output")


@fault(VALUE, "shape", when=indexed)
def indices_of_other_shape(call):
    return _reshaped(call, "indices")


@fault(VALUE, "shape")
def out_of_other_shape(call):
    return _reshaped(call, "out")


# -- dtypes and kinds ----------------------------------------------------------------------------------------------


def _cast(call, name, dtypes):
    array = call.plain(name)
    if array is None:
        return False
    return call.replace(name, np.zeros(array.shape, call.rng.choice(dtypes)))


@fault(TYPE, "dtype")
def gradient_of_other_dtype(call):
    return _cast(call, "grad_output", BAD_VALUE_DTYPES)


@fault(TYPE, "dtype", when=indexed)
def indices_of_other_dtype(call):
    return _cast(call, "indices", BAD_INDEX_DTYPES)


@fault(TYPE, "dtype")
def out_of_other_dtype(call):
    others = [t for t in ("f2", "f4", "f8", ml_dtypes.bfloat16) if np.dtype(t) != call.dtype]
    return _cast(call, "out", [*others, *BAD_VALUE_DTYPES])


@fault(TYPE, "dtype")
def planned_dtype(call):
    if not call.planned:
        return False
    if call.rng.random() < 0.5:
        call.dtype = call.rng.choice([*BAD_DTYPES, "f4" if call.dtype != np.float32 else "f8"])
    else:
        odd = [odd for odd in BAD_DTYPES if odd is not None]  # None is the default
        call.index_dtype = call.rng.choice([*odd, "i8" if call.index_dtype == np.int32 else "i4"])
    return None


@fault(TYPE, "kind")
def masked_array(call):
    name = call.rng.choice(list(call.arrays))
    array = call.plain(name)
    return False if array is None else call.replace(name, np.ma.masked_array(array))


@fault(ANY, "kind")
def no_array(call):
    name = call.rng.choice(list(call.arrays))
    call.replace(name, call.rng.choice([*ODD_ARRAYS, *([3, [], (1.0,)] if name == "out" else [None])]))


@fault(TYPE, "kind", when=lambda signature: not indexed(signature))
def indices_unwanted(call):
    if not call.planned:
        return False
    return call.replace("indices", np.zeros(call.rng.choice([1, call.output_shape]), np.int64))


# -- memory --------------------------------------------------------------------------------------------------------


@fault(VALUE, "out")
def out_read_only(call):
    array = call.plain("out")
    if array is None:
        return False
    array.flags.writeable = False
    return call.replace("out", array, call.guards["out"])


@fault(VALUE, "out")
def out_overlaps_itself(call):
    array = call.plain("out")
    if array is None or array.size < 2:
        return False
    axis = call.rng.choice([axis for axis, n in enumerate(array.shape) if n > 1])
    strides = list(array.strides)
    strides[axis] = call.rng.choice([0, 1, -1])
    low = sum(min(stride * (n - 1), 0) for stride, n in zip(strides, array.shape, strict=True))
    guard = Guarded(sum(abs(s) * (n - 1) for s, n in zip(strides, array.shape, strict=True)) + array.itemsize)
    call.replace("out", guard.array(array.shape, array.dtype, strides, -low), guard)
    return None


@fault(VALUE, "kind")
def out_shares_memory(call):
    name = call.rng.choice([name for name in call.arrays if name != "out"])
    array, out = call.plain(name), call.plain("out")
    if array is None or out is None or not array.size or not out.size:
        return False
    shared = min(call.rng.choice([1, array.itemsize, array.nbytes]), array.nbytes, out.nbytes)
    guard = Guarded(array.nbytes + out.nbytes - shared)
    offsets = (0, array.nbytes - shared) if call.rng.random() < 0.5 else (out.nbytes - shared, 0)
    moved = guard.array(array.shape, array.dtype, offset=offsets[0])
    moved[...] = array
    call.replace(name, moved, guard)
    call.replace("out", guard.array(out.shape, out.dtype, offset=offsets[1]), guard)
    return None


@fault(VALUE, "workspace")
def workspace_too_small(call):
    return call.spoil_workspace(lambda size: Guarded(size - call.rng.choice([1, size])).payload if size else None)


@fault(VALUE, "workspace")
def workspace_read_only(call):
    return call.spoil_workspace(lambda size: call.rng.choice([bytes, lambda n: memoryview(bytes(n))])(size + 64))


@fault(VALUE, "workspace")
def workspace_shares_memory(call):
    name = call.rng.choice(list(call.arrays))
    array = call.plain(name)
    if array is None or not array.size:
        return False
    guard = Guarded(array.nbytes + 1_000_000)  # more than any workspace here, so that sharing is what is wrong
    moved = guard.array(array.shape, array.dtype, offset=call.rng.choice([0, 500_001]))
    moved[...] = array
    call.replace(name, moved, guard)
    return call.spoil_workspace(lambda _: guard.payload)


@fault(TYPE, "workspace")
def workspace_no_buffer(call):
    strided = np.zeros(4, np.uint8)[::2]
    odd = [3, "text", [0] * 64, object(), strided, np.zeros(9, object), *EVIL]
    return call.spoil_workspace(lambda size: call.rng.choice(odd))


# -- index values --------------------------------------------------------------------------------------------------


@fault(INDEX, when=indexed)
def index_outside_the_plane(call):
    array, cells = call.plain("indices"), int(np.prod(call.size))
    if array is None or array.dtype.kind != "i" or not array.size:
        return False
    bad = [-1, cells, cells + 1, -cells, 2**31 - 1, -(2**31)]
    if array.itemsize == 8:
        bad += [2**31, 2**32, 2**32 + 3, -(2**32), 2**62, -(2**62), sys.maxsize, -sys.maxsize - 1]
    for _ in range(call.rng.choice([1, 1, 3])):
        array[tuple(call.rng.randrange(n) for n in array.shape)] = call.rng.choice(bad)
    return None
