"""The benchmark facility: its rows, its files, its comparison."""

import copy
import csv
import json
import time
from dataclasses import replace

import numpy as np
import pytest

import cases
from poolgrad_numba import PoolGradError
from poolgrad_numba.bench import cases as speed
from poolgrad_numba.bench import cold, compare, measure, peers, providers, report
from poolgrad_numba.bench.workload import Workload
from poolgrad_numba.cli import main
from support import algorithms

OURS = [
    ("fast", "preallocated"),
    ("fast", "allocating"),
    ("deterministic", "preallocated"),
    ("deterministic", "allocating"),
    ("plan", "preallocated"),
]
SMALL = {
    cases.MAX2D: speed.SpeedCase("small", cases.MAX2D, (2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    cases.ADAPTIVE2D: speed.SpeedCase("small", cases.ADAPTIVE2D, (2, 3, 9, 8), output_size=(4, 3)),
    cases.ADAPTIVE3D: speed.SpeedCase("small", cases.ADAPTIVE3D, (2, 3, 5, 6, 7), output_size=(2, 3, 3)),
    cases.AVG3D: speed.SpeedCase(
        "small", cases.AVG3D, (2, 3, 5, 6, 7), {"kernel_size": 3, "stride": 1, "padding": 1}, index_dtype=None
    ),
}


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run ``bench`` in an empty directory; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def document():
    """A run of the tiny case, as JSON gives it back."""
    found = measure.measure(speed.BY_NAME["tiny"], 2, 2, {"numpy": np.__version__})
    return json.loads(json.dumps(measure.document(found, {"cpu": "a processor"}, None)))


def ours(document, provider="fast", form="preallocated"):
    """One row of ours."""
    (row,) = (row for row in document["rows"] if (row["provider"], row["form"]) == (provider, form))
    return row


def slower(document, factor, *, only=None):
    """The document with all times, or with those of one row, longer."""
    changed = copy.deepcopy(document)
    for row in changed["rows"] if only is None else [ours(changed, *only)]:
        row.update({name: factor * row[name] for name in ("p20", "p50", "p80")})
    return changed


# -- cases and providers -----------------------------------------------------------------------------------------


def test_what_is_timed_is_what_is_checked():
    assert [case.name for case in cases.LARGE_CASES] == [case.name for case in speed.BASE_CASES]
    for large, timed in zip(cases.LARGE_CASES, speed.BASE_CASES, strict=True):
        assert large.output_shape == timed.plan(deterministic=True, num_threads=1).output_shape
    assert len(set(speed.CASES)) == len(speed.CASES)
    assert set(speed.QUICK) | set(speed.COLD) <= speed.BY_NAME.keys()


@pytest.mark.parametrize("layout", [speed.CONTIGUOUS, speed.CHANNELS_LAST])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_every_provider_gives_the_same_result(operator, dtype, layout):
    case = replace(SMALL[operator], dtype=dtype, layout=layout)
    work = Workload(case)
    assert work.out.flags.c_contiguous == (layout == speed.CONTIGUOUS)
    found = providers.ours(work, 2)
    assert [(one.name, one.form) for one in found] == OURS
    assert all(providers.check(work, one) for one in found)
    others, left_out = peers.peers(work, 2)
    assert {one.name for one in others} | {one.name for one in left_out} == set(peers.PEERS)
    assert all(one.reason for one in left_out)


def test_indices_are_a_real_forwards():
    work = Workload(SMALL[cases.MAX2D])
    planes = work.sample.reshape(2, 3, -1)
    pooled = np.take_along_axis(planes, work.indices.reshape(2, 3, -1), axis=-1)
    assert pooled.mean() > 1 > planes.mean()  # the largest of nine normal numbers is 1.5 on average


def test_a_wrong_result_is_noticed():
    work = Workload(SMALL[cases.MAX2D])
    with pytest.raises(PoolGradError, match="fast, preallocated: the result of small is wrong"):
        providers.refuse_wrong_result(work, providers.Provider("fast", "preallocated", lambda: work.out))


@pytest.mark.parametrize("size", [7, 64])
def test_copies_have_as_many_bytes(size):
    work = Workload(replace(SMALL[cases.MAX2D], input_shape=(1, 3, size, size)))
    source, target = work.copied
    assert source.nbytes - sum(array.nbytes for array in work.operands) in range(8)
    assert target.nbytes - work.out.nbytes in range(8)
    assert target.ctypes.data % 64 == 0
    assert all(providers.check(work, one) for one in providers.yardsticks(work, 2))


# -- rows --------------------------------------------------------------------------------------------------------


def test_rows_have_the_schema(document):
    assert document.keys() == {"schema", "machine", "date", "rows", "left_out"}
    assert document["schema"] == 1
    seen = [(row["provider"], row["form"]) for row in document["rows"]]
    assert len(set(seen)) == len(seen)
    assert {*OURS, ("copy", "preallocated"), ("copy_streaming", "preallocated")} <= set(seen)
    for row in document["rows"]:
        assert tuple(row) == measure.FIELDS
        assert (row["case"], row["op"], row["threads"], row["rounds"]) == ("tiny", cases.MAX2D, 2, 2)
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        if row["provider"] != "interpreter":
            assert row["gbps"] == pytest.approx(16 * (28 * 28 * 4 + 14 * 14 * 12) / row["p50"] / 1e9)
            assert row["copy_ratio"] == pytest.approx(row["p50"] / ours(document, "copy")["p50"])
    assert max(ours(document, name)["copy_fraction"] for name in ("copy", "copy_streaming")) == 1
    assert ours(document, "deterministic")["candidate"] in algorithms(cases.MAX2D, deterministic=True)


def test_turns_are_taken_in_changing_order():
    order = []
    times = measure.take_turns([lambda i=i: order.append(i) or time.sleep(0.004) for i in range(3)], 5)
    turns = np.reshape(order[-15:], (5, 3))
    assert all(sorted(turn) == [0, 1, 2] for turn in turns.tolist())
    assert len({tuple(turn) for turn in turns.tolist()}) > 1
    assert all(len(found) == 5 and found.min() >= 0.004 for found in times)


def test_a_slow_provider_sits_out(monkeypatch):
    monkeypatch.setattr(measure, "_PATIENCE", 0.01)
    slow, quick = measure.take_turns([lambda: time.sleep(0.006), lambda: None], 8)
    assert (len(slow), len(quick)) == (3, 8)


def test_cold_start_fills_the_cache():
    empty, filled = cold.cold_start(lambda _: None, ["adaptive_head"], ["fast"])
    assert (empty["cache"], filled["cache"]) == ("empty", "filled")
    assert empty["candidate"] == filled["candidate"]
    assert 0 < filled["first"] < empty["first"]
    table = report.tables({"rows": [], "left_out": [], "cold_start": [empty, filled]})[-1]
    assert len(table.rows) == 2


# -- comparison --------------------------------------------------------------------------------------------------


def test_compare_finds_what_became_slower(document):
    changes = compare.compare(document, slower(document, 2, only=("plan", "preallocated")))
    assert changes[0].row["provider"] == "plan"
    assert [round(change.slowdown, 9) for change in changes] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("factor", [0.3, 1, 2])
def test_compare_does_not_mind_another_machine(document, factor):
    assert all(change.slowdown == pytest.approx(1) for change in compare.compare(document, slower(document, factor)))


def test_compare_names_what_is_missing(document):
    head = copy.deepcopy(document)
    head["rows"].remove(ours(head, "plan"))
    assert [change.row["provider"] for change in compare.compare(document, head) if change.seconds[1] is None] == [
        "plan"
    ]


def test_compare_command(command, document, tmp_path):
    for name, content in (
        ("base", document), ("doubled", slower(document, 2, only=("fast", "allocating"))),
        ("old", slower(document, 2)), ("less", {**document, "rows": document["rows"][1:]}),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert command("compare", "base.json", "base.json") == (
        0, "5 rows compared: 0 slower by more than 1.25, 0 missing\n", "",
    )  # fmt: skip
    assert command("compare", "base.json", "old.json")[0] == 0
    code, out, err = command("compare", "base.json", "doubled.json")
    assert (code, err) == (1, "")
    assert "2.00" in out
    assert out.endswith("5 rows compared: 1 slower by more than 1.25, 0 missing\n")
    assert command("compare", "base.json", "doubled.json", "--threshold", "2.5")[0] == 0
    code, out, _ = command("compare", "base.json", "less.json")
    assert (code, out.splitlines()[-1]) == (1, "5 rows compared: 0 slower by more than 1.25, 1 missing")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read head.json: No such file or directory"),
        (b"\xff\x00", "cannot read head.json: not JSON"),
        (b"{", "cannot read head.json: not JSON"),
        (b"[1]", "HEAD: not a document of poolgrad-numba bench --json"),
        (b'{"schema": 2, "rows": []}', "HEAD: got schema 2, wanted 1"),
        (b'{"schema": 1, "rows": []}', "HEAD: no rows of fast, deterministic, plan"),
        (b'{"schema": 1, "rows": [{"case": "tiny"}]}', "HEAD: row 0 lacks one of case, dtype"),
    ],
)
def test_compare_refuses_what_is_no_document(command, document, tmp_path, content, says):
    (tmp_path / "base.json").write_text(json.dumps(document))
    if content is not None:
        (tmp_path / "head.json").write_bytes(content)
    code, out, err = command("compare", "base.json", "head.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[0].update(p20=0), "row 0: p20: got 0, wanted seconds"),
        (lambda rows: rows[0].update(p20=True), "row 0: p20: got True, wanted seconds"),
        (lambda rows: rows[0].update(form=[]), "row 0 lacks one of"),
        (lambda rows: rows.__delitem__(slice(5, None)), "tiny has no rows of copy and interpreter"),
    ],
)
def test_compare_refuses_rows_that_it_cannot_read(document, change, says):
    head = copy.deepcopy(document)
    change(head["rows"])
    with pytest.raises(PoolGradError, match=says):
        compare.compare(document, head)


