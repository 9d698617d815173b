"""The entities of a sharded state dict: which part of a global tensor or object a rank holds.

Fields, methods and checks are those of Megatron-Core 0.16; slices of flattened tensors
(`flattened_range`) are those of 0.13. Megatron-Core's own entities count as instances of these
classes, so every function of this package accepts both.
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

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._options import valid
from tilestone.megatron._shards.entities import (
    Entity,
    WithHolders,
    grid_of,
    merged,
    narrowed_runs,
    passed_on,
    with_entry,
)
from tilestone.megatron.dict_utils import dict_list_map_inplace

logger = logging.getLogger(__name__)

# CommonStateDict: state that is saved once for all ranks. ShardedStateDict: tensors are entities.
StateDict = Dict[str, Any]
CommonStateDict = Dict[str, Any]
ShardedStateDict = Dict[str, Any]
# Which replica of the same data this is: (pipeline, tensor, data parallel) by convention; all
# zeros: the main one.
ReplicaId = Union[int, Tuple[int, ...]]


class ShardedBase(Entity):
    """Base of the entities that several ranks store in parts.

    Attributes:
        key: name of the whole tensor or object in the checkpoint.
        data: this rank's part.
        replica_id: which replica of the part this is; 0, or all zeros, for the main one.
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Checks that the attributes fit together.

        Raises:
            CheckpointingException: they do not.
        """

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same entity with data None."""
        raise NotImplementedError


