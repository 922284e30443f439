"""``poolgrad-numba info``: what decides how the operators run here."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
from llvmlite import binding
from numba.core.registry import cpu_target

from poolgrad_numba import OPS, Config, PoolGradError, get_config
from poolgrad_numba.kernels.indexed import plane_scatter
from poolgrad_numba.kernels.numeric import half_in_hardware
from poolgrad_numba.process import cores
from poolgrad_numba.threads import most as most_threads
from poolgrad_numba.threads import start

if TYPE_CHECKING:
    import argparse

_ALWAYS = ("poolgrad_numba", "numba", "llvmlite", "numpy", "ml_dtypes")
_WHERE_INSTALLED = ("torch", "jax")


def execute(arguments: argparse.Namespace) -> int:
    """Print the facts, as lines or as JSON."""
    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name}: {_text(value)}")
    return 0


def collect() -> dict[str, Any]:
    """Gather the facts; starts Numba's threads, which alone settles the threading layer."""
    try:
        config: Config | None = get_config()
        fault = ""
    except PoolGradError as error:  # a malformed variable, which a bug report should show
        config, fault = None, str(error)
    context = cpu_target.target_context
    _, target, _ = context.codegen().magic_tuple()
    return {
        **versions(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_llvm_name": binding.get_host_cpu_name(),
        "cpu_compiled_for": target,
        "float16_conversion": "hardware" if half_in_hardware(context) else "integer arithmetic",
        "threading_layer": threading_layer(),
        "cores": os.cpu_count(),
        "cores_this_process_may_use": cores(),
        "numba_num_threads": most_threads(),
        "num_threads": config.num_threads if config else fault,
        "deterministic": config.deterministic if config else fault,
        "kernel_cache": cache_path(),
        "operators": sorted(OPS),
    }


def _text(value: Any) -> str:
    if value is None:
        return "none (compiled anew in each process)"  # only the cache can be None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def versions() -> dict[str, str]:
    """Versions of the packages at work, and of frameworks where they are installed; none is imported for it."""
    found = {name: metadata.version(name) for name in _ALWAYS}
    for name in _WHERE_INSTALLED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """Give the processor's name as its maker writes it, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def threading_layer() -> str:
    """Name of the layer that Numba's threads run on."""
    try:
        start()
        return str(numba.threading_layer())
    except (PoolGradError, ValueError) as error:
        return f"none ({error})"


def cache_path() -> str | None:
    """Give the directory of the kernel cache; ``None`` where there is none."""
    path = plane_scatter.dispatcher.stats.cache_path
    return None if path is None else str(path)