# -- the command -------------------------------------------------------------------------------------------------


def test_bench(command, tmp_path):
    files = [f"--{kind}={kind}.out" for kind in ("json", "csv", "picture", "markdown")]
    code, out, err = command("--cases", "tiny", "--rounds", 2, "--threads", 1, 2, *files)
    assert (code, err) == (0, "")
    assert "tiny" in out
    found = json.loads((tmp_path / "json.out").read_text())
    assert {row["threads"] for row in found["rows"]} == {1, 2}
    assert {"cpu", "python", "threading_layer", "numba", "caches"} <= found["machine"].keys()
    assert "kernel_cache" not in found["machine"]
    with (tmp_path / "csv.out").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found["rows"])
    assert [float(row["p50"]) for row in table] == [row["p50"] for row in found["rows"]]
    assert (tmp_path / "picture.out").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "markdown.out").read_text()
    assert page.startswith(found["machine"]["cpu"])
    assert f"numba {found['machine']['numba']}" in page
    assert "| tiny, threads: 2 |" in page
    assert command("compare", "json.out", "json.out")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cases", "nonsense"), "invalid choice: 'nonsense'"),
        (("--threads", "0"), "--threads: got 0, wanted 1 to"),
        (("--threads", "999999"), "--threads: got 999999, wanted 1 to"),
        (("--rounds", "0"), "got 0, wanted at least 1"),
        (("--rounds", "many"), "--rounds"),
        (("compare", "base.json"), "HEAD"),
        (("compare", "a", "b", "--threshold", "0"), "--threshold: got 0.0, wanted a positive number"),
        (("compare", "a", "b", "--threshold", "nan"), "--threshold: got nan, wanted a positive number"),
    ],
)
def test_bench_refuses_bad_arguments(command, arguments, says):
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
