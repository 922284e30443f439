"""Other libraries' gradients of pooling, on the same arrays, where such a library is installed."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poolgrad_numba.bench.cases import AVG3D, CONTIGUOUS, MAX2D
from poolgrad_numba.bench.providers import ALLOCATING, PREALLOCATED, LeftOut, Provider, check
from poolgrad_numba.process import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poolgrad_numba.bench.workload import Workload

TORCH: Final = "torch"
JAX: Final = "jax"
PEERS: Final = (TORCH, JAX)


def peers(work: Workload, threads: int) -> tuple[list[Provider], list[LeftOut]]:
    """Find the peers that run the workload and give the right result, and the others with their reasons."""
    found: list[Provider] = []
    left_out: list[LeftOut] = []
    for name, make, refusal in ((TORCH, _torch, ""), (JAX, _jax, _why_not_jax(work, threads))):
        if find_spec(name) is None:
            left_out.append(LeftOut(name, "not installed"))
        elif refusal:
            left_out.append(LeftOut(name, refusal))
        else:
            good, reason = _those_that_run(work, make)
            found += good
            if reason:
                left_out.append(LeftOut(name, reason))
    return found, left_out


def _those_that_run(work: Workload, make: Callable[[Workload], list[Provider]]) -> tuple[list[Provider], str]:
    try:
        candidates = make(work)
        good = [provider for provider in candidates if check(work, provider)]
    except (RuntimeError, TypeError, ValueError) as error:  # the peer lacks the dtype, say
        return [], str(error).strip().partition("\n")[0] or type(error).__name__
    wrong = [provider.form for provider in candidates if provider not in good]
    return good, f"another result, {' and '.join(wrong)}" if wrong else ""


# -- PyTorch -----------------------------------------------------------------------------------------------------


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let PyTorch, where it is installed, use that many threads."""
    if find_spec(TORCH) is None:
        yield
        return
    torch: Any = import_module(TORCH)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch(work: Workload) -> list[Provider]:
    """``torch.ops.aten``, the result given and not."""
    torch: Any = import_module(TORCH)
    forms: dict[str, dict[str, Any]] = {PREALLOCATED: {"grad_input": _tensor(torch, work.out)}, ALLOCATING: {}}
    function, arguments = _torch_call(torch, work)
    return [
        Provider(TORCH, form, lambda into=into: function(*arguments, **into), as_array=_from_torch)  # type: ignore[misc]
        for form, into in forms.items()
    ]


def _torch_call(torch: Any, work: Workload) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    case = work.case
    function = getattr(torch.ops.aten, case.operator)
    first = (_tensor(torch, work.grad), _tensor(torch, np.empty_like(work.out)))
    window = [[case.parameters.get(name, 0)] * case.spatial for name in ("kernel_size", "stride", "padding")]
    if case.operator == AVG3D:
        count_include_pad = case.parameters.get("count_include_pad", True)
        return function, (*first, *window, False, count_include_pad, None)
    index = _tensor(torch, work.operands[1])
    if case.operator == MAX2D:
        return function, (*first, *window, [1] * case.spatial, False, index)
    return function, (*first, index)


def _tensor(torch: Any, array: NDArray[Any]) -> Any:
    """Give a tensor over the array's memory."""
    if array.dtype.name == "bfloat16":  # torch.from_numpy does not know it
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_torch(tensor: Any) -> NDArray[Any]:
    return np.asarray(tensor.float())


# -- JAX ---------------------------------------------------------------------------------------------------------


def _why_not_jax(work: Workload, threads: int) -> str:
    case = work.case
    if case.operator not in (MAX2D, AVG3D):
        return "has no adaptive pooling"
    if case.layout != CONTIGUOUS:
        return "chooses its layouts itself"
    return "" if threads == cores() else "has no setting for the number of threads"


def _jax(work: Workload) -> list[Provider]:
    """The gradient of ``lax.reduce_window``; for a maximum, it finds the cells anew from the forward's input."""
    jax: Any = import_module(JAX)
    pool = _jax_pool(jax, work)
    backward = jax.jit(lambda x, grad: jax.vjp(pool, x)[1](grad)[0])
    x = jax.numpy.asarray(np.resize(work.sample, work.case.input_shape).astype(work.dtype))
    grad = jax.numpy.asarray(work.grad)
    return [Provider(JAX, ALLOCATING, lambda: backward(x, grad).block_until_ready())]


def _jax_pool(jax: Any, work: Workload) -> Callable[[Any], Any]:
    """Build the forward that the case is the gradient of."""
    case = work.case
    lax, lead = jax.lax, len(case.input_shape) - case.spatial
    kernel, stride, padding = (case.parameters[name] for name in ("kernel_size", "stride", "padding"))
    geometry = (
        (1,) * lead + (kernel,) * case.spatial,
        (1,) * lead + (stride,) * case.spatial,
        ((0, 0),) * lead + ((padding, padding),) * case.spatial,
    )
    if case.operator == MAX2D:
        least = np.array(-np.inf, work.dtype)
        return lambda x: lax.reduce_window(x, least, lax.max, *geometry)
    zero = np.zeros((), work.dtype)
    cells: Any = kernel**case.spatial
    if not case.parameters.get("count_include_pad", True):
        cells = lax.reduce_window(np.ones(case.input_shape, work.dtype), zero, lax.add, *geometry)
    return lambda x: lax.reduce_window(x, zero, lax.add, *geometry) / cells
