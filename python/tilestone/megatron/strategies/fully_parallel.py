"""Saves and loads that are divided among the ranks that hold replicas of the same shards.

With a strategy of Tilestone, the engine shares the work among all ranks, as it does without these
wrappers. Any other strategy saves or loads one rank's share per call, as in Megatron-Core, and this
module exchanges what was loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Group, together
from tilestone.megatron._shards import held
from tilestone.megatron._shards.distribution import (
    Distributes,
    distribute_main_replicas_with_precomputed_distribution,
)
from tilestone.megatron.core import CheckpointingException
from tilestone.megatron.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    nested_values,
)
from tilestone.megatron.exchange_utils import (
    ShardDistribution,
    check_loaded,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
)
from tilestone.megatron.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from tilestone.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    engine_options_of,
)
from tilestone.megatron.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
    copied,
)

logger = logging.getLogger(__name__)

class FullyParallelSaveStrategyWrapper(Distributes, AsyncSaveShardedStrategy):
    """Divides a save among the ranks that hold replicas of the same shards.

    No data moves: the ranks exchange what they hold, and each shard is saved by the rank that
    Megatron-Core's distribution names; with a strategy of Tilestone, by the rank that the engine
    chooses.

    Attributes:
        base_strategy: the strategy that saves.
        parallelization_group: the ranks that share the save; None without torch.distributed.
        do_cache_distribution: keep the last distribution as `cached_distribution`.
        cached_distribution: the last distribution, which no call uses; otherwise None.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Group | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        """
        Args:
            strategy: takes a shard with replica_id 0 as one that this rank saves.
            parallelization_group: ranks that hold replicas of one another's shards, usually the data
                parallel ranks; None: all ranks that save (the `process_group` of
                `tilestone.megatron.save`, otherwise the default group).
            do_cache_distribution: keep the distribution for the caller. Each save makes a new one,
                so no new shard is lost.
        """
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self._group = parallelization_group
        self.do_cache_distribution = do_cache_distribution

    def engine_options(self) -> dict[str, Any] | None:
        """The base strategy's options."""
        return engine_options_of(self.base_strategy)

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> Any:
        """Saves this rank's share with the base strategy. Every rank that saves calls.

        Args:
            sharded_state_dict: its entities get the replica ids that say what this rank saves, see
                apply_saving_parallelization. With a strategy of Tilestone it is not changed.
            checkpoint_dir: as the base strategy requires it.

        Raises:
            CheckpointingException: the shards can't be distributed (on every rank), or as the base
                strategy.
        """
        return self.base_strategy.save(self._share(sharded_state_dict), checkpoint_dir)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> Any:
        """Returns the base strategy's request for saving this rank's share. Every rank calls.

        Raises:
            CheckpointingException: the base strategy can't save asynchronously; or as save().
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async base strategy {self.base_strategy}"
            )
        return self.base_strategy.async_save(self._share(sharded_state_dict), checkpoint_dir)

    def _share(self, sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
        """Returns the base strategy's input: the state dict, with other replica ids if they count.

        The state dict itself is passed on because strategies of the user may look up its entities.
        """
        if self.engine_options() is None:
            self.apply_saving_parallelization(sharded_state_dict)
        return sharded_state_dict

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Gives replica_id 0 to the shards that this rank saves, and 1 to the others, in place.

        Every rank that saves calls. It is checked that all ranks together save each tensor exactly
        once.

        Raises:
            CheckpointingException: the ranks do not hold each tensor exactly once, or the shards
                can't be distributed; on every rank.
        """

        def apply() -> None:
            self._apply(sharded_state_dict, self._distribution(lambda: sharded_state_dict, False))

        together("distribution of a save", _ranks.default_group(None), apply)
        if dist.is_initialized():
            held.check_together(lambda: _entities(sharded_state_dict), None)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the base strategy saves sharded objects too."""
        return bool(self.base_strategy.can_handle_sharded_objects)


def _entities(tree: Any) -> list[ShardedBase]:
    return [item for item in nested_values(tree) if isinstance(item, ShardedBase)]


@dataclass
class _Share:
    """A rank's part of a load: what it has loaded, and which tensors other ranks send it."""

    distribution: ShardDistribution
    tensors: dict[_ShardId, torch.Tensor]
    objects: dict[_ShardId, Any]
    awaited: dict[_ShardId, ShardedTensor]


