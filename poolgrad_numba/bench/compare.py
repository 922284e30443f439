"""Two runs side by side: what became slower, each beside the yardsticks of its own run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poolgrad_numba import PoolGradValueError
from poolgrad_numba.bench.measure import SCHEMA
from poolgrad_numba.bench.providers import COPY, INTERPRETER, OURS

if TYPE_CHECKING:
    from collections.abc import Mapping

THRESHOLD: Final = 1.25
_RUN: Final = ("case", "dtype", "index_dtype", "layout", "threads")  # what shares its yardsticks
_KEY: Final = (*_RUN, "provider", "form")

Key = tuple[Any, ...]


class Change(NamedTuple):
    """One row in both runs: seconds in each, and how much slower it is now beside the yardsticks.

    Attributes
    ----------
    row : dict
        The row of the base run.
    seconds : tuple of float or None
        20th percentiles; of the second run ``None`` where it has no such row.
    slowdown : float
        Above 1: slower than the base run. Infinity for a missing row.
    """

    row: dict[str, Any]
    seconds: tuple[float, float | None]
    slowdown: float


def compare(base: Any, head: Any) -> list[Change]:
    """Compare the rows of this package in two documents, the largest slowdown first.

    A time counts beside what its own run took for a plain copy of as many bytes and for a fixed piece of the
    interpreter's work, both added: so a machine that is slower altogether changes nothing. The interpreter's part is
    for calls of microseconds, where a copy is nothing; beside one of milliseconds it is nothing itself. The 20th
    percentile is taken, as what disturbs a measurement only ever makes it longer.

    Raises
    ------
    PoolGradValueError
        For anything that is not a document of this schema, or has no rows of this package.
    """
    before, after = _relative("BASE", base), _relative("HEAD", head)
    changes = []
    for key, (row, relative) in before.items():
        if key in after:
            other, now = after[key]
            changes.append(Change(row, (row["p20"], other["p20"]), now / relative))
        else:
            changes.append(Change(row, (row["p20"], None), math.inf))
    return sorted(changes, key=lambda change: -change.slowdown)


def _relative(name: str, document: Any) -> dict[Key, tuple[dict[str, Any], float]]:
    """Each row of ours, and its time beside its run's yardsticks."""
    rows = _rows(name, document)
    yards = _yardsticks(rows)
    found = {}
    for row in rows:
        if row["provider"] in OURS:
            run = tuple(row[field] for field in _RUN)
            if len(yards.get(run, {})) < 2:
                raise PoolGradValueError(f"{name}: {row['case']} has no rows of {COPY} and {INTERPRETER}")
            found[tuple(row[field] for field in _KEY)] = (row, row["p20"] / sum(yards[run].values()))
    if not found:
        raise PoolGradValueError(f"{name}: no rows of {', '.join(OURS)}")
    return found


def _yardsticks(rows: list[dict[str, Any]]) -> Mapping[Key, Mapping[str, float]]:
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row["provider"] in (COPY, INTERPRETER):
            found.setdefault(tuple(row[field] for field in _RUN), {})[row["provider"]] = row["p20"]
    return found


def _rows(name: str, document: Any) -> list[dict[str, Any]]:
    """Check that this is a document of the schema, as far as a comparison reads it."""
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise PoolGradValueError(f"{name}: not a document of poolgrad-numba bench --json")
    if document.get("schema") != SCHEMA:
        raise PoolGradValueError(f"{name}: got schema {document.get('schema')!r}, wanted {SCHEMA}")
    rows: list[dict[str, Any]] = document["rows"]
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not all(_is_plain(row.get(field, [])) for field in _KEY):
            raise PoolGradValueError(f"{name}: row {number} lacks one of {', '.join(_KEY)}")
        p20 = row.get("p20")
        if isinstance(p20, bool) or not isinstance(p20, int | float) or not 0 < p20 < math.inf:
            raise PoolGradValueError(f"{name}: row {number}: p20: got {p20!r}, wanted seconds")
    return rows


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int)
