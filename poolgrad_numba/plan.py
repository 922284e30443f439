"""Plans: which candidate runs a problem, how many workers and bytes of scratch it takes, and the run itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from poolgrad_numba.errors import PoolGradTypeError, PoolGradValueError
from poolgrad_numba.problem import (
    Problem,
    Signature,
    as_array,
    check_operands,
    check_out,
    describe,
    index_error,
    share_memory,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import DTypeLike, NDArray

_ALIGNMENT: Final = 64  # a cache line, and the widest vector


class Block(NamedTuple):
    """One scratch array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its bytes, rounded up so that the next block is aligned too."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Verdict(NamedTuple):
    """Whether a candidate takes a problem, and why, in a sentence."""

    takes: bool
    why: str


class Candidate(ABC):
    """One way to run a problem. Subclasses are stateless; each operator lists them in order of preference.

    Attributes
    ----------
    name : str
        What ``algorithm=`` calls it.
    how : str
        What it does, in a sentence.
    canonical : bool
        Whether it adds in canonical order; deterministic mode takes no other.
    """

    name: ClassVar[str]
    how: ClassVar[str]
    canonical: ClassVar[bool]

    @abstractmethod
    def judge(self, problem: Problem) -> Verdict:
        """Say whether this is a good way to run the problem. The last candidate of a list never refuses."""

    @abstractmethod
    def pieces(self, problem: Problem) -> int:
        """Into how many parts the work can be split: no more workers than that."""

    @abstractmethod
    def scratch(self, problem: Problem, workers: int) -> tuple[Block, ...]:
        """Scratch arrays that `run` takes."""

    @abstractmethod
    def run(self, plan: Plan, operands: Operands, scratch: list[NDArray[Any]]) -> int:
        """Fill ``operands.out``; return how many indices lie outside their planes."""


class Operands(NamedTuple):
    """What kernels get: C-contiguous, (planes, outputs) or (planes, cells), 16-bit values as integers."""

    grad: NDArray[Any]
    indices: NDArray[Any] | None
    out: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """A declared operator: its signature, its candidates for each mode, and its name on the accelerator."""

    signature: Signature
    aclnn: str
    fast: tuple[Candidate, ...]
    deterministic: tuple[Candidate, ...]

    def candidates(self, *, deterministic: bool) -> tuple[Candidate, ...]:
        """Candidates of one mode, the preferred first."""
        return self.deterministic if deterministic else self.fast


