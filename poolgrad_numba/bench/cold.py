"""Cold start: what a process's first call takes, with an empty kernel cache and with a filled one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

from poolgrad_numba import PoolGradError
from poolgrad_numba.bench import cases
from poolgrad_numba.bench.providers import DETERMINISTIC, FAST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EMPTY: Final = "empty"
_FILLED: Final = "filled"
MODES: Final = (FAST, DETERMINISTIC)
STARTS: Final = len(cases.COLD) * len(MODES) * 2  # processes that a whole measurement starts

# Zeros are legal operands of every operator, and the time of a call on them is told apart by a second call.
_SCRIPT: Final = """
import json, sys, time
directory, name, mode = sys.argv[1:]
start = time.perf_counter()
import numba
numba.config.CACHE_DIR = directory
import numpy as np
import poolgrad_numba
imported = time.perf_counter()
from poolgrad_numba.bench.cases import BY_NAME
case = BY_NAME[name]
plan = case.plan(deterministic=mode == "deterministic", num_threads=None)
arrays = [np.zeros(plan.output_shape, plan.problem.dtype)]
if case.indexed:
    arrays.append(np.zeros(plan.output_shape, plan.problem.index_dtype))
out = np.zeros(case.input_shape, plan.problem.dtype)
times = [time.perf_counter()]
for _ in range(2):
    plan.run(*arrays, out=out)
    times.append(time.perf_counter())
print(json.dumps({
    "candidate": plan.algorithm, "import": imported - start, "first": times[1] - times[0], "second": times[2] - times[1]
}))
"""


def cold_start(
    advance: Callable[[str], None], names: Sequence[str] = cases.COLD, modes: Sequence[str] = MODES
) -> list[dict[str, Any]]:
    """Measure the first call of each operator and mode in fresh processes.

    Parameters
    ----------
    advance : callable
        Is told what comes next.
    names : sequence of str
        Speed cases.
    modes : sequence of str

    Returns
    -------
    list of dict
        One row a process: ``op``, ``case``, ``mode``, ``candidate``, ``cache`` (``empty`` or ``filled``), and the
        seconds of ``import``, of the ``first`` call and of the ``second``.
    """
    rows = []
    for name in names:
        for mode in modes:
            with tempfile.TemporaryDirectory() as directory:
                for cache in (_EMPTY, _FILLED):
                    advance(f"cold start, {name}, {mode}, {cache} cache")
                    facts = {"op": cases.BY_NAME[name].operator, "case": name, "mode": mode, "cache": cache}
                    rows.append({**facts, **_fresh_process(directory, name, mode)})
    return rows


def _fresh_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own script)
    if done.returncode:
        raise PoolGradError(f"a fresh process failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return dict(json.loads(done.stdout))
