"""Results of the four operators: every case, mode, candidate, dtype and layout, against the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import poolgrad_numba as pg
import reference
from poolgrad_numba.launch import launch
from support import THREADS, algorithms, call, forced_runs, plan_for, same_bits

BOTH_MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
EACH_CASE = pytest.mark.parametrize("case", cases.SMALL_CASES, ids=lambda case: case.name)
EACH_DTYPE = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)


def expected(case, grad, indices=None):
    return reference.apply(case.operator, grad, case.input_shape, indices, **case.parameters)


def scaled(case, grad):
    """Integers times the window's cells, where that makes every division exact."""
    if case.indexed or case.parameters.get("ceil_mode") or not case.parameters.get("count_include_pad", True):
        return grad
    divisor = case.parameters.get("divisor_override") or np.prod(reference.as_axes(case.parameters["kernel_size"], 3))
    return (grad.astype(np.float32) * np.float32(divisor)).astype(grad.dtype)


@EACH_CASE
@EACH_DTYPE
@BOTH_MODES
def test_integers_come_out_exactly(case, dtype, deterministic):
    grad = scaled(case, case.gradient(dtype))
    for index_dtype in cases.INDEX_DTYPES if case.indexed else (None,):
        for indices in {0: case.indices, 1: case.wild_indices}.values() if case.indexed else (case.indices,):
            index = indices(index_dtype) if case.indexed else None
            result = call(case, grad, index, deterministic=deterministic)
            assert result.dtype == dtype
            assert result.shape == case.input_shape
            assert result.flags.c_contiguous
            if not deterministic and scaled(case, grad) is grad and not case.indexed:
                assert reference.within_bound(result, case.operator, grad, case.input_shape, index, **case.parameters)
            else:
                assert np.array_equal(result, expected(case, grad, index))


@EACH_CASE
@EACH_DTYPE
def test_deterministic_equals_the_canonical_order_bit_for_bit(case, dtype):
    grad = case.rough_gradient(dtype)
    for make in (case.indices, case.wild_indices):
        indices = make()
        want = expected(case, grad, indices)
        assert same_bits(call(case, grad, indices, deterministic=True), want)
        for name in algorithms(case.operator, deterministic=True):
            for threads in THREADS:
                plan = plan_for(case, dtype, deterministic=True, num_threads=threads, algorithm=name)
                assert plan.algorithm == name
                assert same_bits(plan.run(grad, indices), want), (name, threads)


@EACH_CASE
@EACH_DTYPE
def test_fast_holds_the_error_bound(case, dtype):
    grad = case.rough_gradient(dtype)
    for make in (case.indices, case.wild_indices):
        indices = make(np.int32)
        for name in algorithms(case.operator, deterministic=False):
            for threads in (1, 3):
                plan = plan_for(case, dtype, np.int32, deterministic=False, num_threads=threads, algorithm=name)
                assert plan.algorithm == name
                result = plan.run(grad, indices)
                assert reference.within_bound(result, case.operator, grad, case.input_shape, indices, **case.parameters)


