"""The backend "torch_dist": PyTorch's distributed checkpoints, saved and loaded by the engine.

The classes whose names begin with `Engine` are the bases of every backend's.
"""

from __future__ import annotations

from typing import Any

from tilestone._errors import MismatchError, UnsupportedError
from tilestone._options.values import LocalCopies
from tilestone.megatron import _stored, mapping
from tilestone.megatron._calls import engine_calls
from tilestone.megatron._calls.background import save_in_background
from tilestone.megatron._calls.in_place import save_in_place
from tilestone.megatron._stored import StoredEntities
from tilestone.megatron.mapping import ShardedStateDict, StateDict
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    Directory,
    LoadShardedStrategy,
)


class EngineSaveStrategy(AsyncSaveShardedStrategy):
    """Saves with the engine. `tilestone.megatron.save` calls it once for the whole state."""

    #: Local copies, as for `tilestone.megatron.save`.
    copies: LocalCopies | None = None
    #: Whether the index also names each replica of a tensor that tensor-parallel ranks hold.
    tp_replica_names = False
    #: Tensors and objects whose keys begin with it get data files of their own.
    separation_hint: str | None = None

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Saves only the sharded part, as Megatron-Core's strategies do. Every rank calls.

        The result is a checkpoint once the caller has also written common.pt (before) and
        metadata.json (after). `tilestone.megatron.save` does so for a strategy class of the user,
        which may use this one. An older metadata.json is removed first, and the directory is
        changed in place, so after a failure it does not hold a complete checkpoint.

        Args:
            sharded_state_dict: nested dicts and lists of entities.
            checkpoint_dir: the checkpoint's directory, on a file system that all ranks share.

        Raises:
            CheckpointingException: the save failed; on every rank. UnsupportedError: the format is
                zarr, which only supports saves of whole checkpoints.
        """
        save_in_place(sharded_state_dict, checkpoint_dir, **self._options())

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> AsyncRequest:
        """Plans the save of the sharded part, and writes it in the background. Every rank calls.

        As save(). When it returns, the state may change. Nothing is published before the request
        is finalized.

        Returns:
            The request, for `AsyncCallsQueue` here or in Megatron-Core.

        Raises:
            As save().
        """
        request: AsyncRequest = save_in_place(
            sharded_state_dict, checkpoint_dir, save=save_in_background, **self._options()
        )
        return request

    def engine_options(self) -> dict[str, Any] | None:
        """The format and the strategy's own options; None if a subclass overrides the save."""
        own = EngineSaveStrategy
        is_own = type(self).save is own.save and type(self).async_save is own.async_save
        return self._options() if is_own else None

    def _options(self) -> dict[str, Any]:
        return {
            "format": self.backend,
            "copies": self.copies,
            "tp_replica_names": self.tp_replica_names,
            "separation_hint": self.separation_hint or "",
        }

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True


class EngineLoadStrategy(LoadShardedStrategy):
    """Loads with the engine, which finds the format by the files.

    Attributes:
        backend: name of the format that the strategy is for.
    """

    backend = ""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> StateDict:
        """Loads only sharded state. Every rank calls.

        Returns:
            A state dict of the same nesting, with tensors and objects in place of the entities.

        Raises:
            CheckpointingException: the load failed; on every rank.
        """
        return engine_calls.load_sharded(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Any = None
    ) -> ShardedStateDict:
        """Returns key -> ShardedTensor of the whole tensor, without data. Each rank calls alone.

        Args:
            checkpoint_dir: the checkpoint's directory.
            metadata: ignored: the checkpoint's own metadata is read.
        """
        with _stored.open_sharded(checkpoint_dir) as checkpoint:
            return _stored.tensors_metadata(checkpoint)

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """Returns also the ShardedObjects, by unique key."""
        return _stored.sharded_metadata(checkpoint_dir, mapping, StoredEntities)

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Removes tensors and objects whose keys begin with a prefix.

        See `tilestone.megatron.remove_sharded_tensors`.
        """
        _stored.remove_keys(checkpoint_dir, key_prefix)

    def engine_options(self) -> dict[str, Any] | None:
        """No options; None if a subclass overrides the load."""
        return {} if type(self).load is EngineLoadStrategy.load else None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raises if the checkpoint has another format.

        Args:
            loaded_version: the checkpoint's backend (the argument's name is Megatron-Core's).
        """
        if loaded_version != self.backend:
            raise MismatchError(
                f"the checkpoint's backend is {loaded_version!r}, but {type(self).__name__} loads "
                f"{self.backend!r}",
                hint="omit sharded_strategy: the format is found by the files",
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises if the version of the format is not supported."""
        if loaded_version != 1:
            raise UnsupportedError(
                f"version {loaded_version} of the backend {self.backend!r} is not supported; only "
                "version 1 is"
            )


class TorchDistSaveShardedStrategy(EngineSaveStrategy):
    """Saves in PyTorch's format.

    Args:
        backend: name of the format: "torch_dist".
        version: version of the format: 1.
        keep_only_main_replica: ignored: one replica of each part is written, by a rank that the plan
            chooses.
        thread_count: ignored: each rank writes one file, with as many threads as are useful.
        cached_metadata: ignored: each save is planned anew, which takes milliseconds. So a changed
            structure is never saved by an old plan.
        separation_hint: tensors and objects whose keys begin with it get data files of their own,
            whose names begin with it too, so that they can be copied or left out apart from the
            rest. At most 128 bytes that can begin a file's name; None: no such files.
        cpu_shm_mode: ignored: the copies of a save in the background stay in this process.
        copies: local copies, as for `tilestone.megatron.save`, whose own argument takes precedence.
        tp_replica_names: also list, for each tensor KEY that tensor-parallel ranks hold replicas of
            (replica ids of three numbers, the second not 0), the names KEY.__tp_replica_0, _1, ...
            in the index, one for each replica, for programs that ask for these names. They refer to
            the same bytes, and Tilestone itself knows only KEY. Must be the same on every rank.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
        *,
        copies: LocalCopies | None = None,
        tp_replica_names: bool = False,
    ) -> None:
        super().__init__(backend, version)
        self.copies = copies
        self.tp_replica_names = tp_replica_names
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cached_global_metadata: Any = None  # Megatron's programs set it; nothing reads it


class TorchDistLoadShardedStrategy(EngineLoadStrategy):
    """Loads PyTorch's format, as every version of Megatron-Core since 0.9 has written it."""

    backend = "torch_dist"

    def __init__(self) -> None:
        self.cached_global_metadata: Any = None  # Megatron's programs read it; nothing sets it
