"""Where an object of torch says that it stands in a global tensor.

torch's checkpoints ask an object itself, in this order, and so does Tilestone:

1. torch's `_Checkpointable` methods: `__create_write_items__`, `__create_chunk_list__` and
   `__get_tensor_shard__`, of the object or, for a DTensor, of its local tensor. DTensor's own
   methods only repeat its placements, so they don't count.
2. The four attributes of torch 2.14's `CheckpointableTensor`, of a tensor or of a DTensor's local
   tensor.
3. The shards of torch's older ShardedTensor.

An object that says neither is placed by its mesh (`tensors.distributed_entity`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tilestone._errors import CheckpointError, InvalidArgumentError

_WRITE, _CHUNKS, _SHARD = "__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"
_METHODS = (_WRITE, _CHUNKS)
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_OF_DTENSORS = frozenset(("_local_tensor", "_spec", "_is_param"))  # torch's own attributes
_SILENT = (type, type(None), bool, int, float, complex, str, bytes, tuple, list, dict)

Sizes = tuple[int, ...]


class Part(NamedTuple):
    """A box of the global tensor that this rank holds.

    Attributes:
        offset, shape: in elements.
        tensor: the elements, with the box's shape.
    """

    offset: Sizes
    shape: Sizes
    tensor: torch.Tensor


class Position(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        global_shape: in elements; None if a rank that holds nothing doesn't know it.
        parts: without empty ones.
        dtype: None if a rank that holds nothing doesn't know it.
    """

    global_shape: Sizes | None
    parts: list[Part]
    dtype: torch.dtype | None


def dtensor_type() -> Any:
    """torch's DTensor; an empty tuple if nothing has imported it, as there is no DTensor then.

    It is not imported here, because that takes a second.
    """
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def local_of(item: Any) -> Any:
    """A DTensor's local tensor; any other object itself."""
    return item._local_tensor if isinstance(item, dtensor_type()) else item


def _has_methods(item: Any) -> bool:
    if not isinstance(item, dtensor_type()):
        return any(hasattr(item, name) for name in _METHODS)
    own = vars(item)
    return any(
        name in own or getattr(type(item), name, None) is not getattr(dtensor_type(), name, None)
        for name in _METHODS
    )


