"""What docs/aclnn.md shows: every block runs and prints what it says, and its tables are those of the code."""

import ast
import contextlib
import inspect
import io
import re
from pathlib import Path

import pytest

from poolgrad_numba import aclnn

PAGE = Path(__file__).parent.parent / "docs" / "aclnn.md"
TEXT = PAGE.read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
FUNCTIONS = {name for name in aclnn.__all__ if inspect.isfunction(getattr(aclnn, name))}


@pytest.fixture(autouse=True)
def runtime_as_before():
    """A block that fails half-way leaves no device and no stream to other tests."""
    yield
    aclnn.aclFinalize()
    aclnn.aclrtResetDevice(0)


def run_blocks(fences):
    """Run the Python blocks in order in one namespace; (block, printed, shown) of each."""
    space = {"__name__": "port"}
    for place, (language, code) in enumerate(fences):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"block {place} of {PAGE.name}", "exec"), space)  # noqa: S102
            shown = fences[place + 1] if place + 1 < len(fences) else ("", "")
            yield code, printed.getvalue(), shown[1] if shown[0] == "text" else ""


def rows(heading):
    """Cells of the table below a heading."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_blocks_print_what_is_shown():
    assert {language for language, _ in FENCES} == {"python", "text"}
    for place, (language, _) in enumerate(FENCES):
        assert language == "python" or FENCES[place - 1][0] == "python", "an output that no block prints"
    blocks = list(run_blocks(FENCES))
    assert len(blocks) >= 7
    for code, printed, shown in blocks:
        assert printed == shown, code


@pytest.mark.parametrize("place", [i for i, (language, _) in enumerate(FENCES) if language == "text"])
def test_a_wrong_output_is_noticed(place):
    fences = list(FENCES)
    fences[place] = ("text", re.sub(r"\d(?=\D*$)", "?", fences[place][1], count=1))
    assert fences != FENCES
    assert [printed == shown for _, printed, shown in run_blocks(fences)].count(False) == 1


def test_blocks_leave_nothing_behind():
    list(run_blocks(FENCES))
    assert aclnn.aclrtGetCurrentContext() == (None, aclnn.ACL_ERROR_RT_CONTEXT_NULL)
    assert aclnn.aclrtGetSysParamOpt(aclnn.ACL_OPT_DETERMINISTIC) == (0, 0)
    assert aclnn.aclFinalize() == aclnn.ACL_ERROR_UNINITIALIZE


def test_the_table_of_calls_is_that_of_the_code():
    listed = set()
    for c, python in rows("C call, Python call"):
        (statement,) = ast.parse(python.strip("`")).body
        call = getattr(statement, "value", None)
        name = c.strip("`").partition("(")[0]
        if name in ("aclrtMalloc", "aclrtMemcpy", "aclrtFree"):  # NumPy's part
            continue
        assert call.func.id == name
        listed.add(name)
        function = inspect.signature(getattr(aclnn, name))
        assert [argument.id for argument in call.args] == list(function.parameters)
        (target,) = statement.targets
        several = function.return_annotation.startswith(("tuple", "FirstPhase"))
        assert isinstance(target, ast.Tuple) == several
        last = target.elts[-1] if several else target
        assert (last.id == "status") == (several or function.return_annotation == "int")
        assert ("&" in c) == (several and name != "aclGetRecentErrMsg")
    assert listed == FUNCTIONS


def test_the_table_of_statuses_is_that_of_the_code():
    listed = [(name.strip("`"), int(value)) for name, value, _ in rows("Status codes")]
    assert listed == [(m.name, m.value) for kind in (aclnn.aclnnStatus, aclnn.aclError) for m in kind]


def test_the_port_names_the_c_call_of_each_line():
    """In the port, a call of this face has the C call as the comment on its line."""
    port = next(code for language, code in FENCES if language == "python")
    for line in port.splitlines():
        code, _, comment = line.partition("#")
        for name in re.findall(r"\b(acl\w+)\(", code):
            assert comment.strip() or name == "aclGetRecentErrMsg", line
