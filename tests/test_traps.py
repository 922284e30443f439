"""Faults that users of such kernels really met, by the id of docs/traps.md: each kind, wherever it can occur."""

import itertools
import math
import threading

import ml_dtypes
import numpy as np
import pytest

import cases
import poolgrad_numba as pg
import reference
from poolgrad_numba.bench import forward
from support import algorithms, call, plan_for, python, same_bits

F4 = np.float32
REFUSED = (pg.PoolGradValueError, pg.PoolGradTypeError)
BOTH_MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
EACH_DTYPE = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)


def ones(*shape, dtype=F4):
    return np.ones(shape, dtype)


def zeros(*shape):
    return np.zeros(shape, np.int64)


def refused(function, *args, **options):
    """The message of the refusal; the same call must be refused in both modes."""
    with pytest.raises(REFUSED) as fast:
        function(*args, **options)
    with pytest.raises(REFUSED) as deterministic:
        function(*args, **options, deterministic=True)
    assert str(fast.value) == str(deterministic.value)
    return str(fast.value)


# -- shapes and parameters -----------------------------------------------------------------------------------------


@pytest.mark.trap("T01")
def test_t01_batches_differ():
    few, many = (5, 7, 9, 9), (9, 7, 9, 9)
    for a, b in ((few, many), (many, few)):
        message = refused(pg.max_pool2d_with_indices_backward, ones(*a), b, zeros(*b), 1)
        assert str(a) in message
        assert str(b) in message
        message = refused(pg.max_pool2d_with_indices_backward, ones(*b), b, zeros(*a), 1)
        assert str(a) in message
        assert str(b) in message
        message = refused(pg.adaptive_max_pool2d_backward, ones(*a), b, zeros(*a))
        assert str(a) in message
        assert str(b) in message


@pytest.mark.trap("T02")
def test_t02_batch_axis_of_the_3d_operators():
    refused(pg.adaptive_max_pool3d_backward, ones(1, 2, 1, 3, 2), (1, 2, 4, 4, 4), zeros(0, 2, 1, 3, 2))
    refused(pg.adaptive_max_pool3d_backward, ones(0, 2, 1, 3, 2), (1, 2, 4, 4, 4), zeros(0, 2, 1, 3, 2))
    refused(pg.avg_pool3d_backward, ones(0, 2, 2, 2, 2), (1, 2, 4, 4, 4), 2)
    refused(pg.avg_pool3d_backward, ones(1, 2, 2, 2, 2), (0, 2, 4, 4, 4), 2)


@pytest.mark.trap("T03")
@BOTH_MODES
def test_t03_non_square_everything(deterministic):
    rng = np.random.default_rng(3)
    shape, kernel, stride, padding = (2, 3, 4, 9, 29), (2, 3, 5), (2, 3, 4), (0, 0, 0)
    grad = (rng.integers(-9, 10, (2, 3, 2, 3, 7)) * math.prod(kernel)).astype(F4)
    got = pg.avg_pool3d_backward(grad, shape, kernel, stride, padding, deterministic=deterministic)
    assert np.array_equal(got, reference.averaged(grad, shape, kernel, stride, padding))
    assert got.sum() == grad.sum()
    for axes in itertools.permutations(range(3)):
        order = (0, 1, *(2 + axis for axis in axes))
        turned = pg.avg_pool3d_backward(
            grad.transpose(order),
            tuple(shape[axis] for axis in order),
            *([values[axis] for axis in axes] for values in (kernel, stride, padding)),
            deterministic=deterministic,
        )
        assert np.array_equal(turned, got.transpose(order))
    x = rng.permutation(2 * 3 * 11 * 17).reshape(6, 11, 17)
    indices = reference.max_pool_indices(x, (2, 5), (3, 2), (1, 2)).reshape(2, 3, 4, 9)
    flat = rng.integers(-9, 10, indices.shape).astype(F4)
    got = pg.max_pool2d_with_indices_backward(
        flat, (2, 3, 11, 17), indices, (2, 5), (3, 2), (1, 2), deterministic=deterministic
    )
    assert got.sum() == flat.sum()
    turned = pg.max_pool2d_with_indices_backward(
        flat.swapaxes(2, 3),
        (2, 3, 17, 11),
        (indices % 17 * 11 + indices // 17).swapaxes(2, 3),
        (5, 2),
        (2, 3),
        (2, 1),
        deterministic=deterministic,
    )
    assert np.array_equal(turned, got.swapaxes(2, 3))


@pytest.mark.trap("T04")
@BOTH_MODES
@EACH_DTYPE
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "include_pad", "expected"),
    [
        (5, 3, 3, 0, True, [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]),
        (5, 2, 2, 0, True, [0.5, 0.5, 0.5, 0.5, 1]),
        (4, 3, 2, 1, True, [1 / 3, 2 / 3, 1 / 3, 5 / 6]),
        (4, 3, 2, 1, False, [1 / 2, 5 / 6, 1 / 3, 4 / 3]),
    ],
)
def test_t04_ceil_mode_divisors(size, kernel, stride, padding, include_pad, expected, axis, dtype, deterministic):
    def along(n, other):
        return tuple(n if a == axis else other for a in range(3))

    outputs = reference.pooled_size(size, kernel, stride, padding, 1, True)
    got = pg.avg_pool3d_backward(
        np.ones((1, *along(outputs, 1)), dtype),
        (1, *along(size, 1)),
        along(kernel, 1),
        along(stride, 1),
        along(padding, 0),
        ceil_mode=True,
        count_include_pad=include_pad,
        deterministic=deterministic,
    )
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert np.allclose(got.ravel().astype(float), expected, rtol=eps, atol=0)


