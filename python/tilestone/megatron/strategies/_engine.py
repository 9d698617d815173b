"""Strategies of which the engine does the work: what the formats' strategies have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tilestone._errors import MismatchError, UnsupportedError
from tilestone.megatron import _parts, _stored
from tilestone.megatron._in_place import save_in_place
from tilestone.megatron.mapping import ShardedStateDict, StateDict
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    Directory,
    LoadShardedStrategy,
)

ASYNC_HINT = (
    "save with async_sharded_save=False, which returns when the checkpoint is durable; asynchronous "
    "saves come later"
)


#: Options of `tilestone.save` that say what is copied.
COPIES = ("replicate", "replicate_group", "max_copy_bytes")


class EngineSaveStrategy(AsyncSaveShardedStrategy):
    """Saves by the engine. `tilestone.megatron.save` calls it once for sharded and common state."""

    #: Further options of `tilestone.save`, of COPIES.
    copies: Mapping[str, Any] = MappingProxyType({})

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Saves the sharded part alone, as Megatron-Core has strategies do it; every rank calls.

        It is a checkpoint once the caller has also written common.pt (before) and metadata.json
        (after): `tilestone.megatron.save` does so for a strategy of a user's own, of which this one
        may be a part. An older metadata.json goes first, and what the directory holds is replaced
        in place, so after a failure no whole checkpoint stands there.

        Args:
            sharded_state_dict: nested dicts and lists of entities.
            checkpoint_dir: its directory, on a file system that all ranks see.

        Raises:
            CheckpointingException: on every rank. UnsupportedError: the format is zarr, of which
                only whole checkpoints are saved.
        """
        save_in_place(sharded_state_dict, checkpoint_dir, **self._options())

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> AsyncRequest:
        """Refused: not yet."""
        raise UnsupportedError("asynchronous saves are not there yet", hint=ASYNC_HINT)

    def engine_options(self) -> dict[str, Any] | None:
        """The format; None where a subclass saves in a way of its own."""
        own = EngineSaveStrategy
        is_own = type(self).save is own.save and type(self).async_save is own.async_save
        return self._options() if is_own else None

    def _options(self) -> dict[str, Any]:
        return {"format": self.backend, **self.copies}

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True


class EngineLoadStrategy(LoadShardedStrategy):
    """Loads by the engine, which finds the format from the files.

    Attributes:
        backend: the format that the strategy is for.
    """

    backend = ""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> StateDict:
        """Loads sharded state alone; every rank calls.

        Returns:
            A state dict of the same nesting with tensors and objects in the entities' places.

        Raises:
            CheckpointingException: on every rank.
        """
        return _parts.load_sharded(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Any = None
    ) -> ShardedStateDict:
        """key -> ShardedTensor of the whole tensor, without data. Ranks call it each for itself.

        Args:
            checkpoint_dir: the checkpoint's directory.
            metadata: without meaning here: the checkpoint's own is read.
        """
        with _stored.open_stored(checkpoint_dir) as checkpoint:
            return _stored.tensors_metadata(checkpoint)

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """The same, with the ShardedObjects by unique key."""
        with _stored.open_stored(checkpoint_dir) as checkpoint:
            return _stored.objects_metadata(checkpoint) | _stored.tensors_metadata(checkpoint)

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Removes tensors and objects whose keys begin with a prefix.

        See `tilestone.megatron.remove_sharded_tensors`.
        """
        _stored.remove_keys(checkpoint_dir, key_prefix)

    def engine_options(self) -> dict[str, Any] | None:
        """Nothing to say; None where a subclass loads in a way of its own."""
        return {} if type(self).load is EngineLoadStrategy.load else None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raises where the checkpoint is of another format.

        Args:
            loaded_version: the checkpoint's backend; the name is Megatron-Core's.
        """
        if loaded_version != self.backend:
            raise MismatchError(
                f"the checkpoint's backend is {loaded_version!r}, and {type(self).__name__} loads "
                f"{self.backend!r}",
                hint="leave sharded_strategy out: the format is found from the files",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises where the version of the format is not known."""
        if loaded_version != 1:
            raise UnsupportedError(
                f"version {loaded_version} of the backend {self.backend!r}; version 1 is known"
            )
