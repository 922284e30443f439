"""Plans: choice and explanation, forcing, workspaces, caching, pickling, sharing."""

import itertools
import math
import pickle
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import cases
import poolgrad_numba as pg
from poolgrad_numba.launch import launch
from poolgrad_numba.ops import indexed
from support import algorithms, call, forced_runs, plan_for, python, same_bits

CASE = next(case for case in cases.SMALL_CASES if case.name == "max_overlapping")
AVERAGE = next(case for case in cases.SMALL_CASES if case.name == "avg_overlapping")


def chosen(operator, shape, **options):
    return pg.make_plan(operator, input_shape=shape, **options).algorithm


@pytest.mark.parametrize(
    ("want", "operator", "shape", "options"),
    [
        ("plane_scatter", cases.MAX2D, (8, 8, 56, 56), {"kernel_size": 2}),
        ("tile_reduce", cases.MAX2D, (1, 1, 512, 512), {"kernel_size": 2}),
        ("tile_reduce", cases.MAX2D, (1, 1, 512, 512), {"kernel_size": 2, "deterministic": True}),
        ("tile_reduce", cases.MAX2D, (2, 4, 600, 600), {"kernel_size": 2, "dtype": np.float16}),
        ("plane_scatter", cases.MAX2D, (1, 1, 512, 512), {"kernel_size": 2, "num_threads": 1}),
        ("tile_reduce", cases.MAX2D, (1, 1, 600, 600), {"kernel_size": 2, "num_threads": 1, "dtype": np.float16}),
        ("atomic_scatter", cases.ADAPTIVE2D, (1, 1, 512, 512), {"output_size": 1}),
        ("tile_reduce", cases.ADAPTIVE2D, (1, 1, 512, 512), {"output_size": 1, "deterministic": True}),
        ("plane_stream", cases.MAX2D, (16, 16, 112, 112), {"kernel_size": 2}),
        ("plane_stream", cases.MAX2D, (16, 16, 112, 112), {"kernel_size": 2, "deterministic": True}),
        ("plane_scatter", cases.ADAPTIVE2D, (32, 512, 14, 14), {"output_size": 7}),
        ("sweep", cases.MAX2D, (1, 1, 2048, 2048), {"kernel_size": 3, "stride": 1}),
        ("sweep", cases.MAX2D, (8, 8, 600, 600), {"kernel_size": 2, "deterministic": True}),
        ("atomic_scatter", cases.ADAPTIVE2D, (1, 1, 2048, 2048), {"output_size": 1}),
        ("spread", cases.AVG3D, (8, 8, 8, 16, 16), {"kernel_size": 5, "stride": 1}),
        ("spread", cases.AVG3D, (1, 1, 32, 64, 64), {"kernel_size": 3, "stride": 1}),
        ("gather", cases.AVG3D, (8, 8, 8, 16, 16), {"kernel_size": 2}),
        ("gather", cases.AVG3D, (1, 1, 32, 64, 64), {"kernel_size": 3, "stride": 1, "deterministic": True}),
        ("add_rows", cases.AVG3D, (8, 8, 8, 7, 7), {"kernel_size": 7, "padding": 0}),
        ("add_rows", cases.AVG3D, (8, 8, 8, 9, 99), {"kernel_size": (1, 1, 99), "deterministic": True}),
    ],
)
def test_which_candidate_runs(want, operator, shape, options):
    options = {"num_threads": 2, **options}
    assert chosen(operator, shape, **options) == want


def test_every_candidate_is_reached_above():
    rows = test_which_candidate_runs.pytestmark[0].args[1]
    assert {row[0] for row in rows} == {name for _, _, name in forced_runs() if name != "interleaved_scatter"}


def channels_last(array, spatial):
    return np.moveaxis(np.moveaxis(array, -1 - spatial, -1).copy(), -1, -1 - spatial)