@pytest.mark.trap("T05")
def test_t05_window_wholly_outside():
    def size(shape, kernel, stride, padding=0, ceil_mode=False):
        plan = pg.make_plan(
            cases.MAX2D, input_shape=shape, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode
        )
        return plan.output_shape[-2:]

    assert size((1, 6, 7), 1, 2, ceil_mode=True) == (3, 4)
    assert size((1, 32, 32), 1, 2, ceil_mode=True) == (16, 16)
    refused(pg.max_pool2d_with_indices_backward, ones(1, 4, 4), (1, 6, 7), zeros(1, 4, 4), 1, 2, ceil_mode=True)
    with pytest.raises(pg.PoolGradValueError, match="too small for the window"):
        size((1, 1, 1), 4, 1)
    with pytest.raises(pg.PoolGradValueError, match="too small for the window"):
        pg.avg_pool3d_backward(ones(1, 0, 0, 0), (1, 1, 1, 1), 4, 1)


@pytest.mark.trap("T06")
@pytest.mark.parametrize("value", [0, -1, 2**62, 2**64, 2.5, 2.0, "2", None, True, (1, 2, 3, 4), [], [[1, 1]]])
def test_t06_bad_kernel_and_stride(value):
    grad, shape, indices = ones(1, 2, 2), (1, 4, 4), zeros(1, 2, 2)
    message = refused(pg.max_pool2d_with_indices_backward, grad, shape, indices, value, 2)
    assert message.startswith("kernel_size")
    if value is not None and value != []:  # which mean the kernel size
        assert refused(pg.max_pool2d_with_indices_backward, grad, shape, indices, 2, value).startswith("stride")
    deep, deep_shape = ones(1, 2, 2, 2), (1, 4, 4, 4)
    assert refused(pg.avg_pool3d_backward, deep, deep_shape, value, 2).startswith("kernel_size")


@pytest.mark.trap("T06")
@pytest.mark.parametrize("value", [-1, 2, 2**62, 0.5, None, "0"])
def test_t06_bad_padding_divisor_and_dilation(value):
    message = refused(pg.max_pool2d_with_indices_backward, ones(1, 2, 2), (1, 4, 4), zeros(1, 2, 2), 2, 2, value)
    assert message.startswith("padding")
    assert refused(pg.avg_pool3d_backward, ones(1, 2, 2, 2), (1, 4, 4, 4), 2, 2, value).startswith("padding")
    if value != 2:
        message = refused(pg.max_pool2d_with_indices_backward, ones(1, 2, 2), (1, 4, 4), zeros(1, 2, 2), 2, 2, 0, value)
        assert message.startswith("dilation")


@pytest.mark.trap("T06")
@pytest.mark.parametrize("value", [0, 2**63, -(2**64), 1.0, "1", True])
def test_t06_bad_divisor(value):
    message = refused(pg.avg_pool3d_backward, ones(1, 2, 2, 2), (1, 4, 4, 4), 2, divisor_override=value)
    assert message.startswith("divisor_override")


@pytest.mark.trap("T07")
def test_t07_parameters_are_checked_first():
    empty = (1, 0, 0, 0, 0)
    assert refused(pg.avg_pool3d_backward, ones(*empty), empty, 0, 0).startswith("kernel_size")
    assert refused(pg.avg_pool3d_backward, ones(*empty), empty, 1, 0).startswith("stride")
    empty = (1, 0, 0, 0)
    assert refused(pg.max_pool2d_with_indices_backward, ones(*empty), empty, zeros(*empty), 0, 0).startswith("kernel")


@pytest.mark.trap("T08")
@BOTH_MODES
def test_t08_unbatched_operands(deterministic):
    indices = np.arange(12).reshape(3, 2, 2) % 4
    message = refused(pg.adaptive_max_pool2d_backward, ones(3, 2, 2), (3, 2, 2), indices[None])
    assert "indices has the extra axis" in message
    message = refused(pg.adaptive_max_pool2d_backward, ones(1, 3, 2, 2), (1, 3, 2, 2), indices)
    assert "grad_output has the extra axis" in message
    assert "grad_output has 1 more" in refused(pg.adaptive_max_pool2d_backward, ones(1, 3, 2, 2), (3, 2, 2), indices)
    assert "input_shape has 1 more" in refused(pg.avg_pool3d_backward, ones(3, 2, 2, 2), (1, 3, 4, 4, 4), 2)
    got = pg.adaptive_max_pool2d_backward(ones(3, 2, 2), (3, 2, 2), indices, deterministic=deterministic)
    assert got.shape == (3, 2, 2)
    batched = pg.adaptive_max_pool2d_backward(
        ones(1, 3, 2, 2), (1, 3, 2, 2), indices[None], deterministic=deterministic
    )
    assert np.array_equal(batched[0], got)


