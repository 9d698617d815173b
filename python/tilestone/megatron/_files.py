"""Small files: JSON, and errors of files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

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
