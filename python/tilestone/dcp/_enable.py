"""Makes torch.distributed.checkpoint itself use Tilestone's writer and reader."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    filesystem,
    format_utils,
    state_dict_loader,
    state_dict_saver,
)

from tilestone import _core
from tilestone.dcp._calls import StoreFiles, storage_for
from tilestone.dcp._reader import FileSystemReader
from tilestone.dcp._writer import FileSystemWriter

_log = logging.getLogger("tilestone")
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_EXECUTOR = _async_process_executor._ProcessBasedAsyncCheckpointExecutor


def _in_place_of(storage: Any) -> Any:
    """Tilestone's class in the place of an object of torch's own; any other object unchanged."""
    if type(getattr(storage, "fs", None)) is not filesystem.FileSystem:  # one of the program's
        return storage
    if type(storage) is filesystem.FileSystemWriter:
        if storage.serialization_format != filesystem.SerializationFormat.TORCH_SAVE:
            return storage  # its files can't replace a checkpoint in one step
        made = FileSystemWriter(
            storage.path,
            storage.single_file_per_rank,
            storage.sync_files,
            storage.thread_count,
            storage.per_thread_copy_ahead,
            storage.cache_staged_state_dict,
            storage.overwrite,
            storage.transforms.extensions,
            storage.serialization_format,
        )
        storage.save_id = made.save_id  # the caller may compare it with the checkpoint's
        return made
    if type(storage) is filesystem.FileSystemReader:
        reader = FileSystemReader(storage.path)
        reader.transforms, reader.load_id = storage.transforms, storage.load_id
        return reader
    return storage


def _set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
    """In the place of torch's _storage_setup."""
    if not storage and _is_for_torch(checkpoint_id):
        return _storage_utils._storage_setup(storage, checkpoint_id, reader)
    kind = FileSystemReader if reader else FileSystemWriter
    return _in_place_of(storage_for(storage or None, checkpoint_id, kind))


def _is_for_torch(checkpoint_id: Any) -> bool:
    """Whether it stays with torch: a URL that no store takes, or s3 if it can't be used. From a
    pathlib.Path, torch would make a folder "s3:"."""
    if isinstance(checkpoint_id, pathlib.Path) or "://" not in str(checkpoint_id):
        return False
    return not StoreFiles.validate_checkpoint_id(checkpoint_id) or bool(_why_not_s3())


@functools.cache
def _why_not_s3() -> str:
    """Why s3 URLs stay with torch; "": Tilestone takes them. Asked, and said, once per process."""
    with contextlib.suppress(ImportError):
        from fsspec.config import conf

        if conf.get("s3"):
            return _said("fsspec has options for s3, which Tilestone does not read")
    problem = _core.object_store_problem()
    return _said(problem) if problem else ""


def _said(why: str) -> str:
    _log.warning("torch itself saves to and loads from s3:// in this process: %s", why)
    return why


def _patch(owner: Any, name: str, made: Any) -> None:
    before = vars(owner)[name]
    _undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, made)


def enable() -> None:
    """Makes stock `torch.distributed.checkpoint` write and read with Tilestone in this process.

    For programs that can't be edited. Until disable(), torch's save, load and async_save (threads
    and processes) use Tilestone's FileSystemWriter and FileSystemReader in the place of torch's
    own: where the program passes only a checkpoint_id, and where it passes an object of exactly
    torch's class, and so do the conversions of format_utils. torch still plans. As with stock stay
    URLs ("memory://x", "file:///x"; "s3://x" if this build has no S3, no credentials are found, or
    fsspec is configured for it), other classes, subclasses too, objects with a file system of the program's (`writer.fs`) and writers that serialize as SAFETENSORS. What
    pathlib makes of a URL ("s3:/x") is refused: stock saves to a folder "s3:" on the host.

    A second call does nothing. The first one is logged (INFO).
    """
    with _lock:
        if _undo:
            return
        _patch(state_dict_saver, "_storage_setup", _set_up)
        _patch(state_dict_loader, "_storage_setup", _set_up)
        saving = _with(state_dict_saver._save_state_dict)
        loading = _with(state_dict_loader._load_state_dict)
        for saver in (state_dict_saver, format_utils):  # which imports the functions by name
            _patch(saver, "_save_state_dict", saving)
        for loader in (state_dict_loader, format_utils):
            _patch(loader, "_load_state_dict", loading)
        _patch(_EXECUTOR, "execute_save", _executing(_EXECUTOR.execute_save))
        _log.info("torch.distributed.checkpoint now writes and reads with Tilestone")


def _with(before: Any) -> Any:
    """One of torch's inner functions, which its older functions call directly."""

    @functools.wraps(before)
    def inner(state_dict: Any, storage: Any = None, *rest: Any, **options: Any) -> Any:
        for name in ("storage_writer", "storage_reader"):
            storage = options.pop(name, storage)
        return before(state_dict, _in_place_of(storage), *rest, **options)

    return inner


def _executing(before: Any) -> Any:
    """torch's execute_save, with a writer that it sends to its process."""

    def execute_save(self: Any, *state: Any, **options: Any) -> Any:
        checkpoint_id, writer = options.get("checkpoint_id"), options.get("storage_writer")
        # Otherwise torch's future gets the error, or torch's process chooses the writer.
        if writer or (checkpoint_id and not _is_for_torch(checkpoint_id)):
            options["storage_writer"] = _set_up(writer, checkpoint_id)
        return before(self, *state, **options)

    return execute_save


def disable() -> None:
    """Undoes enable(). Without one, does nothing."""
    with _lock:
        while _undo:
            _undo.pop()()