def launched(monkeypatch, run):
    """Names of the kernels that the operator launches in a run, but for those that pack."""
    names = []

    def record(kernel, *arguments):
        names.append(kernel.dispatcher.__name__)
        return launch(kernel, *arguments)

    monkeypatch.setattr(indexed, "launch", record)
    run()
    monkeypatch.undo()
    return names


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", cases.INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in cases.SMALL_CASES if c.indexed], ids=lambda case: case.name)
def test_operands_with_channels_last_are_taken_as_they_lie(case, index_dtype, dtype, deterministic, monkeypatch):
    plan = plan_for(case, dtype, index_dtype, deterministic=deterministic, num_threads=2)
    grad, indices = case.rough_gradient(dtype), case.indices(index_dtype)
    want = plan.run(grad, indices)
    last = [channels_last(array, case.spatial) for array in (grad, indices, np.zeros_like(want))]
    if last[2].flags.c_contiguous:  # a single channel
        return
    own = math.prod(case.input_shape[-1 - case.spatial :]) * 4 * plan.workers if dtype.itemsize == 2 else 0
    assert own <= plan.workspace_size_for(*last[:2], last[2]) <= 2 * own + 128
    packed = (grad, indices, np.zeros_like(want))
    for choice in itertools.product((0, 1), repeat=3):
        *inputs, out = ((a, b)[which] for a, b, which in zip(packed, last, choice, strict=True))
        names = launched(monkeypatch, lambda inputs=inputs, out=out: plan.run(*inputs, out=out))
        lie_so = out is last[2] and all(np.moveaxis(a, -1 - case.spatial, -1).flags.c_contiguous for a in inputs)
        assert (names == ["interleaved_scatter"]) == lie_so
        assert same_bits(out, want)
        assert same_bits(plan.run(*inputs), want)


def test_bad_indices_with_channels_last_are_told_where_they_are():
    grad, indices, out = (channels_last(a, 2) for a in (CASE.gradient(), CASE.indices(), np.zeros(CASE.input_shape)))
    position = tuple(n - 1 for n in indices.shape)
    indices[position] = -5
    indices[(*position[:-1], 0)] = 10**6
    plan = plan_for(CASE)
    for result in (None, out.astype(np.float32, order="K")):
        with pytest.raises(pg.PoolGradIndexError, match=re.escape(f"got 1000000 at position {(*position[:-1], 0)}")):
            plan.run(grad, indices, out=result)


def test_few_images_with_channels_last_are_packed_for_many_threads():
    options = {"input_shape": (1, 64, 64, 64), "kernel_size": 2}
    for threads, dtype, takes in (
        (4, np.float32, True),
        (5, np.float32, False),
        (2, np.float16, True),
        (3, np.float16, False),
    ):
        plan = pg.make_plan(cases.MAX2D, num_threads=threads, dtype=dtype, **options)
        verdict = dict(plan.verdicts)["interleaved_scatter"]
        assert verdict.takes == takes
        assert ("if all operands lie in memory with their channels last" in plan.explain()) == takes


def test_few_threads_for_little_work():
    assert pg.make_plan(cases.MAX2D, input_shape=(1, 16, 8, 8), kernel_size=2, num_threads=8).workers == 1
    assert pg.make_plan(cases.MAX2D, input_shape=(8, 64, 56, 56), kernel_size=2, num_threads=8).workers == 8
    assert pg.make_plan(
        cases.MAX2D, input_shape=(1, 16, 8, 8), kernel_size=2, num_threads=8, algorithm="plane_scatter"
    ).workers == 8  # fmt: skip


@pytest.mark.parametrize(("operator", "deterministic", "name"), forced_runs())
def test_explain_names_every_candidate_with_its_reason(operator, deterministic, name):
    case = next(c for c in cases.SMALL_CASES if c.operator == operator)
    plan = plan_for(case, deterministic=deterministic, algorithm=name, num_threads=3)
    text = plan.explain()
    assert f"\n{name}, asked for by name: " in text
    assert ("deterministic mode" if deterministic else "fast mode") in text
    for other in algorithms(operator, deterministic=deterministic):
        line = next(line for line in text.splitlines() if line.startswith(f"  {other} "))
        mark, _, why = line[len(other) + 2 :].strip().partition(": ")
        assert mark.startswith("runs") if other == name else mark in ("refused", "could run")
        assert len(why.split()) >= 4
    assert f"{plan.workspace_size} byte" in text
    assert "asked for by name" not in plan_for(case, deterministic=deterministic).explain()


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_the_plain_candidate_is_last_and_never_refuses(operator):
    for deterministic in (False, True):
        last = pg.OPS[operator].candidates(deterministic=deterministic)[-1]
        for case in cases.CASES:
            if case.operator == operator:
                assert last.judge(plan_for(case, deterministic=deterministic).problem).takes


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_deterministic_mode_lists_canonical_candidates_only(operator):
    assert all(candidate.canonical for candidate in pg.OPS[operator].deterministic)
    assert {c.name for c in pg.OPS[operator].fast if c.canonical} == {c.name for c in pg.OPS[operator].deterministic}


