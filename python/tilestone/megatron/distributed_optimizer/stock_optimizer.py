"""Shards of Megatron-Core's own DistributedOptimizer, which is used only by its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, Tuple

import torch

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.megatron.distributed_optimizer.formats import LAYOUT, object_of
from tilestone.megatron.distributed_optimizer.layout import (
    ADAM,
    Bucket,
    Buffer,
    Layout,
    OptimizerShard,
    Parameter,
    Slice,
)
from tilestone.megatron.distributed_optimizer.pieces import Entity, entities_by_data
from tilestone.megatron.mapping import ShardedObject, ShardedStateDict
from tilestone.megatron.optimizer import KEEP_VARS_HINT


def _chained(optimizer: Any) -> list[Tuple[Optional[int], Any]]:
    """The distributed optimizers of a chain with their numbers; a single one has no number."""
    several = getattr(optimizer, "chained_optimizers", [optimizer])
    numbers = [None] if len(several) == 1 else list(range(len(several)))
    numbered = [
        (number, one)
        for number, one in zip(numbers, several)
        if not getattr(one, "is_stub_optimizer", False)
    ]
    for _, one in numbered:
        if not hasattr(one, "gbuf_ranges") or not hasattr(one, "model_param_gbuf_map"):
            raise InvalidArgumentError(
                f"a {type(one).__name__} is not a distributed optimizer with its own buffers"
            )
    return numbered


def shards_of(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict
) -> list[OptimizerShard]:
    """Describes this rank's part of a Megatron-Core DistributedOptimizer, or of a chain of them.

    Args:
        optimizer: a DistributedOptimizer, or a ChainedOptimizer of several. Optimizers of Megatron
            FSDP are not supported.
        model_sharded_state_dict: of the model. Its entities' data must be the parameters
            themselves.

    Returns:
        a shard for each optimizer that has parameters on this rank. The states are the optimizer's
        own tensors if it holds them in memory in the stored form; states that it has not made yet
        are zeros.

    Raises:
        CheckpointingException: a parameter is not in the model's state dict; the optimizer is of
            another class; or its buffers are not divided as Megatron-Core divides them.
    """
    entities = entities_by_data(model_sharded_state_dict)
    return [_shard(one, number, entities) for number, one in _chained(optimizer)]


def layout_objects(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict
) -> list[ShardedObject]:
    """Describes the layouts of a stock optimizer's buckets, to be saved with its own state.

    Every rank saves its objects, anywhere in the state dict. With them, buckets that Megatron-Core's
    own `sharded_state_dict` describes can be converted, and loaded into any other layout.

    Args:
        optimizer: a DistributedOptimizer, or a ChainedOptimizer of several.
        model_sharded_state_dict: of the model, whose entities' data are the parameters themselves.

    Returns:
        an object for each optimizer that has parameters on this rank.

    Raises:
        CheckpointingException: as shards_of().
    """
    entities = entities_by_data(model_sharded_state_dict)
    objects = []
    for number, one in _chained(optimizer):
        layout = _layout(one, number, entities)
        instance, rank = int(one.distributed_optimizer_instance_id), one.data_parallel_group.rank()
        objects.append(object_of(layout, instance, rank, LAYOUT, layout.to_plain()))
    return objects


def _layout(optimizer: Any, number: Optional[int], entities: Mapping[int, Entity]) -> Layout:
    buffers = tuple(_buffer(each, entities) for each in optimizer.buffers)
    return Layout(buffers, int(optimizer.data_parallel_group_idx), number)


def _shard(optimizer: Any, number: Optional[int], entities: Mapping[int, Entity]) -> OptimizerShard:
    layout = _layout(optimizer, number, entities)
    group = optimizer.data_parallel_group
    rank, size = group.rank(), group.size()
    states: dict[Tuple[int, int, int], dict[str, torch.Tensor]] = {}
    for part, parameter in _slices(optimizer, layout, rank, size):
        states[part.place] = _states(optimizer, parameter, part)
    dtypes = {name: tensor.dtype for each in states.values() for name, tensor in each.items()}
    return OptimizerShard(
        layout,
        rank,
        size,
        states,
        dtypes or dict(ADAM),
        _common(optimizer),
        int(optimizer.distributed_optimizer_instance_id),
    )


def _buffer(buffer: Any, entities: Mapping[int, Entity]) -> Buffer:
    parameters: list[list[Parameter]] = [[] for _ in buffer.buckets]
    for parameter, (start, _, number) in buffer.param_index_map.items():
        entity = entities.get(id(parameter))
        if entity is None:
            raise InvalidArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} of the optimizer is not in the "
                "model's state dict." + KEEP_VARS_HINT
            )
        parameters[number].append(Parameter.of(entity, start - buffer.buckets[number].offset))
    buckets = (
        Bucket(
            tuple(sorted(each, key=lambda one: one.start)),
            int(bucket.numel_unpadded),
            int(bucket.grad_data.numel()),
        )
        for each, bucket in zip(parameters, buffer.buckets)
    )
    return Buffer((buffer.param_dtype, buffer.grad_dtype), tuple(buckets))


def _slices(
    optimizer: Any, layout: Layout, rank: int, size: int
) -> Iterator[Tuple[Slice, torch.nn.Parameter]]:
    """Yields the rank's slices with their parameters, and checks them against the optimizer's."""
    found: dict[Tuple[int, int, int], torch.nn.Parameter] = {}
    for i, buffer in enumerate(optimizer.buffers):
        for parameter, (start, _, j) in buffer.param_index_map.items():
            if parameter.numel():
                found[i, j, start - buffer.buckets[j].offset] = parameter
    for part in layout.slices(rank, size):
        i, j, _ = part.place
        parameter = found[i, j, part.parameter.start]
        ranges = optimizer.gbuf_ranges[i][layout.buffers[i].dtypes][j]["param_map"].get(parameter)
        there = None if ranges is None else (ranges["param"].start, ranges["param"].end)
        if there != (part.begin, part.end):
            raise MismatchError(
                f"the optimizer has {there} of the flattened parameter on this rank, but its "
                f"buckets say {(part.begin, part.end)}",
                key=part.parameter.key,
            )
        yield part, parameter


def _states(
    optimizer: Any, parameter: torch.nn.Parameter, part: Slice
) -> dict[str, torch.Tensor]:
    """The states of a slice by name. (torch's "step" is in the param groups.)"""
    inner = _inner_parameter(optimizer, parameter)
    if inner in optimizer.optimizer.state:
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    else:
        tensors = {
            name: torch.zeros(part.numel, dtype=dtype, device=inner.device)
            for name, dtype in _dtypes_of(optimizer).items()
        }
        if inner.dtype == torch.float32:
            tensors["param"] = inner
    return {
        name: tensor.detach().contiguous()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == (part.numel,)
        if name != "step"
    }


def _inner_parameter(optimizer: Any, parameter: torch.nn.Parameter) -> Any:
    """The tensor that the inner optimizer updates for the rank's slice of a parameter.

    Raises:
        CheckpointingException: the optimizer has two different orders of a group's parameters, so
            states would be assigned to the wrong parameters.
    """
    group, order = optimizer.model_param_group_index_map[parameter]
    found = optimizer.optimizer.param_groups[group]["params"][order]
    flat = optimizer._get_model_param_range_map(parameter)["param"]
    own_dtype = parameter.dtype == torch.float32
    kinds = [optimizer.model_fp32_groups[group], optimizer.model_float16_groups[group]]
    count = len(kinds[0])
    if found.numel() != flat.size or own_dtype != (order < count) and all(kinds):
        raise InvalidArgumentError(
            f"a param group mixes {count} float32 parameters with {len(kinds[1])} of 16 bits, and "
            "Megatron-Core confuses their states",
            hint="put them into separate param groups",
        )
    return found


def _dtypes_of(optimizer: Any) -> dict[str, torch.dtype]:
    config = optimizer.config
    return {
        "param": getattr(config, "main_params_dtype", torch.float32),
        "exp_avg": getattr(config, "exp_avg_dtype", torch.float32),
        "exp_avg_sq": getattr(config, "exp_avg_sq_dtype", torch.float32),
    }


def _common(optimizer: Any) -> dict[str, Any]:
    """The optimizer's own state dict if it has made its states; otherwise the param groups."""
    if optimizer.optimizer.state:
        return dict(optimizer.state_dict())
    groups = optimizer.optimizer.state_dict()["param_groups"]
    kept = [{name: v for name, v in group.items() if name != "params"} for group in groups]
    return {"optimizer": {"param_groups": kept}}


@torch.no_grad()
def put_into(
    optimizer: Any, shards: Sequence[OptimizerShard], commons: Sequence[Mapping[str, Any]]
) -> None:
    """Puts what `load_optimizer` has loaded into a DistributedOptimizer, or a chain of them.

    Param groups are matched as in Megatron-Core's `load_state_dict`. The model's own parameters do
    not change, because they are loaded with the model.

    Args:
        optimizer: the optimizer that was passed to `shards_of`.
        shards: the result of `shards_of`, loaded.
        commons: the result of `load_optimizer`.

    Raises:
        CheckpointingException: the numbers of optimizers, shards and commons differ.
    """
    numbered = _chained(optimizer)
    if len(numbered) != len(shards) or len(commons) != len(shards):
        raise InvalidArgumentError(
            f"{len(numbered)} optimizers, {len(shards)} shards and {len(commons)} common states "
            "were given; expected equal numbers"
        )
    for (_, one), shard, common in zip(numbered, shards, commons):
        _put_shard(one, shard, common)


def _put_shard(optimizer: Any, shard: OptimizerShard, common: Mapping[str, Any]) -> None:
    parts = list(_slices(optimizer, shard.layout, shard.dp_rank, shard.dp_size))
    if not getattr(optimizer.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
        for part, parameter in parts:
            state = optimizer.optimizer.state[_inner_parameter(optimizer, parameter)]
            for name, tensor in shard.states[part.place].items():
                if name != "param":
                    state.setdefault(name, tensor)
    optimizer.load_state_dict(dict(common))  # may replace the states, so they are set afterwards
    for part, parameter in parts:
        own = optimizer._get_main_param_and_optimizer_states(parameter)
        loaded = shard.states[part.place]
        optimizer._set_main_param_and_optimizer_states(parameter, {**own, **loaded})
    synchronize = getattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
    if synchronize is not None:  # the optimizer has some of its states on the CPU
        synchronize()
