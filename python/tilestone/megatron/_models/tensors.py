"""Entities of a model's tensors, from the groups that divide and replicate them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Dict, Optional, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._torch.parts import states_position
from tilestone.megatron._shards.entities import with_entry
from tilestone.megatron.groups import Group, find_group, holders_of
from tilestone.megatron.mapping import (
    ReplicaId,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)


@dataclass(frozen=True)
class FsdpPart:
    """The rows of a tensor that FSDP2 has assigned to a rank.

    Attributes:
        shape: shape of the tensor before FSDP2 divided its axis 0.
        begin: the first row of the part.
        place, fragments: the part's number, and the number of parts.
    """

    shape: Tuple[int, ...]
    begin: int
    place: int
    fragments: int

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same number of rows, at least one."""
        return self.shape[0] > 0 and self.shape[0] % self.fragments == 0


def fsdp_part(tensor: Any, key: str, dp_cp: Group) -> Tuple[torch.Tensor, FsdpPart | None]:
    """Returns the local tensor of a tensor, and which part of it that is (None: all of it).

    The sizes are those of torch.chunk. (Megatron-Core assumes that all parts are equal, and gathers
    the tensor if there are more ranks than rows.)

    Raises:
        InvalidArgumentError: it is not a tensor.
        UnsupportedError: a DTensor on a mesh other than the ranks of dp_cp, or divided along
            an axis other than 0.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise InvalidArgumentError(f"expected a tensor, not a {kind}", key=key)
    if not hasattr(tensor, "device_mesh") and not states_position(tensor):
        return tensor, None
    if states_position(tensor):
        raise _refusal(key, "whose methods or attributes say where it stands")
    divided: Any = tensor
    mesh, placements = divided.device_mesh, divided.placements
    local: torch.Tensor = divided._local_tensor
    ranks = sorted(mesh.mesh.flatten().tolist())
    if mesh.ndim != 1 or len(ranks) != dp_cp.size() or ranks != sorted(dp_cp.ranks or ranks):
        raise _refusal(key, f"on a mesh of ranks {ranks} in {mesh.ndim} dims, which is not dp_cp")
    if placements[0].is_replicate():
        return local, None
    if type(placements[0]) is not torch.distributed.tensor.Shard or placements[0].dim != 0:
        raise _refusal(key, f"with placements {tuple(placements)}")
    shape, count, place = tuple(tensor.shape), len(ranks), mesh.get_local_rank()
    rows = math.ceil(shape[0] / count)
    begin, end = (min(n * rows, shape[0]) for n in (place, place + 1))
    if local.shape[0] != end - begin:
        raise _refusal(key, f"with {local.shape[0]} rows on this rank instead of {end - begin}")
    return local, FsdpPart(shape, begin, place, count)


def _refusal(key: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"unsupported: a DTensor {found}",
        key=key,
        hint="the functions make_... accept DTensors whose axis 0 FSDP2 divides over dp_cp; put "
        "other DTensors into the state dict unchanged, because they describe their own sharding",
    )


Offset = Tuple[int, int, int]  # (axis, place, fragments)


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Any,
    key: str,
    tp_axis: int = 0,
    replica_id: Optional[ReplicaId] = None,
    prepend_offsets: Iterable[Offset] = (),
    **kwargs: Any,
) -> ShardedTensor:
    """Makes the entity of a tensor that tensor parallelism divides, equal on all ranks of dp_cp.

    Args:
        tensor: the local tensor; or a DTensor of FSDP2, on a 1-D mesh of the ranks of dp_cp that
            divides axis 0 or replicates the tensor.
        key: the tensor's name in the checkpoint.
        tp_axis: the axis of tensor that is divided.
        replica_id: None: (0, 0, rank in dp_cp), or (0, 0, 0) for a DTensor that is divided. With a
            given one, the holders are not known unless they are given too.
        prepend_offsets: (axis, place, fragments) of each axis that the stored tensor has before the
            tensor's own axes: (0, layer, layers) for one of a stack of layers.
        kwargs: tp_group and dp_cp_group, looked up by `groups.find_group`; further attributes
            of the ShardedTensor (allow_shape_mismatch, holders).

    Raises:
        CheckpointingException: a group is not known, the offsets do not describe a part, or the
            DTensor is of an unsupported kind. The error names the key or the group.
    """
    return _made(tensor, key, tp_axis, replica_id, tuple(prepend_offsets), kwargs)


def make_sharded_tensor_for_checkpoint(
    tensor: Any,
    key: str,
    prepend_offsets: Iterable[Offset] = (),
    replica_id: Optional[ReplicaId] = None,
    **kwargs: Any,
) -> ShardedTensor:
    """Makes the entity of a tensor that is equal on all ranks of tp and of dp_cp.

    Args:
        tensor: the local tensor, or a DTensor as make_tp_sharded_tensor_for_checkpoint takes it.
        key: the tensor's name in the checkpoint.
        prepend_offsets: as for make_tp_sharded_tensor_for_checkpoint.
        replica_id: None: (0, rank in tp, rank in dp_cp); the last is 0 for a divided DTensor.
        kwargs: as for make_tp_sharded_tensor_for_checkpoint.

    Raises:
        CheckpointingException: as make_tp_sharded_tensor_for_checkpoint.
    """
    return _made(tensor, key, None, replica_id, tuple(prepend_offsets), kwargs)


def _made(
    tensor: Any,
    key: str,
    tp_axis: Optional[int],
    replica_id: Optional[ReplicaId],
    prepended: Tuple[Offset, ...],
    options: Dict[str, Any],
) -> ShardedTensor:
    """The entity of a tensor that tensor parallelism divides along an axis, or does not (None)."""
    tp = find_group("tp", options.pop("tp_group", None))
    dp_cp = find_group("dp_cp", options.pop("dp_cp_group", None))
    local, part = fsdp_part(tensor, key, dp_cp)
    offset = None if tp_axis is None else (tp_axis + len(prepended), tp.rank(), tp.size())
    if replica_id is None:
        same = [*([tp] if tp_axis is None else ()), *([dp_cp] if part is None else ())]
        own = (0, tp.rank() if tp_axis is None else 0, dp_cp.rank() if part is None else 0)
        # The groups give the holders only for the replica id that they give.
        options = {"holders": holders_of(*same), **options, "replica_id": own}
    else:
        options = {**options, "replica_id": replica_id}
    return _entity(key, local, part, prepended, offset, options)


def _entity(
    key: str,
    local: torch.Tensor,
    part: FsdpPart | None,
    prepended: Tuple[Offset, ...],
    tp_offset: Offset | None,
    options: Dict[str, Any],
) -> ShardedTensor:
    """Makes the entity of a local tensor, or of a part of it.

    Args:
        local: the elements that this rank has.
        part: which part of a TP rank's tensor they are; None: all of it.
        prepended: offsets of the prepended axes.
        tp_offset: offset of a TP rank's tensor; None: tensor parallelism does not divide it.
    """
    axis = len(prepended)
    _check_prepended(key, prepended)
    offsets = [*prepended] if tp_offset is None else [*prepended, tp_offset]
    options = {**options, "prepend_axis_num": axis}
    if part is None:
        return ShardedTensor.from_rank_offsets(key, local, *offsets, **options)
    if part.is_even:
        _, place, count = (axis, 0, 1) if tp_offset is None else tp_offset
        if tp_offset is None or tp_offset[0] == axis:
            along = (axis, place * part.fragments + part.place, count * part.fragments)
            offsets = [*prepended, along]
        else:
            offsets.append((axis, part.place, part.fragments))
        return ShardedTensor.from_rank_offsets(key, local, *offsets, **options)
    undivided = torch.empty(part.shape, dtype=local.dtype, device="meta")
    whole = ShardedTensor.from_rank_offsets(key, undivided, *offsets, **options)
    begin = whole.global_offset[axis] + part.begin
    return replace(
        whole,
        data=local,
        local_shape=tuple(local.shape),
        global_offset=with_entry(whole.global_offset, axis, begin),
        axis_fragmentations=None,
    )


def _check_prepended(key: str, prepended: Tuple[Offset, ...]) -> None:
    """Refuses offsets that do not cover exactly the prepended axes."""
    if any(len(each) != 3 for each in prepended) or (
        sorted(axis for axis, _, _ in prepended) != list(range(len(prepended)))
    ):
        raise InvalidArgumentError(
            f"prepended offsets {prepended} must be (axis, place, fragments) for each of the axes "
            f"0 to {len(prepended) - 1}",
            key=key,
        )


def make_sharded_tensors_for_checkpoint(
    state_dict: StateDict,
    prefix: str,
    tensor_parallel_layers_axis_map: Optional[Dict[str, int]] = None,
    sharded_offsets: Iterable[Offset] = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: Optional[torch.distributed.ProcessGroup] = None,
    dp_cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> ShardedStateDict:
    """Makes the entities of a module's own state.

    Args:
        state_dict: of the module without its submodules; made with keep_vars=True if the sharded
            state of an optimizer is derived from the model's.
        prefix: put before each name; the result is the key in the dict and in the checkpoint.
        tensor_parallel_layers_axis_map: name -> axis for each tensor that tensor parallelism
            divides; the others are equal on all ranks of tp. Names that are not in the state (as of
            a layer without bias) are ignored.
        sharded_offsets: of prepended axes, as for make_tp_sharded_tensor_for_checkpoint.
        extra_state_suffix: entries whose names end with it are objects, see
            make_sharded_object_for_checkpoint.
        tp_group, dp_cp_group: looked up by `groups.find_group`. (In Megatron-Core, if only one of
            them is given, the other becomes a group of one rank.)

    Raises:
        CheckpointingException: as make_tp_sharded_tensor_for_checkpoint.
    """
    axes = tensor_parallel_layers_axis_map or {}
    offsets = tuple(sharded_offsets)
    groups: Dict[str, Any] = {
        "tp_group": find_group("tp", tp_group), "dp_cp_group": find_group("dp_cp", dp_cp_group)
    }  # fmt: skip
    sharded: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        if name.endswith(extra_state_suffix):
            made: Any = make_sharded_object_for_checkpoint(value, key, offsets, **groups)
        elif name in axes:
            made = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], prepend_offsets=offsets, **groups
            )
        else:
            made = make_sharded_tensor_for_checkpoint(
                value, key, prepend_offsets=offsets, **groups
            )
        sharded[key] = made
    return sharded


def make_sharded_object_for_checkpoint(
    obj: Any,
    key: str,
    sharded_offsets: Iterable[Offset] = (),
    replica_id: Union[None, int, Tuple[int, ...]] = None,
    **kwargs: Any,
) -> ShardedObject:
    """Makes the entity of an object that is equal on all ranks of tp and of dp_cp.

    Args:
        obj: any object.
        key: the object's name in the checkpoint.
        sharded_offsets: (axis, place, fragments) of the axes 0, 1, ...: the object's place in a
            grid of objects. Empty: it is the only object.
        replica_id: None: (0, rank in tp, rank in dp_cp).
        kwargs: tp_group and dp_cp_group, looked up by `groups.find_group` if there is no
            replica_id.

    Raises:
        CheckpointingException: a group is not known, the axes are not 0, 1, ..., or a place is
            outside the grid.
    """
    tp_group, dp_cp_group = kwargs.pop("tp_group", None), kwargs.pop("dp_cp_group", None)
    if replica_id is None:
        tp, dp_cp = find_group("tp", tp_group), find_group("dp_cp", dp_cp_group)
        replica_id = (0, tp.rank(), dp_cp.rank())
    shape, offset = _grid_of_objects(key, tuple(sharded_offsets))
    return ShardedObject(key, obj, shape, offset, replica_id, **kwargs)


def _grid_of_objects(
    key: str, offsets: Tuple[Offset, ...]
) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Shape of the grid, and the place in it."""
    if not offsets:
        return (1,), (0,)
    axes, places, counts = zip(*sorted(offsets, key=itemgetter(0)))
    if axes != tuple(range(len(axes))):
        text = f"offsets {offsets} of an object must be for the axes 0 to {len(offsets) - 1}"
        raise InvalidArgumentError(text, key=key)
    if not all(0 <= place < count for place, count in zip(places, counts)):
        raise InvalidArgumentError(f"offsets {offsets} are not a cell of a grid", key=key)
    return counts, places