def test_a_candidate_that_does_not_apply_refuses_in_a_sentence():
    for operator, name in ((CASE, "atomic_scatter"), (AVERAGE, "spread")):
        with pytest.raises(
            pg.PoolGradValueError, match=f"algorithm: got '{name}', which is not deterministic: .*order"
        ):
            plan_for(operator, deterministic=True, algorithm=name)
    for bad in (3, ["plane_scatter"]):
        with pytest.raises(pg.PoolGradTypeError, match="algorithm: got"):
            plan_for(CASE, algorithm=bad)
    for bad in ("fastest", "gather", ""):
        with pytest.raises(pg.PoolGradValueError, match="algorithm: got .* wanted one of interleaved_scatter"):
            plan_for(CASE, algorithm=bad)


def test_operator_names():
    for bad in ("max_pool2d", "", None, 3, ["avg_pool3d_backward"]):
        with pytest.raises(pg.PoolGradValueError, match="operator: got .* wanted one of adaptive_max_pool2d_backward"):
            pg.make_plan(bad, input_shape=(1, 2, 2))


def test_parameters_that_an_operator_does_not_have():
    with pytest.raises(pg.PoolGradTypeError, match="got kernel_size, wanted only output_size"):
        pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, 4, 4), output_size=2, kernel_size=2)
    with pytest.raises(pg.PoolGradTypeError, match="got count_include_pad, wanted only kernel_size"):
        pg.make_plan(cases.MAX2D, input_shape=(1, 4, 4), kernel_size=2, count_include_pad=True)
    with pytest.raises(pg.PoolGradTypeError, match="output_size: got None"):
        pg.make_plan(cases.ADAPTIVE2D, input_shape=(1, 4, 4))
    with pytest.raises(pg.PoolGradTypeError, match="kernel_size: got None"):
        pg.make_plan(cases.AVG3D, input_shape=(1, 4, 4, 4))


def test_dtypes_of_a_plan():
    with pytest.raises(
        pg.PoolGradTypeError, match="dtype: got dtype .*int32.* wanted one of float32, float64, float16"
    ):
        plan_for(CASE, np.int32)
    with pytest.raises(pg.PoolGradTypeError, match="index_dtype: got dtype .*int16.* wanted one of int32, int64"):
        plan_for(CASE, index_dtype=np.int16)
    for bad in (None, "nonsense", 3.5):
        with pytest.raises(pg.PoolGradTypeError, match="dtype"):
            plan_for(CASE, bad)
    assert plan_for(CASE, ml_dtypes.bfloat16).problem.dtype == ml_dtypes.bfloat16
    assert plan_for(CASE, ">f4").problem.dtype == np.float32


def test_plans_are_cached_and_frozen():
    plan = plan_for(CASE, deterministic=True, num_threads=2)
    assert plan_for(CASE, deterministic=True, num_threads=2) is plan
    assert plan_for(CASE, deterministic=False, num_threads=2) is not plan
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))  # noqa: S301
    with pytest.raises(AttributeError):
        plan.workers = 3


def test_the_mode_is_latched_when_the_plan_is_made():
    with pg.config_context(deterministic=True, num_threads=1):
        plan = plan_for(CASE)
    pg.set_config(deterministic=False, num_threads=8)
    assert plan.problem.deterministic
    assert plan.workers == 1


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_plans_pickle_into_other_processes(dtype, tmp_path):
    path = tmp_path / "plan"
    plan = plan_for(CASE, dtype, deterministic=True, num_threads=3, algorithm="tile_reduce")
    grad, indices = CASE.rough_gradient(dtype), CASE.indices()
    with path.open("wb") as file:
        pickle.dump((plan, grad, indices, plan.run(grad, indices)), file)
    python(f"""
import pickle
with open({str(path)!r}, "rb") as file:
    plan, grad, indices, want = pickle.load(file)
assert plan.algorithm == "tile_reduce" and plan.workers > 1 or plan.problem.cells <= 4096
assert plan.run(grad, indices).tobytes() == want.tobytes()
""", NUMBA_NUM_THREADS="1")  # fmt: skip


