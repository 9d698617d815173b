"""Factories for fused weights, which are stored as the tensors that they consist of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Iterable, List, Optional, Tuple

import torch

from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone.megatron._shards.entities import with_entry
from tilestone.megatron.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory

logger = logging.getLogger("tilestone.megatron")

Offset = Tuple[int, int, int]  # (axis, place, fragments)


def concatenated(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Joins the parts; on the CPU, with a warning, if the device does not have enough memory."""
    with torch.no_grad():
        try:
            return torch.cat(list(parts), dim)
        except torch.OutOfMemoryError as error:
            logger.warning("Joining loaded parts on the CPU: %s", error)
        whole = torch.cat([part.cpu() for part in parts], dim)
        torch.cuda.empty_cache()
        return whole


def refuse_flat(key: str, flattened_range: Optional[slice], what: str) -> None:
    """Refuses a slice of a flattened tensor whose elements are stored in another order."""
    if flattened_range is not None:
        raise UnsupportedError(
            f"can't store a slice of the flattened {what}: its elements are stored in another "
            "order",
            key=key,
            hint="save the whole state of the optimizer (fully_reshardable)",
        )


@dataclass(frozen=True)
class _Cell:
    """The cell of a regular grid that a local tensor is.

    Attributes:
        offsets: offsets of the prepended axes.
        place, fragments: along axis 0 of the local tensor.
        allow_shape_mismatch: as in the entity.
    """

    offsets: Tuple[Offset, ...]
    place: int
    fragments: int
    allow_shape_mismatch: bool

    def entity(
        self,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId,
        shape: Tuple[int, ...] = (),
        flat: Optional[slice] = None,
    ) -> ShardedTensor:
        """The entity of data that fills the cell; with `flat`, of a slice of it, of that shape."""
        axis = len(self.offsets)
        offsets = (*self.offsets, (axis, self.place, self.fragments))
        options: dict[str, Any] = {
            "replica_id": replica_id,
            "prepend_axis_num": axis,
            "allow_shape_mismatch": self.allow_shape_mismatch,
        }
        if flat is None:
            return ShardedTensor.from_rank_offsets(key, data, *offsets, **options)
        return ShardedTensor.from_rank_offsets_flat(
            key, data, shape, *offsets, flattened_range=flat, **options
        )


def _cell_of(entity: ShardedTensor, offsets: Tuple[Offset, ...]) -> _Cell:
    """The cell of an entity's local tensor.

    Raises:
        InvalidArgumentError: the entity is not such a cell, or the offsets do not match its
            prepended axes.
    """
    if not isinstance(entity, ShardedTensor):
        kind = type(entity).__name__
        raise InvalidArgumentError(f"a factory needs a ShardedTensor, not a {kind}")
    along = entity.prepend_axis_num
    if len(offsets) != along or not entity.local_shape:
        raise InvalidArgumentError(
            f"a tensor of {len(entity.local_shape)} axes with {along} prepended ones does not "
            f"match the offsets {offsets}",
            key=entity.key,
            hint="pass the sharded_offsets with which the entity was made",
        )
    fragments = entity.axis_fragmentations
    if fragments is None:
        raise InvalidArgumentError(
            "a part of an irregular grid (as of FSDP2) can't be divided into fused tensors",
            key=entity.key,
        )
    if any(count != 1 for count in fragments[along + 1 :]):
        raise InvalidArgumentError(
            f"a tensor with the fragments {fragments} is divided along an axis other than the "
            "fused one",
            key=entity.key,
        )
    size = entity.local_shape[0]
    place = entity.global_offset[along] // size if size else 0
    return _Cell(offsets, place, fragments[along], entity.allow_shape_mismatch)


# ---- SwiGLU ----