@pytest.mark.trap("T09")
@pytest.mark.parametrize(
    "shape", [(3, 1, 1, 1, 1), (10, 7, 1, 1, 1), (10, 7, 6, 3, 6), (7, 6, 3, 7), (10, 7, 6, 3, 7, 1)]
)
def test_t09_gradient_of_another_size(shape):
    refused(pg.avg_pool3d_backward, ones(*shape), (10, 7, 6, 3, 7), 1, 1)


@pytest.mark.trap("T10")
def test_t10_indices_of_another_size():
    refused(pg.adaptive_max_pool2d_backward, ones(1, 4, 1, 1), (1, 1, 1, 3), zeros(1, 1, 1, 1))
    refused(pg.adaptive_max_pool2d_backward, ones(1, 1, 1, 1), (1, 1, 1, 3), zeros(1, 1, 1, 2))
    refused(pg.adaptive_max_pool2d_backward, ones(1, 1, 1, 2), (1, 1, 1, 3), zeros(1, 1, 2, 1))


@pytest.mark.trap("T11")
def test_t11_everything_empty():
    empty = (0, 0, 0, 0)
    refused(pg.adaptive_max_pool2d_backward, ones(*empty), empty, zeros(*empty))
    refused(pg.max_pool2d_with_indices_backward, ones(*empty), empty, zeros(*empty), 1)
    refused(pg.avg_pool3d_backward, ones(0, *empty), (0, *empty), 1)


@pytest.mark.trap("T12")
def test_t12_empty_operands_beside_a_non_empty_input():
    shape, full, empty = (1, 2, 4, 4), (1, 2, 2, 2), (1, 2, 0, 2)
    for grad, indices in ((empty, full), (full, empty), (empty, empty)):
        refused(pg.max_pool2d_with_indices_backward, ones(*grad), shape, zeros(*indices), 2)
    refused(pg.adaptive_max_pool2d_backward, ones(*empty), shape, zeros(*full))
    refused(pg.adaptive_max_pool2d_backward, ones(*full), shape, zeros(*empty))
    refused(pg.adaptive_max_pool2d_backward, ones(1, 0, 2, 2), shape, zeros(1, 0, 2, 2))
    refused(pg.avg_pool3d_backward, ones(1, 2, 0, 2, 2), (1, 2, 4, 4, 4), 2)
    assert not pg.adaptive_max_pool2d_backward(ones(*empty), shape, zeros(*empty)).any()


BAD_SHAPES = [
    (1, -2, 4, 4),
    (-1, -2, 4, 4),
    (2**40, 2**40, 4, 4),
    (1, 1, 2**62, 4),
    (0, 2**62, 4, 4),
    (4,),
    (4, 4),
    (1,) * 20,
    (),
    4,
    None,
    "44",
    (1, 1, 4.0, 4),
    (1, 1, None, 4),
    (1, 1, True, 4),
]


@pytest.mark.trap("T13")
@pytest.mark.parametrize("shape", BAD_SHAPES, ids=str)
def test_t13_bad_input_shapes(shape):
    assert refused(pg.adaptive_max_pool2d_backward, ones(1, 1, 2, 2), shape, zeros(1, 1, 2, 2)).startswith(
        ("input_shape", "grad_output")
    )
    deep = shape if not isinstance(shape, tuple) or len(shape) != 4 else (*shape, 4)
    refused(pg.avg_pool3d_backward, ones(1, 1, 2, 2, 2), deep, 2)


@pytest.mark.trap("T13")
def test_t13_scalar_and_high_rank_operands():
    refused(pg.adaptive_max_pool2d_backward, np.float32(1), (1, 1, 4, 4), zeros(1, 1, 2, 2))
    refused(pg.adaptive_max_pool2d_backward, ones(*(1,) * 20), (1, 1, 4, 4), zeros(*(1,) * 20))


@pytest.mark.trap("T13")
def test_t13_checks_hold_without_assertions():
    code = f"""
import numpy as np, poolgrad_numba as pg
for shape in {[s for s in BAD_SHAPES if s != (0, 2**62, 4, 4)]!r}:
    try:
        pg.adaptive_max_pool2d_backward(np.ones((1, 1, 2, 2), 'f4'), shape, np.zeros((1, 1, 2, 2), int))
    except pg.PoolGradError:
        continue
    raise SystemExit(f"accepted {{shape}}")
try:
    pg.adaptive_max_pool2d_backward(np.ones((1, 1, 1, 1), 'f4'), (1, 1, 2, 2), np.full((1, 1, 1, 1), 4))
except pg.PoolGradIndexError:
    pass
else:
    raise SystemExit("accepted a bad index")
"""
    python(code, flags=("-O",))


