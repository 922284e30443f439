"""The declared operators; importing this package fills the registry `OPS`."""

from poolgrad_numba.ops.avg_pool import avg_pool3d_backward
from poolgrad_numba.ops.max_pool import (
    adaptive_max_pool2d_backward,
    adaptive_max_pool3d_backward,
    max_pool2d_with_indices_backward,
)
from poolgrad_numba.plan import OPS

__all__ = [
    "OPS",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "max_pool2d_with_indices_backward",
]
