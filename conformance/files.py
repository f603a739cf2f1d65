"""Read and write files safely: other users may control the path.

An existing file is never written into. The content goes to a new file with a random
name in the same folder, which then replaces the old one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .status import UsageError, WriteError

__all__ = ["MOST_BYTES", "create", "read_whole", "refuse_odd", "write_whole", "writing"]

MOST_BYTES = 2**30
"""Size of the largest file that is read; a report of 10,000 cases has about 2**28
bytes."""
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_whole(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        UsageError: the file cannot be read, is a symbolic link, folder, pipe, socket
            or device, or is larger than :data:`MOST_BYTES`.
    """
    # O_NONBLOCK: opening a pipe would wait for its writer before it is refused
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        _refuse_kind(path, os.lstat(path).st_mode)
        with open(os.open(path, flags), "rb") as file:
            # Check again on the open file: the path may have been replaced.
            status = os.fstat(file.fileno())
            _refuse_kind(path, status.st_mode)
            if status.st_size > MOST_BYTES:
                most = f"at most {MOST_BYTES >> 20} MiB"
                raise UsageError(f"{path}: is too large: {most}")
            return file.read(MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def create(path: Path) -> BinaryIO:
    """Open a new file for writing.

    Raises:
        FileExistsError: if the name exists, even as a dangling link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; the old file stays until the new one is complete.

    Raises:
        UsageError: if the path is not a regular file of this user, or no file can be
            created there.
        WriteError: if the disk is full.
    """
    raw = content.encode() if isinstance(content, str) else content
    refuse_odd(path)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}.draft")
    try:
        file = create(draft)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    try:
        with writing(path), file:
            file.write(raw)
            file.flush()
            os.replace(draft, path)
    except BaseException:  # Ctrl-C, too, must not leave a draft behind
        with suppress(FileNotFoundError):
            draft.unlink()
        raise


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn the error of a full or broken disk into :class:`WriteError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from error


def refuse_odd(path: Path) -> None:
    """Raise unless the path is free or a regular file of this user.

    Raises:
        UsageError: for a link, folder, pipe, device or the file of another user.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    _refuse_kind(path, status.st_mode)
    # Root may write: in a container root often works in another user's checkout.
    if os.geteuid() not in (0, status.st_uid):
        raise UsageError(
            f"{path}: belongs to user {status.st_uid}: move it away, or choose another "
            "name"
        )


def _refuse_kind(path: Path, mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise UsageError(f"{path}: is {kind}, expected a file")
