"""What the ranks hold of a state: descriptions in a compact form, and checks of all together.

Ranks that hold replicas of one another list the same shards. So each distinct list is sent once and
identified by its digest, and each rank has a bit mask of its main replicas. That the parts of all
ranks make whole tensors and objects is checked by the engine (`_core.check_access`).
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, List, Tuple

import torch

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Deadline, agreed
from tilestone.megatron._shards.entities import boxes_of
from tilestone.megatron.dict_utils import diff, nested_values
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from tilestone.megatron.utils import _ShardId, _sharded_tensor_shard_id


def bytes_of(shard: ShardedTensor) -> int:
    """The size in bytes of a rank's elements of a shard."""
    flat = getattr(shard, "flattened_range", None)
    count = math.prod(shard.local_shape) if flat is None else flat.stop - flat.start
    return int(count) * shard.dtype.itemsize


def without_data(entities: Iterable[Any]) -> list[Any]:
    """The entities as other ranks get them."""
    return [entity.without_data() for entity in entities]


def packed(value: Any) -> bytes:
    """A large value for the other ranks."""
    return zlib.compress(pickle.dumps(value), 1)


def unpacked(words: bytes) -> Any:
    """Reverses packed()."""
    return pickle.loads(zlib.decompress(words))


@dataclass
class ShardList:
    """The shards that one rank holds.

    Attributes:
        shards: in the order of the state dict.
        digest: 16 bytes, equal for lists that differ only in replica ids.
        mains: bit i is 1 if shard i is a main replica.
    """

    shards: list[ShardedTensor]
    digest: bytes
    mains: int

    @classmethod
    def of(cls, sharded_state_dict: Any) -> ShardList:
        """Lists the tensors of a state dict.

        Raises:
            InvalidArgumentError: an entity lacks an attribute, or has a wrong one.
        """
        shards: list[ShardedTensor] = []
        places, mains = [], 0
        for item in nested_values(sharded_state_dict):
            if not isinstance(item, ShardedTensor):
                continue
            try:
                mains |= int(is_main_replica(item.replica_id)) << len(shards)
                place = _sharded_tensor_shard_id(item)
                places.append((place, item.dtype, tuple(item.local_shape), tuple(item.global_shape)))
            except (AttributeError, TypeError, ValueError) as error:
                key = str(getattr(item, "key", ""))
                raise InvalidArgumentError(
                    f"an entity has wrong attributes: {error}", key=key
                ) from error
            shards.append(item)
        digest = hashlib.blake2b(repr(places).encode("utf-8", "replace"), digest_size=16).digest()
        return cls(shards, digest, mains)


@dataclass
class Union:
    """All shards of a group, by id, in the order in which ranks 0, 1, ... list them.

    Attributes:
        shards: the shard of the lowest rank that lists it.
        holders: the ranks of the group that list it, ascending. A rank that lists a shard twice
            occurs twice. Shards with equal holders share one list object.
        mains: shards whose main replica is in the group.
    """

    shards: dict[_ShardId, ShardedTensor] = field(default_factory=dict)
    holders: dict[_ShardId, list[int]] = field(default_factory=dict)
    mains: set[_ShardId] = field(default_factory=set)


def union_of(
    lists: Sequence[list[ShardedTensor]], classes: Sequence[int], mains: Sequence[int]
) -> Union:
    """Merges the lists of a group.

    Args:
        lists: the distinct lists, in the order of the lowest ranks that have them.
        classes: for each rank, the number of its list.
        mains: for each list, a bit mask of the shards whose main replica is on any rank that has
            the list.
    """
    union = Union()
    listed_in: dict[_ShardId, list[int]] = {}
    for number, shards in enumerate(lists):
        for place, shard in enumerate(shards):
            shard_id = _sharded_tensor_shard_id(shard)
            union.shards.setdefault(shard_id, shard)
            listed_in.setdefault(shard_id, []).append(number)
            if mains[number] >> place & 1:
                union.mains.add(shard_id)
    ranks_of: list[list[int]] = [[] for _ in lists]
    for rank, number in enumerate(classes):
        ranks_of[number].append(rank)
    shared: dict[tuple[int, ...], list[int]] = {}
    for shard_id, numbers in listed_in.items():
        key = tuple(numbers)
        if key not in shared:
            shared[key] = sorted(rank for number in key for rank in ranks_of[number])
        union.holders[shard_id] = shared[key]
    return union


