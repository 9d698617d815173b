"""The formats of a distributed optimizer's state: which part of a shard is stored under which key.

dp_reshardable
    A 1-D tensor for each bucket and state, up to the end of the bucket's last parameter. Each rank
    stores its part of it; gaps between parameters are zeros.
fully_reshardable, fully_sharded_model_space
    A tensor for each parameter and state, `optimizer.state.STATE.KEY`. It has the shape and the
    place of the model's tensor `KEY`. A rank stores its slice of the flattened parameter as boxes
    of it, so nothing is gathered. In the second format the state "param" is named "fp32_param".
dp_zero_gather_scatter
    An object for each model-parallel rank, with one 1-D tensor for each state of a buffer. It can
    only be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Tuple, Union

import torch

from tilestone import _core
from tilestone._errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilestone._options.values import Differences
from tilestone.megatron._calls import engine_calls
from tilestone.megatron.distributed_optimizer.layout import (
    Bucket,
    Layout,
    OptimizerShard,
    Slice,
    to_json,
)
from tilestone.megatron.distributed_optimizer.pieces import Piece
from tilestone.megatron.mapping import ReplicaId, ShardedObject, ShardedTensor

DP_RESHARDABLE = "dp_reshardable"
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"

# In an optimizer's part of a state dict: the name of its format, and its tensors.
SHARDING_TYPE = "param_state_sharding_type"
PARAM_STATE = "param_state"
LAYOUT = "layout"  # last part of the key of an object that describes a layout


def optimizer_state(
    shards: Sequence[OptimizerShard], sharding_type: str, *, with_layout: bool = True
) -> dict[Any, Any]:
    """Makes the optimizer's part of a rank's sharded state dict, to be saved under "optimizer".

    Pass content_metadata={"distrib_optim_sharding_type": sharding_type} to save(), so that readers
    know the format, as Megatron-Core's training does.

    Args:
        shards: one shard, or those of a chain of optimizers, each with its number in
            `layout.chain`.
        sharding_type: "dp_reshardable", "fully_reshardable" or "fully_sharded_model_space".
        with_layout: with "dp_reshardable": also store the layout of the buckets, so that any layout
            can load them. Megatron-Core ignores this object. No effect on the other formats.

    Returns:
        entities and common values, nested as in Megatron-Core: for a chain, one dict for each
        number. The states are not copied.

    Raises:
        CheckpointingException: the format is another one; the shards' numbers in the chain are
            missing or not distinct; or a parameter's replica id has no data-parallel entry.
    """
    if sharding_type not in (DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE):
        raise UnsupportedError(
            f"can't save a distributed optimizer as {sharding_type!r}",
            hint=f"use {DP_RESHARDABLE}, {FULLY_RESHARDABLE} or {MODEL_SPACE}",
        )
    check_chain(shards)
    states: dict[Any, Any] = {}
    for shard in shards:
        if sharding_type == DP_RESHARDABLE:
            state = _bucket_state(shard, with_layout)
        else:
            state = {**shard.common, PARAM_STATE: _model_space_state(shard, sharding_type)}
        states[shard.layout.chain] = {**state, SHARDING_TYPE: sharding_type}
    return states[None] if None in states else states


def check_chain(shards: Sequence[OptimizerShard]) -> None:
    """Refuses shards other than one without a number or several with distinct numbers.

    Raises:
        CheckpointingException: with the numbers.
    """
    numbers = [shard.layout.chain for shard in shards]
    if not numbers or len(set(numbers)) != len(numbers) or (None in numbers and len(numbers) > 1):
        raise InvalidArgumentError(
            "pass one shard without a number in a chain, or shards with distinct numbers, not "
            f"{numbers}"
        )


# ---- The model's space ----


def _model_space_state(shard: OptimizerShard, sharding_type: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    stored = {name: name for name in shard.dtypes}
    if sharding_type == MODEL_SPACE and "param" in stored:
        stored["param"] = "fp32_param"
    for number, part in enumerate(shard.slices()):
        states = shard.states[part.place]
        found[number] = {
            name: list(
                model_space_tensors(part, f"optimizer.state.{key}.", states[name], shard.instance)
            )
            for name, key in stored.items()
        }
    return found


def model_space_tensors(
    part: Slice, prefix: str, memory: torch.Tensor, instance: Optional[int] = None
) -> Iterator[ShardedTensor]:
    """Yields a slice's state as entities at the place of the parameter.

    Args:
        part: the slice.
        prefix: put before the model's key.
        memory: the state, 1-D; the entities' data are views of it.
        instance: number of the optimizer's instance, the last entry of the replica ids. None: for a
            load, which needs no replica ids.

    Yields:
        a flattened range if a box of the parameter is stored in its order; otherwise boxes.

    Raises:
        CheckpointingException: a replica id has no data-parallel entry.
    """
    for piece in part.parameter.pieces:
        replica_id = 0 if instance is None else _replica_of_slice(piece, instance)
        if piece.is_contiguous:
            begin = max(part.begin, piece.start)
            end = min(part.end, piece.start + piece.numel)
            if begin < end:
                data = memory[begin - part.begin : end - part.begin]
                flat = slice(begin - piece.start, end - piece.start)
                yield _tensor(piece, prefix, data, replica_id, flat)
            continue
        for box in piece.within(part.begin, part.end):
            yield _tensor(box, prefix, box.of(memory, part.begin), replica_id, None)


def _tensor(
    piece: Piece, prefix: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]
) -> ShardedTensor:
    return ShardedTensor(
        prefix + piece.key,
        data,
        data.dtype,
        piece.shape,
        piece.global_shape,
        piece.offset,
        None,
        replica_id,
        allow_shape_mismatch=piece.allow_shape_mismatch,
        flattened_range=flat,
    )


def _replica_of_slice(piece: Piece, instance: int) -> ReplicaId:
    """Data-parallel ranks hold copies of the parameter, but not of its optimizer's slices."""
    replica_id = piece.replica_id
    if isinstance(replica_id, int) or len(replica_id) != 3:
        raise InvalidArgumentError(
            f"replica_id {replica_id} of a parameter of a distributed optimizer has no "
            "data-parallel entry",
            key=piece.key,
            hint="Megatron-Core's convention is (pipeline, tensor, data parallel)",
        )
    return (*replica_id[:2], instance)