@pytest.mark.trap("T14")
def test_t14_long_axis_and_window():
    size, window = 19_199_998, {"kernel_size": (1, 1, 1921), "stride": 1, "padding": (0, 0, 960)}
    shape = (1, 1, 1, 1, size)
    plan = pg.make_plan(cases.AVG3D, input_shape=shape, **window)
    assert plan.output_shape == shape
    nothing = np.broadcast_to(F4(0), (1, 1, 1, 1, size + 1))
    with pytest.raises(pg.PoolGradValueError, match=str(size)):
        pg.avg_pool3d_backward(nothing, shape, **window)


@pytest.mark.trap("T15")
def test_t15_numpy_integers_do_not_wrap():
    shape = tuple(np.array([70, 32, 100, 100, 100], np.int32))
    plan = pg.make_plan(cases.AVG3D, input_shape=shape, dtype=np.float16, kernel_size=np.int8(100))
    assert plan.problem.planes * plan.problem.cells == 70 * 32 * 10**6
    assert plan.output_shape == (70, 32, 1, 1, 1)
    assert all(type(n) is int for n in plan.problem.input_shape)
    narrow = pg.make_plan(
        cases.MAX2D, input_shape=np.array([1, 200, 200], np.uint8), kernel_size=np.uint8(127), stride=1
    )
    assert narrow.output_shape == (1, 74, 74)


@pytest.mark.slow
@pytest.mark.trap("T15")
@BOTH_MODES
def test_t15_above_two_to_the_31_elements(deterministic):
    shape = (70, 32, 100, 100, 100)
    grad = np.ones((70, 32, 50, 50, 50), np.float16)
    grad[-1, -1, -1, -1, -1] = 80
    got = pg.avg_pool3d_backward(grad, shape, 2, deterministic=deterministic)
    assert got[-1, -1, -2:, -2:, -2:].ravel().tolist() == [10.0] * 8
    assert got[0, 0, 0, 0, 0] == 0.125
    assert got[35, 16, 50, 50, 50] == 0.125
    del got
    indices = np.broadcast_to(np.int32(10**6 - 1), (*grad.shape[:2], 1, 1, 1))
    got = pg.adaptive_max_pool3d_backward(grad[..., -1:, -1:, -1:], shape, indices, deterministic=deterministic)
    assert got[-1, -1, -1, -1, -1] == 80
    assert np.count_nonzero(got) == 70 * 32


# -- indices -------------------------------------------------------------------------------------------------------

BAD_INDICES = [
    pytest.param(-1, id="T16"),
    pytest.param(2**32 + 3, id="T17"),
    pytest.param(1250999896764, id="T18"),
    pytest.param(4294967295, id="T18b"),
    pytest.param(-1099511627776, id="T18c"),
    pytest.param(-(2**63), id="lowest"),
    pytest.param(2**63 - 1, id="highest"),
    pytest.param(16, id="one past the plane"),
    pytest.param(31, id="T19"),
]


@pytest.mark.trap("T16 T17 T18 T19")
@pytest.mark.parametrize("bad", BAD_INDICES)
@pytest.mark.parametrize("threads", [1, 2, 8])
@BOTH_MODES
@EACH_DTYPE
def test_t16_to_t19_bad_index_values(bad, threads, deterministic, dtype):
    grad = np.ones((2, 1, 3, 3), dtype)
    frame = np.full((2, 3, 4, 4), 7, dtype)
    out = frame[:, 1:2]
    indices = np.zeros((2, 1, 3, 3), np.int64)
    indices[0, 0, 2, 1] = bad
    index_dtypes = [np.int64] if not -(2**31) <= bad < 2**31 else [np.int32, np.int64]
    for index_dtype, name in itertools.product(index_dtypes, algorithms(cases.ADAPTIVE2D, deterministic=deterministic)):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=(2, 1, 4, 4),
            dtype=dtype,
            index_dtype=index_dtype,
            output_size=3,
            deterministic=deterministic,
            num_threads=threads,
            algorithm=name,
        )
        inner = np.full((2, 1, 4, 4), 7, dtype)
        for target in (out, inner):
            with pytest.raises(pg.PoolGradIndexError) as error:
                plan.run(grad, indices.astype(index_dtype), out=target)
            assert str(error.value).startswith(f"indices: got {bad} at position (0, 0, 2, 1), wanted 0 to 15")
            assert "flat inside its own plane" in str(error.value)
            assert error.value.status == 161002
        assert (frame[:, 0] == 7).all()
        assert (frame[:, 2] == 7).all()
        assert plan.run(grad, np.zeros(indices.shape, index_dtype))[0, 0, 0, 0] == 9  # the next good call works


