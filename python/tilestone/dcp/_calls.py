"""What saving and loading in torch's way have in common: groups, states, failures, results."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tilestone import _core
from tilestone._calls.collective import Made
from tilestone._errors import CheckpointError, UnsupportedError
from tilestone._options import valid

_FIELDS = frozenset(Metadata.__dataclass_fields__)
INDEX = ".metadata"


class State(Made):
    """A state that is split into items as torch does it; the caller's Stateful objects made it."""

    as_torch = True
    engine: Mapping[str, Any] = {"fill_empty": False}  # as in torch


# Classes without state_dict(). torch's Stateful takes longer to ask than a small tensor to save.
_NEVER_STATEFUL = frozenset(
    (torch.Tensor, torch.nn.Parameter, DTensor, dict, list, tuple, str, int, float, bool)
)


def is_stateful(item: Any) -> bool:
    """Whether torch takes an object's state in its place."""
    return type(item) not in _NEVER_STATEFUL and isinstance(item, Stateful)


def without_statefuls(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the Stateful objects at the top level are replaced by their state dicts."""
    return {
        key: item.state_dict() if is_stateful(item) else item
        for key, item in state_dict.items()
    }


def is_alone(no_dist: bool, what: str) -> bool:
    """Whether this process works alone; warns as torch does."""
    if not no_dist and dist.is_available() and dist.is_initialized():
        return False
    warnings.warn(
        f"there is no process group, or no_dist=True: this process {what} alone", stacklevel=3
    )
    return True


SOLO = _core.solo()  # one object, so that saves in the background share a session


def group_and_rank(process_group: Any, alone: bool) -> tuple[Any, int]:
    """The `group` of Tilestone's functions, and this process's number among those that take part."""
    return (SOLO, 0) if alone else (process_group, dist.get_rank(process_group))


def check_path(checkpoint_id: Any) -> None:
    """Refuses a URL that no store takes.

    Raises:
        UnsupportedError: it is one.
    """
    try:
        _core.refuse_url(valid.directory(checkpoint_id))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"Cannot detect a writer or reader for the URL {os.fspath(checkpoint_id)!r}: "
            f"{error.message}",
            hint="pass a storage_writer or storage_reader for it, for example torch's FsspecWriter, "
            "and the URL as a string (a pathlib.Path drops a slash)",
        ) from error


def place(path: Any) -> str:
    """A URL as it is; an absolute path, in which a leading "~" names a directory, as for torch."""
    return str(os.fspath(path)) if valid.is_url(path) else os.path.abspath(path)


def has_file(place: bytes, name: str) -> bool:
    """Whether there is such a file at a place."""
    return _core.bytes_at(place, name, 0, 0) is not None


class StoreFiles(FileSystemBase):
    """How torch's own code reads files of a checkpoint in a store. Its paths are URLs, as str."""

    def _split(self, path: Any) -> tuple[bytes, str]:
        folder, _, name = os.fspath(path).rpartition("/")
        return valid.directory(folder), name

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Reads a whole file."""
        if mode != "rb":
            valid.refuse_any_url(path, "what torch itself writes")
        found = _core.bytes_at(*self._split(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield io.BytesIO(found)

    def concat_path(self, path: Any, suffix: str) -> str:
        """The URL of a file."""
        return os.path.join(path, suffix)

    def init_path(self, path: Any) -> str:
        """The URL."""
        return str(os.fspath(path))

    def mkdir(self, path: Any) -> None:
        """Does nothing: stores have no directories."""

    def exists(self, path: Any) -> bool:
        """Whether there is such a file."""
        return has_file(*self._split(path))

    def ls(self, path: Any) -> list[str]:
        """The URLs of the files."""
        return [os.path.join(path, name) for name in _core.names_at(valid.directory(path))]

    def rename(self, path: Any, new_path: Any) -> None:
        """Refused, as rm_file."""
        valid.refuse_any_url(path, "what torch itself renames")

    def rm_file(self, path: Any) -> None:
        """Refused."""
        valid.refuse_any_url(path, "what torch itself removes")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a URL that a store takes."""
        try:
            check_path(checkpoint_id)
        except CheckpointError:
            return False
        return valid.is_url(checkpoint_id)


_FILE_SYSTEMS = (FileSystem, StoreFiles)


def is_own_file_system(fs: Any) -> bool:
    """Whether a file system is torch's for directories, or ours, and not one of the program's."""
    return type(fs) in _FILE_SYSTEMS


def move_to(storage: Any, path: Any) -> None:
    """Gives a writer or reader its place."""
    check_path(path)
    if is_own_file_system(storage.fs):
        storage.fs = StoreFiles() if valid.is_url(path) else FileSystem()
    storage.path = storage.fs.init_path(path)


def is_valid(checkpoint_id: Any) -> bool:
    """Whether it is a place for a checkpoint: torch's validate_checkpoint_id."""
    return any(kind.validate_checkpoint_id(checkpoint_id) for kind in _FILE_SYSTEMS)


def check_file_system(writer: Any) -> None:
    """Refuses a file system of the program's.

    Raises:
        UnsupportedError: the writer's `fs` is one.
    """
    if not is_own_file_system(writer.fs):
        raise UnsupportedError(
            f"tilestone.dcp.FileSystemWriter writes files itself, so its fs can't be {writer.fs!r}",
            hint="pass a writer of torch's with it: torch.distributed.checkpoint.FileSystemWriter",
        )


def is_default(planner: Any, kind: type, without_effect: set[str]) -> bool:
    """Whether the engine makes the plan that one of torch's planners would make.

    Args:
        planner: None: the default one.
        kind: the class of torch's default planners.
        without_effect: the options that do not change what the engine does.
    """
    if planner is None or type(planner) is not kind:
        return planner is None
    default = vars(kind())
    return without_effect >= {
        name
        for name, value in vars(planner).items()
        if isinstance(default.get(name), (bool, int, str)) and default[name] != value
    }


def storage_for(given: Any, checkpoint_id: Any, kind: Any) -> Any:
    """The caller's writer or reader; without one, one of class `kind`."""
    if given is not None:
        if checkpoint_id is not None:
            given.reset(checkpoint_id)
        return given
    if not checkpoint_id:
        raise RuntimeError(
            "`checkpoint_id` must be specified if storage_reader/storage_writer is None."
        )
    return kind(checkpoint_id)


# Options of tilestone.load in the engine's hints, in the words of tilestone.dcp; None: it has none.
_WORDS = {
    "differences.not_in_checkpoint": "planner=DefaultLoadPlanner(allow_partial_load=True)",
    "differences.other_shape": None,
    "allow_shape_mismatch": None,
    "cast": None,
}


def as_torchs(error: Exception, step: str) -> Exception:
    """The exception that torch raises in this case; any other one unchanged.

    Args:
        step: "read" or "write".
    """
    if not isinstance(error, CheckpointError):
        return error
    error.word_options(_WORDS)
    text = str(error)
    made: Exception = error
    if error.reason == "tensor_stored":
        made = ValueError(f"Invalid checkpoint metadata for {error.key}: {text}")
    elif error.reason in ("key_not_stored", "object_stored"):
        made = RuntimeError(f"Missing key in checkpoint state_dict: {error.key}. ({text})")
    elif step == "read" and error.reason == "shape_differs":
        made = ValueError(f"Size mismatch between saved and current tensor: {text}")
    elif error.reason == "checkpoint_exists":
        made = RuntimeError(f"Checkpoint already exists and self.overwrite=False. ({text})")
    if made is not error:
        made.__cause__ = error
    return made


@contextlib.contextmanager
def failing_as_torch(step: str, rank: int) -> Iterator[None]:
    """Wraps an exception in torch's CheckpointException, under the rank that failed."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError):
            # An error without a rank is what the coordinator has found, unless the ranks were cut off.
            is_own = error.rank < 0 and error.code in ("timeout", "rank_failed", "interrupted")
            rank = rank if is_own else max(error.rank, 0)
        made = as_torchs(error, step)
        trace = traceback.extract_tb(error.__traceback__)
        failures: dict[int, tuple[BaseException, traceback.StackSummary]] = {rank: (made, trace)}
        raise CheckpointException(step, failures) from error


class StoredMetadata(Metadata):
    """A checkpoint's Metadata, which is read when it is first used.

    Reading it takes longer than many saves, and few programs use it. A pickle of it is an ordinary
    Metadata.

    Args:
        save_id: of the save that it belongs to; None: whichever is there.
        name: of the file.
        load_id: of the load that it belongs to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_id: str | None = None,
        name: str = INDEX,
        load_id: str | None = None,
    ) -> None:
        vars(self).update(
            _path=path, _save_id=save_id, _name=name, _load_id=load_id, _is_read=False
        )

    def _read(self) -> None:
        own = vars(self)
        if not own["_is_read"]:
            found = self.load()
            if found.storage_meta is not None:
                found.storage_meta.load_id = own["_load_id"]
            own.update({name: getattr(found, name, None) for name in _FIELDS}, _is_read=True)

    def load(self) -> Metadata:
        """Reads it."""
        own = vars(self)
        data = _core.bytes_at(valid.directory(place(own["_path"])), own["_name"])
        if data is None:
            raise FileNotFoundError(errno.ENOENT, f"no {own['_name']}", own["_path"])
        found = pickle.loads(data)
        stored = getattr(found.storage_meta, "save_id", None)
        if own["_save_id"] not in (None, stored):
            raise RuntimeError(
                f"the checkpoint at {own['_path']} was replaced: it has the save id {stored}, not "
                f"{own['_save_id']}; use the result of a save before the next one to its place"
            )
        return found  # type: ignore[no-any-return]

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            self._read()
        return super().__getattribute__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, tuple(getattr(self, name) for name in Metadata.__dataclass_fields__)


def torch_load(data: Any) -> Any:
    """An object from its bytes, as torch makes it: it may be of any class."""
    return torch.load(data, weights_only=False)
