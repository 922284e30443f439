"""Timings of the backward operators: `python -m pytest benchmarks --benchmark-enable`.

Every row of the case table, both modes, and PyTorch's operator where it is installed. Each provider's result is
checked once, against the deterministic one, before it is timed.
"""

import numpy as np
import pytest

import cases
from peers import MODES, inputs, ours, torch_operator

CASES = [case for case in cases.CASES if not case.small or case.name.endswith("_one_plane")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("provider", [*MODES, "torch"])
def test_backward(benchmark, case, provider):
    grad, indices = inputs(case)
    want = ours(case, grad, indices, deterministic=True)().copy()
    if provider == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
        run = torch_operator(case, grad, indices)
    else:
        run = ours(case, grad, indices, deterministic=provider == "deterministic")
    assert np.allclose(np.asarray(run()), want, rtol=1e-4, atol=1e-4)
    benchmark.group = case.name
    benchmark.extra_info.update(operator=case.operator, case=case.name, provider=provider)
    benchmark(run)
