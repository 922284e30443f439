"""Reading single values from whatever a caller passes, and showing them in messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any, Final

import numpy as np

from poolgrad_numba.errors import PARAM_NULLPTR, PoolGradTypeError

_LONGEST: Final = 200


def show(value: Any) -> str:
    """Give a value as a message shows it: short, and whatever its ``repr`` does."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (an integer of more digits than Python prints, or the caller's own class)
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def integer(name: str, value: Any) -> int:
    """Read an integer of any kind; a float such as 2.0 and a bool are none."""
    if isinstance(value, bool | np.bool_):
        raise PoolGradTypeError(f"{name}: got {show(value)}, wanted an integer")
    try:
        return operator.index(value)
    except Exception as error:
        raise PoolGradTypeError(f"{name}: got {show(value)}, wanted an integer") from error


def is_sequence(value: Any) -> bool:
    """Whether a value is to be read by `integers`; arrays of no axes are single values."""
    kind = type(value)  # not the value itself, whose attributes are the caller's code
    return hasattr(kind, "__iter__") and not (hasattr(kind, "ndim") and value.ndim == 0)


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Read a sequence of integers: any iterable with an order of its own."""
    wanted = "wanted a sequence of integers"
    if value is None:
        raise PoolGradTypeError(f"{name}: got None, {wanted}", status=PARAM_NULLPTR)
    if isinstance(value, str | bytes | bytearray | memoryview | Set | Mapping):
        raise PoolGradTypeError(f"{name}: got {show(value)}, {wanted}")
    try:
        values = list(value)
    except Exception as error:
        raise PoolGradTypeError(f"{name}: got {show(value)}, {wanted}") from error
    return tuple(integer(name, v) for v in values)


def flag(name: str, value: Any) -> bool:
    """Read a bool; nothing else counts as one."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise PoolGradTypeError(f"{name}: got {show(value)}, wanted True or False")
