"""torch's writer and reader of Hugging Face folders, over Tilestone's engine.

A writer makes one of two kinds of folder. With `save_distributed` alone, each rank's file has its
*pieces* of the tensors, and says where they belong. Otherwise the tensors are *whole*: if one rank
holds everything, it writes them; if not, all ranks save a checkpoint beside the folder, which is then
converted. _calls/model_folder.py says how the new folder takes the old one's place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import hf_storage as _torchs
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._hf_utils import _gen_file_name, _HFStorageInfo
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tilestone import _core
from tilestone._calls.collective import communicator
from tilestone._calls.model_folder import NewFolder, sync
from tilestone._calls.opening import open as open_checkpoint
from tilestone._calls.save_load import run_save
from tilestone._errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilestone._objects.dtypes import native_type
from tilestone._options import valid
from tilestone.dcp import _calls
from tilestone.dcp._reader import Parts, together
from tilestone.dcp._writer import FileSystemWriter


@dataclasses.dataclass
class _Order:
    """How a rank writes its part, in SavePlan.storage_data.

    Attributes:
        path: the writer's.
        attempt: of the NewFolder.
        rank: in the group that saves.
        numbers: the coordinator's fqn_to_index_mapping.
        first: the rank's order for the checkpoint of the first pass; None: there is none.
    """

    path: str
    attempt: str
    rank: int
    numbers: dict[str, int] | None
    first: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _arrived[self.path, self.rank] = self


# The newest order that has reached a rank of this process, as in _writer.py.
_arrived: dict[tuple[str, int], _Order] = {}


class _Tensors(_calls.State):
    """Whole tensors, or pieces as if they were whole, by key, which go into safetensors files."""

    def __init__(
        self, tensors: dict[str, Any], files: dict[str, str], other_file: str,
        pieces: dict[str, tuple[list[int], list[int]]],
    ) -> None:  # fmt: skip
        super().__init__(tensors)
        self._plan = (files, other_file, pieces)

    def set_in(self, options: Any) -> Any:
        options.write_safetensors(*self._plan)
        return super().set_in(options)


def _refuse_object(key: str) -> None:
    raise InvalidArgumentError(
        "safetensors holds only tensors, and this is an object", key=key,
        hint="save the model's state dict alone",
    )  # fmt: skip


class HuggingFaceStorageWriter(_torchs.HuggingFaceStorageWriter):
    """Writes a Hugging Face folder with Tilestone's engine.

    It takes the place of torch's class of this name, in `tilestone.dcp.save` and in torch's own
    `save` and `async_save`. The folder is replaced in one step; its other files (config.json) stay.
    docs/huggingface.md describes what is written.

    Args:
        path: the folder, in a file system that all ranks see.
        fqn_to_index_mapping: the number of each key's file, from 1 on; by default there is one file.
        thread_count, thread_count_consolidation: ignored: the engine has threads of its own.
        save_distributed: each rank's files have its pieces of the tensors, and there is no index.
            Without it, or with enable_consolidation, the tensors are whole.
        enable_consolidation: the pieces are joined. They are not kept, as torch does in path/sharded.

    Raises:
        InvalidArgumentError: a file's number is no whole number from 1 on.
        UnsupportedError: the path is a URL.
    """

    def __init__(
        self,
        path: str,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        valid.refuse_any_url(path, "a Hugging Face folder")
        for key, number in (fqn_to_index_mapping or {}).items():
            if valid.whole("a number in fqn_to_index_mapping", number) < 1:
                raise InvalidArgumentError("fqn_to_index_mapping numbers files from 1 on", key=key)
        super().__init__(
            path, fqn_to_index_mapping, thread_count, save_distributed, False,
            thread_count_consolidation,
        )  # fmt: skip
        self.enable_consolidation = enable_consolidation
        if enable_consolidation:
            self.consolidated_output_path = str(path)
        self._new: NewFolder | None = None  # of the save that has begun, on the coordinator
        self._orders: list[_Order] = []
        self._first: FileSystemWriter | None = None  # writes the first pass of it
        self._set_up: Any = None  # torch's arguments for it

    @property
    def is_whole(self) -> bool:
        """Whether the tensors in the folder are whole."""
        return not self.save_distributed or self.enable_consolidation

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As in torch: a new save begins, perhaps at another path."""
        if checkpoint_id:
            valid.refuse_any_url(checkpoint_id, "a Hugging Face folder")
        super().reset(checkpoint_id)
        self._new = self._first = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As in torch."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("a Hugging Face folder can't be saved with use_collectives=False")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._set_up = is_coordinator, args, kwargs

    def _make_first(self, folder: NewFolder) -> FileSystemWriter:
        is_coordinator, args, kwargs = self._set_up
        first = FileSystemWriter(folder.pieces)
        first.set_up_storage_writer(is_coordinator, *args, **kwargs)
        return first

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Checks this rank's keys, and where it works.

        Raises:
            InvalidArgumentError: an item is no tensor.
            UnsupportedError: the working directory is in the folder.
        """
        NewFolder(_calls.place(self.path)).refuse_working_directory()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                _refuse_object(item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the save, and gives each rank its order.

        Raises:
            InvalidArgumentError: a key has no file.
        """
        for plan in plans:
            check_keys((item.index.fqn for item in plan.items), self.fqn_to_index_mapping)
        self._new = new = NewFolder(_calls.place(self.path))
        new.begin()
        firsts: list[Any] = [None] * len(plans)
        self._first = None
        if self.is_whole and not _is_of_one_rank(plans):
            self._first = self._make_first(new)
            firsts = [plan.storage_data for plan in self._first.prepare_global_plan(plans)]
        self._orders = [
            _Order(str(self.path), new.attempt, rank, self.fqn_to_index_mapping, first)
            for rank, first in enumerate(firsts)
        ]
        return [
            dataclasses.replace(plan, storage_data=order)
            for plan, order in zip(plans, self._orders, strict=True)
        ]

    def _current(self, order: _Order) -> _Order:
        """The order of this save, also if the planner has used a cached plan."""
        newest = _arrived.pop((str(self.path), order.rank), order)
        return newest if self._new is None else self._orders[order.rank]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items. They are durable when it returns.

        Raises:
            NotFoundError: this rank does not see what the coordinator has made.
            UnsupportedError: the plan is another writer's.
        """
        if not isinstance(plan.storage_data, _Order):  # not of this class's prepare_global_plan
            if self._new is not None or any(path == str(self.path) for path, _ in _arrived):
                raise UnsupportedError(
                    "the planner has cached the plan of another writer",
                    hint="use a planner without enable_plan_caching",
                )
            return super().write_data(plan, planner)
        order = self._current(plan.storage_data)
        folder = NewFolder(_calls.place(self.path), order.attempt)
        if not os.path.isdir(folder.place):
            raise NotFoundError(
                f"rank {order.rank} does not see the directory that the coordinator has made beside "
                "the folder, or another save has removed it", file=folder.place,
                hint="save to a file system that all ranks see",
            )  # fmt: skip
        if order.first is not None:
            first = self._first or self._make_first(folder)
            return first.write_data(dataclasses.replace(plan, storage_data=order.first), planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(order, folder, plan.items, planner) if plan.items else [])
        return future

    def _write(
        self, order: _Order, folder: NewFolder, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        tensors: dict[str, Any] = {}
        pieces: dict[str, tuple[list[int], list[int]]] = {}
        results = []
        rank = order.rank
        files, other_file = files_of(order.numbers, None if self.is_whole else rank + 1)
        for item in items:
            key, tensor = item.index.fqn, planner.resolve_data(item)
            assert item.tensor_data is not None and isinstance(tensor, torch.Tensor)
            if key in tensors:
                raise UnsupportedError(
                    f"rank {rank} has two pieces of this tensor, and a safetensors file has one",
                    key=key, hint="save with enable_consolidation=True",
                )  # fmt: skip
            tensors[key] = tensor.detach()
            pieces[key] = list(item.tensor_data.chunk.offsets), list(item.tensor_data.size)
            info = _StorageInfo(files.get(key, other_file), 0, tensor.nbytes)
            results.append(WriteResult(item.index, tensor.nbytes, info))
        if self.is_whole:
            run_save(_Tensors(tensors, files, other_file, {}), folder.model, group=_calls.SOLO)
            return results
        own = os.path.join(folder.place, f"rank-{rank}")
        run_save(_Tensors(tensors, files, other_file, pieces), own, group=_calls.SOLO)
        os.makedirs(folder.model, exist_ok=True)
        for name in {info.storage_data.relative_path for info in results}:
            os.rename(os.path.join(own, name), os.path.join(folder.model, name))
        sync(folder.model)
        shutil.rmtree(own)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts the new folder in its place."""
        if self._new is None:  # prepare_global_plan was not called
            return super().finish(metadata, results)
        new, self._new = self._new, None
        if self._first is not None:
            self._first.finish(metadata, results)
            new.join(*files_of(self.fqn_to_index_mapping))
        new.publish()

    def __getstate__(self) -> dict[str, Any]:
        """For torch's process that saves."""
        return {**vars(self), "_new": None, "_orders": [], "_first": None, "_set_up": None}