@pytest.mark.parametrize("case", [CASE, AVERAGE], ids=lambda case: case.name)
def test_one_plan_in_many_threads(case):
    plan = plan_for(case, np.float16, deterministic=True)
    grad, indices = case.rough_gradient(np.float16), case.indices()
    want = plan.run(grad, indices)
    with ThreadPoolExecutor(4) as pool:
        assert all(same_bits(result, want) for result in pool.map(lambda _: plan.run(grad, indices), range(40)))


# -- operands ------------------------------------------------------------------------------------------------------


def test_operands_are_checked_against_the_plan():
    plan, average = plan_for(CASE), plan_for(AVERAGE)
    grad, indices = CASE.gradient(), CASE.indices()
    with pytest.raises(pg.PoolGradTypeError, match="indices: got None"):
        plan.run(grad)
    with pytest.raises(pg.PoolGradTypeError, match="takes none"):
        average.run(AVERAGE.gradient(), indices)
    with pytest.raises(pg.PoolGradTypeError, match="grad_output: got dtype float64, wanted one of float32"):
        plan.run(grad.astype(np.float64), indices)
    with pytest.raises(pg.PoolGradTypeError, match="indices: got dtype int32, wanted one of int64"):
        plan.run(grad, indices.astype(np.int32))
    with pytest.raises(pg.PoolGradValueError, match="grad_output: got shape"):
        plan.run(grad[:1], indices)
    with pytest.raises(pg.PoolGradValueError, match="indices: got shape"):
        plan.run(grad, indices[:1])
    with pytest.raises(pg.PoolGradTypeError, match="which is no array"):
        plan.run([[1, 2], [3]], indices)


def test_lists_are_arrays():
    got = pg.adaptive_max_pool2d_backward([[[1.0, 2.0]]], [1, 1, 3], [[[2, 2]]])
    assert got.dtype == np.float64
    assert got.tolist() == [[[0, 0, 3]]]


@pytest.mark.parametrize("case", [CASE, AVERAGE], ids=lambda case: case.name)
def test_out_is_checked_and_left_alone(case):
    grad, indices, shape = case.gradient(), case.indices(), case.input_shape
    read_only = np.empty(shape, np.float32)
    read_only.flags.writeable = False
    shared = np.zeros(np.prod(shape) + grad.size, np.float32)
    inside = shared[: grad.size].reshape(grad.shape)
    inside[...] = grad
    folded = np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), shape, (0,) * len(shape))
    bad = [
        (np.empty(shape[1:], np.float32), pg.PoolGradValueError, "out: got shape"),
        (np.empty(shape, np.float64), pg.PoolGradTypeError, "out: got dtype float64"),
        (read_only, pg.PoolGradValueError, "out: got a read-only array"),
        (np.empty(shape, np.float32).tolist(), pg.PoolGradTypeError, "out: got list"),
        (folded, pg.PoolGradValueError, "its own elements share memory"),
        (shared[10 : 10 + np.prod(shape)].reshape(shape), pg.PoolGradValueError, "shares memory with an input"),
    ]  # fmt: skip
    for out, kind, text in bad:
        before = np.array(out)
        with pytest.raises(kind, match=text):
            call(case, inside, indices, out=out)
        assert np.array_equal(before, out, equal_nan=True)
    good = np.full(shape, 7, np.float32)
    with pytest.raises(pg.PoolGradValueError):
        call(case, grad[:1], indices, out=good)
    assert (good == 7).all()
    assert call(case, inside, indices, out=good) is good


def test_interleaved_views_share_no_memory():
    both = np.zeros((*AVERAGE.input_shape, 2), np.float32)
    grad, out = both[..., 0], both[..., 1]
    grad[...] = AVERAGE.gradient()
    assert np.array_equal(call(AVERAGE, grad, out=out), call(AVERAGE, AVERAGE.gradient()))


