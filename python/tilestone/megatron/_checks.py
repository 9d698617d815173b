"""Checks between ranks: that the parts of all make whole tensors and objects, each exactly once, and that
the common states are equal.

The engine checks the parts (`_core.check_access`): each rank describes its entities in a few bytes,
and the bytes of all ranks are checked together.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import pickle
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
from tilestone.megatron._entities import boxes_of
from tilestone.megatron._ranks import deadline_or_default
from tilestone.megatron._shard_lists import as_given, numbers, replica_of, row_of, shard_of
from tilestone.megatron.dict_utils import diff
from tilestone.megatron.mapping import CommonStateDict, ShardedObject, is_main_replica

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


logger = logging.getLogger("tilestone.megatron.validation")  # as in Megatron-Core


class _Hashed:
    """A file that only computes a hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> str:
        return self._hash.hexdigest()


class _HashingPickler(pickle.Pickler):
    """Pickles tensors by their content, because torch's own pickles contain addresses."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or type(item) not in _PLAIN_TENSORS:
            return NotImplemented
        if item.layout != torch.strided or item.is_quantized or item.is_meta:
            return NotImplemented
        packed = item.detach().cpu().contiguous()
        # Not reshape(-1): a contiguous tensor of one element may have any strides.
        flat = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
        elements = pickle.PickleBuffer(flat.numpy().data)
        return (str, (str((item.dtype, tuple(item.shape))), elements))


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _digest(value: Any) -> str | None:
    """A hash that is equal for values with equal pickles; None: the value can't be pickled."""
    hashed = _Hashed()
    try:
        _HashingPickler(hashed, protocol=5).dump(value)
    except Exception:  # any object of the program may raise; it is then compared value by value
        return None
    return hashed.digest()


def log_differences(common_state_dict: CommonStateDict, group: Any = None) -> None:
    """Logs the differences on each rank whose common state differs from rank 0's. All ranks call.

    Hashes are compared first. Rank 0 sends its state to the others only if a hash differs.
    """
    distributed = torch.distributed
    group = _ranks.default_group(group)
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return
    rank = distributed.get_rank(group)
    digests: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(digests, _digest(common_state_dict), group=group)
    if digests[0] is not None and len(set(digests)) == 1:
        return
    first: list[Any] = [_sendable(common_state_dict) if rank == 0 else None]
    distributed.broadcast_object_list(first, group=group, group_src=0)
    problem, pickled = first[0]
    if problem is not None:
        raise InvalidArgumentError(f"common state can't be compared: {problem}", rank=0)
    if rank == 0 or (digests[0] is not None and digests[0] == digests[rank]):
        return
    try:
        of_rank_0 = torch.load(io.BytesIO(pickled), weights_only=False)
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


def _sendable(common_state_dict: CommonStateDict) -> tuple[str | None, bytes]:
    """(why it can't be pickled, or its pickle): sent in any case, so that no rank waits in vain."""
    try:
        written = io.BytesIO()
        torch.save(common_state_dict, written)  # pickle itself can't restore every dtype of torch
        return None, written.getvalue()
    except Exception as error:
        return f"rank 0 can't pickle it: {type(error).__name__}: {error}", b""
