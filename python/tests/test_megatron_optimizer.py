"""A distributed optimizer's states: every format is loaded into every layout and compared."""

from __future__ import annotations

import pathlib
from typing import Any

import optimizer_model as om
import pytest
import torch
from optimizer_model import Model, Ranks, filled, layout_of, whole_states
from ranks import Worlds

import tilestone
from tilestone import megatron
from tilestone.megatron.distributed_optimizer import (
    Layout,
    OptimizerShard,
    layout_object,
    load_optimizer,
    optimizer_state,
    pack,
    write_layouts,
)

WHOLE = whole_states()
FORMATS = ("dp_reshardable", "fully_reshardable", "fully_sharded_model_space")


def _models(job: Ranks) -> list[tuple[int, Model]]:
    return [(group, Model(megatron, job, tp, pp)) for group, tp, pp in job.groups()]


def _save(job: Ranks, kind: str, path: str, bucket_numel: int | None = 60, **more: Any) -> None:
    """Saves all ranks' parts in one process."""
    states = [
        optimizer_state([filled(model, layout, rank, job.dp, WHOLE)], kind, **more)
        for group, model in _models(job)
        for layout in [layout_of(model, group, job.dp, bucket_numel)]
        for rank in range(job.dp)
    ]
    megatron.save({"optimizer": states[0], "others": [_mains(each) for each in states[1:]]}, path)


def _mains(tree: Any) -> Any:
    """A rank's state without replicas of objects, because one process may have only one."""
    if isinstance(tree, dict):
        kept = {key: _mains(value) for key, value in tree.items()}
        return {key: value for key, value in kept.items() if value is not None}
    if isinstance(tree, list):
        return [_mains(value) for value in tree]
    is_copy = isinstance(tree, megatron.ShardedObject) and any(tree.replica_id)  # type: ignore[arg-type]
    return None if is_copy else tree


def _check(
    job: Ranks, path: str, whole: Any = WHOLE, bucket_numel: int | None = 60, **options: Any
) -> None:
    """Loads the parts of every rank of a job and compares them."""
    for group, model in _models(job):
        layout = layout_of(model, group, job.dp, bucket_numel)
        for rank in range(job.dp):
            expected = filled(model, layout, rank, job.dp, whole)
            shard = OptimizerShard.allocated(layout, rank, job.dp)
            for states in shard.states.values():
                for memory in states.values():
                    memory.fill_(-1)
            assert load_optimizer(path, [shard], **options) == [om.common()]
            for part in shard.slices():
                for name, memory in shard.states[part.place].items():
                    want = expected.states[part.place][name]
                    assert torch.equal(memory, want), (job, rank, part.parameter.key, name)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_loads_into_other_tp_pp_and_dp_bit_for_bit(
    tmp_path: pathlib.Path, kind: str
) -> None:
    jobs = [Ranks(2, 1, 3), Ranks(1, 2, 1), Ranks(4, 1, 2)]
    for saved, loaded in zip(jobs, jobs[1:] + jobs[:1], strict=True):
        path = str(tmp_path / f"{saved.tp}")
        _save(saved, kind, path)
        _check(loaded, path, bucket_numel=100)
        _check(saved, path)


def test_an_embedding_is_padded_with_zeros_for_other_tp(tmp_path: pathlib.Path) -> None:
    """The vocabulary has 12 rows for TP 1 and 16 for TP 2. The tests above check other sizes."""
    for kind in FORMATS:
        path = str(tmp_path / kind)
        _save(Ranks(1, 1, 2), kind, path)
        model = Model(megatron, Ranks(2, 1, 1), 1, 0)
        shard = OptimizerShard.allocated(layout_of(model, 1, 1), 0, 1)
        load_optimizer(path, [shard])
        (embedding,) = (p for p in shard.slices() if p.parameter.key == "embed")
        rows = shard.states[embedding.place]["exp_avg"].reshape(8, om.HIDDEN)
        assert torch.equal(rows[:3], WHOLE["exp_avg", "embed"][8:])
        assert torch.equal(rows[3:], torch.zeros(5, om.HIDDEN))


