"""Whatever a caller passes: a result, or an error of ours, and nothing else."""

import sys

import numpy as np
import pytest

import cases
import poolgrad_numba as pg
from support import call, plan_for, python

CASE = next(case for case in cases.SMALL_CASES if case.name == "max_overlapping")
GRAD, INDICES = CASE.gradient(), CASE.indices()
HUGE = 10**5000  # more digits than Python prints


class Raises:
    """Raises what it is told to, wherever it is asked for a value."""

    def __init__(self, error):
        self.error = error

    def raise_it(self, *_, **__):
        raise self.error

    __array__ = __index__ = __iter__ = __len__ = __repr__ = __getitem__ = raise_it


EVIL = [Raises(kind("no")) for kind in (KeyError, AttributeError, OverflowError, IndexError, OSError, ValueError)]
ODD = [
    HUGE,
    -HUGE,
    {2},
    {2: 3},
    b"\x02",
    bytearray(b"\x02"),
    memoryview(b"\x02"),
    "2",
    2.0,
    2j,
    object(),
    [[1, 2], 3],
    [[2, 2]],
    [None],
    [2, HUGE],
    np.array([2.0]),
    np.array("2"),
    np.array(None),
    type,
    *EVIL,
]


@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding", "dilation"])
@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_window_parameters(name, value):
    parameters = {"kernel_size": 2, name: value}
    with pytest.raises(pg.PoolGradError, match=f"{name}: got"):
        pg.max_pool2d_with_indices_backward(GRAD, CASE.input_shape, INDICES, **parameters)


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_shapes_and_settings(value):
    for call_it in (
        lambda: pg.max_pool2d_with_indices_backward(GRAD, value, INDICES, 2),
        lambda: pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, 4, 4), output_size=value),
        lambda: pg.make_plan(cases.AVG3D, input_shape=(1, 4, 4, 4), kernel_size=2, divisor_override=value),
        lambda: pg.set_config(num_threads=value),
        lambda: pg.set_config(deterministic=value),
        lambda: pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, 4, 4), output_size=2, algorithm=value),
        lambda: pg.make_plan(value, input_shape=(1, 4, 4), output_size=2),
        lambda: pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, HUGE, 4), output_size=2),
    ):
        try:
            call_it()
        except pg.PoolGradError:
            continue
        assert value is HUGE, "accepted"  # threads, which are clamped
        pg.set_config(num_threads=None)


@pytest.mark.parametrize("dtype", ["f4,,", [("a", "f4"), ("a", "f4")], {"a": ("f4",)}, "float32 ", 3, object(), *EVIL])
def test_dtypes(dtype):
    with pytest.raises(pg.PoolGradTypeError, match="dtype: got dtype"):
        plan_for(CASE, dtype)
    with pytest.raises(pg.PoolGradTypeError, match="index_dtype"):
        plan_for(CASE, index_dtype=dtype)
    with pytest.raises(pg.PoolGradTypeError, match="index_dtype: got .* takes no indices"):
        pg.make_plan(cases.AVG3D, input_shape=(1, 4, 4, 4), kernel_size=2, index_dtype="garbage")


ODD_ARRAYS = [*EVIL, {1}, {1: 2}, "text", b"bytes", object(), [[1, 2], [3]], iter([1])]


@pytest.mark.parametrize("value", ODD_ARRAYS, ids=range(len(ODD_ARRAYS)))
def test_arrays(value):
    with pytest.raises(pg.PoolGradError, match="grad_output: got"):
        call(CASE, value, INDICES)
    with pytest.raises(pg.PoolGradError, match="indices: got"):
        call(CASE, GRAD, value)
    with pytest.raises(pg.PoolGradTypeError, match="out: got"):
        call(CASE, GRAD, INDICES, out=value)
    with pytest.raises(pg.PoolGradTypeError, match="out: got"):
        plan_for(CASE).workspace_size_for(GRAD, INDICES, value)


def test_metadata_of_a_dtype_goes_no_further():
    tagged = np.dtype("f4", metadata={"mine": 1})
    fresh = {"input_shape": (1, 1, 5, 77), "output_size": 3}
    assert pg.make_plan(cases.ADAPTIVE2D, dtype=tagged, **fresh).problem.dtype.metadata is None
    assert pg.make_plan(cases.ADAPTIVE2D, dtype="f4", **fresh).problem.dtype.metadata is None


def test_workspace_of_python_objects():
    plan = plan_for(CASE, np.float16)
    size = plan.workspace_size
    for bad in (np.empty(size, object), np.empty(size, [("a", object), ("b", "u1")])):
        with pytest.raises(pg.PoolGradTypeError, match="workspace: got a buffer of Python objects"):
            plan.run(GRAD.astype(np.float16), INDICES, workspace=bad)
    assert plan.run(GRAD.astype(np.float16), INDICES, workspace=np.empty(size, [("a", "u4"), ("b", "u1")])).any()


