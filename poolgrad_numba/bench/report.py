"""What a run looks like: tables of text, CSV, and a picture."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poolgrad_numba.bench.cases import CONTIGUOUS
from poolgrad_numba.bench.measure import FIELDS
from poolgrad_numba.bench.peers import JAX, PEERS, TORCH
from poolgrad_numba.bench.providers import (
    ALLOCATING,
    COPY,
    COPY_STREAMING,
    DETERMINISTIC,
    FAST,
    INTERPRETER,
    PLAN,
    PREALLOCATED,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from poolgrad_numba.bench.compare import Change

_SHOWN: Final = (FAST, DETERMINISTIC, PLAN, TORCH, JAX, COPY, COPY_STREAMING)
_TITLES: Final = {
    PREALLOCATED: "The result's array is given",
    ALLOCATING: "The call allocates the result",
}
_HEADERS: Final = {PLAN: "plan.run", COPY_STREAMING: "streaming"}
_COLOURS: Final = {
    FAST: "#1f5fa8",
    DETERMINISTIC: "#6aa7de",
    PLAN: "#0c2f57",
    TORCH: "#e07b39",
    JAX: "#7a9a3a",
    COPY: "#b0b0b0",
    COPY_STREAMING: "#d5d5d5",
}

Rows = dict[str, dict[str, Any]]  # by provider
Group = tuple[str, int]  # label and threads


class Table(NamedTuple):
    """A table of text; the first column is to the left, all others to the right."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def label(row: Mapping[str, Any]) -> str:
    """Name what a row has run: the case, and what is unusual about it."""
    parts = [row["case"], *([row["dtype"]] if row["dtype"] != "float32" else [])]
    if row["index_dtype"] not in (None, "int64"):
        parts.append(row["index_dtype"])
    if row["layout"] != CONTIGUOUS:
        parts.append(row["layout"].replace("_", " "))
    return ", ".join(parts)


def milliseconds(seconds: float) -> str:
    """Write a time with three digits, all of them before the point if it takes more."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Make the tables of a run."""
    found = []
    for form in (PREALLOCATED, ALLOCATING):
        groups = _groups(document["rows"], form)
        found += [_medians(_TITLES[form], groups), _shares(_TITLES[form], groups)]
    if "cold_start" in document:
        found.append(_cold_starts(document["cold_start"]))
    if document["left_out"]:
        found.append(_left_out(document["left_out"]))
    return found


def _medians(title: str, groups: Mapping[Group, Rows]) -> Table:
    """Times of all providers, the copies beside them."""
    shown = _there(groups, _SHOWN)
    rows = [
        (_name(group, groups), *(milliseconds(found[name]["p50"]) if name in found else "" for name in shown))
        for group, found in groups.items()
    ]
    return Table(f"{title}: medians, ms", ("case", *(_HEADERS.get(name, name) for name in shown)), rows)


def _shares(title: str, groups: Mapping[Group, Rows]) -> Table:
    """How near each comes to the faster copy, and how many times as long the peers take."""
    near = _there(groups, (FAST, DETERMINISTIC, *PEERS))
    ratios = [(peer, mode) for peer in _there(groups, PEERS) for mode in (FAST, DETERMINISTIC)]
    rows = [
        (
            _name(group, groups),
            *(_percent(found[name]["copy_fraction"]) if name in found else "" for name in near),
            *(_ratio(found, peer, mode) for peer, mode in ratios),
        )
        for group, found in groups.items()
    ]
    headers = ("case", *near, *(f"{peer} / {mode}" for peer, mode in ratios))
    return Table(f"{title}: speed beside the faster copy, and ratios of times", headers, rows)


def _name(group: Group, groups: Mapping[Group, Rows]) -> str:
    """Name a group; the number of threads is told where there are several."""
    name, threads = group
    return name if len({count for _, count in groups}) == 1 else f"{name}, threads: {threads}"


def _there(groups: Mapping[Group, Rows], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(name in found for found in groups.values())]


