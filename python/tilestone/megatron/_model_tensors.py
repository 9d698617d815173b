"""Entities of a model's tensors, from the groups over which they are divided and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import itemgetter
from typing import Any, Dict, Optional, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError
from tilestone.megatron._fsdp_parts import FsdpPart, fsdp_part
from tilestone.megatron._places import with_entry
from tilestone.megatron.groups import Group, find_group, holders_of
from tilestone.megatron.mapping import (
    ReplicaId,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)

Offset = Tuple[int, int, int]  # (axis, place, fragments)
_Holders = Optional[Tuple[int, ...]]


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Any,
    key: str,
    tp_axis: int = 0,
    replica_id: Optional[ReplicaId] = None,
    prepend_offsets: Iterable[Offset] = (),
    **kwargs: Any,
) -> ShardedTensor:
    """The entity of a tensor that tensor parallelism divides, the same on all ranks of dp_cp.

    Args:
        tensor: the local tensor; or a DTensor of FSDP2 over it, of a 1-D mesh of the ranks of dp_cp
            that divides axis 0 or repeats the whole.
        key: its name in the checkpoint.
        tp_axis: the axis of tensor that is divided.
        replica_id: None: (0, 0, rank in dp_cp), and 0 in the place of the last for a DTensor that
            is divided. With another one, the holders are not known unless they are given.
        prepend_offsets: (axis, place, fragments) of each axis that the tensor in the checkpoint has
            before its own: (0, layer, layers) for one of a stack of layers.
        kwargs: tp_group and dp_cp_group, looked up as `groups.find_group` does; further attributes
            of the ShardedTensor (allow_shape_mismatch, holders).

    Raises:
        CheckpointingException: a group is not known, the offsets describe no part, or what
            `_fsdp_parts` refuses of a DTensor; naming the key or the group.
    """
    tp = find_group("tp", kwargs.pop("tp_group", None))
    dp_cp = find_group("dp_cp", kwargs.pop("dp_cp_group", None))
    local, part = fsdp_part(tensor, key, dp_cp)
    own = (0, 0, dp_cp.rank() if part is None else 0)
    same = [dp_cp] if part is None else []
    prepended = tuple(prepend_offsets)
    offset = (tp_axis + len(prepended), tp.rank(), tp.size())
    options = _with_replica(kwargs, replica_id, own, lambda: holders_of(*same))
    return _entity(key, local, part, prepended, offset, options)


def make_sharded_tensor_for_checkpoint(
    tensor: Any,
    key: str,
    prepend_offsets: Iterable[Offset] = (),
    replica_id: Optional[ReplicaId] = None,
    **kwargs: Any,
) -> ShardedTensor:
    """The entity of a tensor that is the same on all ranks of tp and of dp_cp.

    Args:
        tensor: the local tensor, or a DTensor as make_tp_sharded_tensor_for_checkpoint takes it.
        key: its name in the checkpoint.
        prepend_offsets: as for make_tp_sharded_tensor_for_checkpoint.
        replica_id: None: (0, rank in tp, rank in dp_cp), the last 0 for a DTensor that is divided.
        kwargs: as for make_tp_sharded_tensor_for_checkpoint.

    Raises:
        CheckpointingException: as make_tp_sharded_tensor_for_checkpoint.
    """
    tp = find_group("tp", kwargs.pop("tp_group", None))
    dp_cp = find_group("dp_cp", kwargs.pop("dp_cp_group", None))
    local, part = fsdp_part(tensor, key, dp_cp)
    own = (0, tp.rank(), dp_cp.rank() if part is None else 0)
    same = [tp, dp_cp] if part is None else [tp]
    options = _with_replica(kwargs, replica_id, own, lambda: holders_of(*same))
    return _entity(key, local, part, tuple(prepend_offsets), None, options)


def _with_replica(
    options: Dict[str, Any],
    given: Optional[ReplicaId],
    own: ReplicaId,
    holders: Callable[[], _Holders],
) -> Dict[str, Any]:
    """Attributes with the replica id; what is said of holders is said of the groups' own one."""
    if given is not None:
        return {**options, "replica_id": given}
    return {"holders": holders(), **options, "replica_id": own}


