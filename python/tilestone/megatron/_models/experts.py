"""Sharded state dicts of experts: one tensor per weight for all experts, or one per expert.

In the checkpoint a weight of all experts has an extra first axis. The index of an expert on it is
its local number + (this rank's rank in ep) * (experts of a rank). So experts load in any form,
however they were kept: as modules, as one tensor, or as the weights of a grouped linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch

from tilestone._errors import InvalidArgumentError
from tilestone.megatron._models.factories import (
    apply_swiglu_sharded_factory,
    concatenated,
    refuse_flat,
)
from tilestone.megatron._models.tensors import (
    Offset,
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
    to_pass,
)
from tilestone.megatron.groups import Group, find_group, holders_of
from tilestone.megatron.mapping import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone.megatron.utils import replace_prefix_for_sharding

_Metadata = Optional[Mapping[Any, Any]]


@dataclass(frozen=True)
class _Experts:
    """The experts of a rank.

    Attributes:
        count: number of experts of this rank.
        ep, tp, dp: the expert parallel group, and the experts' tensor and data parallel groups.
        apart: each expert has its own tensors.
        offsets: of the prepended axes.
    """

    count: int
    ep: Group
    tp: Group
    dp: Group
    apart: bool
    offsets: Tuple[Offset, ...]

    def number(self, local: int) -> int:
        """An expert's number among the experts of all ranks."""
        return self.ep.rank() * self.count + local

    def offsets_of(self, local: int) -> Tuple[Offset, ...]:
        """The offsets of the prepended axes of an expert's tensors."""
        if self.apart:
            return self.offsets
        total = self.ep.size() * self.count
        return (*self.offsets, (len(self.offsets), self.number(local), total))

    def prefix_of(self, prefix: str, local: int) -> str:
        """The prefix of an expert's keys."""
        return f"{prefix}experts.{self.number(local)}." if self.apart else f"{prefix}experts."


def _experts_of(
    count: int, offsets: Iterable[Offset], metadata: _Metadata, module: Any, **groups: Any
) -> _Experts:
    """Describes a rank's experts. `groups`: the caller's arguments, by the groups' names."""
    if not isinstance(count, int) or count < 0:
        raise InvalidArgumentError(f"the number of a rank's experts must be >= 0, not {count!r}")
    ep, tp, dp = (find_group(name, groups[name], module) for name in ("ep", "expt_tp", "expt_dp"))
    apart = bool((metadata or {}).get("singleton_local_shards", False))
    return _Experts(count, ep, tp, dp, apart, tuple(offsets))


def sequential_experts_state_dict(
    experts: Sequence[torch.nn.Module],
    prefix: str = "",
    sharded_offsets: Tuple[Offset, ...] = (),
    metadata: _Metadata = None,
    *,
    ep_group: Any = None,
    expt_tp_group: Any = None,
    expt_dp_group: Any = None,
    module: Any = None,
) -> ShardedStateDict:
    """Makes the sharded state dict of experts that are modules, as Megatron's SequentialMLP does.

    Args:
        experts: this rank's experts, in order; every rank has the same number. Each makes its own
            sharded state dict, with expt_dp as the metadata's "dp_cp_group". If an expert has no
            such method, all its tensors are taken as equal along expt_tp.
        prefix: prefix of the module that holds the experts; their keys are PREFIXexperts.NAME in
            the checkpoint and PREFIXlocal_experts.NUMBER.NAME in the dict.
        sharded_offsets: offsets of prepended axes that enclosing modules have added.
        metadata: passed to the experts. With "singleton_local_shards", each expert has its own
            keys: PREFIXexperts.NUMBER.NAME.
        ep_group, expt_tp_group, expt_dp_group: looked up by `groups.find_group`, with `module`.
        module: the module that holds the experts.

    Raises:
        CheckpointingException: a group is not known; or replica ids of an expert's entities are not
            (PP, TP, DP), or come from a tensor-parallel group other than expt_tp (shards of some
            ranks would then count as replicas and be lost).
    """
    all_experts = _experts_of(
        len(experts), sharded_offsets, metadata, module,
        ep=ep_group, expt_tp=expt_tp_group, expt_dp=expt_dp_group,
    )  # fmt: skip
    own: Dict[Any, Any] = {**(metadata or {}), "dp_cp_group": to_pass(all_experts.dp)}
    sharded: ShardedStateDict = {}
    for local, expert in enumerate(experts):
        in_dict = f"{prefix}local_experts.{local}."
        tp: Any = to_pass(all_experts.tp)
        made = sharded_state_dict_default(
            expert, in_dict, all_experts.offsets_of(local), own, tp_group=tp
        )
        replace_prefix_for_sharding(made, in_dict, all_experts.prefix_of(prefix, local))
        for entity in made.values():
            _check_replica(entity, all_experts)
        sharded.update(made)
    return sharded


