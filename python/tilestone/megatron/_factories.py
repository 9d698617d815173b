"""Factories for fused weights: stored as the tensors that they consist of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Tuple

import torch

from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone.megatron._places import with_entry
from tilestone.megatron.mapping import (
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)

logger = logging.getLogger("tilestone.megatron")

Offset = Tuple[int, int, int]  # (axis, place, fragments)


def concatenated(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The parts joined; on the CPU where the device has no room for that, which is logged."""
    with torch.no_grad():
        try:
            return torch.cat(list(parts), dim)
        except torch.OutOfMemoryError as error:
            logger.warning("Loaded parts are joined on the CPU: %s", error)
        whole = torch.cat([part.cpu() for part in parts], dim)
        torch.cuda.empty_cache()
        return whole


def refuse_flat(key: str, flattened_range: Optional[slice], what: str) -> None:
    """Refuses a slice of a flattened tensor where the stored one has another order of elements."""
    if flattened_range is not None:
        raise UnsupportedError(
            f"a slice of the flattened {what}, whose elements are stored in another order",
            key=key,
            hint="save the optimizer's state whole (fully_reshardable)",
        )


def _grid_place(entity: ShardedTensor, offsets: Tuple[Offset, ...]) -> Tuple[int, int]:
    """(place, fragments) of a cell of a regular grid along axis 0 of the local tensor.

    Raises:
        InvalidArgumentError: what is given is no such cell, or the offsets are not those of its
            prepended axes.
    """
    if not isinstance(entity, ShardedTensor):
        kind = type(entity).__name__
        raise InvalidArgumentError(f"a factory is made of a ShardedTensor, not of a {kind}")
    along = entity.prepend_axis_num
    if len(offsets) != along or not entity.local_shape:
        raise InvalidArgumentError(
            f"a tensor of {len(entity.local_shape)} axes with {along} prepended ones is no fused "
            f"one with the offsets {offsets} before its own",
            key=entity.key,
            hint="give the sharded_offsets with which the entity was made",
        )
    fragments = entity.axis_fragmentations
    if fragments is None:
        raise InvalidArgumentError(
            "a part of an irregular grid (as FSDP2 leaves it) can't be divided into fused tensors",
            key=entity.key,
        )
    if any(count != 1 for count in fragments[along + 1 :]):
        raise InvalidArgumentError(
            f"a tensor divided into {fragments} parts is divided along another axis than the fused "
            "one",
            key=entity.key,
        )
    size = entity.local_shape[0]
    return (entity.global_offset[along] // size if size else 0), fragments[along]


# ---- SwiGLU ----


@dataclass(frozen=True)
class _Halves:
    """Two tensors one after the other along axis 0 of a local tensor.

    Attributes:
        shape: of the local tensor.
        offsets: of prepended axes.
        place, fragments: of the local tensor along its axis 0.
        apart: the halves have keys of their own.
        allow_shape_mismatch: as of the entity.
    """

    shape: Tuple[int, ...]
    offsets: Tuple[Offset, ...]
    place: int
    fragments: int
    apart: bool
    allow_shape_mismatch: bool

    def build(
        self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]
    ) -> List[ShardedTensor]:
        with torch.no_grad():
            if flat is None:
                halves = torch.chunk(data, 2, dim=0)
                return [self._half(key, n, half, replica_id) for n, half in enumerate(halves)]
            return self._slices(key, data, replica_id, flat)

    def _half(
        self, key: str, number: int, data: Any, replica_id: ReplicaId, flat: Optional[slice] = None
    ) -> ShardedTensor:
        """One of the halves, or a slice of it."""
        axis = len(self.offsets)
        if self.apart:
            key, along = f"{key}_{'wv'[number]}", (axis, self.place, self.fragments)
        else:
            place = self.place + number * self.fragments
            along = (axis, place, 2 * self.fragments)
        options: dict[str, Any] = {
            "replica_id": replica_id,
            "prepend_axis_num": axis,
            "allow_shape_mismatch": self.allow_shape_mismatch,
        }
        if flat is None:
            return ShardedTensor.from_rank_offsets(key, data, *self.offsets, along, **options)
        shape = with_entry(self.shape, 0, self.shape[0] // 2)
        return ShardedTensor.from_rank_offsets_flat(
            key, data, shape, *self.offsets, along, flattened_range=flat, **options
        )

    def _slices(
        self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice
    ) -> List[ShardedTensor]:
        """What a slice of the flattened local tensor has of each half; of none where it is empty."""
        size = torch.Size(self.shape).numel() // 2
        made = []
        for number in (0, 1):
            begin = max(flat.start, number * size)
            end = min(flat.stop, (number + 1) * size)
            if begin < end:
                part = data[begin - flat.start : end - flat.start]
                within = slice(begin - number * size, end - number * size)
                made.append(self._half(key, number, part, replica_id, within))
        return made


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Iterable[Offset],
    singleton_local_shards: bool = False,
) -> ShardedTensorFactory:
    """A factory for the first layer of a gated MLP: two tensors, W and V, one after the other.

    In the checkpoint W of all ranks comes before V of all ranks, so that it loads under any tensor
    parallelism. A slice of the flattened local tensor becomes slices of both.

    Args:
        original_sh_ten: the entity of the fused local tensor, weight or bias, whose axis 0 tensor
            parallelism divides. (Under FSDP2 a rank's rows are not one half W and one half V.)
        sharded_offsets: of the prepended axes, those with which the entity was made.
        singleton_local_shards: store W and V under keys of their own, KEY_w and KEY_v.

    Raises:
        CheckpointingException: the rows can't be halved, or lie on no regular grid.
    """
    offsets = tuple(sharded_offsets)
    place, fragments = _grid_place(original_sh_ten, offsets)
    shape = tuple(original_sh_ten.local_shape)
    if shape[0] % 2 != 0:
        raise InvalidArgumentError(
            f"{shape[0]} rows are no W and V of the same size", key=original_sh_ten.key
        )
    halves = _Halves(
        shape,
        offsets,
        place,
        fragments,
        singleton_local_shards,
        original_sh_ten.allow_shape_mismatch,
    )
    return factory_of(original_sh_ten, halves.build, _joined)


