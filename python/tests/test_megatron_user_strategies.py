"""Strategies of the user in a part of the world: its ranks, its time limit, and its failures."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilestone
from ranks import Raised, Worlds
from tilestone import megatron
from tilestone.megatron.mapping import ShardedObject, ShardedTensor, is_main_replica
from tilestone.megatron.strategies import base, torch as torch_strategies
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

PART = [2, 3]  # without rank 0, so that what "rank 0" does must be done by the part's first rank


def _name(entity: Any) -> str:
    offset = ".".join(map(str, entity.global_offset))
    return f"{entity.key}@{offset}"


class Saves(base.SaveShardedStrategy):
    """Writes the rank's main replicas to a file of its own."""

    can_handle_sharded_objects = True

    def __init__(self, fails_on: int | None = None, sleeps: float = 0) -> None:
        super().__init__("own", 1)
        self.fails_on = fails_on
        self.sleeps = sleeps

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        time.sleep(self.sleeps)
        if dist.get_rank() == self.fails_on:
            raise OSError("no space")
        leaves = list(megatron.dict_utils.nested_values(sharded_state_dict))
        kept = {_name(item): item.data for item in leaves if is_main_replica(item.replica_id)}
        torch.save(kept, os.path.join(checkpoint_dir, f"part{dist.get_rank()}.pt"))


class Loads(base.LoadShardedStrategy):
    """Replaces the entities in the very dict that it is given."""

    can_handle_sharded_objects = True

    def __init__(self, fails_on: int | None = None) -> None:
        self.fails_on = fails_on
        self.loaded: list[str] = []

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        if dist.get_rank() == self.fails_on:
            raise OSError("no such disk")
        stored: dict[str, Any] = {}
        for path in sorted(pathlib.Path(checkpoint_dir).glob("part*.pt")):
            stored |= torch.load(path)

        def found(item: Any) -> Any:
            self.loaded.append(_name(item))
            return stored[_name(item)]

        return megatron.dict_utils.dict_list_map_inplace(found, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4)).without_data()}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return self.load_tensors_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        assert loaded_backend == "own"

    def check_version_compatibility(self, loaded_version: Any) -> None:
        assert loaded_version == 1


class Around(base.SaveShardedStrategy):
    """Saves through a strategy of Tilestone."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1).save(
            sharded_state_dict, checkpoint_dir
        )


class AroundLoad(torch_strategies.TorchDistLoadShardedStrategy):
    """Loads through a strategy of Tilestone."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return super().load(sharded_state_dict, checkpoint_dir)


def _state(rank: int, filled: bool = True) -> dict[str, Any]:
    """`w` is the same on the ranks of the part, which share `r` by rows."""
    place = PART.index(rank)
    mine = torch.full((2,), place + 1.0) if filled else torch.zeros(2)
    whole = torch.arange(4.0) if filled else torch.zeros(4)
    return {
        "deep": [{"w": ShardedTensor.from_rank_offsets("w", whole, replica_id=place)}],
        "r": ShardedTensor.from_rank_offsets("r", mine, (0, place, 2)),
        "o": ShardedObject("o", [place] if filled else None, (2,), (place,)),
        "step": 7,
    }


def _is_whole(loaded: dict[str, Any], rank: int) -> bool:
    place = PART.index(rank)
    return bool(
        loaded["deep"][0]["w"].tolist() == [0, 1, 2, 3]
        and loaded["r"].tolist() == [place + 1] * 2
        and loaded["o"] == [place]
        and loaded["step"] == 7
    )


def _pairs() -> dict[str, tuple[Any, Any]]:
    save, load = FullyParallelSaveStrategyWrapper, FullyParallelLoadStrategyWrapper
    torch_dist = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    return {
        "alone": (Saves(), Loads()),
        "wrapped": (save(Saves()), load(Loads())),
        "nested": (save(save(Saves())), load(load(Loads()))),
        "cached": (save(Saves(), None, True), load(Loads(), None, True)),
        "tilestone wrapped": (save(torch_dist), load(AroundLoad())),
        "around tilestone": (Around(), AroundLoad()),
        "around, wrapped": (save(Around()), load(load(AroundLoad()))),
        "plug-in": (megatron.TilestoneSaveStrategy(), megatron.TilestoneLoadStrategy()),
    }


def _in_a_part(rank: int, world: int, folder: str) -> dict[str, Any]:
    group = dist.new_group(PART)
    if rank not in PART:
        return {}
    results: dict[str, Any] = {}
    for name, (saves, loads) in _pairs().items():
        ckpt = os.path.join(folder, name)
        options: Any = {"process_group": group, "timeout": 60}
        for _ in range(2):
            megatron.save(_state(rank), ckpt, saves, **options)
            template = _state(rank, filled=False)
            before = list(megatron.dict_utils.nested_values(template))
            loaded = megatron.load(template, ckpt, loads, strict="assume_ok_unexpected", **options)
            results[name] = _is_whole(loaded, rank)
            assert list(megatron.dict_utils.nested_values(template)) == before
        assert os.path.exists(os.path.join(ckpt, "common.pt"))
    plain = os.path.join(folder, "around tilestone")
    everything = megatron.load_plain_tensors(plain, process_group=group, timeout=60)
    results["plain"] = everything["r"].tolist() == [1, 1, 2, 2]
    return results


