"""Templates of a fresh process: optimizers without state, empty dicts and lists. And what a template
leaves out of its dicts and lists."""

from __future__ import annotations

import collections
import logging
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tilestone
import tilestone.dcp
from ranks import Raised, Worlds
from test_stateful import assert_equal_states

Differences = tilestone.Differences


def adamw(params: list[Any]) -> Any:
    return torch.optim.AdamW(params, lr=0.1)


def momentum(params: list[Any]) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def two_groups(params: list[Any]) -> Any:
    return torch.optim.Adam([{"params": params[1:2], "lr": 0.5}, {"params": params[2:]}], amsgrad=True)


def fresh(kind: Any = adamw, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    return model, kind(list(model.parameters()))


def step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(kind: Any = adamw) -> tuple[torch.nn.Module, Any]:
    model, optimizer = fresh(kind)
    step(model, optimizer)
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "tilestone")
    return lambda: [
        each.getMessage() for each in caplog.records if "left out" in each.getMessage()
    ]


@pytest.mark.parametrize("kind", [adamw, momentum, two_groups])
@pytest.mark.parametrize("writer", ["tilestone", "zarr", "stock"])
def test_a_fresh_optimizers_state_dict_receives_the_moments(
    kind: Any, writer: str, ckpt: str, warnings: Any
) -> None:
    model, optimizer = trained(kind)
    state = state_of(model, optimizer)
    if writer == "stock":
        stock.save(state, checkpoint_id=ckpt, no_dist=True)
    else:
        tilestone.save(state, ckpt, format="torch_dist" if writer == "tilestone" else writer)
    report = tilestone.LoadReport()
    other, its = fresh(kind, seed=1)
    loaded = tilestone.load(state_of(other, its), ckpt, differences=Differences(report=report))
    its.load_state_dict(loaded["optim"])
    assert_equal_states(its.state_dict(), optimizer.state_dict())
    step(model, optimizer)
    step(other, its)
    assert_equal_states(dict(other.state_dict()), dict(model.state_dict()))
    assert report == tilestone.LoadReport() and warnings() == []


def test_a_manager_a_session_and_solo_fill_them_too(
    tmp_path: pathlib.Path, ckpt: str, warnings: Any
) -> None:
    model, optimizer = trained()
    with tilestone.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(model, optimizer), force=True)
        manager.wait()
        loaded = [manager.restore(state_of(*fresh()))[0]]
    with tilestone.Session() as session:
        loaded.append(session.load(state_of(*fresh()), manager.path(1)))
    loaded.append(tilestone.load(state_of(*fresh()), manager.path(1), group=tilestone.solo()))
    for each in loaded:
        assert_equal_states(each["optim"], optimizer.state_dict())
    assert warnings() == []


@pytest.mark.parametrize("as_object", [False, True])
def test_what_a_scheduler_added_to_an_optimizers_groups_is_loaded(
    as_object: bool, ckpt: str, warnings: Any
) -> None:
    model, optimizer = fresh(two_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer)
    scheduler.step()
    tilestone.save({"optim": optimizer, "several": [optimizer.state_dict()]}, ckpt)
    its = fresh(two_groups)[1]
    if as_object:
        tilestone.load({"optim": its}, ckpt)
    else:
        loaded = tilestone.load({"optim": its.state_dict(), "several": [its.state_dict()]}, ckpt)
        assert_equal_states(loaded["several"][0], loaded["optim"])
        its.load_state_dict(loaded["optim"])
    assert_equal_states(its.state_dict(), optimizer.state_dict())
    assert [group["initial_lr"] for group in its.param_groups] == [0.5, 1e-3]
    resumed = torch.optim.lr_scheduler.StepLR(its, 1, last_epoch=1)
    assert resumed.last_epoch == 2 and warnings() == []


class Average:
    """A Stateful that makes its state in its first update."""

    def __init__(self, nested: bool) -> None:
        self.nested = nested
        self.shadow: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": dict(self.shadow)} if self.nested else dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"] if self.nested else state