def factory_of(
    entity: ShardedTensor, build_fn: Callable[..., Any], merge_fn: Callable[[Any], Any]
) -> ShardedTensorFactory:
    """A factory in the place of an entity."""
    return ShardedTensorFactory(
        entity.key,
        entity.data,  # type: ignore[arg-type]
        build_fn,
        merge_fn,
        entity.replica_id,
        flattened_range=getattr(entity, "flattened_range", None),
        holders=getattr(entity, "holders", None),
    )


def _joined(parts: List[torch.Tensor]) -> torch.Tensor:
    return concatenated(parts) if parts else torch.empty(0)


# ---- Queries, keys and values ----

_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class _Attention:
    """How rows of queries, keys and values lie in a local tensor, and in the checkpoint.

    Attributes:
        groups: query groups of this rank.
        rows: of a group's queries, key and value.
        blocks: in memory all queries come first, then all keys, then all values; else they follow
            one another group by group.
        place, fragments: of the local tensor along its axis 0.
        offsets: of prepended axes.
        allow_shape_mismatch: as of the entity.
    """

    groups: int
    rows: Tuple[int, int, int]
    blocks: bool
    place: int
    fragments: int
    offsets: Tuple[Offset, ...]
    allow_shape_mismatch: bool

    def parts(self, data: torch.Tensor) -> List[torch.Tensor]:
        """Queries, keys and values of a local tensor, each (groups, rows of a group, ...)."""
        rest = tuple(data.shape[1:])
        if not self.blocks:
            grouped = data.reshape(self.groups, sum(self.rows), *rest)
            return list(torch.split(grouped, list(self.rows), dim=1))
        sizes = [self.groups * rows for rows in self.rows]
        found = zip(torch.split(data, sizes, dim=0), self.rows)
        return [part.reshape(self.groups, rows, *rest) for part, rows in found]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The local tensor of such parts."""
        rest = tuple(parts[0].shape[2:])
        if self.blocks:
            return concatenated([part.reshape(-1, *rest) for part in parts])
        return concatenated(parts, 1).reshape(-1, *rest)

    def entity(self, key: str, data: torch.Tensor, replica_id: ReplicaId) -> ShardedTensor:
        axis = len(self.offsets)
        return ShardedTensor.from_rank_offsets(
            key,
            data.contiguous(),
            *self.offsets,
            (axis, self.place, self.fragments),
            replica_id=replica_id,
            prepend_axis_num=axis,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )


def _split_factory(original: ShardedTensor, lies: _Attention) -> ShardedTensorFactory:
    """Stores queries, keys and values under keys of their own."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]) -> Any:
        refuse_flat(key, flat, "queries, keys and values")
        with torch.no_grad():
            flattened = [part.flatten(0, 1) for part in lies.parts(data)]
        named = zip(_QKV, flattened)
        return {name: lies.entity(f"{key}.{name}", part, replica_id) for name, part in named}

    def merge(loaded: Any) -> torch.Tensor:
        with torch.no_grad():
            parts = zip((loaded[name] for name in _QKV), lies.rows)
            return lies.whole([p.reshape(lies.groups, n, *p.shape[1:]) for p, n in parts])

    return factory_of(original, build, merge)


