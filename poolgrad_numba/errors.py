"""The exceptions of this package; each carries the status code that the accelerator's interface gives for it."""

from __future__ import annotations

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
RUNTIME_ERROR = 361001


class PoolGradError(Exception):
    """Base of every exception that this package raises on purpose.

    Attributes
    ----------
    status : int
        The ``aclnn`` status code for the same fault: 161001 where a required argument is ``None``,
        161002 for any other bad argument, 361001 where the run itself failed.
    """

    status: int = RUNTIME_ERROR

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {"status": self.status}


class PoolGradValueError(PoolGradError, ValueError):
    """A parameter, shape, workspace or setting has a value that is not allowed."""

    status = PARAM_INVALID


class PoolGradTypeError(PoolGradError, TypeError):
    """An argument has a type or dtype that is not allowed."""

    status = PARAM_INVALID


class PoolGradIndexError(PoolGradError, IndexError):
    """An index points outside its plane; the message names the first one in row-major order."""

    status = PARAM_INVALID
