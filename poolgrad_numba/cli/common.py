"""What the subcommands share: their error, the check for optional packages, safe writing."""

from __future__ import annotations

import os
import stat
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable


class CommandError(Exception):
    """The command cannot go on; the message is the one line that the user gets to see."""


def need_extra(command: str, *packages: str) -> None:
    """Raise a `CommandError` that says what to install, where an optional package is missing."""
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise CommandError(
                f"{command} needs the package {package} ({error}): pip install {' '.join(packages)}, the extra 'demo'"
            ) from error


def reason(error: OSError) -> str:
    """Say why a file operation failed, without the path."""
    return error.strerror or str(error)


def write_safely(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a whole file or leave the former one as it was, whatever happens.

    ``write`` fills a temporary file in the same directory, which takes the place of ``path`` in one step.
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays, and what it points to is replaced
    if target.exists() and not target.is_file():  # replacing /dev/null, say, would be no service
        raise CommandError(f"cannot write {path}: it is not a regular file")
    try:
        mode = _mode(target)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".poolgrad-", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the new name with no content
            temporary.chmod(mode)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CommandError(f"cannot write {path}: {reason(error)}") from error


def _mode(path: Path) -> int:
    """Permissions for the new file: those of the file that it replaces, else what the umask leaves."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    return 0o666 & ~umask
