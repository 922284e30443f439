"""The soak in a process of its own: a minute in the normal run, an hour at night."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import poolgrad_numba as pg

SOAK = Path(__file__).with_name("soak.py")
# Compiling all that it calls takes minutes on an empty kernel cache, beyond the seconds that it runs.
WARM_UP = 1200

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc on this platform")


def soak(seconds, seed):
    """Run it, and give its figures."""
    command = [sys.executable, SOAK, "--seconds", str(seconds), "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(Path(pg.__file__).parents[1])}  # this very package
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + WARM_UP, env=environment, check=False
    )
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return json.loads(done.stdout)


def test_a_minute_at_random():
    figures = soak(60, seed=1)
    assert set(figures["actions"]) >= {"alone", "crowd", "interrupted", "forked", "settings"}


@pytest.mark.nightly
def test_an_hour_at_random():
    soak(3600, seed=random.SystemRandom().getrandbits(32))
