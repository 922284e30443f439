"""The two settings, mode and thread limit: who may set them, and which one holds here and now.

Precedence: the call's own argument, then ``config_context``, then ``set_config``, then the environment
(``POOLGRAD_DETERMINISTIC``, ``POOLGRAD_NUM_THREADS``), then the default: fast; Numba's own limit, or the cores that
this process may use and what ``OMP_NUM_THREADS`` says if those are fewer.
This is the only module that reads the environment.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poolgrad_numba import process
from poolgrad_numba import threads as numba_threads
from poolgrad_numba.errors import PoolGradValueError
from poolgrad_numba.values import flag, integer, show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import EllipsisType

DETERMINISTIC_VARIABLE: Final = "POOLGRAD_DETERMINISTIC"
NUM_THREADS_VARIABLE: Final = "POOLGRAD_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings that hold at one place in a program.

    Attributes
    ----------
    deterministic : bool
        ``True``: the same bits for any thread count, layout, run or CPU. ``False``: fast, free to reorder.
    num_threads : int
        The most threads that a call may use.
    """

    deterministic: bool
    num_threads: int


@dataclass(frozen=True, slots=True)
class _Settings:
    """One layer of settings; ``None`` leaves the choice to the layer below."""

    deterministic: bool | None = None
    num_threads: int | None = None

    def over(self, below: _Settings) -> _Settings:
        return _Settings(
            below.deterministic if self.deterministic is None else self.deterministic,
            below.num_threads if self.num_threads is None else self.num_threads,
        )

    def changed(self, deterministic: Any, num_threads: Any) -> _Settings:
        return _Settings(
            self.deterministic if deterministic is ... else _checked_mode(deterministic),
            self.num_threads if num_threads is ... else _checked_threads(num_threads),
        )


_process = _Settings()
_process_lock = process.Lock()
_UNSET: Final = _Settings()
_context: ContextVar[_Settings] = ContextVar("poolgrad_numba_settings", default=_UNSET)


def _checked_mode(value: Any) -> bool | None:
    return None if value is None else flag("deterministic", value)


def _checked_threads(value: Any) -> int | None:
    if value is None:
        return None
    threads = integer("num_threads", value)
    if threads < 1:
        raise PoolGradValueError(f"num_threads: got {show(threads)}, wanted at least 1")
    return threads


# The two variables are read once a process; a malformed one is an error at every call that depends on it.
@cache
def _environment_mode() -> bool:
    text = os.environ.get(DETERMINISTIC_VARIABLE)
    if text not in (None, "0", "1"):
        raise PoolGradValueError(f"environment variable {DETERMINISTIC_VARIABLE}: got {show(text)}, wanted 0 or 1")
    return text == "1"


@cache
def _environment_threads() -> int | None:
    text = os.environ.get(NUM_THREADS_VARIABLE)
    if text is not None and not re.fullmatch("0{0,9}[1-9][0-9]{0,8}", text):
        raise PoolGradValueError(
            f"environment variable {NUM_THREADS_VARIABLE}: got {show(text)}, wanted an integer of at least 1"
        )
    return None if text is None else int(text)


@cache
def _fair_threads() -> int:
    """How many threads this process should use if nobody says: read once, when it first matters."""
    if "NUMBA_NUM_THREADS" in os.environ:
        return numba_threads.most()  # somebody did say
    openmp = re.match(r"\s*([1-9][0-9]{0,8})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))  # "4,2": by nesting level
    return min(process.cores(), int(openmp[1]) if openmp else numba_threads.most())


def resolve(deterministic: Any = None, num_threads: Any = None) -> Config:
    """Give the settings for one call, its own arguments first. A thread count above the machine's is clamped."""
    call = _Settings(_checked_mode(deterministic), _checked_threads(num_threads))
    settled = call.over(_context.get()).over(_process)
    mode = _environment_mode() if settled.deterministic is None else settled.deterministic
    threads = _environment_threads() if settled.num_threads is None else settled.num_threads
    if threads is None:
        threads = min(_fair_threads(), numba_threads.limit())
    return Config(mode, min(threads, numba_threads.most()))


def get_config() -> Config:
    """Return the settings that hold here and now.

    The environment is read once a process, when it first matters.

    Returns
    -------
    Config
        Frozen; what a call made at this place, without arguments of its own, would use.

    Examples
    --------
    >>> import poolgrad_numba as pg
    >>> with pg.config_context(deterministic=True):
    ...     pg.get_config().deterministic
    True
    """
    return resolve()


def set_config(
    *, deterministic: bool | None | EllipsisType = ..., num_threads: int | None | EllipsisType = ...
) -> None:
    """Set the process-wide defaults, for every thread and task that has no setting of its own.

    Parameters
    ----------
    deterministic : bool or None, optional
        The mode; ``None`` unsets it, so that the environment and then the default (fast) hold again.
    num_threads : int or None, optional
        The thread limit; ``None`` unsets it. More than the machine has is clamped when a call is made.

    Raises
    ------
    PoolGradTypeError, PoolGradValueError
        For any other value; nothing is changed then.

    Examples
    --------
    >>> import poolgrad_numba as pg
    >>> pg.set_config(deterministic=True)
    >>> pg.get_config().deterministic
    True
    >>> pg.set_config(deterministic=None)
    """
    global _process  # noqa: PLW0603  (the process default is this module's one piece of state)
    with _process_lock.held:
        _process = _process.changed(deterministic, num_threads)


@contextmanager
def config_context(
    *, deterministic: bool | None | EllipsisType = ..., num_threads: int | None | EllipsisType = ...
) -> Iterator[Config]:
    """Set the mode or the thread limit inside a ``with`` block, for this thread or asyncio task only.

    Parameters
    ----------
    deterministic, num_threads
        As in `set_config`. What is not given stays as the surrounding block has it; ``None`` leaves the
        choice to the process-wide setting. Blocks nest, and the former settings return on an error too.

    Yields
    ------
    Config
        The settings inside the block.

    Examples
    --------
    >>> import poolgrad_numba as pg
    >>> with pg.config_context(num_threads=1) as config:
    ...     config.num_threads
    1
    """
    token = _context.set(_context.get().changed(deterministic, num_threads))
    try:
        yield resolve()
    finally:
        _context.reset(token)
