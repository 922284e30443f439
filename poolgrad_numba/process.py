"""The process itself: the cores it may use, whether it was forked, and locks that a fork cannot leave taken."""

from __future__ import annotations

import math
import os
import threading
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROC: Final = Path("/proc/self")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def cores() -> int:
    """Count the cores that this process may keep busy: by its affinity, and by the quota that a container sets."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, quota())))


def quota(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """Give the cores' worth of time that this process's control groups and those above them allow; infinity: no limit.

    Both layouts are read: version 2 keeps quota and period in one file (``cpu.max``), version 1 in two. Inside a
    container the path may be the host's, which is not there; the groups that are there count.
    """
    lowest = math.inf
    for group in _groups(proc, cgroups):
        for read in (_quota_v2, _quota_v1):
            try:
                allowed, period = read(group)
                if allowed > 0 and period > 0:  # version 1 says -1 for no limit
                    lowest = min(lowest, allowed / period)
            except (OSError, ValueError):  # no such file, or "max": no limit
                continue
    return lowest


def _quota_v2(group: Path) -> tuple[int, int]:
    allowed, period = (group / "cpu.max").read_text(encoding="ascii").split()
    return int(allowed), int(period)


def _quota_v1(group: Path) -> tuple[int, int]:
    allowed, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    return int(allowed), int(period)


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of the groups that limit this process, its own first."""
    try:
        lines = (proc / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no control groups on this system
        return
    for line in lines:
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = {cgroups / controllers, cgroups / "cpu"} if controllers else {cgroups, cgroups / "unified"}
        for root in roots:
            group = root / path.lstrip("/")
            yield from chain((group,), (above for above in group.parents if above.is_relative_to(root)))


_FORKED_WITHOUT_EXEC: Final = 0x40  # PF_FORKNOEXEC among the kernel's process flags


def was_forked() -> bool:
    """Whether this process runs on in a copy of another one's memory; ``False`` where the system does not tell."""
    try:
        fields = (_PROC / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC)


def libraries(name: str) -> dict[str, list[range]]:
    """Addresses of the loaded libraries whose file name holds that text; none where the system does not tell."""
    found: dict[str, list[range]] = {}
    try:
        lines = (_PROC / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        path = line.split(maxsplit=5)[5:]
        if path and name in path[0].rpartition("/")[2]:
            start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
            found.setdefault(path[0], []).append(range(start, end))
    return found


def in_child(action: Callable[[], None]) -> None:
    """Have something done in every child that is forked, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


class Lock:
    """A reentrant lock (a signal handler may come back to it) that a forked child finds free: ``with lock.held:``.

    ``held`` is the standard library's own lock: with an ``__enter__`` in Python, an interrupt between taking the lock
    and entering the block would leave it taken for ever. For sections that no fork can be in the middle of but another
    thread's; made once a module, since it is never given up.
    """

    def __init__(self) -> None:
        self._renew()
        in_child(self._renew)

    def _renew(self) -> None:
        self.held = threading.RLock()
