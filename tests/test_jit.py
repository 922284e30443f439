"""The kernel cache: found again, never stale, never in the way."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import poolgrad_numba
from support import python

RUN = """
import json, os, sys, warnings
import numpy as np
import poolgrad_numba as pg
from poolgrad_numba.kernels import indexed
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for threads in (1, 2):
        plan = pg.make_plan("adaptive_max_pool2d_backward", input_shape=(2, 1, 2, 2), output_size=1,
                            num_threads=threads, algorithm="plane_scatter")
        result = plan.run(np.ones((2, 1, 1, 1), np.float32), np.ones((2, 1, 1, 1), np.int64))
hits = [sum(d.stats.cache_hits.values()) for d in (indexed.plane_scatter.serial, indexed.plane_scatter.parallel)]
print(json.dumps({"hits": hits, "result": result.ravel().tolist(), "warnings": [str(w.message) for w in caught],
                  "file": pg.__file__}))
"""


def run(cache, **environment):
    return json.loads(python(RUN, NUMBA_CACHE_DIR=str(cache), **environment))


def test_both_flavours_are_found_again(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first["hits"] == [0, 0]
    assert second["hits"] == [1, 1]
    assert first["result"] == second["result"] == [0, 1, 0, 0, 0, 1, 0, 0]
    assert not first["warnings"] + second["warnings"]


@pytest.mark.trap("T36")
@pytest.mark.parametrize("name", ["numeric.py", "indexed.py", "_jit.py"])
def test_t36_an_edit_of_any_kernel_source_is_noticed(tmp_path, name):
    copy = tmp_path / "copy" / "poolgrad_numba"
    shutil.copytree(Path(poolgrad_numba.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    place = {"PYTHONPATH": str(copy.parent)}
    assert run(tmp_path / "cache", **place)["file"].startswith(str(copy))
    assert run(tmp_path / "cache", **place)["hits"] == [1, 1]
    source = copy / "kernels" / name
    before = source.stat()
    text = source.read_text(encoding="utf-8")
    if name == "numeric.py":  # the helper that plane_scatter calls in another file
        edited = text.replace("    return lambda x: x\n", "    return lambda x: x + x\n", 1)
        assert edited != text
    else:
        edited = text + "\n# edited\n"
    source.write_text(edited, encoding="utf-8")
    after = run(tmp_path / "cache", **place)
    assert after["hits"] == [0, 0]
    assert after["result"] == [0, 2 if name == "numeric.py" else 1, 0, 0] * 2
    assert before.st_size != source.stat().st_size


@pytest.mark.parametrize("garbage", [b"", b"\x80\x05garbage", b"\x00" * 4096])
def test_damaged_cache_files_cost_a_warning_not_a_call(tmp_path, garbage):
    run(tmp_path)
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(garbage)
    again = run(tmp_path)
    assert again["result"] == [0, 1, 0, 0, 0, 1, 0, 0]
    assert again["hits"] == [0, 0]
    assert len(again["warnings"]) == 2
    assert all("cannot be read" in text and "kernels are compiled anew" in text for text in again["warnings"])
    healed = run(tmp_path)
    assert healed["hits"] == [1, 1]
    assert not healed["warnings"]


def test_a_file_that_is_not_its_keys_is_no_entry(tmp_path):
    """Numba's own index can point at another dtype's machine code after a full disk, a kill or a race."""
    both = RUN.replace("np.float32)", "DTYPE)").replace("num_threads=threads,", "num_threads=1, dtype=DTYPE,")
    for dtype in ("np.float16", "np.float64"):
        python(both.replace("DTYPE", dtype), NUMBA_CACHE_DIR=str(tmp_path))
    files = sorted(tmp_path.rglob("*plane_scatter*.nbc"))
    assert len(files) == 2
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    for dtype in ("np.float16", "np.float64"):
        found = json.loads(python(both.replace("DTYPE", dtype), NUMBA_CACHE_DIR=str(tmp_path)))
        assert found["hits"] == [0, 0]
        assert found["result"] == [0, 1, 0, 0, 0, 1, 0, 0]
        assert not found["warnings"]


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit to set")
def test_a_full_disk_costs_a_warning_not_a_call(tmp_path):
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + RUN
    found = json.loads(python(full, NUMBA_CACHE_DIR=str(tmp_path)))
    assert found["result"] == [0, 1, 0, 0, 0, 1, 0, 0]
    assert len(found["warnings"]) == 2  # one a flavour, each of which has a cache
    assert run(tmp_path)["hits"] == [0, 0]
    assert run(tmp_path)["hits"] == [1, 1]


@pytest.mark.trap("T35")
def test_no_place_for_a_cache(tmp_path):
    file = tmp_path / "a file, not a folder"
    file.write_text("")
    assert run(file / "below")["result"] == [0, 1, 0, 0, 0, 1, 0, 0]