OPS: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Enter an operator into `OPS`, so that plans can be made for it by name."""
    OPS[operator.signature.name] = operator
    return operator


# -- plans -------------------------------------------------------------------------------------------------------

# Below this many cells and outputs a worker, starting threads costs more than they save (about 10 us a launch).
_GRAIN: Final = 16_384


@dataclass(frozen=True)
class Plan:
    """How one problem is run. Made by `make_plan`; frozen, reusable, safe to share between threads and to pickle.

    Attributes
    ----------
    problem : Problem
        The shapes, dtypes, parameters, mode and thread limit that it was made for.
    algorithm : str
        Name of the candidate that runs.
    workers : int
        Into how many parts the work is split; no more threads run.
    workspace_size : int
        Bytes of scratch that a run needs beyond C-contiguous inputs and ``out``; may be 0.
    output_shape : tuple of int
        Shape of the pooling's output, which ``grad_output`` must have.
    """

    problem: Problem
    algorithm: str
    workers: int
    forced: bool
    blocks: tuple[Block, ...] = field(repr=False)
    verdicts: tuple[tuple[str, Verdict], ...] = field(repr=False)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the pooling's output, which ``grad_output`` must have."""
        return self.problem.output_shape

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch that a run needs beyond C-contiguous inputs and ``out``."""
        return _buffer_size(self.blocks)

    def workspace_size_for(self, grad_output: Any, indices: Any = None, out: NDArray[Any] | None = None) -> int:
        """Bytes of scratch for a run with these very arrays.

        More than ``workspace_size`` where one of them is not C-contiguous, aligned and in native byte order: it
        is then packed into the workspace.
        """
        grad, index = self._checked(grad_output, indices)
        return _buffer_size(self.blocks + self._packing(grad, index, out))

    def run(
        self,
        grad_output: Any,
        indices: Any = None,
        *,
        out: NDArray[Any] | None = None,
        workspace: Any = None,
    ) -> NDArray[Any]:
        """Compute ``grad_input``.

        Parameters
        ----------
        grad_output : array_like
            Of ``output_shape`` and the planned dtype, with any strides.
        indices : array_like, optional
            Of the same shape and the planned index dtype; for max pooling only.
        out : ndarray, optional
            Where to put the result: of ``input_shape`` and the planned dtype, any strides, no memory shared.
        workspace : buffer, optional
            Writable bytes, at least `workspace_size_for` these arrays. With ``out`` and ``workspace`` a run
            allocates nothing that grows with the data.

        Returns
        -------
        ndarray
            ``out``, or a new C-ordered array.

        Raises
        ------
        PoolGradValueError, PoolGradTypeError
            For operands that do not fit the plan; ``out`` is untouched.
        PoolGradIndexError
            For an index outside its plane; the content of ``out`` is undefined.
        """
        grad, index = self._checked(grad_output, indices)
        inputs = (grad,) if index is None else (grad, index)
        if out is not None:
            check_out(self.problem, out, inputs)
        packing = self._packing(grad, index, out)
        buffer = _workspace(workspace, _buffer_size(self.blocks + packing), inputs if out is None else (*inputs, out))
        result = np.empty(self.problem.input_shape, self.problem.dtype) if out is None else out
        if result.size:
            arrays = _carve(buffer, self.blocks + packing)
            self._fill(grad, index, result, arrays)
        return result

    def explain(self) -> str:
        """Describe in plain words what runs, why it won, and why each other candidate was refused."""
        problem = self.problem
        mode = "deterministic" if problem.deterministic else "fast"
        lines = [
            f"{problem.signature.name}, {mode} mode, at most {_count(problem.num_threads, 'thread')}",
            f"  {problem.dtype.name} grad_output {problem.output_shape} -> grad_input {problem.input_shape}",
            f"  {_count(problem.planes, 'plane')} of {_count(problem.cells, 'cell')}, {problem.outputs} outputs each",
        ]
        for name, verdict in self.verdicts:
            mark = "runs" if name == self.algorithm else ("could run" if verdict.takes else "refused")
            lines.append(f"  {name}: {mark}; {_candidate(problem, name).how}; {verdict.why}")
        if self.forced:
            lines.append(f"  {self.algorithm} was asked for by name")
        lines.append(f"  {_count(self.workers, 'worker')}, {_count(self.workspace_size, 'byte')} of workspace")
        return "\n".join(lines)

    def _checked(self, grad_output: Any, indices: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
        grad = as_array("grad_output", grad_output)
        index = None if indices is None else as_array("indices", indices)
        check_operands(self.problem, grad, index)
        return grad, index

    def _packing(self, *arrays: NDArray[Any] | None) -> tuple[Block, ...]:
        """Room for those of (grad, indices, out) that kernels cannot take as they are."""
        dtypes = (self.problem.dtype, self.problem.index_dtype, self.problem.dtype)
        return tuple(
            Block(array.shape, dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
            if array is not None and dtype is not None and not _is_plain(array)
        )

    def _fill(
        self, grad: NDArray[Any], index: NDArray[Any] | None, out: NDArray[Any], arrays: list[NDArray[Any]]
    ) -> None:
        problem = self.problem
        scratch, rooms = arrays[: len(self.blocks)], iter(arrays[len(self.blocks) :])

        def packed(array: NDArray[Any], *, copy: bool = True) -> NDArray[Any]:
            if _is_plain(array):
                return array
            room = next(rooms)
            if copy:
                np.copyto(room, array)
            return room

        grad, index = packed(grad), None if index is None else packed(index)
        target = packed(out, copy=False)
        operands = Operands(
            _planes(grad, problem.planes, problem.outputs, readonly=True),
            None if index is None else _planes(index, problem.planes, problem.outputs, readonly=True),
            _planes(target, problem.planes, problem.cells, readonly=False),
        )
        bad = _candidate(problem, self.algorithm).run(self, operands, scratch)
        if bad and index is not None:
            raise index_error(problem, index)
        if target is not out:
            np.copyto(out, target)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_plain(array: NDArray[Any]) -> bool:
    """Whether kernels can take an array as it is."""
    return array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative


def _planes(array: NDArray[Any], planes: int, length: int, *, readonly: bool) -> NDArray[Any]:
    """View an array as (planes, length), 16-bit floats as the integers that carry them: uint16 float16, int16 bfloat16.

    Inputs are always read-only here: Numba would compile once more for those that the caller made so.
    """
    if array.dtype.itemsize == 2:
        array = array.view(np.uint16 if array.dtype == np.float16 else np.int16)
    view = array.reshape(planes, length)
    view.flags.writeable = not readonly
    return view


def _buffer_size(blocks: tuple[Block, ...]) -> int:
    size = sum(block.nbytes for block in blocks)
    return size + _ALIGNMENT - 1 if size else 0  # the caller's buffer may start anywhere


def _workspace(workspace: Any, size: int, others: tuple[NDArray[Any], ...]) -> NDArray[np.uint8]:
    """Check the caller's scratch, or allocate it."""
    if workspace is None:
        return np.empty(size, np.uint8)
    try:
        view = memoryview(workspace)
        buffer: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise PoolGradTypeError(f"workspace: got {type(workspace).__name__}, wanted a buffer: {error}") from error
    if view.readonly:
        raise PoolGradValueError("workspace: got a read-only buffer, wanted a writable one")
    if buffer.size < size:
        raise PoolGradValueError(
            f"workspace: got {buffer.size} bytes, wanted {size} (workspace_size_for these arrays; one that is not "
            "C-contiguous is packed into the workspace)"
        )
    if any(share_memory(buffer, other) for other in others):
        raise PoolGradValueError("workspace: got a buffer that shares memory with an operand")
    return buffer


