"""The writer for saves that torch plans: the items' bytes and the commit are Tilestone's.

One save, in the order of torch's calls:

1. prepare_global_plan, on the coordinator: the save begins at its path (lock, note, save id). Every
   rank's plan gets an order, which says under which save id the rank writes.
2. write_data, on every rank: the engine writes the items to new files. The first result carries the
   rank's receipt, in a subclass of torch's _StorageInfo.
3. finish, on the coordinator: the receipts become the manifest. torch's Metadata, with torch's own
   _StorageInfo, becomes `.metadata`, whose rename publishes the checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as _torchs
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tilestone import _core
from tilestone._errors import UnsupportedError
from tilestone._options import valid
from tilestone._torch import tensors
from tilestone.dcp._calls import (
    INDEX,
    check_file_system,
    check_path,
    is_own_file_system,
    is_valid,
    move_to,
    place,
)

# A planner may make new tensors for its items. So many bytes of them are resolved at a time.
_RESOLVED_AT_ONCE = 256 << 20


@dataclasses.dataclass
class _Order(_torchs._StoragePrefix):
    """How a rank writes its part, in SavePlan.storage_data.

    Attributes:
        prefix: of the names of files that torch's own code writes.
        save_id, sibling: as in _core.ForeignSave.
        rank, world_size: in the group that saves.
        path: the writer's.
    """

    save_id: str
    sibling: str
    rank: int
    world_size: int
    path: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _arrived[self.path, self.rank] = self


# The newest order that has reached a rank of this process. torch's planners may use a cached plan
# in place of the one that the coordinator has sent, and with it the order of an earlier save.
_arrived: dict[tuple[str, int], _Order] = {}


@dataclasses.dataclass
class _Written(_torchs._StorageInfo):
    """Where an item is; the first item of a call carries the rank's receipt."""

    receipt: bytes | None = None


def _plain(info: Any) -> Any:
    """torch's own class in the place of a _Written."""
    if not isinstance(info, _Written):
        return info
    return _torchs._StorageInfo(
        info.relative_path, info.offset, info.length, info.transform_descriptors
    )


def is_plain(writer: FileSystemWriter) -> bool:
    """Whether the writer has no options that only saves planned by torch have."""
    return (
        not writer.transforms.extensions
        and is_own_file_system(writer.fs)
        and writer.serialization_format == SerializationFormat.TORCH_SAVE
        and writer.single_file_per_rank
    )


