"""The command ``poolgrad-numba``: parse, hand over to the subcommand's module, turn errors into one line."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from poolgrad_numba.cli.common import CommandError
from poolgrad_numba.cli.parser import PROGRAM, make_parser
from poolgrad_numba.errors import PoolGradError

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130  # as shells report a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; those of the process if not given.

    Returns
    -------
    int
        0: done. 1: a check of the demo failed, or a comparison found something slower. 2: the arguments, a file or
        the installation is at fault, as one line on stderr says.
    """
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except (CommandError, PoolGradError, MemoryError) as error:
        message = " ".join(str(error).split()) or "not enough memory"
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has gone. Without this, Python would complain when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _dispatch(argv: Sequence[str] | None) -> int:
    try:
        arguments = make_parser().parse_args(argv)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    # Imported only now: each subcommand pays for its own imports alone.
    return int(import_module(f"poolgrad_numba.cli.{arguments.command}").execute(arguments))
