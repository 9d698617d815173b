"""The wrapped entities of a state dict.

Their meaning follows Megatron-Core's dist_checkpointing entities of the same names: a
`ShardedTensor` is this rank's part of a global tensor under a key of its own, wherever in the
tree it stands. `tilestone.load` gives back the local tensor in its place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tilestone import _converters, _core, _options, _params
from tilestone._converters import Call, Node
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._protocols import SupportsDlpack

ReplicaId = int | Sequence[int]


class ShardedTensor:
    """This rank's part of a global tensor.

    Made by one of `from_rank_offsets`, `from_rank_offsets_flat`, `from_placements`, `from_param`,
    `from_box` and `from_box_flat`. Arguments that can't be meant are refused there, with InvalidArgumentError naming
    key, argument and value.

    Attributes:
        data: the local array (torch tensor, numpy array, or anything with __dlpack__); saves
            read it, loads fill it in place. A tensor on torch's meta device has a dtype and a
            shape only: a load allocates it.
        allow_shape_mismatch: on load, a global shape other than the stored one is no error;
            elements beyond the stored tensor become zero.
    """

    __slots__ = ("_make", "allow_shape_mismatch", "data", "holders", "__weakref__")

    def __init__(
        self,
        make: Callable[[_core.TensorView], _core.ShardedTensor],
        data: SupportsDlpack,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
    ) -> None:
        """Used by the from_... methods."""
        self._make = make
        self.data = data
        self.allow_shape_mismatch = allow_shape_mismatch
        self.holders = None if holders is None else tuple(holders)
        self._entity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: SupportsDlpack,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """A cell of a regular grid.

        Args:
            key: the tensor's name in the checkpoint.
            data: the local array; every rank's has the same shape.
            rank_offsets: (axis, rank, fragments): along `axis` (which counts prepended axes)
                `data` is cell `rank` of `fragments`. The global shape is the local one times
                the fragments.
            replica_id: which copy of the same cell this is; all zeros: the main one.
            prepend_axis_num: axes that the global tensor has before those of `data`.
            holders: global ranks that hold the same cell, this one included, where the caller
                knows them; saves by rule then balance them without a word between ranks.
        """
        make = functools.partial(
            _with_data,
            _core.ShardedTensor.from_rank_offsets,
            _options.entity_key(key),
            offsets=[tuple(offset) for offset in rank_offsets],
            replica_id=_options.replica(replica_id, key),
            prepend_axis_num=prepend_axis_num,
        )
        return cls(make, data, allow_shape_mismatch, holders)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: SupportsDlpack,
        local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | tuple[int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """A slice of the flattened cell of a regular grid (a distributed optimizer's shard).

        Args:
            data: 1-D, the elements [begin, end) of the flattened local tensor.
            local_shape: shape of that local tensor.
            flattened_range: slice(begin, end) or (begin, end), in elements.
        """
        begin, end = _range(flattened_range)
        make = functools.partial(
            _with_data,
            _core.ShardedTensor.from_rank_offsets_flat,
            _options.entity_key(key),
            local_shape=tuple(local_shape),
            begin=begin,
            end=end,
            offsets=[tuple(offset) for offset in rank_offsets],
            replica_id=_options.replica(replica_id, key),
            prepend_axis_num=prepend_axis_num,
        )
        return cls(make, data, allow_shape_mismatch, holders)

    @classmethod
    def from_placements(
        cls,
        key: str,
        data: SupportsDlpack,
        global_shape: Sequence[int],
        mesh: _core.Mesh,
        placements: Sequence[_core.Shard | _core.StridedShard | _core.Replicate | _core.Partial],
        rank: int,
        *,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """The local tensor of `rank` under a mesh and placements, as a torch DTensor's.

        Box, replica id and holders follow from the arguments; a rank outside the mesh holds
        nothing. `Partial` is refused.
        """
        make = functools.partial(
            _with_data,
            _core.ShardedTensor.from_placements,
            _options.entity_key(key),
            global_shape=tuple(global_shape),
            mesh=mesh,
            placements=list(placements),
            rank=rank,
        )
        return cls(make, data, allow_shape_mismatch)

    @classmethod
    def from_param(
        cls,
        param: Any,
        checkpoint_mesh: Any,
        placements: Any,
        *,
        key: str | None = None,
        rank: int | None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """A parameter that the checkpoint lays over other ranks than the parameter itself says.

            rules = PlacementRules({"experts": {"ep": Shard(0)}})
            mesh = expert_mesh["edp", "ep", "etp"]
            state = {name: ShardedTensor.from_param(p, mesh, rules)
                     for name, p in model.named_parameters()}

        With expert parallelism each rank's parameter knows its own experts only: on every
        expert-parallel rank it has one name and one shape, and by its own placements rank 1's
        experts would be the same as rank 0's. `checkpoint_mesh` and `placements` say what they are
        of the checkpoint's tensor. A Shard there lies outside of the parameter's own shards, which
        stay inside it (FSDP2 over the expert-data ranks); over ranks that the parameter splits
        along the same dim already it counts once. With Replicate alone the parameter's own mesh
        and placements stay. Which ranks are which is found from the ranks of both meshes, not from
        the names of their dims. See docs/placements.md.

        A load gives back `param` itself, filled. Nothing is gathered: an empty local shard is
        saved and loaded as one.

        Args:
            param: an array (torch tensor, parameter, numpy array, or anything with __dlpack__), all
                of which is this rank's; a DTensor; or an object with device_mesh, placements, shape
                (of the whole) and to_local(), which gives the memory itself.
            checkpoint_mesh: a torch DeviceMesh, or a `geometry.Mesh` of global ranks, that has this
                rank. It has all ranks that hold a part or a copy of the tensor, but for those of
                the parameter's own mesh; so no pipeline ranks, whose parameters are others.
            placements: over checkpoint_mesh: `PlacementRules`; or a placement (Shard over a mesh of
                one dim, Replicate over any; torch's or those of `tilestone.geometry`), a sequence
                with one for each dim, or a mapping from names of dims, the others being Replicate.
            key: the tensor's name in the checkpoint, to which the rules apply; by default its
                dotted path in the state.
            rank: this process's global rank; by default what a torch DeviceMesh says, the
                checkpoint's or the parameter's.
            allow_shape_mismatch: see the class.

        Raises:
            InvalidArgumentError: no rank is known, or it is in one of the meshes only; placements
                that don't fit the mesh or contradict the parameter's; a Partial placement. What
                needs the key (rules, without `key=`) is raised by the save or load.
            UnsupportedError: a placement of torch's that Tilestone doesn't know.
        """
        try:
            place = _params.Param(param, checkpoint_mesh, placements, rank)
            return _OfParam(place, param, key, allow_shape_mismatch)
        except CheckpointError as error:
            error.add_key(key or "")
            raise

    @classmethod
    def from_box(
        cls,
        key: str,
        data: SupportsDlpack,
        global_shape: Sequence[int],
        box: _core.Box | Sequence[tuple[int, int]],
        *,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """Any box of a tensor of `global_shape`: an irregular grid.

        Args:
            box: a Box, or (start, stop) for each dim. Its shape is that of `data`, after
                prepend_axis_num leading dims of size 1.
        """
        make = functools.partial(
            _with_data,
            _core.ShardedTensor.from_box,
            _options.entity_key(key),
            global_shape=tuple(global_shape),
            box=to_box(box),
            replica_id=_options.replica(replica_id, key),
            prepend_axis_num=prepend_axis_num,
        )
        return cls(make, data, allow_shape_mismatch, holders)

    @classmethod
    def from_box_flat(
        cls,
        key: str,
        data: SupportsDlpack,
        global_shape: Sequence[int],
        box: _core.Box | Sequence[tuple[int, int]],
        *,
        flattened_range: slice | tuple[int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """A slice of any flattened box of a tensor of `global_shape`.

        Args:
            data: 1-D, the elements [begin, end) of the flattened box; an empty slice holds nothing.
            box: a Box, or (start, stop) for each dim, prepend_axis_num leading ones of size 1.
            flattened_range: slice(begin, end) or (begin, end), in elements.
        """
        begin, end = _range(flattened_range)
        make = functools.partial(
            _with_data,
            _core.ShardedTensor.from_box_flat,
            _options.entity_key(key),
            global_shape=tuple(global_shape),
            box=to_box(box),
            begin=begin,
            end=end,
            replica_id=_options.replica(replica_id, key),
            prepend_axis_num=prepend_axis_num,
        )
        return cls(make, data, allow_shape_mismatch, holders)

    @property
    def key(self) -> str:
        """The tensor's name in the checkpoint."""
        return self._entity().key

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Elements of the whole tensor, per dim."""
        return self._entity().global_shape

    @property
    def boxes(self) -> list[_core.Box]:
        """What this rank holds: one box, or those of a flat range or strided placement."""
        return self._entity().boxes

    @property
    def replica_id(self) -> tuple[int, ...]:
        """Which copy this is; all zeros: the main one."""
        return self._entity().replica_id

    @property
    def is_regular_grid(self) -> bool:
        """Whether each offset is a multiple of the local size."""
        return self._entity().is_regular_grid

    def _entity(self, for_load: bool | None = None) -> _core.ShardedTensor:
        """For a load, for a save, or (None) only to tell its place."""
        try:
            if for_load is None:
                entity = self._make(_converters.description(self.data))
            else:
                entity = self._make(_converters.view(self.data, for_load))
        except CheckpointError as error:
            error.add_key(self._given_key())
            raise
        entity.allow_shape_mismatch = self.allow_shape_mismatch
        if self.holders is not None:
            entity.holders = list(self.holders)
        return entity

    def _given_key(self) -> str:
        # A partial of one of the from_... methods, with a function and the key.
        args: tuple[Any, ...] = getattr(self._make, "args", ())
        return str(args[1]) if len(args) > 1 else ""

    def __repr__(self) -> str:
        return f"ShardedTensor({self.key!r}, global_shape={self.global_shape}, boxes={self.boxes})"


class _OfParam(ShardedTensor):
    """What from_param makes: without a key of its own it gets its path."""

    __slots__ = ("_given", "_place")

    def __init__(
        self, place: _params.Param, data: Any, key: str | None, allow_shape_mismatch: bool
    ) -> None:
        self._place = place
        self._given = key
        self.data = data
        self.allow_shape_mismatch = allow_shape_mismatch
        self.holders = None
        if key is None and place.needs_name:
            place.check()
        else:
            self._entity()

    @property
    def key(self) -> str:
        """The tensor's name in the checkpoint; "": its path."""
        return self._given or ""

    def _entity(self, for_load: bool | None = None) -> _core.ShardedTensor:
        if self._given is None and self._place.needs_name:
            raise InvalidArgumentError(
                "where it lies follows from its name, which it has in a state only",
                hint="give from_param key=",
            )
        return self.named(self.key, for_load)

    def named(self, path: str, for_load: bool | None) -> _core.ShardedTensor:
        """The entity at a path of the state."""
        key = path if self._given is None else self._given
        try:
            entity = self._place.entity(key, for_load)
        except CheckpointError as error:
            error.add_key(key)
            raise
        entity.allow_shape_mismatch = self.allow_shape_mismatch
        if self.holders is not None:
            entity.holders = list(self.holders)
        return entity

    def __repr__(self) -> str:
        return f"ShardedTensor.from_param(key={self._given!r})"


def _with_data(
    function: Callable[..., _core.ShardedTensor], key: str, view: _core.TensorView, **rest: Any
) -> _core.ShardedTensor:
    return function(key, view, **rest)


def _range(flattened_range: slice | tuple[int, int]) -> tuple[int, int]:
    """(begin, end) of a flat range."""
    if isinstance(flattened_range, slice):
        return flattened_range.start, flattened_range.stop
    begin, end = flattened_range
    return begin, end


def to_box(box: _core.Box | Sequence[tuple[int, int] | slice]) -> _core.Box:
    """A Box from (start, stop) pairs or slices with both ends.

    Raises:
        InvalidArgumentError: it is something else, names no start or stop, or one that is no
            whole number of 64 bits, or a stop before its start.
    """
    if isinstance(box, _core.Box):
        return box
    try:
        pairs = [_ends(part) for part in box]
        offset, shape = [start for start, _ in pairs], [stop - start for start, stop in pairs]
    except TypeError:
        offset, shape = [-1], []
    if len(offset) != len(shape) or any(not 0 <= n < 1 << 63 for n in offset + shape):
        raise InvalidArgumentError(f"a box is (start, stop) for each dim, not {box!r}")
    return _core.Box(offset, shape)


def _ends(part: Any) -> tuple[int, int]:
    """(start, stop) of one dim of a box; TypeError for what is neither a pair nor a slice."""
    if isinstance(part, (str, bytes)) or (isinstance(part, slice) and part.step not in (None, 1)):
        raise TypeError
    ends: tuple[Any, ...] = (
        (part.start, part.stop) if isinstance(part, slice) else tuple(part)
    )
    if len(ends) != 2:
        raise TypeError
    return operator.index(ends[0]), operator.index(ends[1])


class _NoData:
    """Stands for a load, which looks at no object's data."""

    for_load = True


class ShardedObject:
    """Opaque data at a place in a grid of objects; it can't be resharded.

    Args:
        key: the grid's name.
        data: any object; one that is no plain data is pickled.
        global_shape: of the grid, in objects.
        global_offset: this object's place in it.
        replica_id: which copy this is; all zeros: the main one.

    Raises:
        InvalidArgumentError: the place lies outside the grid.
    """

    __slots__ = ("data", "global_offset", "global_shape", "key", "replica_id", "__weakref__")

    def __init__(
        self,
        key: str,
        data: object,
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        replica_id: ReplicaId = 0,
    ) -> None:
        self.key = _options.entity_key(key)
        self.data = data
        self.global_shape = tuple(global_shape)
        self.global_offset = tuple(global_offset)
        self.replica_id = _options.replica(replica_id, self.key)
        self._entity(None)

    @property
    def unique_key(self) -> str:
        """ "key/shard_OFFSET_SHAPE": its key in the checkpoint."""
        return self._entity(None).unique_key

    def _entity(self, call: Call | None) -> _core.ShardedObject:
        """For a save or load, or (None) only to tell its place."""
        return _core.ShardedObject.make(
            self.key,
            None if call is None else self.data,
            self.global_shape,
            self.global_offset,
            self.replica_id,
            _NoData() if call is None else call,
        )


class ShardedTensorFactory:
    """Stands for a subtree that is built before a save and merged after a load.

    Args:
        key, data, replica_id, flattened_range: what `build_fn` is called with.
        build_fn: build_fn(key, data, replica_id, flattened_range) returns a tree of entities.
            It must be pure: saves and loads call it with their own arguments.
        merge_fn: merge_fn(loaded_tree) returns what stands in the factory's place after a load.
    """

    __slots__ = ("build_fn", "data", "flattened_range", "key", "merge_fn", "replica_id")

    def __init__(
        self,
        key: str,
        data: SupportsDlpack,
        build_fn: Callable[[str, Any, tuple[int, ...], tuple[int, int] | None], Any],
        merge_fn: Callable[[Any], Any],
        replica_id: ReplicaId = 0,
        flattened_range: slice | tuple[int, int] | None = None,
    ) -> None:
        if isinstance(flattened_range, slice):
            flattened_range = (flattened_range.start, flattened_range.stop)
        self.key = _options.entity_key(key)
        self.data = data
        self.build_fn = build_fn
        self.merge_fn = merge_fn
        self.replica_id = _options.replica(replica_id, self.key)
        self.flattened_range = flattened_range

    def _entity(self, call: Call) -> _core.ShardedTensorFactory:
        return _core.ShardedTensorFactory.make(
            self.key,
            _converters.view(self.data, call.for_load),
            self.data,
            self.build_fn,
            self.merge_fn,
            self.replica_id,
            self.flattened_range,
            call,
        )


class LocalNonpersistent:
    """A value that is not saved; a load gives back the template's own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _EntityConverter(_converters.PartConverter):
    def node(self, item: Any, path: str, call: Call) -> Node | None:
        if isinstance(item, ShardedTensor):
            if isinstance(item, _OfParam):
                made = item.named(path, call.for_load)
            else:
                made = item._entity(call.for_load)
            if made.holders:
                made.holders = _converters.ranks_in(call, made.holders)
            return made
        if isinstance(item, LocalNonpersistent):
            return _core.LocalNonpersistent.make(item.value)
        entity: Node = item._entity(call)
        return entity

    def data_of(self, item: Any) -> Any:
        return item.data if isinstance(item, (ShardedTensor, ShardedObject)) else item


for _kind in (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistent):
    _converters.add(_kind, _EntityConverter())
