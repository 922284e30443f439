"""What several test files need."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import cases
import poolgrad_numba as pg
from poolgrad_numba import config
from poolgrad_numba.plan import OPS

THREADS = (1, 2, 3, 8)


def _has_tbb():
    try:
        ctypes.CDLL("libtbb.so.12")
    except OSError:
        return False
    return True


LAYERS = ("omp", "workqueue", *(["tbb"] if _has_tbb() else []))


def same_bits(a, b):
    """Equal bit for bit, NaN payloads aside; +0.0 and -0.0 differ."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    integers = np.dtype(f"u{a.itemsize}")
    equal = (a.view(integers) == b.view(integers)) | (np.isnan(a) & np.isnan(b))
    return a.shape == b.shape and a.dtype == b.dtype and bool(equal.all())


def forget_environment():
    """Make the configuration read the environment anew."""
    config._environment_mode.cache_clear()
    config._environment_threads.cache_clear()


def algorithms(operator, *, deterministic):
    return [candidate.name for candidate in OPS[operator].candidates(deterministic=deterministic)]


def forced_runs():
    """Every (operator, deterministic, algorithm)."""
    return [
        (operator, deterministic, name)
        for operator in cases.OPERATORS
        for deterministic in (False, True)
        for name in algorithms(operator, deterministic=deterministic)
    ]


def plan_for(case, dtype=np.float32, index_dtype=np.int64, **options):
    return pg.make_plan(
        case.operator,
        input_shape=case.input_shape,
        dtype=dtype,
        index_dtype=index_dtype if case.indexed else None,
        **case.plan_parameters,
        **options,
    )


def call(case, grad, indices=None, **options):
    """Call the case's public function."""
    return getattr(pg, case.operator)(*case.operands(grad, indices), **case.parameters, **options)


def python(code, *, flags=(), timeout=120, **environment):
    """Run code in a fresh process, with this folder and this very package to import from; its standard output.

    Fails on a signal, an exit code or a time-out.
    """
    here = Path(__file__).parent, Path(pg.__file__).parent.parent
    environment.setdefault("PYTHONPATH", os.pathsep.join(map(str, here)))
    done = subprocess.run(
        [sys.executable, "-P", *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