@pytest.mark.trap("T16")
@pytest.mark.parametrize("bad", [-1, -(2**40), 2**40, 4096, 70_000])
@BOTH_MODES
@EACH_DTYPE
def test_t16_nothing_is_written_beside_the_result(bad, deterministic, dtype):
    """Planes end to end inside a larger buffer: an index outside one must not reach its neighbours."""
    guarded = np.full(3 * 4096, 7, dtype)
    out = guarded[4096:8192].reshape(1, 1, 64, 64)
    indices = np.arange(1024).reshape(1, 1, 32, 32)
    indices[0, 0, 3, 3] = bad
    for name in algorithms(cases.ADAPTIVE2D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=out.shape,
            dtype=dtype,
            output_size=32,
            deterministic=deterministic,
            num_threads=3,
            algorithm=name,
        )
        with pytest.raises(pg.PoolGradIndexError):
            plan.run(np.ones((1, 1, 32, 32), dtype), indices, out=out)
        assert (guarded[:4096] == 7).all()
        assert (guarded[8192:] == 7).all()


@pytest.mark.trap("T20")
@pytest.mark.parametrize("threads", [1, 2, 8])
@BOTH_MODES
def test_t20_the_first_bad_position_is_named(threads, deterministic):
    shape = (64, 64, 8, 8)
    last = 64 * 64 * 64 - 1
    for positions in ([0], [last // 2], [last], [last, last // 2], [last // 2, 0, last]):
        indices = np.zeros(shape, np.int64)
        for position in positions:
            indices.reshape(-1)[position] = 64 + position
        first = min(positions)
        where = tuple(int(i) for i in np.unravel_index(first, shape))
        for name in (None, *algorithms(cases.ADAPTIVE2D, deterministic=deterministic)):
            plan = pg.make_plan(
                cases.ADAPTIVE2D,
                input_shape=shape,
                output_size=8,
                deterministic=deterministic,
                num_threads=threads,
                algorithm=name,
            )
            with pytest.raises(pg.PoolGradIndexError) as error:
                plan.run(ones(*shape), indices)
            assert str(error.value).startswith(f"indices: got {64 + first} at position {where}, wanted 0 to 63 ")


@pytest.mark.trap("T20")
def test_t20_the_first_bad_position_among_millions():
    indices = np.zeros((1, 1, 1100, 1100), np.int32)
    indices[0, 0, 1000, 7], indices[0, 0, 1099, 1099] = 5, 6
    with pytest.raises(pg.PoolGradIndexError, match=r"got 5 at position \(0, 0, 1000, 7\), wanted 0 to 3 "):
        pg.adaptive_max_pool2d_backward(np.ones(indices.shape, F4), (1, 1, 2, 2), indices)


@pytest.mark.trap("T21")
@BOTH_MODES
@EACH_DTYPE
def test_t21_all_indices_on_one_cell(deterministic, dtype):
    for name in algorithms(cases.MAX2D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.MAX2D,
            input_shape=(2, 16, 16),
            dtype=dtype,
            kernel_size=2,
            deterministic=deterministic,
            num_threads=8,
            algorithm=name,
        )
        got = plan.run(np.ones((2, 8, 8), dtype), np.ones((2, 8, 8), np.int64))
        assert got.reshape(2, -1)[:, 1].tolist() == [64, 64]
        assert np.count_nonzero(got) == 2


@pytest.mark.trap("T23")
@pytest.mark.parametrize(
    "dtype", [np.float32, np.bool_, np.uint64, np.uint32, np.int16, np.int8, object, "U1", "M8[s]"]
)
def test_t23_index_dtypes(dtype):
    for function in (pg.adaptive_max_pool2d_backward, pg.max_pool2d_with_indices_backward):
        extra = () if function is pg.adaptive_max_pool2d_backward else (2,)
        message = refused(function, ones(1, 2, 2), (1, 4, 4), np.zeros((1, 2, 2), dtype), *extra)
        assert message.startswith("indices: got dtype")
        assert "int32, int64" in message


@pytest.mark.trap("T23")
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble, object, "S2", "V2"])
def test_t23_value_dtypes(dtype):
    message = refused(pg.avg_pool3d_backward, np.zeros((1, 2, 2, 2), dtype), (1, 4, 4, 4), 2)
    assert "float32, float64, float16, bfloat16" in message


@pytest.mark.trap("T24")
@BOTH_MODES
@EACH_DTYPE
def test_t24_nan_and_infinity_stay_in_their_cells(deterministic, dtype):
    grad = np.array([[[np.nan, np.inf, 1], [2, -np.inf, 0]]], dtype)
    indices = np.array([[[1, 6, 3], [8, 10, 11]]])
    for name in algorithms(cases.ADAPTIVE2D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=(1, 3, 4),
            dtype=dtype,
            output_size=(2, 3),
            deterministic=deterministic,
            algorithm=name,
        )
        got = plan.run(grad, indices).ravel()
        want = np.zeros(12, dtype)
        want[[1, 6, 3, 8, 10]] = [np.nan, np.inf, 1, 2, -np.inf]
        assert same_bits(got, want)
    deep = np.zeros((1, 1, 2, 3), dtype)
    deep[0, 0, 0, 1], deep[0, 0, 1, 2] = np.nan, np.inf
    for name in algorithms(cases.AVG3D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.AVG3D,
            input_shape=(1, 1, 4, 6),
            dtype=dtype,
            kernel_size=(1, 2, 2),
            deterministic=deterministic,
            algorithm=name,
        )
        got = plan.run(deep)[0, 0]
        assert np.isnan(got[:2, 2:4]).all()
        assert np.isposinf(got[2:, 4:]).all()
        got[:2, 2:4] = got[2:, 4:] = 0
        assert same_bits(got, np.zeros((4, 6), dtype))


