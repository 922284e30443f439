"""The runtime: one device, contexts bound to threads, streams, and the toggle for deterministic mode."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from poolgrad_numba import process
from poolgrad_numba.aclnn.status import aclError, aclSysParamOpt, fail
from poolgrad_numba.values import show

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST_VALUE = 3  # 2 and 3 are stronger forms elsewhere, and count as on


class aclrtContext:
    """Options that hold for the threads which made it their current context."""

    def __init__(self) -> None:
        self.alive = True
        self.options: dict[int, int] = {}


class aclrtStream:
    """An in-order queue with a thread of its own. What is queued runs even if the stream is destroyed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aclrtStream")
        self._process = os.getpid()
        self.closed = False
        self._failure: tuple[int, str] | None = None
        self._lock = threading.RLock()

    @property
    def usable(self) -> bool:
        """Whether it is this process's; a forked child has the object but not its thread."""
        return self._process == os.getpid()

    def enqueue(self, task: Callable[[], tuple[int, str] | None]) -> bool:
        """Queue a task that returns its failure; ``False`` where the stream takes no more."""

        def run() -> None:
            failure = task()
            if failure is not None:
                with self._lock:
                    self._failure = self._failure or failure

        try:
            if self.usable:
                self._pool.submit(run)
                return True
        except RuntimeError:  # destroyed, or the interpreter is at its end
            return False
        return False

    def drain(self) -> tuple[int, str] | None:
        """Wait for all that is queued; the first failure since the last time."""
        try:
            self._pool.submit(lambda: None).result()
        except RuntimeError:
            self._pool.shutdown(wait=True)
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def close(self) -> tuple[int, str] | None:
        """Take no more tasks, and wait for those that are queued."""
        self.closed = True
        self._pool.shutdown(wait=True)
        return self.drain()


class _State:
    """What the process has: whether it is initialised, the default context, its options, its streams."""

    def __init__(self) -> None:
        self.lock = process.Lock()
        self.initialised = False
        self.default: aclrtContext | None = None
        self.options: dict[int, int] = {}
        self.streams: weakref.WeakSet[aclrtStream] = weakref.WeakSet()


_state = _State()
_current = threading.local()


def _current_context() -> aclrtContext | None:
    context: aclrtContext | None = getattr(_current, "context", None)
    return context if context is not None and context.alive else None


# -- process and device ------------------------------------------------------------------------------------------


def aclInit(configPath: str | None = None) -> int:
    """Initialise; a second time in a row is an error. The configuration file is not read."""
    del configPath
    with _state.lock.held:
        if _state.initialised:
            return fail(aclError.ACL_ERROR_REPEAT_INITIALIZE, "aclInit: called twice without aclFinalize between")
        _state.initialised = True
    return aclError.ACL_SUCCESS


def aclFinalize() -> int:
    """End all streams, and forget the default context and the options of the process.

    What is queued runs; the status is that of the first failure which no synchronize has reported.
    """
    with _state.lock.held:
        if not _state.initialised:
            return fail(aclError.ACL_ERROR_UNINITIALIZE, "aclFinalize: called without aclInit before")
        _state.initialised = False
        streams, default = list(_state.streams), _state.default
        _state.default, _state.options = None, {}
    failures = [stream.close() for stream in streams if stream.usable]
    if default is not None:
        default.alive = False
    failure = next(filter(None, failures), None)
    return fail(*failure) if failure else aclError.ACL_SUCCESS


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_device(deviceId: Any) -> int:
    if not _is_integer(deviceId) or deviceId != 0:
        return fail(aclError.ACL_ERROR_RT_INVALID_DEVICEID, f"deviceId: got {show(deviceId)}, wanted 0, the CPU")
    return aclError.ACL_SUCCESS


def aclrtSetDevice(deviceId: int) -> int:
    """Make the device's default context current in this thread."""
    status = _check_device(deviceId)
    if not status:
        with _state.lock.held:
            if _state.default is None or not _state.default.alive:
                _state.default = aclrtContext()
            _current.context = _state.default
    return status


def aclrtResetDevice(deviceId: int) -> int:
    """End the device's default context."""
    status = _check_device(deviceId)
    if not status:
        with _state.lock.held:
            default, _state.default = _state.default, None
        if default is not None:
            default.alive = False
    return status


# -- contexts ----------------------------------------------------------------------------------------------------


def aclrtCreateContext(deviceId: int = 0) -> tuple[aclrtContext | None, int]:
    """Make a context, and make it current in this thread."""
    status = _check_device(deviceId)
    if status:
        return None, status
    _current.context = aclrtContext()
    return _current.context, aclError.ACL_SUCCESS


