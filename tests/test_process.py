"""What the process may use: cores, quotas, and the locks that a fork leaves free."""

import math
import os
import threading

import pytest

from poolgrad_numba import process
from support import python

V2, V1 = "0::{path}\n", "4:memory:/elsewhere\n3:cpu,cpuacct:{path}\n0::/\n"


def machine(tmp_path, groups, files):
    """Lay out a /proc/self and a /sys/fs/cgroup."""
    (tmp_path / "proc").mkdir()
    if groups is not None:
        (tmp_path / "proc" / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


def v1(folder, quota, period=100000):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (None, {}, math.inf),
        ("", {}, math.inf),
        (V2.format(path="/"), {"cpu.max": "max 100000\n"}, math.inf),
        (V2.format(path="/"), {"cpu.max": "150000 100000\n"}, 1.5),
        (V2.format(path="/a/b"), {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        (V2.format(path="/a/b"), {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "max 100000\n"}, 2),
        (V2.format(path="/the/host's"), {"cpu.max": "300000 100000\n"}, 3),
        (V2.format(path="/"), {"cpu.max": "nonsense\n"}, math.inf),
        (V2.format(path="/"), {"cpu.max": "100000 0\n"}, math.inf),
        (V1.format(path="/"), v1("cpu,cpuacct", 250000), 2.5),
        (V1.format(path="/a"), v1("cpu/a", 100000, 50000) | v1("cpu", -1), 2),
        (V1.format(path="/the/host's"), v1("cpu", 100000), 1),
        (V1.format(path="/"), v1("cpu", -1), math.inf),
        ("5:cpuset:/a\n", v1("cpuset/a", 100000), math.inf),
    ],
)
def test_quota_of_control_groups(tmp_path, groups, files, cores):
    assert process.quota(*machine(tmp_path, groups, files)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.1, 1), (1.5, 2), (math.inf, 3)])
def test_cores_are_the_fewest_of_affinity_and_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    monkeypatch.setattr(process, "quota", lambda: quota)
    assert process.cores() == cores


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_process_is_told_from_a_started_one():
    out = python("""
import children
from poolgrad_numba.process import was_forked
print(was_forked(), children.fork(was_forked), children.pool("spawn", work=was_forked))
""")
    assert out.split() == ["False", "True", "False"]


def test_loaded_libraries():
    import numpy._core._multiarray_umath as compiled

    found = process.libraries("_multiarray_umath")
    assert os.path.realpath(compiled.__file__) in map(os.path.realpath, found)
    assert all(len(part) for parts in found.values() for part in parts)
    assert not process.libraries("no such library")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    lock, taken, leave = process.Lock(), threading.Event(), threading.Event()

    def hold():
        with lock.held, lock.held:
            taken.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(30)
    child = os.fork()
    if child == 0:
        with lock.held:
            os._exit(0)
    leave.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
