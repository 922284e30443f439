"""The two phases, whatever the operator: checks and a plan, then a run on a stream."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba import config, operands, process
from poolgrad_numba.aclnn import runtime
from poolgrad_numba.aclnn.status import PRIVATE_FORMATS, aclnnStatus, fail
from poolgrad_numba.aclnn.tensor import aclTensor, int_array
from poolgrad_numba.errors import PARAM_NULLPTR, PoolGradError, PoolGradTypeError, PoolGradValueError
from poolgrad_numba.plan import OPS, Plan, plan_call
from poolgrad_numba.values import integer, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_LARGEST_PLANE: Final = 2**31 - 1
# Messages of the checks below this face name the Python arguments; here they are called as in C.
_C_NAMES: Final = {
    "grad_output": "gradOutput",
    "input_shape": "self",
    "out": "gradInput",
    "kernel_size": "kernelSize",
    "ceil_mode": "ceilMode",
    "count_include_pad": "countIncludePad",
    "divisor_override": "divisorOverride",
}
_PYTHON_NAMES: Final = {c: python for python, c in _C_NAMES.items()}
_PYTHON_NAME: Final = re.compile(rf"\b({'|'.join(_C_NAMES)})\b")


@dataclass(frozen=True)
class Declaration:
    """One operator of this face: the Python operator behind it, and the dtypes that the accelerator takes."""

    name: str
    operator: str
    dtypes: tuple[np.dtype[Any], ...]
    index_dtypes: tuple[np.dtype[Any], ...] = ()
    result: str = "gradInput"


_NOTHING: Final = np.empty(0)
_uses = process.Lock()  # of any executor: held only to look whether one may be used, and to use it up


class aclOpExecutor:
    """A checked call that waits for its run. It keeps the tensors' storage alive; single-use unless made repeatable."""

    def __init__(self, declaration: Declaration, plan: Plan, arrays: operands.Operands) -> None:
        self.declaration = declaration
        self.plan = plan
        self.arrays = arrays
        self.workspace_size = plan.scratch_for(arrays) if arrays.grad.size else 0
        self.repeatable = False
        self.over = ""

    def end(self, why: str) -> None:
        """Allow no further use, and let go of the storage."""
        self.over = why
        self.arrays = operands.Operands(_NOTHING, None, _NOTHING)


# -- phase 1 -----------------------------------------------------------------------------------------------------


def prepare(
    declaration: Declaration,
    tensors: Mapping[str, Any],
    arrays: Mapping[str, Any] = MappingProxyType({}),
    scalars: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, aclOpExecutor | None, int]:
    """Check everything, latch the mode, and give (workspace size, executor, status)."""
    try:
        for name, value in {**tensors, **arrays}.items():
            if value is None:
                raise PoolGradTypeError(f"{name}: got None", status=PARAM_NULLPTR)
        parameters = _parameters(arrays, scalars)
        views = _views(declaration, tensors)
        plan = _plan(declaration, views, parameters)
        checked = operands.Operands(views["gradOutput"], views.get("indices"), views[declaration.result])
        operands.check(plan.problem, *checked)
        executor = aclOpExecutor(declaration, plan, checked)
    except PoolGradError as error:
        return 0, None, fail(aclnnStatus(error.status), _in_c(declaration, str(error)))
    except Exception as error:  # noqa: BLE001  (nothing here raises)
        return 0, None, fail(aclnnStatus.ACLNN_ERR_INNER, f"{declaration.name}: {error!r}")
    return executor.workspace_size, executor, aclnnStatus.ACLNN_SUCCESS


def _in_c(declaration: Declaration, text: str) -> str:
    names = {**_C_NAMES, "out": declaration.result}
    return f"{declaration.name}: " + _PYTHON_NAME.sub(lambda match: names[match[1]], text)


