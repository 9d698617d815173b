"""Chooses which holder writes a shard, or reads it for the others, and exchanges loaded shards.

The distribution is Megatron-Core's, rank for rank, so files and loads are as balanced as there. The
functions that move tensors are for strategies other than Tilestone's: in loads by Tilestone the
engine's ranks read for one another.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tilestone._errors import InvalidArgumentError, InternalError, MismatchError
from tilestone._torch.transfer import transfer_device
from tilestone.megatron import _ranks
from tilestone.megatron._shards.distribution import (
    ShardDistribution,
    agree_on_distribution,
    distribute_shards_to_ranks,
)
from tilestone.megatron.core import CheckpointingException
from tilestone.megatron.mapping import ShardedStateDict, ShardedTensor
from tilestone.megatron.utils import _ShardId

__all__ = [
    "ShardDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
]

Group = torch.distributed.ProcessGroup
logger = logging.getLogger(__name__)


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of Transformer Engine's 8-bit tensors, without importing it."""
    return any(
        base.__name__ in ("Float8Tensor", "QuantizedTensor")
        and base.__module__.split(".")[0] == "transformer_engine"
        for base in type(tensor).__mro__
    )


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group | None,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Distributes the writing or reading of the shards that the ranks of a group hold.

    Every rank calls. A list of shards that several ranks have in common is sent only once.

    Args:
        sharded_state_dict: this rank's state dict.
        parallelization_group: None for the default group.
        ignore_groups: False: distribute the shards whose main replica is in the group (for a save).
            True: distribute all shards (for a load).

    Returns:
        The distribution; None in a group of one rank.

    Raises:
        CheckpointingException: any rank failed; the same on every rank.
    """
    group = _ranks.default_group(parallelization_group)
    if group is None or _ranks.size(group) <= 1:
        return None
    return agree_on_distribution(lambda: sharded_state_dict, group, ignore_groups)


def _local_shape(shard: ShardedTensor) -> tuple[int, ...]:
    """The shape of the data that a rank holds."""
    flat = getattr(shard, "flattened_range", None)
    return tuple(shard.local_shape) if flat is None else (flat.stop - flat.start,)


def check_loaded(shard: ShardedTensor, tensor: torch.Tensor) -> None:
    """Raises MismatchError if a tensor is not what other ranks wait for."""
    if tuple(tensor.shape) == _local_shape(shard) and tensor.dtype == shard.dtype:
        return
    if is_float8tensor(tensor):
        return  # it is dequantised before it is sent
    raise MismatchError(
        f"loaded as {tensor.dtype} of shape {tuple(tensor.shape)}, but other ranks wait for "
        f"{shard.dtype} of shape {_local_shape(shard)}",
        key=shard.key,
    )


def _exchanged(distribution: ShardDistribution) -> dict[_ShardId, int]:
    """The shards that ranks other than the reader need, with the reader."""
    shared = {}
    for shard_id, rank in distribution.main_rank_for_shard.items():
        needed_by = distribution.all_ranks_for_shard[shard_id]
        if any(other != rank for other in needed_by):
            shared[shard_id] = rank
    return shared


def _to_send(
    loaded: dict[_ShardId, torch.Tensor], shard_id: _ShardId, shard: ShardedTensor, rank: int
) -> torch.Tensor:
    """A tensor that this rank of the group has loaded.

    Raises:
        InternalError: it has not loaded it.
        MismatchError: the tensor is not what other ranks wait for.
    """
    tensor = loaded.get(shard_id)
    if tensor is None:
        text = f"rank {rank} of the group has not loaded its shard {shard_id}"
        raise InternalError(text, key=str(shard_id[0]))
    if is_float8tensor(tensor):  # it is sent, and kept, dequantised
        tensor = loaded[shard_id] = tensor.dequantize()
    check_loaded(shard, tensor)
    return tensor.detach()


@torch.no_grad()
def exchange_loaded_tensors_broadcast(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Group | None = None,
) -> dict[_ShardId, torch.Tensor]:
    """Broadcasts each loaded tensor that other ranks need to the whole group. Every rank calls.

    Args:
        loaded_tensors: what this rank has loaded.
        unloaded_shards: what it still needs. Data in the entities is filled; otherwise new tensors
            are made on the device that the group's backend needs.
        shard_distribution: the distribution of the group.
        parallelization_group: None for the default group.

    Returns:
        The loaded and the received tensors.

    Raises:
        CheckpointingException: a tensor of this rank was not loaded or has another shape.
    """
    group = _ranks.default_group(parallelization_group)
    if group is None:
        raise InvalidArgumentError("an exchange needs torch.distributed to be initialised")
    if shard_distribution is None:
        raise InvalidArgumentError("an exchange needs the group's shard_distribution")
    here, device, kept = _ranks.rank(group), transfer_device(group), dict(loaded_tensors)
    for shard_id, rank in _exchanged(shard_distribution).items():
        shard = unloaded_shards.get(shard_id) or shard_distribution.shard_to_metadata[shard_id]
        if rank == here:
            moving = _to_send(kept, shard_id, shard, here).to(device).contiguous()
        else:
            moving = torch.empty(_local_shape(shard), dtype=shard.dtype, device=device)
        if moving.numel():
            source = torch.distributed.get_global_rank(group, rank)
            # As bytes, because backends know few dtypes. Not reshape(-1): a contiguous tensor of one
            # element may have any strides.
            elements = moving.as_strided((moving.numel(),), (1,)).view(torch.uint8)
            torch.distributed.broadcast(elements, src=source, group=group)
        if rank != here and shard_id in unloaded_shards:
            kept[shard_id] = moving if shard.data is None else shard.data.copy_(moving)
    return kept


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Group | None = None,
) -> dict[_ShardId, torch.Tensor]:
    """Is exchange_loaded_tensors_broadcast. In Megatron-Core, only the order of messages differs."""
    return exchange_loaded_tensors_broadcast(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group
    )


def exchange_loaded_tensors_gather_object(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group | None = None,
) -> dict[_ShardId, torch.Tensor]:
    """Gives every rank all that any rank of the group has loaded, pickled. Every rank calls.

    This is simple but needs much memory; use it for debugging. The arguments are those of
    exchange_loaded_tensors_broadcast.

    Returns:
        What all ranks of the group have loaded.

    Raises:
        CheckpointingException: two ranks have loaded the same shard.
    """
    return _all_of(loaded_tensors, parallelization_group)


def exchange_loaded_objects_gather_object(
    loaded_objects: dict[_ShardId, Any],
) -> dict[_ShardId, Any]:
    """Gives every rank all objects that any rank has loaded. All ranks that load call.

    Raises:
        CheckpointingException: two ranks have loaded the same object.
    """
    return _all_of(loaded_objects, None)


def _all_of(mine: dict[_ShardId, Any], group: Group | None) -> dict[_ShardId, Any]:
    group = _ranks.default_group(group)
    of_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(of_rank, mine, group=group)
    found: dict[_ShardId, Any] = {}
    loaded_by: dict[_ShardId, int] = {}
    for rank, loaded in enumerate(of_rank):
        for shard_id, value in loaded.items():
            if shard_id in found:
                raise CheckpointingException(
                    f"Duplicate shard ids loaded by different ranks: {shard_id} by ranks "
                    f"{loaded_by[shard_id]} and {rank} of the group",
                    key=str(shard_id[0]),
                )
            found[shard_id], loaded_by[shard_id] = value, rank
    return found


_ALGORITHMS = {
    "broadcast": exchange_loaded_tensors_broadcast,
    "gather_rounds": exchange_loaded_tensors_gather_rounds,
    "gather_object": exchange_loaded_tensors_gather_object,
}


def exchange_by_distribution(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group | None = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """Gives each rank the tensors that it needs and others have loaded. Every rank calls.

    Args:
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group: as for
            exchange_loaded_tensors_broadcast.
        exchange_algo: "broadcast" or "gather_rounds", which are the same here, or "gather_object".

    Returns:
        The loaded and the received tensors, by shard id.

    Raises:
        NotImplementedError: there is no such algorithm.
        CheckpointingException: a tensor of this rank was not loaded, or was loaded twice.
    """
    exchange = _ALGORITHMS.get(exchange_algo)
    if exchange is None:
        raise NotImplementedError(
            f"Unrecognized gather algorithm: {exchange_algo}; known: {', '.join(_ALGORITHMS)}"
        )
    return exchange(loaded_tensors, unloaded_shards, shard_distribution, parallelization_group)
