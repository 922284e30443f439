"""``poolgrad-numba bench``: time the operators beside copies and peers, and compare two such runs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from poolgrad_numba.bench import cold, compare, measure, report
from poolgrad_numba.bench.cases import CASES, QUICK
from poolgrad_numba.cli import info
from poolgrad_numba.cli.common import CommandError, need_extra, reason, write_safely
from poolgrad_numba.cli.warmup import progress
from poolgrad_numba.config import get_config
from poolgrad_numba.threads import most as most_threads

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

ROUNDS: Final = 20
QUICK_ROUNDS: Final = 5


def execute(arguments: argparse.Namespace) -> int:
    """Time, or compare; gives 1 where the comparison finds something slower."""
    need_extra("bench", "rich")
    return _compare(arguments) if arguments.action == "compare" else _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.picture is not None:
        need_extra("bench --picture", "matplotlib")
    threads = _threads(arguments.threads)
    names = arguments.cases or (QUICK if arguments.quick else None)
    chosen = [case for case in CASES if names is None or case.name in names]
    if arguments.quick and not arguments.cases:
        chosen = list({case.name: case for case in reversed(chosen)}.values())[::-1]  # no variants
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    starts = cold.STARTS if arguments.cold_start else 0
    with progress(len(chosen) * len(threads) + starts) as advance:
        found = measure.run(chosen, threads, rounds, info.versions(), advance)
        first_calls = cold.cold_start(advance) if arguments.cold_start else None
    machine = {name: value for name, value in info.collect().items() if name not in ("kernel_cache", "operators")}
    document = measure.document(found, machine, first_calls)
    _write(arguments, document)
    _show(report.tables(document))
    print(
        f"{rounds} rounds, {', '.join(map(str, threads))} threads; 100 %: as fast as the faster copy of as many bytes"
    )
    return 0


def _threads(asked: Sequence[int] | None) -> list[int]:
    """Numbers of threads to measure with; refuses those that cannot be had."""
    if asked is None:
        return [get_config().num_threads]
    for count in asked:
        if not 1 <= count <= most_threads():
            raise CommandError(f"--threads: got {count}, wanted 1 to {most_threads()}")
    return list(dict.fromkeys(asked))


def _write(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the files that were asked for."""
    if arguments.json is not None:
        _write_text(arguments.json, json.dumps(document, indent=1) + "\n")
    if arguments.csv is not None:
        _write_text(arguments.csv, report.csv_text(document["rows"]))
    if arguments.markdown is not None:
        _write_text(arguments.markdown, report.markdown(document))
    if arguments.picture is not None:
        figure = report.picture(document)
        write_safely(arguments.picture, lambda file: figure.savefig(file, format="png", dpi=120))


def _write_text(path: Path, text: str) -> None:
    write_safely(path, lambda file: file.write(text.encode()))


def _show(tables: Sequence[report.Table]) -> None:
    from rich.console import Console  # noqa: PLC0415  (an extra)
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    for one in tables:
        table = Table(title=one.title, title_justify="left")
        for place, header in enumerate(one.headers):
            table.add_column(header, justify="right" if place else "left", no_wrap=not place, overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)


def _compare(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.threshold < math.inf:
        raise CommandError(f"--threshold: got {arguments.threshold}, wanted a positive number")
    changes = compare.compare(_read(arguments.base), _read(arguments.head))
    slower = report.comparison(changes, arguments.threshold)
    if slower.rows:
        _show([slower])
    missing = sum(change.seconds[1] is None for change in changes)
    print(
        f"{len(changes)} rows compared: {len(slower.rows) - missing} slower by more than {arguments.threshold:g}, "
        f"{missing} missing"
    )
    return 1 if slower.rows else 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise CommandError(f"cannot read {path}: not JSON ({error})") from error
