"""What the documents show runs, and what they list is there."""

import doctest
import re
from pathlib import Path

import pytest

import poolgrad_numba as pg

ROOT = Path(__file__).parent.parent
TESTS = {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")}


@pytest.mark.parametrize("name", [n for n in pg.__all__ if callable(getattr(pg, n)) and n[0].islower()])
def test_docstring_examples(name):
    function = getattr(pg, name)
    tests = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert any(test.examples for test in tests), f"{name} shows no example"
    for test in tests:
        result = doctest.DocTestRunner().run(test)
        assert result.failed == 0


@pytest.mark.parametrize("name", sorted(pg.OPS))
def test_docstrings_of_operators_are_whole(name):
    text = getattr(pg, name).__doc__
    for section in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"    {section}\n    {'-' * len(section)}" in text, section
    assert pg.OPS[name].aclnn in text
    assert f"aten.{name}" in text


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    space = {"print": lambda *_: None}
    for block in blocks:
        exec(block, space)  # noqa: S102


def test_readme_has_exactly_two_set_up_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^python3 -m venv .*$", text, re.MULTILINE)) == 2
    assert text.count("pip install") == 2


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_table_of_traps_names_tests_that_exist():
    rows = re.findall(
        r"^\| (T\d\d) \|.*\| `(\w+)` \|$", (ROOT / "docs" / "traps.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = {trap for trap, _ in rows}
    assert {f"T{n:02}" for n in range(1, 44)} == listed
    for trap, test in rows:
        assert any(f"def {test}(" in text for text in TESTS.values()), f"{trap}: {test}"
    marked = {
        trap for text in TESTS.values() for ids in re.findall(r'mark\.trap\("([^"]+)"\)', text) for trap in ids.split()
    }
    assert marked == listed


def test_architecture_lists_every_candidate():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for operator in pg.OPS.values():
        for candidate in (*operator.fast, *operator.deterministic):
            assert f"| `{candidate.name}` |" in text


def test_the_page_on_reliability_names_tests_that_exist():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    for test in named:
        assert any(f"def {test}(" in source for source in TESTS.values()), test
    for file in re.findall(r"`tests/(test_\w+\.py)`", text):
        assert file in TESTS