def _has_attributes(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and all(hasattr(item, name) for name in _ATTRIBUTES)


def _is_sharded_tensor(item: Any) -> bool:
    """Whether it is one of torch's older ShardedTensors."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(item, module.ShardedTensor)


def is_on_meta(item: Any) -> bool:
    """Whether a tensor, or a shard of a ShardedTensor, is on the meta device."""
    if _is_sharded_tensor(item):  # its own is_meta fails, unless it has exactly one shard here
        return any(is_on_meta(shard.tensor) for shard in item.local_shards())
    return isinstance(item, torch.Tensor) and item.is_meta


def _is_bare_dtensor(item: Any) -> bool:
    """Whether it is a DTensor of a plain tensor, and nobody has given attributes to either."""
    if type(item) is not dtensor_type() or not vars(item).keys() <= _OF_DTENSORS:
        return False
    local = item._local_tensor
    return type(local) is torch.Tensor and not vars(local)


def _source(item: Any) -> Any:
    """The object whose methods or attributes count: the item, its local tensor, or None."""
    if _is_sharded_tensor(item):
        return item
    places = (item,) if local_of(item) is item else (item, local_of(item))
    for says in (_has_methods, _has_attributes):
        for place in places:
            if says(place):
                return place
    return None


def same_part(part: torch.Tensor, of: torch.Tensor, memory: torch.Tensor) -> torch.Tensor | None:
    """The part of `memory` that `part` is of `of`; None if it is no part of it."""
    if part.untyped_storage()._cdata != of.untyped_storage()._cdata:
        return None
    return memory.as_strided(part.shape, part.stride(), part.storage_offset())


def move_statements(item: Any, made: Any) -> None:
    """Gives a tensor the methods and attributes of the one on the meta device that it replaces."""
    of, memory = local_of(item), local_of(made)
    inner = ("_local_tensor", "_spec")  # a DTensor's
    vars(made).update({name: held for name, held in vars(item).items() if name not in inner})
    shard_of = vars(item).get(_SHARD)
    if shard_of is not None:

        def moved(index: Any) -> Any:
            part = shard_of(index)
            return same_part(part, of, memory) if part.is_meta else part

        vars(made)[_SHARD] = moved


def states_position(item: Any) -> bool:
    """Whether an object says where it stands, beside a DTensor's mesh and placements."""
    if _is_bare_dtensor(item) or isinstance(item, _SILENT):
        return False
    return _source(item) is not None


def position(item: Any, key: str, for_load: bool, local: torch.Tensor | None = None) -> Position:
    """Where an object that `states_position` stands.

    Args:
        key: its name in the checkpoint.
        local: memory that takes the place of the item's own tensor, which is on the meta device.

    Raises:
        InvalidArgumentError: the object contradicts itself, a method fails, or it describes
            something other than chunks of one tensor.
    """
    source = _source(item)
    if _is_outside(item):
        return Position(tuple(item.shape), [], item.dtype)
    kind: Any = _Methods if _has_methods(source) else _Attributes
    given = _Shards if _is_sharded_tensor(item) else kind
    found: Position = given(item, source, key, local).position(for_load)
    return found


def _is_outside(item: Any) -> bool:
    """Whether this rank is not in a DTensor's mesh."""
    return isinstance(item, dtensor_type()) and item.device_mesh.get_coordinate() is None


class _Stated:
    """An object that describes its own position."""

    def __init__(self, item: Any, source: Any, key: str, local: torch.Tensor | None) -> None:
        self._item = item
        self._source = source
        self._key = key
        self._own = source if isinstance(source, torch.Tensor) else None
        if self._own is item:
            self._own = local_of(item)
        self._memory = self._own if local is None else local
        self._dtypes: set[torch.dtype] = set()  # as write items state them

    def _refuse(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"a {type(self._item).__name__} does not describe a part of a tensor: {problem}",
            key=self._key,
        )

    def _sizes(self, what: str, sizes: Any) -> Sizes:
        try:
            return tuple(int(n) for n in sizes)
        except (TypeError, ValueError) as error:
            raise self._refuse(f"{what} is {sizes!r}") from error

    def _in_memory(self, shard: torch.Tensor) -> torch.Tensor:
        """A part of a tensor on the meta device, in the memory that takes its place."""
        if self._memory is self._own or not shard.is_meta:
            return shard
        assert self._own is not None and self._memory is not None
        part = same_part(shard, self._own, self._memory)
        if part is None:
            raise self._refuse("its tensors are on the meta device and not parts of one tensor")
        return part

    def _part(self, offset: Sizes, shape: Sizes, shard: torch.Tensor) -> Part:
        if tuple(shard.shape) != shape:
            raise self._refuse(
                f"the chunk of shape {shape} at {offset} has a tensor of shape {tuple(shard.shape)}"
            )
        return Part(offset, shape, self._in_memory(shard))


class _Attributes(_Stated):
    """By torch 2.14's attributes."""

    def position(self, for_load: bool) -> Position:
        lists: list[Any] = [getattr(self._source, name) for name in _ATTRIBUTES[1:]]
        shape = self._sizes("global_shape", self._source.global_shape)
        try:
            counts = {len(each) for each in lists}
        except TypeError:
            counts = {0, 1}
        if len(counts) != 1:
            raise self._refuse(f"{', '.join(_ATTRIBUTES[1:])} don't have the same length")
        assert self._own is not None
        return Position(shape, list(self._parts(lists, len(shape))), self._own.dtype)

    def _parts(self, lists: list[Any], dims: int) -> Iterator[Part]:
        assert self._own is not None
        for given in zip(*lists, strict=True):
            offset, start, size = (
                self._sizes(name, each) for name, each in zip(_ATTRIBUTES[1:], given, strict=True)
            )
            if not len(offset) == len(start) == len(size) == dims == self._own.dim():
                raise self._refuse(
                    f"offsets {offset} and {start}, size {size} and the tensor of shape "
                    f"{tuple(self._own.shape)} don't have the {dims} dims of global_shape"
                )
            if any(n < 0 for n in (*offset, *start, *size)):
                raise self._refuse(f"offsets {offset} and {start} or size {size} are negative")
            if 0 in size:
                continue
            index = tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))
            yield self._part(offset, size, self._own.detach()[index])


class _Shards(_Stated):
    """By the shards of a ShardedTensor that are on this rank, which may be ShardedTensors."""

    def position(self, for_load: bool) -> Position:
        metadata = self._item.metadata()
        shape = self._sizes("its size", metadata.size)
        parts = list(self._parts(self._item, (0,) * len(shape)))
        return Position(shape, parts, metadata.tensor_properties.dtype)

    def _parts(self, sharded: Any, origin: Sizes) -> Iterator[Part]:
        """The parts of a ShardedTensor whose first element is at `origin`."""
        for shard in sharded.local_shards():
            offset = self._sizes("a shard's offset", shard.metadata.shard_offsets)
            size = self._sizes("a shard's size", shard.metadata.shard_sizes)
            if len(offset) != len(origin):
                raise self._refuse(f"a shard's offset is {offset}, with {len(origin)} dims around it")
            start = tuple(a + b for a, b in zip(origin, offset, strict=True))
            if _is_sharded_tensor(shard.tensor):
                yield from self._parts(shard.tensor, start)
            elif 0 not in size:
                yield self._part(start, size, shard.tensor.detach())


class _Chunk(NamedTuple):
    offset: Sizes
    shape: Sizes
    index: Any  # torch's MetadataIndex


