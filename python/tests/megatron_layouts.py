"""Parts of models on real ranks, made by tilestone.megatron and by Megatron-Core for comparison."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from test_megatron_names import definition_of
from tilestone.megatron import models as ours
from tilestone.megatron.groups import find_group
from tilestone.megatron.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from tilestone.megatron.utils import replace_prefix_for_sharding

HIDDEN, FEATURES, EXPERTS = 6, 8, 4
FIELDS = [
    "key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations",
    "replica_id", "prepend_axis_num", "allow_shape_mismatch",
]  # fmt: skip


def megatron() -> types.SimpleNamespace:
    """Megatron-Core's own functions, and those of its modules whose methods are called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, utils
        from megatron.core.models.common.language_module.language_module import LanguageModule
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
        from megatron.core.transformer import mlp, multi_token_prediction, transformer_block
        from megatron.core.transformer import utils as transformer_utils
        from megatron.core.transformer.moe import experts
        from megatron.core.transformer.transformer_config import TransformerConfig
    found = types.SimpleNamespace(
        parallel_state=parallel_state, LanguageModule=LanguageModule, experts=experts,
        VocabParallelEmbedding=VocabParallelEmbedding, TransformerConfig=TransformerConfig,
        TransformerBlock=transformer_block.TransformerBlock,
    )  # fmt: skip
    for module in (utils, transformer_utils, mlp, multi_token_prediction):
        for name in ours.__all__:
            if hasattr(module, name):
                setattr(found, name, getattr(module, name))
    names = {
        name: getattr(module, name)
        for module in (utils, transformer_utils)
        for name in ("get_pg_size", "get_pg_rank", "make_sharded_tensors_for_checkpoint")
        if hasattr(module, name)
    }
    names["replace_prefix_for_sharding"] = replace_prefix_for_sharding
    grouped = definition_of("extensions/transformer_engine.py", "_sharded_state_dict_grouped")
    exec(compile(ast.Module([grouped], []), "grouped", "exec"), names)
    found.grouped_linear = names["_sharded_state_dict_grouped"]
    return found


@contextlib.contextmanager
def initialised(state: Any, **sizes: int) -> Iterator[types.SimpleNamespace]:
    """Initializes Megatron's parallel_state for a layout. Yields the groups by name."""
    state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    try:
        yield types.SimpleNamespace(
            tp=state.get_tensor_model_parallel_group(),
            pp=state.get_pipeline_model_parallel_group(),
            cp=state.get_context_parallel_group(),
            dp=state.get_data_parallel_group(),
            dp_cp=state.get_data_parallel_group(with_context_parallel=True),
            ep=state.get_expert_model_parallel_group(),
            expt_tp=state.get_expert_tensor_parallel_group(),
            expt_dp=state.get_expert_data_parallel_group(),
        )
    finally:
        state.destroy_model_parallel()


def ramp(*shape: int) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


# ---- What is compared ----


def leaves(tree: Any) -> list[Any]:
    """The entities of a tree in order, with factories replaced by what they build."""
    if isinstance(tree, (dict, list)):
        values = tree.values() if isinstance(tree, dict) else tree
        return [leaf for value in values for leaf in leaves(value)]
    if isinstance(tree, ShardedTensorFactory):
        return leaves(tree.build())
    return [tree] if isinstance(tree, (ShardedTensor, ShardedObject)) else []


def check_same(case: str, mine: Any, stock: Any) -> None:
    """Compares entities, and what their factories build, with Megatron-Core's, field by field."""
    if isinstance(stock, dict):
        assert set(mine) == set(stock), case
        for name, value in stock.items():
            check_same(f"{case}: {name}", mine[name], value)
        return
    assert type(mine).__name__ == type(stock).__name__, case
    if isinstance(stock, int):
        assert mine == stock, case
        return
    if type(stock).__name__ == "ShardedTensor":
        for field in FIELDS:
            assert getattr(mine, field) == getattr(stock, field), (case, field, mine, stock)
        assert torch.equal(mine.data, stock.data), case
        return
    if type(stock).__name__ == "ShardedObject":
        for field in ("key", "data", "global_shape", "global_offset", "replica_id"):
            assert getattr(mine, field) == getattr(stock, field), (case, field, mine, stock)
        return
    assert (mine.key, mine.replica_id) == (stock.key, stock.replica_id), (case, mine, stock)
    assert torch.equal(mine.data, stock.data), case
    built, expected = leaves(mine), leaves(stock)
    assert len(built) == len(expected) > 0, case
    for one, other in zip(built, expected, strict=True):
        check_same(case, one, other)
    check_merge(case, mine)