def test_user_strategies_and_wrappers_work_in_a_part_of_the_world(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    results = worlds[4].collect(_in_a_part, str(tmp_path))
    expected = {name: True for name in [*_pairs(), "plain"]}
    assert results == [{}, {}, expected, expected], results


def _lists(rank: int, world: int, ckpt: str) -> None:
    def request(name: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(name, torch.full((4,), 7.0), replica_id=rank)

    megatron.save({"l": [request("w")]}, ckpt, Saves())
    for strict in ("ignore_all", "log_unexpected", "return_unexpected"):
        template = {"l": [request("new"), request("w")]}
        loaded: Any = megatron.load(template, ckpt, Loads(), strict=strict)
        state = loaded[0] if strict.startswith("return") else loaded
        assert [each.tolist() for each in state["l"]] == [[7, 7, 7, 7]], strict


def test_what_is_not_stored_is_left_out_of_a_list(worlds: Worlds, ckpt: str) -> None:
    worlds[2].run(_lists, ckpt)


def _fails(call: Any) -> tuple[str, str, int]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", -1)
    return "", "", -1


def _failures(rank: int, world: int, folder: str) -> dict[str, Any]:
    group, others = dist.new_group(PART), dist.new_group([0, 1, 2, 3])
    if rank not in PART:
        return {}
    ckpt = os.path.join(folder, "ckpt")
    options: Any = {"process_group": group, "timeout": 60}
    odd = rank == PART[1]
    megatron.save(_state(rank), ckpt, Saves(), **options)

    def save(strategy: Any, **more: Any) -> Any:
        path = os.path.join(folder, "failed")
        return _fails(lambda: megatron.save(_state(rank), path, strategy, **options | more))

    def load(strategy: Any, path: str = ckpt, **more: Any) -> Any:
        template = _state(rank, filled=False)
        if more.pop("extra", False) and odd:
            template["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(1))
        return _fails(lambda: megatron.load(template, path, strategy, **options | more))

    wrapped = FullyParallelSaveStrategyWrapper
    return {
        "save": save(Saves(fails_on=3)),
        "wrapped save": save(wrapped(Saves(fails_on=3))),
        "content": save(Saves(), content_metadata=3 if odd else None),
        "preprocess": save(Saves(), preprocess_common_before_consistancy_check=_not_on_3),
        "wider": save(wrapped(Saves(), others)),
        "slow": save(Saves(sleeps=3 if odd else 0), timeout=1),
        "timeout": save(Saves(), timeout=-1),
        "after": save(Saves()),
        "load": load(Loads(fails_on=3)),
        "wrapped load": load(FullyParallelLoadStrategyWrapper(Loads(fails_on=3))),
        "strict": load(Loads(), strict="odd" if odd else "log_all"),
        "missing": load(Loads(), ckpt + "-none" if odd else ckpt),
        "unexpected": load(Loads(), strict="raise_unexpected", extra=True),
        "loads after": load(Loads()),
    }


def _not_on_3(common: Any) -> Any:
    if dist.get_rank() == 3:
        raise OSError("no copy")
    return common


def test_a_failure_on_one_rank_is_raised_by_all_ranks_of_the_part(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    results = worlds[4].collect(_failures, str(tmp_path))
    assert results[:2] == [{}, {}], results
    first, second = results[2:]
    assert not isinstance(first, Raised) and not isinstance(second, Raised), results
    for name in ("after", "loads after"):
        assert first.pop(name)[0] == second.pop(name)[0] == "", name
    for name, text in {
        "save": "no space", "wrapped save": "no space", "preprocess": "no copy",
        "load": "no such disk", "wrapped load": "no such disk",
    }.items():  # fmt: skip
        kind, said, number = first.pop(name)
        assert second.pop(name)[0] == "OSError", name
        assert kind == "InterruptedError" and text in said and number == 1, (name, said)
    for name, kind in {
        "content": "InvalidArgumentError", "wider": "InvalidArgumentError",
        "timeout": "InvalidArgumentError", "slow": "TimeoutError",
        "strict": "InvalidArgumentError", "missing": "NotFoundError",
        "unexpected": "MismatchError",
    }.items():  # fmt: skip
        assert first.pop(name)[0] == second.pop(name)[0] == kind, name
    assert (first, second) == ({}, {})


def test_an_object_that_a_strategy_leaves_out_is_named(worlds: Worlds, tmp_path: Any) -> None:
    found = worlds[2].collect(_leaves_out_objects, str(tmp_path))
    for error in found:
        assert isinstance(error, Raised) and error.attributes["key"] == "o/shard_0_1", error


class _LeavesOut(Loads):
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return {}


def _leaves_out_objects(rank: int, world: int, folder: str) -> None:
    state = {"o": ShardedObject("o", None, (1,), (0,), replica_id=0)}
    FullyParallelLoadStrategyWrapper(_LeavesOut()).load(state, folder)


def test_loads_in_place_leave_the_callers_dict_alone(tmp_path: pathlib.Path) -> None:
    class InPlace(Loads):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            sharded_state_dict["w"] = torch.ones(2)
            return sharded_state_dict

    template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    loaded = FullyParallelLoadStrategyWrapper(InPlace()).load(template, tmp_path)
    assert loaded["w"].tolist() == [1, 1] and isinstance(template["w"], ShardedTensor)


@pytest.mark.parametrize("name", ["save", "load", "load_plain_tensors"])
def test_what_talks_to_other_ranks_takes_their_group_and_a_timeout(name: str) -> None:
    import inspect

    parameters = inspect.signature(getattr(tilestone.megatron, name)).parameters
    assert {"process_group", "timeout"} <= set(parameters)
