"""Loads a distributed optimizer's state from any stored format into shards of any layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import torch

from tilestone import _core
from tilestone._errors import NotFoundError
from tilestone._options.values import Differences
from tilestone.megatron._calls import engine_calls
from tilestone.megatron.distributed_optimizer.formats import (
    PARAM_STATE,
    SHARDING_TYPE,
    check_chain,
    model_space_tensors,
)
from tilestone.megatron.distributed_optimizer.layout import Layout, to_json
from tilestone.megatron.distributed_optimizer.shard import OptimizerShard
from tilestone.megatron.mapping import ShardedTensor

_STATES = "states of the distributed optimizer"  # key in the template, unlike any in common state


def load_optimizer(
    checkpoint_dir: Union[str, os.PathLike[str]],
    shards: Sequence[OptimizerShard],
    *,
    place: str = "optimizer",
    layouts: Optional[Iterable[Layout]] = None,
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
        layouts: layouts of all model-parallel ranks of the job that saved; None: those stored in
            the checkpoint, or else the shards' own.
        process_group, timeout, allow_classes, cast: as for `tilestone.megatron.load`.

    Returns:
        for each shard, what the checkpoint has beside its states: "optimizer" with the param
        groups, and "grad_scaler" if it was saved. The shards' own `common` is not changed.

    Raises:
        CheckpointingException: on every rank; the states may be partly filled. The format is
            unknown, a state or parameter is not in the checkpoint, or buckets have another layout
            than the shards and no description of it is available.
    """
    tensors: list[ShardedTensor] = []
    failure: Exception | None = None
    given, own = "", ""
    try:
        check_chain(shards)
        given = "" if layouts is None else to_json(layouts)
        own = to_json(shard.layout for shard in shards)
        for shard in shards:
            tensors += _states_of(shard)
    except Exception as error:
        failure = error
    asked = engine_calls.Asked({_STATES: tensors}, engine_calls.raiser(failure))
    asked.optimizer = (place, given, own)
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
