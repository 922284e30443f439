"""The architecture, held by reading the sources."""

import ast
import re
import sys
from pathlib import Path

import pytest

import poolgrad_numba

PACKAGE = Path(poolgrad_numba.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Which rooms of the package a room may import, itself aside.
ARROWS = {
    "errors": set(),
    "geometry": set(),
    "memory": set(),
    "values": {"errors"},
    "process": set(),
    "threads": {"errors", "process"},
    "config": {"errors", "process", "threads", "values"},
    "kernels": set(),
    "launch": {"errors", "kernels", "process", "threads"},
    "problem": {"config", "errors", "geometry", "values"},
    "operands": {"errors", "kernels", "launch", "memory", "problem", "values"},
    "plan": {"errors", "memory", "operands", "problem", "values"},
    "ops": {"geometry", "kernels", "launch", "operands", "plan", "problem"},
    "aclnn": {"config", "errors", "operands", "plan", "process", "values"},
    "__init__": {"config", "errors", "ops", "plan"},
    "bench": {"__init__", "geometry", "kernels", "launch", "process"},
    "cli": {"__init__", "aclnn", "bench", "config", "errors", "geometry", "kernels", "ops", "plan", "problem"}
    | {"process", "threads"},
    "__main__": {"cli"},
}
OUTSIDE = {
    "errors": set(),
    "geometry": set(),
    "memory": {"numpy"},
    "values": {"numpy"},
    "process": set(),
    "threads": {"numba"},
    "config": set(),
    "kernels": {"numba", "numpy", "llvmlite"},
    "launch": {"numba"},
    "problem": {"numpy", "ml_dtypes"},
    "operands": {"numpy"},
    "plan": {"numpy"},
    "ops": {"numpy"},
    "aclnn": {"numpy", "ml_dtypes"},
    "__init__": set(),
    "bench": {"numpy", "matplotlib"},
    "cli": {"numba", "numpy", "ml_dtypes", "llvmlite", "rich", "matplotlib", "nibabel"},
    "__main__": set(),
}


def room(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path):
    """(module, is it needed at run time) of every import; those under TYPE_CHECKING are for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) not in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "poolgrad_numba":
                for name in node.names:
                    inside = (PACKAGE / f"{name.name}.py").exists() or (PACKAGE / name.name).is_dir()
                    yield f"poolgrad_numba.{name.name if inside else '__init__'}", id(node) not in typing_only
            else:
                yield node.module, id(node) not in typing_only


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    for module, at_run_time in imports(path):
        top, _, rest = module.partition(".")
        if top == "poolgrad_numba":
            target = rest.partition(".")[0] or "__init__"
            if at_run_time:
                assert target in ARROWS[room(path)] | {room(path)}, f"{room(path)} imports {target}"
        elif top not in sys.stdlib_module_names and at_run_time:
            assert top in OUTSIDE[room(path)], f"{room(path)} imports {top}"


def test_the_arrows_make_no_circle():
    done = set()
    while len(done) < len(ARROWS):
        free = {name for name, targets in ARROWS.items() if name not in done and targets <= done}
        assert free, f"a circle among {set(ARROWS) - done}"
        done |= free


def test_every_room_is_known():
    assert {room(path) for path in SOURCES} == set(ARROWS)


def test_numba_options_are_in_one_place_and_fastmath_nowhere():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.name != "_jit.py":
            assert not re.search(r"@(numba\.)?(n?jit|vectorize|stencil)\b|cache=True|parallel=True", text), path
        assert not re.search(r"fastmath\s*[=:]\s*(True|\{|set)", text), path


def test_only_config_reads_the_environment():
    for path in SOURCES:
        if room(path) != "config":
            assert not re.search(r"os\.environ|getenv", path.read_text(encoding="utf-8")), path


def test_no_kernel_twin_per_rank():
    for path in (PACKAGE / "kernels").glob("*.py"):
        assert not re.search(r"def \w*[123]d\b", path.read_text(encoding="utf-8")), path


def test_nothing_asserts_or_prints_or_swallows():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: python -O drops it"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert room(path) == "cli", f"{path}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}"
                assert not all(isinstance(statement, ast.Pass) for statement in node.body), f"{path}:{node.lineno}"


def test_public_names_are_sorted_and_there():
    names = poolgrad_numba.__all__
    assert all(hasattr(poolgrad_numba, name) for name in names)
    assert len(set(names)) == len(names)
    assert [n for n in names if n[0].islower()] == sorted(n for n in names if n[0].islower())


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not in a checkout")
def test_top_level_of_the_project():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines() if not line.startswith(".")}
    assert names == {"README.md", "benchmarks", "docs", "poolgrad_numba", "pyproject.toml", "tests"}