def _interleaving_factory(original: ShardedTensor, lies: _Attention) -> ShardedTensorFactory:
    """Stores blocks of queries, keys and values as Megatron's fused tensor, group by group."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]) -> Any:
        refuse_flat(key, flat, "queries, keys and values")
        with torch.no_grad():
            return lies.entity(key, torch.cat(lies.parts(data), 1).flatten(0, 1), replica_id)

    def merge(loaded: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            grouped = loaded.reshape(lies.groups, sum(lies.rows), *loaded.shape[1:])
            return lies.whole(torch.split(grouped, list(lies.rows), dim=1))

    return factory_of(original, build, merge)


def apply_qkv_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Iterable[Offset],
    num_attention_heads: int,
    num_query_groups: int,
    *,
    stored: str = "fused",
    in_memory: str = "interleaved",
) -> ShardedTensor | ShardedTensorFactory:
    """The fused projection of queries, keys and values, weight or bias, as a checkpoint has it.

    Megatron's tensor is interleaved: the rows of each query group's queries, key and value come
    after those of the group before, and tensor parallelism divides the groups.

    Args:
        original_sh_ten: the entity of the local tensor, whose axis 0 tensor parallelism divides.
        sharded_offsets: of the prepended axes, those with which the entity was made.
        num_attention_heads: of the whole model.
        num_query_groups: of the whole model; as many as heads without grouped queries.
        stored: "fused": Megatron's tensor, under the entity's key; "split": queries, keys and
            values under KEY.query, KEY.key and KEY.value, each in the order of the groups.
        in_memory: "interleaved" as Megatron's; "blocks": all queries of this rank, then all its
            keys, then all its values.

    Returns:
        A factory; the entity itself where nothing has to be moved.

    Raises:
        CheckpointingException: sizes that don't fit together; query groups that tensor parallelism
            can't divide evenly, unless nothing has to be moved.
    """
    for name, given, known in (
        ("stored", stored, ("fused", "split")),
        ("in_memory", in_memory, ("interleaved", "blocks")),
    ):
        if given not in known:
            raise InvalidArgumentError(f"{name} is one of {known}, not {given!r}")
    if stored == "fused" and in_memory == "interleaved":
        return original_sh_ten
    lies = _attention(
        original_sh_ten, tuple(sharded_offsets), num_attention_heads, num_query_groups,
        in_memory == "blocks",
    )  # fmt: skip
    make = _split_factory if stored == "split" else _interleaving_factory
    return make(original_sh_ten, lies)


def _attention(
    entity: ShardedTensor, offsets: Tuple[Offset, ...], heads: int, groups: int, blocks: bool
) -> _Attention:
    place, fragments = _grid_place(entity, offsets)
    size = entity.local_shape[0] * fragments
    if groups < 1 or heads < 1 or heads % groups != 0 or size % (heads + 2 * groups) != 0:
        raise InvalidArgumentError(
            f"{size} rows are not those of {heads} heads in {groups} query groups", key=entity.key
        )
    if groups % fragments != 0:
        raise InvalidArgumentError(
            f"{groups} query groups can't be divided among {fragments} ranks",
            key=entity.key,
            hint="store it fused, from the interleaved order",
        )
    head = size // (heads + 2 * groups)
    rows = (heads // groups * head, head, head)
    return _Attention(
        groups // fragments, rows, blocks, place, fragments, offsets, entity.allow_shape_mismatch
    )
