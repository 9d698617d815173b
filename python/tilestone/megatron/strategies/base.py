"""What a strategy is: how one part of a checkpoint is saved or loaded, and which are known.

Tilestone's own strategies only say what the engine shall do: `save` and `load` then hand all of it
to the engine in one call (`engine_options`). A strategy of a user's own is called as Megatron-Core
calls it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from typing import Any, DefaultDict

from tilestone._errors import UnsupportedError
from tilestone.megatron.mapping import ShardedStateDict, StateDict
from tilestone.megatron.strategies.async_utils import AsyncRequest

Directory = str | os.PathLike[str]


class StrategyAction(Enum):
    """What a strategy does, and with which part of a checkpoint."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


# By action and (backend, version).
default_strategies: DefaultDict[str, dict[tuple[str, int], Any]] = defaultdict(dict)


def _register_own() -> None:
    """Tilestone's strategies, where nobody has registered another one."""
    from tilestone.megatron.strategies import common, torch, zarr

    common.register_default_common_strategies()
    torch.register_default_torch_strategies()
    zarr.register_default_zarr_strategies()


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """The strategy that is registered for a backend.

    Args:
        action: save or load, of sharded or common state.
        backend: the name of the format: "torch_dist" or "zarr" of sharded state, "torch" of common
            state.
        version: of the format.

    Raises:
        CheckpointingException: there is none; the message names those that there are.
    """
    _register_own()
    known = default_strategies[action.value]
    try:
        return known[(backend, version)]
    except (KeyError, TypeError):
        raise UnsupportedError(
            f"Cannot find a default strategy for: {(action.value, backend, version)}",
            hint=f"known are: {', '.join(map(str, sorted(known)))}",
        ) from None


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: Any
) -> None:
    """Makes a strategy the one for a backend; it stays that, and replaces one of Tilestone's own.

    Args:
        action: what the strategy does.
        backend, version: the format that it is for.
        strategy: a SaveStrategyBase or LoadStrategyBase.
    """
    default_strategies[action.value][(backend, version)] = strategy


def register_own(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """As register_default_strategy, but one that is registered already stays."""
    default_strategies[action.value].setdefault((backend, version), strategy)


class LoadStrategyBase(ABC):
    """Loads a part of a checkpoint, and says which checkpoints it can load."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raises where checkpoints of this backend can't be loaded."""
        raise NotImplementedError

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises where checkpoints of this version of the backend can't be loaded."""
        raise NotImplementedError

    @property
    def can_handle_sharded_objects(self) -> Any:
        """Whether it loads ShardedObjects."""
        return False


class SaveStrategyBase(ABC):
    """Saves a part of a checkpoint in one format.

    Attributes:
        backend: the format's name, which `metadata.json` tells.
        version: of the format.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> Any:
        """Whether it saves ShardedObjects."""
        return False

    def __str__(self) -> str:
        return f"{self.__class__.__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads what is saved once for all ranks."""

    @abstractmethod
    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        """The common state."""
        raise NotImplementedError

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> StateDict:
        """The state dict with the loaded object in the place of each ShardedObject."""
        raise NotImplementedError

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """The ShardedObjects of the checkpoint by unique key, without data."""
        if not self.can_handle_sharded_objects:
            return {}
        raise NotImplementedError


class LoadShardedStrategy(LoadStrategyBase):
    """Loads what is saved in parts."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> StateDict:
        """The state dict, of which every leaf is an entity, with what was loaded for each."""
        raise NotImplementedError

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """The tensors of the checkpoint: key -> ShardedTensor of the whole, without data."""
        raise NotImplementedError(
            f"{self.__class__.__name__} doesn't load the metadata of tensors alone"
        )

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """As load_tensors_metadata, with the ShardedObjects by unique key, without data."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise NotImplementedError(
            f"{self.__class__.__name__} doesn't load the metadata of sharded entities alone"
        )

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Removes the tensors whose key begins with the prefix."""
        raise NotImplementedError

    def engine_options(self) -> dict[str, Any] | None:
        """Keywords of `tilestone.load` with which the engine loads as this strategy does.

        None, the default: `load` is called.
        """
        return None


class SaveCommonStrategy(SaveStrategyBase):
    """Saves what is saved once for all ranks."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        """Saves the common state."""
        raise NotImplementedError

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> None:
        """Saves the main replicas of ShardedObjects."""
        raise NotImplementedError


class SaveShardedStrategy(SaveStrategyBase):
    """Saves what is saved in parts."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Saves a state dict of which every leaf is an entity."""
        raise NotImplementedError

    def engine_options(self) -> dict[str, Any] | None:
        """Keywords of `tilestone.save` with which the engine saves as this strategy does.

        None, the default: `save` is called.
        """
        return None


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves in two steps, of which another process may do the second."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> AsyncRequest:
        """Prepares a save, which the caller schedules."""
        raise NotImplementedError

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Prepares the save and does it at once."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