@pytest.mark.parametrize(("operator", "deterministic", "name"), forced_runs())
def test_every_candidate_splits_one_plane(operator, deterministic, name):
    """On one plane, candidates that split it use every thread; those that own planes use one."""
    case = next(c for c in cases.SMALL_CASES if c.operator == operator and "one_plane" in c.name)
    plan = plan_for(case, deterministic=deterministic, num_threads=3, algorithm=name)
    pieces = 1 if name.startswith(("plane", "interleaved")) else 3
    grad = case.gradient()
    if name == "tile_reduce":
        pieces = min(3, -(-int(np.prod(case.input_shape[-case.spatial :])) // 4096))
        assert pieces > 1
    assert plan.workers == pieces
    assert reference.within_bound(
        plan.run(grad, case.indices()), operator, grad, case.input_shape, case.indices(), **case.parameters
    )


def layouts(array):
    """The same values in other layouts."""
    axes = range(array.ndim)
    channels = 0 if array.ndim == 3 else 1
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(array, channels, -1)), -1, channels)
    wide = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
    sliced = wide[tuple(slice(None, None, 2) for _ in axes)]
    sliced[...] = array
    reversed_ = np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    frozen = array.copy()
    frozen.flags.writeable = False
    bytes_ = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = bytes_[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    yield "channels-last", last
    yield "fortran", np.asfortranarray(array)
    yield "sliced", sliced
    yield "reversed", reversed_
    yield "read-only", frozen
    yield "unaligned", unaligned
    if array.dtype != reference.BFLOAT16:
        yield "byte-swapped", array.astype(array.dtype.newbyteorder())


LAYOUT_CASES = [
    case
    for case in cases.SMALL_CASES
    if case.name in ("max_asymmetric", "max_unbatched", "adaptive2d_ragged", "adaptive3d_ragged", "avg_asymmetric")
]


@pytest.mark.trap("T22")
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
@EACH_DTYPE
@BOTH_MODES
def test_layouts_give_the_same_bytes(case, dtype, deterministic):
    grad, indices = case.rough_gradient(dtype), case.indices()
    packed = call(case, grad, indices, deterministic=deterministic)
    before = grad.copy()
    for name, other in layouts(grad):
        assert same_bits(call(case, other, indices, deterministic=deterministic), packed), name
    for name, other in layouts(indices) if case.indexed else ():
        assert same_bits(call(case, grad, other, deterministic=deterministic), packed), name
    for name, out in layouts(np.full(case.input_shape, 7, dtype)):
        if name != "read-only":
            assert call(case, grad, indices, out=out, deterministic=deterministic) is out
            assert same_bits(out.astype(dtype), packed), name
    assert same_bits(grad, before)


@pytest.mark.trap("T22")
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_broadcast_operands(case):
    one = np.float32(3)
    grad = np.broadcast_to(one, case.output_shape)
    indices = np.broadcast_to(np.int64(2), case.output_shape) if case.indexed else None
    packed_indices = None if indices is None else np.ascontiguousarray(indices)
    assert same_bits(call(case, grad, indices), call(case, np.ascontiguousarray(grad), packed_indices))


@BOTH_MODES
def test_index_dtypes_give_equal_bytes(deterministic):
    for case in cases.SMALL_CASES:
        if case.indexed:
            grad = case.rough_gradient()
            narrow = call(case, grad, case.indices(np.int32), deterministic=deterministic)
            assert same_bits(narrow, call(case, grad, case.indices(np.int64), deterministic=deterministic))


@BOTH_MODES
@EACH_CASE
def test_batch_neighbours_do_not_matter(case, deterministic):
    grad, indices = case.rough_gradient(), case.indices()
    whole = call(case, grad, indices, deterministic=deterministic)
    for n in range(case.input_shape[0]):
        shape = (1, *case.input_shape[1:])
        part = getattr(pg, case.operator)(
            grad[n : n + 1],
            shape,
            *(() if indices is None else (indices[n : n + 1],)),
            **case.parameters,
            deterministic=True,
        )
        assert np.allclose(part, whole[n : n + 1], rtol=1e-5, atol=1e-5)
        if deterministic:
            assert same_bits(part, whole[n : n + 1])


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (0, 4, 5)])
@BOTH_MODES
def test_empty_batch_or_channels(shape, deterministic):
    empty = (*shape[:-2], 2, 2)
    grad, indices = np.empty(empty, np.float32), np.empty(empty, np.int64)
    assert pg.max_pool2d_with_indices_backward(grad, shape, indices, (2, 2), deterministic=deterministic).shape == shape
    assert pg.adaptive_max_pool2d_backward(grad, shape, indices, deterministic=deterministic).shape == shape
    deep, deep_grad = (*shape[:-2], 4, *shape[-2:]), np.empty((*shape[:-2], 2, 2, 2), np.float32)
    assert pg.avg_pool3d_backward(deep_grad, deep, 2, deterministic=deterministic).shape == deep
    deep_indices = np.empty(deep_grad.shape, np.int32)
    assert pg.adaptive_max_pool3d_backward(deep_grad, deep, deep_indices, deterministic=deterministic).shape == deep