def files_of(numbers: dict[str, int] | None, shard: int | None = None) -> tuple[dict[str, str], str]:
    """The file of each key, and that of all other keys, as torch names them.

    Args:
        numbers: fqn_to_index_mapping.
    """
    if not numbers:
        return {}, _gen_file_name(1, 1, shard)
    last = max(numbers.values())
    return {key: _gen_file_name(number, last, shard) for key, number in numbers.items()}, ""


def check_keys(keys: Iterable[str], numbers: dict[str, int] | None) -> None:
    """Refuses keys that the mapping does not name.

    Raises:
        InvalidArgumentError: it does not name one.
    """
    for key in keys:
        if numbers and key not in numbers:
            raise InvalidArgumentError("fqn_to_index_mapping does not have this key", key=key)


def _is_of_one_rank(plans: list[SavePlan]) -> bool:
    """Whether one rank has all items, and each is a whole tensor; as far as plans are not cached."""
    if not all(plan.usable for plan in plans):
        return False
    having = [plan for plan in plans if plan.items]
    return len(having) <= 1 and all(
        item.tensor_data is not None and item.tensor_data.chunk.sizes == item.tensor_data.size
        for plan in having
        for item in plan.items
    )


class _Flat(_calls.State):
    """A rank's state as torch flattens it, which has only tensors."""

    def __init__(self, state: Any, numbers: dict[str, int] | None) -> None:
        super().__init__(state)
        self._numbers = numbers

    def make(self) -> dict[str, Any]:
        flat, _ = flatten_state_dict(super().make())  # type: ignore[arg-type]
        for key, item in flat.items():
            if not isinstance(item, (torch.Tensor, ShardedTensor)):
                _refuse_object(key)
        check_keys(flat, self._numbers)
        return flat