def _check_replica(entity: Any, experts: _Experts) -> None:
    """Gives an expert's entity the replica id of expert data parallelism, in place."""
    replica_id = entity.replica_id
    if not isinstance(replica_id, tuple) or len(replica_id) != 3:
        raise InvalidArgumentError(
            f"an expert's replica id must be (PP, TP, DP), not {replica_id}", key=entity.key
        )
    if replica_id[1] not in (0, experts.tp.rank()):
        raise InvalidArgumentError(
            f"an expert's replica id {replica_id} comes from a tensor-parallel group other than "
            f"expt_tp, in which this rank is {experts.tp.rank()} of {experts.tp.size()}",
            key=entity.key,
            hint="pass expt_tp_group to the expert's own layers as their tp_group",
        )
    entity.replica_id = (*replica_id[:2], experts.dp.rank())


def grouped_linear_state_dict(
    state_dict: Mapping[str, Any],
    prefix: str,
    name: str,
    tensor_parallel_layers_axis_map: Mapping[str, int],
    sharded_offsets: Tuple[Offset, ...] = (),
    metadata: _Metadata = None,
    *,
    num_local_experts: int,
    gated: bool = False,
    extra_states: Sequence[Any] | None = None,
    ep_group: Any = None,
    expt_tp_group: Any = None,
    expt_dp_group: Any = None,
    module: Any = None,
) -> ShardedStateDict:
    """Makes the sharded state dict of one linear layer of a rank's experts, as TEGroupedMLP does.

    Args:
        state_dict: weight0, weight1, ... and, if there are biases, bias0, bias1, ...
        prefix: prefix of the module that holds the layer.
        name: the layer's name in that module, for example "linear_fc1". Keys are
            PREFIXexperts.NAME.weight in the checkpoint and PREFIXNAME.weight0 in the dict.
        tensor_parallel_layers_axis_map: the axis of "weight" and "bias" that expt_tp divides.
        sharded_offsets, metadata: as for sequential_experts_state_dict.
        num_local_experts: number of experts of this rank, the same on every rank.
        gated: store W and V as apply_swiglu_sharded_factory does.
        extra_states: one for each expert; None: the experts have none, and None is stored.
        ep_group, expt_tp_group, expt_dp_group, module: as for sequential_experts_state_dict.

    Raises:
        CheckpointingException: a group is not known; or the state lacks a weight, or has an entry
            that does not belong to an expert and would not be stored.
    """
    experts = _experts_of(
        num_local_experts, sharded_offsets, metadata, module,
        ep=ep_group, expt_tp=expt_tp_group, expt_dp=expt_dp_group,
    )  # fmt: skip
    _check_linear(state_dict, f"{prefix}{name}", num_local_experts, extra_states)
    sharded: ShardedStateDict = {}
    for local in range(num_local_experts):
        key = f"{experts.prefix_of(prefix, local)}{name}."
        state = _state_of_expert(state_dict, local, key, extra_states)
        tp: Any = experts.tp
        dp: Any = experts.dp
        made = make_sharded_tensors_for_checkpoint(
            state, key, dict(tensor_parallel_layers_axis_map), experts.offsets_of(local),
            tp_group=tp, dp_cp_group=dp,
        )  # fmt: skip
        for each, entity in made.items():
            own = each[len(key) :]
            if gated and own in ("weight", "bias"):
                entity = apply_swiglu_sharded_factory(
                    entity, experts.offsets_of(local), experts.apart
                )
            number = "" if own == "_extra_state" and local == 0 else str(local)
            sharded[f"{prefix}{name}.{own}{number}"] = entity
    return sharded


