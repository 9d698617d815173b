"""The distribution of shards to the ranks of a group, which agree on it and mark it in entities."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Group
from tilestone.megatron._shards.held import bytes_of, describing
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from tilestone.megatron.utils import _ShardId, _sharded_tensor_shard_id

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """Which rank of a process group writes each shard, or reads it for the others.

    Ranks are group ranks; the distribution does not contain the group.

    Attributes:
        main_rank_for_shard: the rank that writes or reads the shard.
        shards_in_this_group: the shards that are distributed: those whose main replica is in the
            group; for a load, all.
        shard_to_metadata: entities without data, also of other groups' shards.
        all_ranks_for_shard: the ranks that hold a shard, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: Mapping[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def _sortable(shard_id: Any) -> Any:
    """An id that can be compared with any other id: None comes before everything."""
    if not isinstance(shard_id, tuple):
        return shard_id
    return tuple(() if part is None else part for part in shard_id)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
) -> dict[T, int]:
    """Assigns each shard to one of its holders, so that all ranks get about equally many bytes.

    Shards with few holders come first; among these, large ones; among these, the order of their
    ids. Each goes to the holder with the fewest bytes so far (the lowest rank if several). The
    result is the same as Megatron-Core's.

    Args:
        shard_to_ranks: the holders of each shard, at least one.
        shard_to_size: size of each shard in bytes.
        num_ranks: number of ranks of the group; ranks are 0 to num_ranks - 1.
        cross_parallelization_group_loads: shards whose main replica is in another group: they come
            last.

    Raises:
        InvalidArgumentError: a shard has no holders, or a rank is outside the group.
    """
    outside = set(cross_parallelization_group_loads)
    order = sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in outside,
            len(shard_to_ranks[shard]),
            -int(shard_to_size[shard]),
            _sortable(shard),
        ),
    )
    bytes_of_rank = [0] * num_ranks
    # For the ranks of each set of holders, (bytes, rank): the bytes may be those of an earlier
    # time, and only grow.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    chosen = {}
    for shard in order:
        holders = tuple(shard_to_ranks[shard])
        if holders not in heaps:
            if not holders or min(holders) < 0 or max(holders) >= num_ranks:
                raise InvalidArgumentError(
                    f"the shard {shard} is held by the ranks {holders}, and the group has {num_ranks}"
                )
            heaps[holders] = sorted((bytes_of_rank[rank], rank) for rank in set(holders))
        heap = heaps[holders]
        while heap[0][0] != bytes_of_rank[heap[0][1]]:
            heapq.heapreplace(heap, (bytes_of_rank[heap[0][1]], heap[0][1]))
        rank = chosen[shard] = heap[0][1]
        bytes_of_rank[rank] += int(shard_to_size[shard])
    return chosen


def agree_on_distribution(
    state_of: Callable[[], Any], group: dist.ProcessGroup, ignore_groups: bool = False
) -> ShardDistribution:
    """Distributes the shards that the ranks of a group hold. Every rank of the group calls.

    Args:
        state_of: returns this rank's state dict, whose ShardedTensors are distributed; if it
            raises, every rank raises the same.
        group: a group of more than one rank.
        ignore_groups: distribute shards whose main replica is in another group, too.

    Raises:
        CheckpointError: any rank failed; the same on every rank.
    """

    def shards() -> list[tuple[_ShardId, ShardedTensor]]:
        found = []
        for item in nested_values(state_of()):
            if isinstance(item, ShardedTensor):
                with describing(item):
                    found.append((_sharded_tensor_shard_id(item), item.without_data()))
        return found

    def decide(said: list[list[tuple[_ShardId, ShardedTensor]]]) -> ShardDistribution:
        return _distributed(said, ignore_groups)

    work = "distribution of a load" if ignore_groups else "distribution of a save"
    try:
        made: ShardDistribution = _ranks.agreed(work, group, shards, list, decide)[1]
        return made
    except CheckpointError as error:
        if 0 <= error.rank < dist.get_world_size(group):
            error.rank = dist.get_global_rank(group, error.rank)
        raise


def _distributed(
    said: list[list[tuple[_ShardId, ShardedTensor]]], ignore_groups: bool
) -> ShardDistribution:
    """`said`: the shards of each rank, as it lists them."""
    found: dict[_ShardId, ShardedTensor] = {}
    holders: dict[_ShardId, list[int]] = {}
    mains: set[_ShardId] = set()
    for rank, shards in enumerate(said):
        for shard_id, shard in shards:
            found.setdefault(shard_id, shard)
            holders.setdefault(shard_id, []).append(rank)
            if is_main_replica(shard.replica_id):
                mains.add(shard_id)
    chosen = {shard: holders[shard] for shard in found if ignore_groups or shard in mains}
    sizes = {shard: bytes_of(found[shard]) for shard in chosen}
    given = distribute_shards_to_ranks(chosen, sizes, len(said), chosen.keys() - mains)
    return ShardDistribution(given, set(given), found, chosen)


class Distributes:
    """Base of both wrappers: makes distributions."""

    do_cache_distribution: bool
    cached_distribution: ShardDistribution | None = None
    _group: Group | None

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
        self, state_of: Callable[[], ShardedStateDict], ignore_groups: bool
    ) -> ShardDistribution | None:
        """Returns the distribution; None if no other rank shares the work."""
        group = self._sharing()
        found = None if group is None else agree_on_distribution(state_of, group, ignore_groups)
        if self.do_cache_distribution:
            self.cached_distribution = found
        return found

    def _apply(
        self, sharded_state_dict: ShardedStateDict, distribution: ShardDistribution | None
    ) -> None:
        """Sets the replica ids of a state dict as the distribution says."""
        if distribution is not None:
            distribute_main_replicas_with_precomputed_distribution(
                sharded_state_dict, self.parallelization_group, distribution
            )


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