def _agree(work: str, comm: Any, check: Callable[[], None], decide: Callable[[], Any]) -> Any:
    """What rank 0 decides, once all have checked; or the error of one, on all ranks."""

    def ask(_: int, __: bytes) -> bytes:
        check()
        return b""

    def answer(_: int, __: list[bytes]) -> tuple[bytes, bool]:
        return json.dumps(decide()).encode(), True

    return json.loads(_core.agree(work, comm, ask, answer, _core.DEFAULT_TIMEOUT))


def save_together(
    state_dict: Any, writer: HuggingFaceStorageWriter, process_group: Any, alone: bool
) -> Metadata:
    """Saves whole tensors that several ranks hold: all of them write in both passes."""
    group, rank = _calls.group_and_rank(process_group, alone)
    new = NewFolder(_calls.place(writer.path))

    def begin() -> tuple[str, dict[str, int] | None]:
        new.begin()
        return new.attempt, writer.fqn_to_index_mapping

    with _calls.failing_as_torch("write", rank):
        comm = communicator(group)
        try:
            check = new.refuse_working_directory
            attempt, numbers = _agree("beginning of a Hugging Face folder", comm, check, begin)
            if rank != 0:
                new = NewFolder(new.path, attempt)
            run_save(_Flat(state_dict, numbers), new.pieces, group=group)
            new.join(*files_of(numbers), comm)
            _agree("publishing a Hugging Face folder", comm, lambda: None, new.publish)
        finally:
            new.abandon()
    return StoredModel(new.path)


class StoredModel(_calls.StoredMetadata):
    """A model's Metadata, which is read when it is first used."""

    def load(self) -> Metadata:
        """From the folder that stands there then."""
        return metadata_of(vars(self)["_path"])


def metadata_of(path: str | os.PathLike[str]) -> Metadata:
    """torch's Metadata of a folder: each tensor is one chunk, however many pieces it has."""
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, _HFStorageInfo] = {}
    is_file = os.path.isfile(path)
    with open_checkpoint(_calls.place(path), framework="torch") as opened:
        handle = opened._handle
        for key in opened.tensor_keys():
            size, dtype = torch.Size(handle.shape(key)), native_type(handle.dtype(key))
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
            for box, name in zip(handle.boxes(key), handle.files_of(key), strict=True):
                file = str(path) if is_file else os.path.join(path, name)
                info = _HFStorageInfo(file, torch.Size(box.shape), dtype)
                places[MetadataIndex(key, torch.Size(box.offset))] = info
    return Metadata(found, storage_data=places, storage_meta=StorageMeta(str(path)))


class HuggingFaceStorageReader(_torchs.HuggingFaceStorageReader):
    """Reads a Hugging Face folder with Tilestone's engine.

    It takes the place of torch's class of this name, in `tilestone.dcp.load` and in torch's own
    `load`. Pieces are joined, and an index says which files count, as for transformers. What is read
    is checked where the folder has checksums.

    Args:
        path: the folder, or one file; also the URL of a store (docs/object_stores.md).
        thread_count: ignored: the engine has threads of its own.
    """

    def __init__(self, path: str, thread_count: int = 1) -> None:
        _calls.check_path(path)
        super().__init__(path, thread_count)
        _calls.move_to(self, path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As in torch: a new load begins, perhaps at another path."""
        if checkpoint_id:
            _calls.move_to(self, checkpoint_id)
        super().reset(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As in torch."""
        return _calls.is_valid(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """torch's Metadata."""
        metadata = metadata_of(self.path)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items."""
        with open_checkpoint(_calls.place(self.path), framework="torch") as opened:
            for items in together(plan.items, planner):
                Parts(opened).fill(items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future