@pytest.mark.parametrize("nested", [False, True])
def test_an_object_with_an_empty_state_receives_what_is_stored(nested: bool, ckpt: str) -> None:
    average = Average(nested)
    average.shadow = {"w": torch.ones(2), "count": 3}
    tilestone.save({"ema": average}, ckpt)
    other = Average(nested)
    tilestone.load({"ema": other}, ckpt)
    assert other.shadow["w"].tolist() == [1, 1] and other.shadow["count"] == 3


def test_a_module_without_state_takes_none(ckpt: str) -> None:
    tilestone.save({"m": torch.nn.Linear(2, 2)}, ckpt)
    with pytest.raises(tilestone.MismatchError, match="does not request: m.bias, m.weight"):
        tilestone.load({"m": torch.nn.ReLU()}, ckpt)


def test_empty_containers_of_any_class_are_filled(ckpt: str, warnings: Any) -> None:
    content: dict[str, Any] = {
        "plain": {1: torch.ones(2), "a.b": {"c": [torch.zeros(1), {2: {}}]}, None: 5},
        "ordered": collections.OrderedDict(x=1, y=torch.ones(1)),
        "default": {"s": {"avg": torch.ones(3)}},
        "list": [torch.ones(1), [torch.ones(2)], {"k": "v"}],
        "values": [1, 2],
        "inner": [{"full": 1}, {3: torch.ones(1)}],
    }
    tilestone.save(content, ckpt)
    wanted = {
        "plain": {}, "ordered": collections.OrderedDict(), "list": [], "values": [],
        "default": collections.defaultdict(dict), "inner": [{"full": None}, {}],
    }  # fmt: skip
    loaded = tilestone.load(wanted, ckpt)
    assert type(loaded["default"]) is collections.defaultdict and wanted["default"] == {}
    loaded["default"] = dict(loaded["default"])
    for key, value in content.items():
        assert_equal_states(loaded[key], value)
    assert warnings() == [] and tilestone.load({}, ckpt) == {}


def test_a_dict_that_meets_a_stored_leaf_is_an_error(ckpt: str) -> None:
    tilestone.save({"s": "leaf", "a": {"b": 1}, "t": torch.ones(1), "n": None}, ckpt)
    for wanted, key in (
        ({"s": {"k": 1}}, "s"), ({"a": {"b": {"x": 1}}}, "a.b"), ({"s": {}}, "s"),
        ({"t": {}}, "t"), ({"s": [torch.ones(1)]}, "s"), ({"n": {"k": 1}}, "n"),
    ):  # fmt: skip
        with pytest.raises(tilestone.MismatchError, match="under this key") as raised:
            tilestone.load(wanted, ckpt)
        assert raised.value.key == key
    for wanted in ({"a": None}, {"t": None}, {"t": {"k": 1}}, {"a": []}):
        with pytest.raises(tilestone.NotFoundError):
            tilestone.load(wanted, ckpt)


def test_what_a_template_leaves_out_of_its_dicts_is_never_silent(ckpt: str, warnings: Any) -> None:
    state = {"model": {"a": torch.ones(4), "b": torch.ones(8), "n": {"c": 1}}, "other": {"x": 1}}
    tilestone.save(state, ckpt)
    wanted = {"model": {"a": torch.zeros(4)}}
    report = tilestone.LoadReport()
    for policy in (None, "report", "ignore"):
        tilestone.load(wanted, ckpt, differences=Differences(not_requested=policy, report=report))
        rest = ["model.b", "model.n.c"]
        assert report.not_requested == rest + (["other.x"] if policy == "report" else [])
    (said,) = warnings()
    assert "2 keys of the checkpoint (" in said and " B) left out" in said
    assert "model.b, model.n.c" in said
    with pytest.raises(tilestone.MismatchError, match="model.b, model.n.c, other.x"):
        tilestone.load(wanted, ckpt, differences=Differences(not_requested="error"))
    tilestone.load({"other": {"x": 1}}, ckpt)
    tilestone.load({"model": state["model"]}, ckpt)
    assert len(warnings()) == 1


