"""Other CPU targets than this machine's own: the same deterministic bits, and nothing that ends in a signal."""

import hashlib
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding

import cases
from support import algorithms, forced_runs, plan_for, python

X86 = platform.machine() in ("x86_64", "AMD64")
HOST = binding.get_host_cpu_features() if X86 else {}


def target(name, features):
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}


# Each level of x86-64 adds instructions: a machine runs those up to its own, told by one that the level adds.
LEVELS = {
    name: target(name, "")
    for name, added in (("x86-64-v2", "sse4.2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512vl"))
    if HOST.get(added)
}
TARGETS = {"generic": target("generic", "")}
if HOST.get("avx2"):
    TARGETS["AVX2 without F16C"] = target("haswell", "+avx2,-f16c")


def special_gradient(case, dtype):
    """Sums halfway between two 16-bit numbers, subnormals, the largest number, infinities and NaN."""
    rng = np.random.default_rng(7)
    info = ml_dtypes.finfo(dtype)
    values = [1, 2.0**-11, 2.0**-8, 3 * info.smallest_subnormal, -info.smallest_subnormal, -0.0]
    values += [info.max, np.inf, -np.inf, np.nan]
    shares = np.array([30, 15, 15, 15, 15, 6, 1, 1, 1, 1]) / 100
    return rng.choice(np.array([float(value) for value in values]), case.output_shape, p=shares).astype(dtype)


@cache
def operands(case, dtype, index_dtype):
    """(name, gradient, indices) of each kind."""
    kinds = (("rough", case.rough_gradient, case.indices), ("special", special_gradient, case.wild_indices))
    return [
        (kind, gradient(case, dtype) if gradient is special_gradient else gradient(dtype), indices(index_dtype))
        for kind, gradient, indices in kinds
    ]


FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = cases.DTYPES
# Compiling takes the time, up to 5 s a kernel and dtype, so the short form shares the dtypes out.
SHORT = {
    "plane_scatter": (FLOAT16, FLOAT64),
    "tile_reduce": (FLOAT32, BFLOAT16),
    "atomic_scatter": (FLOAT16,),
    "plane_stream": (FLOAT16,),
    "interleaved_scatter": (FLOAT32, BFLOAT16),
    "sweep": (BFLOAT16,),
    "gather": (FLOAT64, FLOAT16, BFLOAT16),
    "spread": (FLOAT16,),
    "add_rows": (BFLOAT16,),
}


def runs(*, complete):
    """(operator, deterministic, algorithm, dtype, index dtype) to be run: each candidate once."""
    for operator, deterministic, name in forced_runs():
        if not deterministic and name in algorithms(operator, deterministic=True):
            continue
        indexed = "max" in operator
        for dtype in cases.DTYPES if complete else SHORT.get(name, ()):
            for index_dtype in cases.INDEX_DTYPES if complete and indexed else cases.INDEX_DTYPES[-1:]:
                yield operator, deterministic, name, dtype, index_dtype


def digests(*, complete):
    """Digest of each deterministic result by what it is of, NaN payloads aside; fast candidates run too."""
    found = {}
    for operator, deterministic, name, dtype, index_dtype in runs(complete=complete):
        for case in cases.SMALL_CASES:
            for kind, grad, indices in operands(case, dtype, index_dtype) if case.operator == operator else ():
                for threads in (1, 3) if complete else (1,):
                    options = {"deterministic": deterministic, "num_threads": threads, "algorithm": name}
                    result = plan_for(case, dtype, index_dtype, **options).run(grad, indices)
                    result[np.isnan(result)] = np.nan
                    if deterministic:
                        label = f"{operator} {dtype} {index_dtype} {name} {case.name} {kind} {threads}"
                        found[label] = hashlib.sha256(result.tobytes()).hexdigest()[:16]
    return found


CHILD = """
import json
import test_numeric, test_targets
exec(test_numeric.CONVERSIONS + "check()")
print(json.dumps(test_targets.digests(complete={complete})))
"""


def elsewhere(targets, *, complete):
    """What fresh processes find, one a target, at once."""
    code = CHILD.format(complete=complete)
    pool = ThreadPoolExecutor()
    found = {name: pool.submit(python, code, timeout=3600, **where) for name, where in targets.items()}
    pool.shutdown(wait=False)
    return found


@pytest.fixture(scope="module")
def short():
    return elsewhere(TARGETS, complete=False)


@pytest.fixture(scope="module")
def long():
    return elsewhere(TARGETS | LEVELS, complete=True)


@cache
def here(*, complete):
    return digests(complete=complete)


def check(found, *, complete):
    want, got = here(complete=complete), json.loads(found.result())
    assert list(got) == list(want)
    assert len(want) > 200
    first = next((label for label in want if got[label] != want[label]), None)
    assert first is None, f"other bits: {first}"


@pytest.mark.trap("T30")
@pytest.mark.parametrize("name", TARGETS)
def test_t30_conversions_without_hardware_support(short, name):
    """LLVM would call a function that is not there. Results are those of this machine."""
    check(short[name], complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS | LEVELS)
def test_complete_results_are_those_of_this_machine(long, name):
    check(long[name], complete=True)


def test_a_target_that_llvm_does_not_know():
    """LLVM complains and takes the features that it is given."""
    code = """
import numpy as np
import poolgrad_numba as pg
grad, indices = np.float16([[[1, 2, 3]]]), np.array([[[1, 0, 1]]])
assert pg.adaptive_max_pool2d_backward(grad, (1, 1, 2), indices, num_threads=1).tolist() == [[[2, 4]]]
"""
    python(code, NUMBA_CPU_NAME="nonsense")


@pytest.mark.skipif(not X86, reason="features of x86-64")
@pytest.mark.parametrize("features", ["+f16c,-f16c", "+f16c,-avx", "+f16c,-sse4.2"])
def test_features_that_take_f16c_away_again(features):
    """LLVM calls a routine that is not there where code asks for an instruction that it was told not to use."""
    python(
        """
import numpy as np, poolgrad_numba as pg
grad = np.float16([[[1.5]]])
assert pg.adaptive_max_pool2d_backward(grad, (1, 1, 2), np.array([[[1]]])).tolist() == [[[0, 1.5]]]
""",
        **target("haswell", features),
    )