# ---- dp_reshardable ----


def test_buckets_without_their_layout_load_on_any_number_of_data_parallel_ranks_only(
    tmp_path: pathlib.Path,
) -> None:
    path, saved = str(tmp_path / "a"), Ranks(2, 1, 3)
    _save(saved, "dp_reshardable", path, with_layout=False)
    assert not any("layout" in key for key in megatron.load_sharded_metadata(path))
    for dp in (1, 2, 3, 5):
        _check(Ranks(2, 1, dp), path)
    with pytest.raises(tilestone.MismatchError, match="elements") as raised:
        _check(Ranks(1, 1, 1), path)
    assert "layouts of the job that saved" in raised.value.hint
    with pytest.raises(tilestone.MismatchError, match="nothing below .*dp_group_idx_3"):
        _check_one(Ranks(4, 1, 1), 3, path)
    given = [layout_of(model, group, 3) for group, model in _models(saved)]
    _check(Ranks(1, 2, 2), path, layouts=given)
    write_layouts(tmp_path / "layouts.json", given)
    _check(Ranks(1, 2, 2), path, layouts=tmp_path / "layouts.json")
    (tmp_path / "layouts.json").write_text("{}")
    with pytest.raises(tilestone.MismatchError, match="not a layout") as wrong:
        _check(Ranks(1, 2, 2), path, layouts=tmp_path / "layouts.json")
    assert wrong.value.file == str(tmp_path / "layouts.json")
    with pytest.raises(tilestone.CoverageError, match="does not hold box") as missing:
        _check(Ranks(1, 1, 1), path, layouts=given[1:])
    assert "layouts of all model-parallel ranks" in missing.value.hint


def _check_one(job: Ranks, group: int, path: str) -> None:
    model = dict(_models(job))[group]
    load_optimizer(path, [OptimizerShard.allocated(layout_of(model, group, job.dp), 0, job.dp)])


def test_buckets_of_equal_sizes_but_another_tp_are_refused_by_the_models_own_boxes(
    tmp_path: pathlib.Path,
) -> None:
    """Two square halves: columns in one job, rows in the other."""

    def entity(axis: int, rank: int) -> megatron.ShardedTensor:
        shape = (8, 4) if axis else (4, 8)
        data = torch.arange(32.0).reshape(shape)
        return megatron.ShardedTensor.from_rank_offsets(
            "w", data, (axis, rank, 2), replica_id=(0, 0, 0)
        )

    def shard(axis: int, rank: int) -> OptimizerShard:
        layout = Layout((pack([entity(axis, rank)], 1),), rank)
        return OptimizerShard.allocated(layout, 0, 1, common=om.common())

    states = [optimizer_state([shard(0, r)], "dp_reshardable", with_layout=False) for r in (0, 1)]
    for with_model, path in ((False, tmp_path / "a"), (True, tmp_path / "b")):
        model = [entity(0, 0), entity(0, 1)] if with_model else []
        megatron.save({"optimizer": states[0], "o": [states[1]], "model": model}, path)
        load_optimizer(path, [shard(0, 1)])
    with pytest.raises(tilestone.MismatchError, match=r"held the model's box \[0:8, 4:8\]"):
        load_optimizer(path, [shard(1, 1)])


