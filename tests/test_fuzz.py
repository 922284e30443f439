"""Hostile calls by the thousand, each operator in a process of its own; and the guard pages that they rely on."""

import re
import signal
import subprocess

import numpy as np
import pytest

import poolgrad_numba as pg
from guarded import CANARY, PAGE, Guarded
from support import python

EACH_OPERATOR = pytest.mark.parametrize("operator", sorted(pg.OPS))


def run(operator, tries, seed, trail, timeout):
    """Fuzz in a fresh process; where that dies, say on which call."""
    code = f"import fuzz; fuzz.main([{operator!r}, '--tries={tries}', '--seed={seed}', '--trail={trail}'])"
    try:
        return python(code, flags=("-X", "faulthandler"), timeout=timeout)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        recipe = trail.read_text().strip() if trail.exists() else "none yet"
        pytest.fail(f"{error}\nthe last call, for python tests/fuzz.py {operator} --replay:\n{recipe}")


@EACH_OPERATOR
def test_hostile_calls(operator, tmp_path):
    report = run(operator, 2500, 1, tmp_path / "trail", timeout=1200)  # of which kernels may compile for many
    assert "unseen: \n" in report, report
    assert int(re.search(r"'accepted': (\d+)", report)[1]) > 800
    assert int(re.search(r"'refused': (\d+)", report)[1]) > 800


@pytest.mark.nightly
@EACH_OPERATOR
def test_hostile_calls_all_night(operator, tmp_path):
    run(operator, 100_000, 1_000_000, tmp_path / "trail", timeout=4 * 3600)


def dies(code):
    """Whether code on a guard of 100 bytes dies by a segmentation fault, and not before."""
    setup = "import ctypes; from guarded import Guarded; "
    with pytest.raises(AssertionError) as failure:
        python(f"{setup}{code}; print('survived')")
    return f"exit code {-signal.SIGSEGV}" in str(failure.value) and "survived" not in str(failure.value)


def test_a_byte_outside_is_fatal():
    right, left = "g = Guarded(100)", "g = Guarded(100, right=False)"
    at = "g.payload.ctypes.data"
    assert dies(f"{right}; ctypes.string_at({at} + 100, 1)")
    assert dies(f"{right}; ctypes.memset({at} + 100, 0, 1)")
    assert dies(f"{left}; ctypes.string_at({at} - 1, 1)")
    assert dies(f"{left}; ctypes.memset({at} - 1, 0, 1)")
    assert dies(f"{right}; g.freeze(); ctypes.memset({at}, 0, 1)")
    for guard in (right, left):
        python(f"import ctypes; from guarded import Guarded; {guard}; ctypes.memset({at}, 0, 100); g.intact() or 1/0")


def test_a_jitted_kernel_dies_too():
    sums = "import numba; f = numba.njit(lambda a, n: a[n]); print(f(g.payload, 99)); f(g.payload, 100)"
    assert dies(f"g = Guarded(100); {sums}")


@pytest.mark.parametrize("size", [0, 1, 100, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("gap", [0, 3])
def test_canaries(size, right, gap):
    guard = Guarded(size, right=right, gap=gap)
    assert guard.payload.size == size
    assert guard.room.size % PAGE == 0
    guard.payload[:] = 0
    assert guard.intact()
    start = guard.payload.ctypes.data - guard.room.ctypes.data
    for place in (start - 1, start + size):
        if 0 <= place < guard.room.size:
            guard.room[place] = 0
            assert not guard.intact()
            guard.room[place] = CANARY
    assert guard.intact()


def test_arrays_in_the_payload_keep_the_memory():
    array = Guarded(48).array((3, 4), np.float32, (-16, 4), 32)
    array[...] = 7
    assert array.sum() == 84
    with pytest.raises(ValueError, match="strides"):
        Guarded(48).array((3, 4), np.float32, (17, 4))
