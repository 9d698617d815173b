"""torch.distributed.checkpoint.filesystem, with Tilestone's writer and reader."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem as _torchs
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemBase,
    SerializationFormat,
)

from tilestone.dcp._reader import FileSystemReader
from tilestone.dcp._writer import FileSystemWriter

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
]


def __getattr__(name: str) -> Any:
    """Everything else is torch's."""
    return getattr(_torchs, name)
