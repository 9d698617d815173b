"""The functions of torch.distributed.checkpoint.state_dict_loader, over Tilestone's engine."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as _torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _api_bc_check, _DistWrapper
from typing_extensions import deprecated

from tilestone import _core
from tilestone._calls import save_load
from tilestone._calls.collective import communicator
from tilestone._calls.opening import Checkpoint
from tilestone._calls.opening import open as open_checkpoint
from tilestone._errors import CheckpointError
from tilestone._objects import opaque
from tilestone._options import valid
from tilestone._options.values import Differences
from tilestone.dcp import _calls
from tilestone.dcp._hugging_face import HuggingFaceStorageReader, StoredModel
from tilestone.dcp._reader import FileSystemReader, is_plain

__all__ = ["load", "load_state_dict"]

StateDict = dict[str, Any]

_RANKS_METADATA = re.compile(r"__(\d+)\.metadata")


def _is_for_engine(reader: Any, planner: LoadPlanner | None) -> bool:
    """Whether the engine plans and reads; otherwise torch plans, and the reader reads."""
    known = {"allow_partial_load", "flatten_sharded_tensors"}
    is_ours = type(reader) is HuggingFaceStorageReader
    is_ours = is_ours or (type(reader) is FileSystemReader and is_plain(reader))
    return is_ours and _calls.is_default(planner, DefaultLoadPlanner, known)


def _ranks_with_a_part(path: str) -> list[int]:
    """The ranks of a save with use_collectives=False; [] if no such save made the checkpoint."""
    place = valid.directory(path)
    try:
        if _calls.has_file(place, _calls.INDEX):
            return []
        names = _core.names_at(place)
    except CheckpointError:
        return []  # the load will report it
    found = (_RANKS_METADATA.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _is_rank_local(path: str, group: Any) -> bool:
    """Whether any rank sees parts of single ranks. All ranks get the same answer."""

    def say(_: int, before: bytes) -> bytes:
        return bytes([len(_ranks_with_a_part(path)) > 0])

    def decide(_: int, seen: list[bytes]) -> tuple[bytes, bool]:
        return max(seen), True

    work = "choosing how to load"
    return _core.agree(work, communicator(group), say, decide, _core.DEFAULT_TIMEOUT) == b"\1"


def _load(
    state: StateDict,
    reader: FileSystemReader | HuggingFaceStorageReader,
    planner: LoadPlanner | None,
    process_group: Any,
    alone: bool,
) -> None:
    path, name = _calls.place(reader.path), _calls.INDEX
    group, rank = _calls.group_and_rank(process_group, alone)
    with _calls.failing_as_torch("read", rank):
        rank_local = _is_rank_local(path, group)
        if not rank_local:
            _fill(state, path, planner, group=group)
    if rank_local:
        parts = _ranks_with_a_part(path)
        if parts:
            name = f"__{rank if rank in parts else parts[0]}{_calls.INDEX}"
        _fill_alone(state, path, planner, rank, _DistWrapper(process_group, not alone, 0))
    if isinstance(planner, DefaultLoadPlanner):
        is_folder = type(reader) is HuggingFaceStorageReader
        kind = StoredModel if is_folder else _calls.StoredMetadata
        planner.metadata = kind(path, name=name, load_id=reader.load_id)


def _fill_alone(
    state: StateDict, path: str, planner: LoadPlanner | None, rank: int, ranks: _DistWrapper
) -> None:
    """As with torch, what differs between the ranks comes from each rank's own part."""
    interrupts: list[BaseException] = []

    def fill() -> None:
        try:
            _fill(state, path, planner, own_rank=rank)
        except Exception as error:
            made = _calls.as_torchs(error, "read")
            raise made from (error if made is not error else None)
        except BaseException as interrupt:
            interrupts.append(interrupt)
            raise

    try:
        ranks.all_gather("read", fill)
    except CheckpointException:
        if interrupts:
            raise interrupts[0] from None
        raise


def _fill(state: StateDict, path: str, planner: LoadPlanner | None, **who: Any) -> None:
    """Loads into the state. `who`: the arguments of tilestone.load that say who takes part."""
    partial = isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load
    template = _Filled(state, path, who.get("own_rank"))
    differences = Differences(not_in_checkpoint="ignore" if partial else "error")
    save_load.load(template, path, cast=True, differences=differences, **who)  # type: ignore[arg-type]


class _Filled(_calls.State):
    """A state that is filled in a load's last round, so that every rank raises what fails there."""

    def __init__(self, state: StateDict, path: str, own_rank: int | None) -> None:
        super().__init__(state)
        self._filled = state
        self._who = path, own_rank

    def finish(self, loaded: dict[Any, Any], *differences: Any) -> dict[Any, Any]:
        """Fills the caller's state."""
        with contextlib.closing(_Filler(*self._who)) as filler:
            filler.fill(self._filled, loaded)
        return loaded


