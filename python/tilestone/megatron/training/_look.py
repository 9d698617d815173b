"""The content of a checkpoint's directory, as one rank sees it."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from tilestone._errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from tilestone.megatron import _stored
from tilestone.megatron.core import CONFIG_FNAME, maybe_load_config
from tilestone.megatron.mapping import ShardedObject
from tilestone.megatron.training import _arguments, names
from tilestone.megatron.training.rng import RNG_KEY

_INDEX_FILES = (CONFIG_FNAME, ".metadata", _stored.COMMON_FILE)
_EDGE = 4096  # bytes that are compared at each end of an index file


class NotPublishedError(Exception):
    """A directory does not hold a published checkpoint; the text says what is wrong.

    Attributes:
        damaged: whether there is one whose index is damaged.
    """

    def __init__(self, text: str, damaged: bool = False) -> None:
        super().__init__(text)
        self.damaged = damaged


@dataclass(frozen=True)
class Found:
    """A checkpoint of a training run, and what decides how it is loaded.

    Attributes:
        directory: the checkpoint's own directory.
        iteration: 0 for the release checkpoint.
        release: whether it is the release checkpoint.
        content_metadata: the content metadata of the program that saved; None: there is none.
        arguments: the stored arguments that matter for a load; None: no arguments are stored.
        rng_grids: for each key of random states, the grid (PP, TP) as which they are stored.
        rerun_state: the common part of the rerun state machine's state, or None.
        non_persistent: whether the next checkpoint of its kind replaces it.
        finetune: whether a new run starts from it.
    """

    directory: str
    iteration: int
    release: bool
    content_metadata: Dict[Any, Any] | None = None
    arguments: Dict[str, Any] | None = None
    rng_grids: Dict[str, Tuple[int, ...]] = field(default_factory=dict)
    rerun_state: Any = None
    non_persistent: bool = False
    finetune: bool = False


def examine(run_directory: str, iteration: int, release: bool = False) -> Found:
    """Examines the checkpoint of an iteration.

    Raises:
        NotPublishedError: there is none (or only a dangling symbolic link), its save has not ended,
            or its index is damaged.
        UnsupportedError: it is in Megatron's legacy format.
        CheckpointError: it can't be read.
    """
    path = names.get_checkpoint_name(run_directory, iteration, release, return_base_dir=True)
    try:
        return _examined(path, iteration, release)
    except (NotFoundError, CorruptError) as error:
        text = str(error)
        text = text if path in text else f"{path}: {text}"
        raise NotPublishedError(text, isinstance(error, CorruptError)) from error
    except StorageError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotPublishedError(f"{path} is a dangling symbolic link: {error}") from error


def _examined(path: str, iteration: int, release: bool) -> Found:
    check_is_published(path)
    try:
        opened = _stored.open_stored(path)
    except NotFoundError as error:
        check_is_published(path)  # raises if it has been removed meanwhile
        text = f"{path} has a {CONFIG_FNAME}, but its index is missing: {error}"
        raise CorruptError(text, file=path) from error
    with opened as checkpoint:
        common = _stored.common_of(checkpoint)
        grids = _rng_grids(checkpoint.object_keys())
    if common is None:
        raise CorruptError(f"{path} does not hold common state", file=path)
    args = common.get("args")
    return Found(
        path,
        iteration,
        release,
        common.get("content_metadata"),
        None if args is None else _arguments.stored_arguments(args),
        grids,
        common.get("rerun_state_machine"),
    )


def _is_empty(file: str) -> bool:
    try:
        return os.path.getsize(file) == 0
    except OSError:  # check_is_published() says what is wrong
        return False


def check_is_published(path: str) -> None:
    """Checks that the file that a save writes last exists; the index is not opened.

    Raises:
        NotFoundError: the file does not exist, or is empty: Megatron-Core does not write it in one
            step, so its save has not ended.
        CorruptError: the file is damaged.
        UnsupportedError: the directory holds a checkpoint of the legacy format.
    """
    if _is_empty(os.path.join(path, CONFIG_FNAME)):
        text = f"{path} has an empty {CONFIG_FNAME}: its save has not ended"
        raise NotFoundError(text, file=path)
    if maybe_load_config(path) is not None:
        return
    try:
        listed = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no directory {path}", file=path) from None
    if any(name.startswith("mp_rank_") for name in listed):
        raise UnsupportedError(
            f"{path} is a checkpoint in Megatron's legacy format (torch)",
            file=path,
            hint="convert it with Megatron-LM, which saves it as torch_dist",
        )
    raise NotFoundError(f"{path} has no {CONFIG_FNAME}: its save has not ended", file=path)


def _rng_grids(unique_keys: List[str]) -> Dict[str, Tuple[int, ...]]:
    grids = {}
    for unique_key in unique_keys:
        try:
            entity = ShardedObject.empty_from_unique_key(unique_key)
        except InvalidArgumentError:
            continue  # an object without a grid
        if entity.key.endswith(RNG_KEY):
            grids[entity.key] = tuple(entity.global_shape)
    return grids


def fingerprint(path: str) -> str:
    """Identifies what this rank sees of a checkpoint; "" if it sees none.

    It covers the names, sizes and both ends of the index files.

    Raises:
        OSError: a file exists but can't be read.
    """
    seen = hashlib.blake2b(digest_size=16)
    found = False
    for name in _INDEX_FILES:
        try:
            with open(os.path.join(path, name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = file.read(_EDGE)
                file.seek(max(0, size - _EDGE))
                seen.update(f"{name} {size}\n".encode() + begin + file.read(_EDGE))
        except (FileNotFoundError, NotADirectoryError):
            continue
        found = True
    return seen.hexdigest() if found else ""


def fingerprint_of_run(path: str | None) -> str:
    """Identifies what this rank sees of a run's directory; "" if it sees no checkpoint.

    Raises:
        OSError: the tracker exists but can't be read.
        StorageError: the directory can't be read.
    """
    if path is None:
        return ""
    try:
        with open(names.get_checkpoint_tracker_filename(path), "rb") as file:
            tracker = repr(file.read(_EDGE))
    except (FileNotFoundError, NotADirectoryError):
        tracker = ""
    iterations = names.stored_iterations(path)
    return f"{tracker} {iterations}" if tracker or iterations else ""