def ensure_metadata_has_dp_cp_group(metadata: Optional[Dict[Any, Any]]) -> Dict[Any, Any]:
    """Adds the "dp_cp_group", which modules expect, to the metadata of a sharded state dict.

    Args:
        metadata: a dict, to which the group is added if it is absent or None; None: a new dict.

    Raises:
        CheckpointingException: metadata is not a dict, or the group is not known.
    """
    return metadata_with_dp_cp_group(metadata, None)


def metadata_with_dp_cp_group(metadata: Optional[Dict[Any, Any]], module: Any) -> Dict[Any, Any]:
    """Does the same; the module may have the group."""
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise InvalidArgumentError(
            f"metadata of a sharded state dict must be a dict, not {type(metadata).__name__}"
        )
    if metadata.get("dp_cp_group") is None:
        metadata["dp_cp_group"] = to_pass(find_group("dp_cp", None, module, metadata))
    return metadata


def to_pass(group: Group) -> Any:
    """A group as an argument for Megatron's code: torch's process group if the group has one."""
    return group if group.process_group is None else group.process_group


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Tuple[Offset, ...] = (),
    metadata: Optional[Dict[Any, Any]] = None,
    tp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> ShardedStateDict:
    """Makes the sharded state dict of any module.

    Args:
        module: if it has a method sharded_state_dict, that method is called. Otherwise its tensors
            are taken as equal on all ranks of tp and of dp_cp.
        prefix: prefix of the keys.
        sharded_offsets: offsets of prepended axes that enclosing modules have added.
        metadata: passed to the module; its "dp_cp_group" is looked up if it is absent.
        tp_group: looked up by `groups.find_group`, also in the module; not needed if the module has
            a sharded_state_dict.

    Raises:
        CheckpointingException: as make_sharded_tensors_for_checkpoint.
    """
    metadata = metadata_with_dp_cp_group(metadata, module)
    own = getattr(module, "sharded_state_dict", None)
    if own is not None:
        made: ShardedStateDict = own(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )
        return made
    tp: Any = find_group("tp", tp_group, module)
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {},
        sharded_offsets,
        tp_group=tp,
        dp_cp_group=metadata["dp_cp_group"],
    )