# ---- The buckets' space ----


def object_of(layout: Layout, instance: int, dp_rank: int, name: str, value: Any) -> ShardedObject:
    """An object that each model-parallel rank stores beside its buckets."""
    replica_id = (instance, 0, dp_rank)
    return ShardedObject(f"{layout.prefix}.{name}", value, (1,), (0,), replica_id)


def _object(shard: OptimizerShard, name: str, value: Any) -> ShardedObject:
    return object_of(shard.layout, shard.instance, shard.dp_rank, name, value)


def layout_object(shard: OptimizerShard) -> ShardedObject:
    """Makes an object that describes the layout of a shard's buckets.

    With it, a checkpoint of the format "dp_reshardable" or "dp_zero_gather_scatter" can be loaded
    into any other layout: `load_optimizer` finds the object by its key. Every rank adds its own,
    anywhere in the state dict.
    """
    return _object(shard, LAYOUT, shard.layout.to_plain())


def _bucket_state(shard: OptimizerShard, with_layout: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: _object(shard, name, value) for name, value in shard.common.items()
    }
    sizes: Mapping[str, Any] = {
        "per_bucket_numel": lambda bucket: bucket.numel,
        "per_bucket_numel_unpadded": lambda bucket: bucket.numel_unpadded,
    }
    tensors: dict[str, Any] = {}
    for name, size in sizes.items():
        each = [{b.dtypes: [size(x) for x in b.buckets]} for b in shard.layout.buffers]
        tensors[name] = _object(shard, name, each)
    parts: dict[Tuple[int, int], list[Slice]] = {}
    for part in shard.slices():
        parts.setdefault(part.place[:2], []).append(part)
    tensors["buckets"] = [
        _bucket_tensors(shard, place, bucket, parts.get(place, []))
        for place, bucket in shard.layout.buckets()
    ]
    if with_layout:
        tensors[LAYOUT] = layout_object(shard)
    return {**state, PARAM_STATE: tensors}


def _bucket_tensors(
    shard: OptimizerShard, place: Tuple[int, int], bucket: Bucket, parts: Sequence[Slice]
) -> list[dict[str, ShardedTensor]]:
    """The rank's part of a bucket up to its last parameter, slice by slice and gap by gap."""
    key = shard.layout.bucket_key(*place)
    whole, replica_id = (bucket.numel_unpadded,), (shard.instance, 0, 0)
    found: list[dict[str, ShardedTensor]] = []

    def add(begin: int, states: Mapping[str, torch.Tensor]) -> None:
        made = {}
        for name, data in states.items():
            made[name] = ShardedTensor(
                f"{key}.{name}", data, data.dtype, tuple(data.shape), whole, (begin,), None,
                replica_id,
            )  # fmt: skip
        found.append(made)

    def add_gap(begin: int, end: int, device: torch.device | str) -> None:
        if begin < end:
            zeros = {
                name: torch.zeros(end - begin, dtype=dtype, device=device)
                for name, dtype in shard.dtypes.items()
            }
            add(begin, zeros)

    local = bucket.numel // shard.dp_size
    end = min((shard.dp_rank + 1) * local, bucket.numel_unpadded)
    at = min(shard.dp_rank * local, end)
    device: torch.device | str = "cpu"
    for part in parts:
        states = shard.states[part.place]
        device = next(iter(states.values())).device
        begin = part.parameter.start + part.begin
        add_gap(at, begin, device)
        add(begin, states)
        at = begin + part.numel
    add_gap(at, end, device)
    return found


