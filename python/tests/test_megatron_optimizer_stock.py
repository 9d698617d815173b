"""Megatron-Core's DistributedOptimizer and our optimizer helpers load each other's checkpoints."""

from __future__ import annotations

import pathlib
import random
import unittest.mock
from typing import Any

import optimizer_model as om
import pytest
import stock_optimizer as so
import torch
from optimizer_model import Model, Ranks, filled, whole_states
from ranks import Worlds
from test_megatron_optimizer import _mains

import tilestone
from tilestone import megatron
from tilestone.megatron.distributed_optimizer import (
    OptimizerShard,
    load_optimizer,
    optimizer_state,
    pack,
    put_into,
    shards_of,
    write_layouts,
)

WHOLE = whole_states()
EMPTY = {key: torch.zeros_like(value) for key, value in WHOLE.items()}


def _ranks(job: Ranks, whole: Any, bucket_numel: int | None) -> list[tuple[Model, Any]]:
    """The model and stock's optimizer of each rank that this process simulates.

    These are the data-parallel ranks of every second model-parallel rank, the last one first.
    """
    from megatron.core.dist_checkpointing import mapping

    found = []
    for index, tp, pp in job.groups():
        if index % torch.distributed.get_world_size() != torch.distributed.get_rank():
            continue
        for group in reversed(so.groups_of(job)):
            model = Model(mapping, job, tp, pp, group.rank())
            fill = None
            if whole is not None:

                def fill(name: str, state: str, model: Model = model) -> torch.Tensor:
                    return model.local_state(name, state, whole)

            found.append((model, so.optimizer(model, index, group, bucket_numel, fill)))
    return found


def _check(job: Ranks, ranks: list[tuple[Model, Any]]) -> None:
    """Checks that stock's optimizers hold the states."""
    for model, optimizer in ranks:
        names = {entity.data: name for name, entity in model.entities.items()}
        for parameter, states in so.states_of(optimizer).items():
            flat = optimizer._get_model_param_range_map(parameter)["param"]
            for state in om.STATES:
                want = model.local_state(names[parameter], state, WHOLE).flatten()
                want = want[flat.start : flat.end]
                assert torch.equal(states[state], want), (job, names[parameter], state)
            assert states["step"].item() == 7
        assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def _metadata(kind: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": kind,
        "distrib_optim_fully_reshardable_mem_efficient": True,  # gathers by gloo
        "chained_optim_avoid_prefix": True,
    }


def _stock_save(job: Ranks, kind: str, path: str, bucket_numel: int | None) -> None:
    from megatron.core import dist_checkpointing

    states = []
    for model, optimizer in _ranks(job, WHOLE, bucket_numel):
        if kind == "dp_zero_gather_scatter":
            state = _dp_zero(optimizer)
        else:
            state = optimizer.sharded_state_dict(model.entities, metadata=_metadata(kind))
        if state["param_state"] is not None:
            states.append(state)
    pathlib.Path(path).mkdir(exist_ok=True)
    torch.distributed.barrier()
    whole = {"optimizer": states[-1], "others": states[:-1]}
    dist_checkpointing.save(whole, path, content_metadata=_metadata(kind))


def _dp_zero(optimizer: Any) -> dict[str, Any]:
    """The result of stock's sharded_param_state_dp_zero, which can gather only by NCCL."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

    rank, key = optimizer.data_parallel_group.rank(), optimizer.data_parallel_group_idx
    prefix = f"optimizer.distributed.dp_group_idx_{key}"
    state: dict[str, Any] = {
        name: ShardedObject(f"{prefix}.{name}", value, (1,), (0,), (0, 0, rank))
        for name, value in optimizer.state_dict().items()
    }
    gathered = optimizer.get_parameter_state_dp_zero()
    state["param_state"] = LocalNonpersistentObject(None)
    if rank == 0:
        state["param_state"] = ShardedObject(f"{prefix}.param_state", gathered, (1,), (0,))
    return {**state, "param_state_sharding_type": "dp_zero_gather_scatter"}


def _own_load(job: Ranks, path: str, bucket_numel: int | None, layouts: Any = None) -> None:
    """Loads the states of every rank's DistributedOptimizer with our helpers."""
    ranks = _ranks(job, None, bucket_numel)
    for model, optimizer in ranks:
        shards = shards_of(optimizer, model.entities)
        commons = load_optimizer(path, shards, layouts=layouts)
        put_into(optimizer, shards, commons)
    _check(job, ranks)