@dataclass
class ShardedTensor(WithHolders, ShardedBase):
    """A rank's part of a global tensor: a box of it, or a slice of a flattened box.

    Attributes:
        key: the global tensor's name in the checkpoint.
        data: the local tensor, of local_shape; with flattened_range a 1-D tensor of that length.
            None: the entity only describes the part.
        dtype: type of the elements.
        local_shape: shape of the box, without the prepended axes.
        global_shape: elements of the whole tensor along each axis, prepended axes first.
        global_offset: the first element of the box along each axis, prepended axes first.
        axis_fragmentations: number of boxes of local_shape along each axis; None: the grid is
            irregular.
        replica_id: which replica of the part this is; 0, or all zeros, for the main one.
        prepend_axis_num: number of axes of size 1 that the box has before those of local_shape.
        allow_shape_mismatch: a load accepts a stored tensor of another global shape (padding).
        flattened_range: data is this slice (start and stop, no step) of the flattened box. The
            slice may be empty.
        holders: not in Megatron-Core: global ranks that hold the same part, including this one;
            None: not known. Saves by rule share the writing among them. Setting another replica_id
            sets holders to None; with replace() pass both.

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

        The data's dtype and shape are as described; the three global attributes have one entry
        for each axis; the offsets of a regular grid are multiples of the local size; a flattened
        range lies within the box.

        Raises:
            CheckpointingException: they do not; the message has all attributes.
        """
        self._check_data()
        if len(self.global_shape) != len(self.global_offset):
            raise self._differs("global_offset and global_shape differ in length")
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            raise self._differs(
                "local_shape and prepend_axis_num together have a different number of axes than "
                "global_shape"
            )
        if self.axis_fragmentations is not None:
            for offset, size in zip(self.global_offset[self.prepend_axis_num :], self.local_shape):
                if size != 0 and offset % size != 0:
                    raise self._wrong(
                        f"an offset of a regular grid ({offset}) is not a multiple of the local "
                        f"size ({size})"
                    )
        if self.flattened_range is not None:
            self._check_range(self.flattened_range)

    def _wrong(self, text: str) -> Exception:
        return InvalidArgumentError(f"{text}: {self}", key=self.key)

    def _differs(self, text: str) -> Exception:
        return MismatchError(f"{text}: {self}", key=self.key)

    def _check_data(self) -> None:
        if self.data is None:
            return
        if self.data.dtype != self.dtype:
            raise self._differs(f"data has dtype {self.data.dtype}, not `dtype`")
        if self.flattened_range is None and tuple(self.data.shape) != tuple(self.local_shape):
            raise self._differs(f"data has shape {tuple(self.data.shape)}, not `local_shape`")

    def _check_range(self, flat: slice) -> None:
        size = math.prod(self.local_shape)
        if flat.step is not None or flat.start is None or flat.stop is None:
            raise self._wrong("a flattened range must have a start, a stop and no step")
        if not 0 <= flat.start <= flat.stop <= size:
            raise self._wrong(f"a flattened range exceeds the {size} local elements")
        count = (flat.stop - flat.start,)
        if self.data is not None and tuple(self.data.shape) != count:
            raise self._differs(
                f"data of a flattened range has shape {tuple(self.data.shape)}, not {count}"
            )

    @property
    def has_regular_grid(self) -> bool:
        """Whether all parts have the same shape and lie on a grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> Tuple[Union[int, slice], ...]:
        """The box as an index of the global tensor: ints for prepended axes, then slices.

        With a flattened range it is the box that the data is a slice of.
        """
        leading = self.global_offset[: self.prepend_axis_num]
        offsets = self.global_offset[self.prepend_axis_num :]
        return (
            *leading,
            *(slice(begin, begin + size) for begin, size in zip(offsets, self.local_shape)),
        )

    def local_coordinates(self) -> Tuple[np.ndarray, ...]:
        """The positions of a flattened range's elements in the box.

        Returns:
            for each axis of local_shape, an int64 array with an entry for each element of data.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        if self.flattened_range is None:
            raise self._wrong("coordinates need a flattened range")
        flat = np.arange(self.flattened_range.start, self.flattened_range.stop)
        return tuple(np.unravel_index(flat, tuple(self.local_shape)))

    def global_coordinates(self) -> Tuple[np.ndarray, ...]:
        """The positions of a flattened range's elements in the global tensor.

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
        """The box's position in the grid of boxes; 0 along an axis of size 0.

        Raises:
            CheckpointingException: the box does not lie on a grid.
        """
        place = list(self.global_offset[: self.prepend_axis_num])
        for offset, size in zip(self.global_offset[self.prepend_axis_num :], self.local_shape):
            if size != 0 and offset % size != 0:
                raise self._wrong("the box does not lie on a grid of its own shape")
            place.append(offset // size if size else 0)
        return tuple(place)

    def max_allowed_chunks(self) -> Tuple[int, ...]:
        """The largest chunk size along each axis with which no chunk crosses a box's border.

        Raises:
            CheckpointingException: the grid is irregular; or an axis is not a multiple of its
                number of fragments, and allow_shape_mismatch is False.
        """
        if self.axis_fragmentations is None:
            raise self._wrong("an irregular grid has no common chunk size")
        sizes = []
        for size, fragments in zip(self.global_shape, self.axis_fragmentations):
            if not self.allow_shape_mismatch and size % fragments != 0:
                raise self._wrong(
                    f"{size} elements can't be divided into {fragments} equal fragments"
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
        """Describes a part of a tensor that is divided evenly along some axes.

        Args:
            key: the global tensor's name.
            data: the local tensor.
            rank_offsets: (axis, place, fragments): along this axis the tensor is divided into this
                many fragments, and data is the fragment at this place. Prepended axes are counted.
            replica_id, prepend_axis_num: see the attributes.
            flattened_range: must be None, see from_rank_offsets_flat.
            init_kwargs: other attributes.

        Raises:
            CheckpointingException: an axis does not exist or is given twice (in Megatron-Core the
                last entry wins), a place is not below its fragments, or a flattened range is given.
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
        """Describes a slice of a flattened part of a tensor that is divided evenly.

        Args:
            key: the global tensor's name.
            data: 1-D, the elements of the slice.
            non_flat_local_shape: shape of the part before it was flattened.
            args, kwargs: as for from_rank_offsets.
            flattened_range: the elements of the flattened part that data holds; required.

        Raises:
            CheckpointingException: the slice is missing or has a step; data is not 1-D or has
                another length; or as from_rank_offsets.
        """
        if flattened_range is None:
            raise InvalidArgumentError(
                "from_rank_offsets_flat needs a flattened range; use from_rank_offsets for a "
                "whole box",
                key=key,
            )
        if data.ndim != 1:
            text = f"data of a flattened range must be 1-D, but has shape {tuple(data.shape)}"
            raise InvalidArgumentError(text, key=key)
        unflattened = torch.empty(tuple(non_flat_local_shape), dtype=data.dtype, device="meta")
        whole = cls.from_rank_offsets(key, unflattened, *args, **kwargs)
        return replace(whole, data=data, flattened_range=flattened_range)

    def init_data(
        self, device: Union[str, torch.device], init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocates data if it is None; for a flattened range, only its elements.

        Args:
            device: where to allocate.
            init_fn: called with the shape, and dtype and device by name.
        """
        if self.data is not None:
            return
        shape = tuple(self.local_shape)
        if self.flattened_range is not None:
            shape = (self.flattened_range.stop - self.flattened_range.start,)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrows the part as torch.narrow does, if each rank narrows its own part in the same way.

        Size and offset along the axis shrink in proportion. The new data is a view of the old data;
        an entity without data gives entities without data.

        Args:
            dim: axis of local_shape; prepended axes don't count.
            start: first element to keep.
            length: number of elements to keep.

        Returns:
            one entity; for a flattened range, one for each run that is contiguous both before and
            after, which may be several or none.

        Raises:
            CheckpointingException: elements lie outside the part, or the grid is irregular.
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
        runs = narrowed_runs(tuple(self.local_shape), self.flattened_range, dim, start, length)
        begin = self.flattened_range.start
        return [
            replace(
                self,
                data=None if self.data is None else self.data[old.start - begin : old.stop - begin],
                flattened_range=new,
                **narrowed,
            )
            for old, new in runs
        ]

    def _narrowed_size(self, dim: int, start: int, length: int) -> int:
        """The local size along an axis that may be narrowed in this way."""
        if not 0 <= dim < len(self.local_shape):
            raise self._wrong(f"there is no axis {dim} to narrow")
        size = self.local_shape[dim]
        if start < 0 or length < 0 or start + length > size:
            raise self._wrong(
                f"{length} elements from {start} do not lie within the {size} elements"
            )
        axis = dim + self.prepend_axis_num
        if size and (self.global_shape[axis] % size or self.global_offset[axis] % size):
            raise self._wrong("only a regular grid can be narrowed")
        return size


def is_main_replica(replica_id: Union[ReplicaId, Iterable[int]]) -> bool:
    """Whether a replica id is that of the main replica: 0, or all entries 0.

    The program must give exactly one replica of each part such an id.

    Raises:
        CheckpointingException: it is not an integer or a sequence of integers.
    """
    return replica_id == 0 if type(replica_id) is int else not any(valid.replica(replica_id, ""))


class LocalNonpersistentObject(Entity):
    """A value that is not saved; a load returns the caller's own value.

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
    """An object of a cell in a grid of objects. The grid can't be divided differently.

    Attributes:
        key: name of the grid in the checkpoint.
        data: the object; None: the entity only describes the place.
        global_shape: size of the grid, in objects.
        global_offset: this object's place in it.
        replica_id: which replica of the object this is; 0, or all zeros, for the main one.

    Raises:
        CheckpointingException: place and grid have different numbers of axes.
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
            CheckpointingException: they do not.
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
        """Makes the entity, without data, that has this unique_key. The key may contain "/".

        In names of old versions the shape lacks its last entry, which becomes -1: not known.

        Raises:
            CheckpointingException: it is not a unique key.
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
class ShardedTensorFactory(WithHolders, ShardedBase):
    """A tensor that is stored as a subtree of entities.

    The subtree depends only on the arguments of build_fn, so the same factory also serves the
    optimizer states that belong to the tensor.

    Attributes:
        key: the name from which build_fn makes the keys.
        data: the tensor.
        build_fn: build_fn(key, data, replica_id, flattened_range) returns the subtree.
        merge_fn: merge_fn(loaded subtree) returns the tensor.
        replica_id: which replica of the tensor this is.
        flattened_range: data is this slice of the flattened tensor.
        holders: holders of the tensor, as in ShardedTensor; the built entities get them.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: Optional[slice] = None
    holders: Optional[Tuple[int, ...]] = field(default=None, repr=False, compare=False)

    def build(self) -> Any:
        """Builds the subtree for the tensor."""
        return self.build_of(self.key, self.data)

    def build_of(self, key: str, data: torch.Tensor) -> Any:
        """Builds the subtree for another tensor in the same place."""
        built = self.build_fn(key, data, self.replica_id, self.flattened_range)
        return passed_on(self, built)

    def validate_metadata_integrity(self) -> None:
        """Does nothing: nothing can be checked before the subtree is built."""

    def without_data(self) -> ShardedTensorFactory:
        """The same entity with data None."""
        return replace(self, data=None)  # type: ignore[arg-type]


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replaces each factory by the subtree that it builds, in place."""

    def built(item: Any) -> Any:
        return item.build() if isinstance(item, ShardedTensorFactory) else item

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(x1: Any, x2: Any, key: Tuple[Any, ...] = ()) -> Any:
    """Replaces the loaded subtree of each factory by the merged tensor, in place.

    Args:
        x1: the loaded state.
        x2: a tree of the factories, each in its place. A list may be a dict from index to value, as
            extract_matching_values(..., return_lists_as_dicts=True) returns it.
        key: path of both, for errors.

    Returns:
        x1; the merged tensor if x2 is a factory.

    Raises:
        ValueError: x1 lacks a place of x2.
    """
    return merged(x1, x2, key, ShardedTensorFactory)
