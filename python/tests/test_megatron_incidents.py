"""Known failures of Megatron-Core's dist_checkpointing that tilestone.megatron does not have."""

from __future__ import annotations

import pathlib
import resource
import threading
from typing import Any

import pytest
import torch

import tilestone
from ranks import Raised, Worlds
from tilestone.megatron import (
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from tilestone.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)


def _rows(key: str, rank: int, world: int, value: float, rows: int = 2, **more: Any) -> Any:
    """A rank's rows of a tensor of (world * rows, 3) elements."""
    return ShardedTensor.from_rank_offsets(
        key, torch.full((rows, 3), value), (0, rank, world), **more
    )


def _all_raised(results: list[Any], *, said: str, key: str | None = None) -> None:
    """Checks that every rank raised a CheckpointingException with this text and key."""
    for result in results:
        assert isinstance(result, Raised) and "CheckpointError" in result.bases, result
        assert said in result.text
        assert key is None or result.attributes["key"].split("/")[0] == key


def _without_rows(rank: int, world: int, ckpt: str) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            name: _rows(name, rank, world, value, rows)
            for name, rows in (("empty", 0), ("full", 2))
        }

    save(state(1.0), ckpt, validate_access_integrity=True)
    loaded = load(state(0.0), ckpt, validate_access_integrity=True)
    assert loaded["empty"].shape == (0, 3) and loaded["full"].tolist() == [[1.0] * 3] * 2


def test_an_axis_of_size_zero_on_a_regular_grid_passes_validation(
    worlds: Worlds, ckpt: str
) -> None:
    worlds[2].run(_without_rows, ckpt)


def _beside_an_empty_shard(rank: int, world: int, ckpt: str) -> None:
    def shard(value: float) -> Any:
        data = torch.full((4 * rank,), value)  # rank 0: no elements, rank 1: all; both at offset 0
        return ShardedTensor("w", data, data.dtype, (4 * rank,), (4,), (0,), None)

    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    save({"w": shard(1.0)}, ckpt, strategy)
    reader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    assert load({"w": shard(0.0)}, ckpt, reader)["w"].tolist() == [1.0] * 4 * rank
    whole = ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=rank)
    assert load({"w": whole}, ckpt)["w"].tolist() == [1.0] * 4


def test_an_empty_shard_is_no_replica_of_the_full_one_at_its_offset(
    worlds: Worlds, ckpt: str
) -> None:
    worlds[2].run(_beside_an_empty_shard, ckpt)


def _three_tensors(rank: int, world: int, ckpt: str) -> None:
    keys = ("optimizer.exp_avg", "optimizer.step", "weight")
    save({key: _rows(key, rank, world, 1.0) for key in keys} | {"iteration": 7}, ckpt)


def _without_the_optimizer(rank: int, world: int, ckpt: str) -> None:
    remove_sharded_tensors(ckpt, "optimizer.")
    assert list(load_tensors_metadata(ckpt)) == ["weight"]