def _groups(rows: Sequence[Mapping[str, Any]], form: str) -> dict[Group, Rows]:
    """Rows by what took turns, then by provider; the copies belong to both forms."""
    found: dict[Group, Rows] = {}
    for row in rows:
        is_copy = row["provider"] in (COPY, COPY_STREAMING)
        if (row["form"] == form or is_copy) and row["provider"] != INTERPRETER:
            found.setdefault((label(row), row["threads"]), {})[row["provider"]] = dict(row)
    return found


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def _ratio(group: Rows, peer: str, mode: str) -> str:
    return f"{group[peer]['p50'] / group[mode]['p50']:.2f}" if {peer, mode} <= group.keys() else ""


def _cold_starts(rows: Sequence[Mapping[str, Any]]) -> Table:
    headers = ("case", "mode", "kernel cache", "import, ms", "first call, ms", "second call, ms")
    cells = [
        (row["case"], row["mode"], row["cache"], *(milliseconds(row[name]) for name in ("import", "first", "second")))
        for row in rows
    ]
    return Table("First calls in fresh processes", headers, cells)


def _left_out(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Say once why a provider did not run, with all cases that this holds for."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names = cases.setdefault((row["name"], row["reason"]), [])
        if label(row) not in names:
            names.append(label(row))
    found = [(name, reason, "; ".join(names)) for (name, reason), names in cases.items()]
    return Table("Left out", ("provider", "why", "cases"), found)


def comparison(changes: Sequence[Change], threshold: float) -> Table:
    """Make the table of a comparison: what is slower than the threshold allows, and what is missing."""
    rows = []
    for change in changes:
        if change.slowdown > threshold:
            row, (before, after) = change.row, change.seconds
            now = ("missing", "") if after is None else (milliseconds(after), f"{change.slowdown:.2f}")
            rows.append((label(row), str(row["threads"]), row["provider"], row["form"], milliseconds(before), *now))
    headers = ("case", "threads", "provider", "form", "before, ms", "now, ms", "slowdown")
    return Table(f"Slower by more than {threshold:g}, beside each run's own yardsticks", headers, rows)


def markdown(document: Mapping[str, Any]) -> str:
    """Write the tables for a page of documentation, under a line that tells the machine and the versions."""
    machine = document["machine"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("poolgrad_numba", "numba", "numpy", "torch", "jax") if name in machine
    )
    processor = f"{machine['cpu']} ({machine['cpu_llvm_name']}), {machine['cores']} cores, {caches}"
    lines = [f"{processor}; {versions}; {document['date'][:10]}.", ""]
    for table in tables(document):
        rule = "|".join(["---", *["---:"] * (len(table.headers) - 1)])
        lines += [f"### {table.title}", "", _line(table.headers), f"|{rule}|", *map(_line, table.rows), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows as CSV, versions in one cell; what a row does not have is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        versions = " ".join(f"{name}={version}" for name, version in row["versions"].items())
        writer.writerow({**row, "versions": versions})
    return text.getvalue()


def picture(document: Mapping[str, Any]) -> Figure:
    """Draw each provider's share of the copy limit, a group of bars for each case, the result's array given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415

    groups = _groups(document["rows"], PREALLOCATED)
    shown = _there(groups, (FAST, DETERMINISTIC, TORCH, COPY))
    figure = Figure(figsize=(9, 1.6 + 0.16 * len(groups) * (len(shown) + 1.2)), layout="constrained")
    FigureCanvasAgg(figure)  # no window system is needed
    axes = figure.subplots()
    thickness = 1 / (len(shown) + 1.2)
    for place, name in enumerate(shown):
        there = [(at, group[name]["copy_fraction"]) for at, group in enumerate(groups.values()) if name in group]
        middles = [at + (place - (len(shown) - 1) / 2) * thickness for at, _ in there]
        axes.barh(middles, [share for _, share in there], 0.92 * thickness, label=name, color=_COLOURS[name])
    axes.axvline(1.0, color="black", linewidth=1)
    names = [_name(group, groups) for group in groups]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel("copy limit / time: 1 is as fast as the faster way to copy as many bytes")
    figure.legend(loc="outside upper right", ncols=len(shown), frameon=False)
    return figure