def check_merge(case: str, factory: Any) -> None:
    """Checks that a factory merges its parts into the original data."""

    def loaded(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: loaded(value) for name, value in tree.items()}
        return list(map(loaded, tree)) if isinstance(tree, list) else tree.data

    assert torch.equal(factory.merge_fn(loaded(factory.build())), factory.data), case


# ---- Parts of models ----


def dense(lib: Any, at: types.SimpleNamespace, stage: str) -> dict[str, Any]:
    """Results of all functions with groups as arguments; `lib` is tilestone's or Megatron-Core."""
    weight, layer = ramp(4, 6), ((0, 1, 3),)
    own = {"tp_group": at.tp, "dp_cp_group": at.dp_cp}
    linear = torch.nn.Linear(3, 2)
    make_tp = lib.make_tp_sharded_tensor_for_checkpoint
    make = lib.make_sharded_tensor_for_checkpoint
    made: dict[str, Any] = {
        "rows": make_tp(weight, f"{stage}rows", **own),
        "columns": make_tp(weight, f"{stage}columns", 1, prepend_offsets=layer, **own),
        "padded": make_tp(weight, f"{stage}padded", allow_shape_mismatch=True, **own),
        "same": make(weight, f"{stage}same", **own),
        "same in a layer": make(weight, f"{stage}same2", layer, **own),
        "scalar": make(torch.tensor(1.0), f"{stage}scalar", **own),
        "module": lib.make_sharded_tensors_for_checkpoint(
            {"weight": weight, "bias": ramp(4), "norm": ramp(3), "_extra_state": {"a": 1}},
            f"{stage}module.", {"weight": 1, "bias": 0, "other": 0}, layer, **own,
        ),
        "object": lib.make_sharded_object_for_checkpoint(
            {"a": 1}, f"{stage}object", ((1, 0, 2), (0, 2, 3)), (0, 0, 1)
        ),
        "any module": lib.sharded_state_dict_default(
            linear, f"{stage}linear.", layer, {"dp_cp_group": at.dp_cp}, tp_group=at.tp
        ),
    }  # fmt: skip
    # The parameters are random, so set the same ones for both libraries.
    for value, kept in zip(made["any module"].values(), (ramp(2, 3), ramp(2)), strict=True):
        value.data = kept
    gated = make_tp(weight, f"{stage}gated", 0, prepend_offsets=layer, **own)
    made["gated"] = lib.apply_swiglu_sharded_factory(gated, layer)
    made["gated apart"] = lib.apply_swiglu_sharded_factory(
        dataclasses.replace(gated, key=f"{stage}apart"), layer, True
    )
    return made


def looked_up(lib: Any, stage: str) -> dict[str, Any]:
    """Results of functions without group arguments; the groups are those of parallel_state."""
    return {
        "rows": lib.make_tp_sharded_tensor_for_checkpoint(ramp(2, 2), f"{stage}up_rows"),
        "same": lib.make_sharded_tensor_for_checkpoint(ramp(2, 2), f"{stage}up_same"),
        "module": lib.make_sharded_tensors_for_checkpoint({"w": ramp(3)}, f"{stage}up."),
        "object": lib.make_sharded_object_for_checkpoint(1, f"{stage}up_object"),
        "metadata": lib.ensure_metadata_has_dp_cp_group(None)["dp_cp_group"].size(),
    }