def test_gaps_and_keys_of_buckets_are_stored_as_megatron_core_stores_them(
    tmp_path: pathlib.Path,
) -> None:
    path, job = str(tmp_path / "a"), Ranks(4, 2, 2)
    _save(job, "dp_reshardable", path, 100)
    layout = layout_of(dict(_models(job))[1], 1, 2, 100)
    stored = megatron.load_plain_tensors(path)
    wanted = {
        f"optimizer.distributed.dp_group_idx_1.gbuf_idx_{i}.dtype_(torch.{dtype}, torch.float32)"
        f".bucket_idx_{j}.{state}": bucket.numel_unpadded
        for (i, j), bucket in layout.buckets()
        for dtype in [("bfloat16", "float32")[i]]
        for state in om.STATES
    }
    assert {k: v.numel() for k, v in stored.items() if "group_idx_1" in k} == wanted
    place, bucket = next(each for each in layout.buckets() if len(each[1].parameters) > 1)
    first, second = bucket.parameters[:2]
    memory = stored[f"{layout.bucket_key(*place)}.exp_avg"]
    assert first.end < second.start and not memory[first.end : second.start].any()
    objects = {key.rpartition("/")[0] for key in megatron.load_sharded_metadata(path) if "/" in key}
    names = ("optimizer", "grad_scaler", "per_bucket_numel", "per_bucket_numel_unpadded", "layout")
    assert objects == {
        f"optimizer.distributed.dp_group_idx_{g}.{name}" for g in range(8) for name in names
    }
    sizes = tilestone.open(path)[f"{layout.prefix}.per_bucket_numel_unpadded/shard_0_1"]
    assert sizes == [
        {buffer.dtypes: [bucket.numel_unpadded for bucket in buffer.buckets]}
        for buffer in layout.buffers
    ]