def _stock_to_own(rank: int, world: int, folder: str) -> None:
    with so.on_cpu():
        saved, loaded = Ranks(2, 1, 3), Ranks(1, 2, 2)
        layouts = [
            om.layout_of(Model(megatron, saved, tp, pp, 2), index, saved.dp, 700, stock=True)
            for index, tp, pp in saved.groups()
        ]
        for (model, optimizer), layout in zip(_ranks(saved, None, 700)[:1], layouts[rank:]):
            assert shards_of(optimizer, model.entities)[0].layout == layout
        for kind in ("dp_reshardable", "dp_zero_gather_scatter"):
            path = f"{folder}/{kind}"
            _stock_save(saved, kind, path, 700)
            _own_load(Ranks(2, 1, 1), path, 700)  # other data-parallel ranks
            _own_load(loaded, path, None, layouts)
            if rank == 0:
                write_layouts(f"{folder}/layout.json", layouts)
                tilestone.convert(
                    path, f"{path} whole", format="torch_dist", layout=f"{folder}/layout.json"
                )
            torch.distributed.barrier()
            _own_load(loaded, f"{path} whole", 700)
            _stock_load(loaded, "fully_reshardable", f"{path} whole", None)
            for other in (loaded, Ranks(2, 1, 1)):
                with pytest.raises(tilestone.MismatchError) as raised:
                    _own_load(other, path, None)
                assert "layouts of the job that saved" in raised.value.hint
        path = f"{folder}/fully_reshardable"
        _stock_save(saved, "fully_reshardable", path, None)
        _own_load(loaded, path, 700)
        _own_load(saved, path, 700)


def test_what_stock_saves_in_each_format_loads_into_other_layouts(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_stock_to_own, str(tmp_path), timeout=300)


def _stock_load(job: Ranks, kind: str, path: str, bucket_numel: int | None) -> None:
    from megatron.core import dist_checkpointing

    ranks = _ranks(job, EMPTY, bucket_numel)
    for model, optimizer in ranks:
        template = optimizer.sharded_state_dict(
            model.entities, is_loading=True, metadata=_metadata(kind)
        )
        loaded = dist_checkpointing.load(
            {"optimizer": template}, path, validate_access_integrity=False
        )["optimizer"]
        put = optimizer._set_main_param_and_optimizer_states

        def with_step(parameter: Any, states: Any, put: Any = put) -> None:
            put(parameter, {"step": torch.tensor(7.0), **states})

        # For torch's AdamW stock omits the step, and no_grad() for parameters in float32.
        optimizer._set_main_param_and_optimizer_states = with_step
        with torch.no_grad():
            optimizer.load_state_dict(loaded)
    _check(job, ranks)


def _own_to_stock(rank: int, world: int, folder: str) -> None:
    saved = Ranks(2, 1, 3)
    with so.on_cpu():
        for kind in ("dp_reshardable", "fully_reshardable"):
            path = f"{folder}/{kind}"
            states = []
            for model, optimizer in _ranks(saved, WHOLE, 700):
                shards = shards_of(optimizer, model.entities)
                states.append(optimizer_state(shards, kind))
            one = {"optimizer": states[-1], "others": [_mains(each) for each in states[:-1]]}
            megatron.save(one, path, content_metadata=_metadata(kind))
            _stock_load(Ranks(2, 1, 1), kind, path, 700)
            if kind == "fully_reshardable":
                _stock_load(Ranks(1, 2, 2), kind, path, None)


