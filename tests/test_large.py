"""Sizes around 2**31: totals, planes, axes and window parameters; sums are known by construction.

The slow tests run in one block of 13.5 GiB, which all of them share: results, scratch and what is packed are cut out
of it. The others plan such sizes, and allocate nothing.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

import cases
import poolgrad_numba as pg
from poolgrad_numba import aclnn
from support import algorithms

EDGE = 2**31 - 1  # a prime: only a single row has so many cells
SQUARE = 46_341  # whose square lies just above 2**31
GIB = 2**30
BLOCK = 27 * GIB // 2
F2, F4, I4, I8 = np.float16, np.float32, np.int32, np.int64
BOTH_MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


def repeated(value, shape, dtype):
    """An array of one value, which takes no memory."""
    return np.broadcast_to(np.dtype(dtype).type(value), shape)


def bits(array):
    """The same cells as integers, which NumPy compares several times as fast as float16."""
    return array.view(f"u{array.itemsize}")


def all_equal(array, value):
    cells = bits(array)
    return cells.min() == cells.max() == bits(np.array([value], array.dtype))[0]


# -- plans, in no time -------------------------------------------------------------------------------------------


def windows(signature, size):
    """Parameters of make_plan for about 10 outputs on each axis."""
    if signature.adaptive:
        return {"output_size": tuple(min(n, 10) for n in size)}
    return {"kernel_size": tuple(max(n // 10, 1) for n in size)}


def scratch(plan):
    """What a plan's candidate must ask for at least, in bytes: counted anew, with Python's integers."""
    problem = plan.problem
    planes, cells, outputs, width = problem.planes, problem.cells, problem.outputs, problem.accumulator.itemsize
    narrow = problem.dtype != problem.accumulator
    return {
        "plane_scatter": plan.workers * cells * width if narrow else 0,
        "interleaved_scatter": plan.workers * planes * cells * width if narrow else 0,
        "atomic_scatter": planes * cells * width if narrow else 0,
        "tile_reduce": 2 * 8 * planes * -(-outputs // max(128, min(-(-outputs // 4096), 16_384))),
        "plane_stream": 2 * plan.workers * cells * width,
        "sweep": 2 * 8 * planes * -(-outputs // max(128, min(-(-outputs // 4096), 16_384))),
        "gather": 0,  # bricks of a bounded size, whatever the plane's
        "spread": 0,
        "add_rows": 0,
    }[plan.algorithm]


@BOTH_MODES
@pytest.mark.parametrize("operator", sorted(pg.OPS))
@pytest.mark.parametrize("total", [EDGE, 2**31, 2**32 + 1, 2**48, 2**60 - 1], ids=str)
def test_plans_of_huge_totals(operator, total, deterministic):
    signature = pg.OPS[operator].signature
    for size, dtype, algorithm in itertools.product(
        ((1,) * (signature.spatial - 1) + (total,), (2,) * (signature.spatial - 1) + (5,)),
        (F2, F4),
        algorithms(operator, deterministic=deterministic),
    ):
        planes = total // math.prod(size)
        plan = pg.make_plan(
            operator, input_shape=(1, planes, *size), dtype=dtype, deterministic=deterministic, num_threads=8,
            algorithm=algorithm, **windows(signature, [min(n, 10 * EDGE) for n in size]),
        )  # fmt: skip
        assert plan.problem.planes * plan.problem.cells == planes * math.prod(size)
        assert 1 <= plan.workers <= 8
        assert plan.workers == min(8, planes) or not algorithm.startswith("plane")
        least = scratch(plan)
        most = least + (10 if algorithm == "sweep" else 5) * 2**20  # room for tiles, windows and rounding
        assert least <= plan.workspace_size < most, algorithm


@pytest.mark.parametrize("operator", sorted(pg.OPS))
@pytest.mark.parametrize("total", [2**60, 2**62, 2**63, 2**64 + 1], ids=str)
def test_totals_that_no_memory_holds_are_refused(operator, total):
    spatial = pg.OPS[operator].signature.spatial
    for shape in ((1, 1, *(1,) * (spatial - 1), total), (total, *(1,) * spatial)):
        with pytest.raises(pg.PoolGradValueError, match="more cells than memory can address"):
            pg.make_plan(operator, input_shape=shape, **windows(pg.OPS[operator].signature, (1,) * spatial))


def test_window_parameters_up_to_the_largest():
    row = (1, 1, 1, EDGE)
    full = {"kernel_size": (1, 1, EDGE), "stride": (1, 1, EDGE), "padding": (0, 0, EDGE // 2)}
    for size, floor, ceil in ((EDGE, 1, 2), (2**31, 2, 2), (2**40, 513, 513)):
        for ceil_mode, outputs in ((False, floor), (True, ceil)):
            plan = pg.make_plan(cases.AVG3D, input_shape=(1, 1, 1, size), **full, ceil_mode=ceil_mode)
            assert plan.output_shape == (1, 1, 1, outputs)
    assert pg.make_plan(cases.AVG3D, input_shape=row, kernel_size=1).output_shape == row
    dilated = {"kernel_size": (1, 2), "dilation": (1, EDGE), "stride": 1, "padding": (0, 2**30)}
    assert pg.make_plan(cases.MAX2D, input_shape=(1, 1, 1), **dilated).output_shape == (1, 1, 2)
    for name in ("kernel_size", "stride", "padding"):
        with pytest.raises(pg.PoolGradValueError, match=f"{name}: got 2147483648, wanted at most 2147483647"):
            pg.make_plan(cases.AVG3D, input_shape=row, **{"kernel_size": 1, name: (1, 1, 2**31)})


def first_phase(name, grad, result):
    """Phase 1 of the operator of that name; windows, where it has them, are of one cell."""
    indices = repeated(0, grad.shape, I4)
    arguments = {
        "aclnnMaxPool2dWithIndicesBackward": (grad, result, indices, [1], [1], [0], [1], False, result),
        "aclnnAvgPool3dBackward": (grad, result, [1], [1], [0], False, True, 0, result),
    }.get(name, (grad, result, indices, result))
    return getattr(aclnn, name + "GetWorkspaceSize")(*arguments)


ACLNN = [
    ("aclnnMaxPool2dWithIndicesBackward", F4, (SQUARE, SQUARE), (1, 2**31)),
    ("aclnnAdaptiveMaxPool2dBackward", F2, (SQUARE, SQUARE), (2**16, 2**15)),
    ("aclnnAdaptiveMaxPool3dBackward", F2, (1291, 1290, 1290), (2**30, 2, 1)),
    ("aclnnAvgPool3dBackward", F2, (1, SQUARE, SQUARE), (1, 1, 2**31)),
]


@pytest.mark.parametrize(("name", "dtype", "above", "power"), ACLNN)
def test_planes_above_the_limit_are_refused_by_the_accelerators_face(name, dtype, above, power):
    for size in (above, power):
        tensor = repeated(0, (1, *size), dtype)
        got = first_phase(name, tensor, tensor)
        assert got == (0, None, aclnn.ACLNN_ERR_PARAM_INVALID)
        assert f"{math.prod(size)}, wanted at most {EDGE}" in aclnn.aclGetRecentErrMsg()


@pytest.mark.parametrize(("name", "dtype"), [row[:2] for row in ACLNN])
def test_planes_at_the_limit_are_accepted_by_the_accelerators_face(name, dtype, tmp_path):
    shape = (1, *(1,) * (2 if "3d" in name else 1), EDGE)
    with Path(tmp_path / "sparse").open("wb") as file:
        file.truncate(EDGE * np.dtype(dtype).itemsize)
    result = np.memmap(tmp_path / "sparse", dtype, "r+", shape=shape)
    grad = repeated(0, shape if "Adaptive" not in name else (*shape[:-1], 3), dtype)
    size, executor, status = first_phase(name, grad, result)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    assert executor.workspace_size == size >= 0
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0


# -- runs --------------------------------------------------------------------------------------------------------


INDEXED = [
    (True, "plane_stream"),
    (True, "sweep"),
    (True, "plane_scatter"),
    (True, "tile_reduce"),
    (False, "atomic_scatter"),
]
GATHERS = [(True, "gather", 1), (True, "gather", 2), (True, "add_rows", 2)]
SPREADS = [(False, "spread", 1), (False, "spread", 2)]


class Arena:
    """A block of memory, of which a test takes what it needs: its pages are made once for all tests."""

    def __init__(self):
        self.block = np.empty(BLOCK, np.uint8)
        self.used = 0

    def take(self, shape, dtype):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        start, self.used = self.used, -(-(self.used + size) // 64) * 64
        assert self.used <= BLOCK, f"{self.used / GIB:.1f} GiB"
        return self.block[start : start + size].view(dtype).reshape(shape)

    def rest(self):
        return self.block[self.used :]


@pytest.fixture(scope="module")
def block():
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except OSError:
        free = BLOCK + GIB
    if free < BLOCK + GIB:
        pytest.skip(f"{free / GIB:.1f} GiB of memory are free, and {BLOCK / GIB + 1:.1f} are needed")
    return Arena()


@pytest.fixture
def arena(block):
    block.used = 0
    return block


def planned_run(arena, operator, grad, indices, out, **options):
    """Run over a result of other numbers, with scratch from the arena; the plan."""
    index_dtype = None if indices is None else indices.dtype
    plan = pg.make_plan(operator, input_shape=out.shape, dtype=out.dtype, index_dtype=index_dtype, **options)
    out.fill(77)
    assert plan.run(grad, indices, out=out, workspace=arena.rest()) is out
    return plan


@pytest.mark.slow
@pytest.mark.trap("T15")
@pytest.mark.parametrize("operator", sorted(pg.OPS))
def test_above_two_to_the_31_cells_in_several_planes(operator, arena):
    signature = pg.OPS[operator].signature
    size = {1: (10**6,), 2: (1000, 1000), 3: (100, 100, 100)}[signature.spatial]
    shape = (70, 32, *size)
    assert math.prod(shape) > 2**31
    out = arena.take(shape, F2)
    for deterministic, num_threads in itertools.product((False, True), (1, 2)):
        options = {"deterministic": deterministic, "num_threads": num_threads}
        if signature.indexed:  # of each plane's outputs, half point to its first cell and half to its last
            options |= windows(signature, size)
            outputs = (70, 32, *(10,) * signature.spatial)
            half = math.prod(outputs[2:]) // 2
            indices = np.broadcast_to(np.repeat([0, 10**6 - 1], half).astype(I4).reshape(outputs[2:]), outputs)
            grad = np.ones(outputs, F2)
            grad[-1, -1] = 0.25
            planned_run(arena, operator, grad, indices, out, **options)
            flat = out.reshape(2240, 10**6)
            assert (flat[:-1, [0, -1]] == half).all()
            assert flat[-1, 0] == flat[-1, -1] == half / 4
            assert np.count_nonzero(bits(out)) == 2 * 2240
        else:  # a window's gradient of 2**spatial is 1 for each of its cells
            halves = tuple(n // 2 for n in size)
            window = {"output_size": halves} if signature.adaptive else {"kernel_size": 2}
            grad = np.full((70, 32, *halves), 2.0**signature.spatial, F2)
            grad[-1, -1] *= 3
            planned_run(arena, operator, grad, None, out, **options, **window)
            assert all_equal(out.reshape(2240, 10**6)[:-1], 1)
            assert all_equal(out[-1, -1], 3)


@pytest.mark.slow
def test_above_two_to_the_31_outputs(arena):
    """An adaptive output larger than its input: 2 planes of 2**30 outputs and more, 4096 cells each."""
    outputs = (1, 2, 2**15, 2**15 + 1)
    grad, indices = arena.take(outputs, F2), arena.take(outputs, I4)
    assert grad.size > 2**31
    grad.fill(2**-10)
    indices.reshape(-1, 4096)[...] = np.arange(4096)  # goes on from one plane to the next
    out = arena.take((1, 2, 64, 64), F2)
    for deterministic, algorithm in INDEXED:
        options = {"deterministic": deterministic, "num_threads": 2, "output_size": outputs[2:]}
        planned_run(arena, cases.ADAPTIVE2D, grad, indices, out, algorithm=algorithm, **options)
        assert all_equal(out, grad.size // 8192 / 1024), algorithm
    indices[-1, -1, -1, -1] = 4096
    with pytest.raises(pg.PoolGradIndexError, match=r"got 4096 at position \(0, 1, 32767, 32768\)"):
        planned_run(arena, cases.ADAPTIVE2D, grad, indices, out, **options)


PLANES = [
    pytest.param(cases.MAX2D, (1, EDGE), {"kernel_size": (1, EDGE // 4)}, (1, 4), id="row"),
    pytest.param(cases.ADAPTIVE2D, (SQUARE, SQUARE), {"output_size": 2}, (2, 2), id="square"),
    pytest.param(cases.ADAPTIVE3D, (1291, 1290, 1290), {"output_size": (1, 4, 1)}, (1, 4, 1), id="cube"),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F2, F4])
@pytest.mark.parametrize(("operator", "size", "window", "outputs"), PLANES)
def test_one_plane_around_two_to_the_31_cells(operator, size, window, outputs, dtype, arena):
    """Indices of the first, the middle and twice the last cell, or of the last that int32 can tell."""
    out = arena.take((1, *size), dtype)
    grad = np.array([1, 2, 4, 8], dtype).reshape(1, *outputs)
    index_dtypes = itertools.cycle([I4, I8] if dtype == F2 else [I8, I4])
    for deterministic, algorithm in INDEXED:
        index_dtype = next(index_dtypes)
        last = min(out.size - 1, np.iinfo(index_dtype).max)
        indices = np.array([0, out.size // 2, last, last], index_dtype).reshape(grad.shape)
        options = {"deterministic": deterministic, "algorithm": algorithm, "num_threads": 2, **window}
        planned_run(arena, operator, grad, indices, out, **options)
        assert out.reshape(-1)[[0, out.size // 2, last]].tolist() == [1, 2, 12], algorithm
        assert np.count_nonzero(bits(out)) == 3, algorithm
    for index_dtype in (I8, *[I4] * (out.size == EDGE)):
        bad = np.array([0, 1, out.size, 2], index_dtype).reshape(grad.shape)
        with pytest.raises(pg.PoolGradIndexError, match=f"got {out.size} at position .* wanted 0 to {out.size - 1}"):
            planned_run(arena, operator, grad, bad, out, **options)


@pytest.mark.slow
def test_a_plane_of_the_limit_on_a_stream(arena):
    result = arena.take((1, 1, EDGE), F2)
    result.fill(77)
    grad = np.array([[[1, 2, 4]]], F2)
    stream, _ = aclnn.aclrtCreateStream()
    for last, status in ((EDGE - 1, aclnn.ACLNN_SUCCESS), (EDGE, aclnn.ACLNN_ERR_PARAM_INVALID)):
        indices = np.array([[[0, last, last]]], I4)
        size, executor, first = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(grad, result, indices, result)
        assert first == 0
        assert aclnn.aclnnAdaptiveMaxPool2dBackward(arena.rest(), size, executor, stream) == 0
        assert aclnn.aclrtSynchronizeStream(stream) == status
        if not status:
            assert result[0, 0, [0, -1]].tolist() == [1, 6]
            assert np.count_nonzero(bits(result)) == 2
    assert aclnn.aclrtDestroyStream(stream) == 0


def average(arena, out, grad, runs, expected, **window):
    """Run candidates on one plane; ``expected`` holds (first cell, past the last, value) along the flat result."""
    assert expected[0][0] == 0
    assert expected[-1][1] == out.size
    for deterministic, algorithm, num_threads in runs:
        options = {"deterministic": deterministic, "algorithm": algorithm, "num_threads": num_threads}
        planned_run(arena, cases.AVG3D, grad, None, out, **options, **window)
        for start, stop, value in expected:
            assert all_equal(out.reshape(-1)[start:stop], value), (algorithm, start, stop)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F2, F4])
def test_windows_as_long_as_a_row_of_the_limit(dtype, arena):
    out = arena.take((1, 1, 1, EDGE), dtype)
    window = {"kernel_size": (1, 1, EDGE), "stride": 1, "padding": (0, 0, 1), "divisor_override": 1}
    expected = [(0, 1, 3), (1, EDGE - 1, 7), (EDGE - 1, EDGE, 6)]
    average(arena, out, np.array([[[[1, 2, 4]]]], dtype), GATHERS, expected, **window)


@pytest.mark.slow
def test_windows_and_strides_of_the_limit_on_a_longer_row(arena):
    width = 2**31 + 5
    out = arena.take((1, 1, 1, width), F2)
    window = {"kernel_size": (1, 1, EDGE), "stride": 3, "divisor_override": -1}
    ends = (0, 3, 6, EDGE, EDGE + 3, width)
    expected = [(*ends[i : i + 2], value) for i, value in enumerate((-1, -3, -7, -6, -4))]
    average(arena, out, np.array([[[[1, 2, 4]]]], F2), GATHERS, expected, **window)
    expected = [(0, 1, 1), (1, EDGE, 0), (EDGE, EDGE + 1, 2), (EDGE + 1, width, 0)]
    average(arena, out, np.array([[[[1, 2]]]], F2), GATHERS[1:], expected, kernel_size=1, stride=(1, 1, EDGE))


@pytest.mark.slow
def test_many_windows_along_a_row_of_the_limit(arena):
    """2**29 windows of 4 cells, of which the last hangs over and divides by 3."""
    out = arena.take((1, 1, 1, EDGE), F2)
    grad = repeated(12, (1, 1, 1, 2**29), F2)
    expected = [(0, EDGE - 3, 3), (EDGE - 3, EDGE, 4)]
    average(arena, out, grad, GATHERS, expected, kernel_size=(1, 1, 4), ceil_mode=True)


@pytest.mark.slow
def test_many_overlapping_windows_along_a_row_of_the_limit(arena):
    """2**30 windows of 3 cells every 2: odd cells lie in two."""
    out = arena.take((1, 1, 1, EDGE), F2)
    window = {"kernel_size": (1, 1, 3), "stride": (1, 1, 2), "padding": (0, 0, 1), "algorithm": "gather"}
    planned_run(arena, cases.AVG3D, repeated(3, (1, 1, 1, 2**30), F2), None, out, num_threads=2, **window)
    assert all_equal(out[..., ::2], 1)
    assert all_equal(out[..., 1::2], 2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1], ids=["depth", "height"])
def test_planes_above_the_limit_by_every_candidate(axis, arena):
    """Three windows as long as depth or height, which overlap in all but its ends; the last column is in none."""
    size, kernel, outputs = ([1, 1, width] for width in (SQUARE, 2, SQUARE // 2))
    size[axis], kernel[axis], outputs[axis] = SQUARE, SQUARE, 3
    padding = [int(i == axis) for i in range(3)]
    out = arena.take((1, *size), F2)
    grad = np.empty((1, *outputs), F2)
    grad[...] = np.array([2, 4, 8], F2).reshape([3 if i == axis else 1 for i in range(3)])
    window = {"kernel_size": kernel, "stride": (1, 1, 2), "padding": padding, "divisor_override": 2}
    rows = out.reshape(SQUARE, SQUARE)
    for deterministic, algorithm, num_threads in GATHERS + SPREADS:
        options = {"deterministic": deterministic, "algorithm": algorithm, "num_threads": num_threads}
        planned_run(arena, cases.AVG3D, grad, None, out, **options, **window)
        for part, value in ((rows[0], 3), (rows[1:-1], 7), (rows[-1], 6)):
            assert all_equal(part[..., :-1], value), algorithm
            assert all_equal(part[..., -1], 0), algorithm