class _Methods(_Stated):
    """By torch's methods."""

    def position(self, for_load: bool) -> Position:
        whole = isinstance(self._item, dtensor_type())
        if whole and any(each.is_partial() for each in self._item.placements):
            raise self._refuse("it has a Partial placement, a sum that is not computed yet")
        shape: Sizes | None = tuple(self._item.shape) if whole else None
        has_chunks = hasattr(self._source, _CHUNKS)
        written = held = None
        if hasattr(self._source, _WRITE) and not (for_load and whole and has_chunks):
            items = self._call(_WRITE, self._key, self._item)
            shape = self._global_shape(items, shape)
            written = [self._of_item(each) for each in items]
        if has_chunks:
            held = self._held()
        if held is None or (written is not None and not for_load):
            used = written or []
            self._expect_held(used, held)
        else:
            used = held
        used = [chunk for chunk in used if 0 not in chunk.shape]
        if shape is None and isinstance(self._item, torch.Tensor):
            shape = tuple(self._item.shape)
        if shape is None and used:
            raise self._refuse(f"without {_WRITE}, nothing says how large the tensor is")
        parts = [self._part(*chunk[:2], self._shard(chunk)) for chunk in used]
        dtypes = {part.tensor.dtype for part in parts} | self._dtypes
        if len(dtypes) > 1:
            raise self._refuse(f"its chunks have several dtypes: {sorted(map(str, dtypes))}")
        if not dtypes and type(self._own) in (torch.Tensor, torch.nn.Parameter):
            dtypes = {self._own.dtype}  # type: ignore[union-attr]
        return Position(shape, parts, dtypes.pop() if dtypes else None)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            result = getattr(self._source, name)(*arguments)
            return list(result) if name in _METHODS else result
        except CheckpointError:
            raise
        except Exception as error:
            text = f"{name} raised {type(error).__name__}: {error}"
            raise self._refuse(text) from error

    def _global_shape(self, items: Sequence[Any], shape: Sizes | None) -> Sizes | None:
        """The shape that all write items state; `shape` if there are none."""
        for item in items:
            kind = getattr(getattr(item, "type", None), "name", None)
            data = getattr(item, "tensor_data", None)
            if kind not in ("SHARD", "TENSOR") or data is None:
                raise self._refuse(
                    f"{_WRITE} gave an item of type {kind or type(item).__name__}; only chunks of "
                    "a tensor can be saved"
                )
            if item.index.fqn != self._key:
                raise self._refuse(f"{_WRITE} gave an item for another key, {item.index.fqn}")
            stated = self._sizes("the tensor's size in a write item", data.size)
            if shape is not None and shape != stated:
                raise self._refuse(f"the whole tensor has shape {shape} and also {stated}")
            shape = stated
            if isinstance(data.properties.dtype, torch.dtype):
                self._dtypes.add(data.properties.dtype)
        return shape

    def _of_item(self, item: Any) -> _Chunk:
        chunk = self._of_chunk(item.tensor_data.chunk, item.index)
        named = item.index.offset
        if named is not None and self._sizes("an index's offset", named) != chunk.offset:
            raise self._refuse(f"the chunk at {chunk.offset} has the index {tuple(named)}")
        return chunk

    def _of_chunk(self, chunk: Any, index: Any) -> _Chunk:
        offset = self._sizes("a chunk's offset", getattr(chunk, "offsets", None))
        shape = self._sizes("a chunk's size", getattr(chunk, "sizes", None))
        if len(offset) != len(shape) or any(n < 0 for n in (*offset, *shape)):
            raise self._refuse(f"a chunk has offset {offset} and size {shape}")
        return _Chunk(offset, shape, index)

    def _held(self) -> list[_Chunk]:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        found = []
        for number, chunk in enumerate(self._call(_CHUNKS)):
            index = MetadataIndex(self._key, getattr(chunk, "offsets", None), number)
            found.append(self._of_chunk(chunk, index))
        return found

    def _expect_held(self, written: list[_Chunk], held: list[_Chunk] | None) -> None:
        """Checks that what a rank writes is among what it holds. It may leave some to others."""
        if held is None:
            return
        boxes = {chunk[:2] for chunk in held}
        for chunk in written:
            if 0 not in chunk.shape and chunk[:2] not in boxes:
                raise self._refuse(
                    f"{_WRITE} gives the chunk of shape {chunk.shape} at {chunk.offset}, which "
                    f"{_CHUNKS} does not"
                )

    def _shard(self, chunk: _Chunk) -> torch.Tensor:
        if hasattr(self._source, _SHARD):
            shard = self._call(_SHARD, chunk.index)
        elif self._own is not None:
            shard = self._own
        else:
            raise self._refuse(f"it has no {_SHARD}")
        shard = shard.wait() if hasattr(shard, "wait") else shard
        if not isinstance(shard, torch.Tensor) or isinstance(shard, dtensor_type()):
            raise self._refuse(f"{_SHARD} gave a {type(shard).__name__} instead of a local tensor")
        return shard
