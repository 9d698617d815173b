"""Compares helpers for models with Megatron-Core's own, field by field, on four real ranks."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_layouts as layouts
import tilestone
import tilestone.megatron as tm
from ranks import Worlds
from tilestone.megatron import groups, models
from tilestone.megatron.mapping import ShardedTensor

SIZES: list[dict[str, int]] = [
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"expert_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    # Dense layers are sharded by TP, experts are not: the ranks of one TP group are in different
    # EP groups.
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
     "expert_tensor_parallel_size": 1},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
     "expert_tensor_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
]  # fmt: skip


def _layout(stock: Any, at: Any) -> None:
    """Checks all helpers in one layout."""
    stage = f"stage{at.pp.rank()}."
    mine: dict[str, Any] = {}
    for case, function, args in (
        ("dense", layouts.dense, (at, stage)), ("looked up", layouts.looked_up, (stage,))
    ):  # fmt: skip
        mine[case] = function(models, *args)
        layouts.check_same(case, mine[case], function(stock, *args))
    for apart in (False, True):
        name = f"{stage}{'apart' if apart else 'together'}."
        metadata = {"dp_cp_group": at.dp_cp, "singleton_local_shards": apart}
        offsets = () if apart else ((0, 1, 3),)
        for case, experts, expected in layouts.experts_by_both(stock, at, name, offsets, metadata):
            layouts.check_same(f"{case}, apart: {apart}", experts, expected)
            mine[f"{case} {apart}"] = experts
    for metadata in ({}, {"non_homogeneous_layers": True}):
        name = "numbered." if metadata else "alike."
        metadata = {**metadata, "dp_cp_group": at.dp_cp}
        layers, expected = layouts.layers_by_both(stock, at, name, metadata)
        layouts.check_same(f"layers {metadata}", layers, expected)
        mine[name] = layers
    layouts.check_together(mine)


def _copies(stock: Any, at: Any) -> None:
    """Checks tensors whose main replica is on another stage."""
    copies = layouts.tied(models, at)
    layouts.check_same("tied", copies, layouts.tied(stock, at))
    mine, expected = layouts.embeddings_by_both(stock, at)
    mine = {"padded.weight": mine["padded.weight"], "output.weight": mine["output.weight"]}
    layouts.check_same("embeddings", mine, expected)
    del mine["padded.weight"]
    assert [e.replica_id[0] for e in layouts.leaves([copies, mine])] == [1, 1, 1]
    unknown = {"embedding", "output", "embedding.weight"}
    layouts.check_together([copies, mine], unknown)
    both: Any = {"embedding.weight": "the embedding itself", "output.weight": "the same tensor"}
    models.tie_embeddings_and_output_weights_state_dict(
        both, torch.zeros(2, 2), "output.weight", "embedding.weight"
    )
    assert list(both) == ["embedding.weight"]


def _fsdp(stock: Any, at: Any, rank: int) -> None:
    """Checks DTensors: even parts are like Megatron-Core's, uneven ones are kept as they are."""
    even = layouts.divided_by_fsdp(models, at, "even.", 4)
    layouts.check_same("FSDP2", even, layouts.divided_by_fsdp(stock, at, "even.", 4))
    uneven = layouts.divided_by_fsdp(models, at, "uneven.", 5)
    empty = layouts.divided_by_fsdp(models, at, "empty.", 1)
    layouts.check_together([even, uneven])
    place = at.dp_cp.rank()
    assert uneven["rows"].global_shape == (3, 10, 3)
    assert uneven["rows"].global_offset == (1, 5 * at.tp.rank() + 3 * place, 0)
    assert uneven["rows"].local_shape == (3 - place, 3)
    assert uneven["columns"].global_offset == (3 * place, 3 * at.tp.rank())
    assert empty["same"].global_shape == (1, 3) and empty["same"].local_shape == (1 - place, 3)
    repeated = layouts.repeated_by_fsdp(at)
    assert repeated.replica_id == (0, 0, place) and repeated.holders is not None
    for wrong in (groups.alone(), at.tp):
        with pytest.raises(tilestone.UnsupportedError, match="which is not dp_cp") as caught:
            models.make_sharded_tensor_for_checkpoint(
                layouts.fsdp_tensor(at, 4, 0), "w", dp_cp_group=wrong
            )
        assert caught.value.key == "w"


