"""Small files: JSON, and files that are replaced atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from tilestone._errors import CheckpointError, CorruptError, StorageError


def json_value(data: bytes, path: str) -> Any:
    """The value in a JSON file.

    Raises:
        CorruptError: it is not JSON.
    """
    try:
        return json.loads(data.decode())
    except ValueError as error:
        raise CorruptError(f"{path} is not JSON: {error}", file=path) from error
    except RecursionError:
        raise CorruptError(f"{path} is nested too deeply", file=path) from None


def replace_file(path: str, text: str) -> None:
    """Writes a text file atomically, see replacing()."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Writes a file atomically: a reader finds the old content, the new content, or no file.

    The file's bytes are on disk before its name is; at the end of the block the name is on disk
    too. If the block raises, the file is not replaced.

    Args:
        path: the file; its folder must exist.

    Yields:
        a file to write the new content to.

    Raises:
        OSError: the file can't be written; no part of it is left.
    """
    folder = os.path.dirname(path) or os.curdir
    descriptor, staged = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(staged, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise
    sync_folder(folder)


def sync_folder(path: str) -> None:
    """Makes the names in a folder durable.

    Raises:
        OSError: the file system reports an error.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def storage_errors(path: str, message: str = "") -> Iterator[None]:
    """Makes an OSError of the block a StorageError that names the file; "": in the system's words."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        message = message or str(error)
        raise StorageError(message=message, file=path, errno=error.errno) from error


def _umask() -> int:
    """The process's umask, read from /proc: the call umask() would change it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
