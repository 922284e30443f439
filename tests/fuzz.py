"""Hostile calls of one operator, in this process: ``python tests/fuzz.py OPERATOR --tries N --seed S``.

A try is a `Recipe`: a few plain numbers and words, from which a legal call follows, and then the faults that spoil it.
A legal call must give the oracle's result; a spoiled one an error that one of its faults announced. Operands lie
between guard pages, so that a kernel that leaves them kills the process; ``--trail`` then holds the last recipe, and
``--replay`` takes it up again.
"""

import argparse
import ast
import collections
import math
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("NUMBA_NUM_THREADS", "8")  # before Numba is imported

import numpy as np
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

import poolgrad_numba as pg
import reference
from calls import KINDS, LAYOUTS, OUT_KINDS, OUT_LAYOUTS, SHARED_LAYOUTS, Call, Recipe
from faults import INDEX, faults_of
from support import THREADS, same_bits

VALUES = ("f4", "f8", "f2", "bfloat16")
RECIPE_BYTES = 48
MOST_CELLS = (6, 24, 24, 60, 60, 60, 250, 1000, 12_000)


def recipe_from(operator, data):
    """Read a recipe from random bytes. One draw is what makes Hypothesis fast enough; it shrinks byte by byte."""
    signature = pg.OPS[operator].signature
    names, numbers = faults_of(signature), iter(data)

    def pick(*values):
        return values[next(numbers) % len(values)]

    return Recipe(
        operator,
        planes=(pick(None, 1, 2, 3, 1, 2, None, 0), pick(1, 2, 3, 5, 2, 3, 1, 2, 0)),
        cells=pick(*MOST_CELLS),
        axes=[tuple(next(numbers) for _ in range(5)) for _ in range(signature.spatial)],
        options=next(numbers),
        dtypes=(pick(*VALUES), pick("i8", "i4")),
        values=pick("integers", "rough", "bits"),
        grad=(pick("C", "C", *LAYOUTS, *SHARED_LAYOUTS), pick("array", "array", *KINDS)),
        indices=(
            pick("C", "C", *LAYOUTS, *SHARED_LAYOUTS),
            pick("array", "array", *KINDS),
            pick("wild", "real", "one"),
        ),
        out=(pick("C", None, "C", *OUT_LAYOUTS), pick("array", *OUT_KINDS)),
        deterministic=pick(False, True, None),
        threads=pick(*THREADS, None),
        candidate=pick(None, 0, 1, 2, 3, 4),
        workspace=pick("none", "exact", "exact", "roomy"),
        faults=[pick(*names) for _ in range(pick(0, 0, 1, 1, 2))],
        seed=int.from_bytes(data[-4:], "little"),
    )


# -- the law -------------------------------------------------------------------------------------------------------


def memory(array, guard):
    """All bytes that an operand has something to do with, or None."""
    if guard is not None:
        return guard.payload.copy()
    return array.tobytes() if isinstance(array, np.ndarray) else repr(array) if isinstance(array, list) else None


def untouched(before, now):
    return np.array_equal(before, now) if isinstance(before, np.ndarray) else before == now


def check(recipe, tally):
    """Make the call; raise where the law is broken."""
    call = Call(recipe)
    before = {name: memory(array, call.guards.get(name)) for name, array in call.arrays.items()}
    error, result = None, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = call.run()
    except pg.PoolGradError as caught:
        error = caught
    except MemoryError:
        tally["out of memory"] += 1
        return
    assert all(guard.intact() for guard in call.guards.values()), "wrote outside the operands"
    for name, array in call.arrays.items():
        if name != "out" or (error is not None and not isinstance(error, INDEX)):
            assert untouched(before[name], memory(array, call.guards.get(name))), f"{name} was changed"
    if error is None:
        assert not call.errors, f"accepted: {call.errors}"
        check_result(call, result)
    else:
        assert any(isinstance(error, kind) for kind in call.errors.values()), f"refused: {error!r}, {call.errors}"
        if isinstance(error, INDEX):
            check_index_error(call, error)
    if "out" in call.guards and "out_shares_memory" not in call.errors and isinstance(call.arrays["out"], np.ndarray):
        check_gaps(call.arrays["out"], call.guards["out"], before["out"])
    tally["refused" if call.errors else "accepted"] += 1
    tally.update(list(call.errors))


def plain_inputs(call):
    arrays = (np.asarray(call.arrays[name]) for name in ("grad_output", "indices") if name in call.arrays)
    return [np.array(array, array.dtype.newbyteorder("="), order="C", subok=False) for array in arrays]


def expectation(call):
    """The inputs as the call sees them, and the oracle's result."""
    grad, *indices = plain_inputs(call)
    if not grad.size:
        return grad, indices, np.zeros(call.shape, call.dtype)
    with np.errstate(all="ignore"):
        return grad, indices, reference.apply(call.name, grad, call.shape, *indices, **call.window)