def _entity(
    key: str,
    local: torch.Tensor,
    part: FsdpPart | None,
    prepended: Tuple[Offset, ...],
    tp_offset: Offset | None,
    options: Dict[str, Any],
) -> ShardedTensor:
    """The entity of a local tensor, or of a part of it.

    Args:
        local: the elements that this rank has.
        part: which part of a TP rank's tensor that is; None: all.
        prepended: offsets of prepended axes; tp_offset: of a TP rank's tensor, None: it is whole.
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
    """Refuses offsets that are not those of all prepended axes."""
    if any(len(each) != 3 for each in prepended) or (
        sorted(axis for axis, _, _ in prepended) != list(range(len(prepended)))
    ):
        raise InvalidArgumentError(
            f"prepended offsets {prepended} are not (axis, place, fragments) of the axes 0 to "
            f"{len(prepended) - 1}",
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
    """The entities of a module's own state.

    Args:
        state_dict: of the module alone, made with keep_vars=True where an optimizer's state follows
            the model's.
        prefix: put before the names: the results' keys, of the dict and in the checkpoint.
        tensor_parallel_layers_axis_map: axis by name of each tensor that tensor parallelism
            divides; others are the same on all ranks of tp. Names that the state lacks are no
            fault (a layer without bias).
        sharded_offsets: of prepended axes, as for make_tp_sharded_tensor_for_checkpoint.
        extra_state_suffix: what ends so is an object, see make_sharded_object_for_checkpoint.
        tp_group, dp_cp_group: looked up as `groups.find_group` does. (In Megatron-Core, where one
            of them alone is given, the other becomes a group of one.)

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
    """The entity of an object that is the same on all ranks of tp and of dp_cp.

    Args:
        obj: any object.
        key: its name in the checkpoint.
        sharded_offsets: (axis, place, fragments) of axes 0, 1, ...: the object's place in a grid of
            objects; none: it is the only one.
        replica_id: None: (0, rank in tp, rank in dp_cp).
        kwargs: tp_group and dp_cp_group, looked up as `groups.find_group` does where there is no
            replica_id.

    Raises:
        CheckpointingException: a group is not known, the axes are not 0, 1, ..., or a place is not
            in the grid.
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
    """Shape of the grid, and a place in it."""
    if not offsets:
        return (1,), (0,)
    axes, places, counts = zip(*sorted(offsets, key=itemgetter(0)))
    if axes != tuple(range(len(axes))):
        text = f"offsets {offsets} of an object are not those of axes 0 to {len(offsets) - 1}"
        raise InvalidArgumentError(text, key=key)
    if not all(0 <= place < count for place, count in zip(places, counts)):
        raise InvalidArgumentError(f"offsets {offsets} name no place in a grid", key=key)
    return counts, places


def ensure_metadata_has_dp_cp_group(metadata: Optional[Dict[Any, Any]]) -> Dict[Any, Any]:
    """The metadata of a sharded state dict, with the "dp_cp_group" that modules look for in it.

    Args:
        metadata: a dict, to which the group is added where it is missing or None; None: a new one.

    Raises:
        CheckpointingException: metadata is no dict, or the group is not known.
    """
    return metadata_with_dp_cp_group(metadata, None)


def metadata_with_dp_cp_group(metadata: Optional[Dict[Any, Any]], module: Any) -> Dict[Any, Any]:
    """The same, where a module may have the group."""
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise InvalidArgumentError(
            f"metadata of a sharded state dict is a dict, not {type(metadata).__name__}"
        )
    if metadata.get("dp_cp_group") is None:
        metadata["dp_cp_group"] = to_pass(find_group("dp_cp", None, module, metadata))
    return metadata


def to_pass(group: Group) -> Any:
    """A group as an argument for code that may be Megatron's: torch's process group if it has one."""
    return group if group.process_group is None else group.process_group


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Tuple[Offset, ...] = (),
    metadata: Optional[Dict[Any, Any]] = None,
    tp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> ShardedStateDict:
    """The sharded state dict of any module.

    Args:
        module: where it has a method sharded_state_dict, that makes it. Of another one, all tensors
            are the same on all ranks of tp and of dp_cp.
        prefix: of the keys.
        sharded_offsets: of prepended axes, which modules around this one have added.
        metadata: for the module; with "dp_cp_group", which is looked up where it is missing.
        tp_group: looked up as `groups.find_group` does, in the module too; not needed where the
            module has a sharded_state_dict.

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
