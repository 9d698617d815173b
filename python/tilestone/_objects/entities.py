"""The entities that wrap data in a state dict.

They follow Megatron-Core's dist_checkpointing entities of the same names. A `ShardedTensor` is this
rank's part of a global tensor with its own key, which does not depend on its place in the tree.
`tilestone.load` returns the local tensor in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from tilestone import _core
from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._objects import converters, given, params
from tilestone._objects.converters import Call, Node
from tilestone._options import valid
from tilestone._protocols import SupportsDlpack

ReplicaId = int | Sequence[int]


class ShardedTensor:
    """This rank's part of a global tensor.

    Use one of `from_rank_offsets`, `from_rank_offsets_flat`, `from_placements`, `from_param`,
    `from_box` and `from_box_flat` to make one. They raise InvalidArgumentError for invalid
    arguments; the error names the key, the argument and its value.

    Attributes:
        data: the local array (a torch tensor, a numpy array, or anything with __dlpack__). Saves
            read it, loads fill it in place. A tensor on torch's meta device has only a dtype and a
            shape; a load allocates its memory.
        allow_shape_mismatch: for loads: the global shape may differ from the stored one. Elements
            outside the stored tensor become zero.
    """

    __slots__ = (
        "_arguments", "_key", "_make", "allow_shape_mismatch", "data", "holders", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        make: str,
        key: str,
        data: SupportsDlpack,
        allow_shape_mismatch: bool = False,
        holders: Sequence[int] | None = None,
        **arguments: Any,
    ) -> None:
        """Called by the from_... methods; `make` is the name of the engine's."""
        self._make = make
        self._key: str | None = valid.entity_key(key)
        self._arguments = arguments
        self.data: params.ParamLike = data
        self.allow_shape_mismatch = allow_shape_mismatch
        self.holders = None if holders is None else valid.entries("holders", holders, key)
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
            data: the local array; it has the same shape on every rank.
            rank_offsets: (axis, rank, fragments): along `axis` (prepended axes are counted),
                `data` is cell number `rank` of `fragments` cells. The global shape is the local
                shape times the fragments.
            replica_id: which replica of the cell this is; all zeros for the main one.
            prepend_axis_num: number of axes that the global tensor has before those of `data`.
            holders: the global ranks that hold the same cell, this one included, if the caller
                knows them. Saves by files then balance the writing between the holders
                without communication.
        """
        return cls(
            "from_rank_offsets",
            key,
            data,
            allow_shape_mismatch,
            holders,
            offsets=valid.rank_offsets(rank_offsets, key),
            replica_id=valid.replica(replica_id, key),
            prepend_axis_num=valid.entry("prepend_axis_num", prepend_axis_num, key),
        )

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
        """A slice of a flattened cell of a regular grid (a distributed optimizer's shard).

        Args:
            data: a 1-D array: the elements [begin, end) of the flattened local tensor.
            local_shape: shape of that local tensor.
            flattened_range: slice(begin, end) or (begin, end), in elements.
        """
        begin, end = given.flat_range(key, flattened_range)
        return cls(
            "from_rank_offsets_flat",
            key,
            data,
            allow_shape_mismatch,
            holders,
            local_shape=valid.entries("local_shape", local_shape, key),
            begin=begin,
            end=end,
            offsets=valid.rank_offsets(rank_offsets, key),
            replica_id=valid.replica(replica_id, key),
            prepend_axis_num=valid.entry("prepend_axis_num", prepend_axis_num, key),
        )

    @classmethod
    def from_placements(
        cls,
        key: str,
        data: SupportsDlpack,
        global_shape: Sequence[int],
        mesh: params.MeshLike,
        placements: params.PlacementsLike,
        rank: int,
        *,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """The local tensor of `rank` for a mesh and placements, as in a torch DTensor.

        The box, the replica id and the holders follow from the arguments. `mesh` may also be a
        torch DeviceMesh, and the placements torch's; they may be given in every way that
        `from_param` takes, except as rules. A rank outside the mesh holds nothing.
        `Partial` raises an error.
        """
        with given.naming(key):
            over = given.to_mesh(mesh)
            return cls(
                "from_placements",
                key,
                data,
                allow_shape_mismatch,
                global_shape=valid.entries("global_shape", global_shape, key),
                mesh=over,
                placements=given.Spec(placements).over(over),
                rank=valid.whole("rank", rank),
            )

    @classmethod
    def from_param(
        cls,
        param: params.ParamLike,
        checkpoint_mesh: params.MeshLike,
        placements: params.PlacementsLike,
        *,
        key: str | None = None,
        rank: int | None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """A parameter whose sharding in the checkpoint is not the one that it states itself.

            rules = PlacementRules({"experts": {"ep": Shard(0)}})
            mesh = expert_mesh["edp", "ep", "etp"]
            state = {name: ShardedTensor.from_param(p, mesh, rules)
                     for name, p in model.named_parameters()}

        With expert parallelism, each rank's parameter knows only its own experts. On every
        expert-parallel rank it has the same name and shape, so by its own placements rank 1's
        experts would be the same as rank 0's. `checkpoint_mesh` and `placements` say which part of
        the checkpoint's tensor they are. A Shard there is applied first, and the parameter's own
        shards divide its result (FSDP2 over the expert-data ranks). Ranks that the parameter
        already splits along the same dim are not split again. With only Replicate, the parameter's
        own mesh and placements are kept. Ranks are matched by their numbers in both meshes, not by
        the names of the meshes' dims. See docs/placements.md.

        A load returns `param` itself, filled. Nothing is gathered: an empty local shard is saved
        and loaded as an empty shard.

        Args:
            param: an array (a torch tensor, a parameter, a numpy array, or anything with
                __dlpack__) that is local to this rank as a whole; a DTensor; or an object with
                device_mesh, placements, shape (the global shape) and to_local(), which must return
                the parameter's memory and not a copy.
            checkpoint_mesh: a torch DeviceMesh, or a `geometry.Mesh` of global ranks, that contains
                this rank. Together with the parameter's own mesh it must contain all ranks that
                hold a part or a copy of the tensor. It must not contain pipeline ranks, which have
                other parameters.
            placements: placements over checkpoint_mesh: `PlacementRules`; one placement (Shard for
                a mesh with one dim, Replicate for any mesh; of torch or `tilestone.geometry`); a
                sequence with one placement for each dim; or a mapping from names of dims to
                placements, in which missing dims are Replicate.
            key: the tensor's name in the checkpoint, to which the rules apply; by default its
                dotted path in the state.
            rank: this process's global rank; by default the rank that a torch DeviceMesh states,
                the checkpoint's or the parameter's.
            allow_shape_mismatch: see the class.

        Raises:
            InvalidArgumentError: the rank is unknown or is only in one of the meshes; the
                placements don't fit the mesh or contradict the parameter's; or one is Partial. The
                save or load raises errors that depend on the key (rules, without `key=`).
            UnsupportedError: Tilestone doesn't know one of torch's placements.
        """
        with given.naming(key or ""):
            place = params.Param(param, checkpoint_mesh, placements, rank)
            return _OfParam(place, param, key, allow_shape_mismatch)

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
        """Any box of a tensor with shape `global_shape`, for irregular grids.

        Args:
            box: a Box, or (start, stop) for each dim. Its shape is that of `data`, after
                prepend_axis_num leading dims of size 1.
        """
        return cls(
            "from_box",
            key,
            data,
            allow_shape_mismatch,
            holders,
            global_shape=valid.entries("global_shape", global_shape, key),
            box=given.box_of(key, box),
            replica_id=valid.replica(replica_id, key),
            prepend_axis_num=valid.entry("prepend_axis_num", prepend_axis_num, key),
        )

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
        """A slice of any flattened box of a tensor with shape `global_shape`.

        Args:
            data: a 1-D array: the elements [begin, end) of the flattened box. An empty slice holds
                nothing.
            box: a Box, or (start, stop) for each dim. Its first prepend_axis_num dims have size 1.
            flattened_range: slice(begin, end) or (begin, end), in elements.
        """
        begin, end = given.flat_range(key, flattened_range)
        return cls(
            "from_box_flat",
            key,
            data,
            allow_shape_mismatch,
            holders,
            global_shape=valid.entries("global_shape", global_shape, key),
            box=given.box_of(key, box),
            begin=begin,
            end=end,
            replica_id=valid.replica(replica_id, key),
            prepend_axis_num=valid.entry("prepend_axis_num", prepend_axis_num, key),
        )

    @property
    def key(self) -> str:
        """The tensor's name in the checkpoint; "" if that will be its path in the state.

        It may be changed. The rules of `from_param` still apply to the name that the parameter had
        before.
        """
        return self._key or ""

    @key.setter
    def key(self, key: str) -> None:
        self._key = valid.entity_key(key)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, in elements."""
        return self._entity().global_shape

    @property
    def boxes(self) -> list[_core.Box]:
        """What this rank holds: one box, or several for a flat range or a strided placement."""
        return self._entity().boxes

    @property
    def replica_id(self) -> tuple[int, ...]:
        """Which replica this is; all zeros for the main one."""
        return self._entity().replica_id

    @property
    def is_regular_grid(self) -> bool:
        """Whether each offset is a multiple of the local size."""
        return self._entity().is_regular_grid

    def of_state(self, prefix: str, data: params.ParamLike) -> ShardedTensor:
        """What an optimizer keeps for each element of this tensor, at the same place.

        Args:
            prefix: put before the key, with a dot between them.
            data: an array of the local shape and any dtype.

        Raises:
            MismatchError: its shape is not the tensor's local shape.
        """
        key = f"{prefix}.{self._key}"
        if self._data_shape(data) != self._data_shape(self.data):
            raise MismatchError(
                f"optimizer state of shape {self._data_shape(data)} belongs to a parameter of local "
                f"shape {self._data_shape(self.data)}",
                key=key,
            )
        made = copy.copy(self)
        made._key, made.data = key, data
        return made

    @staticmethod
    def _data_shape(data: params.ParamLike) -> tuple[int, ...]:
        return tuple(converters.view(data, None).shape)

    def _view(self, for_load: bool | None) -> _core.TensorView:
        """A view of the data; if for_load is None, only its dtype and shape are needed."""
        return converters.view(self.data, for_load)

    def _made(self, key: str | None, for_load: bool | None) -> _core.ShardedTensor:
        """The engine's entity with a key, without the attributes that callers may set."""
        make: Callable[..., _core.ShardedTensor] = getattr(_core.ShardedTensor, self._make)
        return make(key, self._view(for_load), **self._arguments)

    def _entity(
        self, for_load: bool | None = None, path: str | None = None
    ) -> _core.ShardedTensor:
        """The engine's entity.

        Args:
            for_load: True for a load, False for a save, None if only the position is needed.
            path: the place in a state, which is the key if there is no other.
        """
        key = path if self._key is None else self._key
        with given.naming(key or ""):
            entity = self._made(key, for_load)
        entity.allow_shape_mismatch = self.allow_shape_mismatch
        if self.holders is not None:
            entity.holders = list(self.holders)
        return entity

    def __repr__(self) -> str:
        return f"ShardedTensor({self.key!r}, global_shape={self.global_shape}, boxes={self.boxes})"


class _OfParam(ShardedTensor):
    """What from_param makes: without its own key it gets its path in the state as key."""

    __slots__ = ("_name", "_path", "_place")

    def __init__(
        self,
        place: params.Param,
        data: params.ParamLike,
        key: str | None,
        allow_shape_mismatch: bool,
    ) -> None:
        self._place = place
        self._key = key
        self._name = key  # to which rules apply; None: the path in the state
        self._path = ""  # where `found_at` has seen it
        self.data = data
        self.allow_shape_mismatch = allow_shape_mismatch
        self.holders = None
        if key is None and place.needs_name:
            place.check()
        else:
            self._entity()

    def found_at(self, path: str) -> None:
        """Tells a parameter without a key its path, for the keys of its optimizer's state."""
        self._path = path

    def rename(self, path: str, changed: Callable[[str], str]) -> None:
        """Changes the key, which is the path if there is no other."""
        name = path if self._key is None else self._key
        self._name = self._name or name
        self.key = changed(name)

    def of_state(self, prefix: str, data: params.ParamLike) -> ShardedTensor:
        name = self._key or self._path
        if not name:
            raise InvalidArgumentError(
                "the parameter has no key, so its optimizer's state has none either",
                hint="pass key= to from_param",
            )
        made = copy.copy(self)
        made._place = self._place.of_state(data)
        made._key, made._name, made._path = f"{prefix}.{name}", self._name or name, ""
        made.data = data
        made._entity()
        return made

    def _made(self, key: str | None, for_load: bool | None) -> _core.ShardedTensor:
        if self._name is not None:
            return self._place.entity(key or "", for_load, self._name)
        if key is None and self._place.needs_name:
            raise InvalidArgumentError(
                "the placements depend on the tensor's name, which is only known within a state",
                hint="pass key= to from_param",
            )
        return self._place.entity(key or "", for_load)

    def __repr__(self) -> str:
        return f"ShardedTensor.from_param(key={self._key!r})"


class ShardedObject:
    """An object of a cell in a grid of objects. It can't be resharded.

    Args:
        key: the grid's name.
        data: any object; an object that is not plain data is pickled.
        global_shape: shape of the grid, in objects.
        global_offset: this object's cell in the grid.
        replica_id: which replica this is; all zeros for the main one.

    Raises:
        InvalidArgumentError: the cell is outside the grid.
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
        self.key = valid.entity_key(key)
        self.data = data
        self.global_shape = valid.entries("global_shape", global_shape, self.key)
        self.global_offset = valid.entries("global_offset", global_offset, self.key)
        self.replica_id = valid.replica(replica_id, self.key)
        self._entity(None)

    @property
    def unique_key(self) -> str:
        """The object's key in the checkpoint: "key/shard_OFFSET_SHAPE"."""
        return self._entity(None).unique_key

    def __repr__(self) -> str:
        return (
            f"ShardedObject({self.key!r}, {type(self.data).__name__}, "
            f"global_shape={self.global_shape}, global_offset={self.global_offset})"
        )

    def _entity(self, call: Call | None) -> _core.ShardedObject:
        """The engine's entity for a save or load; without its data if `call` is None."""
        return _core.ShardedObject.make(
            self.key,
            None if call is None else self.data,
            self.global_shape,
            self.global_offset,
            self.replica_id,
            call,
        )


class ShardedTensorFactory:
    """Represents a subtree that is built before a save or load, and merged after a load.

    Args:
        key, data, replica_id, flattened_range: the arguments with which `build_fn` is called.
        build_fn: build_fn(key, data, replica_id, flattened_range) returns a tree of entities.
            It must be pure, because saves and loads call it with their own arguments.
        merge_fn: merge_fn(loaded_tree) returns what takes the factory's place after a load.
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
            flattened_range = given.flat_range(key, flattened_range)
        self.key = valid.entity_key(key)
        self.data = data
        self.build_fn = build_fn
        self.merge_fn = merge_fn
        self.replica_id = valid.replica(replica_id, self.key)
        self.flattened_range = flattened_range

    def _entity(self, call: Call) -> _core.ShardedTensorFactory:
        return _core.ShardedTensorFactory.make(
            self.key,
            converters.view(self.data, call.for_load),
            self.data,
            self.build_fn,
            self.merge_fn,
            self.replica_id,
            self.flattened_range,
            call,
        )


class LocalNonpersistent:
    """A value that is not saved. A load returns the template's value."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"LocalNonpersistent({self.value!r})"


class _EntityConverter(converters.PartConverter):
    def node(self, item: Any, path: str, call: Call) -> Node | None:
        if isinstance(item, ShardedTensor):
            made = item._entity(call.for_load, path)
            if made.holders:
                made.holders = converters.ranks_in(call, made.holders)
            return made
        if isinstance(item, LocalNonpersistent):
            return _core.LocalNonpersistent.make(item.value)
        entity: Node = item._entity(call)
        return entity

    def data_of(self, item: Any) -> Any:
        return item.data if isinstance(item, (ShardedTensor, ShardedObject)) else item


for _kind in (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistent):
    converters.add(_kind, _EntityConverter())