def _carve(buffer: NDArray[np.uint8], blocks: tuple[Block, ...]) -> list[NDArray[Any]]:
    """Cut scratch arrays out of a buffer, each aligned."""
    offset = -buffer.ctypes.data % _ALIGNMENT if buffer.size else 0
    arrays: list[NDArray[Any]] = []
    for block in blocks:
        if block.nbytes:
            arrays.append(np.ndarray(block.shape, block.dtype, buffer, offset))
            offset += block.nbytes
        else:
            arrays.append(np.empty(block.shape, block.dtype))
    return arrays


def _candidate(problem: Problem, name: str) -> Candidate:
    candidates = OPS[problem.signature.name].candidates(deterministic=problem.deterministic)
    return next(candidate for candidate in candidates if candidate.name == name)


def make_plan(
    operator: str,
    *,
    input_shape: Any,
    dtype: DTypeLike = np.float32,
    index_dtype: DTypeLike = np.int64,
    algorithm: str | None = None,
    deterministic: bool | None = None,
    num_threads: int | None = None,
    **parameters: Any,
) -> Plan:
    """Check the arguments of an operator once, and plan runs of it.

    Parameters
    ----------
    operator : str
        Name of a public function, such as ``"avg_pool3d_backward"``.
    input_shape : sequence of int
        Shape of the forward input, and of the result: (N, C, spatial...) or (C, spatial...).
    dtype : dtype
        float32, float64, float16 or bfloat16.
    index_dtype : dtype
        int32 or int64; only max pooling has indices.
    algorithm : str, optional
        Name of the candidate to run, whatever the problem; for tests and measurements.
    deterministic : bool, optional
        The mode; see `config_context` for what holds otherwise.
    num_threads : int, optional
        The thread limit; likewise.
    **parameters
        The operator's own keywords (``kernel_size``, ``stride``, ...); ``output_size`` for an adaptive one.

    Returns
    -------
    Plan
        From a cache where the same was planned before.

    Raises
    ------
    PoolGradValueError, PoolGradTypeError
        For any argument that the operator itself would refuse, or an algorithm that it does not have.

    Examples
    --------
    >>> import numpy as np, poolgrad_numba as pg
    >>> plan = pg.make_plan("avg_pool3d_backward", input_shape=(1, 2, 4, 4, 4), dtype=np.float32, kernel_size=2)
    >>> plan.output_shape
    (1, 2, 2, 2, 2)
    >>> plan.run(np.ones(plan.output_shape, np.float32))[0, 0, 0, 0]
    array([0.125, 0.125, 0.125, 0.125], dtype=float32)
    """
    if not isinstance(operator, str) or operator not in OPS:
        raise PoolGradValueError(f"operator: got {operator!r}, wanted one of {', '.join(sorted(OPS))}")
    problem = describe(
        OPS[operator].signature, input_shape, parameters, (dtype, index_dtype), (deterministic, num_threads)
    )
    if not isinstance(algorithm, str | None):
        raise PoolGradTypeError(f"algorithm: got {algorithm!r}, wanted the name of a candidate or None")
    return _plan(problem, algorithm)