@pytest.mark.trap("T25")
@BOTH_MODES
def test_t25_adaptive_windows_overlap(deterministic):
    indices = reference.adaptive_max_pool_indices(np.float32([[[0, 9, 0, 8, 0]]]), (1, 3))
    got = pg.adaptive_max_pool2d_backward(ones(1, 1, 3), (1, 1, 5), indices, deterministic=deterministic)
    assert got.ravel().tolist() == [0, 2, 0, 1, 0]


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.trap("T26")
@pytest.mark.parametrize(("dtype", "count"), [(np.float16, 4096), (ml_dtypes.bfloat16, 512)])
@BOTH_MODES
def test_t26_16_bit_sums_do_not_stall(dtype, count, deterministic):
    grad = np.ones((1, 1, count), dtype)
    for name in algorithms(cases.ADAPTIVE2D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=(1, 2, 2),
            dtype=dtype,
            output_size=(1, count),
            deterministic=deterministic,
            num_threads=3,
            algorithm=name,
        )
        assert plan.run(grad, np.full(grad.shape, 2)).ravel().tolist() == [0, 0, count, 0]
    deep = np.ones((1, 1, 1, count), dtype)
    for name in algorithms(cases.AVG3D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.AVG3D,
            input_shape=(1, 1, 1, 2 * count - 1),
            dtype=dtype,
            kernel_size=(1, 1, count),
            stride=1,
            divisor_override=1,
            deterministic=deterministic,
            algorithm=name,
        )
        assert plan.run(deep).ravel()[count - 1] == count


@pytest.mark.trap("T27")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@BOTH_MODES
def test_t27_large_divisors_in_16_bits(dtype, deterministic):
    for name in algorithms(cases.AVG3D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.AVG3D,
            input_shape=(1, 16, 41, 100),
            dtype=dtype,
            kernel_size=(16, 41, 100),
            deterministic=deterministic,
            algorithm=name,
        )
        assert plan.problem.cells == 65_600
        got = plan.run(np.full((1, 1, 1, 1), 1000, dtype))
        assert (got == (np.full((), 1000, dtype).astype(F4) / F4(65_600)).astype(dtype)).all()
        assert got.all()


@pytest.mark.trap("T28")
@EACH_DTYPE
def test_t28_three_terms_on_one_cell(dtype):
    terms = np.array([-0.00055786537, 0.00075417152, -0.00029314149], np.float32).astype(dtype)
    grad, indices = terms.reshape(1, 1, 3), zeros(1, 1, 3)
    want = reference.indexed(grad, (1, 1, 4), indices, 2)
    for threads, name in itertools.product((1, 2, 3, 4), algorithms(cases.ADAPTIVE2D, deterministic=True)):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=(1, 1, 4),
            dtype=dtype,
            output_size=(1, 3),
            deterministic=True,
            num_threads=threads,
            algorithm=name,
        )
        for _ in range(20):
            assert same_bits(plan.run(grad, indices), want)


@pytest.mark.trap("T31")
@pytest.mark.parametrize("case", [c for c in cases.SMALL_CASES if "overlapping" in c.name or "one_plane" in c.name],
                         ids=lambda case: case.name)  # fmt: skip
def test_t31_overlapping_windows_repeat(case):
    grad, indices = case.rough_gradient(), case.indices()
    plan = plan_for(case, deterministic=True, num_threads=8)
    assert plan.algorithm in algorithms(case.operator, deterministic=True)
    first = plan.run(grad, indices)
    assert all(same_bits(plan.run(grad, indices), first) for _ in range(50))
    assert same_bits(call(case, grad, indices, deterministic=True, num_threads=8), first)