_WORK = "check of the ranks' entities"
_Part = Tuple[str, str, Tuple[int, ...], Tuple[int, ...], Tuple[int, ...], bool]


@dataclass
class HeldEntities:
    """A description of the entities that a rank holds.

    Attributes:
        encoded: the description, as `_core.check_access` takes it.
        problem: why the entities can't be encoded; empty if they can.
        key: key of the entity that can't be encoded.
        packed: the entities, for callers that need them.
    """

    encoded: bytes
    problem: str = ""
    key: str = ""
    packed: bytes = b""


class AllRanks(Sequence[List[Any]]):
    """The entities of every rank, without data. A rank's entities are unpacked on access."""

    def __init__(self, ranks: Sequence[HeldEntities]) -> None:
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        _encoded(rank, self.ranks[rank])  # raises if they could not be described
        return unpacked(self.ranks[rank].packed)

    def __iter__(self) -> Iterator[List[Any]]:
        return (self[rank] for rank in range(len(self)))


def gather(
    entities: Sequence[Any], group: torch.distributed.ProcessGroup | None = None
) -> AllRanks:
    """Collects the entities of every rank of a group. Every rank calls.

    Args:
        entities: this rank's entities, without data.
        group: None: the ranks of the call that is under way, or the default group.

    Raises:
        CheckpointingException: on every rank, if any rank failed.
    """

    def described() -> HeldEntities:
        mine = held_by(entities)
        if not mine.problem:
            mine.packed = packed(without_data(entities))
        return mine

    _, held = agreed(_WORK, _ranks.default_group(group), described, lambda mine: mine, list)
    return AllRanks(held)


def held_by(entities: Iterable[Any]) -> HeldEntities:
    """Describes a rank's entities."""
    tensors: list[_Part] = []
    objects: list[Tuple[str, bool]] = []
    key = ""
    try:
        for entity in entities:
            key = entity.key
            main = is_main_replica(entity.replica_id)
            if isinstance(entity, ShardedObject):
                objects.append((entity.unique_key, main))
            else:
                tensors += _parts(entity, main)
        return HeldEntities(_core.encode_access(tensors, objects))
    except CheckpointError as error:
        return HeldEntities(b"", error.message, error.key or key)
    except (AttributeError, TypeError, ValueError) as error:
        return HeldEntities(b"", f"an entity has wrong attributes: {error}", key)


def _parts(entity: Any, main: bool) -> list[_Part]:
    """The boxes of a tensor that an entity consists of; an empty box for an empty slice."""
    dtype = str(entity.dtype).removeprefix("torch.")
    shape = tuple(entity.global_shape)
    flat = getattr(entity, "flattened_range", None)
    boxes = boxes_of(
        entity.local_shape,
        entity.global_offset,
        entity.prepend_axis_num,
        None if flat is None else (flat.start, flat.stop),
    )
    nothing = (0,) * len(shape)
    full = [box for box in boxes if math.prod(box[1])] or [(nothing, nothing)]
    return [(entity.key, dtype, shape, *box, main) for box in full]


