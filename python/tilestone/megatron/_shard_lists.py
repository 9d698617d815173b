"""The lists of sharded tensors that the ranks of a group exchange, in a compact form.

Ranks that hold copies of one another list the same shards. So each distinct list is sent once and
identified by its digest, and each rank has a bit mask of its main replicas.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import ShardedTensor, is_main_replica
from tilestone.megatron.utils import _sharded_tensor_shard_id, _ShardId

Row = list[Any]  # a shard's attributes in the order of ShardedTensor, from key on, without data
_REPLICA_ID = 6  # index of the replica id in a row


def numbers(values: Sequence[int]) -> list[int]:
    """Converts ints of any class to plain ones; TypeError for anything else."""
    return [operator.index(value) for value in values]


def replica_of(entity: Any) -> list[int] | int:
    """An entity's replica id in a form for JSON."""
    replica_id = valid.replica(entity.replica_id, entity.key)
    return replica_id[0] if isinstance(entity.replica_id, int) else list(replica_id)


def row_of(shard: ShardedTensor) -> Row:
    """Describes a shard, without its data."""
    flat = getattr(shard, "flattened_range", None)
    return [
        shard.key,
        str(shard.dtype).removeprefix("torch."),
        numbers(shard.local_shape),
        numbers(shard.global_shape),
        numbers(shard.global_offset),
        None if shard.axis_fragmentations is None else numbers(shard.axis_fragmentations),
        replica_of(shard),
        int(shard.prepend_axis_num),
        bool(shard.allow_shape_mismatch),
        None if flat is None else [int(flat.start), int(flat.stop)],
    ]


def as_given(values: list[int] | int | None) -> Any:
    """A shape or replica id from JSON, where tuples have become lists."""
    return tuple(values) if isinstance(values, list) else values


def shard_of(row: Row) -> ShardedTensor:
    """The entity that a row describes, without data."""
    key, dtype, local, whole, offset, fragments, replica_id, prepended, mismatch, flat = row
    return ShardedTensor(
        key,
        None,
        getattr(torch, dtype),
        as_given(local),
        as_given(whole),
        as_given(offset),
        as_given(fragments),
        as_given(replica_id),
        prepended,
        mismatch,
        None if flat is None else slice(*flat),
    )


def bytes_of(row: Row) -> int:
    """The size in bytes of a rank's elements of the shard."""
    dtype: torch.dtype = getattr(torch, row[1])
    flat = row[-1]
    count = math.prod(row[2]) if flat is None else flat[1] - flat[0]
    return int(count) * dtype.itemsize


@dataclass
class ShardList:
    """The shards that one rank holds.

    Attributes:
        rows: one for each shard, in the order of the state dict.
        digest: 16 bytes, equal for lists that differ only in replica ids.
        mains: bit i is 1 if row i is a main replica.
    """

    rows: list[Row]
    digest: bytes
    mains: int

    @classmethod
    def of(cls, sharded_state_dict: Any) -> ShardList:
        """Lists the tensors of a state dict.

        Raises:
            InvalidArgumentError: an entity lacks an attribute, or has a wrong one.
        """
        rows, mains = [], 0
        for item in nested_values(sharded_state_dict):
            if not isinstance(item, ShardedTensor):
                continue
            try:
                rows.append(row_of(item))
                mains |= int(is_main_replica(item.replica_id)) << (len(rows) - 1)
            except (AttributeError, TypeError, ValueError) as error:
                key = str(getattr(item, "key", ""))
                raise InvalidArgumentError(
                    f"an entity has wrong attributes: {error}", key=key
                ) from error
        places = [row[:_REPLICA_ID] + row[_REPLICA_ID + 1 :] for row in rows]
        text = json.dumps(places, separators=(",", ":")).encode()
        return cls(rows, hashlib.blake2b(text, digest_size=16).digest(), mains)

    def encode(self) -> bytes:
        """The rows, compressed."""
        return zlib.compress(json.dumps(self.rows, separators=(",", ":")).encode(), 1)


def decode(encoded: bytes) -> list[Row]:
    """The rows of an encoded list."""
    rows: list[Row] = json.loads(zlib.decompress(encoded))
    return rows


class ShardsByRow(Mapping[_ShardId, ShardedTensor]):
    """Entities by shard id, each made on first access."""

    def __init__(self, rows: dict[_ShardId, Row]) -> None:
        self._rows = rows
        self._made: dict[_ShardId, ShardedTensor] = {}

    def __getitem__(self, shard_id: _ShardId) -> ShardedTensor:
        made = self._made.get(shard_id)
        if made is None:
            made = self._made[shard_id] = shard_of(self._rows[shard_id])
        return made

    def __iter__(self) -> Iterator[_ShardId]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, shard_id: object) -> bool:
        return shard_id in self._rows


@dataclass
class Union:
    """All shards of a group, by id, in the order in which ranks 0, 1, ... list them.

    Attributes:
        rows: row of the lowest rank that lists the shard.
        holders: the ranks of the group that list it, ascending. A rank that lists a shard twice
            occurs twice. Shards with equal holders share one list object.
        mains: shards whose main replica is in the group.
    """

    rows: dict[_ShardId, Row] = field(default_factory=dict)
    holders: dict[_ShardId, list[int]] = field(default_factory=dict)
    mains: set[_ShardId] = field(default_factory=set)


def union_of(lists: Sequence[list[Row]], classes: Sequence[int], mains: Sequence[int]) -> Union:
    """Merges the lists of a group.

    Args:
        lists: the distinct lists, in the order of the lowest ranks that have them.
        classes: for each rank, the number of its list.
        mains: for each list, a bit mask of the shards whose main replica is on any rank that has
            the list.
    """
    union = Union()
    listed_in: dict[_ShardId, list[int]] = {}
    for number, rows in enumerate(lists):
        for place, row in enumerate(rows):
            shard_id = _sharded_tensor_shard_id(_PlaceOnly(row))  # type: ignore[arg-type]
            union.rows.setdefault(shard_id, row)
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


class _PlaceOnly:
    """The attributes that a shard's id is made of, without the checks of an entity."""

    __slots__ = (
        "axis_fragmentations", "flattened_range", "global_offset", "key", "local_shape",
    )  # fmt: skip

    def __init__(self, row: Row) -> None:
        self.key = row[0]
        self.local_shape = row[2]
        self.global_offset = row[4]
        self.axis_fragmentations = row[5]
        self.flattened_range = None if row[-1] is None else slice(*row[-1])