def apply(
    operator: Operator,
    grad_output: Any,
    indices: Any,
    input_shape: Any,
    parameters: Mapping[str, Any],
    out: NDArray[Any] | None,
    settings: tuple[bool | None, int | None],
) -> NDArray[Any]:
    """Run an operator once, as its public function does: plan it, or find the plan, and run it."""
    grad = as_array("grad_output", grad_output)
    index = as_array("indices", indices) if operator.signature.indexed else None
    problem = describe(
        operator.signature,
        input_shape,
        parameters,
        (grad.dtype, None if index is None else index.dtype),
        settings,
        (grad.shape, None if index is None else index.shape),
    )
    return _plan(problem, None).run(grad, index, out=out)


@lru_cache(maxsize=1024)
def _plan(problem: Problem, algorithm: str | None) -> Plan:
    """Take the first candidate that takes the problem, or the one asked for."""
    operator = OPS[problem.signature.name]
    candidates = operator.candidates(deterministic=problem.deterministic)
    verdicts = tuple((candidate.name, candidate.judge(problem)) for candidate in candidates)
    if algorithm is None:
        chosen = next(c for c, (_, verdict) in zip(candidates, verdicts, strict=True) if verdict.takes)
        # A small problem is not worth many threads; a candidate that was asked for by name gets all of them.
        most = max(1, problem.planes * (problem.cells + problem.outputs) // _GRAIN)
    else:
        chosen = _named(operator, algorithm, problem)
        most = problem.num_threads
    workers = max(1, min(problem.num_threads, most, chosen.pieces(problem)))
    blocks = chosen.scratch(problem, workers) if problem.planes else ()
    return Plan(problem, chosen.name, workers, algorithm is not None, blocks, verdicts)


def _named(operator: Operator, algorithm: str, problem: Problem) -> Candidate:
    """Find the candidate that was asked for."""
    candidates = operator.candidates(deterministic=problem.deterministic)
    for candidate in candidates:
        if candidate.name == algorithm:
            return candidate
    for candidate in operator.fast:
        if candidate.name == algorithm:
            raise PoolGradValueError(f"algorithm: got {algorithm!r}, which is not deterministic: {candidate.how}")
    names = ", ".join(candidate.name for candidate in candidates)
    raise PoolGradValueError(f"algorithm: got {algorithm!r}, wanted one of {names}")