@dataclass(frozen=True)
class _Halves:
    """Two tensors, one after the other along axis 0 of a local tensor.

    Attributes:
        shape: shape of the local tensor.
        cell: where it stands.
        apart: each half has its own key.
    """

    shape: Tuple[int, ...]
    cell: _Cell
    apart: bool

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
        """The entity of a half, or of a slice of it."""
        cell = self.cell
        if self.apart:
            key = f"{key}_{'wv'[number]}"
        else:
            place = cell.place + number * cell.fragments
            cell = replace(cell, place=place, fragments=2 * cell.fragments)
        shape = with_entry(self.shape, 0, self.shape[0] // 2)
        return cell.entity(key, data, replica_id, shape, flat)

    def _slices(
        self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice
    ) -> List[ShardedTensor]:
        """The parts of each half that a slice of the flattened local tensor holds, if any."""
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
    """Makes a factory for the first layer of a gated MLP: two tensors, W and V, fused into one.

    In the checkpoint W of all ranks comes before V of all ranks, so it can be loaded with any
    tensor parallelism. A slice of the flattened local tensor becomes slices of W and V.

    Args:
        original_sh_ten: the entity of the fused local tensor, weight or bias. Tensor parallelism
            divides its axis 0. (With FSDP2 a rank's rows are not half W and half V.)
        sharded_offsets: offsets of the prepended axes, with which the entity was made.
        singleton_local_shards: store W and V under their own keys, KEY_w and KEY_v.

    Raises:
        CheckpointingException: the rows can't be halved, or are not a cell of a regular grid.
    """
    cell = _cell_of(original_sh_ten, tuple(sharded_offsets))
    shape = tuple(original_sh_ten.local_shape)
    if shape[0] % 2 != 0:
        raise InvalidArgumentError(
            f"{shape[0]} rows can't be divided into W and V of the same size",
            key=original_sh_ten.key,
        )
    halves = _Halves(shape, cell, singleton_local_shards)
    return factory_of(original_sh_ten, halves.build, _joined)


def factory_of(
    entity: ShardedTensor, build_fn: Callable[..., Any], merge_fn: Callable[[Any], Any]
) -> ShardedTensorFactory:
    """Makes a factory that replaces an entity."""
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
    """The order of the rows of queries, keys and values in a local tensor and in the checkpoint.

    Attributes:
        groups: number of query groups of this rank.
        rows: numbers of rows of a group's queries, its key and its value.
        blocks: True: in memory all queries come first, then all keys, then all values. False: the
            groups follow one another.
        cell: where the local tensor stands.
    """

    groups: int
    rows: Tuple[int, int, int]
    blocks: bool
    cell: _Cell

    def parts(self, data: torch.Tensor) -> List[torch.Tensor]:
        """Splits a local tensor into queries, keys and values, each (groups, group rows, ...)."""
        rest = tuple(data.shape[1:])
        if not self.blocks:
            grouped = data.reshape(self.groups, sum(self.rows), *rest)
            return list(torch.split(grouped, list(self.rows), dim=1))
        sizes = [self.groups * rows for rows in self.rows]
        found = zip(torch.split(data, sizes, dim=0), self.rows)
        return [part.reshape(self.groups, rows, *rest) for part, rows in found]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins such parts to a local tensor."""
        rest = tuple(parts[0].shape[2:])
        if self.blocks:
            return concatenated([part.reshape(-1, *rest) for part in parts])
        return concatenated(parts, 1).reshape(-1, *rest)


def _split_factory(original: ShardedTensor, lies: _Attention) -> ShardedTensorFactory:
    """Stores queries, keys and values under their own keys."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]) -> Any:
        refuse_flat(key, flat, "queries, keys and values")
        with torch.no_grad():
            flattened = [part.flatten(0, 1) for part in lies.parts(data)]
        return {
            name: lies.cell.entity(f"{key}.{name}", part.contiguous(), replica_id)
            for name, part in zip(_QKV, flattened)
        }

    def merge(loaded: Any) -> torch.Tensor:
        with torch.no_grad():
            parts = zip((loaded[name] for name in _QKV), lies.rows)
            return lies.whole([p.reshape(lies.groups, n, *p.shape[1:]) for p, n in parts])

    return factory_of(original, build, merge)


def _interleaving_factory(original: ShardedTensor, lies: _Attention) -> ShardedTensorFactory:
    """Stores blocks of queries, keys and values in the order of Megatron's fused tensor."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]) -> Any:
        refuse_flat(key, flat, "queries, keys and values")
        with torch.no_grad():
            stored = torch.cat(lies.parts(data), 1).flatten(0, 1).contiguous()
        return lies.cell.entity(key, stored, replica_id)

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
    """Makes the stored form of a fused projection of queries, keys and values, weight or bias.

    Megatron's tensor is interleaved: its query groups follow one another, each with the rows of its
    queries, its key and its value. Tensor parallelism divides the groups.

    Args:
        original_sh_ten: the entity of the local tensor. Tensor parallelism divides its axis 0.
        sharded_offsets: offsets of the prepended axes, with which the entity was made.
        num_attention_heads: number of heads of the whole model.
        num_query_groups: number of groups of the whole model; without grouped queries, the number
            of heads.
        stored: "fused": Megatron's tensor, under the entity's key; "split": queries, keys and
            values under KEY.query, KEY.key and KEY.value, each in the order of the groups.
        in_memory: "interleaved": as in Megatron; "blocks": all queries of this rank, then all its
            keys, then all its values.

    Returns:
        A factory; the entity itself if the stored order is the one in memory.

    Raises:
        CheckpointingException: the sizes don't match; or tensor parallelism can't divide the query
            groups evenly, unless the stored order is the one in memory.
    """
    for name, given, known in (
        ("stored", stored, ("fused", "split")),
        ("in_memory", in_memory, ("interleaved", "blocks")),
    ):
        if given not in known:
            raise InvalidArgumentError(f"{name} must be one of {known}, not {given!r}")
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
    cell = _cell_of(entity, offsets)
    size = entity.local_shape[0] * cell.fragments
    if groups < 1 or heads < 1 or heads % groups != 0 or size % (heads + 2 * groups) != 0:
        raise InvalidArgumentError(
            f"{size} rows do not match {heads} heads in {groups} query groups", key=entity.key
        )
    if groups % cell.fragments != 0:
        raise InvalidArgumentError(
            f"{groups} query groups can't be divided among {cell.fragments} ranks",
            key=entity.key,
            hint='use stored="fused" with in_memory="interleaved"',
        )
    head = size // (heads + 2 * groups)
    rows = (heads // groups * head, head, head)
    return _Attention(groups // cell.fragments, rows, blocks, cell)