def _check_context(context: Any) -> int:
    if not isinstance(context, aclrtContext) or not context.alive:
        return fail(aclError.ACL_ERROR_RT_CONTEXT_NULL, f"context: got {show(context)}, wanted one that is alive")
    return aclError.ACL_SUCCESS


def aclrtDestroyContext(context: aclrtContext) -> int:
    """End a context, for every thread."""
    status = _check_context(context)
    if not status:
        context.alive = False
    return status


def aclrtSetCurrentContext(context: aclrtContext) -> int:
    """Make a context current in this thread."""
    status = _check_context(context)
    if not status:
        _current.context = context
    return status


def aclrtGetCurrentContext() -> tuple[aclrtContext | None, int]:
    """Return this thread's current context."""
    context = _current_context()
    if context is None:
        return None, fail(aclError.ACL_ERROR_RT_CONTEXT_NULL, "this thread has no current context")
    return context, aclError.ACL_SUCCESS


# -- streams -----------------------------------------------------------------------------------------------------


def aclrtCreateStream() -> tuple[aclrtStream | None, int]:
    """Make a stream: phase 2 calls on it return at once and run in order."""
    stream = aclrtStream()
    with _state.lock.held:
        _state.streams.add(stream)
    return stream, aclError.ACL_SUCCESS


def _finished(stream: Any, finish: Callable[[aclrtStream], tuple[int, str] | None]) -> int:
    if not isinstance(stream, aclrtStream):
        return fail(aclError.ACL_ERROR_RT_PARAM_INVALID, f"stream: got {show(stream)}, wanted a stream")
    if stream.closed or not stream.usable:
        text = "that was destroyed" if stream.closed else "of the process that this one was forked from"
        return fail(aclError.ACL_ERROR_RT_STREAM_CONTEXT, f"stream: got one {text}")
    failure = finish(stream)
    return fail(*failure) if failure else aclError.ACL_SUCCESS


def aclrtDestroyStream(stream: aclrtStream) -> int:
    """Run what is queued, and end the stream; returns the first failure that no synchronize has reported."""
    return _finished(stream, aclrtStream.close)


def aclrtSynchronizeStream(stream: aclrtStream | None) -> int:
    """Wait for all that is queued; returns the first failure since the last time. ``None`` has nothing queued."""
    return aclError.ACL_SUCCESS if stream is None else _finished(stream, aclrtStream.drain)


# -- the toggle --------------------------------------------------------------------------------------------------


def _check_option(opt: Any, value: Any = 0) -> int:
    if not _is_integer(opt) or opt not in list(aclSysParamOpt):
        return fail(aclError.ACL_ERROR_INVALID_PARAM, f"opt: got {show(opt)}, wanted ACL_OPT_DETERMINISTIC, which is 0")
    if not _is_integer(value) or not 0 <= value <= _LARGEST_VALUE:
        return fail(aclError.ACL_ERROR_RT_PARAM_INVALID, f"value: got {show(value)}, wanted 0 to {_LARGEST_VALUE}")
    return aclError.ACL_SUCCESS


def aclrtCtxSetSysParamOpt(opt: int, value: int) -> int:
    """Set an option of this thread's current context: ``ACL_OPT_DETERMINISTIC`` to 0 (off) or 1 (on)."""
    status = _check_option(opt, value)
    if status:
        return status
    context, status = aclrtGetCurrentContext()
    if context is not None:
        context.options[int(opt)] = int(value)
    return status


def aclrtCtxGetSysParamOpt(opt: int) -> tuple[int, int]:
    """Return an option of this thread's current context; status 107021 where it was never set there."""
    status = _check_option(opt)
    if status:
        return 0, status
    context, status = aclrtGetCurrentContext()
    if context is None:
        return 0, status
    if int(opt) not in context.options:
        return 0, fail(aclError.ACL_ERROR_RT_SYS_PARAM_NOT_SET, "opt: never set in this context")
    return context.options[int(opt)], aclError.ACL_SUCCESS


def aclrtSetSysParamOpt(opt: int, value: int) -> int:
    """Set an option of the process, for contexts in which it is not set."""
    status = _check_option(opt, value)
    if not status:
        _state.options[int(opt)] = int(value)
    return status


def aclrtGetSysParamOpt(opt: int) -> tuple[int, int]:
    """Return an option of the process; 0 where it was never set."""
    status = _check_option(opt)
    return (0, status) if status else (_state.options.get(int(opt), 0), aclError.ACL_SUCCESS)


def deterministic() -> bool | None:
    """Mode that the toggles ask for, the context's before the process's; ``None`` leaves it to the configuration."""
    context = _current_context()
    option = aclSysParamOpt.ACL_OPT_DETERMINISTIC
    value = context.options.get(option) if context is not None else None
    if value is None:
        value = _state.options.get(option)
    return None if value is None else value > 0
