"""Common state as files of `torch.save`, for strategies of the user."""

from __future__ import annotations

import io
import logging
import os
import pathlib
from typing import Any

import torch

from tilestone import _core
from tilestone._errors import CheckpointError, NotFoundError, UnsafeError, UnsupportedError
from tilestone._options import valid
from tilestone.megatron import _ranks, _stored
from tilestone.megatron.dict_utils import dict_list_map_outplace, nested_values
from tilestone.megatron.mapping import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from tilestone.megatron.strategies.base import (
    Directory,
    LoadCommonStrategy,
    SaveCommonStrategy,
)

logger = logging.getLogger(__name__)

COMMON_STATE_FNAME = _stored.COMMON_FILE
_WRITER = "TorchCommonSaveStrategy"


def _write(value: Any, folder: Directory, name: str) -> None:
    """Writes a file atomically and durably: a reader finds the whole file or none."""
    written = io.BytesIO()
    torch.save(value, written)
    _core.put_file(valid.directory(_stored.literal(folder)), name, written.getvalue())


def _read(path: str) -> Any:
    # On exit the context removes what it was given, so classes that the program itself allows are
    # not passed to it.
    known = torch.serialization.get_safe_globals()
    harmless = [cls for cls in _stored.harmless_classes() if cls not in known]
    try:
        with torch.serialization.safe_globals(harmless):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise UnsafeError(f"can't read {path}: {error}", file=path) from error


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes common state to `common.pt`, and objects to `KEY/shard_OFFSET_SHAPE.pt`."""

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        """Rank 0 writes `common.pt`; other ranks do nothing."""
        valid.refuse_any_url(checkpoint_dir, _WRITER)
        if _ranks.rank() == 0:
            _write(common_state_dict, checkpoint_dir, COMMON_STATE_FNAME)

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> None:
        """Writes a file for each object whose main replica this rank has."""
        valid.refuse_any_url(checkpoint_dir, _WRITER)
        for item in nested_values(sharded_objects_state_dict):
            if is_main_replica(item.replica_id):
                _write(item.data, checkpoint_dir, f"{item.unique_key}.pt")

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads what TorchCommonSaveStrategy writes; code in a file is never executed.

    Only the classes that tensors and the settings of Megatron's programs need are allowed; objects
    of other classes are refused. In checkpoints of a format that Tilestone knows, they come back as
    `tilestone.Opaque` instead.
    """

    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        """Loads the common state, tensors on the CPU.

        Raises:
            CheckpointingException: there is no common state, or it can't be read.
        """
        try:
            return _stored.common_state(checkpoint_dir)
        except (NotFoundError, UnsupportedError):  # the format is one of the user
            path = os.path.join(checkpoint_dir, COMMON_STATE_FNAME)
            try:
                return _read(path)  # type: ignore[no-any-return]
            except FileNotFoundError:
                raise NotFoundError(f"Common file {path} does not exist", file=path) from None

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> StateDict:
        """Replaces each ShardedObject by its object, in a copy of the state dict.

        Raises:
            CheckpointingException: there is no file for an object.
        """

        def loaded(item: Any) -> Any:
            path = os.path.join(checkpoint_dir, f"{item.unique_key}.pt")
            try:
                return _read(path)
            except FileNotFoundError:
                message = f"Object shard {path} not found"
                raise NotFoundError(message, key=item.unique_key, file=path) from None

        made: StateDict = dict_list_map_outplace(loaded, sharded_objects_state_dict)
        return made

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """Returns the objects that have their own files, by unique key, without data."""
        top = pathlib.Path(checkpoint_dir)
        found: ShardedStateDict = {}
        for path in sorted(top.glob("**/shard_*.pt")):
            name = str(path.relative_to(top).with_suffix(""))
            try:
                item = ShardedObject.empty_from_unique_key(name)
            except (CheckpointError, ValueError):
                continue  # a file of the user
            found[item.unique_key] = item
        return found

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Never raises: the engine finds the format by the files. (The argument is a backend.)"""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Never raises, for the same reason."""
