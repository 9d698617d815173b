"""Handles torch's tensors, DTensors, storages, dtypes and process groups.

This module is imported only if torch is already loaded, or if the caller asks for torch tensors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._objects import converters, host_arrays
from tilestone._objects.converters import Call, CopiedBack, Layout, Node
from tilestone._objects.given import Placement, in_order, to_mesh, to_placement
from tilestone._torch import meta
from tilestone._torch.devices import DeviceTensor, is_lazy
from tilestone._torch.meta import PLAIN as _PLAIN
from tilestone._torch.parts import dtensor_type, is_on_meta, local_of, position, states_position

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


new_memory = meta.Memory
memory_of_load = meta.of_load


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in _core.dtypes() if hasattr(torch, name)}


@functools.cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _dtypes().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16".

    Raises:
        InvalidArgumentError: a checkpoint can't hold this dtype (a quantised one, for example).
    """
    name = _names().get(dtype)
    if name is None:
        raise InvalidArgumentError(f"a checkpoint can't hold elements of {dtype}")
    return name


def is_tensor(item: Any) -> bool:
    """Whether it is a torch tensor; a parameter is one too."""
    return isinstance(item, torch.Tensor)


def note_written(arrays: list[Any]) -> None:
    """Increments the version counters, so that autograd notices that saved tensors have changed."""
    written = [item for item in arrays if isinstance(item, torch.Tensor)]
    subclasses = [item for item in written if type(item) not in _PLAIN]
    locals_of = (getattr(item, "_local_tensor", None) for item in subclasses)  # DTensors have one
    written += [item for item in locals_of if isinstance(item, torch.Tensor)]
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # an inference tensor has no counter
        tracked = [item for item in written if not item.is_inference()]
        torch.autograd.graph.increment_version(tracked)


def _group_types() -> tuple[type, ...]:
    if not dist.is_available():
        return ()
    from torch.distributed.device_mesh import DeviceMesh

    return dist.ProcessGroup, DeviceMesh


_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def _why_not_memory(tensor: torch.Tensor) -> str | None:
    """Why a tensor's memory does not hold its elements, as a noun phrase; None if it does."""
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that is not initialized yet"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized or tensor.is_nested:
        return "a quantized tensor" if tensor.is_quantized else "a nested tensor"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, whose memory does not simply hold its elements"
    if torch._is_functional_tensor(tensor) or _is_transformed(tensor):
        return "a tensor inside a function transform (vmap, grad, functionalize)"
    return None


def view(tensor: torch.Tensor, for_load: bool, owner: Any = None) -> _core.TensorView:
    """A view of a strided tensor's memory, on any device.

    A CPU tensor is read and filled in place. A tensor on another device is copied in batches
    (`devices`), and so is a lazily conjugated or negated one, whose memory does not hold its
    elements. A tensor on the meta device has no memory; a load allocates it.

    Args:
        tensor: any strided tensor; it may be a parameter, a view, non-contiguous, 0-d or empty.
        owner: the object that a load returns for it; the tensor itself by default.

    Raises:
        InvalidArgumentError: the tensor's memory does not hold its elements (sparse, nested, a
            wrapper of other tensors), or the tensor can't be filled.
    """
    try:
        found = _core.TensorView.of_torch(tensor, for_load, tensor if owner is None else owner)
    except RuntimeError:  # torch's, of some wrappers of other tensors: they have no memory
        found = None
    if found is not None:
        return found
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    problem = _why_not_memory(tensor)
    if problem is not None:
        raise InvalidArgumentError(f"only dense tensors can be saved and loaded, not {problem}")
    plain = tensor.detach()
    name = dtype_name(plain.dtype)
    shape = tuple(plain.shape)
    if plain.is_meta:
        if not for_load:
            raise InvalidArgumentError("a tensor on the meta device has no data to save")
        plain, tensor = meta.replaced(tensor)
    owner = tensor if owner is None else owner
    if for_load and _core.shares_elements(shape, plain.stride()):
        raise InvalidArgumentError(
            "can't fill a tensor in which several elements share memory (an expanded tensor)"
        )
    if plain.device.type != "cpu" or is_lazy(plain):
        if for_load:
            _check_writable(plain)
        return _core.TensorView.on_device(name, shape, DeviceTensor(plain), owner)
    storage = plain.untyped_storage()
    return _core.TensorView.strided(
        plain.data_ptr(),
        name,
        shape,
        plain.stride(),
        storage.data_ptr(),
        storage.nbytes(),
        owner,
    )