def check_access(global_metadata: Iterable[Iterable[Any]]) -> None:
    """Checks the entities of all ranks.

    Args:
        global_metadata: for each rank its ShardedTensors and ShardedObjects, with or without data.

    Raises:
        CheckpointingException: ranks describe a tensor or object differently, or main replicas
            overlap, leave a part out or exceed the tensor. The message names the key and the ranks.
            The same metadata gives the same error on every rank.
    """
    if isinstance(global_metadata, AllRanks):
        ranks: Sequence[HeldEntities] = global_metadata.ranks
    else:
        ranks = [held_by(entities) for entities in global_metadata]
    _core.check_access([_encoded(rank, held) for rank, held in enumerate(ranks)])


def _encoded(rank: int, held: HeldEntities) -> bytes:
    """Returns what `_core.check_access` takes.

    Raises:
        InvalidArgumentError: the rank's entities could not be described.
    """
    if held.problem:
        text = f"Invalid access pattern: the entities of rank {rank}: {held.problem}"
        raise InvalidArgumentError(text, key=held.key)
    return held.encoded


def check_together(
    entities_of: Callable[[], Iterable[Any]],
    group: torch.distributed.ProcessGroup | None,
    deadline: Deadline | None = None,
) -> None:
    """Checks the entities of all ranks, on one rank for all. Every rank calls.

    Args:
        entities_of: returns this rank's entities; if it raises, every rank raises the same.
        group: the ranks; None: those of the call that is under way, or the default group, or this
            process without torch.distributed.
        deadline: None: that of the call that is under way, or the default one.

    Raises:
        CheckpointingException: as check_access; on every rank.
    """
    group = _ranks.default_group(group)
    if group is None:
        check_access([entities_of()])
        return
    rank = _ranks.rank(group)

    def described() -> bytes:
        return _encoded(rank, held_by(entities_of()))

    agreed(_WORK, group, described, bytes, _core.check_access, deadline)


logger = logging.getLogger("tilestone.megatron.validation")  # as in Megatron-Core


def log_differences(common_state_dict: CommonStateDict, group: Any = None) -> None:
    """Logs the differences on each rank whose common state differs from rank 0's. All ranks call.

    Hashes are compared first. Rank 0 sends its state to the others only if a hash differs.
    """
    distributed = torch.distributed
    group = _ranks.default_group(group)
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return
    rank = distributed.get_rank(group)
    problem, pickled = _pickled(common_state_dict)
    digests: list[Any] = [None] * distributed.get_world_size(group)
    own = None if problem else hashlib.blake2b(pickled, digest_size=16).digest()
    distributed.all_gather_object(digests, own, group=group)
    if digests[0] is not None and len(set(digests)) == 1:
        return
    first: list[Any] = [(problem, pickled) if rank == 0 else None]
    distributed.broadcast_object_list(first, group=group, group_src=0)
    problem, pickled = first[0]
    if problem is not None:
        raise InvalidArgumentError(f"common state can't be compared: {problem}", rank=0)
    if rank == 0 or digests[0] == digests[rank]:
        return
    try:
        of_rank_0 = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)
        only_first, only_here, mismatched = diff(of_rank_0, common_state_dict)
    except Exception as error:  # the states differ whether or not this rank can say where
        logger.warning(
            f"Rank {rank} common state dict differs from rank 0 common state dict. Where they "
            f"differ can't be found: {type(error).__name__}: {error}"
        )
        return
    if only_first or only_here or mismatched:
        logger.warning(
            f"Rank {rank} common state dict differs from rank 0 common state dict. "
            f"Keys only on rank 0: {only_first}, "
            f"Keys only on {rank}: {only_here}, "
            f"Mismatched keys: {mismatched}"
        )


def _pickled(common_state_dict: CommonStateDict) -> tuple[str | None, bytes]:
    """(why it can't be pickled, or its pickle): told in any case, so that no rank waits in vain."""
    try:
        written = io.BytesIO()
        torch.save(common_state_dict, written)  # pickle itself can't restore every dtype of torch
        return None, written.getvalue()
    except Exception as error:
        return f"rank 0 can't pickle it: {type(error).__name__}: {error}", b""
