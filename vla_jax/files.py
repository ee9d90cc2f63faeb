"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A new empty file beside ``path`` that takes its place if nothing goes wrong.

    A process that is killed in the middle leaves an older file as it was. The mode of an older file
    is kept, and a new one obeys the umask; a symbolic link goes on to lead to the file.

    Raises:
      OSError: if the file cannot be written.
    """
    path = pathlib.Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial{path.suffix}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