def host_view(tensor: torch.Tensor) -> _core.TensorView:
    """A view of a tensor inside a leaf; one on a device, or a lazy one, is copied."""
    if _why_not_memory(tensor) is None and not tensor.is_meta:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return view(tensor, False)


def variable_in_common(tensor: torch.Tensor) -> tuple[_core.TensorView, bool, bool] | None:
    """(view in host memory, is a parameter, requires grad); None if autograd does not track it."""
    parameter = isinstance(tensor, torch.nn.Parameter)
    if not parameter and not tensor.requires_grad:
        return None
    return host_view(tensor), parameter, tensor.requires_grad


def variable(made: torch.Tensor, parameter: bool, requires_grad: bool) -> torch.Tensor:
    """The tensor as a parameter, or with requires_grad, as it was saved."""
    if parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


def _check_writable(target: torch.Tensor) -> None:
    """Refuses a tensor on a read-only map, on which torch's own copy_ would crash."""
    storage = target.untyped_storage()
    if target.device.type == "cpu" and not _core.is_writable(storage.data_ptr(), storage.nbytes()):
        raise InvalidArgumentError(
            "can't fill a tensor in memory that is mapped read-only",
            hint="map it for writing, or pass a copy: tensor.clone()",
        )


def filled_by(target: torch.Tensor, array: Any) -> torch.Tensor:
    """The tensor, after a numpy array of the same dtype and shape was copied to it."""
    native = numpy.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    found = host_arrays.view(native, False)
    assert found is not None
    source = tensor(found).clone()
    if target.is_meta:
        return source
    _check_writable(target)
    target.detach().copy_(source)
    return target


def tensor(loaded: _core.TensorView, like: Any = None) -> torch.Tensor:
    """A tensor over the memory of a contiguous view; if `like` is on a device, a copy there."""
    dtype = _dtypes()[loaded.dtype]
    if loaded.nbytes == 0:
        made = torch.empty(loaded.shape, dtype=dtype)
    else:
        made = torch.from_numpy(loaded.bytes).view(dtype).reshape(loaded.shape)
    on_device = is_tensor(like) and like.device.type not in ("cpu", "meta")
    return made.to(like.device) if on_device else made


# ---- torch.distributed ----


def is_distributed(cls: type) -> bool:
    """Whether tensors of a class are DTensors, or torch's older ShardedTensors."""
    if cls in _PLAIN or not issubclass(cls, torch.Tensor):
        return False
    return issubclass(cls, dtensor_type()) or cls.__name__ == "ShardedTensor"


def _sharding(spec: Any) -> tuple[_core.Mesh, list[Placement]]:
    """Of a DTensor's spec: the mesh, and one placement for each of its dims."""
    placements = [to_placement(each) for each in spec.placements]
    order = [tuple(entry.mesh_dims) for entry in getattr(spec, "shard_order", None) or ()]
    return in_order(to_mesh(spec.mesh), placements, order)


def _seen(item: Any, for_load: bool | None) -> _core.TensorView:
    """A view of a DTensor's local tensor. For a load, tensors on the meta device get memory."""
    local = item._local_tensor
    if type(local) not in _PLAIN and hasattr(local, "wait"):
        local = local.wait()
    if local.is_meta and for_load:
        item = meta.dtensor_with_memory(item, local)
        local = item._local_tensor
    if local.is_meta and for_load is None:
        return _core.TensorView.without_data(dtype_name(local.dtype), tuple(local.shape))
    return view(local, bool(for_load), owner=item)