def test_what_we_save_loads_into_stocks_optimizers(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    worlds[2].run(_own_to_stock, str(tmp_path), timeout=300)


def _entities(tree: Any) -> Any:
    """A state dict in which each entity is replaced by its description."""
    if isinstance(tree, dict):
        return {key: _entities(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_entities(value) for value in tree]
    if hasattr(tree, "key"):
        place = getattr(tree, "global_offset", None)
        return (type(tree).__name__, tree.key, place, tree.replica_id, tree.data.tolist())
    return tree.unwrap() if hasattr(tree, "unwrap") else tree


def _regular_optimizers(rank: int, world: int, folder: str) -> None:
    """Megatron-Core's FP32Optimizer and Float16Optimizer, with its helpers and with ours."""
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.optimizer import optimizer as stock
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    from tilestone.megatron import optimizer as own

    def make(bf16: bool, seed: int) -> tuple[Model, Any]:
        model = Model(mapping, Ranks(2, 1, 1), rank, 0)
        generator = torch.Generator().manual_seed(seed)
        parameters = []
        for entity in model.entities.values():
            entity.data = torch.nn.Parameter(
                torch.randn(entity.data.shape, generator=generator).to(
                    torch.bfloat16 if bf16 else torch.float32
                )
            )
            if hasattr(entity, "dtype"):
                entity.dtype = entity.data.dtype
            parameters.append(entity.data)
        marks = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        groups = [{"params": parameters[:4], "wd_mult": 1.0, **marks}]
        groups.append({"params": parameters[4:], "wd_mult": 0.0, **marks})
        adam = torch.optim.AdamW(groups, lr=0.5)
        config = OptimizerConfig(bf16=bf16, lr=0.5)

        def init(adam: Any, config: Any) -> None:
            pass

        kind = stock.Float16OptimizerWithFloat16Params if bf16 else stock.FP32Optimizer
        made = kind(adam, config, None, init) if bf16 else kind(adam, config, init)
        for group in made.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.optimizer.step()
        return model, made

    for bf16 in (False, True):
        model, optimizer = make(bf16, 1)
        expected = optimizer.sharded_state_dict(model.entities)
        names = ("optim_state_to_sharding_state", "get_param_id_to_sharded_param_map",
                 "make_sharded_optimizer_tensor")  # fmt: skip
        with unittest.mock.patch.multiple(stock, **{name: getattr(own, name) for name in names}):
            state = optimizer.sharded_state_dict(model.entities)
            assert _entities(state) == _entities(expected)
            path = f"{folder}/{bf16}"
            megatron.save({"optimizer": state}, path)
            other, fresh = make(bf16, 2)
            template = {"optimizer": fresh.sharded_state_dict(other.entities, is_loading=True)}
        fresh.load_state_dict(megatron.load(template, path)["optimizer"])
        pairs = zip(
            optimizer.optimizer.state.items(), fresh.optimizer.state.items(), strict=True
        )
        for (main, states), (other_main, found) in pairs:
            assert not bf16 or torch.equal(main, other_main)
            for name, tensor in states.items():
                assert torch.equal(tensor, found[name]), (bf16, name, tensor.shape)
        if not bf16:
            continue
        job = Ranks(1, 1, 1)  # its states are those of a distributed optimizer
        whole = Model(megatron, job, 0, 0)
        shard = OptimizerShard.allocated(om.layout_of(whole, 0, 1), 0, 1)
        (common,) = load_optimizer(path, [shard])
        assert [group["step"] for group in common["optimizer"]["param_groups"]] == [1, 1]
        norm = next(part for part in shard.slices() if part.parameter.key == "layers.norm")
        main = optimizer.fp32_from_float16_groups
        key = next(each for each in model.entities if each.startswith("layers.norm.[(0, 1"))
        number = list(model.entities).index(key)
        expected_norm = [*main[0], *main[1]][number]
        assert torch.equal(shard.states[norm.place]["param"], expected_norm)


def _regular_on_cpu(rank: int, world: int, folder: str) -> None:
    with so.on_cpu():
        _regular_optimizers(rank, world, folder)


def test_stocks_regular_optimizers_make_the_same_entities_with_our_helpers(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_regular_on_cpu, str(tmp_path), timeout=300)


def _stock_buckets(rank: int, world: int) -> None:
    """Compares buffers of random parameters, some of which pipeline stages share."""
    import types

    from megatron.core.dist_checkpointing import mapping
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers

    rng = random.Random(3)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    one = so.Group(0, 1, [[]])
    quiet = unittest.mock.patch.object(buffers, "log_on_each_pipeline_stage", lambda *_, **__: None)
    for _ in range(20):
        entities, alone = [], set()
        for i in range(rng.randint(1, 8)):
            parameter = torch.nn.Parameter(torch.zeros(rng.randint(1, 300)))
            entities.append(mapping.ShardedTensor.from_rank_offsets(str(i), parameter))
            if rng.random() < 0.2:
                parameter.shared_embedding = True  # type: ignore[attr-defined]
                alone.add(str(i))
        size, numel = rng.randint(1, 5), rng.choice((None, 1, 200, 500))
        group = so.Group(0, size, [])
        with quiet:
            made = buffers._ParamAndGradBuffer(
                config, torch.float32, torch.float32, [e.data for e in entities], group, numel,
                {entity.data: entity.key for entity in entities}, 1.0, list(range(len(entities))),
                False, types.SimpleNamespace(tp=one, dp_cp=group),
            )  # fmt: skip
        expected = [
            (bucket.numel_unpadded, bucket.grad_data.numel(), bucket.offset)
            for bucket in made.buckets
        ]
        buffer = pack(entities, size, bucket_numel=numel, alone=alone)
        offsets = [sum(b.numel for b in buffer.buckets[:i]) for i in range(len(buffer.buckets))]
        assert [
            (bucket.numel_unpadded, bucket.numel, offset)
            for bucket, offset in zip(buffer.buckets, offsets, strict=True)
        ] == expected
        assert {
            parameter.key: (parameter.start + offset, parameter.end + offset)
            for bucket, offset in zip(buffer.buckets, offsets, strict=True)
            for parameter in bucket.parameters
        } == {entity.key: made.param_index_map[entity.data][:2] for entity in entities}


def _stock_buckets_on_cpu(rank: int, world: int) -> None:
    with so.on_cpu():
        _stock_buckets(rank, world)


def test_parameters_are_packed_as_stock_packs_them(worlds: Worlds) -> None:
    worlds[2].run(_stock_buckets_on_cpu, timeout=300)