def _check_linear(
    state_dict: Mapping[str, Any], key: str, count: int, extra_states: Sequence[Any] | None
) -> None:
    """Refuses a state with an entry that would not be stored."""
    kept = {f"{kind}{local}" for kind in ("weight", "bias") for local in range(count)}
    lost = [
        name for name, value in state_dict.items()
        if name not in kept and not (name.startswith("_extra_state") and value is None)
    ]  # fmt: skip
    if lost:
        raise InvalidArgumentError(
            f"the layer's {sorted(lost)} are not weights or biases of its {count} experts",
            key=key,
            hint="pass extra states as extra_states, one for each expert",
        )
    if extra_states is not None and len(extra_states) != count:
        text = f"{len(extra_states)} extra states were given for {count} experts"
        raise InvalidArgumentError(text, key=key)


def _state_of_expert(
    state_dict: Mapping[str, Any], local: int, key: str, extra_states: Sequence[Any] | None
) -> Dict[str, Any]:
    if f"weight{local}" not in state_dict:
        text = f"the layer has no weight{local}; it has {sorted(state_dict)}"
        raise InvalidArgumentError(text, key=f"{key}weight")
    state = {"weight": state_dict[f"weight{local}"]}
    if f"bias{local}" in state_dict:
        state["bias"] = state_dict[f"bias{local}"]
    state["_extra_state"] = None if extra_states is None else extra_states[local]
    return state


# ---- One tensor for all experts of a rank ----


@dataclass(frozen=True)
class _Fused:
    """A weight of all experts of a rank as one 2-D tensor, input features first.

    Attributes:
        experts: the experts that the weight belongs to.
        shape: (experts, input features, output features) of the local tensor.
        tp_axis: the axis of an expert's stored weight (output, input) that expt_tp divides.
        gated: the output features are those of W, then those of V.
    """

    experts: _Experts
    shape: Tuple[int, int, int]
    tp_axis: int
    gated: bool

    def build(
        self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Optional[slice]
    ) -> List[Any]:
        refuse_flat(key, flat, "weight of grouped experts")
        with torch.no_grad():
            stored = data.reshape(self.shape).transpose(1, 2)  # (experts, output, input)
            parts = torch.chunk(stored, 2, dim=1) if self.gated else (stored,)
            make: Callable[..., Any] = (
                self._one_by_one if self.experts.apart else self._together
            )
            return [make(key, number, part, replica_id) for number, part in enumerate(parts)]

    def merge(self, loaded: List[Any]) -> torch.Tensor:
        with torch.no_grad():
            parts = [torch.stack(part) if self.experts.apart else part for part in loaded]
            stored = concatenated(parts, 1)
            experts, inputs, outputs = self.shape
            whole = stored.transpose(1, 2)
            if self.tp_axis == 0:
                # (input, experts * output) and (experts, input, output) have the same memory.
                return whole.reshape(inputs, experts * outputs)
            return whole.reshape(experts * inputs, outputs)

    def _together(
        self, key: str, number: int, part: torch.Tensor, replica_id: ReplicaId
    ) -> ShardedTensor:
        """All experts under one key."""
        axis, experts = len(self.experts.offsets), self.experts
        tp = experts.tp
        place, fragments = tp.rank() + number * tp.size(), tp.size() * (2 if self.gated else 1)
        return ShardedTensor.from_rank_offsets(
            key,
            part.contiguous(),
            *experts.offsets,
            (axis, experts.ep.rank(), experts.ep.size()),
            (axis + 1 + self.tp_axis, place, fragments),
            replica_id=replica_id,
            prepend_axis_num=axis,
        )

    def _one_by_one(
        self, key: str, number: int, part: torch.Tensor, replica_id: ReplicaId
    ) -> List[ShardedTensor]:
        """Each expert under its own key."""
        axis, experts = len(self.experts.offsets), self.experts
        before, found, layer = key.rpartition("experts.")
        if not found:
            raise InvalidArgumentError("a key of experts must contain experts.LAYER", key=key)
        suffix = f"_{'wv'[number]}" if self.gated else ""
        return [
            ShardedTensor.from_rank_offsets(
                f"{before}experts.{experts.number(local)}.{layer}{suffix}",
                weight.contiguous(),
                *experts.offsets,
                (axis + self.tp_axis, experts.tp.rank(), experts.tp.size()),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for local, weight in enumerate(part)
        ]


def grouped_experts_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    prefix: str = "",
    sharded_offsets: Tuple[Offset, ...] = (),
    metadata: _Metadata = None,
    *,
    num_local_experts: int,
    hidden_size: int,
    gated: bool = False,
    ep_group: Any = None,
    expt_tp_group: Any = None,
    expt_dp_group: Any = None,
    module: Any = None,
) -> ShardedStateDict:
    """Makes the sharded state dict of experts that are two tensors, as Megatron's GroupedMLP does.

    The weights are stored transposed, so that they load as sequential experts too. Whole optimizer
    states of the weights are transposed in the same way; flattened slices of them are refused.

    Args:
        state_dict: weight1 (hidden_size, num_local_experts * features), where the features are
            those of W and then V if gated, and weight2 (num_local_experts * features, hidden_size).
        prefix: prefix of the module; keys are PREFIXexperts.linear_fc1.weight in the checkpoint and
            PREFIXweight1 in the dict. Extra states of None are added, because sequential experts
            have them too.
        sharded_offsets, metadata: as for sequential_experts_state_dict.
        num_local_experts: number of experts of this rank, the same on every rank.
        hidden_size: number of input features of weight1.
        gated: the first layer consists of W and V.
        ep_group, expt_tp_group, expt_dp_group, module: as for sequential_experts_state_dict.

    Raises:
        CheckpointingException: a group is not known, or a weight has a wrong shape.
    """
    experts = _experts_of(
        num_local_experts, sharded_offsets, metadata, module,
        ep=ep_group, expt_tp=expt_tp_group, expt_dp=expt_dp_group,
    )  # fmt: skip
    if set(state_dict) != {"weight1", "weight2"}:
        text = f"grouped experts have the entries weight1 and weight2, not {sorted(state_dict)}"
        raise InvalidArgumentError(text, key=f"{prefix}experts")
    if num_local_experts < 1 or hidden_size < 1:
        text = f"{num_local_experts} experts of hidden size {hidden_size} have no weights"
        raise InvalidArgumentError(text, key=f"{prefix}experts")
    features = state_dict["weight2"].numel() // (num_local_experts * hidden_size)
    first = (num_local_experts, hidden_size, features * (2 if gated else 1))
    second = (num_local_experts, features, hidden_size)
    weights = {
        "weight1": ("linear_fc1", _Fused(experts, first, 0, gated)),
        "weight2": ("linear_fc2", _Fused(experts, second, 1, False)),
    }
    sharded: ShardedStateDict = {}
    for name, tensor in state_dict.items():
        layer, fused = weights[name]
        key = f"{prefix}experts.{layer}.weight"
        sharded[f"{prefix}{name}"] = _fused_factory(key, tensor, fused)
    sharded.update(_extra_states(prefix, experts))
    return sharded