def part_entity(
    item: Any, key: str, for_load: bool | None, call: Call | None = None
) -> _core.ShardedTensor | _core.LocalNonpersistent:
    """The engine's entity for an object that says itself where it stands (`states_position`).

    The ranks don't know which of them hold the same, except along a DTensor's Replicate dims.

    Args:
        for_load: True for a load, False for a save, None if only the position is needed.

    Raises:
        InvalidArgumentError: the object does not describe a part of one tensor.
    """
    target, memory = item, None
    own = local_of(item)
    if for_load and is_on_meta(own):
        target, memory = meta.part_with_memory(item, own)
    found = position(item, key, bool(for_load), memory)
    if found.global_shape is None or found.dtype is None:  # this rank holds nothing of it
        return _core.LocalNonpersistent.make(item)
    tensors = [part.tensor for part in found.parts]
    # A save's owner is no tensor: the parts' counters may miss what changes the whole (`live`).
    owners = [None if for_load else (item, each) for each in tensors]
    views = [
        _described(each) if for_load is None else view(each, for_load, owner)
        for each, owner in zip(tensors, owners, strict=True)
    ]
    pieces = [
        (_core.Box(part.offset, part.shape), seen)
        for part, seen in zip(found.parts, views, strict=True)
    ]
    nothing = _core.TensorView.without_data(dtype_name(found.dtype), (0,))
    owner = target
    if for_load:
        owner = CopiedBack([seen.owner for seen in views], target, _filled_parts)
    data = (views[0] if views else nothing).with_owner(owner)
    entity = _core.ShardedTensor.from_pieces(key, data, found.global_shape, pieces)
    entity.unknown_replicas = True
    if call is not None and isinstance(item, dtensor_type()):
        entity.holders = converters.ranks_in(call, _replicas(item))
    return entity


def _described(tensor: torch.Tensor) -> _core.TensorView:
    if tensor.is_meta:
        return _core.TensorView.without_data(dtype_name(tensor.dtype), tuple(tensor.shape))
    return view(tensor, False)


def _filled_parts(target: Any, owners: list[Any]) -> Any:
    """What a load returns for an object whose parts it has filled."""
    tensors = [each.finish() if isinstance(each, CopiedBack) else each for each in owners]
    note_written(tensors)
    return target


def _replicas(item: DTensor) -> list[int]:
    """The ranks along a DTensor's Replicate dims; none if there is only this one."""
    coordinate = item.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    placed = zip(item.placements, coordinate, strict=True)
    index = tuple(slice(None) if each.is_replicate() else n for each, n in placed)
    ranks: list[int] = item.device_mesh.mesh[index].flatten().tolist()
    return ranks if len(ranks) > 1 else []


def distributed_entity(item: Any, path: str, call: Call) -> Node:
    """The engine's entity for a DTensor: by what it says of itself, or by mesh and placements.

    Raises:
        InvalidArgumentError: a placement is Partial, or as for `part_entity`.
        UnsupportedError: as for `layout`.
    """
    if states_position(item):
        return part_entity(item, path, call.for_load, call)
    seen, spec = _seen(item, call.for_load), item._spec
    # On this the entity depends, beside key and data. Most DTensors of a model have it in common.
    order = getattr(spec, "shard_order", None)
    position = (spec.mesh, spec.placements, spec.shape, order, seen.shape)
    like = call.positions.get(position)
    entity = None if like is None else like.of_other_data(path, seen)
    if entity is None:
        entity = _core.ShardedTensor.from_placements(
            path, seen, tuple(spec.shape), *_sharding(spec), dist.get_rank()
        )
        entity.holders = converters.ranks_in(call, entity.holders)
        hollow = _core.TensorView.without_data(seen.dtype, seen.shape)
        call.positions[position] = entity.of_other_data(path, hollow)
    return entity


