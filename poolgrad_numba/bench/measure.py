"""The measurement: providers take turns inside one process, so that a noisy machine slows all of them alike."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.bench import providers
from poolgrad_numba.bench.peers import peers, torch_threads
from poolgrad_numba.bench.providers import COPY, COPY_STREAMING, INTERPRETER, Provider
from poolgrad_numba.bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from poolgrad_numba.bench.cases import SpeedCase

SCHEMA: Final = 1
FIELDS: Final = (
    "op", "case", "dtype", "index_dtype", "layout", "mode", "provider", "form", "candidate", "threads", "rounds",
    "p20", "p50", "p80", "gbps", "copy_fraction", "copy_ratio", "versions",
)  # fmt: skip

_TURN: Final = 0.002  # seconds: a shorter call is repeated for as long, and timed together with its repetitions
_PAUSE: Final = 0.01  # seconds before a turn: idle OpenMP threads of the one before may spin for that long
_PATIENCE: Final = 10.0  # seconds for all turns of one provider, after which it sits out the rest of the rounds
_LEAST_ROUNDS: Final = 3


@dataclass
class Report:
    """What a run has measured: rows, and the providers that did not run."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)


def measure(case: SpeedCase, threads: int, rounds: int, versions: Mapping[str, str]) -> Report:
    """Check every provider's result, and time all of them in turns.

    Parameters
    ----------
    case : SpeedCase
    threads : int
        For every provider.
    rounds : int
        Turns of each provider.
    versions : mapping
        Of the packages at work; goes into the rows.

    Raises
    ------
    PoolGradError
        For a wrong result of this package.
    """
    work = Workload(case)
    with torch_threads(threads):
        chosen, left_out = cast_of(work, threads)
        times = take_turns([provider.run for provider in chosen], rounds)
    medians = {provider.name: float(np.median(found)) for provider, found in zip(chosen, times, strict=True)}
    rows = [
        row(identity(work, provider, threads, versions), found, work.bytes_moved, medians)
        for provider, found in zip(chosen, times, strict=True)
    ]
    facts = {name: getattr(case, name) for name in ("dtype", "index_dtype", "layout")}
    return Report(rows, [{"case": case.name, **facts, **missing._asdict()} for missing in left_out])


def cast_of(work: Workload, threads: int) -> tuple[list[Provider], list[providers.LeftOut]]:
    """Gather all who run the workload, their results checked."""
    mine = providers.ours(work, threads)
    for provider in mine:
        providers.refuse_wrong_result(work, provider)
    others, left_out = peers(work, threads)
    return [*mine, *others, *providers.yardsticks(work, threads)], left_out


def take_turns(runs: Sequence[Callable[[], Any]], rounds: int, seed: int = 0) -> list[NDArray[np.float64]]:
    """Time every function once a round, in an order that changes from round to round; seconds a call, of each."""
    calls = [_calls_a_turn(run) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    spent = [0.0] * len(runs)
    rng = np.random.default_rng(seed)
    for done in range(rounds):
        for i in rng.permutation(len(runs)):
            if done >= _LEAST_ROUNDS and spent[i] > _PATIENCE:
                continue
            time.sleep(_PAUSE)
            if calls[i] > 1:
                runs[i]()  # after a pause, a call of microseconds takes several times as long
            seconds = _time(runs[i], calls[i])
            spent[i] += seconds * calls[i]
            times[i].append(seconds)
    return [np.array(found) for found in times]


def _calls_a_turn(run: Callable[[], Any]) -> int:
    run()
    return max(1, int(_TURN / min(_time(run, 1), _time(run, 1))))


def _time(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


# -- rows and the document ---------------------------------------------------------------------------------------


def identity(work: Workload, provider: Provider, threads: int, versions: Mapping[str, str]) -> dict[str, Any]:
    """Say what was timed: a row without its numbers."""
    case = work.case
    return {
        "op": case.operator,
        "case": case.name,
        "dtype": case.dtype,
        "index_dtype": case.index_dtype,
        "layout": case.layout,
        "mode": provider.mode,
        "provider": provider.name,
        "form": provider.form,
        "candidate": provider.candidate,
        "threads": threads,
        "versions": dict(versions),
    }


def row(
    facts: Mapping[str, Any], times: Iterable[float], bytes_moved: int, medians: Mapping[str, float]
) -> dict[str, Any]:
    """Complete a row: percentiles in seconds, and what they are beside the copies' ``medians``, where there are any."""
    found = list(times)
    p20, p50, p80 = (float(value) for value in np.percentile(found, (20, 50, 80)))
    numbers: dict[str, Any] = {"rounds": len(found), "p20": p20, "p50": p50, "p80": p80}
    moves = facts["provider"] != INTERPRETER
    copies = [medians[name] for name in (COPY, COPY_STREAMING) if name in medians]
    numbers["gbps"] = bytes_moved / p50 / 1e9 if moves else None
    numbers["copy_fraction"] = min(copies) / p50 if moves and copies else None
    numbers["copy_ratio"] = p50 / medians[COPY] if moves and COPY in medians else None
    whole = {**facts, **numbers}
    return {name: whole[name] for name in FIELDS}


def run(
    cases: Sequence[SpeedCase],
    threads: Sequence[int],
    rounds: int,
    versions: Mapping[str, str],
    advance: Callable[[str], None],
) -> Report:
    """Measure all cases with each number of threads; ``advance`` is told what comes next."""
    whole = Report()
    for case in cases:
        for count in threads:
            advance(f"{case.name}, {case.dtype}, {count} thread{'' if count == 1 else 's'}")
            found = measure(case, count, rounds, versions)
            whole.rows += found.rows
            whole.left_out += [missing for missing in found.left_out if missing not in whole.left_out]
    return whole


def document(
    report: Report, machine: Mapping[str, Any], cold_start: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Put a run together: what it ran on, when, and what was found; all of it goes into JSON."""
    return {
        "schema": SCHEMA,
        "machine": {**machine, "caches": caches()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": report.rows,
        "left_out": report.left_out,
        **({} if cold_start is None else {"cold_start": list(cold_start)}),
    }


def caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, str]:
    """Sizes of the processor's caches, as far as the system tells."""
    try:
        return {
            f"L{_read(index / 'level')} {_read(index / 'type').lower()}": _read(index / "size")
            for index in sorted(folder.glob("index*"))
        }
    except OSError:
        return {}


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
