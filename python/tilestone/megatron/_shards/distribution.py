"""The distribution of shards to the ranks of a group, which agree on it and mark it in entities."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError, MismatchError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Deadline, Group
from tilestone.megatron._shards.held import (
    ShardList,
    bytes_of,
    packed,
    union_of,
    unpacked,
    without_data,
)
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import ShardedStateDict, ShardedTensor
from tilestone.megatron.utils import _ShardId, _sharded_tensor_shard_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WORK = "distribution of shards"


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
    size = {shard: int(shard_to_size[shard]) for shard in shard_to_ranks}
    order = sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in outside,
            len(shard_to_ranks[shard]),
            -size[shard],
            _sortable(shard),
        ),
    )
    sets, holders = _distinct([shard_to_ranks[shard] for shard in order])
    ranks = _core.distribute_shards(
        [size[shard] for shard in order],
        holders,
        [shard in outside for shard in order],
        sets,
        num_ranks,
    )
    return dict(zip(order, ranks, strict=True))


def _distinct(lists: list[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The distinct lists among some lists of ranks, and for each list its number among them."""
    sets: list[list[int]] = []
    numbers: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    last: Sequence[int] | None = None
    for ranks in lists:
        # Neighbours often have the same ranks, and comparing is faster than hashing.
        if ranks is last or ranks == last:
            found.append(found[-1])
            continue
        last, key = ranks, tuple(ranks)
        number = numbers.setdefault(key, len(sets))
        if number == len(sets):
            sets.append(list(key))
        found.append(number)
    return sets, found


@dataclass
class Agreed:
    """A distribution that all ranks of a group have, and may use again.

    Attributes:
        distribution: the same on all ranks.
        token: identifies this agreement; the same on all ranks.
        structures: of this rank's state dicts that it is valid for.
    """

    distribution: ShardDistribution
    token: str
    structures: set[str]


def structure_of(shards: ShardList) -> str:
    """Identifies a rank's shards and which of them are main replicas."""
    return f"{shards.digest.hex()}/{shards.mains:x}"


def agree_on_distribution(
    state_of: Callable[[], Any],
    group: dist.ProcessGroup,
    ignore_groups: bool = False,
    known: Agreed | None = None,
    deadline: Deadline | None = None,
) -> Agreed:
    """Distributes the shards that the ranks of a group hold. Every rank of the group calls.

    First each rank says the digest of its list of shards. Then the lowest rank with each list sends
    it, and rank 0 makes the distribution.

    Args:
        state_of: returns this rank's state dict, whose ShardedTensors are distributed; if it
            raises, every rank raises the same.
        group: a group of more than one rank.
        ignore_groups: distribute shards whose main replica is in another group, too.
        known: an earlier result of this group, which is returned if no rank's shards have changed.
        deadline: None: that of the call that is under way, or the default one.

    Raises:
        CheckpointError: any rank failed; the same on every rank.
    """

    def words(shards: ShardList) -> _Words:
        same = known is not None and structure_of(shards) in known.structures
        token = known.token if known is not None and same else ""
        return _Words(shards.digest, shards.mains, ignore_groups, token, known is not None)

    def decide(said: list[bytes]) -> tuple[str, bytes]:
        lists = [unpacked(each) for each in said if each]
        return secrets.token_hex(8), packed(_distributed(lists, classes, mains, ignore_groups))

    try:
        shards, answer = _ranks.agreed(
            _WORK, group, lambda: ShardList.of(state_of()), words, _distinct_lists, deadline
        )
        if answer is None:
            assert known is not None
            return known
        providers, classes, mains = answer
        provides = dist.get_rank(group) in providers
        _, (token, distribution) = _ranks.agreed(
            _WORK, group, lambda: packed(without_data(shards.shards)) if provides else b"", bytes,
            decide, deadline,
        )  # fmt: skip
    except CheckpointError as error:
        if 0 <= error.rank < dist.get_world_size(group):
            error.rank = dist.get_global_rank(group, error.rank)
        raise
    return Agreed(unpacked(distribution), token, {structure_of(shards)})


class _Words(NamedTuple):
    """What a rank first says."""

    digest: bytes
    mains: int
    for_load: bool
    known: str  # the token of the distribution that it has, if its shards are the same
    had: bool  # whether it has one


def _distinct_lists(said: list[_Words]) -> tuple[list[int], list[int], list[int]] | None:
    """The lowest rank with each list, the number of each rank's list, each list's main replicas.

    None: all ranks have the same distribution, and their shards have not changed.
    """
    first = said[0]
    if any(each.for_load != first.for_load for each in said):
        raise MismatchError("the ranks ask for different distributions (save or load)")
    if first.known and all(each.known == first.known for each in said):
        return None
    if any(each.had for each in said):
        changed = [rank for rank, each in enumerate(said) if not each.known]
        logger.warning(
            "the shards of ranks %s have changed since they were distributed; distributing again",
            changed,
        )
    numbers: dict[bytes, int] = {}
    providers: list[int] = []
    mains: list[int] = []
    for rank, each in enumerate(said):
        if numbers.setdefault(each.digest, len(numbers)) == len(providers):
            providers.append(rank)
            mains.append(0)
        mains[numbers[each.digest]] |= each.mains
    return providers, [numbers[each.digest] for each in said], mains


def _distributed(
    lists: list[list[ShardedTensor]], classes: list[int], mains: list[int], ignore_groups: bool
) -> ShardDistribution:
    union = union_of(lists, classes, mains)
    chosen = [shard for shard in union.shards if ignore_groups or shard in union.mains]
    holders = {shard: union.holders[shard] for shard in chosen}
    given = distribute_shards_to_ranks(
        holders,
        {shard: bytes_of(union.shards[shard]) for shard in chosen},
        len(classes),
        {shard for shard in chosen if shard not in union.mains},
    )
    return ShardDistribution(given, set(given), union.shards, holders)


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
        agreed = agree_on_distribution(state_of, group, ignore_groups, kept, deadline)
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
