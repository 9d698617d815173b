"""Strategies of tilestone.megatron: chosen by name, used alone, and a user's own strategies."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import tilestone
from ranks import Raised, Worlds
from test_megatron_api import _tensor, _whole
from test_megatron_stock import _megatron
from tilestone import megatron
from tilestone.megatron import serialization
from tilestone.megatron.mapping import ShardedObject, ShardedTensor
from tilestone.megatron.strategies import base, torch as torch_strategies, zarr
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)


def test_backends_are_chosen_by_name_and_found_from_the_files(ckpt: str) -> None:
    megatron.save(_tensor(1), ckpt, ("zarr", 1))
    assert json.loads(pathlib.Path(ckpt, "metadata.json").read_text())["sharded_backend"] == "zarr"
    assert megatron.load(_tensor(0), ckpt)["w"].tolist() == [1, 1]
    found = serialization.get_default_load_sharded_strategy(ckpt)
    assert isinstance(found, zarr.ZarrLoadShardedStrategy)
    assert megatron.load(_tensor(0), ckpt, ("zarr", 1))["w"].tolist() == [1, 1]
    with pytest.raises(tilestone.MismatchError, match="'zarr'.*'torch_dist'"):
        megatron.load(_tensor(0), ckpt, ("torch_dist", 1))
    with pytest.raises(NotImplementedError):
        megatron.save(_tensor(1), ckpt, common_strategy=("torch", 1))
    with pytest.raises(tilestone.UnsupportedError, match="the format zarr"):
        megatron.remove_sharded_tensors(ckpt, "w")


class _Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_what_is_no_strategy_is_refused_by_name_and_the_checkpoint_stays(ckpt: str) -> None:
    megatron.save({**_tensor(1), "step": 1}, ckpt)
    saves = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    loads = serialization.get_default_load_sharded_strategy(ckpt)
    for wrong in ("torch_dist", ("torch_dist", 1, 2), (), 3, _Nameless()):
        for given in (wrong, saves):
            with pytest.raises(tilestone.InvalidArgumentError, match="sharded_strategy must be"):
                megatron.load(_tensor(0), ckpt, given)
            with pytest.raises(tilestone.InvalidArgumentError, match="common_strategy must be"):
                megatron.load(_tensor(0), ckpt, common_strategy=given)
        for given in (wrong, loads):
            with pytest.raises(tilestone.InvalidArgumentError, match="sharded_strategy must be"):
                megatron.save({**_tensor(2), "step": 2}, ckpt, given)
    assert megatron.load(_tensor(0), ckpt)["step"] == 1


def test_keys_that_begin_with_a_separation_hint_have_files_of_their_own(ckpt: str) -> None:
    kind = torch_strategies.TorchDistSaveShardedStrategy
    other = ShardedTensor.from_rank_offsets("other", torch.full((2,), 2.0))
    state = {**_tensor(1), "other": other, "o": ShardedObject("w.state", 5, (1,), (0,))}
    for again in range(3):  # each replaces the one before
        request = megatron.save(
            dict(state), ckpt, kind("torch_dist", 1, separation_hint="w"), verify_integrity=True,
            async_sharded_save=again == 2,
        )  # fmt: skip
        if request is not None and again == 2:
            request.execute_sync()
        (separate,) = pathlib.Path(ckpt).glob("w*__0_*.distcp")
        assert len(list(pathlib.Path(ckpt).glob("*.distcp"))) == 2
        with tilestone.open(ckpt) as checkpoint:
            assert checkpoint["w"].files == [separate.name]
            assert checkpoint["other"].files != [separate.name]
            assert checkpoint.verify().ok
    assert megatron.load(dict(state), ckpt, verify_integrity=True)["o"] == 5
    megatron.remove_sharded_tensors(ckpt, "w")
    assert list(megatron.load_tensors_metadata(ckpt)) == ["other"] and not separate.exists()
    with pytest.raises(tilestone.InvalidArgumentError, match="separation_hint"):
        megatron.save(dict(state), ckpt, kind("torch_dist", 1, separation_hint="a/b"))


class _Counting(base.SaveShardedStrategy):
    """A user's strategy around one of Tilestone's, which is called like stock calls strategies."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.inner = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=4)
        self.calls = 0

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        assert os.path.exists(os.path.join(checkpoint_dir, "common.pt"))
        self.calls += 1
        self.inner.save(sharded_state_dict, checkpoint_dir)


