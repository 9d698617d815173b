"""Puts what was loaded into the caller's containers, as torch does."""

from __future__ import annotations

import functools
import io
import operator
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from tilestone._calls.opening import Checkpoint
from tilestone._calls.opening import open as open_checkpoint
from tilestone._objects import opaque
from tilestone.dcp._calls import INDEX, StoredMetadata, torch_load


def _is_descended(items: list[Any]) -> bool:
    """Whether torch splits a list into its elements."""
    return any(
        isinstance(item, (Mapping, torch.Tensor)) or (type(item) is list and _is_descended(item))
        for item in items
    )


class Filler:
    """Fills the caller's state from a loaded one.

    Args:
        path: the checkpoint, which is opened if it holds objects of classes that Tilestone itself
            does not create.
        own_rank: the rank whose own part of a rank-local checkpoint comes first; None: there are no
            such parts.
    """

    def __init__(self, path: str | os.PathLike[str], own_rank: int | None = None) -> None:
        self._path = path
        self._own: StoredMetadata | None = None  # None also if the checkpoint is of fewer ranks
        name = f"__{own_rank}{INDEX}"
        if own_rank is not None and os.path.exists(os.path.join(path, name)):
            self._own = StoredMetadata(path, name=name)
        self._opened: Checkpoint | None = None

    def fill(self, state: Any, loaded: Any, above: tuple[Any, ...] = ()) -> None:
        """Sets each leaf of a container, recursively."""
        keys = list(state) if isinstance(state, Mapping) else range(len(state))
        for key in keys:
            item, new, path = state[key], loaded[key], (*above, key)
            if isinstance(item, Mapping) and isinstance(new, Mapping) and item.keys() == new.keys():
                self.fill(item, new, path)
            elif type(item) is list and type(new) is list and _is_descended(item):
                self.fill(item, new, path)
            elif new is not item:
                state[key] = self._made(new, path)

    def _made(self, value: Any, path: tuple[Any, ...]) -> Any:
        if opaque.find_in(value) is None:
            return value
        # torch up to 2.3 saved a dict without tensors as one object.
        for size in range(len(path), 0, -1):
            data = self._bytes_of(".".join(map(str, path[:size])))
            if data is not None:
                return functools.reduce(operator.getitem, path[size:], torch_load(io.BytesIO(data)))
        return value

    def _bytes_of(self, key: str) -> bytes | None:
        """A stored object's bytes; None: there is none of this key."""
        if self._own is not None:
            data = self._own_bytes_of(key, self._own)
            if data is not None:
                return data
        if self._opened is None:
            self._opened = open_checkpoint(self._path)
        return self._opened.object_bytes(key) if key in self._opened else None

    def _own_bytes_of(self, key: str, own: StoredMetadata) -> bytes | None:
        info = own.storage_data.get(MetadataIndex(key))
        if info is None:
            return None
        with open(os.path.join(self._path, info.relative_path), "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)

    def close(self) -> None:
        """Closes the checkpoint."""
        if self._opened is not None:
            self._opened.close()