class Hostile(np.ndarray):
    """Copies where NumPy would give a view, and takes functions over."""

    def reshape(self, *shape):
        return np.array(self).reshape(*shape)

    def __array_function__(self, *_):
        raise RuntimeError("mine")

    __array_ufunc__ = __array_function__


def test_subclasses_of_arrays():
    want = call(CASE, GRAD, INDICES)
    out = np.zeros(CASE.input_shape, np.float32).view(Hostile)
    assert call(CASE, GRAD.view(Hostile), INDICES.view(Hostile), out=out) is out
    assert np.array_equal(np.asarray(out), want)


def test_memory_mapped_files(tmp_path):
    np.save(tmp_path / "grad.npy", GRAD)
    grad = np.load(tmp_path / "grad.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "out.npy", mode="w+", dtype=np.float32, shape=CASE.input_shape)
    assert call(CASE, grad, INDICES, out=out) is out
    assert np.array_equal(out, call(CASE, GRAD, INDICES))


def test_masked_arrays_are_refused():
    for operand in ("grad_output", "indices", "out"):
        arrays = {"grad_output": GRAD, "indices": INDICES, "out": np.empty(CASE.input_shape, np.float32)}
        arrays[operand] = np.ma.masked_array(arrays[operand])
        with pytest.raises(pg.PoolGradTypeError, match=f"{operand}: got a masked array"):
            pg.max_pool2d_with_indices_backward(**arrays, input_shape=CASE.input_shape, **CASE.parameters)


def test_shapes_are_checked_before_dtypes_and_parameters_before_all():
    wrong_shape, wrong_dtype = np.empty((1, 2, 3), np.float32), GRAD.astype(np.int32)
    with pytest.raises(pg.PoolGradValueError, match="out: got shape"):
        call(CASE, wrong_dtype, INDICES, out=wrong_shape)
    with pytest.raises(pg.PoolGradValueError, match="indices: got shape"):
        call(CASE, wrong_dtype, INDICES[:1])
    with pytest.raises(pg.PoolGradValueError, match="input_shape: got"):
        pg.max_pool2d_with_indices_backward(wrong_dtype, (1, 1), INDICES, 2)
    with pytest.raises(pg.PoolGradValueError, match="kernel_size: got"):
        pg.max_pool2d_with_indices_backward(wrong_dtype, (1, 1), INDICES, 0)
    with pytest.raises(pg.PoolGradValueError, match="output_size: got"):
        pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, 1), output_size=-1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs guard pages")
def test_indices_that_another_thread_changes_during_the_call():
    """The values are anyone's guess then, but nothing outside the operands is touched."""
    python("""
import threading, time
import sys

import numpy as np
import cases
import poolgrad_numba as pg
from guarded import Guarded
from support import algorithms, plan_for

case = next(case for case in cases.SMALL_CASES if case.name == "adaptive2d_one_plane")
legal = case.indices()
cells = 90 * 75
wrong = np.array([-1, cells, 2**31, 2**32 + 3, -(2**62), 5], np.int64)[np.arange(legal.size) % 6].reshape(legal.shape)
done = threading.Event()
for deterministic in (True, False):
    for algorithm in algorithms(case.operator, deterministic=deterministic):
        plan = plan_for(case, deterministic=deterministic, algorithm=algorithm, num_threads=2)
        places = [Guarded(legal.size * 4), Guarded(legal.size * 8, right=False), Guarded(cells * 4),
                  Guarded(plan.workspace_size_for(legal.astype('f4'), legal))]
        grad = places[0].array(legal.shape, np.float32)
        grad[...] = 1
        indices = places[1].array(legal.shape, np.int64)
        indices[...] = legal
        out = places[2].array(case.input_shape, np.float32)
        plan.run(grad, indices, out=out, workspace=places[3].payload)
        done.clear()
        def change():
            while not done.is_set():
                for values in (wrong, legal):
                    np.copyto(indices, values)
        other = threading.Thread(target=change)
        other.start()
        end, refused = time.monotonic() + 0.7, 0
        while time.monotonic() < end:
            try:
                plan.run(grad, indices, out=out, workspace=places[3].payload)
            except pg.PoolGradIndexError:
                refused += 1
        done.set()
        other.join()
        assert refused, algorithm
        assert all(place.intact() for place in places)
        indices[...] = legal
        assert plan.run(grad, indices, out=out).sum() == legal.size
""")  # fmt: skip