def test_a_users_strategy_can_save_through_tilestones_again_and_again(ckpt: str) -> None:
    strategy = _Counting()
    assert str(strategy.inner) == "TorchDistSaveShardedStrategy(torch_dist, 1)"

    def state(value: float) -> dict[str, Any]:
        return {**_tensor(value), "o": [ShardedObject("o", value, (1,), (0,))], "step": value}

    template = {**_tensor(0), "o": [ShardedObject("o", None, (1,), (0,))]}
    for value in (1, 2):
        megatron.save(state(value), ckpt, strategy)
        loaded = megatron.load(dict(template), ckpt)
        assert loaded["w"].tolist() == [value] * 2
        assert loaded["o"] == [value] and loaded["step"] == value
    refused = {**state(3), "o": [ShardedObject("o", lambda: 0, (1,), (0,))]}
    with pytest.raises(tilestone.InvalidArgumentError, match="pickled"):
        megatron.save(refused, ckpt, strategy)
    # The new common state exists with the old tensors, so there must be no checkpoint.
    assert not os.path.exists(os.path.join(ckpt, "metadata.json"))
    megatron.save(state(4), ckpt, strategy)
    assert megatron.load(dict(template), ckpt)["w"].tolist() == [4, 4] and strategy.calls == 4
    assert len(list(pathlib.Path(ckpt).glob("*.distcp"))) == 1
    with tilestone.open(ckpt) as checkpoint:
        assert checkpoint.dialect == "megatron" and checkpoint.verify().ok


class _Failing(base.SaveShardedStrategy):
    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        raise RuntimeError("no space")


def test_old_tensors_are_no_checkpoint_with_the_common_state_of_a_failed_users_strategy(
    ckpt: str,
) -> None:
    megatron.save({**_tensor(1), "step": 1}, ckpt)
    twice = {**_tensor(2), "again": _tensor(2)["w"]}
    with pytest.raises(megatron.core.CheckpointingException):
        megatron.save(twice, ckpt, _Failing("torch_dist", 1))  # refused before anything is written
    assert megatron.load(_tensor(0), ckpt)["step"] == 1
    with pytest.raises(RuntimeError, match="no space"):
        megatron.save({**_tensor(2), "step": 2}, ckpt, _Failing("torch_dist", 1))
    with pytest.raises(megatron.core.CheckpointingException):
        megatron.load(_tensor(0), ckpt)
    megatron.save({**_tensor(3), "step": 3}, ckpt)
    loaded = megatron.load(_tensor(0), ckpt)
    assert loaded["w"].tolist() == [3, 3] and loaded["step"] == 3


def _save_by_user(rank: int, world: int, ckpt: str) -> None:
    megatron.save({"w": _whole(megatron.mapping, "w", rank)}, ckpt, _Counting())