def test_a_rank_that_has_only_padding_of_a_bucket_saves_and_loads(tmp_path: pathlib.Path) -> None:
    """Megatron-Core refuses such a rank."""
    path, job = str(tmp_path / "a"), Ranks(4, 1, 64)
    layout = layout_of(_models(job)[0][1], 0, job.dp, 100)
    place, bucket = next(each for each in layout.buckets() if len(each[1].parameters) > 1)
    local, gap = bucket.numel // job.dp, bucket.parameters[0].end
    rank = -(-gap // local)
    assert (rank + 1) * local <= bucket.parameters[1].start
    assert all(part.place[:2] != place for part in layout.slices(rank, job.dp))
    _save(job, "dp_reshardable", path, 100)
    _check(Ranks(2, 1, 1), path)


# ---- Chains, precisions, other formats ----


def test_chained_optimizers_load_with_and_without_their_prefix(tmp_path: pathlib.Path) -> None:
    job = Ranks(1, 1, 2)
    model = Model(megatron, job, 0, 0)

    def shards(rank: int, fill: bool) -> list[OptimizerShard]:
        found = []
        for chain, dense in enumerate((True, False)):
            part = Model(megatron, job, 0, 0)
            part.entities = {
                name: each
                for name, each in model.entities.items()
                if ("experts" in name) is not dense
            }
            layout = layout_of(part, 0, job.dp)
            layout = Layout(layout.buffers, 0, chain)
            made = filled(part, layout, rank, job.dp, WHOLE)
            made.common = {"optimizer": {"param_groups": [], "chain": chain}}
            found.append(made if fill else OptimizerShard.allocated(layout, rank, job.dp))
        return found

    for kind in FORMATS:
        for prefix in ("", "chained"):
            path = str(tmp_path / f"{kind}{prefix}")
            states = [optimizer_state(shards(rank, True), kind) for rank in (0, 1)]
            if prefix and kind != "dp_reshardable":  # early versions stored all formats this way
                for number in (0, 1):
                    for state in states:
                        megatron.utils.add_prefix_for_sharding(
                            state[number], f"chained_{number}."
                        )
            megatron.save({"optimizer": states[0], "other": _mains(states[1])}, path)
            for rank in (0, 1):
                loaded, expected = shards(rank, False), shards(rank, True)
                commons = load_optimizer(path, loaded)
                assert [each["optimizer"]["chain"] for each in commons] == [0, 1]
                for one, other in zip(loaded, expected, strict=True):
                    for place, states_there in other.states.items():
                        for name, tensor in states_there.items():
                            assert torch.equal(one.states[place][name], tensor)


def test_states_of_other_precisions_are_converted(tmp_path: pathlib.Path) -> None:
    _save(Ranks(1, 1, 2), "fully_reshardable", str(tmp_path))
    model = Model(megatron, Ranks(2, 1, 1), 0, 0)
    layout = layout_of(model, 0, 1)
    dtypes = {"param": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16}
    shard = OptimizerShard.allocated(layout, 0, 1, dtypes)
    load_optimizer(str(tmp_path), [shard])
    expected = filled(model, layout, 0, 1, WHOLE)
    for place, states in expected.states.items():
        for name, dtype in dtypes.items():
            assert torch.equal(shard.states[place][name], states[name].to(dtype))
    with pytest.raises(tilestone.CheckpointError, match="dtype|float32"):
        load_optimizer(str(tmp_path), [shard], cast=False)


def test_the_single_object_of_dp_zero_loads_into_any_given_layout(
    tmp_path: pathlib.Path,
) -> None:
    """The object is made like Megatron-Core's; test_megatron_optimizer_stock.py checks that."""
    job = Ranks(2, 1, 2)
    states: list[Any] = []
    for group, model in _models(job):
        layout = layout_of(model, group, job.dp)
        whole = filled(model, layout_of(model, group, 1), 0, 1, WHOLE)
        gathered: dict[Any, Any] = {"buckets_coalesced": True}
        for i, buffer in enumerate(layout.buffers):
            size = sum(bucket.numel_unpadded for bucket in buffer.buckets)
            flat = {state: torch.zeros(size) for state in om.STATES}
            gathered[i] = {buffer.dtypes: {**flat, "numel_unpadded": size}}
            begin = 0
            for j, bucket in enumerate(buffer.buckets):
                for k, parameter in enumerate(bucket.parameters):
                    for state in om.STATES:
                        where = slice(begin + parameter.start, begin + parameter.end)
                        flat[state][where] = whole.states[i, j, k][state]
                begin += bucket.numel_unpadded
        objects = {"param_state": gathered, **om.common()}
        states.append(
            {
                name: megatron.ShardedObject(f"{layout.prefix}.{name}", value, (1,), (0,))
                for name, value in objects.items()
            }
        )
        states[-1]["layout"] = layout_object(whole)
    path = str(tmp_path / "described")
    metadata = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
    megatron.save({"optimizer": states}, path, content_metadata=metadata)
    _check(Ranks(1, 2, 3), path, bucket_numel=None)
    for state in states:
        del state["layout"]
    megatron.save({"optimizer": states}, path, content_metadata=metadata)
    _check(Ranks(2, 1, 3), path)
    with pytest.raises(tilestone.MismatchError, match="elements, but has .* in the layout") as raised:
        _check(Ranks(2, 1, 1), path, bucket_numel=None)
    assert "layouts of the job that saved" in raised.value.hint
    states[0]["param_state"].data["buckets_coalesced"] = False
    megatron.save({"optimizer": states}, path)
    with pytest.raises(tilestone.UnsupportedError, match="before February 2024"):
        _check(job, path)


def test_an_optimizer_that_is_not_distributed_loads_into_one_that_is(
    tmp_path: pathlib.Path,
) -> None:
    from tilestone.megatron.optimizer import make_sharded_optimizer_tensor

    model = Model(megatron, Ranks(1, 1, 1), 0, 0)
    tensors = [
        make_sharded_optimizer_tensor(
            entity,
            model.local_state(name, state, WHOLE),
            f"optimizer.state.{'fp32_param' if state == 'param' else state}",
        )
        for name, entity in model.entities.items()
        for state in om.STATES
    ]
    megatron.save({"optimizer": {**om.common(), "tensors": tensors}}, tmp_path)
    _check_states_only(Ranks(2, 2, 2), str(tmp_path))


def _check_states_only(job: Ranks, path: str) -> None:
    for group, model in _models(job):
        layout = layout_of(model, group, job.dp)
        for rank in range(job.dp):
            shard = OptimizerShard.allocated(layout, rank, job.dp)
            load_optimizer(path, [shard])
            expected = filled(model, layout, rank, job.dp, WHOLE)
            for place, states in expected.states.items():
                for name, tensor in states.items():
                    assert torch.equal(shard.states[place][name], tensor)


# ---- Refusals ----


def test_stored_states_must_agree_with_their_description_in_the_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    model = Model(megatron, Ranks(1, 1, 1), 0, 0)
    shard = filled(model, layout_of(model, 0, 1), 0, 1, WHOLE)
    state = optimizer_state([shard], "fully_reshardable")
    for declared, kind, text in (
        ("dp_reshardable", tilestone.CorruptError, "keys are those of fully_reshardable"),
        ("fsdp_dtensor", tilestone.UnsupportedError, "stored as fsdp_dtensor"),
    ):
        metadata = {"distrib_optim_sharding_type": declared}
        megatron.save({"optimizer": state}, tmp_path, content_metadata=metadata)
        with pytest.raises(kind, match=text):
            load_optimizer(tmp_path, [shard])
    for states in state["param_state"].values():
        del states["exp_avg"]
    megatron.save({"optimizer": state}, tmp_path)
    with pytest.raises(tilestone.NotFoundError) as e:
        load_optimizer(tmp_path, [shard])
    assert "optimizer.state.exp_avg." in str(e.value)
    megatron.save({"optimizer": {"lr": 1}}, tmp_path)
    with pytest.raises(tilestone.NotFoundError, match="the state of a distributed optimizer"):
        load_optimizer(tmp_path, [shard])
    with pytest.raises(tilestone.UnsupportedError, match="as 'dp_zero_gather_scatter'"):
        optimizer_state([shard], "dp_zero_gather_scatter")
    with pytest.raises(tilestone.InvalidArgumentError, match="not .None, None."):
        optimizer_state([shard, shard], "dp_reshardable")


def test_states_that_do_not_match_the_slices_are_refused() -> None:
    model = Model(megatron, Ranks(1, 1, 1), 0, 0)
    layout = layout_of(model, 0, 2)
    shard = filled(model, layout, 0, 2, WHOLE)
    place, states = next(iter(shard.states.items()))
    for wrong, text in (
        ({**states, "exp_avg": states["exp_avg"].double()}, "float64"),
        ({**states, "exp_avg": states["exp_avg"][1:]}, "expected a contiguous tensor of"),
        ({"param": states["param"]}, r"are \['param'\], not"),
    ):
        with pytest.raises(tilestone.MismatchError, match=text):
            OptimizerShard(layout, 0, 2, {**shard.states, place: wrong})
    with pytest.raises(tilestone.MismatchError, match=r"\(9, 9, 9\)"):
        OptimizerShard(layout, 0, 2, {**shard.states, (9, 9, 9): states})
    with pytest.raises(tilestone.InvalidArgumentError, match="can't be divided among 7 ranks"):
        OptimizerShard.allocated(layout, 0, 7)
    entity = megatron.ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=1)
    shard = OptimizerShard.allocated(Layout((pack([entity], 1),)), 0, 1)
    assert optimizer_state([shard], "dp_reshardable")  # buckets have their own replica ids
    with pytest.raises(tilestone.InvalidArgumentError, match="no data-parallel entry"):
        optimizer_state([shard], "fully_reshardable")


def _one_rank_fails(rank: int, world: int, path: str) -> str:
    job = Ranks(2, 1, 1)
    model = dict(_models(job))[rank]
    shard = filled(model, layout_of(model, rank, 1), 0, 1, WHOLE)
    state = optimizer_state([shard], "dp_reshardable", with_layout=False)
    megatron.save({"optimizer": state}, path)
    load_optimizer(path, [shard])
    other = OptimizerShard.allocated(layout_of(model, rank, 1, None), 0, 1) if rank else shard
    try:
        load_optimizer(path, [other])
    except tilestone.MismatchError as error:
        return str(error)
    return ""


def test_a_rank_that_can_not_plan_its_load_fails_it_on_every_rank(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    first, second = worlds[2].run(_one_rank_fails, str(tmp_path / "a"))
    assert first == second and "is stored with" in first and "rank 1" in first