def test_tensors_are_removed_by_several_ranks_that_call(worlds: Worlds, ckpt: str) -> None:
    worlds[2].run(_three_tensors, ckpt)
    worlds[2].run(_without_the_optimizer, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened.tensor_keys() == ["weight"] and opened.verify().ok
        assert opened.read("weight").tolist() == [[1.0] * 3] * 4
    assert load_common_state_dict(ckpt) == {"iteration": 7}


def _ill_formed(rank: int, world: int, ckpt: str, what: str) -> None:
    state = {"good": _rows("good", rank, world, 1.0)}
    if what == "twice":
        state["w"] = _rows("w", 0, world, 1.0)  # both ranks have the first half
    elif what == "nowhere":
        state["w"] = _rows("w", rank, 3, 1.0)  # no rank has the last third
    elif what == "object":
        state["w"] = ShardedObject("w", rank, (2,), (0,))  # both ranks have the first position
    save(state, ckpt, validate_access_integrity=True)


@pytest.mark.parametrize("what", ["twice", "nowhere", "object"])
def test_what_validation_refuses_is_raised_on_every_rank(
    worlds: Worlds, ckpt: str, what: str
) -> None:
    _all_raised(worlds[2].collect(_ill_formed, ckpt, what), said="w", key="w")
    assert not list(pathlib.Path(ckpt).glob(".metadata"))
    worlds[2].run(_ill_formed, ckpt, "")


def _first(rank: int, world: int, ckpt: str) -> None:
    state = {key: _rows(key, rank, world, 1.0) for key in ("kept", "dropped")}
    save(state | {"step": 1}, ckpt)


def _second(rank: int, world: int, ckpt: str, broken: bool) -> None:
    data = threading.Lock() if broken and rank == 1 else rank  # a lock can't be saved
    state = {
        "kept": _rows("kept", rank, world, 2.0, rows=3),
        "object": ShardedObject("object", data, (world,), (rank,)),
    }
    save(state | {"step": 2}, ckpt)


def test_a_save_over_an_existing_folder_leaves_the_old_checkpoint_or_the_new_one(
    worlds: Worlds, ckpt: str
) -> None:
    worlds[2].run(_first, ckpt)
    old = {path.name for path in pathlib.Path(ckpt).iterdir()}
    _all_raised(worlds[2].collect(_second, ckpt, True), said="object")
    assert {path.name for path in pathlib.Path(ckpt).iterdir()} == old
    assert load_common_state_dict(ckpt)["step"] == 1
    with tilestone.open(ckpt) as opened:
        assert opened.verify().ok and opened["kept"].shape == (4, 3)
    worlds[2].run(_second, ckpt, False)
    assert load_common_state_dict(ckpt)["step"] == 2
    with tilestone.open(ckpt) as opened:
        assert opened.verify().ok and opened["kept"].shape == (6, 3)
        assert "dropped" not in opened.keys()
    stale = {name for name in old if name.endswith(".distcp")}
    assert not stale & {path.name for path in pathlib.Path(ckpt).iterdir()}


def _with_one_strategy(rank: int, world: int, folder: str) -> None:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    strategy.use_cached_ckpt_structure = True
    weight = torch.zeros(2, 3)
    for step in range(5):
        weight += 1  # in place
        other = torch.full((2, 3), 10.0 + step)  # another tensor each time
        state = {
            "w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, world)),
            "other": ShardedTensor.from_rank_offsets("other", other, (0, rank, world)),
        }
        if step == 4:
            state["new"] = _rows("new", rank, world, 4.0)
        save(state, f"{folder}/{step}", strategy)


def test_a_strategy_that_is_used_again_saves_what_it_is_given_then(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    for step in range(5):
        (tmp_path / str(step)).mkdir()
    worlds[2].run(_with_one_strategy, str(tmp_path))
    for step in range(5):
        with tilestone.open(tmp_path / str(step)) as opened:
            assert opened.read("w").tolist() == [[step + 1.0] * 3] * 4
            assert opened.read("other").tolist() == [[step + 10.0] * 3] * 4
            assert ("new" in opened.keys()) == (step == 4)
    with tilestone.open(tmp_path / "4") as opened:
        assert opened.read("new").tolist() == [[4.0] * 3] * 4


def _no_main_replica(rank: int, world: int, ckpt: str, validate: bool) -> None:
    shard = _rows("experts", rank, world, rank + 1.0, replica_id=(0, 0, rank))
    save({"w": shard}, ckpt, validate_access_integrity=validate)


def test_a_shard_of_which_nobody_has_the_main_replica_is_refused_and_never_lost(
    worlds: Worlds, ckpt: str
) -> None:
    results = worlds[2].collect(_no_main_replica, ckpt, True)
    _all_raised(results, said="main replica", key="experts")
    worlds[2].run(_no_main_replica, ckpt, False)
    with tilestone.open(ckpt) as opened:
        assert opened.read("experts").tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2


_LAYERS, _EXPERTS = 48, 128


def _expert(layer: int, expert: int, value: float) -> Any:
    data = torch.full((2, 2), value * (layer * _EXPERTS + expert))
    place = (0, layer, _LAYERS), (1, expert, _EXPERTS)
    return ShardedTensor.from_rank_offsets("experts", data, *place, prepend_axis_num=2)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _experts(rank: int, world: int, ckpt: str) -> int:
    """Saves and loads a rank's experts of all layers. Returns the growth of peak memory, bytes."""
    own = range(rank, _EXPERTS, world)
    before = _peak()

    def state(value: float) -> dict[str, Any]:
        return {f"{i}.{e}": _expert(i, e, value) for i in range(_LAYERS) for e in own}

    save(state(1.0), ckpt)
    loaded = load(state(0.0), ckpt)
    for layer, expert in ((0, own[0]), (17, own[5]), (_LAYERS - 1, own[-1])):
        assert loaded[f"{layer}.{expert}"].tolist() == [[layer * _EXPERTS + expert] * 2] * 2
    return _peak() - before


def test_a_grid_of_layers_and_experts_costs_its_shards_and_not_its_cells_for_each(
    worlds: Worlds, ckpt: str
) -> None:
    cells = _LAYERS * _EXPERTS  # 3,072 shards per rank; 19 million if each listed all cells
    assert max(worlds[2].run(_experts, ckpt)) < 8 * cells // 2 * cells
