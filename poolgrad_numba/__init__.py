"""Pooling gradients on multicore CPUs with Numba, in a fast and in a deterministic mode."""

from poolgrad_numba.config import Config, config_context, get_config, set_config
from poolgrad_numba.errors import PoolGradError, PoolGradIndexError, PoolGradTypeError, PoolGradValueError
from poolgrad_numba.ops import (
    OPS,
    adaptive_max_pool2d_backward,
    adaptive_max_pool3d_backward,
    avg_pool3d_backward,
    max_pool2d_with_indices_backward,
)
from poolgrad_numba.plan import Plan, make_plan

__version__ = "0.1.0"

__all__ = [
    "OPS",
    "Config",
    "Plan",
    "PoolGradError",
    "PoolGradIndexError",
    "PoolGradTypeError",
    "PoolGradValueError",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "config_context",
    "get_config",
    "make_plan",
    "max_pool2d_with_indices_backward",
    "set_config",
]