def _replicated(rank: int, world: int, ckpt: str) -> Any:
    model, optimizer = trained()
    tilestone.save(state_of(model, optimizer), ckpt)
    its = fresh(seed=1)[1]
    # Only rank 0 has something of "stage": the others take nothing of it.
    wanted = {"optim": its.state_dict(), "model": {"0.bias": torch.zeros(3)} if rank == 0 else {}}
    report = tilestone.LoadReport()
    loaded = tilestone.load(wanted, ckpt, differences=Differences(report=report))
    its.load_state_dict(loaded["optim"])
    assert_equal_states(its.state_dict(), optimizer.state_dict())
    return list(loaded["model"]), report.not_requested


def test_replicated_ranks_fill_what_is_empty_on_all_of_them(worlds: Worlds, ckpt: str) -> None:
    rest = ["model.0.weight", "model.1.bias", "model.1.weight"]
    assert worlds[2].run(_replicated, ckpt) == [(["0.bias"], rest), ([], rest)]


def _sharded(world: int, seed: int) -> tuple[torch.nn.Module, Any]:
    model, _ = fresh(seed=seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, adamw(list(model.parameters()))


def _whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _whole(each) for key, each in tree.items()}
    return tree.full_tensor().tolist() if isinstance(tree, DTensor) else tree


def _save_sharded(rank: int, world: int, ckpt: str) -> Any:
    model, optimizer = _sharded(world, 0)
    step(model, optimizer)
    step(model, optimizer)
    moments = get_optimizer_state_dict(model, optimizer)
    tilestone.save({**state_of(model, optimizer), "moments": moments}, ckpt)
    return _whole(moments["state"])


def _load_empty(rank: int, world: int, ckpt: str, key: str, as_object: bool) -> Any:
    model, optimizer = _sharded(world, 1)
    state = {"model": model.state_dict()} if key == "all" else {}
    state["optim"] = optimizer if as_object else optimizer.state_dict()
    tilestone.load(state, ckpt)


def _reshard(rank: int, world: int, ckpt: str, way: str) -> Any:
    """What docs/first_ten_minutes.md and the hints of the errors say."""
    model, optimizer = _sharded(world, 1)
    made = get_optimizer_state_dict(model, optimizer)
    if way == "names":
        state = tilestone.load({"moments": made}, ckpt)
        set_optimizer_state_dict(model, optimizer, state["moments"])
    elif way == "object":
        tilestone.load({"optim": optimizer}, ckpt)
    else:
        state = tilestone.load({"optim": optimizer.state_dict()}, ckpt)
        optimizer.load_state_dict(state["optim"])
    steps = {int(each["step"]) for each in optimizer.state.values()}
    assert steps == {2} and len(optimizer.state) == 4
    return _whole(get_optimizer_state_dict(model, optimizer)["state"])


def test_sharded_moments_are_an_error_that_says_what_to_do_and_that_holds(
    worlds: Worlds, ckpt: str, warnings: Any
) -> None:
    saved = worlds[2].run(_save_sharded, ckpt)[0]
    for key in ("optim", "all"):
        for result in worlds[2].collect(_load_empty, ckpt, key, False):
            assert isinstance(result, Raised) and result.kind == "MismatchError", result
            assert result.attributes["key"].startswith("optim.state.0.exp_avg")
            assert "get_optimizer_state_dict" in result.attributes["hint"]
    for result in worlds[2].collect(_load_empty, ckpt, "all", True):
        assert "only if there is a checkpoint to load" in result.attributes["hint"]
    for way in ("names", "object", "dict"):
        for result in worlds[3].run(_reshard, ckpt, way):
            assert_equal_states(result, saved)
    # One process without shards takes them whole.
    its = fresh(seed=1)[1]
    its.load_state_dict(tilestone.load({"optim": its.state_dict()}, ckpt)["optim"])
    assert its.state[its.param_groups[0]["params"][0]]["exp_avg"].shape == (3, 4)
    assert warnings() == []


def test_dcp_leaves_them_empty_as_torch_does_but_says_so(ckpt: str, warnings: Any) -> None:
    tilestone.save(state_of(*trained()), ckpt)
    for load in (stock.load, tilestone.dcp.load):
        state = state_of(*fresh())
        load(state, checkpoint_id=ckpt, no_dist=True)
        assert state["optim"]["state"] == {}
    (said,) = warnings()
    assert "optim.state.0.exp_avg" in said
