"""The reader for loads that torch plans: Tilestone's engine reads, and checks, the items' bytes."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as _torchs
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tilestone import _core
from tilestone._calls import binding
from tilestone._calls.opening import Checkpoint
from tilestone._calls.opening import open as open_checkpoint
from tilestone._errors import UnsupportedError
from tilestone._objects.dtypes import native_type
from tilestone._torch import tensors
from tilestone.dcp._calls import (
    check_path,
    is_own_file_system,
    is_valid,
    move_to,
    place,
)

_log = logging.getLogger("tilestone")


def is_plain(reader: FileSystemReader) -> bool:
    """Whether the reader has no options that only loads planned by torch have."""
    return not reader._has_registry and is_own_file_system(reader.fs)


class FileSystemReader(_torchs.FileSystemReader):
    """Reads a checkpoint of torch.distributed.checkpoint with Tilestone's engine.

    It takes the place of torch's class of this name, in `tilestone.dcp.load` and in torch's own
    `load`, for checkpoints of any writer. What is read is checked where the checkpoint has
    checksums, and only the parts that the plan wants are read.

    Args:
        path: the checkpoint's directory, or the URL of a store (docs/object_stores.md).
        _extension_registry: as in torch. Items that extensions have transformed are read by torch.

    Raises:
        UnsupportedError: the path is a URL that no store takes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        check_path(path)
        super().__init__(path, _extension_registry)
        move_to(self, path)
        self._has_registry = _extension_registry is not None
        self._places: dict[Any, Any] = {}
        self._save_id = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As in torch: a new load begins, perhaps at another path."""
        if checkpoint_id:
            move_to(self, checkpoint_id)
        self._places = {}
        super().reset(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As in torch."""
        return is_valid(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's Metadata, as torch reads it."""
        metadata = super().read_metadata(*args, **kwargs)
        found = metadata.storage_meta
        assert found is not None  # torch sets it where the file has none
        if found.checkpoint_id is None:
            found.checkpoint_id = str(self.path)
        if kwargs.get("rank") is None:
            self._places = dict(metadata.storage_data)
            self._save_id = getattr(found, "save_id", None) or ""
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items.

        Raises:
            CorruptError: a checksum is wrong.
            RuntimeError: the checkpoint was replaced since read_metadata.
        """
        items = [item for item in plan.items if self._is_readable(item)]
        known = {id(item) for item in items}
        others = [item for item in plan.items if id(item) not in known]
        if items:
            opened = self._open()
            if opened is None:
                others = plan.items
            else:
                with opened:
                    self._read(opened, items, planner)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _is_readable(self, item: ReadItem) -> bool:
        """Whether the engine reads the item: it is one that the checkpoint itself describes."""
        info = self.storage_data[item.storage_index]
        return (
            info is self._places.get(item.storage_index)
            and type(info) is _torchs._StorageInfo
            and not info.transform_descriptors
            and is_own_file_system(self.fs)
            and type(self)._slice_file is _torchs.FileSystemReader._slice_file
        )

    def _open(self) -> Checkpoint | None:
        """The checkpoint; None if only torch understands it."""
        try:
            opened = open_checkpoint(place(self.path), framework="torch")
        except UnsupportedError as error:
            _log.warning("torch reads %s, without checksums: %s", self.path, error)
            return None
        if self._save_id and opened.save_id != self._save_id:
            opened.close()
            raise RuntimeError(
                f"the checkpoint at {self.path} was replaced during the load: it has the save id "
                f"{opened.save_id}, and had {self._save_id}"
            )
        return opened

    def _read(self, opened: Checkpoint, items: list[ReadItem], planner: LoadPlanner) -> None:
        wanted: list[ReadItem] = []
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(opened.object_bytes(item.storage_index.fqn)))
            else:
                wanted.append(item)
        for of_one_read in together(wanted, planner):
            Parts(opened).fill(of_one_read, planner)


def together(items: list[ReadItem], planner: LoadPlanner) -> Iterator[list[ReadItem]]:
    """The items by reads: all in one, unless the planner does something with each tensor."""
    kind = type(planner)
    if all(
        getattr(kind, name, None) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
    ):
        yield items
    else:
        yield from ([item] for item in items)


class Parts:
    """The boxes that one read fills."""

    def __init__(self, opened: Checkpoint) -> None:
        self._handle = opened._handle
        self._keys: list[str] = []
        self._boxes: list[_core.Box] = []
        self._views: list[_core.TensorView] = []
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, what was read into

    def fill(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Reads tensors into the planner's."""
        targets = [planner.resolve_tensor(item).detach() for item in items]
        for item, target in zip(items, targets, strict=True):
            self._add(item, target)
        self._read()
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _add(self, item: ReadItem, target: torch.Tensor) -> None:
        if tuple(target.shape) != tuple(item.lengths):
            raise AssertionError(
                f"{item.storage_index.fqn}: the planner's tensor has shape {tuple(target.shape)}, "
                f"but {tuple(item.lengths)} is to be read"
            )
        if 0 in target.shape:
            return
        key = item.storage_index.fqn
        stored = native_type(self._handle.dtype(key))
        memory = target
        if target.dtype != stored:
            memory = torch.empty(target.shape, dtype=stored)
        offset = zip(item.storage_index.offset or (), item.storage_offsets, strict=True)
        self._keys.append(key)
        self._boxes.append(_core.Box(tuple(a + b for a, b in offset), tuple(item.lengths)))
        self._views.append(tensors.view(memory, True))
        self._filled.append((target, memory))

    def _read(self) -> None:
        if not self._keys:
            return
        self._handle.read_parts(self._keys, self._boxes, self._views)
        for view, (target, memory) in zip(self._views, self._filled, strict=True):
            binding.written(view, memory)
            if memory is not target:
                target.copy_(memory)
