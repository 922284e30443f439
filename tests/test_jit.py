"""The kernel cache: found again, never stale, never in the way."""

import compileall
import json
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

import poolgrad_numba as pg
from poolgrad_numba.kernels import _jit
from support import python

IMPORTS = """
import json, os, warnings
import numpy as np
import poolgrad_numba as pg
from poolgrad_numba.kernels import _jit, indexed
"""
RUN = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for threads in map(int, os.environ.get("THREADS", "1").split()):
        plan = pg.make_plan("adaptive_max_pool2d_backward", input_shape=(2, 1, 2, 2), output_size=1,
                            num_threads=threads, algorithm="plane_scatter")
        result = plan.run(np.ones((2, 1, 1, 1), np.float32), np.ones((2, 1, 1, 1), np.int64))
"""
# Many small specialisations of one kernel, by type codes.
FILL = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for code in os.environ["CODES"]:
        result = np.ones(5, code)
        indexed.fill_zero(1, 1, result)
        assert not result.any(), code
result = result.real
"""
TELL = """
used = [kernel.dispatcher.stats for kernel in (indexed.plane_scatter, indexed.fill_zero)]
loops = [loop.dispatcher.stats for loop in (_jit._in_turn, _jit._on_threads) if loop.dispatcher]
print(json.dumps({
    "hits": sum(sum(stats.cache_hits.values()) for stats in used),
    "misses": sum(sum(stats.cache_misses.values()) for stats in used),
    "loops": [sum(sum(stats.cache_hits.values()) for stats in loops), len(loops)],
    "result": result.ravel().tolist(),
    "warnings": [str(w.message) for w in caught],
    "file": pg.__file__,
}))
"""
RIGHT = [0, 1, 0, 0] * 2
DOUBLED = [0, 2, 0, 0] * 2  # what edited kernels give


def run(cache, *, before="", after_import="", body=RUN, flags=(), **environment):
    """A fresh process with that cache directory."""
    code = before + IMPORTS + after_import + body + TELL
    return json.loads(python(code, flags=flags, NUMBA_CACHE_DIR=str(cache or ""), **environment))


def outcome(found):
    """(hits, misses) of a run with the right result and no warnings."""
    assert found["result"] == RIGHT
    assert not found["warnings"]
    return found["hits"], found["misses"]