# ---- What was loaded goes into the caller's containers, as with torch ----


def _is_descended(items: list[Any]) -> bool:
    """Whether torch splits a list into its elements."""
    return any(
        isinstance(item, (Mapping, torch.Tensor)) or (type(item) is list and _is_descended(item))
        for item in items
    )


_CELL = re.compile(r".+/shard_[\d.]+_[\d.]+", re.DOTALL)


class _Filler:
    """Fills the caller's state from a loaded one.

    Args:
        path: the checkpoint, which is opened if it holds objects of classes that Tilestone itself
            does not create.
        own_rank: the rank whose own part of a rank-local checkpoint comes first; None: there are no
            such parts.
    """

    def __init__(self, path: str | os.PathLike[str], own_rank: int | None = None) -> None:
        self._path = path
        self._own: _calls.StoredMetadata | None = None  # None also if the checkpoint is of fewer ranks
        name = f"__{own_rank}{_calls.INDEX}"
        if own_rank is not None and _calls.has_file(valid.directory(path), name):
            self._own = _calls.StoredMetadata(path, name=name)
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
            elif new is not item or _CELL.fullmatch(str(key)):
                state[key] = self._made(new, path)

    def _made(self, value: Any, path: tuple[Any, ...]) -> Any:
        # torch gives a cell of Megatron-Core's grids of objects as it is stored: in a list.
        if opaque.find_in(value) is None and not _CELL.fullmatch(str(path[-1])):
            return value
        # torch up to 2.3 saved a dict without tensors as one object.
        for size in range(len(path), 0, -1):
            data = self._bytes_of(".".join(map(str, path[:size])))
            if data is not None:
                return functools.reduce(operator.getitem, path[size:], _calls.torch_load(io.BytesIO(data)))
        return value

    def _bytes_of(self, key: str) -> bytes | None:
        """A stored object's bytes; None: there is none of this key."""
        if self._own is not None:
            data = self._own_bytes_of(key, self._own)
            if data is not None:
                return data
        if self._opened is None:
            self._opened = open_checkpoint(self._path)
        return self._opened.object_bytes(key) if self._opened._handle.is_object(key) else None

    def _own_bytes_of(self, key: str, own: _calls.StoredMetadata) -> bytes | None:
        info = own.storage_data.get(MetadataIndex(key))
        if info is None:
            return None
        place = valid.directory(self._path)
        return _core.bytes_at(place, info.relative_path, info.offset, info.length)

    def close(self) -> None:
        """Closes the checkpoint."""
        if self._opened is not None:
            self._opened.close()


# ---- Torch's functions ----


@deprecated(
    "`load_state_dict` is deprecated, as in torch; use `load`.",
    category=FutureWarning,
)
def load_state_dict(
    state_dict: StateDict,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """As torch's function. Objects with state_dict() are not replaced by their state."""
    storage_reader.reset()
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    if coordinator_rank == 0 and _is_for_engine(storage_reader, planner):
        return _load(state_dict, storage_reader, planner, process_group, alone)  # type: ignore[arg-type]
    return _torchs._load_state_dict(
        state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner
    )


@_api_bc_check  # type: ignore[untyped-decorator]
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint into a state, as torch.distributed.checkpoint.load does.

    Without a planner, or with torch's DefaultLoadPlanner, and with no reader or Tilestone's,
    Tilestone's engine plans and reads. Otherwise torch plans, and the reader reads.

    Args:
        state_dict: tensors are filled in place; other leaves are replaced by what was saved. For an
            object with state_dict() and load_state_dict() at the top level, its state is filled and
            given to load_state_dict(). Objects of any class are created, as in torch: load only
            checkpoints that you trust.
        checkpoint_id: the checkpoint's directory, or the URL of a store (docs/object_stores.md).
        storage_reader: by default a `FileSystemReader`.
        planner: a planner of torch's interface.
        process_group: the ranks that load; by default all.
        no_dist: this process loads alone.

    Raises:
        CheckpointException: the load failed on some rank, as in torch; the cause is Tilestone's
            error.
    """
    alone = _calls.is_alone(no_dist, "loads")
    reader = _calls.storage_for(storage_reader, checkpoint_id, FileSystemReader)
    if not _is_for_engine(reader, planner):
        _torchs.load(
            state_dict, storage_reader=reader, planner=planner, process_group=process_group,
            no_dist=no_dist,
        )  # fmt: skip
        return
    # In the order in which torch calls the objects, which may communicate.
    keys = sorted(state_dict)
    state = _calls.without_statefuls({key: state_dict[key] for key in keys})
    _load(state, reader, planner, process_group, alone)
    for key in keys:
        item = state_dict[key]
        if _calls.is_stateful(item):
            item.load_state_dict(state[key])
        else:
            state_dict[key] = state[key]


def __getattr__(name: str) -> Any:
    """Everything else is torch's."""
    return getattr(_torchs, name)
