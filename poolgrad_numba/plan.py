"""Plans: which candidate runs a problem, how many workers and bytes of scratch it takes, and the run itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from poolgrad_numba import memory, operands
from poolgrad_numba.errors import PoolGradTypeError, PoolGradValueError
from poolgrad_numba.operands import Block, Operands
from poolgrad_numba.problem import Problem, Signature, call_key, describe
from poolgrad_numba.values import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import DTypeLike, NDArray


class Verdict(NamedTuple):
    """Whether a candidate takes a problem, and why, in a sentence."""

    takes: bool
    why: str


_Verdicts = tuple[tuple[str, Verdict], ...]  # each candidate's name and verdict, the preferred one's first


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
    interleaved : bool
        Whether it takes operands channels last, as (images, outputs or cells x channels): it runs where they lie so.
    """

    name: ClassVar[str]
    how: ClassVar[str]
    canonical: ClassVar[bool]
    interleaved: ClassVar[bool] = False

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


def useful_workers(problem: Problem) -> int:
    """Workers that a problem can feed, threads and splits aside."""
    return max(1, problem.planes * (problem.cells + problem.outputs) // _GRAIN)


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
        Bytes of scratch that a run needs beyond operands that need no packing; may be 0.
    output_shape : tuple of int
        Shape of the pooling's output, which ``grad_output`` must have.
    """

    problem: Problem
    algorithm: str
    workers: int
    forced: bool
    blocks: tuple[Block, ...] = field(repr=False)
    verdicts: _Verdicts = field(repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def candidate(self) -> Candidate:
        """What `algorithm` names."""
        candidates = OPS[self.problem.signature.name].candidates(deterministic=self.problem.deterministic)
        return next(candidate for candidate in candidates if candidate.name == self.algorithm)

    @cached_property
    def _interleaved(self) -> Plan | None:
        """The plan for operands that lie in memory with their channels last, if they are better taken so."""
        if self.forced or self.candidate.interleaved:
            return None
        candidate = next(_able(self.problem, self.verdicts, interleaved=True), None)
        return None if candidate is None else _make(candidate, self.problem, self.verdicts, forced=False)

    def _taking(self, arrays: Operands) -> tuple[Plan, Operands]:
        """Give the plan that these arrays are run by, and them as it takes them."""
        spatial = self.problem.signature.spatial
        if self.candidate.interleaved:
            return self, operands.interleaved(arrays, spatial)
        if self._interleaved is None or operands.is_plain(arrays.out):
            return self, arrays
        turned = operands.interleaved(arrays, spatial)
        return (self, arrays) if operands.packing(turned) else (self._interleaved, turned)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the pooling's output, which ``grad_output`` must have."""
        return self.problem.output_shape

    @cached_property
    def workspace_size(self) -> int:
        """Bytes of scratch that a run needs beyond operands that need no packing."""
        return operands.buffer_size(self.blocks)

    def workspace_size_for(self, grad_output: Any, indices: Any = None, out: Any = None) -> int:
        """Bytes of scratch for a run with these very arrays.

        More than ``workspace_size`` where one of them is not C-contiguous, aligned and in native byte order: it
        is then packed into the workspace. Where all have their channels last in memory instead, a candidate may take
        them so; `explain` tells what it needs.
        """
        grad, index, target = self._read(grad_output, indices, out)
        return self.scratch_for(Operands(grad, index, self._made() if target is None else target))

    def scratch_for(self, arrays: Operands) -> int:
        """Give what `workspace_size_for` gives, for operands that were checked already."""
        plan, arrays = self._taking(arrays)
        packing = operands.packing(arrays)
        return operands.buffer_size(plan.blocks + packing) if packing else plan.workspace_size

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
        grad, index, target = self._read(grad_output, indices, out)
        result = self.run_read(grad, index, target, workspace)
        return result if out is None else out

    def run_read(
        self, grad: NDArray[Any], index: NDArray[Any] | None, target: NDArray[Any] | None, workspace: Any = None
    ) -> NDArray[Any]:
        """Run on arrays that were checked already, all but the workspace; ``target`` is made where it is ``None``."""
        if target is None:
            target = self._made()
        arrays = Operands(grad, index, target)
        self.run_checked(arrays, operands.open_workspace(workspace, self.scratch_for(arrays), arrays))
        return target

    def _made(self) -> NDArray[Any]:
        """A new result."""
        return memory.empty(self.problem.input_shape, self.problem.dtype)

    def _read(
        self, grad_output: Any, indices: Any, out: Any
    ) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        grad = operands.as_array("grad_output", grad_output)
        index = None if indices is None else operands.as_array("indices", indices)
        target = None if out is None else operands.as_out(out)
        operands.check(self.problem, grad, index, target)
        return grad, index, target

    def run_checked(self, arrays: Operands, buffer: NDArray[np.uint8]) -> None:
        """Run on operands that were checked already, with a scratch buffer of `scratch_for` them."""
        if not arrays.out.size:
            return
        plan, taken = self._taking(arrays)
        problem, own = plan.problem, len(plan.blocks)
        rooms = operands.carve(buffer, plan.blocks + operands.packing(taken))
        packed = operands.pack(taken, rooms[own:], problem.num_threads)
        rows = problem.planes // (problem.channels if plan.candidate.interleaved else 1)
        bad = plan.candidate.run(plan, operands.as_rows(packed, rows), rooms[:own])
        if bad and arrays.indices is not None:
            raise operands.index_error(problem, arrays.indices)
        if packed.out is not taken.out:
            operands.copy(taken.out, packed.out, problem.num_threads)

    def explain(self) -> str:
        """Describe in plain words what runs, why it won, and why each other candidate was refused."""
        problem = self.problem
        mode = "deterministic" if problem.deterministic else "fast"
        lines = [
            f"{problem.signature.name}, {mode} mode, at most {_count(problem.num_threads, 'thread')}",
            f"  grad_output {problem.dtype.name} {problem.output_shape} -> grad_input {problem.input_shape}",
            f"  {_count(problem.planes, 'plane')} of {_count(problem.cells, 'cell')} and "
            + _count(problem.outputs, "output"),
            "candidates, the preferred one first:",
        ]
        width = max(len(name) for name, _ in self.verdicts)
        for name, verdict in self.verdicts:
            mark = "could run" if verdict.takes else "refused"
            if name == self.algorithm:
                mark = "runs" if verdict.takes else "runs, but by itself refused"
            lines.append(f"  {name:<{width}}  {mark}: {verdict.why}")
        forced = ", asked for by name" if self.forced else ""
        lines += [
            f"{self.algorithm}{forced}: {self.candidate.how}",
            f"  {_count(self.workers, 'worker')}, {_count(self.workspace_size, 'byte')} of workspace",
        ]
        other = self._interleaved
        if other:
            lines += [
                f"if all operands lie in memory with their channels last, {other.algorithm}: {other.candidate.how}",
                f"  {_count(other.workers, 'worker')}, {_count(other.workspace_size, 'byte')} of workspace",
            ]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_plan(
    operator: str,
    *,
    input_shape: Any,
    dtype: DTypeLike = np.float32,
    index_dtype: DTypeLike | None = None,
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
    index_dtype : dtype, optional
        int32 or int64 (the default); only max pooling has indices.
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
        raise PoolGradValueError(f"operator: got {show(operator)}, wanted one of {', '.join(sorted(OPS))}")
    if not isinstance(algorithm, str | None):
        raise PoolGradTypeError(f"algorithm: got {show(algorithm)}, wanted the name of a candidate or None")
    signature = OPS[operator].signature
    dtypes = {"dtype": dtype}
    if signature.indexed:
        dtypes["index_dtype"] = np.int64 if index_dtype is None else index_dtype
    elif index_dtype is not None:
        raise PoolGradTypeError(f"index_dtype: got {show(index_dtype)}, but {operator} takes no indices")
    return _plan(describe(signature, input_shape, parameters, (deterministic, num_threads), dtypes), algorithm)


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
    arrays = {"grad_output": operands.as_array("grad_output", grad_output)}
    if operator.signature.indexed:
        arrays["indices"] = operands.as_array("indices", indices)
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {name: array.dtype for name, array in arrays.items()}
    if out is not None:
        shapes["out"] = operands.as_out(out).shape
    plan = plan_call(operator, input_shape, parameters, settings, dtypes, shapes)
    if out is None:  # planned for just these arrays, so that there is nothing left to check
        return plan.run_read(arrays["grad_output"], arrays.get("indices"), None)
    return plan.run(arrays["grad_output"], arrays.get("indices"), out=out)


_recent: OrderedDict[Any, Plan] = OrderedDict()  # whose oldest entry goes in one step: threads share it
_MOST_RECENT: Final = 1024


def plan_call(
    operator: Operator,
    input_shape: Any,
    parameters: Mapping[str, Any],
    settings: tuple[bool | None, int | None],
    dtypes: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> Plan:
    """Plan a call from its arguments and what is known of its operands; see `describe`."""
    asked = (operator.signature, input_shape, parameters, settings, dtypes, shapes)
    key = call_key(*asked)
    plan = None if key is None else _recent.get(key)
    if plan is None:
        plan = _plan(describe(*asked), None)
        if key is not None:
            while len(_recent) >= _MOST_RECENT:  # an interrupt may have left one too many
                _recent.popitem(last=False)
            _recent[key] = plan
    return plan


@lru_cache(maxsize=1024)
def _plan(problem: Problem, algorithm: str | None) -> Plan:
    """Plan for packed operands with the preferred candidate, or with the one asked for."""
    operator = OPS[problem.signature.name]
    candidates = operator.candidates(deterministic=problem.deterministic)
    verdicts = tuple((candidate.name, candidate.judge(problem)) for candidate in candidates)
    if algorithm is None:
        return _make(next(_able(problem, verdicts, interleaved=False)), problem, verdicts, forced=False)
    return _make(_named(operator, algorithm, problem), problem, verdicts, forced=True)


def _able(problem: Problem, verdicts: _Verdicts, *, interleaved: bool) -> Iterator[Candidate]:
    """Go through the candidates that take the problem, of one kind, the preferred first."""
    candidates = OPS[problem.signature.name].candidates(deterministic=problem.deterministic)
    for candidate, (_, verdict) in zip(candidates, verdicts, strict=True):
        if verdict.takes and candidate.interleaved == interleaved:
            yield candidate


def _make(candidate: Candidate, problem: Problem, verdicts: _Verdicts, *, forced: bool) -> Plan:
    # A small problem is not worth many threads; a candidate that was asked for by name gets all of them.
    most = problem.num_threads if forced else useful_workers(problem)
    workers = max(1, min(problem.num_threads, most, candidate.pieces(problem)))
    blocks = candidate.scratch(problem, workers) if problem.planes else ()
    return Plan(problem, candidate.name, workers, forced, blocks, verdicts)


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