def tied(lib: Any, at: types.SimpleNamespace) -> dict[str, Any]:
    """Replicas of tensors of other stages."""
    state: dict[str, Any] = {"embedding": None, "output": None}
    lib.tie_word_embeddings_state_dict(state, ramp(4, 3), "embedding", at.tp, at.dp_cp)
    lib.tie_output_layer_state_dict(state, ramp(4, 3), "output", at.tp, at.dp_cp)
    return state


class Expert(torch.nn.Module):
    """An expert with a gated first layer. The given library makes its sharded state dict."""

    def __init__(self, lib: Any, number: int, tp: Any) -> None:
        super().__init__()
        self.lib, self.tp = lib, tp
        local = FEATURES // tp.size()
        first = torch.arange(2 * local * HIDDEN).reshape(2 * local, HIDDEN)
        self.fc1 = torch.nn.Parameter(first + 1000.0 * number + 100 * tp.rank())
        self.fc2 = torch.nn.Parameter(ramp(HIDDEN, local) + 1000.0 * number + 100 * tp.rank())
        self.bias = torch.nn.Parameter(ramp(HIDDEN) + number)

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        groups = {"tp_group": self.tp, "dp_cp_group": metadata["dp_cp_group"]}
        first = {"weight": self.fc1, "_extra_state": None}
        second = {"weight": self.fc2, "bias": self.bias, "_extra_state": None}
        make = self.lib.make_sharded_tensors_for_checkpoint
        made = make(first, f"{prefix}linear_fc1.", {"weight": 0}, sharded_offsets, **groups)
        made |= make(second, f"{prefix}linear_fc2.", {"weight": 1}, sharded_offsets, **groups)
        made[f"{prefix}linear_fc1.weight"] = self.lib.apply_swiglu_sharded_factory(
            made[f"{prefix}linear_fc1.weight"],
            sharded_offsets,
            metadata.get("singleton_local_shards", False),
        )
        return made


class ExpertLayer:
    """The attributes that sharded_state_dict() of Megatron-Core's expert classes needs."""

    def __init__(self, lib: Any, at: types.SimpleNamespace, gated: bool = True) -> None:
        self.num_local_experts = EXPERTS // at.ep.size()
        self.ep_group, self.tp_group, self.dp_group = at.ep, at.expt_tp, at.expt_dp
        self.config = types.SimpleNamespace(gated_linear_unit=gated, hidden_size=HIDDEN)
        first = self.num_local_experts * at.ep.rank()
        numbers = range(first, first + self.num_local_experts)
        self.local_experts = [Expert(lib, number, at.expt_tp) for number in numbers]
        local = FEATURES // at.expt_tp.size()
        columns = local * self.num_local_experts * (2 if gated else 1)
        self.weight1 = torch.nn.Parameter(ramp(HIDDEN, columns))
        self.weight2 = torch.nn.Parameter(ramp(local * self.num_local_experts, HIDDEN))

    def state_dict(self, prefix: str = "", keep_vars: bool = True) -> dict[str, Any]:
        return {"weight1": self.weight1, "weight2": self.weight2}


class GroupedLinear:
    """The attributes of Transformer Engine's grouped linear layer."""

    def __init__(self, stock: Any, at: types.SimpleNamespace, axes: dict[str, int]) -> None:
        self._pg_collection, self._tp_group = at, at.expt_tp
        self.num_gemms, self.use_bias, self.axes = EXPERTS // at.ep.size(), True, axes
        self.stock = stock
        self.state = {f"weight{i}": ramp(4, 6) + i for i in range(self.num_gemms)}
        self.state |= {f"bias{i}": ramp(4) + i for i in range(self.num_gemms)}

    def state_dict(self, prefix: str = "", keep_vars: bool = True) -> dict[str, Any]:
        return {**self.state, "_extra_state": None}

    def _split_extra_state(self, state: Any) -> list[Any]:
        return [{"scale": i} for i in range(self.num_gemms)]

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        axes = {f"{i}.{n}": axis for i in range(self.num_gemms) for n, axis in self.axes.items()}
        return self.stock.grouped_linear(self, axes, prefix, sharded_offsets, metadata)


