"""Checks that the parts of all ranks make whole tensors and objects, each exactly once.

The engine does the check (`_core.check_access`): each rank describes its entities in a few bytes,
and the bytes of all ranks are checked together.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, List, Tuple

import torch

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron import _ranks
from tilestone.megatron._places import boxes_of
from tilestone.megatron._shard_lists import as_given, numbers, replica_of, row_of, shard_of
from tilestone.megatron._together import deadline_or_default
from tilestone.megatron.mapping import ShardedObject, is_main_replica

_WORK = "check of the ranks' entities"
_OBJECT_ROW = 4  # entries
_Part = Tuple[str, str, Tuple[int, ...], Tuple[int, ...], Tuple[int, ...], bool]


@dataclass
class HeldEntities:
    """A description of the entities that a rank holds.

    Attributes:
        encoded: the description, as `_core.check_access` takes it.
        problem: why the entities can't be encoded; empty if they can.
        key: key of the entity that can't be encoded.
        packed: rows that describe the entities, for callers that need them.
    """

    encoded: bytes
    problem: str = ""
    key: str = ""
    packed: bytes = b""

    def encode(self) -> bytes:
        """The bytes that are sent to other ranks."""
        return _framed([self.encoded, self.problem.encode(), self.key.encode(), self.packed])

    @classmethod
    def decode(cls, words: bytes) -> HeldEntities:
        """Reverses encode()."""
        encoded, problem, key, packed = _unframed(words)
        return cls(encoded, problem.decode(), key.decode(), packed)


def _framed(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one: their number, their lengths, their bytes."""
    return struct.pack(f"<Q{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unframed(words: bytes) -> list[bytes]:
    """Reverses _framed()."""
    (count,) = struct.unpack_from("<Q", words)
    begin, parts = 8 * (count + 1), []
    for length in struct.unpack_from(f"<{count}Q", words, 8):
        parts.append(words[begin : begin + length])
        begin += length
    return parts


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
        return [_entity_of(row) for row in json.loads(zlib.decompress(self.ranks[rank].packed))]

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

    def say(round: int, answer: bytes) -> bytes:
        mine = held_by(entities)
        if not mine.problem:
            rows = [_row_of(entity) for entity in entities]
            mine.packed = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
        return mine.encode()

    answer = _core.agree(
        _WORK,
        TorchCommunicator(_ranks.default_group(group)),
        say,
        lambda round, said: (_framed(said), True),
        deadline_or_default(None).seconds(),
    )
    return AllRanks([HeldEntities.decode(words) for words in _unframed(answer)])


def _row_of(entity: Any) -> list[Any]:
    """An entity as a JSON row; the row of an object is shorter."""
    if not isinstance(entity, ShardedObject):
        return row_of(entity)
    place = [numbers(entity.global_shape), numbers(entity.global_offset)]
    return [entity.key, *place, replica_of(entity)]


def _entity_of(row: list[Any]) -> Any:
    """The entity that a row describes, without data."""
    if len(row) != _OBJECT_ROW:
        return shard_of(row)
    key, shape, offset, replica_id = row
    return ShardedObject(key, None, tuple(shape), tuple(offset), as_given(replica_id))


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
    seconds: float | None = None,
) -> None:
    """Checks the entities of all ranks, on one rank for all. Every rank calls.

    Args:
        entities_of: returns this rank's entities; if it raises, every rank raises the same.
        group: the ranks; None: those of the call that is under way, or the default group, or this
            process without torch.distributed.
        seconds: time limit, infinity for no limit; None: what the call that is under way has left,
            or the default time limit.

    Raises:
        CheckpointingException: as check_access; on every rank.
    """
    group = _ranks.default_group(group)
    if group is None:
        check_access([entities_of()])
        return
    rank = _ranks.rank(group)

    def decide(round: int, said: list[bytes]) -> tuple[bytes, bool]:
        _core.check_access(said)
        return b"", True

    _core.agree(
        _WORK,
        TorchCommunicator(group),
        lambda round, answer: _encoded(rank, held_by(entities_of())),
        decide,
        deadline_or_default(None).seconds() if seconds is None else seconds,
    )