def _gives_views(planner: SavePlanner) -> bool:
    """Whether a planner gives the tensors of the state themselves, without making new ones."""
    kind = type(planner)
    return all(
        getattr(kind, name, None) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


class _Batch:
    """Items that are written in one call, in the order in which they were resolved."""

    def __init__(self) -> None:
        self.bytes = 0
        self.results: list[tuple[WriteItem, list[str] | None]] = []
        self.encoded: list[Any] = []
        self.chunks: list[Any] = []

    def add_encoded(self, item: WriteItem, data: bytes, transforms: list[str] | None) -> None:
        chunk = None
        if item.tensor_data is not None:
            found = item.tensor_data
            dtype = tensors.dtype_name(found.properties.dtype)
            chunk = (dtype, tuple(found.size), _box(item))
        self.encoded.append((item.index.fqn, data, chunk))
        self.results.append((item, transforms))
        self.bytes += len(data)

    def add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        assert item.tensor_data is not None
        view = tensors.view(tensor, False)
        self.chunks.append((item.index.fqn, tuple(item.tensor_data.size), _box(item), view))
        self.results.append((item, None))
        self.bytes += view.nbytes

    def made(self, receipt: bytes, encoded: list[Any], chunks: list[Any]) -> list[WriteResult]:
        """The results, from where the engine has written the items: tensors come last."""
        found: list[WriteResult] = []
        places = zip(self.results, [*encoded, *chunks], strict=True)
        for (item, transforms), (file, offset, length) in places:
            info = _Written(file, offset, length, transforms, None if found else receipt)
            found.append(WriteResult(item.index, length, info))
        return found


def _box(item: WriteItem) -> _core.Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return _core.Box(tuple(chunk.offsets), tuple(chunk.sizes))


class FileSystemWriter(_torchs.FileSystemWriter):
    """Writes a checkpoint of torch.distributed.checkpoint with Tilestone's engine.

    It takes the place of torch's class of this name, in `tilestone.dcp.save` and in torch's own
    `save` and `async_save`. The checkpoint has checksums, and replaces an older one in one step:
    until then, and after any failure, the older one is still there.

    Args:
        path: the checkpoint's directory, or the URL of a store (docs/object_stores.md).
        single_file_per_rank: False: each rank writes up to 1,024 files.
        sync_files: ignored: a checkpoint is always durable before it is published.
        thread_count: how many files each rank writes at the same time.
        per_thread_copy_ahead: ignored.
        cache_staged_state_dict: as in torch.
        overwrite: whether a checkpoint at the path may be replaced.
        _extensions: as in torch. Items that they transform have checksums of their stored bytes.
        serialization_format: torch's own code writes SAFETENSORS; such a checkpoint has no
            checksums.

    Raises:
        UnsupportedError: the path is a URL that no store takes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        check_path(path)
        super().__init__(
            path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead,
            cache_staged_state_dict, overwrite, _extensions, serialization_format,
        )  # fmt: skip
        move_to(self, path)
        self._begun: _core.ForeignSave | None = None
        self._is_alone = False  # whether no other rank takes part in the save that has begun
        self._is_used = False  # whether a save has begun under this save id
        self._is_replaced = False  # whether a later writer has ended its save

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As in torch: a new save begins, perhaps at another path."""
        if checkpoint_id:
            move_to(self, checkpoint_id)
        self._abandon()
        self._is_used = False
        super().reset(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As in torch."""
        return is_valid(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As in torch. A second save with the same object gets a save id of its own."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        check_file_system(self)
        if self._is_used:
            self.save_id = _torchs._generate_uuid()
        self._is_used = True

    def storage_meta(self) -> StorageMeta | None:
        """As in torch. The path is a str, because a pickled Path depends on Python's version."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As in torch: says whether a checkpoint is replaced.

        Raises:
            RuntimeError: there is one, and `overwrite` is False; or this save has
                use_collectives=False and there is one with a common metadata file.
        """
        plan = super().prepare_local_plan(plan)
        if self.use_collectives:
            return plan
        valid.refuse_any_url(self.path, "a save with use_collectives=False")
        if self.fs.exists(self.fs.concat_path(self.path, INDEX)):
            raise RuntimeError(
                f"a checkpoint with {INDEX} exists at {self.path}: torch would load it in the place "
                "of what a save with use_collectives=False writes; save elsewhere, or remove it"
            )
        # Each rank has a save id of its own, so the names are not those of Tilestone's files.
        prefix = _torchs._StoragePrefix(f"__{self.rank}_{self.save_id}_")
        return dataclasses.replace(plan, storage_data=prefix)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the save, and gives each rank its order."""
        if not self.use_collectives:
            return super().prepare_global_plan(plans)
        path = str(self.path)
        self._abandon()
        self._is_alone = len(plans) == 1
        self._is_replaced = False
        _take_over(path, self)
        self._begun = _core.ForeignSave(
            _place(path), self.save_id, self.overwrite, _core.DEFAULT_TIMEOUT
        )
        return [
            plan if plan.storage_data is not None and not isinstance(plan.storage_data, _Order)
            else dataclasses.replace(plan, storage_data=self._order(rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]  # fmt: skip

    def _order(self, rank: int, world_size: int) -> _Order:
        assert self._begun is not None
        prefix, sibling = f"{self.save_id}__{rank}_", self._begun.sibling
        return _Order(prefix, self.save_id, sibling, rank, world_size, str(self.path))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items. They are durable when it returns."""
        order = self._current(plan.storage_data)
        try:
            if order is None or self.serialization_format != SerializationFormat.TORCH_SAVE:
                return self._write_as_torch(plan, planner, order)
            results: list[WriteResult] = []
            files = 0
            for batch in self._batches(plan.items, planner):
                made, count = self._write(order, batch, files, len(plan.items))
                results += made
                files += count
        except BaseException:
            self._abandon()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_as_torch(
        self, plan: SavePlan, planner: SavePlanner, order: _Order | None
    ) -> Future[list[WriteResult]]:
        valid.refuse_any_url(self.path, "a save whose files torch writes")
        if order is not None and order.sibling:
            raise UnsupportedError(
                f"the checkpoint at {self.path} can't be replaced by files that torch writes",
                hint="save elsewhere, or remove that checkpoint first",
            )
        if order is not None:
            plan = dataclasses.replace(plan, storage_data=order)
        return super().write_data(plan, planner)

    def _current(self, order: Any) -> _Order | None:
        """The order of this save: the plan's, unless the planner has used a cached plan."""
        if not isinstance(order, _Order):
            return None
        if self._begun is not None:
            return self._order(order.rank, order.world_size)
        return _arrived.get((str(self.path), order.rank), order)

    def _batches(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[_Batch]:
        """What is written in one call each; resolved lazily, objects before tensors as in torch."""
        most = None if _gives_views(planner) else _RESOLVED_AT_ONCE
        batch = _Batch()
        is_bytes = WriteItemType.BYTE_IO
        ordered = [item for item in items if item.type == is_bytes]
        ordered += [item for item in items if item.type != is_bytes]
        for item in ordered:
            self._resolve(item, planner, batch)
            if most is not None and batch.bytes >= most:
                yield batch
                batch = _Batch()
        if batch.results:
            yield batch

    def _resolve(self, item: WriteItem, planner: SavePlanner, batch: _Batch) -> None:
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"{item.index.fqn}: the planner gave a {type(data)}, not a BytesIO")
            if not self.transforms.extensions:
                return batch.add_encoded(item, data.getvalue(), None)
        else:
            if not isinstance(data, torch.Tensor):
                raise TypeError(f"{item.index.fqn}: the planner gave a {type(data)}, not a tensor")
            if not self.transforms.extensions:
                return batch.add_tensor(item, data.detach())
        batch.add_encoded(item, *self._transformed(item, data))

    def _transformed(self, item: WriteItem, data: Any) -> tuple[bytes, list[str] | None]:
        """The bytes that the extensions make of an item, and their names."""
        stream = io.BytesIO()
        into, names = self.transforms.transform_save_stream(item, stream)
        if isinstance(data, io.BytesIO):
            into.write(data.getbuffer())
        else:
            torch.save(data.detach().cpu().clone(), into)
        into.close()
        return stream.getvalue(), names or None

    def _write(
        self, order: _Order, batch: _Batch, first_file: int, items: int
    ) -> tuple[list[WriteResult], int]:
        resources = _core.Resources()
        files = self.thread_count if self.single_file_per_rank else items
        resources.files_per_rank = max(1, min(files, 1024))
        receipt, files, encoded, chunks = _core.write_foreign(
            _place(order.path), order.save_id, order.rank, order.world_size, order.sibling,
            first_file, batch.encoded, batch.chunks, resources, _core.DEFAULT_TIMEOUT,
        )  # fmt: skip
        return batch.made(receipt, encoded, chunks), files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint."""
        if not self.use_collectives:
            return self._finish_rank(metadata, results)
        if self._is_replaced:
            raise RuntimeError(
                f"this save was ended by a later one of the same process to {self.path}; save to one "
                "path one at a time"
            )
        if self._begun is None:
            raise RuntimeError(
                "FileSystemWriter.finish was called without prepare_global_plan: a subclass that "
                "overrides it must call the one of FileSystemWriter"
            )
        written = [result for of_rank in results for result in of_rank]
        infos = [result.storage_data for result in written]
        receipts = [
            info.receipt for info in infos if isinstance(info, _Written) and info.receipt
        ]
        others = {info.relative_path for info in infos if not isinstance(info, _Written)}
        index = self._index(metadata, written)
        begun, self._begun = self._begun, None
        begun.commit(receipts, len(results), index, sorted(others), _core.DEFAULT_TIMEOUT)

    def _index(self, metadata: Metadata, written: list[WriteResult]) -> bytes:
        metadata.version = _torchs.CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {
            result.index: _plain(result.storage_data) for result in written
        }
        return pickle.dumps(metadata)

    def _finish_rank(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes this rank's own metadata in one step; with use_collectives=False."""
        name = os.path.basename(self._get_metadata_path(self.rank))
        index = self._index(metadata, [result for of_rank in results for result in of_rank])
        _core.put_file(_place(str(self.path)), name, index)

    @property
    def has_begun(self) -> bool:
        """Whether a save has begun that was not finished; on the coordinator."""
        return self._begun is not None

    def _abandon(self) -> None:
        """Ends a save that was not finished."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.abandon(self._is_alone)  # other ranks may still write

    def __getstate__(self) -> dict[str, Any]:
        """For torch's process that saves: a save that has begun stays with this object."""
        return {**vars(self), "_begun": None}


# The writers of this process that have begun a save, by path. torch does not tell the coordinator's
# writer when another rank has failed; the next save to the path then takes its lock.
_begun: weakref.WeakValueDictionary[str, FileSystemWriter] = weakref.WeakValueDictionary()


def _take_over(path: str, writer: FileSystemWriter) -> None:
    before = _begun.get(path)
    if before is not None and before is not writer and before._begun is not None:
        before._abandon()
        before._is_replaced = True
    _begun[path] = writer


def _place(path: str) -> bytes:
    """An absolute path, in which a leading "~" is the name of a directory, as for torch."""
    return valid.directory(place(path))
