"""16-bit conversion, atomic addition and subnormals, in the kernels themselves."""

import platform

import ml_dtypes
import numpy as np
import pytest
from numba import njit, prange

import cases
import poolgrad_numba as pg
from poolgrad_numba.kernels import numeric
from support import algorithms, call, plan_for, same_bits

CONVERSIONS = """
import ml_dtypes
import numpy as np
from numba import njit
from poolgrad_numba.kernels import numeric

@njit
def widen_all(source, target):
    for i in range(source.size):
        target[i] = numeric.widen(source[i])

@njit
def narrow_all(source, target):
    for i in range(source.size):
        target[i] = numeric.narrow(source[i], target)

def same(a, b):
    bits = np.dtype(f"u{a.itemsize}")
    return bool(np.all((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))))

def check():
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype, carrier in ((np.float16, np.uint16), (ml_dtypes.bfloat16, np.int16)):
        values = patterns.view(dtype)
        wide = np.empty(values.size, np.float32)
        widen_all(values.view(carrier), wide)
        assert same(wide, values.astype(np.float32)), dtype
        # The values themselves, ties halfway between neighbours, and their neighbours; overflow; random bits.
        random = np.random.default_rng(0).integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
        edges = np.float32([65504, 65519.996, 65520, 65536, 1e38, 3.4e38, -3.4e38, 1e-8, 2.9802322e-8, -0.0,
                            2.980233e-8, 5.9604645e-8, 1e-45, 6.097555e-5, np.inf, -np.inf, np.nan])
        with np.errstate(all="ignore"):
            up = np.nextafter(values, np.array(np.inf, dtype)).astype(np.float64)
            ties = ((values.astype(np.float64) + up) / 2).astype(np.float32)
            source = np.concatenate([wide, ties, np.nextafter(ties, np.float32(np.inf)),
                                     np.nextafter(ties, np.float32(-np.inf)), random, edges])
            want = source.astype(dtype)
        got = np.empty(source.size, carrier)
        narrow_all(source, got)
        assert same(got.view(dtype), want), dtype
"""  # fmt: skip


@pytest.mark.trap("T30")
def test_t30_conversions_on_this_machine():
    space = {}
    exec(CONVERSIONS, space)  # noqa: S102
    space["check"]()


def test_the_integer_form_is_what_the_hardware_gives():
    """Both forms of the half conversion, side by side, where this machine has both."""

    @njit
    def both(patterns, hardware, integer):
        for i in range(patterns.size):
            hardware[i] = numeric.widen(patterns[i])
            integer[i] = numeric._half_to_float_integer(patterns[i])

    patterns = np.arange(65536, dtype=np.uint16)
    hardware, integer = np.empty(65536, np.float32), np.empty(65536, np.float32)
    both(patterns, hardware, integer)
    assert same_bits(hardware, integer)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_atomic_additions_are_not_lost(dtype):
    @njit(parallel=True)
    def collide(cells, times):
        for worker in prange(8):
            for i in range(times):
                numeric.atomic_add(cells, np.uint64((worker + i) % 3), cells.dtype.type(1))

    cells = np.zeros(3, dtype)
    collide(cells, 100_000)
    assert cells.sum() == 800_000


def test_atomic_scatter_loses_nothing_where_all_threads_collide():
    case = cases.Case("collide", cases.ADAPTIVE2D, (1, 1, 3), output_size=(1000, 1000))
    grad = np.ones(case.output_shape, np.float32)
    indices = np.arange(grad.size).reshape(grad.shape) % 3
    plan = plan_for(case, algorithm="atomic_scatter", num_threads=8)
    assert plan.run(grad, indices).ravel().tolist() == [333_334, 333_333, 333_333]


# -- subnormals ----------------------------------------------------------------------------------------------------

FLUSH = {"x86_64": 0x8040, "AMD64": 0x8040, "aarch64": 1 << 24, "arm64": 1 << 24}.get(platform.machine(), 0)
needs_flush = pytest.mark.skipif(not FLUSH, reason="no way to flush subnormals to zero on this architecture")


@njit
def set_mode(mode):
    numeric.leave_ieee_mode(mode)


@njit
def get_mode():
    mode = numeric.enter_ieee_mode()
    numeric.leave_ieee_mode(mode)
    return mode


@pytest.fixture
def flushing():
    """Make the calling thread flush subnormals to zero, as ``torch.set_flush_denormal(True)`` does."""

    @njit
    def halve(x):
        return x * np.float32(0.5)

    normal = get_mode()
    set_mode(np.uint64(normal | FLUSH))
    assert halve(np.float32(1e-38)) == 0, "the thread flushes"
    yield
    assert get_mode() & FLUSH == FLUSH, "the caller's mode is as it was"
    set_mode(np.uint64(normal))


@needs_flush
@pytest.mark.trap("T29")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_t29_subnormals_are_kept_whatever_the_caller_flushes(flushing, dtype, threads):
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    shape = (1, 8, 64, 64)
    indices = np.tile(np.arange(0, 64 * 64, 4), (1, 8, 1)).reshape(1, 8, 32, 32)
    grad = np.full((1, 8, 32, 32), 5, bits).view(dtype)  # 5 times the least subnormal
    for name in algorithms(cases.MAX2D, deterministic=True):
        plan = pg.make_plan(
            cases.MAX2D,
            input_shape=shape,
            dtype=dtype,
            kernel_size=2,
            deterministic=True,
            num_threads=threads,
            algorithm=name,
        )
        got = plan.run(grad, indices).view(bits).reshape(8, -1)
        assert (got[:, ::4] == 5).all()
        assert np.count_nonzero(got) == grad.size
    for name in algorithms(cases.AVG3D, deterministic=True):
        plan = pg.make_plan(
            cases.AVG3D, input_shape=(8, 1, 64, 64), dtype=dtype, kernel_size=(1, 2, 2), divisor_override=1,
            deterministic=True, num_threads=threads, algorithm=name,
        )  # fmt: skip
        assert (plan.run(grad.reshape(8, 1, 32, 32)).view(bits) == 5).all()


@needs_flush
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_callers_rounding_does_not_matter(threads):
    """Rounding upward in the calling thread alone once gave half of the planes other bits than the rest."""

    upward = 0x4000 if FLUSH == 0x8040 else 1 << 22
    case = cases.Case("rounding", cases.ADAPTIVE2D, (1, 8, 8, 8), output_size=(9, 9))
    grad, indices = np.full(case.output_shape, np.float32(0.1)), np.zeros(case.output_shape, np.int64)
    for name in algorithms(case.operator, deterministic=True):
        plan = plan_for(case, deterministic=True, num_threads=threads, algorithm=name)
        want = plan.run(grad, indices)
        normal = get_mode()
        set_mode(np.uint64(normal | upward))
        try:
            got = plan.run(grad, indices)
            assert get_mode() & upward == upward
        finally:
            set_mode(np.uint64(normal))
        assert same_bits(got, want)


@needs_flush
@pytest.mark.trap("T29")
def test_t29_the_mode_survives_an_error(flushing):
    with pytest.raises(pg.PoolGradIndexError):
        pg.adaptive_max_pool2d_backward(np.ones((1, 1, 1), np.float32), (1, 1, 1), np.full((1, 1, 1), 5))
    case = next(c for c in cases.SMALL_CASES if c.name == "avg_one_plane")
    assert plan_for(case).workspace_size > 0
    call(case, case.gradient(), num_threads=3)
