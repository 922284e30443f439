"""Threads beyond the machine's cores, so that splits over 3 and 8 threads are real; before Numba is imported."""

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "8")

import pytest
from hypothesis import HealthCheck, settings

import poolgrad_numba as pg
from poolgrad_numba import config
from support import forget_environment

# Kernels compile inside the first examples, so time says nothing about an example.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch):
    """Each test starts from the defaults, and may set the environment."""
    monkeypatch.delenv(config.DETERMINISTIC_VARIABLE, raising=False)
    monkeypatch.delenv(config.NUM_THREADS_VARIABLE, raising=False)
    forget_environment()
    pg.set_config(deterministic=None, num_threads=None)
    yield
    pg.set_config(deterministic=None, num_threads=None)
    forget_environment()
