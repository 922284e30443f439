"""``poolgrad-numba run``: one operator on the arrays of a file."""

from __future__ import annotations

import time
import tokenize
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import poolgrad_numba
from poolgrad_numba.cli.common import CommandError, reason, write_safely

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from numpy.typing import NDArray

    from poolgrad_numba.problem import Signature

_OPTIONS = {
    "kernel_size": "--kernel-size",
    "stride": "--stride",
    "padding": "--padding",
    "dilation": "--dilation",
    "ceil_mode": "--ceil-mode",
    "count_include_pad": "--exclude-pad",
    "divisor_override": "--divisor-override",
}
# What NumPy and zipfile raise for a bad checksum, bad compression, an early end, a bad array header;
# RuntimeError for an archive that is encrypted or packed in a way that they do not know.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, tokenize.TokenError, RuntimeError)
_RAW = np.dtype("V2")  # what a NumPy file makes of bfloat16


def execute(arguments: argparse.Namespace) -> int:
    """Read, run, write, and print one line on what was done."""
    signature = poolgrad_numba.OPS[arguments.operator].signature
    parameters = _parameters(arguments, signature)
    arrays = _read(arguments.input, ("grad_output", "input_shape", *(("indices",) if signature.indexed else ())))
    grad, shape = arrays["grad_output"], arrays["input_shape"].tolist()
    if grad.dtype == _RAW:
        grad = grad.view(ml_dtypes.bfloat16)
    operands = (grad, shape, arrays["indices"]) if signature.indexed else (grad, shape)
    settings = {"deterministic": arguments.deterministic, "num_threads": arguments.threads}

    start = time.perf_counter()
    result = getattr(poolgrad_numba, signature.name)(*operands, **parameters, **settings)
    milliseconds = (time.perf_counter() - start) * 1e3

    write_safely(arguments.output, lambda file: np.savez(file, grad_input=result))
    if signature.adaptive:
        parameters = {"output_size": grad.shape[-signature.spatial :]}
    if signature.indexed:
        settings["index_dtype"] = arrays["indices"].dtype
    plan = poolgrad_numba.make_plan(signature.name, input_shape=shape, dtype=grad.dtype, **settings, **parameters)
    mode = "deterministic" if plan.problem.deterministic else "fast"
    print(
        f"{signature.name}: {result.dtype} {grad.shape} -> {result.shape}, {mode}, {plan.algorithm}, "
        f"{plan.workers} worker{'' if plan.workers == 1 else 's'}, {milliseconds:.3g} ms, written to {arguments.output}"
    )
    return 0


def _parameters(arguments: argparse.Namespace, signature: Signature) -> dict[str, Any]:
    """Those window options that the user gave, checked against what the operator has."""
    given = {name: value for name, value in vars(arguments).items() if name in _OPTIONS}
    has = ", ".join(_OPTIONS[name] for name in signature.parameters) or "no window options"
    for name in given:
        if name not in signature.parameters:
            raise CommandError(f"{_OPTIONS[name]}: {signature.name} has no such option, it takes {has}")
    if "kernel_size" in signature.parameters and "kernel_size" not in given:
        raise CommandError(f"--kernel-size: required by {signature.name}")
    return given


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read the named arrays of a .npz file."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise CommandError(f"cannot read {path}: it is no .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {key: _member(archive, key, path) for key in keys}
    except OSError as error:
        raise CommandError(f"cannot read {path}: {reason(error)}") from error
    except _DAMAGED as error:
        why = str(error) or type(error).__name__
        raise CommandError(f"cannot read {path}, which is damaged or no .npz file: {why}") from error


def _member(archive: Any, key: str, path: Path) -> NDArray[Any]:
    if key not in archive.files:
        raise CommandError(f"{path}: has no array {key}, only {', '.join(archive.files) or 'nothing'}")
    array = archive[key]
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{path}: {key} is no NumPy array")
    return array