def experts_by_both(
    stock: Any, at: types.SimpleNamespace, prefix: str, offsets: Any, metadata: Any
) -> Iterator[tuple[str, Any, Any]]:
    """(case, ours, Megatron-Core's) for each form of experts."""
    layer = ExpertLayer(stock, at)
    own = {"ep_group": at.ep, "expt_tp_group": at.expt_tp, "expt_dp_group": at.expt_dp}
    yield (
        "sequential",
        ours.sequential_experts_state_dict(
            ExpertLayer(ours, at).local_experts, f"{prefix}seq.", offsets, metadata, **own
        ),
        stock.experts.SequentialMLP.sharded_state_dict(layer, f"{prefix}seq.", offsets, metadata),
    )
    for gated in (True, False):
        name = f"{prefix}{'glu' if gated else 'mlp'}."
        grouped = ExpertLayer(stock, at, gated)
        options: Any = {
            "num_local_experts": grouped.num_local_experts, "hidden_size": HIDDEN, "gated": gated
        }  # fmt: skip
        yield (
            f"grouped, gated: {gated}",
            ours.grouped_experts_state_dict(
                grouped.state_dict(), name, offsets, metadata, module=grouped, **options
            ),
            stock.experts.GroupedMLP.sharded_state_dict(grouped, name, offsets, metadata),
        )
    linear = GroupedLinear(stock, at, {"weight": 0, "bias": 0})
    holder: Any = ExpertLayer(stock, at)
    holder._modules = {"linear_fc1": linear}
    yield (
        "grouped linear",
        ours.grouped_linear_state_dict(
            linear.state, f"{prefix}te.", "linear_fc1", linear.axes, offsets, metadata, gated=True,
            num_local_experts=linear.num_gemms, extra_states=linear._split_extra_state(None), **own,
        ),
        stock.experts.TEGroupedMLP.sharded_state_dict(holder, f"{prefix}te.", offsets, metadata),
    )  # fmt: skip


class Layer(torch.nn.Module):
    """A layer with a weight sharded by tensor parallelism, and an ordinary module."""

    def __init__(self, lib: Any, number: int, tp: Any) -> None:
        super().__init__()
        self.lib, self.layer_number, self.tp_group = lib, number + 1, tp
        self.weight = ramp(2, 3) + number

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        make = self.lib.make_sharded_tensors_for_checkpoint
        state = {"weight": self.weight, "norm": self.weight, "_extra_state": None}
        dp_cp = metadata["dp_cp_group"]
        return make(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=dp_cp
        )


def layers_by_both(
    stock: Any, at: types.SimpleNamespace, prefix: str, metadata: Any
) -> tuple[Any, Any]:
    """(ours, Megatron-Core's) for a stage's layers."""
    count = 4 // at.pp.size()
    first = at.pp.rank() * count
    config = stock.TransformerConfig(
        num_layers=4, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=1,
        pipeline_model_parallel_size=at.pp.size(), pipeline_dtype=torch.float32,
    )  # fmt: skip

    def layers(lib: Any) -> list[Any]:
        return [Layer(lib, first + n, at.tp) for n in range(count)]

    block = types.SimpleNamespace(
        config=config, layers=layers(stock), vp_stage=None, pg_collection=at, tp_group=at.tp,
        named_children=lambda: [],
    )  # fmt: skip
    mine = ours.sharded_layers_state_dict(
        layers(ours), f"{prefix}layers.", metadata, first_layer=first, num_layers=4
    )
    return mine, stock.TransformerBlock.sharded_state_dict(block, prefix, (), metadata)