def thresholds():
    """Input shapes and output sizes just below and above each threshold of the dispatchers, and what decides there."""
    yield (
        "few planes / enough planes",
        cases.ADAPTIVE2D,
        [((1, p, 150, 150), {"output_size": 20}) for p in (1, 4, 5, 6)],
    )
    yield "in cache / streamed", cases.ADAPTIVE2D, [((1, p, 256, 256), {"output_size": 9}) for p in (31, 32, 33, 64)]
    yield (
        "small planes / streamed planes",
        cases.ADAPTIVE2D,
        [((1, 2100, *size), {"output_size": 3}) for size in ((23, 89), (32, 64))],
    )
    yield (
        "planes in cache / a window that sweeps",
        cases.ADAPTIVE2D,
        [((1, 33, 256, w), {"output_size": 16}) for w in (256, 257)],
    )
    yield (
        "window in cache / not",
        cases.ADAPTIVE2D,
        [((1, 1, 1000, 5000), {"output_size": (n, 4)}) for n in (40, 48, 60, 80)],
    )
    yield (
        "small / worth splitting",
        cases.ADAPTIVE2D,
        [((1, 1, 1, n), {"output_size": (1, 8)}) for n in (32_760, 32_761)],
    )
    yield "dense / sparse", cases.ADAPTIVE2D, [((1, 1, 64, 1040), {"output_size": (1, n)}) for n in (64, 65, 66)]
    yield (
        "tile edges",
        cases.ADAPTIVE2D,
        [((1, 1, 1, n), {"output_size": (1, 999)}) for n in (131_071, 131_072, 131_137)],
    )
    yield "segments", cases.ADAPTIVE2D, [((1, 1, 300, 301), {"output_size": (1, n)}) for n in (127, 128, 129, 257)]
    yield (
        "blocks of a row",
        cases.AVG3D,
        [((1, 1, 1, 3, n), {"kernel_size": (1, 2, 3), "stride": 1}) for n in (4095, 4096, 4097, 8193)],
    )
    yield "runs / taps", cases.AVG3D, [((2, 2, 3, 4, n), {"kernel_size": (1, 1, 5), "stride": 1}) for n in (8, 9, 10)]
    yield (
        "runs / rows",
        cases.AVG3D,
        [((1, 2, 6, 24, 25), {"kernel_size": k, "stride": s}) for s in (4, 5, 6) for k in (1, 3)],
    )
    for size in ((1, 2, 9, 9, 9), (1, 1, 16, 32, 40)):
        yield f"gather / spread {size}", cases.AVG3D, [(size, {"kernel_size": k, "stride": 1}) for k in (1, 2, 3)]


@pytest.mark.trap("T32")
@pytest.mark.parametrize(("operator", "problems"), [row[1:] for row in thresholds()], ids=[r[0] for r in thresholds()])
@pytest.mark.parametrize("threads", [1, 2, 8])
@BOTH_MODES
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_t32_both_sides_of_every_threshold(operator, problems, threads, deterministic, dtype):
    chosen = set()
    for shape, parameters in problems:
        options = {"dtype": dtype, "deterministic": deterministic, **parameters}
        plan = pg.make_plan(operator, input_shape=shape, num_threads=threads, **options)
        chosen.add(plan.algorithm)
        rng = np.random.default_rng(1)
        grad = rng.integers(-4, 5, plan.output_shape).astype(dtype)
        cells = plan.problem.cells
        indices = rng.integers(0, cells, plan.output_shape) if "max" in operator else None
        got = plan.run(grad, indices)
        alone = pg.make_plan(operator, input_shape=(1, 1, *shape[2:]), num_threads=1, **options)
        for c in range(shape[1]):
            one = alone.run(grad[:1, c : c + 1], None if indices is None else indices[:1, c : c + 1])
            if indices is not None or deterministic:
                assert same_bits(got[:1, c : c + 1], one)
            else:
                assert np.allclose(got[:1, c : c + 1], one, rtol=1e-3, atol=1e-3)


def test_t32_the_thresholds_are_there():
    """Each candidate is chosen on one side of a threshold at least, so that the test above crosses it."""
    chosen = {
        pg.make_plan(
            operator, input_shape=shape, num_threads=threads, deterministic=deterministic, **parameters
        ).algorithm
        for _, operator, problems in thresholds()
        for shape, parameters in problems
        for threads in (1, 2, 8)
        for deterministic in (False, True)
    }
    every = {name for op in cases.OPERATORS for d in (False, True) for name in algorithms(op, deterministic=d)}
    assert chosen == every - {"interleaved_scatter"}  # which the layout chooses


# -- living inside a real program ----------------------------------------------------------------------------------


@pytest.mark.trap("T37")
def test_t37_import_starts_no_thread_compiles_nothing_and_pulls_in_no_framework():
    python("""
import sys, threading
import poolgrad_numba
from poolgrad_numba.kernels import averaged, indexed
from poolgrad_numba.kernels._jit import Kernel
assert threading.active_count() == 1
from pathlib import Path
assert len(list(Path("/proc/self/task").iterdir())) == 1 if Path("/proc/self/task").exists() else True
for name in ("torch", "jax", "dask", "rich", "matplotlib", "nibabel", "tensorflow", "hypothesis", "argparse"):
    assert name not in sys.modules or name == "argparse", name
for module in (averaged, indexed):
    for value in vars(module).values():
        if isinstance(value, Kernel):
            assert not value.dispatcher.signatures
""", OPENBLAS_NUM_THREADS="1")  # fmt: skip