def default_group() -> ProcessGroup | None:
    """torch.distributed's default group if it is initialised, otherwise None."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


def ranks_within(part: Any, whole: ProcessGroup | None) -> list[int] | None:
    """The ranks of the process group `part`, numbered as in the process group `whole`.

    None if `part` is not a process group.

    Raises:
        InvalidArgumentError: this rank is not in `part`, or a rank of `part` is not in `whole`.
    """
    if part == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError("copies.group is a process group without this rank")
    if not dist.is_available() or not isinstance(part, dist.ProcessGroup):
        return None
    numbers = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(whole))}
    outside = [rank for rank in dist.get_process_group_ranks(part) if rank not in numbers]
    if outside:
        raise InvalidArgumentError(
            f"copies.group has global rank {outside[0]}, which is not in the group that saves"
        )
    return [numbers[rank] for rank in dist.get_process_group_ranks(part)]


# ---- Converters ----


class _TensorConverter(converters.ArrayConverter):
    may_be_part = True

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        return view(item, for_load)

    def description(self, item: Any) -> _core.TensorView | None:
        return _described(item)

    def is_writable(self, item: Any) -> bool:
        return not item.is_meta

    def in_value(self, item: Any) -> Any:
        if type(item) not in _PLAIN or item.__dict__:
            return None  # it is pickled, with its attributes
        return variable_in_common(item) or host_view(item)

    def why_not_in_object(self, item: Any) -> str | None:
        if item.device.type != "cpu":
            return f"a tensor on the device {item.device}"
        if type(item) not in _PLAIN:
            return f"a {type(item).__name__}, which is a subclass of Tensor"
        attributes = [name for name in vars(item) if not name.startswith("_")]
        if type(item) is torch.Tensor and attributes and not hasattr(item, "_is_buffer"):
            return f"a tensor with the attribute {attributes[0]}, which a load would not restore"
        known = item.dtype in _names()
        return _why_not_memory(item) or (None if known else f"a tensor of {item.dtype}")


class _PartConverter(converters.PartConverter):
    """For objects that say where they stand, other than DTensors."""

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        return part_entity(item, path, call.for_load, call)

    def part(self, item: Any, key: str, for_load: bool | None) -> Any:
        return part_entity(item, key, for_load)

    def layout(self, item: Any, for_load: bool | None) -> Layout | None:
        raise InvalidArgumentError(
            f"methods or attributes of this {type(item).__name__} say where it stands",
            hint="such an object keeps its place: give Replicate as the checkpoint's placement",
        )

    # An entity that wraps the object says where it stands; then it is only memory.

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        return view(item, for_load) if is_tensor(item) else None

    def description(self, item: Any) -> _core.TensorView | None:
        return _described(item) if is_tensor(item) else None

    def is_writable(self, item: Any) -> bool:
        return is_tensor(item) and not item.is_meta


class _DistributedConverter(converters.PartConverter):
    def part(self, item: Any, key: str, for_load: bool | None) -> Any:
        return part_entity(item, key, for_load) if states_position(item) else None

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        return distributed_entity(item, path, call)

    def layout(self, item: Any, for_load: bool | None) -> Layout | None:
        if states_position(item):
            raise InvalidArgumentError(
                f"methods, attributes or shards of this {type(item).__name__} say where it stands, "
                "not its placements",
                hint="such a tensor keeps its place: give Replicate as the checkpoint's placement",
            )
        seen, spec = _seen(item, for_load), item._spec
        return Layout(seen, tuple(spec.shape), *_sharding(spec))

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        return view(item, for_load)  # raises an error


class _GroupConverter(converters.Converter):
    def why_not_in_object(self, item: Any) -> str | None:
        return f"a {type(item).__name__}"


class _TorchDtypeConverter(converters.Converter):
    def in_value(self, item: Any) -> Any:
        return _names().get(item)


def register() -> None:
    """Registers the converters of torch's types."""
    converters.add(torch.Tensor, _TensorConverter())
    converters.add_parts(states_position, _PartConverter())
    converters.add(is_distributed, _DistributedConverter())
    converters.add(torch.dtype, _TorchDtypeConverter())
    for group in _group_types():
        converters.add(group, _GroupConverter())
