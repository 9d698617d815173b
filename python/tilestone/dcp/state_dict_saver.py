"""The functions of torch.distributed.checkpoint.state_dict_saver, over Tilestone's engine."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as _torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.checkpoint.utils import _api_bc_check
from typing_extensions import deprecated

from tilestone._calls.async_save import AsyncStep, async_save as async_save_with_engine
from tilestone._calls.save_load import run_save
from tilestone._options.values import Resources
from tilestone.dcp import _calls, _hugging_face
from tilestone.dcp._writer import FileSystemWriter, is_plain

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]

StateDict = dict[str, Any]


def _resources(writer: FileSystemWriter) -> Resources:
    return Resources(files_per_rank=writer.thread_count)


def _metadata_of(path: str, save_id: str, planner: SavePlanner | None, rank: int) -> Metadata:
    """What a save returns. The coordinator's planner has it too, as torch's planners do."""
    metadata = _calls.StoredMetadata(path, save_id)
    if isinstance(planner, DefaultSavePlanner) and rank == 0:
        planner.metadata = metadata
    return metadata


def _save(
    state_dict: StateDict, writer: FileSystemWriter, planner: SavePlanner | None,
    process_group: Any, alone: bool,
) -> Metadata:  # fmt: skip
    state, path = _calls.State(state_dict), _calls.place(writer.path)
    group, rank = _calls.group_and_rank(process_group, alone)
    with _calls.failing_as_torch("write", rank):
        result = run_save(
            state, path, group=group, overwrite=writer.overwrite, resources=_resources(writer)
        )  # fmt: skip
    writer.save_id = result.save_id
    return _metadata_of(path, result.save_id, planner, rank)


def _save_in_background(
    state_dict: StateDict, writer: FileSystemWriter, planner: SavePlanner | None,
    process_group: Any, alone: bool,
) -> Future[Metadata]:  # fmt: skip
    state: Any = _calls.State(state_dict)
    path = _calls.place(writer.path)
    group, rank = _calls.group_and_rank(process_group, alone)
    future: Future[Metadata] = Future()
    future.set_running_or_notify_cancel()
    try:
        with _calls.failing_as_torch("write", rank):
            saving = async_save_with_engine(
                state, path, group=group, overwrite=writer.overwrite,
                resources=_resources(writer),
            )  # fmt: skip
    except CheckpointException as error:
        future.set_exception(error)
        return future
    writer.save_id = saving.save_id

    def finish(step: AsyncStep) -> None:
        try:
            with _calls.failing_as_torch("write", rank):
                step.result()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(_metadata_of(path, saving.save_id, planner, rank))

    saving.durable.add_done_callback(finish)
    return future


@deprecated(
    "`save_state_dict` is deprecated, as in torch; use `save`.",
    category=FutureWarning,
)
def save_state_dict(
    state_dict: StateDict,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """As torch's function. Objects with state_dict() are not replaced by their state."""
    storage_writer.reset()
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    if coordinator_rank == 0 and is_for_engine(storage_writer, planner, True):
        return _save(state_dict, storage_writer, planner, process_group, alone)  # type: ignore[arg-type]
    return _torchs._save_state_dict(
        state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner
    )


def is_for_engine(writer: Any, planner: SavePlanner | None, use_collectives: bool) -> bool:
    """Whether the engine plans and writes; otherwise torch plans, and the writer writes."""
    # A cached plan saves torch messages, and ShardedTensors inside ShardedTensors are refused.
    known = {"_enable_plan_caching", "flatten_sharded_tensors"}
    is_ours = type(writer) is FileSystemWriter and is_plain(writer)
    return use_collectives and is_ours and _calls.is_default(planner, DefaultSavePlanner, known)


def _is_joined(writer: Any, planner: SavePlanner | None, use_collectives: bool) -> bool:
    """Whether the engine plans and writes a Hugging Face folder of whole tensors."""
    is_whole = type(writer) is _hugging_face.HuggingFaceStorageWriter and writer.is_whole
    return is_whole and use_collectives and planner is None


@_api_bc_check  # type: ignore[untyped-decorator]
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves the state that all ranks hold together, as torch.distributed.checkpoint.save does.

    Without a planner, or with torch's DefaultSavePlanner, and with no writer or Tilestone's,
    Tilestone's engine plans and writes. Otherwise torch plans, and the writer writes.

    Args:
        state_dict: a nested dict. An object with state_dict() and load_state_dict() at its top
            level is replaced by its state.
        checkpoint_id: the checkpoint's directory. A checkpoint that is there is replaced, in one
            step. Or the URL of a store (docs/object_stores.md).
        storage_writer: by default a `FileSystemWriter`.
        planner: a planner of torch's interface.
        process_group: the ranks that save; by default all.
        no_dist: this process saves alone.
        use_collectives: False: each rank writes its own metadata.

    Returns:
        The Metadata of the checkpoint. Without a planner of the user's it is read from the
        checkpoint when it is first used.

    Raises:
        CheckpointException: the save failed on some rank, as in torch; the cause is Tilestone's
            error. What was at the path before is still there.
    """
    alone = _calls.is_alone(no_dist, "saves")
    writer = _calls.storage_for(storage_writer, checkpoint_id, FileSystemWriter)
    if is_for_engine(writer, planner, use_collectives):
        state = _calls.without_statefuls(state_dict)
        return _save(state, writer, planner, process_group, alone)
    if _is_joined(writer, planner, use_collectives) and not alone and dist.get_world_size(process_group) > 1:
        state = _calls.without_statefuls(state_dict)
        return _hugging_face.save_together(state, writer, process_group, alone)
    saved: Metadata = _torchs.save(
        state_dict, storage_writer=writer, planner=planner, process_group=process_group,
        no_dist=no_dist, use_collectives=use_collectives,
    )  # fmt: skip
    return saved


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Saves in the background, as torch.distributed.checkpoint.async_save does.

    Where the engine plans (see `save`), it copies what this rank writes in the call, and writes and
    publishes in a thread without collectives. Otherwise, and with a stager or in a process, torch
    stages the state and saves it with Tilestone's writer.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, use_collectives:
            as for `save`.
        async_checkpointer_type, async_stager: as in torch.

    Returns:
        A future with the Metadata; with a stager that returns a future, an AsyncSaveResponse. The
        future has the exceptions of `save`.
    """
    if storage_writer is not None or checkpoint_id:
        storage_writer = _calls.storage_for(storage_writer, checkpoint_id, FileSystemWriter)
    in_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD and async_stager is None
    if in_thread and is_for_engine(storage_writer, planner, use_collectives):
        alone = _calls.is_alone(no_dist, "saves")
        state = _calls.without_statefuls(state_dict)
        return _save_in_background(
            state, storage_writer, planner, process_group, alone,  # type: ignore[arg-type]
        )  # fmt: skip
    return _torchs.async_save(
        state_dict, storage_writer=storage_writer, planner=planner,
        process_group=process_group, async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager, no_dist=no_dist, use_collectives=use_collectives,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """Everything else is torch's."""
    return getattr(_torchs, name)