@pytest.mark.trap("T38")
def test_t38_one_compilation_per_dtype_pair():
    python("""
import numpy as np, poolgrad_numba as pg
from poolgrad_numba.kernels import averaged, indexed
shape = (2, 3, 8, 10)
grad, indices = np.ones((2, 3, 4, 5), np.float32), np.zeros((2, 3, 4, 5), np.int64)
frozen = grad.copy()
frozen.flags.writeable = False
frozen_indices = indices.copy()
frozen_indices.flags.writeable = False
broadcast = np.broadcast_to(np.float32(1), grad.shape)
grads = [grad, np.asfortranarray(grad), np.repeat(grad, 2, -1)[..., ::2], frozen, broadcast]
for g in grads:
    for i in (indices, np.asfortranarray(indices), frozen_indices):
        pg.max_pool2d_with_indices_backward(g, shape, i, 2)
        pg.max_pool2d_with_indices_backward(g, shape, i, 2, deterministic=True)
        pg.adaptive_max_pool2d_backward(g, shape, i, out=np.empty(shape, np.float32))
        pg.adaptive_max_pool2d_backward(g, shape, i, out=np.empty(shape[::-1], np.float32).T)
    pg.avg_pool3d_backward(np.stack([g, g], 2), (2, 3, 4, 8, 10), 2)
    pg.avg_pool3d_backward(np.asfortranarray(np.stack([g, g], 2)), (2, 3, 4, 8, 10), 2)
assert len(indexed.plane_scatter.dispatcher.signatures) == 1, indexed.plane_scatter.dispatcher.signatures
assert len(averaged.shifted_sums.dispatcher.signatures) == 1
assert not indexed.tile_reduce.dispatcher.signatures
""")  # fmt: skip


@pytest.mark.trap("T39")
def test_t39_thread_limits_are_obeyed_and_restored():
    import numba

    shape, grad, indices = (64, 64, 8, 8), ones(64, 64, 4, 4), zeros(64, 64, 4, 4)
    before = numba.get_num_threads()
    pg.set_config(num_threads=1)
    found = []

    def other():
        found.append(pg.get_config().num_threads)
        found.append(pg.make_plan(cases.MAX2D, input_shape=shape, kernel_size=2).workers)
        pg.max_pool2d_with_indices_backward(grad, shape, indices, 2)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [1, 1]
    pg.set_config(num_threads=None)
    for threads in (1, 2, 3, 10**6):
        pg.max_pool2d_with_indices_backward(grad, shape, indices, 2, num_threads=threads)
        assert numba.get_num_threads() == before
    bad = np.full(indices.shape, 99)
    with pytest.raises(pg.PoolGradIndexError):
        pg.max_pool2d_with_indices_backward(grad, shape, bad, 2, num_threads=3)
    assert numba.get_num_threads() == before
    most = numba.config.NUMBA_NUM_THREADS
    assert pg.make_plan(cases.MAX2D, input_shape=shape, kernel_size=2, num_threads=10**6).problem.num_threads == most
    for bad_count, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="num_threads"):
            pg.max_pool2d_with_indices_backward(grad, shape, indices, 2, num_threads=bad_count)
        with pytest.raises(kind, match="num_threads"):
            pg.set_config(num_threads=bad_count)


@pytest.mark.trap("T40")
def test_t40_four_threads_make_the_first_call_at_once(tmp_path):
    python("""
import threading
import numpy as np, poolgrad_numba as pg
shape = (4, 64, 32, 32)
grad, indices = np.ones((4, 64, 16, 16), np.float32), np.zeros((4, 64, 16, 16), np.int64)
barrier, results = threading.Barrier(4), []
def first():
    barrier.wait()
    results.append(pg.max_pool2d_with_indices_backward(grad, shape, indices, 2))
threads = [threading.Thread(target=first) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(results) == 4
for r in results:
    assert (r[:, :, 0, 0] == 256).all() and r.sum() == grad.sum()
""", NUMBA_CACHE_DIR=str(tmp_path))  # fmt: skip


@pytest.mark.trap("T42")
def test_t42_ties_give_the_first_cell():
    windows = [forward.sliding_axis(4, kernel=2, stride=2, padding=0)] * 2
    values, indices = forward.max_pool(np.zeros((1, 4, 4), F4), windows)
    assert not values.any()
    assert indices.ravel().tolist() == [0, 2, 8, 10]
    assert np.array_equal(indices, reference.max_pool_indices(np.zeros((1, 4, 4)), 2))


@pytest.mark.trap("T43")
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_t43_nan_wins_and_minus_infinity_is_a_value(kernel):
    windows = [forward.sliding_axis(6, kernel=kernel, stride=1, padding=kernel // 2)] * 2
    x = np.random.default_rng(0).choice(F4([np.nan, -np.inf, np.inf, 0, 1]), (50, 6, 6), p=[0.1, 0.5, 0.1, 0.2, 0.1])
    x[0] = -np.inf
    x[1] = np.nan
    values, indices = forward.max_pool(x, windows)
    assert np.array_equal(indices, reference.max_pool_indices(x, kernel, 1, kernel // 2))
    named = np.take_along_axis(x.reshape(50, -1), indices.reshape(50, -1), 1)
    assert np.array_equal(named.reshape(values.shape), values, equal_nan=True)
    gradient = np.ones(indices.shape, F4)
    assert pg.max_pool2d_with_indices_backward(gradient, x.shape, indices, kernel, 1, kernel // 2).sum() == indices.size
    if kernel == 2:
        assert indices[0, 3, 3] == 2 * 6 + 2  # the first cell of a window of -inf alone
        assert indices[1, 3, 3] == 3 * 6 + 3  # the last of one of NaN alone