def test_every_rank_raises_where_rank_0_cant_make_the_directory_of_a_users_strategy(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    first, second = worlds[2].collect(_save_by_user, str(tmp_path / "file" / "ckpt"))
    assert isinstance(first, Raised) and first.kind == "StorageError", first
    assert isinstance(second, Raised) and second.kind == "StorageError", second
    assert second.attributes["rank"] == 0 and str(tmp_path) in second.text


def test_common_state_that_holds_itself_is_refused_with_its_key(ckpt: str) -> None:
    values: list[Any] = [1]
    values.append(values)
    megatron.save({**_tensor(1), "step": 1}, ckpt)
    with pytest.raises(tilestone.InvalidArgumentError) as refused:
        megatron.save({**_tensor(2), "a": {"b": values}}, ckpt)
    assert refused.value.key == "a.b"
    assert megatron.load(_tensor(0), ckpt)["step"] == 1


def _sharded(value: Any, filled: float) -> dict[str, Any]:
    return {"deep": [_tensor(filled)], "o": ShardedObject("o", value, (1,), (0,))}


def test_a_strategy_by_itself_loads_what_its_pair_has_saved(ckpt: str) -> None:
    save = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    load = torch_strategies.TorchDistLoadShardedStrategy()
    pairs = [
        (save, load),
        (FullyParallelSaveStrategyWrapper(save), load),
        (save, FullyParallelLoadStrategyWrapper(load)),
        (megatron.TilestoneSaveStrategy(), megatron.TilestoneLoadStrategy()),
        (megatron.TilestoneSaveStrategy(), load),
        (save, megatron.TilestoneLoadStrategy()),
    ]
    for number, (saves, loads) in enumerate(pairs):
        saves.save(_sharded([number], number), ckpt)
        found = loads.load(_sharded(None, 0), pathlib.Path(ckpt))
        assert found["deep"][0]["w"].tolist() == [number] * 2 and found["o"] == [number]
        assert list(loads.load_tensors_metadata(ckpt)) == ["w"]
        assert set(loads.load_sharded_metadata(ckpt)) == {"w", "o/shard_0_1"}
        loads.check_backend_compatibility(saves.backend)
        loads.check_version_compatibility(saves.version)


def test_what_a_strategy_alone_has_saved_is_no_whole_checkpoint(ckpt: str) -> None:
    save = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    save.save(_tensor(5), ckpt)
    with pytest.raises(tilestone.CorruptError, match=r"metadata\.json"):
        tilestone.open(ckpt)
    with pytest.raises(tilestone.NotFoundError):
        megatron.load(_tensor(0), ckpt)
    megatron.save(_tensor(5), f"{ckpt}2")
    with pytest.raises(tilestone.InvalidArgumentError, match="must be a strategy that loads"):
        megatron.load(_tensor(0), f"{ckpt}2", torch_strategies.TorchDistLoadShardedStrategy)
    megatron.core.save_config(megatron.core.CheckpointingConfig("torch_dist", 1), ckpt)
    load = serialization.get_default_load_sharded_strategy(ckpt)
    assert load.load(_tensor(0), ckpt)["w"].tolist() == [5, 5]
    with pytest.raises(tilestone.InvalidArgumentError, match="sharded part") as refused:
        save.save({**_tensor(5), "lr": [0.1]}, ckpt)
    assert refused.value.key == "lr.0"
    with pytest.raises(tilestone.UnsupportedError, match="zarr"):
        zarr.ZarrSaveShardedStrategy("zarr", 1).save(_tensor(5), ckpt)


def test_a_strategy_loads_what_stocks_has_saved_alone(ckpt: str) -> None:
    megatron.save(_sharded([3], 1), ckpt)
    shutil.rmtree(os.path.join(ckpt, ".tilestone"))  # stock's have neither this nor the next
    os.unlink(os.path.join(ckpt, "metadata.json"))
    for load in (torch_strategies.TorchDistLoadShardedStrategy(), megatron.TilestoneLoadStrategy()):
        found = load.load(_sharded(None, 0), ckpt)
        assert found["deep"][0]["w"].tolist() == [1, 1] and found["o"] == [3]
        assert set(load.load_sharded_metadata(ckpt)) == {"w", "o/shard_0_1"}


class _OwnSave(base.SaveShardedStrategy):
    can_handle_sharded_objects = False

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        torch.save(sharded_state_dict["w"].data, os.path.join(checkpoint_dir, "own.pt"))


class _OwnLoad(base.LoadShardedStrategy):
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return {"w": torch.load(os.path.join(checkpoint_dir, "own.pt"))}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)).without_data()}

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        assert loaded_backend == "own"

    def check_version_compatibility(self, loaded_version: Any) -> None:
        assert loaded_version == 7