def check_result(call, result):
    grad, indices, want = expectation(call)
    out = call.arrays.get("out")
    assert result is out if out is not None else result.flags.c_contiguous and result.dtype == call.dtype
    got = np.array(result, call.dtype, order="C", subok=False)
    assert got.shape == call.shape
    if call.exact_order():
        assert same_bits(got, want), "not the canonical bits"
    elif call.signature.indexed and call.recipe.values == "integers":
        assert np.array_equal(got, want), "not the sum"
    elif not grad.size:
        assert not got.any(), "not zero"
    elif grad.size * math.prod(call.shape) < 10**6:  # the bound takes three more oracles
        bound = reference.within_bound(got, call.name, grad, call.shape, *indices, **call.window)
        assert bound, "beyond the error bound"
    else:
        assert np.allclose(got.astype("f8"), want.astype("f8"), rtol=0.02, atol=0.05), "not nearly the sum"


def check_index_error(call, error):
    """The first bad index in row-major order is the one that the message names."""
    assert set(call.errors.values()) == {INDEX}, f"an index error before {call.errors}"
    _, indices = plain_inputs(call)
    first = tuple(int(i) for i in np.argwhere((indices < 0) | (indices >= math.prod(call.size)))[0])
    assert f"got {indices[first]} at position {first}," in str(error), error


def check_gaps(out, guard, before):
    """What lies between the elements of ``out`` is as before."""
    now = guard.payload.copy()
    start = out.__array_interface__["data"][0] - guard.payload.__array_interface__["data"][0]
    if out.size:
        old, new = (np.ndarray(out.shape, out.dtype, data, start, out.strides) for data in (before, now))
        new[...] = old
    assert np.array_equal(now, before), "wrote between the elements of out"


# -- running it ----------------------------------------------------------------------------------------------------


def recorder(trail, tally):
    """`check`, but for a file that says which recipe is under way, should the process die."""
    file = os.open(trail, os.O_CREAT | os.O_WRONLY) if trail else None

    def attempt(recipe):
        text = repr(tuple(recipe))
        if file is not None:
            os.pwrite(file, text.encode().ljust(4096), 0)
        check(recipe, tally)

    return attempt


def run_hypothesis(operator, tries, start, attempt):
    """Hypothesis finds failures, and shrinks those that are no signal."""
    strategy = st.binary(min_size=RECIPE_BYTES, max_size=RECIPE_BYTES)
    phases = (Phase.generate, Phase.shrink)

    @seed(start)
    @settings(max_examples=tries, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def test(data):
        recipe = recipe_from(operator, data)
        note(f"--replay {str(tuple(recipe))!r}")
        attempt(recipe)

    test()


def run_atheris(operator, tries, start, attempt):
    """Let atheris choose the bytes, by the branches that the Python layers take."""
    try:
        import atheris
    except ImportError:
        sys.exit("--engine atheris: atheris is not installed (pip install atheris)")
    for name, module in list(sys.modules.items()):
        if name.startswith("poolgrad_numba.") and ".kernels" not in name:
            for function in vars(module).values():
                if getattr(function, "__module__", "") == name and hasattr(function, "__code__"):
                    atheris.instrument_func(function)
    flags = [f"-runs={tries}", f"-seed={start + 1}", f"-max_len={RECIPE_BYTES}", "-len_control=0"]
    atheris.Setup([sys.argv[0], *flags], lambda data: attempt(recipe_from(operator, data.ljust(RECIPE_BYTES, b"\0"))))
    atheris.Fuzz()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("operator", choices=sorted(pg.OPS))
    parser.add_argument("--tries", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trail", type=Path, help="file for the recipe under way")
    parser.add_argument("--replay", help="a recipe, to try once")
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), default="hypothesis")
    options = parser.parse_args(arguments)
    tally = collections.Counter()
    if options.replay:
        return check(Recipe(*ast.literal_eval(options.replay)), tally)
    attempt = recorder(options.trail, tally)
    if options.engine == "atheris":
        return run_atheris(options.operator, options.tries, options.seed, attempt)
    began, step = time.perf_counter(), 10_000  # Hypothesis remembers every choice of a run, so runs are kept short
    for start in range(0, options.tries, step):
        run_hypothesis(options.operator, min(step, options.tries - start), options.seed + start, attempt)
    seconds = time.perf_counter() - began
    unseen = [name for name in faults_of(pg.OPS[options.operator].signature) if not tally[name]]
    report = f"{options.operator}: {options.tries} tries, {options.tries / seconds:.0f} a second; {dict(tally)}"
    sys.stdout.write(f"{report}\nunseen: {' '.join(unseen)}\n")
    return None


if __name__ == "__main__":
    main()