# ---- Loading ----

_STATES = "states of the distributed optimizer"  # key in the template, unlike any in common state


def load_optimizer(
    checkpoint_dir: Union[str, os.PathLike[str]],
    shards: Sequence[OptimizerShard],
    *,
    place: str = "optimizer",
    layouts: Union[str, os.PathLike[str], Iterable[Layout], None] = None,
    process_group: Any = None,
    timeout: Optional[float] = _core.DEFAULT_TIMEOUT,
    allow_classes: Any = (),
    cast: bool = True,
) -> list[dict[str, Any]]:
    """Loads the state of a distributed optimizer into a rank's shards. Every rank calls.

    The format is found by the checkpoint's keys, content metadata and common state.

    - `fully_reshardable` and `fully_sharded_model_space` load into any layout. So do checkpoints of
      optimizers that are not distributed, if they hold all states (their "param" is stored as
      "fp32_param").
    - `dp_reshardable` and `dp_zero_gather_scatter` load into the same TP x PP layout with any
      number of data-parallel ranks. They load into another layout if the layouts of the saving job
      are known: from `layouts`, or from the objects that `layout_object` adds to a checkpoint.

    Args:
        checkpoint_dir: the checkpoint's directory.
        shards: one shard, or those of a chain of optimizers. Their states are filled in place.
        place: key of the optimizer's part in the checkpoint's common state.
        layouts: layouts of all model-parallel ranks of the job that saved, or the path of a file
            of write_layouts(); None: those stored in the checkpoint, or else the shards' own.
        process_group, timeout, allow_classes, cast: as for `tilestone.megatron.load`.

    Returns:
        for each shard, what the checkpoint has beside its states: "optimizer" with the param
        groups, and "grad_scaler" if it was saved. The shards' own `common` is not changed.

    Raises:
        CheckpointingException: on every rank; the states may be partly filled. The format is
            unknown, a state or parameter is not in the checkpoint, or buckets have another layout
            than the shards and no description of it is available.
    """

    def describe() -> None:
        check_chain(shards)
        given = file = ""
        if isinstance(layouts, (str, os.PathLike)):
            file = os.fspath(layouts)
        elif layouts is not None:
            given = to_json(layouts)
        asked.optimizer = (place, given, file, to_json(shard.layout for shard in shards))
        asked.given = {_STATES: [tensor for shard in shards for tensor in _states_of(shard)]}

    asked = engine_calls.Asked({}, describe)
    loaded = engine_calls.engine_load(
        asked,
        checkpoint_dir,
        group=process_group,
        timeout=timeout,
        allow_classes=allow_classes,
        cast=cast,
        differences=Differences(not_requested="ignore"),
    )
    return [_common_of(loaded.get(place), shard, place) for shard in shards]


def _states_of(shard: OptimizerShard) -> list[ShardedTensor]:
    """What a shard asks for: its states at the places of the parameters, in its own memory."""
    return [
        tensor
        for part in shard.slices()
        for state, memory in shard.states[part.place].items()
        for tensor in model_space_tensors(part, f"optimizer.state.{state}.", memory)
    ]


def _common_of(part: Any, shard: OptimizerShard, place: str) -> dict[str, Any]:
    """The common state of a shard's optimizer, without its states and their format."""
    chain = shard.layout.chain
    found = part if chain is None or not isinstance(part, dict) else part.get(chain)
    if not isinstance(found, dict):
        where = place if chain is None else f"{place}.{chain}"
        raise NotFoundError(
            "the common state of the optimizer is not in the checkpoint", key=where
        )
    kept = {
        name: value for name, value in found.items() if name not in (PARAM_STATE, SHARDING_TYPE)
    }
    inner = kept.get("optimizer")
    states = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(inner, dict) and isinstance(states, dict) and "common_step" in states:
        # An optimizer that is not distributed keeps the step with the states.
        step = states["common_step"]
        step = step.item() if isinstance(step, torch.Tensor) else step
        groups = [{**group, "step": step} for group in inner["param_groups"]]
        kept["optimizer"] = {"param_groups": groups}
    return kept