def _one_group_given(at: Any) -> None:
    """Checks that giving one group never makes another group trivial."""
    tp, dp = at.tp.rank(), at.dp_cp.rank()
    for given in ({}, {"tp_group": at.tp}, {"dp_cp_group": at.dp_cp}):
        made = models.make_sharded_tensor_for_checkpoint(torch.zeros(2), "w", **given)
        assert made.replica_id == (0, tp, dp), given
        state = models.make_sharded_tensors_for_checkpoint({"w": torch.zeros(2)}, "", **given)
        assert state["w"].replica_id == (0, tp, dp), given
    linear = torch.nn.Linear(2, 2)
    for metadata in (None, {}, {"dp_cp_group": at.dp_cp}, {"dp_cp_group": None}):
        state = models.sharded_state_dict_default(linear, metadata=metadata)
        assert state["weight"].replica_id == (0, tp, dp), metadata
    for name in groups.NAMES:
        assert groups.find_group(name).process_group is getattr(at, name), name
        ranks = dist.get_process_group_ranks(getattr(at, name))
        assert groups.find_group(name).ranks == tuple(ranks), name


def _before_parallel_state(rank: int) -> None:
    """Checks the program's own groups, without Megatron's."""
    made = {
        ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))
    }
    tp = made[(0, 1) if rank < 2 else (2, 3)]
    dp = made[(0, 2) if rank % 2 == 0 else (1, 3)]
    entity = models.make_sharded_tensor_for_checkpoint(
        torch.zeros(2), "w", tp_group=tp, dp_cp_group=dp
    )
    assert entity.replica_id == (0, rank % 2, rank // 2) and entity.holders == (0, 1, 2, 3)
    for given, missing in (({"tp_group": tp}, "dp_cp_group"), ({"dp_cp_group": dp}, "tp_group")):
        with pytest.raises(tilestone.InvalidArgumentError, match=f"{missing} was not given") as caught:
            models.make_sharded_tensor_for_checkpoint(torch.zeros(2), "w", **given)
        assert caught.value.rank == rank
    entity = models.make_sharded_tensor_for_checkpoint(
        torch.zeros(2), "w", tp_group=groups.alone(), dp_cp_group=dp
    )
    assert entity.replica_id == (0, 0, rank // 2)
    assert entity.holders == tuple(dist.get_process_group_ranks(dp))
    own = models.make_sharded_tensor_for_checkpoint(
        torch.zeros(2), "w", replica_id=(1, 0, 0), tp_group=tp, dp_cp_group=dp
    )
    assert own.holders is None
    by_module = torch.nn.Linear(2, 2)
    by_module.pg_collection = layouts.types.SimpleNamespace(tp=tp, dp_cp=dp)  # type: ignore[assignment]
    state = models.sharded_state_dict_default(by_module)
    assert state["bias"].replica_id == (0, rank % 2, rank // 2)


def _experts_of_another_tp_group(at: Any) -> None:
    """With the dense TP group, experts would lose the shards of its later ranks."""
    expert = layouts.Layer(models, 0, at.tp)
    own = {"ep_group": at.ep, "expt_tp_group": at.expt_tp, "expt_dp_group": at.expt_dp}
    if at.tp.rank() == 0:
        return
    with pytest.raises(tilestone.InvalidArgumentError, match="other than expt_tp") as caught:
        models.sequential_experts_state_dict([expert], "mlp.", **own)
    assert caught.value.key == "mlp.experts.norm"


def _compare(rank: int, world: int) -> int:
    stock = layouts.megatron()
    stock.parallel_state.destroy_model_parallel()
    _before_parallel_state(rank)
    for number, sizes in enumerate(SIZES):
        with layouts.initialised(stock.parallel_state, **sizes) as at:
            _layout(stock, at)
            if number == 0:
                _fsdp(stock, at, rank)
                _one_group_given(at)
            if "pipeline_model_parallel_size" in sizes:
                _copies(stock, at)
            if sizes.get("expert_tensor_parallel_size") == 1:
                _experts_of_another_tp_group(at)
    return len(SIZES)


def test_every_helper_makes_what_megatron_makes_in_every_layout(worlds: Worlds) -> None:
    assert worlds[4].run(_compare) == [len(SIZES)] * 4


# ---- Saves by rule ----


def _model(at: Any) -> dict[str, Any]:
    """32 tensors that are replicated over TP and DP, 8 that are sharded by TP, and experts."""
    own: Any = {"tp_group": at.tp, "dp_cp_group": at.dp_cp}
    same = {f"norm{n}": torch.full((256,), float(n)) for n in range(32)}
    state = models.make_sharded_tensors_for_checkpoint(same, "same.", **own)
    rows = {f"w{n}": torch.full((64, 4), float(n + 10 * at.tp.rank())) for n in range(8)}
    state |= models.make_sharded_tensors_for_checkpoint(rows, "rows.", dict.fromkeys(rows, 0), **own)
    experts = layouts.ExpertLayer(models, at).local_experts
    experts_groups: Any = {
        "ep_group": at.ep, "expt_tp_group": at.expt_tp, "expt_dp_group": at.expt_dp
    }  # fmt: skip
    state |= models.sequential_experts_state_dict(experts, "mlp.", **experts_groups)
    return state


def _unknown(state: dict[str, Any]) -> dict[str, Any]:
    """The same state as Megatron's modules make it, without known holders."""
    made = layouts.leaves(state)
    for entity in made:
        if isinstance(entity, ShardedTensor):
            entity.holders = None
    return {str(number): entity for number, entity in enumerate(made)}


def _saved(state: Any, path: str, **options: Any) -> tuple[int, int]:
    """(bytes, items) written by each rank."""
    done = tilestone.save(state, path, dialect="megatron", **options)
    return done.bytes_written, done.items_written


def _by_files(rank: int, world: int, folder: str) -> dict[str, Any]:
    stock = layouts.megatron()
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
             "expert_tensor_parallel_size": 1}  # fmt: skip
    with layouts.initialised(stock.parallel_state, **sizes) as at:
        state = _model(at)
        shards = [layouts.place_of(e) for e in layouts.leaves(state) if isinstance(e, ShardedTensor)]
        result: dict[str, Any] = {"shards": shards}
        files = tilestone.ByFiles(rank, world, "one run of a test")
        result["known"] = _saved(state, f"{folder}/known", by_files=files)
        result["unknown"] = _saved(_unknown(_model(at)), f"{folder}/unknown", by_files=files)
        tm.save(state, f"{folder}/tm", by_files=files, validate_access_integrity=False)
        part = dist.new_group([1, 3])
        if rank in (1, 3):
            one = models.make_sharded_tensors_for_checkpoint(
                {f"w{n}": torch.ones(64) for n in range(8)}, "",
                tp_group=groups.alone(), dp_cp_group=part,
            )  # fmt: skip
            assert one["w0"].holders == (1, 3)
            result["part"] = _saved(one, f"{folder}/part", group=part)
        wrong = [
            ShardedTensor.from_rank_offsets(
                f"w{n}", torch.ones(8), replica_id=rank, holders=(rank, (rank + 1) % world)
            )
            for n in range(16)
        ]
        with pytest.raises((tilestone.CoverageError, tilestone.MismatchError)):
            _saved({"all": wrong}, f"{folder}/wrong", by_files=files)
        loaded = tm.load(_model(at), f"{folder}/tm")
        for name, entity in _model(at).items():
            if hasattr(entity, "data") and isinstance(entity.data, torch.Tensor):
                assert torch.equal(loaded[name], entity.data), name
    return result


def test_saves_by_files_store_each_shard_once_and_share_the_bytes(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    results = worlds[4].run(_by_files, str(tmp_path))
    shards = {shard for result in results for shard in result["shards"]}
    for name in ("known", "unknown", "tm"):
        with tilestone.open(tmp_path / name) as checkpoint:
            keys = checkpoint.tensor_keys()
            stored = [box for key in keys for box in checkpoint[key].boxes]
        assert len(stored) == len(shards), name
    bytes_of = {name: [r[name][0] for r in results] for name in ("known", "unknown")}
    assert max(bytes_of["known"]) < 1.15 * min(bytes_of["known"]), bytes_of
    assert max(bytes_of["unknown"]) > 3 * min(bytes_of["unknown"]), bytes_of
    assert not (tmp_path / "wrong" / ".metadata").exists()
    one, other = (results[rank]["part"][0] for rank in (1, 3))
    assert abs(one - other) < 1000, (one, other)
