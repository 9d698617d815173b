"""Agrees on which rank of a group saves or loads a shard, and marks it in the entities."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._shard_distribution import (
    Agreed,
    ShardDistribution,
    agree_on_distribution,
    place_of,
    structure_of,
)
from tilestone.megatron._shard_lists import ShardList
from tilestone.megatron._together import Deadline, Group, deadline_or_default
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import ShardedStateDict, ShardedTensor
from tilestone.megatron.utils import _sharded_tensor_shard_id


class Distributes:
    """Base of both wrappers: makes distributions, and keeps one from call to call."""

    do_cache_distribution: bool
    cached_distribution: ShardDistribution | None
    _group: Group | None
    _agreed: Agreed | None = None
    _agreed_by: Group | None = None

    @property
    def parallelization_group(self) -> Group | None:
        """The ranks that share the work: the given group, or all ranks of the save or load that is
        under way, or the default group; None without torch.distributed."""
        return _ranks.default_group(self._group)

    @parallelization_group.setter
    def parallelization_group(self, group: Group | None) -> None:
        self._group = group

    def _sharing(self) -> Group | None:
        """The ranks that share the work; None if there is only one.

        Raises:
            InvalidArgumentError: some of them take no part in the save or load under way.
        """
        group = self.parallelization_group
        if group is None or _ranks.size(group) <= 1:
            return None
        here = _ranks.group_of_call()
        if here is not None and here is not group:
            members = dist.get_process_group_ranks(here)
            others = sorted(set(dist.get_process_group_ranks(group)) - set(members))
            if others:
                raise InvalidArgumentError(
                    f"the parallelization_group has the ranks {others}, which are not in the "
                    f"process_group of the call (ranks {members})",
                    hint="pass a parallelization_group of ranks that all take part",
                )
        return group

    def _distribution(
        self,
        state_of: Callable[[], ShardedStateDict],
        ignore_groups: bool,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        only_if_checkpoint: bool = False,
        deadline: Deadline | None = None,
    ) -> ShardDistribution | None:
        """Returns the distribution; the kept one if no rank's shards have changed."""
        group = self._sharing()
        if group is None:
            return None
        same_ranks = self._agreed_by is group
        kept = self._agreed if self.do_cache_distribution and same_ranks else None
        if kept is not None and kept.distribution is not self.cached_distribution:
            kept = None  # the caller has replaced or removed it
        if kept is not None and kept.checkpoint_dir != place_of(checkpoint_dir):
            kept = None  # it is for another checkpoint
        agreed = agree_on_distribution(
            state_of, group, ignore_groups, checkpoint_dir, only_if_checkpoint, kept,
            deadline_or_default(deadline).seconds(),
        )  # fmt: skip
        if self.do_cache_distribution:
            self._agreed, self.cached_distribution = agreed, agreed.distribution
            self._agreed_by = group
        return agreed.distribution

    def _apply(
        self, sharded_state_dict: ShardedStateDict, distribution: ShardDistribution | None
    ) -> None:
        """Sets the replica ids of a state dict as the distribution says."""
        if distribution is None:
            return
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, self.parallelization_group, distribution
        )
        if self._agreed is not None and self._agreed.distribution is distribution:
            # The caller may pass the same state dict again, with these replica ids.
            self._agreed.structures.add(structure_of(ShardList.of(sharded_state_dict)))


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group | None,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Gives replica_id 0 to the shards that the distribution assigns to this rank, 1 to the others.

    The entities are changed in place. If a shard occurs twice, only its first entity gets 0.

    Args:
        sharded_state_dict: this rank's state dict.
        parallelization_group: the group of the distribution; None for the default group.
        precomputed_distribution: may be None in a group of one rank, where nothing is done.

    Raises:
        ValueError: there is no distribution.
    """
    group = _ranks.default_group(parallelization_group)
    if _ranks.size(group) <= 1:
        return
    if precomputed_distribution is None:
        raise ValueError(
            "precomputed_distribution must be not None for non-trivial parallelization group"
        )
    rank = dist.get_rank(group)
    seen = set()
    for shard in nested_values(sharded_state_dict):
        if not isinstance(shard, ShardedTensor):
            continue
        shard_id = _sharded_tensor_shard_id(shard)
        mine = precomputed_distribution.main_rank_for_shard.get(shard_id) == rank
        shard.replica_id = 0 if mine and shard_id not in seen else 1
        seen.add(shard_id)
