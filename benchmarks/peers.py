"""What is timed, and `python benchmarks/peers.py [CASE ...]`: a table of ratios to PyTorch and to a copy, from one run.

Providers take turns inside one process, so that a noisy machine slows all of them; the table shows medians.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np

import cases
import poolgrad_numba as pg
from poolgrad_numba.cli import forward

MODES = ("fast", "deterministic")


def inputs(case):
    """A gradient, and indices that a real forward makes."""
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(case.output_shape, dtype=np.float32)
    return grad, forward_indices(case) if case.indexed else None


def forward_indices(case):
    """Flat index of each window's maximum of normal data."""
    x = np.random.default_rng(1).standard_normal(case.input_shape, dtype=np.float32)
    size, outputs = case.input_shape[-case.spatial :], case.output_shape[-case.spatial :]
    if case.output_size:
        windows = [forward.adaptive_axis(n, o) for n, o in zip(size, outputs, strict=True)]
    else:
        p = case.parameters
        window = (p["kernel_size"], p["stride"] or p["kernel_size"], p["padding"])
        per_axis = zip(size, *(_axes(value, case.spatial) for value in window), strict=True)
        windows = [forward.sliding_axis(*axis) for axis in per_axis]
    return forward.max_pool(x, windows)[1]


def ours(case, grad, indices, *, deterministic, out=None):
    """Our public function on a case."""
    function, operands = getattr(pg, case.operator), case.operands(grad, indices)
    return lambda: function(*operands, **case.parameters, deterministic=deterministic, out=out)


def torch_is_there():
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def torch_operator(case, grad, indices, *, out=None):
    """PyTorch's own operator on the same arrays."""
    import torch

    aten = torch.ops.aten
    g, x = torch.from_numpy(grad), torch.empty(case.input_shape)
    into = {} if out is None else {"grad_input": torch.from_numpy(out)}
    if case.operator == cases.AVG3D:
        p = case.parameters
        return lambda: aten.avg_pool3d_backward(
            g, x, _axes(p["kernel_size"], 3), _axes(p["stride"] or p["kernel_size"], 3), _axes(p["padding"], 3), False,
            p.get("count_include_pad", True), p.get("divisor_override"), **into,
        )  # fmt: skip
    index = torch.from_numpy(indices)
    if case.operator == cases.MAX2D:
        p = case.parameters
        window = [_axes(p[name] or p["kernel_size"], 2) for name in ("kernel_size", "stride", "padding", "dilation")]
        window[2] = _axes(p["padding"], 2)
        return lambda: aten.max_pool2d_with_indices_backward(g, x, *window, p["ceil_mode"], index, **into)
    function = (
        aten.adaptive_max_pool2d_backward if case.operator == cases.ADAPTIVE2D else aten.adaptive_max_pool3d_backward
    )
    return lambda: function(g, x, index, **into)


def _axes(value, axes):
    return [value] * axes if np.ndim(value) == 0 else list(value)


def interleaved(providers, rounds):
    """Median seconds of each provider, all of them taking turns."""
    times = {name: [] for name in providers}
    for run in providers.values():
        run()
    for _ in range(rounds):
        for name, run in providers.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def compare(case, rounds):
    """One row of the table: medians in ms, the result allocated by the call (+) or given."""
    grad, indices = inputs(case)
    out, source = np.empty(case.input_shape, np.float32), np.zeros(case.input_shape, np.float32)
    providers = {
        "fast+": ours(case, grad, indices, deterministic=False),
        "deterministic+": ours(case, grad, indices, deterministic=True),
        "fast": ours(case, grad, indices, deterministic=False, out=out),
        "deterministic": ours(case, grad, indices, deterministic=True, out=out),
        "copy": lambda: np.copyto(out, source),
    }
    if torch_is_there():
        providers["torch+"] = torch_operator(case, grad, indices)
        providers["torch"] = torch_operator(case, grad, indices, out=np.empty_like(out))
    return interleaved(providers, rounds)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names from tests/cases.py; all large ones if none is given")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    chosen = [c for c in cases.LARGE_CASES if not arguments.cases or c.name in arguments.cases]
    for case in chosen:
        medians = compare(case, arguments.rounds)
        row = "  ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in medians.items())
        peer = "torch+" if "torch+" in medians else "copy"
        ratios = "  ".join(f"{peer}/{mode}+ {medians[peer] / medians[mode + '+']:.1f}" for mode in MODES)
        print(f"{case.name}: {row} ms; {ratios}")


if __name__ == "__main__":
    main()
