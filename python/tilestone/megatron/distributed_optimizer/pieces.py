"""Maps the elements of a flattened parameter to the checkpoint's global tensors.

A parameter is one box of a global tensor, or several if a factory divides it. Each box is strided
in the flattened parameter: element (i, j, ...) of the box is the parameter's element
`start + i * strides[0] + j * strides[1] + ...`. So any range of the flattened parameter consists of
a few smaller boxes of the same kind, which can be computed without data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.geometry import flat_range_to_boxes
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone.megatron.utils import extract_sharded_tensors_and_factories

Entity = Union[ShardedTensor, ShardedTensorFactory]
_Numbers = Tuple[int, ...]

# Limit for a factory that reorders its tensor: it is described run by run, up to this many runs.
MAX_RUNS = 1 << 16


def entities_by_data(sharded_state_dict: ShardedStateDict) -> dict[int, Entity]:
    """The entities of a model's parameters, by the ids of the parameters, which are their data."""
    tensors, _ = extract_sharded_tensors_and_factories(sharded_state_dict)
    return {id(entity.data): entity for entity in nested_values(tensors)}


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, and where its elements are in a flattened tensor.

    Attributes:
        key: the global tensor's name in the checkpoint.
        global_shape: elements of the whole tensor along each axis, including prepended axes.
        offset: the box's first element along each axis.
        shape: the box's elements along each axis.
        strides: distance of neighbours along each axis in the flattened tensor, in elements.
        start: position of the box's first element in the flattened tensor.
        replica_id: which copy of the box this is.
        allow_shape_mismatch: the stored tensor may have another global shape (padding).
    """

    key: str
    global_shape: _Numbers
    offset: _Numbers
    shape: _Numbers
    strides: _Numbers
    start: int
    replica_id: ReplicaId = 0
    allow_shape_mismatch: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Distance from the box's first element to behind its last in the flattened tensor."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides))

    @property
    def is_contiguous(self) -> bool:
        """Whether the box's elements are consecutive and in order in the flattened tensor."""
        dense = row_major(self.shape)
        axes = zip(self.shape, self.strides, dense)
        return all(n == 1 or step == expected for n, step, expected in axes) or self.numel == 0

    def within(self, begin: int, end: int) -> Iterator[Piece]:
        """Yields the boxes of this piece that lie in [begin, end) of the flattened tensor.

        For a piece of n axes there are at most 2 n - 1. They are disjoint and together hold exactly
        these elements.
        """
        axes = sorted(
            (axis for axis, size in enumerate(self.shape) if size > 1),
            key=lambda axis: -self.strides[axis],
        )
        if self.numel:
            yield from self._within(begin, end, axes)

    def _within(self, begin: int, end: int, axes: list[int]) -> Iterator[Piece]:
        """within(); axes not in `axes` have one element. The longest stride comes first."""
        if self.start >= end or self.start + self.span <= begin:
            return
        if begin <= self.start and self.start + self.span <= end:
            yield self
            return
        axis, count, step = axes[0], self.shape[axes[0]], self.strides[axes[0]]
        inner = self.span - (count - 1) * step  # span of one index of the axis
        first = max(0, -((self.start - begin) // step))  # first index that is entirely in range
        last = max(0, min(count, (end - inner - self.start) // step + 1))  # end of these indices
        if first < last:
            yield self._part(axis, first, last - first)
        for index in sorted({min(first, count) - 1, last}):  # indices that are partly in range
            if 0 <= index < count and not first <= index < last:
                yield from self._part(axis, index, 1)._within(begin, end, axes[1:])

    def _part(self, axis: int, first: int, count: int) -> Piece:
        offset, shape = list(self.offset), list(self.shape)
        offset[axis] += first
        shape[axis] = count
        start = self.start + first * self.strides[axis]
        return replace(self, offset=tuple(offset), shape=tuple(shape), start=start)

    def of(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The box's elements as a view of memory that holds (a part of) the flattened tensor.

        Args:
            flat: 1-D and contiguous.
            begin: the element of the flattened tensor at which `flat` begins.
        """
        where = flat.storage_offset() + self.start - begin
        return torch.as_strided(flat, self.shape, self.strides, where)


def row_major(shape: Sequence[int]) -> _Numbers:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def shape_of(entity: Entity) -> _Numbers:
    """The local shape of an entity's parameter.

    Raises:
        CheckpointingException: it is a slice of a flattened tensor, or a factory without data.
    """
    if getattr(entity, "flattened_range", None) is not None:
        raise InvalidArgumentError(
            "a parameter must be described by its whole local tensor, not by a flattened range",
            key=entity.key,
        )
    if isinstance(entity, ShardedTensor):
        return tuple(entity.local_shape)
    if entity.data is None:
        raise InvalidArgumentError("a factory without data has no shape", key=entity.key)
    return tuple(entity.data.shape)


def pieces_of(entity: Entity) -> Tuple[Piece, ...]:
    """The boxes of global tensors as which an entity's parameter is stored. Its data is not read.

    A factory is called with a tensor without memory. If it copies the tensor, it is called again
    with a tensor that holds the number of each element (4 bytes each, 8 for 2^31 elements or more).

    Raises:
        CheckpointingException: a factory does not store each element exactly once, builds
            something other than sharded tensors, or reorders the elements so that there is no short
            description.
    """
    shape = shape_of(entity)
    if isinstance(entity, ShardedTensor):
        return (_piece(entity, row_major(shape), 0),)
    whole = torch.empty(shape, dtype=entity.data.dtype, device="meta")
    tensors = _built(entity, whole)
    storage = whole.untyped_storage()._cdata
    if all(item.data.untyped_storage()._cdata == storage for item in tensors):
        pieces = [_piece(x, x.data.stride(), x.data.storage_offset()) for x in tensors]
    else:
        pieces = _pieces_by_number(entity, shape)
    _check_covered(entity.key, pieces, math.prod(shape))
    return tuple(pieces)


def _built(factory: ShardedTensorFactory, tensor: torch.Tensor) -> list[Any]:
    """Returns the sharded tensors that a factory builds of a tensor."""
    with torch.no_grad():
        tree = factory.build_fn(factory.key, tensor, factory.replica_id, None)
    leaves = [tree] if isinstance(tree, ShardedTensor) else list(nested_values(tree))
    tensors = [leaf for leaf in leaves if not isinstance(leaf, LocalNonpersistentObject)]
    for leaf in tensors:
        if not isinstance(leaf, ShardedTensor) or leaf.flattened_range is not None:
            raise InvalidArgumentError(
                f"the factory builds a {type(leaf).__name__} that is not a whole sharded tensor",
                key=factory.key,
            )
    return tensors


def _piece(tensor: ShardedTensor, strides: Sequence[int], start: int) -> Piece:
    prepended = tensor.prepend_axis_num
    return Piece(
        tensor.key,
        tuple(tensor.global_shape),
        tuple(tensor.global_offset),
        (1,) * prepended + tuple(tensor.local_shape),
        (0,) * prepended + tuple(strides),
        start,
        tensor.replica_id,
        bool(tensor.allow_shape_mismatch),
    )


def _pieces_by_number(factory: ShardedTensorFactory, shape: _Numbers) -> list[Piece]:
    """The pieces of a factory that copies: it is called with the elements' numbers."""
    count = math.prod(shape)
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    numbers = torch.arange(count, dtype=dtype)
    pieces: list[Piece] = []
    for item in _built(factory, numbers.reshape(shape)):
        found = _strided(item.data, numbers)
        if found is not None:
            pieces.append(_piece(item, *found))
        else:
            pieces += _runs(item, MAX_RUNS - len(pieces))
    return pieces


def _strided(found: torch.Tensor, numbers: torch.Tensor) -> Optional[Tuple[_Numbers, int]]:
    """The strides and start that explain a tensor of numbers; None if there are none."""
    if found.numel() == 0:
        return row_major(found.shape), 0
    corner = (0,) * found.ndim
    start = int(found[corner])
    strides = tuple(
        int(found[(*corner[:axis], 1, *corner[axis + 1 :])]) - start if size > 1 else 0
        for axis, size in enumerate(found.shape)
    )
    last = start + sum((size - 1) * step for size, step in zip(found.shape, strides))
    if any(step < 0 for step in strides) or last >= numbers.numel():
        return None
    same = torch.equal(found, torch.as_strided(numbers, found.shape, strides, start))
    return (strides, start) if same else None


def _runs(item: ShardedTensor, limit: int) -> list[Piece]:
    """The pieces of a tensor of numbers, one or more for each run of consecutive numbers."""
    assert item.data is not None
    flat = item.data.flatten()
    breaks = torch.nonzero(flat[1:] != flat[:-1] + 1).flatten() + 1
    if len(breaks) >= limit:
        raise InvalidArgumentError(
            f"the factory reorders the tensor's elements, in {len(breaks)} runs",
            key=item.key,
            hint="only reorderings by chunk, split or transpose have a short description",
        )
    ends = [0, *breaks.tolist(), flat.numel()]
    whole = _piece(item, row_major(item.data.shape), 0)
    pieces = []
    for begin, end in zip(ends[:-1], ends[1:]):
        number = int(flat[begin])
        for box in flat_range_to_boxes(whole.shape, begin, end):
            offset = tuple(int(n) for n in box.offset)
            shape = tuple(int(n) for n in box.shape)
            at = sum(n * step for n, step in zip(offset, row_major(whole.shape)))
            where = tuple(a + b for a, b in zip(whole.offset, offset))
            start = number + at - begin
            pieces.append(
                replace(whole, offset=where, shape=shape, strides=row_major(shape), start=start)
            )
    return pieces


def _check_covered(key: str, pieces: Sequence[Piece], count: int) -> None:
    """Refuses pieces that do not hold each element exactly once or whose strides are not nested."""
    if not all(_is_nested(piece) for piece in pieces):
        raise InvalidArgumentError("the factory interleaves the axes of the tensor", key=key)
    if sum(piece.numel for piece in pieces) == count:
        held = sorted((piece.start, piece.start + piece.span) for piece in pieces if piece.numel)
        ends = [end for _, end in held]
        if [begin for begin, _ in held] == [0, *ends][: len(held)] and all(
            piece.span == piece.numel for piece in pieces
        ):
            return
        marks = torch.zeros(count, dtype=torch.bool)
        for piece in pieces:
            piece.of(marks).fill_(True)
        if bool(marks.all()):
            return
    raise MismatchError(
        f"the factory does not store each of the tensor's {count} elements exactly once", key=key
    )


def _is_nested(piece: Piece) -> bool:
    """Whether, from the shortest stride on, each index of an axis ends before the next begins."""
    inner = 1
    axes = [(step, size) for step, size in zip(piece.strides, piece.shape) if size > 1]
    for step, size in sorted(axes):
        if step < inner and piece.numel:
            return False
        inner += step * (size - 1)
    return True