@EACH_DTYPE
@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (2, 0)])
@BOTH_MODES
def test_adaptive_output_of_size_zero_gives_zeros(dtype, sizes, deterministic):
    for name in algorithms(cases.ADAPTIVE2D, deterministic=deterministic):
        plan = pg.make_plan(
            cases.ADAPTIVE2D,
            input_shape=(2, 3, 4, 5),
            dtype=dtype,
            output_size=sizes,
            deterministic=deterministic,
            algorithm=name,
        )
        result = plan.run(np.empty((2, 3, *sizes), dtype), np.empty((2, 3, *sizes), np.int64))
        assert result.shape == (2, 3, 4, 5)
        assert not result.any()


# -- generated cases -----------------------------------------------------------------------------------------------


def spatial_axes(operator):
    return pg.OPS[operator].signature.spatial


@st.composite
def problems(draw, operator):
    """An operator's arguments: shapes, parameters, dtypes, strides, integer values and legal indices of any kind."""
    spatial = spatial_axes(operator)
    lead = draw(st.sampled_from([(1,), (3,), (1, 1), (2, 3), (4, 1)]))
    size = tuple(draw(st.integers(1, 14)) for _ in range(spatial))
    parameters = {}
    if operator.startswith("adaptive"):
        output = tuple(draw(st.integers(1, 16)) for _ in range(spatial))
    else:
        kernel = tuple(draw(st.integers(1, 6)) for _ in range(spatial))
        dilation = tuple(draw(st.integers(1, 3)) for _ in range(spatial)) if operator == cases.MAX2D else (1,) * spatial
        padding = tuple(draw(st.integers(0, (d * (k - 1) + 1) // 2)) for k, d in zip(kernel, dilation, strict=True))
        stride = draw(st.none() | st.tuples(*[st.integers(1, 7)] * spatial))
        ceil_mode = draw(st.booleans())
        output = tuple(
            reference.pooled_size(*axis, ceil_mode)
            for axis in zip(size, kernel, stride or kernel, padding, dilation, strict=True)
        )
        parameters = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
        if operator == cases.MAX2D:
            parameters["dilation"] = dilation
        else:
            parameters["count_include_pad"] = draw(st.booleans())
            parameters["divisor_override"] = draw(st.none() | st.sampled_from([1, 5, -3]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    dtype = draw(st.sampled_from(cases.DTYPES))
    shape = lead + output
    indices = None
    if "max" in operator:
        spread = draw(st.sampled_from(["anywhere", "one cell", "ascending"]))
        cells = int(np.prod(size))
        indices = rng.integers(0, cells, shape)
        if spread == "one cell":
            indices[...] = rng.integers(0, cells)
        elif spread == "ascending":
            indices = np.sort(indices.reshape(*lead, -1)).reshape(shape)
        indices = indices.astype(draw(st.sampled_from(cases.INDEX_DTYPES)))
    grad = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(dtype)
    grad = draw(st.sampled_from([array for _, array in layouts(grad)]))
    if indices is not None:
        indices = draw(st.sampled_from([array for _, array in layouts(indices)]))
    return lead + size, parameters, grad, indices


@pytest.mark.parametrize("operator", cases.OPERATORS)
@settings(max_examples=150)
@given(data=st.data())
def test_generated_problems(operator, data):
    input_shape, parameters, grad, indices = data.draw(problems(operator))
    operands = (grad, input_shape) if indices is None else (grad, input_shape, indices)
    if min(grad.shape) < 1:
        with pytest.raises(pg.PoolGradValueError):
            getattr(pg, operator)(*operands, **parameters)
        return
    threads = data.draw(st.sampled_from(THREADS))
    deterministic = data.draw(st.booleans())
    name = data.draw(st.sampled_from([None, *algorithms(operator, deterministic=deterministic)]))
    plan = pg.make_plan(
        operator,
        input_shape=input_shape,
        dtype=grad.dtype,
        index_dtype=None if indices is None else indices.dtype,
        deterministic=deterministic,
        num_threads=threads,
        algorithm=name,
        **(parameters or {"output_size": grad.shape[-spatial_axes(operator) :]}),
    )
    result = plan.run(grad, indices)
    grad = grad.astype(grad.dtype.newbyteorder("="))
    if deterministic:
        assert same_bits(result, reference.apply(operator, grad, input_shape, indices, **parameters))
        assert same_bits(result, getattr(pg, operator)(*operands, **parameters, deterministic=True))
    else:
        assert reference.within_bound(result, operator, grad, input_shape, indices, **parameters)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wild_indices_take_a_coarser_split_to_the_same_bits(monkeypatch, dtype):
    """Where every segment reaches every tile, a tile a worker: each output is looked at once a worker."""
    from poolgrad_numba.ops import indexed

    tiles = []

    def recording(kernel, workers, *arrays):
        if kernel.name == "tile_reduce":
            tiles.append(arrays[4])
        return launch(kernel, workers, *arrays)

    monkeypatch.setattr(indexed, "launch", recording)
    case = cases.Case("wild", cases.ADAPTIVE2D, (1, 1, 200, 200), output_size=(60, 60))
    plan = plan_for(case, dtype, deterministic=True, num_threads=2, algorithm="tile_reduce")
    grad, wild = case.rough_gradient(dtype), case.wild_indices()
    tame = np.sort(wild, axis=None).reshape(wild.shape)
    assert same_bits(plan.run(grad, tame), reference.indexed(grad, case.input_shape, tame, 2))
    assert same_bits(plan.run(grad, wild), reference.indexed(grad, case.input_shape, wild, 2))
    assert tiles == [4096, 20_000]


@pytest.mark.parametrize("operator", [name for name in cases.OPERATORS if "max" in name])
@settings(max_examples=100)
@given(data=st.data())
def test_generated_bad_indices(operator, data):
    """However many indices are bad, and however badly, the first one is named and nothing else happens."""
    input_shape, parameters, grad, indices = data.draw(problems(operator))
    if min(grad.shape) < 1:
        return
    cells = int(np.prod(input_shape[-spatial_axes(operator) :]))
    indices = indices.copy()
    limits = np.iinfo(indices.dtype)
    values = st.integers(limits.min, -1) | st.integers(cells, limits.max)
    places = data.draw(st.lists(st.integers(0, indices.size - 1), min_size=1, max_size=5))
    for place in places:
        indices[np.unravel_index(place, indices.shape)] = data.draw(values)
    first = np.unravel_index(min(places), indices.shape)
    before = indices.copy(), grad.copy()
    for deterministic in (False, True):
        with pytest.raises(pg.PoolGradIndexError) as error:
            getattr(pg, operator)(grad, input_shape, indices, **parameters, deterministic=deterministic)
        where = tuple(int(i) for i in first)
        assert f"got {indices[first]} at position {where}, wanted 0 to {cells - 1} " in str(error.value)
    assert np.array_equal(before[0], indices)
    assert np.array_equal(before[1], grad, equal_nan=True)


@pytest.mark.parametrize("case", [c for c in cases.SMALL_CASES if not c.indexed], ids=lambda case: case.name)
@pytest.mark.parametrize("sums", [1, 7, 20])
def test_averages_cross_the_bounds_of_bricks(monkeypatch, case, sums):
    """Bricks as small as a cell: their halos, their rings and what they leave of rows must fit together."""
    from poolgrad_numba import plan
    from poolgrad_numba.ops import averaged

    monkeypatch.setattr(averaged, "_SUMS", sums)
    monkeypatch.setattr(averaged, "_RING", 4 * sums)
    for module, cached in ((averaged, "_numbers"), (plan, "_plan")):  # no plan of such bricks may outlive this test
        monkeypatch.setattr(module, cached, getattr(module, cached).__wrapped__)
    grad = case.rough_gradient()
    for name, workers in (("gather", 1), ("gather", 5), ("spread", 3)):
        got = plan_for(case, algorithm=name, num_threads=workers).run(grad)
        if name == "gather":
            assert same_bits(got, expected(case, grad))
        else:
            assert reference.within_bound(got, case.operator, grad, case.input_shape, **case.parameters)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("kind", ["forward", "one_jumps_back", "wild", "backward"])
def test_a_window_sweeps_over_large_planes(monkeypatch, kind, dtype):
    """Planes of many steps in bands; where an index jumps back, tiles come in, for the same bits."""
    from poolgrad_numba.ops.indexed import Sweep, TileReduce

    rng = np.random.default_rng(len(kind))
    case = cases.Case("", cases.ADAPTIVE2D, (1, 2, 250, 260), output_size=(125, 130))
    corner = np.add.outer(2 * 260 * np.arange(125), 2 * np.arange(130))
    indices = corner + rng.choice([0, 1, 260, 261], case.output_shape)
    if kind == "one_jumps_back":
        indices[0, 1, -1, -1] = 7
    elif kind == "wild":
        indices = case.wild_indices()
    elif kind == "backward":
        indices = indices[..., ::-1, ::-1]
    grad = case.rough_gradient(dtype)
    fallbacks = []
    run = TileReduce.run
    monkeypatch.setattr(TileReduce, "run", lambda *args: fallbacks.append(1) or run(*args))
    for threads in (1, 2, 5):
        plan = plan_for(case, dtype, algorithm="sweep", num_threads=threads)
        bands = Sweep().pieces(plan.problem) // 2
        assert bands == (1 if threads < 3 else threads)
        assert same_bits(plan.run(grad, indices), expected(case, grad, indices))
        assert bool(fallbacks) == (kind != "forward")
        wrong = indices.copy()
        wrong[0, 1, 60, 60] = 250 * 260
        with pytest.raises(pg.PoolGradIndexError, match=r"got 65000 at position \(0, 1, 60, 60\)"):
            plan.run(grad, wrong)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 70, 65, 3), (3, 1, 2, 130, 2), (5, 67, 66), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_turned_operands_are_packed_by_threads(monkeypatch, shape, dtype):
    """Channels last, or any block of axes behind another; other strides go through NumPy."""
    from poolgrad_numba import operands

    monkeypatch.setattr(operands, "_GRAIN", 1)
    launched = []
    monkeypatch.setattr(operands, "launch", lambda *args: launched.append(1) or launch(*args))
    plain = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    for axis in range(1, len(shape)):
        turned = np.moveaxis(np.empty(np.moveaxis(plain, axis, -1).shape, dtype), -1, axis)
        for threads in (1, 3):
            operands.copy(turned, plain, threads)
            assert same_bits(turned, plain)
            back = np.zeros(shape, dtype)
            operands.copy(back, turned, threads)
            assert same_bits(back, plain)
    assert launched
    launched.clear()
    reverse, back = plain[..., ::-1], np.zeros(shape, dtype)
    if not reverse.flags.c_contiguous:
        operands.copy(back, reverse, 2)
        assert same_bits(back, reverse)
        assert not launched


@pytest.mark.parametrize("offset", [0, 2, 6, 14])
def test_streams_write_their_cells_and_no_others(offset):
    """Wherever the result begins within a cache line."""
    case = cases.Case("", cases.ADAPTIVE2D, (1, 5, 13, 11), output_size=(6, 5))
    for dtype in cases.DTYPES:
        grad, indices = case.rough_gradient(dtype), case.indices()
        for name in ("plane_stream", "sweep"):
            room = np.full(5 * 13 * 11 + 64, 77, dtype)
            start = (-room.ctypes.data % 64 + offset * 4) // dtype.itemsize
            out = room[start : start + 5 * 13 * 11].reshape(case.input_shape)
            plan_for(case, dtype, algorithm=name, num_threads=2).run(grad, indices, out=out)
            assert same_bits(out, expected(case, grad, indices))
            assert (np.delete(room, np.s_[start : start + out.size]) == np.array(77, dtype)).all()


def test_scratch_of_averages_is_bounded():
    for deterministic in (False, True):
        for threads in (1, 8):
            plan = pg.make_plan(
                cases.AVG3D,
                input_shape=(64, 8, 128, 128, 128),
                kernel_size=3,
                stride=1,
                padding=1,
                deterministic=deterministic,
                num_threads=threads,
            )
            assert plan.workspace_size < 80 << 20