def test_a_strategy_of_a_users_own_is_called_and_can_be_registered(ckpt: str) -> None:
    state = {**_tensor(4), "o": ShardedObject("o", [1], (1,), (0,)), "step": 3}
    megatron.save(state, ckpt, _OwnSave("own", 7))
    assert json.loads(pathlib.Path(ckpt, "metadata.json").read_text())["sharded_backend"] == "own"
    template = {**_tensor(0), "o": ShardedObject("o", None, (1,), (0,))}
    with pytest.raises(tilestone.UnsupportedError, match="'own', 7"):
        megatron.load(dict(template), ckpt)
    with mock.patch.dict(base.default_strategies["load_sharded"]):
        action = base.StrategyAction.LOAD_SHARDED
        base.register_default_strategy(action, "own", 7, _OwnLoad())
        state, missing, unexpected = megatron.load(
            {**template, "new": _whole(megatron.mapping, "new", 0)}, ckpt, strict="return_all"
        )
    assert state["w"].tolist() == [4, 4] and state["o"] == [1] and state["step"] == 3
    assert (missing, unexpected) == (set(), {"new"})


def test_requests_of_asynchronous_saves_run_in_their_order() -> None:
    done: list[Any] = []
    request = AsyncRequest(lambda *args: done.append(args), (1, 2, 3), [], preload_fn=lambda: 9)
    request.add_finalize_fn(lambda: done.append("end"))
    request.execute_sync()
    assert done == [(1, 9, 3), "end"]
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(lambda: None)


def test_save_returns_its_result_where_the_call_is_not_one_of_stock(ckpt: str) -> None:
    kind = torch_strategies.TorchDistSaveShardedStrategy
    assert megatron.save(_tensor(1), ckpt) is None  # Megatron's training asserts it
    stocks = kind("torch_dist", 1)
    assert megatron.save(_tensor(1), ckpt, stocks, validate_access_integrity=False) is None
    assert megatron.save(_tensor(1), ckpt, _Counting(), timeout=60) is None
    copying = kind("torch_dist", 1, copies=tilestone.LocalCopies([0]))
    wrapped = FullyParallelSaveStrategyWrapper(kind("torch_dist", 1))
    for strategy, options in (
        (None, {"timeout": 60}),
        (None, {"copies": tilestone.LocalCopies([0])}),
        (copying, {}),
        (wrapped, {"common_differs": "error"}),
        (("torch_dist", 1), {"common_differs": "ignore"}),
    ):
        result = megatron.save(_tensor(1), ckpt, strategy, **options)
        assert result is not None, options
        assert result.published and result.items_written >= 1 and result.copies == 0, options
    by_files = tilestone.ByFiles(0, 1, "a job of today")
    result = megatron.save(_tensor(1), ckpt + "-files", by_files=by_files)
    assert result is not None and result.published


def test_errors_are_also_those_that_stocks_callers_catch(tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint import CheckpointException

    _megatron()
    from megatron.core.dist_checkpointing.core import CheckpointingException

    nowhere, kept = tmp_path / "nowhere", tmp_path / "kept"
    absent = {"w": ShardedTensor.from_rank_offsets("absent", torch.ones(1))}
    megatron.save({"a": 1}, kept)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: megatron.TilestoneLoadStrategy().load_tensors_metadata(nowhere), str(nowhere)),
        (lambda: megatron.load(absent, nowhere), str(nowhere)),
        (lambda: megatron.load_common_state_dict(nowhere), str(nowhere)),
        (lambda: megatron.load_plain_tensors(nowhere), str(nowhere)),
        (lambda: megatron.remove_sharded_tensors(nowhere, "w"), str(nowhere)),
        (lambda: megatron.load(absent, kept), "absent"),
    ]
    for call, named in calls:
        for caught in (CheckpointingException, CheckpointException, tilestone.NotFoundError):
            with pytest.raises(caught) as raised:
                call()
            assert named in str(raised.value)
            assert type(pickle.loads(pickle.dumps(raised.value))) is tilestone.NotFoundError
    with pytest.raises(CheckpointException) as refused:
        megatron.save({"a": lambda: None}, kept)
    assert isinstance(refused.value, CheckpointingException)
