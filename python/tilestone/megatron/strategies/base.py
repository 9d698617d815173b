"""Base classes and registry of strategies. A strategy saves or loads one part of a checkpoint.

Tilestone's own strategies only give options for the engine (`engine_options`): `save` and `load`
then make one call of the engine for the whole checkpoint. A strategy class of the user is called as
Megatron-Core calls it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from typing import Any, DefaultDict

from tilestone._errors import UnsupportedError
from tilestone.megatron.mapping import ShardedStateDict, StateDict
from tilestone.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest

Directory = str | os.PathLike[str]


class StrategyAction(Enum):
    """What a strategy does, and on which part of a checkpoint."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


# By action and (backend, version).
default_strategies: DefaultDict[str, dict[tuple[str, int], Any]] = defaultdict(dict)

async_calls = AsyncCallsQueue()


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Returns the strategy that is registered for a backend.

    Args:
        action: save or load, of sharded or common state.
        backend: name of the format: "torch_dist" or "zarr" for sharded state, "torch" for common
            state.
        version: version of the format.

    Raises:
        CheckpointingException: there is none; the message lists the existing ones.
    """
    known = default_strategies[action.value]
    try:
        return known[(backend, version)]
    except (KeyError, TypeError):
        raise UnsupportedError(
            f"Cannot find a default strategy for: {(action.value, backend, version)}",
            hint=f"registered are: {', '.join(map(str, sorted(known)))}",
        ) from None


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: Any
) -> None:
    """Registers a strategy for a backend permanently. It may replace one of Tilestone's own.

    Args:
        action: what the strategy does.
        backend, version: the format that the strategy is for.
        strategy: a SaveStrategyBase or LoadStrategyBase.
    """
    default_strategies[action.value][(backend, version)] = strategy


class LoadStrategyBase(ABC):
    """Loads a part of a checkpoint, and checks which checkpoints it can load."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raises if checkpoints of this backend can't be loaded."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises if checkpoints of this version of the backend can't be loaded."""

    @property
    def can_handle_sharded_objects(self) -> Any:
        """Whether the strategy loads ShardedObjects."""
        return False


class SaveStrategyBase(ABC):
    """Saves a part of a checkpoint in one format.

    Attributes:
        backend: name of the format, which is written to `metadata.json`.
        version: version of the format.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> Any:
        """Whether the strategy saves ShardedObjects."""
        return False

    def __str__(self) -> str:
        return f"{self.__class__.__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads the state that is saved once for all ranks."""

    @abstractmethod
    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        """Loads the common state."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> StateDict:
        """Replaces each ShardedObject of a state dict by the loaded object."""

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """Returns the ShardedObjects of the checkpoint by unique key, without data."""
        if not self.can_handle_sharded_objects:
            return {}
        raise NotImplementedError


class LoadShardedStrategy(LoadStrategyBase):
    """Loads the state that is saved in parts."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> StateDict:
        """Loads each leaf of a state dict; every leaf is an entity."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """Returns key -> ShardedTensor of the whole tensor, without data, for the checkpoint."""
        raise NotImplementedError(
            f"{self.__class__.__name__} can't load the metadata of tensors"
        )

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> ShardedStateDict:
        """Returns the tensors, and the ShardedObjects by unique key, all without data."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise NotImplementedError(
            f"{self.__class__.__name__} can't load the metadata of sharded entities"
        )

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Removes the tensors whose keys begin with the prefix."""
        raise NotImplementedError

    def engine_options(self) -> dict[str, Any] | None:
        """Keyword arguments of `tilestone.load` with which the engine does the same as `load`.

        None, the default: the strategy's `load` is called instead.
        """
        return None


class SaveCommonStrategy(SaveStrategyBase):
    """Saves the state that is saved once for all ranks."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        """Saves the common state."""

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> None:
        """Saves the main replicas of ShardedObjects."""
        raise NotImplementedError


class SaveShardedStrategy(SaveStrategyBase):
    """Saves the state that is saved in parts."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Saves a state dict whose leaves are all entities."""

    def engine_options(self) -> dict[str, Any] | None:
        """Arguments of `engine_calls.engine_save` with which the engine does the same as `save`.

        None, the default: the strategy's `save` is called instead.
        """
        return None


def engine_options_of(strategy: Any) -> dict[str, Any] | None:
    """The options of a strategy for the engine; None if it saves or loads without the engine."""
    options = getattr(strategy, "engine_options", None)
    return None if options is None else options()


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves in two steps; another process may do the second one."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> AsyncRequest:
        """Prepares a save, which the caller schedules."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Prepares the save and executes it at once."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