def copy_package(folder):
    """A copy of the package, and where a fresh process finds it."""
    copy = Path(folder) / "poolgrad_numba"
    shutil.copytree(Path(pg.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy, {"PYTHONPATH": str(folder)}


def edit(source, old, new):
    text = source.read_text(encoding="utf-8")
    assert old in text
    source.write_text(text.replace(old, new, 1), encoding="utf-8")


# In the helper that plane_scatter calls in another file.
DOUBLE = ("    return x\n\n\ndef narrow_value", "    return builder.fadd(x, x)\n\n\ndef narrow_value")


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache that holds one kernel and both loops."""
    folder = tmp_path_factory.mktemp("warm")
    found = run(folder, THREADS="1 2")
    assert (*outcome(found), found["loops"]) == (0, 1, [0, 2])
    return folder


@pytest.fixture
def cache(warm, tmp_path):
    return shutil.copytree(warm, tmp_path / "cache")


# -- found again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO", "-I"]], ids=str)
def test_a_kernel_and_both_loops_are_found_again(warm, flags):
    """Whatever Python leaves out: assertions, docstrings, the environment."""
    path = f"import sys\nsys.path.insert(0, {str(Path(pg.__file__).parent.parent)!r})\n"  # -I ignores PYTHONPATH
    found = run(warm, before=path, flags=flags, THREADS="1 2")
    assert (*outcome(found), found["loops"]) == (1, 0, [2, 2])


def test_targets_that_share_a_cache_find_their_own_code(cache):
    for name in ("generic", "haswell"):
        assert outcome(run(cache, NUMBA_CPU_NAME=name)) == (0, 1)
    for name in ("generic", "haswell"):
        assert outcome(run(cache, NUMBA_CPU_NAME=name)) == (1, 0)
    assert outcome(run(cache)) == (1, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to be killed by")
def test_cold_processes_at_once_one_of_them_killed_while_it_writes(tmp_path):
    kill = "import os, signal\nos.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
    with ThreadPoolExecutor(4) as pool:
        killed = pool.submit(run, tmp_path, before=kill)
        others = [pool.submit(run, tmp_path) for _ in range(3)]
        assert all(sum(outcome(other.result())) == 1 for other in others)
        with pytest.raises(AssertionError, match="exit code -9"):
            killed.result()
    assert list(tmp_path.rglob("*.tmp.*")), "it was killed before the file had its name"
    assert outcome(run(tmp_path)) == (1, 0)


# -- never stale -------------------------------------------------------------------------------------------------------


@pytest.mark.trap("T36")
def test_t36_an_edit_of_any_kernel_source_is_noticed(tmp_path):
    copy, place = copy_package(tmp_path)
    cache = tmp_path / "cache"
    numeric = copy / "kernels" / "numeric.py"
    # A process that has imported the old code files it as the old code's, even if it compiles after the edit.
    meanwhile = f"path = {str(numeric)!r}\ntext = open(path).read().replace(*{DOUBLE!r})\nopen(path, 'w').write(text)\n"
    old = run(cache, after_import=meanwhile, **place)
    assert old["file"].startswith(str(copy))
    assert outcome(old) == (0, 1)
    new = run(cache, **place)
    assert (new["result"], new["hits"]) == (DOUBLED, 0)
    # Code of the same kernels by the same Numba is the same code: a release that leaves them alone finds it.
    edit(copy / "__init__.py", f'"{pg.__version__}"', '"99.0"')
    assert run(cache, **place)["hits"] == 1
    assert run(cache, before="import numba\nnumba.__version__ = '99.0'\n", **place)["hits"] == 0


def test_every_kernel_source_counts(tmp_path):
    _, place = copy_package(tmp_path)
    code = """
from pathlib import Path
from poolgrad_numba.kernels import _jit
digests = [_jit._SOURCES]
for source in sorted(Path(_jit.__file__).parent.glob("*.py")):
    if source.name != "__init__.py":  # a docstring
        source.write_text(source.read_text(encoding="utf-8") + "\\n# edited\\n", encoding="utf-8")
        digests.append(_jit._sources_digest())
assert len(set(digests)) == len(digests) > 4
"""
    python(code, **place)


def test_a_zipped_package_is_cached_and_never_stale(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    copy, _ = copy_package(tmp_path / "source")
    place = {"PYTHONPATH": str(tmp_path / "lib.zip"), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}

    def pack():
        shutil.make_archive(str(tmp_path / "lib"), "zip", copy.parent)

    pack()
    first = run(None, **place)
    assert first["file"].startswith(str(tmp_path / "lib.zip"))
    assert outcome(first) == (0, 1)
    assert outcome(run(None, **place)) == (1, 0)
    edit(copy / "kernels" / "numeric.py", *DOUBLE)
    pack()
    new = run(None, **place)
    assert (new["result"], new["hits"], new["warnings"]) == (DOUBLED, 0, [])


def test_bytecode_without_sources_is_not_cached(tmp_path):
    """Nothing tells its old code from its new, though Numba finds a place: the sources that it was made from."""
    source, _ = copy_package(tmp_path / "source")
    place = {"PYTHONPATH": str(tmp_path / "bytecode")}
    for edited, want in ((False, RIGHT), (True, DOUBLED)):
        if edited:
            edit(source / "kernels" / "numeric.py", *DOUBLE)
        shutil.rmtree(tmp_path / "bytecode", ignore_errors=True)
        assert compileall.compile_dir(source, legacy=True, quiet=1)
        shutil.copytree(source.parent, tmp_path / "bytecode", ignore=shutil.ignore_patterns("*.py"))
        found = run(tmp_path / "cache", **place)
        assert (found["result"], found["hits"], found["warnings"]) == (want, 0, [])
    assert not list(tmp_path.rglob("*.nbc"))


# -- never in the way --------------------------------------------------------------------------------------------------


class Unreadable:
    """Raises while it is unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def change(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


DAMAGE = {
    "empty": lambda data: b"",
    "garbage": lambda data: b"\x80\x05garbage",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "a changed instruction": lambda data: change(data, data.find(b"\x7fELF") + 100),  # LLVM would load it
    "changed bitcode": lambda data: change(data, data.find(b"BC\xc0\xde") + 2000),  # LLVM would abort
    "an exception": lambda data: pickle.dumps(Unreadable()),
    "a missing class": lambda data: b"cno.such.module\nThing\n.",
}


def test_damaged_files_cost_a_warning_not_a_call(tmp_path):
    """Each file in another way, two of them by being each other's; the last one's place is taken by a folder."""
    codes = "bBhHiIqQfdFD"
    cold = run(tmp_path, body=FILL, CODES=codes)
    assert (cold["hits"], cold["misses"], cold["warnings"]) == (0, len(codes), [])
    files = sorted(
        tmp_path.rglob("*fill_zero*.nbc"), key=lambda file: file.stat().st_mtime_ns
    )  # in the order of the codes
    assert len(files) == len(codes) == len(DAMAGE) + 3
    *damaged, first, second, last = files
    for file, damage in zip(damaged, DAMAGE.values(), strict=True):
        file.write_bytes(damage(file.read_bytes()))
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    last.unlink()
    last.mkdir()

    again = run(tmp_path, body=FILL, CODES=codes)
    assert again["hits"] == 0
    reads = [text for text in again["warnings"] if "cannot be read" in text]
    assert len(reads) == len(DAMAGE) + 1
    assert len(again["warnings"]) == len(reads) + 1
    assert all("kernels are compiled anew" in text for text in again["warnings"])

    healed = run(tmp_path, body=FILL, CODES=codes)
    assert healed["hits"] == len(codes) - 1
    assert len(healed["warnings"]) == 2, "the folder cannot be read nor written over"


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit to set")
def test_a_full_disk_costs_a_warning_not_a_call(tmp_path):
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    found = run(tmp_path, before=full, body=FILL, CODES="fd")
    assert found["misses"] == 2
    assert len(found["warnings"]) == 2, "one of a kernel, one of a loop"
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


# Permissions stop root too, once its capabilities are gone.
POWERLESS = """
import ctypes
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
"""
needs_capabilities = pytest.mark.skipif(sys.platform != "linux", reason="no way to give up root's powers")


@needs_capabilities
@pytest.mark.trap("T35")
def test_no_place_for_a_cache(tmp_path, monkeypatch):
    copy, place = copy_package(tmp_path / "package")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    for folder in (home, copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    found = run(None, before=POWERLESS, HOME=str(home), **place)
    assert found["file"].startswith(str(copy))
    assert outcome(found) == (0, 1)
    assert not list(tmp_path.rglob("*.nb?"))


@needs_capabilities
def test_a_file_that_may_not_be_read_costs_a_warning_not_a_call(cache):
    for file in cache.rglob("*.nbc"):
        file.chmod(0o000)
    found = run(cache, before=POWERLESS)
    assert (found["result"], found["misses"], len(found["warnings"])) == (RIGHT, 1, 2)
    assert outcome(run(cache, before=POWERLESS)) == (1, 0)  # written anew, it may


@pytest.mark.skipif(not hasattr(numba.config, "CACHE_LOCATOR_CLASSES"), reason="this Numba has no such setting")
@pytest.mark.parametrize("junk", ["Nonsense", "json.JSONDecoder", ".", "no.such.module"])
def test_a_junk_setting_of_numbas_cache_leaves_kernels_uncached(monkeypatch, junk):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", junk)

    assert _jit._cached(lambda: 0).stats.cache_path is None
