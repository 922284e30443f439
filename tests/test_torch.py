"""Deterministic results equal PyTorch's CPU operators bit for bit in float32 and float64; fast ones hold the bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import poolgrad_numba as pg
import reference
from poolgrad_numba.bench import forward
from support import THREADS, algorithms, plan_for, python, same_bits

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'poolgrad_numba[torch]'")
aten = torch.ops.aten
functional = torch.nn.functional


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


@st.composite
def problem(draw, operator):
    """(input shape, parameters, gradient, indices, PyTorch's result), indices from PyTorch's own forward."""
    spatial = pg.OPS[operator].signature.spatial
    lead = draw(st.sampled_from([(1,), (4,), (1, 1), (2, 3), (5, 2)]))
    size = tuple(draw(st.integers(1, 18)) for _ in range(spatial))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = tensor(rng.standard_normal(lead + size).astype(dtype))
    rough = lambda shape: (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 10, shape)).astype(dtype)  # noqa: E731
    if operator.startswith("adaptive"):
        output = tuple(draw(st.integers(1, 20)) for _ in range(spatial))
        pool = functional.adaptive_max_pool2d if spatial == 2 else functional.adaptive_max_pool3d
        y, indices = pool(x, output, return_indices=True)
        grad = rough(tuple(y.shape))
        backward = aten.adaptive_max_pool2d_backward if spatial == 2 else aten.adaptive_max_pool3d_backward
        return lead + size, {}, grad, indices.numpy(), backward(tensor(grad), x, indices).numpy()
    kernel = tuple(draw(st.integers(1, min(n, 6))) for n in size)
    stride = draw(st.none() | st.tuples(*[st.integers(1, 6)] * spatial))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    ceil_mode = draw(st.booleans())
    parameters = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    if operator == cases.MAX2D:
        dilation = tuple(
            draw(st.integers(1, max(1, (n - 1) // max(k - 1, 1)))) for n, k in zip(size, kernel, strict=True)
        )
        parameters["dilation"] = dilation
        y, indices = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
        grad = rough(tuple(y.shape))
        want = aten.max_pool2d_with_indices_backward(
            tensor(grad), x, kernel, stride or kernel, padding, dilation, ceil_mode, indices
        )
        return lead + size, parameters, grad, indices.numpy(), want.numpy()
    parameters["count_include_pad"] = draw(st.booleans())
    parameters["divisor_override"] = draw(st.none() | st.sampled_from([1, 6, -5]))
    rest = ceil_mode, parameters["count_include_pad"], parameters["divisor_override"]
    y = functional.avg_pool3d(x, kernel, stride, padding, *rest)
    grad = rough(tuple(y.shape))
    want = aten.avg_pool3d_backward(tensor(grad), x, kernel, stride or kernel, padding, *rest)
    return lead + size, parameters, grad, None, want.numpy()


@pytest.mark.parametrize("operator", cases.OPERATORS)
@settings(max_examples=250)
@given(data=st.data())
def test_generated_problems(operator, data):
    input_shape, parameters, grad, indices, want = data.draw(problem(operator))
    operands = (grad, input_shape) if indices is None else (grad, input_shape, indices)
    function = getattr(pg, operator)
    for threads in (1, 3):
        assert same_bits(function(*operands, **parameters, deterministic=True, num_threads=threads), want)
    name = data.draw(st.sampled_from(algorithms(operator, deterministic=True)))
    spatial = pg.OPS[operator].signature.spatial
    plan = pg.make_plan(
        operator,
        input_shape=input_shape,
        dtype=grad.dtype,
        deterministic=True,
        num_threads=data.draw(st.sampled_from(THREADS)),
        algorithm=name,
        **(parameters or {"output_size": grad.shape[-spatial:]}),
    )
    assert same_bits(plan.run(grad, indices), want)
    fast = function(*operands, **parameters)
    assert reference.within_bound(fast, operator, grad, input_shape, indices, **parameters)


INDEXED = [case for case in cases.SMALL_CASES if case.indexed and case.parameters.get("dilation", 1) == 1]


@pytest.mark.parametrize("case", INDEXED, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_named_cases(case, dtype):
    grad, indices = case.rough_gradient(dtype), case.indices()
    x = torch.empty(case.input_shape, dtype=tensor(grad).dtype)
    if case.operator == cases.MAX2D:
        p = case.parameters
        window = [reference.as_axes(v, 2) for v in (p["kernel_size"], p["stride"] or p["kernel_size"], p["padding"], 1)]
        want = aten.max_pool2d_with_indices_backward(tensor(grad), x, *window, p["ceil_mode"], tensor(indices))
    else:
        want = getattr(aten, case.operator)(tensor(grad), x, tensor(indices))
    for name in algorithms(case.operator, deterministic=True):
        plan = plan_for(case, dtype, deterministic=True, num_threads=3, algorithm=name)
        assert same_bits(plan.run(grad, indices), want.numpy())


@pytest.mark.trap("T29")
def test_t29_pytorch_flushing_subnormals():
    shape, indices = (1, 8, 64, 64), np.tile(np.arange(0, 64 * 64, 4), (1, 8, 1)).reshape(1, 8, 32, 32)
    grad = np.full((1, 8, 32, 32), 1e-39, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        results = [
            pg.adaptive_max_pool2d_backward(grad, shape, indices, deterministic=True, num_threads=t) for t in THREADS
        ]
        flushes = (torch.tensor([1e-38]) * 0.5).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert flushes, "the caller's setting is as it was"
    for result in results:
        assert np.count_nonzero(result.view(np.uint32)) == grad.size
        assert same_bits(result, results[0])


def test_threads_of_pytorch_are_left_alone():
    before = torch.get_num_threads()
    case = next(c for c in cases.SMALL_CASES if c.name == "adaptive2d_one_plane")
    plan_for(case, num_threads=3, algorithm="tile_reduce").run(case.gradient(), case.indices())
    assert torch.get_num_threads() == before


def test_tensors_serve_as_arrays():
    grad, indices = torch.ones(1, 1, 2, 2), torch.tensor([[[[0, 1], [2, 15]]]])
    got = pg.max_pool2d_with_indices_backward(grad, torch.Size((1, 1, 4, 4)), indices, 2)
    assert got.dtype == np.float32
    assert got.reshape(-1)[[0, 1, 2, 15]].tolist() == [1, 1, 1, 1]
    with pytest.raises(pg.PoolGradTypeError, match="grad_output: got Tensor, which is no array"):
        pg.max_pool2d_with_indices_backward(grad.requires_grad_(), (1, 1, 4, 4), indices, 2)


@pytest.mark.trap("T34")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_t34_workers_of_a_data_loader(method):
    """The loop ends, with the parent's bytes, and PyTorch keeps its threads."""
    python(f"""
import torch, children
torch.set_num_threads(3)
torch.ones(1000, 1000).sum()  # so that PyTorch's threads are up as well
want = children.digest()
assert torch.get_num_threads() == 3
for _ in range(2):
    loader = torch.utils.data.DataLoader(children.Digests(), None, num_workers=2, multiprocessing_context={method!r},
                                         timeout=60)
    assert list(loader) == [want] * 6
    assert children.digest() == want
    assert torch.get_num_threads() == 3
""")


@pytest.mark.parametrize("first", ["torch", "poolgrad_numba"])
def test_pytorchs_thread_count_stays(first):
    python(
        f"""
import {first}
import torch, children
before = torch.get_num_threads(), torch.get_num_interop_threads()
for threads in (None, 1, 2):
    if threads:
        torch.set_num_threads(threads)
        before = threads, before[1]
    children.digest()
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before
    assert children.on_a_thread(lambda: (children.digest(), torch.get_num_threads())[1]) == before[0]
""",
        OMP_NUM_THREADS="3",
    )


@pytest.mark.trap("T43")
def test_t43_the_forward_of_the_tests_and_the_demo_has_pytorchs_rule_for_nan():
    values = np.float32([np.nan, -np.inf, np.inf, 0, 1])
    x = np.random.default_rng(0).choice(values, (300, 6, 6), p=[0.1, 0.5, 0.1, 0.2, 0.1])
    pooled, indices = functional.max_pool2d(tensor(x), 3, 1, 1, return_indices=True)
    ours, where = forward.max_pool(x, [forward.sliding_axis(6, 3, 1, 1)] * 2)
    assert np.array_equal(ours, pooled.numpy(), equal_nan=True)
    assert np.array_equal(where, indices.numpy())
    assert np.array_equal(reference.max_pool_indices(x, 3, 1, 1), indices.numpy())