class FullyParallelLoadStrategyWrapper(Distributes, LoadShardedStrategy):
    """Divides a load among the ranks that need the same shards.

    Attributes:
        base_strategy: the strategy that loads.
        parallelization_group: the ranks that share the load; None without torch.distributed.
        do_cache_distribution: keep the last distribution as `cached_distribution`.
        cached_distribution: the last distribution, which no call uses; otherwise None.
        exchange_algo: how the ranks send one another what they have loaded.
        cached_global_metadata: that of the base strategy, if it has one; set by a load.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Group | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        """
        Args:
            strategy: loads everything that it is given.
            parallelization_group: ranks that need the same shards, usually the data parallel ranks;
                None: all ranks that load (the `process_group` of `tilestone.megatron.load`,
                otherwise the default group).
            do_cache_distribution: as for saves.
            exchange_algo: "broadcast", "gather_rounds" or "gather_object", see exchange_utils;
                ignored with a strategy of Tilestone.
        """
        super().__init__()
        self.base_strategy = strategy
        self._group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_global_metadata: Any = None

    def engine_options(self) -> dict[str, Any] | None:
        """The base strategy's options."""
        return engine_options_of(self.base_strategy)

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Loads a state dict as the base strategy alone would. Every rank of the group calls.

        With a strategy of Tilestone the engine gets the whole state dict, and its ranks read for
        one another. With any other strategy each rank loads its share, and the ranks exchange what
        they have loaded.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects. It is not changed, but the
                tensors in it may be filled.
            checkpoint_dir: as the base strategy requires it.

        Returns:
            The same tree with the loaded values.

        Raises:
            CheckpointingException: the shards can't be distributed, the base strategy failed on any
                rank, or no rank has loaded some shard; on every rank.
        """
        if self._sharing() is None or self.engine_options() is not None:
            # A strategy may replace the entities in what it is given.
            own = dict_list_map_outplace(lambda item: item, sharded_state_dict)
            loaded = self.base_strategy.load(own, checkpoint_dir)
        else:
            loaded = self._load_shared(copied(sharded_state_dict), checkpoint_dir)
        if hasattr(self.base_strategy, "cached_global_metadata"):
            self.cached_global_metadata = self.base_strategy.cached_global_metadata
        return loaded

    def _load_shared(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        share = together(
            "load of a share",
            _ranks.default_group(None),
            lambda: self._load_share(sharded_state_dict, checkpoint_dir),
        )
        all_tensors = exchange_by_distribution(
            share.tensors,
            share.awaited,
            share.distribution,
            self.parallelization_group,
            self.exchange_algo,
        )
        if any(tensor.is_cuda for tensor in all_tensors.values()):
            torch.cuda.synchronize()
        all_objects = exchange_loaded_objects_gather_object(share.objects)

        def fill_in() -> StateDict:
            loaded = {"": sharded_state_dict}
            self.fill_in_deferred_sharded_tensors(loaded, all_tensors)
            self.fill_in_deferred_sharded_objects(loaded, all_objects)
            return loaded[""]

        return together("end of a load", _ranks.default_group(None), fill_in)

    def _load_share(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> _Share:
        """Distributes the load, and loads this rank's share."""
        distribution = self._distribution(lambda: sharded_state_dict, True)
        assert distribution is not None
        self._apply(sharded_state_dict, distribution)
        objects, _ = _by_id(sharded_state_dict, ShardedObject, _sharded_object_id)
        tensors, awaited = _by_id(sharded_state_dict, ShardedTensor, _sharded_tensor_shard_id)
        # The strategy gets a flat dict by id, as in Megatron-Core, and may replace what is in it.
        strategy: Any = self.base_strategy
        loaded_objects = strategy.load(dict(objects), checkpoint_dir)
        loaded = strategy.load(dict(tensors), checkpoint_dir)
        for shard_id, entity in objects.items():
            if shard_id not in loaded_objects:
                raise CheckpointingException(
                    f"{strategy} has not loaded the object {shard_id}", key=entity.unique_key
                )
        for shard_id, shard in tensors.items():
            if shard_id not in loaded:
                raise CheckpointingException(
                    f"{strategy} has not loaded the shard {shard_id}", key=shard.key
                )
            check_loaded(shard, loaded[shard_id])
        return _Share(distribution, loaded, loaded_objects, awaited)

    @staticmethod
    def fill_in_deferred_sharded_objects(
        sharded_state_dict: ShardedStateDict, loaded_objects: dict[_ShardId, Any]
    ) -> None:
        """Replaces every ShardedObject by its loaded value, in place.

        Args:
            sharded_state_dict: the tree.
            loaded_objects: values by _sharded_object_id.

        Raises:
            CheckpointingException: a value is missing.
        """
        _fill_in(sharded_state_dict, loaded_objects, ShardedObject, _sharded_object_id)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: ShardedStateDict, loaded_tensors: dict[_ShardId, torch.Tensor]
    ) -> None:
        """Replaces every ShardedTensor by its loaded tensor, in place.

        Args:
            sharded_state_dict: the tree.
            loaded_tensors: tensors by _sharded_tensor_shard_id.

        Raises:
            CheckpointingException: a tensor is missing.
        """
        _fill_in(sharded_state_dict, loaded_tensors, ShardedTensor, _sharded_tensor_shard_id)

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> ShardDistribution | None:
        """Gives replica_id 0 to the shards that this rank loads, and 1 to the others, in place.

        Every rank of the group calls.

        Args:
            sharded_state_dict: this rank's state dict.

        Returns:
            The distribution; None in a group of one rank.

        Raises:
            CheckpointingException: any rank failed; the same on every rank of the group.
        """
        distribution = self._distribution(lambda: sharded_state_dict, True)
        self._apply(sharded_state_dict, distribution)
        return distribution

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the base strategy loads sharded objects too."""
        return bool(self.base_strategy.can_handle_sharded_objects)

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Calls the base strategy."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Calls the base strategy."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_version: Any) -> Any:
        """Calls the base strategy."""
        return self.base_strategy.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> Any:
        """Calls the base strategy."""
        return self.base_strategy.check_version_compatibility(loaded_version)


def _by_id(
    sharded_state_dict: ShardedStateDict, kind: type[Any], id_of: Callable[[Any], _ShardId]
) -> tuple[dict[_ShardId, Any], dict[_ShardId, Any]]:
    """(main replicas, other replicas) among the entities of a kind, by id."""
    mine: dict[_ShardId, Any] = {}
    others: dict[_ShardId, Any] = {}
    for item in nested_values(sharded_state_dict):
        if isinstance(item, kind):
            (mine if is_main_replica(item.replica_id) else others)[id_of(item)] = item
    return mine, others


def _fill_in(
    sharded_state_dict: ShardedStateDict,
    loaded: dict[_ShardId, Any],
    kind: type,
    id_of: Callable[[Any], _ShardId],
) -> None:
    def filled(item: Any) -> Any:
        if not isinstance(item, kind):
            return item
        shard_id = id_of(item)
        if shard_id not in loaded:
            raise CheckpointingException(
                f"no rank has loaded the shard {shard_id}", key=str(shard_id[0])
            )
        return loaded[shard_id]

    dict_list_map_inplace(filled, sharded_state_dict)
