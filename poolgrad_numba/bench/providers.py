"""Who runs a case: this package's faces and modes, copies as yardsticks, and peers where they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import poolgrad_numba
from poolgrad_numba import PoolGradError
from poolgrad_numba.kernels.copies import copy_plain, copy_streaming
from poolgrad_numba.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poolgrad_numba.bench.workload import Workload

FAST: Final = "fast"
DETERMINISTIC: Final = "deterministic"
PLAN: Final = "plan"
OURS: Final = (FAST, DETERMINISTIC, PLAN)
COPY: Final = "copy"
COPY_STREAMING: Final = "copy_streaming"
INTERPRETER: Final = "interpreter"

PREALLOCATED: Final = "preallocated"
ALLOCATING: Final = "allocating"

_GRAIN: Final = 2**18  # bytes a worker of a copy: for less, starting threads costs more than they save

# Largest difference from the deterministic result, for each unit of a value and one: 16-bit peers may round each sum.
_TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class Provider:
    """One way to run a workload.

    Attributes
    ----------
    name : str
        A mode or a face of this package, a peer, or a yardstick.
    form : str
        ``preallocated``: the result array is given. ``allocating``: the call makes it.
    run : callable
        Runs once.
    mode, candidate : str
        For this package: its mode, and the algorithm that the plan chose.
    as_array : callable
        Turns what ``run`` gives into a NumPy array; ``None`` for a yardstick, which gives no result.
    """

    name: str
    form: str
    run: Callable[[], Any]
    mode: str | None = None
    candidate: str | None = None
    as_array: Callable[[Any], NDArray[Any]] | None = np.asarray


class LeftOut(NamedTuple):
    """A provider that does not run a case, and why."""

    name: str
    reason: str


def ours(work: Workload, threads: int) -> list[Provider]:
    """Both modes through the public function, in both forms, and a plan's run."""
    case = work.case
    function = getattr(poolgrad_numba, case.operator)
    arguments = (work.grad, case.input_shape, *work.operands[1:])
    found = []
    for mode in (FAST, DETERMINISTIC):
        plan = case.plan(deterministic=mode == DETERMINISTIC, num_threads=threads)
        options = {**case.parameters, "deterministic": mode == DETERMINISTIC, "num_threads": threads}
        for form, out in ((PREALLOCATED, work.out), (ALLOCATING, None)):
            run = _call(function, *arguments, **options, out=out)
            found.append(Provider(mode, form, run, mode, plan.algorithm))
    plan = case.plan(deterministic=False, num_threads=threads)
    found.append(Provider(PLAN, PREALLOCATED, _call(plan.run, *work.operands, out=work.out), FAST, plan.algorithm))
    return found


def yardsticks(work: Workload, threads: int) -> list[Provider]:
    """Both copies, and a piece of the interpreter's own work, which says how fast calls are on this machine."""
    kernels = {COPY: copy_plain, COPY_STREAMING: copy_streaming}
    workers = max(1, min(threads, work.bytes_moved // _GRAIN))
    copies = [
        Provider(name, PREALLOCATED, _call(launch, kernel, workers, *work.copied), as_array=None)
        for name, kernel in kernels.items()
    ]
    return [*copies, Provider(INTERPRETER, PREALLOCATED, interpreter_work, as_array=None)]


def interpreter_work() -> int:
    """Take some tens of microseconds of calls, tuples and look-ups, as the checks before a launch do."""
    seen: dict[tuple[int, str], int] = {}
    for i in range(80):
        key = (i % 16, str(i % 8))
        seen[key] = seen.get(key, 0) + i
    return len(seen)


def check(work: Workload, provider: Provider) -> bool:
    """Whether the provider gives the deterministic result, up to rounding."""
    if provider.as_array is None:
        provider.run()
        return True
    want = work.expected
    work.out.fill(np.nan)  # whoever leaves a cell out is found
    got = provider.as_array(provider.run())
    allowed = _TOLERANCES[work.dtype.name]
    return got.shape == want.shape and np.allclose(got.astype(np.float32), want, rtol=allowed, atol=allowed)


def refuse_wrong_result(work: Workload, provider: Provider) -> None:
    """Raise a `PoolGradError` for a result of ours that is not the deterministic one."""
    if not check(work, provider):
        raise PoolGradError(f"{provider.name}, {provider.form}: the result of {work.case.name} is wrong")


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **options)
