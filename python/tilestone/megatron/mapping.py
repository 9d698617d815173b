"""The entities of a sharded state dict: which part of a global tensor or object a rank holds.

Fields, methods and checks are those of Megatron-Core 0.16, with slices of flattened tensors
(`flattened_range`) as 0.13 had them. Megatron-Core's own entities count as instances of these
classes, so every function of this package takes both.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np
import torch

from tilestone import _options
from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.megatron._entity_type import Entity
from tilestone.megatron._holders import Held, passed_on
from tilestone.megatron._merges import merged
from tilestone.megatron._places import grid_of, narrowed_pieces, with_entry
from tilestone.megatron.dict_utils import dict_list_map_inplace

logger = logging.getLogger(__name__)

# A state dict of plain values; one whose tensors are entities; what is saved once for all ranks.
StateDict = Dict[str, Any]
CommonStateDict = Dict[str, Any]
ShardedStateDict = Dict[str, Any]
# Which copy of the same data this is: (pipeline, tensor, data parallel) by convention; all zeros:
# the main one.
ReplicaId = Union[int, Tuple[int, ...]]


class ShardedBase(Entity):
    """What is stored in parts, by several ranks: the base of the entities below.

    Attributes:
        key: the whole's name in the checkpoint.
        data: this rank's part.
        replica_id: which copy of the part it is; 0, or all zeros: the main one.
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Checks that the attributes fit together.

        Raises:
            CheckpointingException: they don't.
        """

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same entity with data None."""
        raise NotImplementedError