# -- workspaces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "deterministic", "name"), forced_runs())
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 63])
def test_the_workspace_asked_for_is_enough_and_all_that_is_touched(operator, deterministic, name, dtype, offset):
    for case in cases.SMALL_CASES:
        if case.operator == operator:
            plan = plan_for(case, dtype, deterministic=deterministic, algorithm=name, num_threads=3)
            grad, indices = case.gradient(dtype), case.indices()
            size = plan.workspace_size_for(grad, indices)
            buffer = np.full(offset + size + 64, 0xA5, np.uint8)
            got = plan.run(grad, indices, workspace=buffer[offset : offset + size])
            assert np.array_equal(got, plan.run(grad, indices))
            assert (buffer[:offset] == 0xA5).all()
            assert (buffer[offset + size :] == 0xA5).all()


@pytest.mark.parametrize("case", [CASE, AVERAGE], ids=lambda case: case.name)
def test_bad_workspaces(case):
    plan = plan_for(case, np.float16, deterministic=True)
    grad, indices = case.gradient(np.float16), case.indices()
    size = plan.workspace_size
    assert size > 0
    with pytest.raises(pg.PoolGradValueError, match=f"workspace: got {size - 1} bytes, wanted {size}"):
        plan.run(grad, indices, workspace=bytearray(size - 1))
    with pytest.raises(pg.PoolGradValueError, match="read-only"):
        plan.run(grad, indices, workspace=bytes(size))
    for bad in (size, "x" * size, [0] * size, np.zeros((size, 2), np.uint8)[:, 0]):
        with pytest.raises(pg.PoolGradTypeError, match="workspace: got"):
            plan.run(grad, indices, workspace=bad)
    out = np.zeros(case.input_shape, np.float16)
    room = np.zeros(size + out.nbytes, np.uint8)
    with pytest.raises(pg.PoolGradValueError, match="shares memory"):
        plan.run(grad, indices, workspace=room, out=room[: out.nbytes].view(np.float16).reshape(out.shape))
    for good in (bytearray(size), memoryview(bytearray(size)), np.zeros(size // 4 + 1, np.float32)):
        assert np.array_equal(plan.run(grad, indices, workspace=good), plan.run(grad, indices))


def test_strided_operands_are_packed_into_the_workspace():
    plan = plan_for(CASE, deterministic=True)
    grad, indices = np.asfortranarray(CASE.gradient()), np.asfortranarray(CASE.indices())
    out = np.empty(CASE.input_shape[::-1], np.float32).T
    need = plan.workspace_size_for(grad, indices, out)
    assert need >= plan.workspace_size + grad.nbytes + indices.nbytes + out.nbytes
    assert plan.workspace_size_for(CASE.gradient(), CASE.indices()) == plan.workspace_size
    want = plan.run(CASE.gradient(), CASE.indices())
    assert np.array_equal(plan.run(grad, indices, out=out, workspace=bytearray(need)), want)
    with pytest.raises(pg.PoolGradValueError, match="packed into the workspace"):
        plan.run(grad, indices, out=out, workspace=bytearray(need - 1))


LARGE = {
    cases.MAX2D: ((1, 4, 512, 512), {"kernel_size": 2}),
    cases.ADAPTIVE2D: ((1, 4, 512, 512), {"output_size": 256}),
    cases.ADAPTIVE3D: ((1, 4, 64, 64, 64), {"output_size": 32}),
    cases.AVG3D: ((1, 4, 64, 64, 64), {"kernel_size": 3, "stride": 2, "padding": 1}),
}


@pytest.mark.parametrize(("operator", "deterministic", "name"), forced_runs())
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("strided", [False, True])
def test_a_run_with_out_and_workspace_allocates_nothing_that_grows(operator, deterministic, name, dtype, strided):
    shape, parameters = LARGE[operator]
    plan = pg.make_plan(
        operator,
        input_shape=shape,
        dtype=dtype,
        deterministic=deterministic,
        algorithm=name,
        num_threads=3,
        **parameters,
    )
    grad, out = np.ones(plan.output_shape, dtype), np.empty(shape, dtype)
    indices = None if operator == cases.AVG3D else np.zeros(plan.output_shape, np.int64)
    if strided:
        grad, out = np.asfortranarray(grad), np.asfortranarray(out)
    workspace = np.empty(plan.workspace_size_for(grad, indices, out), np.uint8)
    plan.run(grad, indices, out=out, workspace=workspace)
    tracemalloc.start()
    try:
        plan.run(grad, indices, out=out, workspace=workspace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384, f"{peak} bytes"