def embeddings_by_both(stock: Any, at: types.SimpleNamespace) -> tuple[Any, Any]:
    """(ours, Megatron-Core's) for a last stage with tied and padded weights."""
    own: Any = {"tp_group": at.tp, "dp_cp_group": at.dp_cp}
    weight, metadata = ramp(4, 3), {"dp_cp_group": at.dp_cp}
    embedding = types.SimpleNamespace(
        state_dict=lambda prefix, keep_vars: {"weight": weight}, tp_group=at.tp
    )
    expected = stock.VocabParallelEmbedding.sharded_state_dict(embedding, "padded.", (), metadata)
    expected["output.weight"] = None
    model = types.SimpleNamespace(
        post_process=True, pre_process=False, mtp_process=False, tp_group=at.tp,
        shared_embedding_or_output_weight=lambda: weight,
    )  # fmt: skip
    stock.LanguageModule.tie_embeddings_and_output_weights_state_dict(
        model, expected, "output.weight", "embedding.weight", metadata
    )
    mine = ours.make_sharded_tensors_for_checkpoint(
        {"weight": weight}, "padded.", {"weight": 0}, **own
    )
    ours.allow_vocab_padding(mine, ["padded.weight", "another stage's"])
    mine["output.weight"] = None
    ours.tie_embeddings_and_output_weights_state_dict(
        mine, weight, "output.weight", "embedding.weight", **own
    )
    return mine, expected


def fsdp_tensor(at: types.SimpleNamespace, rows: int, seed: int) -> DTensor:
    """A tensor of this many rows, sharded by FSDP2 over dp_cp."""
    mesh = DeviceMesh.from_group(at.dp_cp, "cpu")
    whole = ramp(rows, 3) + 100 * seed
    parts = list(torch.chunk(whole, mesh.size()))
    parts += [whole[:0]] * (mesh.size() - len(parts))
    local = parts[mesh.get_local_rank()].clone()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def divided_by_fsdp(lib: Any, at: types.SimpleNamespace, stage: str, rows: int) -> dict[str, Any]:
    """Tensors of `rows` rows on each TP rank, sharded by FSDP2 over dp_cp."""
    own = {"tp_group": at.tp, "dp_cp_group": at.dp_cp}
    divided, layer = fsdp_tensor(at, rows, at.tp.rank()), ((0, 1, 3),)
    make = lib.make_tp_sharded_tensor_for_checkpoint
    same = lib.make_sharded_tensor_for_checkpoint
    return {
        "rows": make(divided, f"{stage}fsdp_rows", 0, prepend_offsets=layer, **own),
        "columns": make(divided, f"{stage}fsdp_columns", 1, **own),
        "same": same(fsdp_tensor(at, rows, 0), f"{stage}fsdp_same", **own),
    }


def repeated_by_fsdp(at: types.SimpleNamespace) -> Any:
    """A DTensor that is replicated on all ranks of dp_cp."""
    mesh = DeviceMesh.from_group(at.dp_cp, "cpu")
    whole = DTensor.from_local(ramp(2, 2), mesh, [Replicate()], run_check=False)
    return ours.make_tp_sharded_tensor_for_checkpoint(whole, "repeated", dp_cp_group=at.dp_cp)


# ---- What all ranks' entities are together ----


def place_of(entity: Any) -> tuple[Any, ...]:
    """The key and position that identify a shard."""
    return entity.key, tuple(entity.global_offset), tuple(entity.local_shape)


def check_together(tree: Any, unknown: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Compares the entities' holders and main replicas with the entities of all ranks.

    Args:
        tree: this rank's entities, made by tilestone.megatron.
        unknown: keys whose holders are not known; other entities are their main replicas.
    """
    mine = [entity for entity in leaves(tree) if isinstance(entity, ShardedTensor)]
    listed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(listed, [(place_of(e), is_main_replica(e.replica_id)) for e in mine])
    holders: dict[Any, list[int]] = {}
    mains: list[Any] = []
    for rank, theirs in enumerate(listed):
        for place, is_main in theirs:
            holders.setdefault(place, []).append(rank)
            if is_main:
                mains.append(place)
    for entity in mine:
        expected = None if entity.key in unknown else tuple(holders[place_of(entity)])
        assert entity.holders == expected, (entity, entity.holders, expected)
    assert len(set(mains)) == len(mains), "two main replicas of a shard"
    lost = {place for place in set(holders) - set(mains) if place[0] not in unknown}
    assert not lost, f"shards without a main replica: {lost}"