@dataclass
class ShardedTensor(Held, ShardedBase):
    """A rank's part of a global tensor: a box of it, or a slice of a flattened box.

    Attributes:
        key: the global tensor's name in the checkpoint.
        data: the local tensor, of local_shape; with flattened_range a 1-D one of that length. None:
            only the place is described.
        dtype: of the elements.
        local_shape: of the box, without the prepended axes.
        global_shape: elements of the whole tensor along each axis, prepended axes first.
        global_offset: the first element of the box along each axis, prepended axes first.
        axis_fragmentations: into how many boxes of local_shape each axis is divided; None: the
            grid is irregular.
        replica_id: which copy of the same part this is; 0, or all zeros: the main one.
        prepend_axis_num: how many axes of size 1 the box has before those of local_shape.
        allow_shape_mismatch: a load takes a stored tensor of another global shape (padding).
        flattened_range: data is this slice (start and stop, no step) of the flattened box; an
            empty slice holds nothing.
        holders: not in Megatron-Core: global ranks that hold the same part, this one included;
            None: not known. Saves by rule share the writing among them. Another replica_id makes
            it None; with replace() give both.

    Raises:
        CheckpointingException: the attributes don't fit together, see validate_metadata_integrity.
    """

    key: str
    data: Optional[torch.Tensor] = field(repr=False)
    dtype: torch.dtype
    local_shape: Tuple[int, ...]
    global_shape: Tuple[int, ...]
    global_offset: Tuple[int, ...]
    axis_fragmentations: Optional[Tuple[int, ...]]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: Optional[slice] = None
    holders: Optional[Tuple[int, ...]] = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that the attributes fit together.

        Dtype and shape of the data are as described, the three global attributes have one entry
        for each axis, a regular grid's offsets are multiples of the local size, and a flattened
        range lies within the box.

        Raises:
            CheckpointingException: what does not fit, with all attributes.
        """
        self._check_data()
        if len(self.global_shape) != len(self.global_offset):
            raise self._wrong(MismatchError, "global_offset and global_shape differ in length")
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            raise self._wrong(
                MismatchError,
                "local_shape and prepend_axis_num together have another number of axes than "
                "global_shape",
            )
        if self.axis_fragmentations is not None:
            for offset, size in zip(self.global_offset[self.prepend_axis_num :], self.local_shape):
                if size != 0 and offset % size != 0:
                    raise self._wrong(
                        InvalidArgumentError,
                        f"an offset of a regular grid ({offset}) is no multiple of the local size "
                        f"({size})",
                    )
        if self.flattened_range is not None:
            self._check_range(self.flattened_range)

    def _wrong(self, kind: Any, text: str) -> Exception:
        return kind(f"{text}: {self}", key=self.key)  # type: ignore[no-any-return]

    def _check_data(self) -> None:
        if self.data is None:
            return
        if self.data.dtype != self.dtype:
            raise self._wrong(MismatchError, f"data is of {self.data.dtype}, not of `dtype`")
        if self.flattened_range is None and tuple(self.data.shape) != tuple(self.local_shape):
            raise self._wrong(
                MismatchError, f"data has shape {tuple(self.data.shape)}, not `local_shape`"
            )

    def _check_range(self, flat: slice) -> None:
        size = math.prod(self.local_shape)
        if flat.step is not None or flat.start is None or flat.stop is None:
            raise self._wrong(
                InvalidArgumentError, "a flattened range has a start, a stop and no step"
            )
        if not 0 <= flat.start <= flat.stop <= size:
            raise self._wrong(
                InvalidArgumentError, f"a flattened range lies outside the {size} local elements"
            )
        count = (flat.stop - flat.start,)
        if self.data is not None and tuple(self.data.shape) != count:
            raise self._wrong(
                MismatchError, f"data of a flattened range has shape {tuple(self.data.shape)}"
            )

    @property
    def has_regular_grid(self) -> bool:
        """Whether all parts have one shape and lie on a grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> Tuple[Union[int, slice], ...]:
        """The box as an index of the global tensor: ints for prepended axes, then slices.

        With a flattened range it is the box of which the data is a slice.
        """
        leading = self.global_offset[: self.prepend_axis_num]
        offsets = self.global_offset[self.prepend_axis_num :]
        return (
            *leading,
            *(slice(begin, begin + size) for begin, size in zip(offsets, self.local_shape)),
        )

    def local_coordinates(self) -> Tuple[np.ndarray, ...]:
        """Where in the box the elements of a flattened range lie.

        Returns:
            for each axis of local_shape, an int64 array with an entry for each element of data.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        if self.flattened_range is None:
            raise self._wrong(InvalidArgumentError, "coordinates are those of a flattened range")
        flat = np.arange(self.flattened_range.start, self.flattened_range.stop)
        return tuple(np.unravel_index(flat, tuple(self.local_shape)))

    def global_coordinates(self) -> Tuple[np.ndarray, ...]:
        """Where in the global tensor the elements of a flattened range lie.

        Returns:
            for each axis of global_shape, an int64 array with an entry for each element of data.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        local = self.local_coordinates()
        count = len(local[0]) if local else 1
        leading = (np.zeros(count, dtype=np.int64),) * self.prepend_axis_num
        return tuple(
            inside + offset for inside, offset in zip((*leading, *local), self.global_offset)
        )

    def local_chunk_offset_in_global(self) -> Tuple[int, ...]:
        """The box's place in the grid of boxes; 0 along an axis of size 0.

        Raises:
            CheckpointingException: the box lies on no grid.
        """
        place = list(self.global_offset[: self.prepend_axis_num])
        for offset, size in zip(self.global_offset[self.prepend_axis_num :], self.local_shape):
            if size != 0 and offset % size != 0:
                raise self._wrong(InvalidArgumentError, "the box lies on no grid of its own shape")
            place.append(offset // size if size else 0)
        return tuple(place)

    def max_allowed_chunks(self) -> Tuple[int, ...]:
        """The largest chunk along each axis that no rank's box divides.

        Raises:
            CheckpointingException: the grid is irregular; or an axis is no multiple of its
                fragments, and allow_shape_mismatch is not set.
        """
        if self.axis_fragmentations is None:
            raise self._wrong(InvalidArgumentError, "an irregular grid has no chunk for all")
        sizes = []
        for size, fragments in zip(self.global_shape, self.axis_fragmentations):
            if not self.allow_shape_mismatch and size % fragments != 0:
                raise self._wrong(
                    InvalidArgumentError, f"{size} elements can't be divided by {fragments}"
                )
            sizes.append(size // fragments)
        return tuple(sizes)

    def without_data(self) -> ShardedTensor:
        """The same entity with data None."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: Tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """A part of a tensor that is divided evenly along some axes.

        Args:
            key: the global tensor's name.
            data: the local tensor.
            rank_offsets: (axis, place, fragments): along this axis the tensor is divided into that
                many fragments, and data is the one at this place. Axes count the prepended ones.
            replica_id, prepend_axis_num: as the attributes.
            flattened_range: must be None, see from_rank_offsets_flat.
            init_kwargs: other attributes.

        Raises:
            CheckpointingException: an axis that does not exist or is named twice (in Megatron-Core
                the last entry wins), a place outside its fragments, or a flattened range.
        """
        if flattened_range is not None:
            raise InvalidArgumentError(
                "from_rank_offsets describes whole boxes; use from_rank_offsets_flat for a "
                "flattened range",
                key=key,
            )
        local = (1,) * prepend_axis_num + tuple(data.shape)
        places, fragments = grid_of(key, rank_offsets, len(local))
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(size * count for size, count in zip(local, fragments)),
            tuple(size * place for size, place in zip(local, places)),
            tuple(fragments),
            replica_id,
            prepend_axis_num,
            flattened_range=None,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Tuple[int, ...],
        *args: Any,
        flattened_range: Optional[slice] = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """A slice of a flattened part of a tensor that is divided evenly along some axes.

        Args:
            key: the global tensor's name.
            data: 1-D, the elements of the slice.
            non_flat_local_shape: of the part before it was flattened.
            args, kwargs: as for from_rank_offsets.
            flattened_range: which elements of the flattened part data is; required.

        Raises:
            CheckpointingException: the slice is missing or has a step, data is not 1-D or of
                another length, or what from_rank_offsets refuses.
        """
        if flattened_range is None:
            raise InvalidArgumentError(
                "from_rank_offsets_flat needs a flattened range; use from_rank_offsets for a "
                "whole box",
                key=key,
            )
        if data.ndim != 1:
            text = f"data of a flattened range is 1-D, not of shape {tuple(data.shape)}"
            raise InvalidArgumentError(text, key=key)
        unflattened = torch.empty(tuple(non_flat_local_shape), dtype=data.dtype, device="meta")
        whole = cls.from_rank_offsets(key, unflattened, *args, **kwargs)
        return replace(whole, data=data, flattened_range=flattened_range)

    def init_data(
        self, device: Union[str, torch.device], init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocates data where it is None; of a flattened range no more than its elements.

        Args:
            device: where.
            init_fn: called with the shape, and dtype and device by name.
        """
        if self.data is not None:
            return
        shape = tuple(self.local_shape)
        if self.flattened_range is not None:
            shape = (self.flattened_range.stop - self.flattened_range.start,)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """What torch.narrow leaves of the part, where each rank narrows its own in the same way.

        Size and offset along the axis shrink in proportion. The data is a view of this one's; an
        entity without data gives entities without data.

        Args:
            dim: axis of local_shape; prepended axes don't count.
            start: first element of the part that stays.
            length: how many stay.

        Returns:
            one entity; of a flattened range one for each piece that is contiguous in both, which
            may be several or none.

        Raises:
            CheckpointingException: elements outside the part, or an irregular grid.
        """
        axis = dim + self.prepend_axis_num
        size = self._narrowed_size(dim, start, length)
        narrowed: dict[str, Any] = {
            "local_shape": with_entry(self.local_shape, dim, length),
            "global_shape": with_entry(
                self.global_shape, axis, self.global_shape[axis] // size * length if size else 0
            ),
            "global_offset": with_entry(
                self.global_offset, axis, self.global_offset[axis] // size * length if size else 0
            ),
        }
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [replace(self, data=data, **narrowed)]
        pieces = narrowed_pieces(tuple(self.local_shape), self.flattened_range, dim, start, length)
        begin = self.flattened_range.start
        return [
            replace(
                self,
                data=None if self.data is None else self.data[old.start - begin : old.stop - begin],
                flattened_range=new,
                **narrowed,
            )
            for old, new in pieces
        ]

    def _narrowed_size(self, dim: int, start: int, length: int) -> int:
        """The local size along an axis that may be narrowed so."""
        if not 0 <= dim < len(self.local_shape):
            raise self._wrong(InvalidArgumentError, f"there is no axis {dim} to narrow")
        size = self.local_shape[dim]
        if start < 0 or length < 0 or start + length > size:
            raise self._wrong(
                InvalidArgumentError, f"{length} elements from {start} lie outside the {size}"
            )
        axis = dim + self.prepend_axis_num
        if size and (self.global_shape[axis] % size or self.global_offset[axis] % size):
            raise self._wrong(InvalidArgumentError, "only a regular grid can be narrowed")
        return size


def is_main_replica(replica_id: Union[ReplicaId, Iterable[int]]) -> bool:
    """Whether a replica id is that of the main copy: 0, or all entries 0.

    The program gives exactly one copy of each part such an id.

    Raises:
        CheckpointingException: it is none: no whole number, and not several of them.
    """
    return replica_id == 0 if type(replica_id) is int else not any(_options.replica(replica_id, ""))


class LocalNonpersistentObject(Entity):
    """A value that is not saved; a load gives back the caller's own.

    Args:
        obj: the value.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The value."""
        return self.obj


@dataclass
class ShardedObject(ShardedBase):
    """An object at a place in a grid of objects; the grid can't be divided in another way.

    Attributes:
        key: the grid's name in the checkpoint.
        data: the object; None: only the place is described.
        global_shape: of the grid, in objects.
        global_offset: this object's place in it.
        replica_id: which copy of the same object this is; 0, or all zeros: the main one.

    Raises:
        CheckpointingException: place and grid differ in their number of axes.
    """

    key: str
    data: object
    global_shape: Tuple[int, ...]
    global_offset: Tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that place and grid have the same number of axes.

        Raises:
            CheckpointingException: they don't.
        """
        if len(self.global_shape) != len(self.global_offset):
            text = (
                f"global_offset {self.global_offset} and global_shape {self.global_shape} differ "
                f"in length: {self}"
            )
            raise MismatchError(text, key=self.key)

    def without_data(self) -> ShardedObject:
        """The same entity with data None."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The object's own name in the checkpoint: "key/shard_OFFSET_SHAPE", dots between axes."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{self.__class__.__name__}(key='{self.key}')"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The entity, without data, whose unique_key is given. The key itself may contain "/".

        In names of old versions the shape lacks its last entry, which is -1 then: not known.

        Raises:
            CheckpointingException: it is no unique key.
        """
        key, _, place = unique_key.rpartition("/shard_")
        parts = place.split("_")
        try:
            offset, shape = (tuple(int(n) for n in part.split(".") if part) for part in parts)
        except ValueError as error:
            text = f"{unique_key!r} is not of the form KEY/shard_OFFSET_SHAPE"
            raise InvalidArgumentError(text) from error
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, Optional[slice]], ShardedStateDict]
FactoryMergeFn = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(Held, ShardedBase):
    """Stands for a tensor that is stored as a subtree of entities.

    What is built depends on nothing but the arguments of build_fn, so the same factory serves
    optimizer states that belong to the tensor.

    Attributes:
        key: the name from which build_fn makes keys.
        data: the tensor.
        build_fn: build_fn(key, data, replica_id, flattened_range) returns the subtree.
        merge_fn: merge_fn(loaded subtree) returns the tensor.
        replica_id: which copy of the same tensor this is.
        flattened_range: data is this slice of the flattened tensor.
        holders: as of ShardedTensor, of the tensor; what is built gets them.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: Optional[slice] = None
    holders: Optional[Tuple[int, ...]] = field(default=None, repr=False, compare=False)

    def build(self) -> Any:
        """The subtree that stands for the tensor."""
        return self.build_of(self.key, self.data)

    def build_of(self, key: str, data: torch.Tensor) -> Any:
        """The subtree that would stand for another tensor of the same place."""
        built = self.build_fn(key, data, self.replica_id, self.flattened_range)
        return passed_on(self, built)

    def validate_metadata_integrity(self) -> None:
        """Nothing can be checked before the subtree is built."""

    def without_data(self) -> ShardedTensorFactory:
        """The same entity with data None."""
        return replace(self, data=None)  # type: ignore[arg-type]


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Puts the subtree that it builds in the place of each factory, in place."""

    def built(item: Any) -> Any:
        return item.build() if isinstance(item, ShardedTensorFactory) else item

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(x1: Any, x2: Any, key: Tuple[Any, ...] = ()) -> Any:
    """Puts the tensor that it merges in the place of each factory's loaded subtree, in place.

    Args:
        x1: what was loaded.
        x2: a tree of the factories at their places. A list may be a dict from index to value, as
            extract_matching_values(..., return_lists_as_dicts=True) gives it.
        key: path of both, for errors.

    Returns:
        x1; the merged tensor where x2 is a factory.

    Raises:
        ValueError: x1 lacks a place of x2.
    """
    return merged(x1, x2, key, ShardedTensorFactory)