def _fused_factory(key: str, tensor: torch.Tensor, fused: _Fused) -> ShardedTensorFactory:
    experts = fused.experts
    count, inputs, outputs = fused.shape
    wanted = (inputs, count * outputs) if fused.tp_axis == 0 else (count * inputs, outputs)
    if tuple(tensor.shape) != wanted:
        text = (
            f"a weight has shape {tuple(tensor.shape)}, expected {wanted}: {count} experts of "
            f"{inputs} x {outputs}"
        )
        raise InvalidArgumentError(text, key=key)
    replica_id, holders = (0, 0, experts.dp.rank()), holders_of(experts.dp)
    build_fn: Any = fused.build
    merge_fn: Any = fused.merge
    return ShardedTensorFactory(key, tensor, build_fn, merge_fn, replica_id, holders=holders)


def _extra_states(prefix: str, experts: _Experts) -> ShardedStateDict:
    """Makes extra states of None, as sequential experts have them."""
    replica_id = (0, experts.tp.rank(), experts.dp.rank())
    made: ShardedStateDict = {}
    for local in range(experts.count):
        for layer in ("linear_fc1", "linear_fc2"):
            key = f"{experts.prefix_of(prefix, local)}{layer}._extra_state"
            made[f"{prefix}expert{experts.number(local)}.{layer}._extra_state"] = (
                make_sharded_object_for_checkpoint(
                    None, key, experts.offsets_of(local), replica_id
                )
            )
    return made