def _views(declaration: Declaration, tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Take the tensors apart: formats, dtypes, and what must agree between them."""
    arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
    labels = [(n, t.format) for n, t in tensors.items() if isinstance(t, aclTensor) and n != "indices"]
    for name, label in labels:
        if label != labels[0][1]:
            raise PoolGradValueError(f"{name}: got format {label.name}, wanted {labels[0][0]}'s {labels[0][1].name}")
    for name, array in arrays.items():
        allowed = declaration.index_dtypes if name == "indices" else declaration.dtypes
        if array.dtype.newbyteorder("=") not in allowed:
            wanted = ", ".join(dtype.name for dtype in allowed)
            raise PoolGradTypeError(f"{name}: got dtype {array.dtype}, wanted one of {wanted}")
    gradient, own, result = arrays["gradOutput"], arrays["self"], arrays[declaration.result]
    for name, array in (("self", own), (declaration.result, result)):
        if array.dtype != gradient.dtype:
            raise PoolGradTypeError(f"{name}: got dtype {array.dtype}, wanted gradOutput's {gradient.dtype}")
    if result.shape != own.shape:
        raise PoolGradValueError(f"{declaration.result}: got shape {result.shape}, wanted self's {own.shape}")
    spatial = OPS[declaration.operator].signature.spatial
    cells = math.prod(own.shape[-spatial:])
    if cells > _LARGEST_PLANE:
        axes = "*".join("DHW"[-spatial:])
        raise PoolGradValueError(f"self: got {axes} = {cells}, wanted at most {_LARGEST_PLANE}")
    return arrays


def _array(name: str, tensor: Any) -> NDArray[Any]:
    if isinstance(tensor, np.ndarray):
        return operands.as_array(name, tensor)
    if not isinstance(tensor, aclTensor):
        raise PoolGradTypeError(f"{name}: got {type(tensor).__name__}, wanted an aclTensor or a NumPy array")
    if tensor.array is None:
        raise PoolGradValueError(f"{name}: got an aclTensor that was destroyed")
    if tensor.format in PRIVATE_FORMATS:
        raise PoolGradValueError(f"{name}: got the private format {tensor.format.name}, wanted a plain one")
    return tensor.array


def _parameters(arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Read the window as C gives it, and check what only the accelerator asks for."""
    parameters: dict[str, Any] = {_PYTHON_NAMES.get(n, n): int_array(n, value) for n, value in arrays.items()}
    for name, value in scalars.items():
        if name == "divisorOverride":
            parameters["divisor_override"] = integer(name, value) or None  # 0 is C's way of leaving it unset
        elif isinstance(value, bool | np.bool_ | int) and value in (0, 1):
            parameters[_PYTHON_NAMES[name]] = bool(value)
        else:
            raise PoolGradTypeError(f"{name}: got {show(value)}, wanted true or false")
    for step in parameters.get("dilation", ()):
        if step != 1:
            raise PoolGradValueError(f"dilation: got {step}, wanted 1")
    kernel, padding = parameters.get("kernel_size", ()), parameters.get("padding", ())
    if kernel and padding:
        axes = max(len(kernel), len(padding))
        for k, p in zip(kernel * (axes // len(kernel)), padding * (axes // len(padding)), strict=False):
            if k > 0 and p > k // 2:
                raise PoolGradValueError(f"padding: got {p}, wanted at most half of kernelSize {k}, rounded down")
    return parameters


def _plan(declaration: Declaration, views: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> Plan:
    settings = config.resolve(runtime.deterministic())  # here the mode is latched
    names = (("grad_output", "gradOutput"), ("indices", "indices"))
    described = tuple((name, views[c].shape, views[c].dtype) for name, c in names if c in views)
    return _planned(declaration.operator, views["self"].shape, tuple(parameters.items()), settings, described)


@lru_cache(maxsize=1024)
def _planned(
    operator: str,
    input_shape: tuple[int, ...],
    parameters: tuple[tuple[str, Any], ...],
    settings: config.Config,
    described: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...],
) -> Plan:
    shapes = {name: shape for name, shape, _ in described}
    dtypes = {name: dtype for name, _, dtype in described}
    chosen = (settings.deterministic, settings.num_threads)
    return plan_call(OPS[operator], input_shape, dict(parameters), chosen, dtypes, shapes)


# -- phase 2 -----------------------------------------------------------------------------------------------------


def execute(declaration: Declaration, workspace: Any, workspaceSize: Any, executor: Any, stream: Any) -> int:
    """Use up the executor, check the workspace, and run: at once, or in its turn on the stream."""
    if executor is None:
        return fail(aclnnStatus.ACLNN_ERR_PARAM_NULLPTR, f"{declaration.name}: executor: got None")
    if not isinstance(executor, aclOpExecutor) or executor.declaration is not declaration:
        text = f"{declaration.name}: executor: got {show(executor)}, wanted one that its own first phase gave"
        return fail(aclnnStatus.ACLNN_ERR_INNER, text)
    with _uses.held:
        if executor.over:
            return fail(aclnnStatus.ACLNN_ERR_INNER, f"{declaration.name}: executor: {executor.over}")
        plan, arrays = executor.plan, executor.arrays
        if not executor.repeatable:
            executor.end("it was used before, and is not repeatable")
    try:
        scratch = _scratch(workspace, workspaceSize, executor.workspace_size, arrays)
        if stream is None:
            failure = _run(declaration, plan, arrays, scratch)
            return fail(*failure) if failure else aclnnStatus.ACLNN_SUCCESS
        if isinstance(stream, runtime.aclrtStream) and stream.enqueue(lambda: _run(declaration, plan, arrays, scratch)):
            return aclnnStatus.ACLNN_SUCCESS
        text = f"stream: got {show(stream)}, wanted None or a stream that is alive"
        return fail(aclnnStatus.ACLNN_ERR_PARAM_INVALID, f"{declaration.name}: {text}")
    except PoolGradError as error:
        return fail(aclnnStatus(error.status), _in_c(declaration, str(error)))


def _scratch(workspace: Any, claimed: Any, needed: int, arrays: operands.Operands) -> NDArray[np.uint8]:
    """Check that the workspace is there, and really as large as phase 1 said."""
    if not needed:
        return np.empty(0, np.uint8)
    if workspace is None:
        text = f"workspace: got None, wanted {needed} bytes"
        raise PoolGradTypeError(text, status=PARAM_NULLPTR)
    size = integer("workspaceSize", claimed)
    if size < needed:
        raise PoolGradValueError(f"workspaceSize: got {show(size)}, wanted at least the {needed} of the first phase")
    return operands.open_workspace(workspace, needed, arrays)


def _run(
    declaration: Declaration, plan: Plan, arrays: operands.Operands, scratch: NDArray[np.uint8]
) -> tuple[int, str] | None:
    """Run; the failure as (status, text), for whoever reports it."""
    try:
        if arrays.grad.size:
            plan.run_checked(arrays, scratch)
        else:
            arrays.out[...] = 0
    except PoolGradError as error:
        return aclnnStatus(error.status), _in_c(declaration, str(error))
    except Exception as error:  # noqa: BLE001  (out of memory, say: the status tells)
        return aclnnStatus.ACLNN_ERR_RUNTIME_ERROR, f"{declaration.name}: the run failed: {error!r}"
    return None


def _executor_status(executor: Any) -> int:
    if executor is None:
        return fail(aclnnStatus.ACLNN_ERR_INNER_NULLPTR, "executor: got None")
    if not isinstance(executor, aclOpExecutor):
        return fail(aclnnStatus.ACLNN_ERR_INNER, f"executor: got {show(executor)}, wanted an aclOpExecutor")
    if executor.over:
        return fail(aclnnStatus.ACLNN_ERR_INNER, f"executor: {executor.over}")
    return aclnnStatus.ACLNN_SUCCESS


def aclSetAclOpExecutorRepeatable(executor: aclOpExecutor) -> int:
    """Let phase 2 use an executor any number of times, until it is destroyed."""
    status = _executor_status(executor)
    if not status:
        executor.repeatable = True
    return status


def aclDestroyAclOpExecutor(executor: aclOpExecutor) -> int:
    """End an executor; runs of it that are queued still run."""
    if executor is None or not isinstance(executor, aclOpExecutor):
        return _executor_status(executor)
    with _uses.held:
        status = _executor_status(executor)
        if not status:
            executor.end("it was destroyed")
    return status
