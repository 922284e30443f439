"""``poolgrad-numba demo``: the four operators on real input, checked, timed and drawn."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from poolgrad_numba import aclnn
from poolgrad_numba.cli.common import CommandError, need_extra
from poolgrad_numba.config import get_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from rich.table import Table

    from poolgrad_numba.cli.cases import Case

_LEAST_RUNS = 7
_LEAST_SECONDS = 0.1

_OPENING = """\
This runs four gradients of pooling on real input: the photograph that ships with Matplotlib and the brain scan that \
ships with NiBabel. Each gradient is computed in fast and in deterministic mode, and compared with a plain Python loop.
"""
_OPERANDS = """\
A forward pooling gives the indices, a loss gives grad_output. For the photograph the loss is half the sum of the \
squared pooled values, so grad_output is the pooled values; for the scan it is half the sum of the squared differences \
between neighbours, so grad_output is largest at edges.
"""
_LEGEND = {
    "ms": f"median of at least {_LEAST_RUNS} calls after a first one, allocation of the result included; on a busy "
    "machine, several threads wait for each other",
    "GB/s": "bytes of the inputs and of the result, over that time",
    "largest diff": "largest difference from the plain loop, which adds in canonical order",
    "check": "deterministic: the very bits of the plain loop; fast: no further from the exact sum than (n+1)*eps "
    "times the sum of the magnitudes of a cell's n terms",
    "same bytes": "whether the bytes are the same with one thread and with all",
    "two phases": "whether the accelerator's call sequence (first phase, workspace, second phase on a stream, "
    "synchronize) with ACL_OPT_DETERMINISTIC on gives the bytes of the deterministic call",
}


class Row(NamedTuple):
    """What one mode and number of threads gave; ``same`` is ``None`` where it is not promised or not known."""

    mode: str
    threads: int
    algorithm: str
    seconds: float
    gigabytes: float
    difference: float
    holds: bool
    same: bool | None


def execute(arguments: argparse.Namespace) -> int:
    """Run the demo; 1 where a check fails."""
    need_extra("demo", "rich", "matplotlib", "nibabel")
    if not arguments.picture.parent.is_dir():
        raise CommandError(f"cannot write {arguments.picture}: {arguments.picture.parent} is no directory")
    from rich.console import Console  # noqa: PLC0415  (an extra, like what the next two import)

    from poolgrad_numba.cli import cases as inputs  # noqa: PLC0415
    from poolgrad_numba.cli import picture  # noqa: PLC0415

    console = Console(highlight=False)
    console.print(_OPENING)
    images = inputs.load_photograph(), inputs.load_scan()
    cases = inputs.make_cases(*images)
    console.print(_OPERANDS)

    gradients, rows = [], []
    for case in cases:
        with console.status(f"compiling and running {case.operator}"):
            gradient, measured = measure(case)
        gradients.append(gradient)
        rows += measured
        console.print(case.operator, style="bold")
        console.print(f"{case.what}: {case.operands[0].shape} -> {case.operands[1]}")
        console.print(_table(measured), "")
    same = two_phases(cases[1], gradients[1])
    console.print(f"{cases[1].operator} in two phases on a stream, deterministic: {_word(same)}\n")
    console.print(_legend(), "")
    picture.save(arguments.picture, images, cases, gradients)
    console.print(f"Picture: {arguments.picture}", soft_wrap=True, markup=False)

    failed = sum(not row.holds or row.same is False for row in rows) + (not same)
    console.print(_verdict(failed, rows), style="bold red" if failed else "bold green")
    return 1 if failed else 0


def measure(case: Case) -> tuple[NDArray[Any], list[Row]]:
    """Check and time one operator in both modes, with one thread and with all; also give its gradient."""
    expected = case.expect()
    all_threads = get_config().num_threads
    rows: list[Row] = []
    for mode in ("fast", "deterministic"):
        deterministic = mode == "deterministic"
        results = {
            threads: case.run(deterministic=deterministic, num_threads=threads) for threads in sorted({1, all_threads})
        }
        promised = deterministic and len(results) > 1
        same = len({result.tobytes() for result in results.values()}) == 1 if promised else None
        for threads, result in results.items():
            seconds = _median(case, deterministic=deterministic, num_threads=threads)
            plan = case.plan(deterministic=deterministic, num_threads=threads)
            speed = case.nbytes / seconds / 1e9
            holds = expected.holds(result, deterministic=deterministic)
            rows.append(Row(mode, threads, plan.algorithm, seconds, speed, expected.difference(result), holds, same))
    return result, rows


def two_phases(case: Case, wanted: NDArray[Any]) -> bool:
    """Run adaptive 2-d max pooling as on the accelerator, deterministic; whether it gives the wanted bytes."""
    grad, shape, indices = case.operands
    result = np.full(shape, np.nan, grad.dtype)
    former, _ = aclnn.aclrtGetCurrentContext()
    context, made = aclnn.aclrtCreateContext()
    stream, opened = aclnn.aclrtCreateStream()
    if context is None or stream is None:
        return False
    statuses = [made, opened, aclnn.aclrtCtxSetSysParamOpt(aclnn.ACL_OPT_DETERMINISTIC, 1)]
    size, executor, status = aclnn.aclnnAdaptiveMaxPool2dBackwardGetWorkspaceSize(grad, result, indices, result)
    statuses.append(status)
    if executor is not None:
        workspace = np.empty(size, np.uint8)
        statuses.append(aclnn.aclnnAdaptiveMaxPool2dBackward(workspace, size, executor, stream))
    statuses += [aclnn.aclrtSynchronizeStream(stream), aclnn.aclrtDestroyStream(stream)]
    statuses.append(aclnn.aclrtDestroyContext(context))
    if former is not None:
        statuses.append(aclnn.aclrtSetCurrentContext(former))
    return not any(statuses) and result.tobytes() == wanted.tobytes()


def _median(case: Case, *, deterministic: bool, num_threads: int) -> float:
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _LEAST_SECONDS:
        start = time.perf_counter()
        case.run(deterministic=deterministic, num_threads=num_threads)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _table(rows: Sequence[Row]) -> Table:
    """One operator's rows; the widths are fixed, so that the tables line up, and fit 80 columns."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mode", min_width=13)
    table.add_column("threads", justify="right")
    table.add_column("algorithm", min_width=13)
    for name, width in (("ms", 6), ("GB/s", 5), ("largest\ndiff", 8)):
        table.add_column(name, justify="right", min_width=width)
    table.add_column("check", min_width=6)
    table.add_column("same\nbytes", min_width=5)
    for row in rows:
        table.add_row(
            row.mode,
            str(row.threads),
            row.algorithm,
            f"{row.seconds * 1e3:.3f}",
            f"{row.gigabytes:.2f}",
            f"{row.difference:.2g}",
            _word(row.holds),
            _word(row.same),
        )
    return table


def _legend() -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in _LEGEND.items():
        table.add_row(name, text)
    return table


def _word(holds: bool | None) -> str:
    if holds is None:
        return "-"
    return "[green]ok[/]" if holds else "[bold red]FAILED[/]"


def _verdict(failed: int, rows: Sequence[Row]) -> str:
    """Sum up the rows and the run in two phases."""
    if failed:
        return f"{failed} of {len(rows) + 1} results FAILED a check."
    most = max(row.threads for row in rows)
    across = f", with 1 thread as with {most}" if most > 1 else ""
    return (
        f"All {len(rows) + 1} results hold: the deterministic ones have the very bits of the plain loop{across}; the "
        "fast ones are within the error bound."
    )
