"""States of torch's own optimizers, saved and loaded with the helpers of tilestone.megatron."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from thread_ranks import run_ranks

import tilestone
from ranks import Worlds
from tilestone import megatron
from tilestone.megatron import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from tilestone.megatron.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "AdamW, amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD without": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


@torch.no_grad()
def _glu(key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, i, 2), replica_id=replica_id)
        for i, half in enumerate(t.chunk(2))
    ]


@torch.no_grad()
def _merged(halves: Any) -> torch.Tensor:
    return torch.cat(halves)


def _model(seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(name, parameter)
        for name, parameter in model.state_dict(keep_vars=True).items()
    }
    state["0.weight"] = ShardedTensorFactory("0.weight", model[0].weight, _glu, _merged)  # type: ignore[arg-type]
    return model, state


def _groups(model: Any) -> list[dict[str, Any]]:
    """The second group's parameters come before the first's in the model."""
    return [
        {"params": [model[1].weight], "weight_decay": 0.5},
        {"params": [model[0].weight, model[0].bias], "name": "first layer"},
    ]


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()


def _sharded(optimizer: Any, state: dict[str, Any], map_only: bool = False) -> dict[str, Any]:
    """The sharded state like that of Megatron-Core's optimizers: the step is common state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = get_param_id_to_sharded_param_map(state, parameters)
    found = optimizer.state_dict()
    steps = {float(each["step"]) for each in found["state"].values() if "step" in each}
    optim_state_to_sharding_state(found, numbers, exclude_keys="step")  # type: ignore[arg-type]
    if steps:
        (found["state"]["common_step"],) = steps
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_torchs_optimizers_resumes_exactly(
    tmp_path: pathlib.Path, name: str
) -> None:
    model, state = _model(1)
    optimizer = OPTIMIZERS[name](_groups(model))
    for _ in range(2):
        _step(model, optimizer)
    before = optimizer.state_dict()
    sharded = _sharded(optimizer, state)
    keys = {
        entity.key
        for states in sharded["state"].values()
        if isinstance(states, dict)
        for entity in states.values()
    }
    states = {each for states in before["state"].values() for each in states} - {"step"}
    names = ("0.weight", "0.bias", "1.weight")
    assert keys == {f"optimizer.state.{each}.{key}" for each in states for key in names}
    megatron.save({"model": state, "optimizer": sharded}, tmp_path)

    other, template = _model(2)
    fresh = OPTIMIZERS[name](_groups(other))
    _step(other, fresh)  # torch makes the states at the first step
    loaded = megatron.load({"model": template, "optimizer": _sharded(fresh, template)}, tmp_path)
    found = loaded["optimizer"]
    step = found.get("state", {}).pop("common_step", None)
    for states in found.setdefault("state", {}).values():
        states.update({} if step is None else {"step": torch.tensor(step)})
    fresh.load_state_dict(found)
    other.load_state_dict(loaded["model"])
    assert found["param_groups"] == before["param_groups"]
    _step(model, optimizer)
    _step(other, fresh)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for number, states in optimizer.state_dict()["state"].items():
        for each, tensor in states.items():
            assert torch.equal(tensor, fresh.state_dict()["state"][number][each]), each


def test_a_state_has_its_parameters_offsets_or_is_refused() -> None:
    """torch's step has no axes, and some optimizers have states that are None or numbers."""
    model, state = _model(1)
    optimizer = OPTIMIZERS["Adam"](_groups(model))
    _step(model, optimizer)
    numbers = get_param_id_to_sharded_param_map(state, _parameters(optimizer))
    assert {number: entity.key for number, entity in numbers.items()} == {
        0: "1.weight", 1: "0.weight", 2: "0.bias",
    }  # fmt: skip
    for exclude, text in (((), r"optimizer state of shape \(\)"), (("ste",), r"of shape \(\)")):
        with pytest.raises(tilestone.MismatchError, match=text) as raised:
            optim_state_to_sharding_state(optimizer.state_dict(), numbers, exclude)
        assert "exclude_keys" in raised.value.hint
    for entity in (state["0.weight"], state["0.bias"]):
        for wrong, text in ((None, "is a NoneType"), (3, "is a int"), (torch.ones(()), "shape")):
            with pytest.raises(tilestone.MismatchError, match=text):
                make_sharded_optimizer_tensor(entity, wrong, "p")  # type: ignore[arg-type]
    one = {"state": {}, "param_groups": [{"params": [0]}]}
    optim_state_to_sharding_state(one, numbers)
    assert isinstance(one["param_groups"][0]["params"], LocalNonpersistentObject)  # type: ignore[index]


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _dtensors(rank: int, world: int, path: str) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0).reshape(4, 2)

    def make() -> tuple[Any, Any, dict[str, Any]]:
        parameter = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
        with torch.no_grad():
            local = parameter.to_local()  # type: ignore[attr-defined]
        entity = ShardedTensor.from_rank_offsets("w", local, (0, rank, world))
        return parameter, torch.optim.Adam([parameter], lr=0.5), {"w": entity}

    parameter, adam, state = make()
    (parameter * parameter).sum().backward()
    adam.step()
    sharded = _sharded(adam, state)
    moment = adam.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor)
    (entity,) = (sharded["state"][0][each] for each in ("exp_avg",))
    assert entity.key == "optimizer.state.exp_avg.w" and entity.global_offset == (2 * rank, 0)
    assert torch.equal(entity.data, moment.to_local())
    megatron.save({"model": state, "optimizer": sharded}, path)
    other, fresh, template = make()
    (other * 0).sum().backward()
    fresh.step()
    megatron.load({"model": template, "optimizer": _sharded(fresh, template)}, path)
    for name in ("exp_avg", "exp_avg_sq"):  # loaded in place
        found = fresh.state[other][name].to_local()
        assert torch.equal(found, adam.state[parameter][name].to_local())


def test_states_of_dtensor_parameters_are_their_local_parts(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_dtensors, str(tmp_path / "a"))


def _experts(seed: int, rank: int, own_keys: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model on one of two expert-parallel ranks, with `from_param` for its parameters."""
    torch.manual_seed(seed + rank)
    model = torch.nn.ModuleDict({"experts": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2)})
    rules = tilestone.PlacementRules({"experts": {"ep": tilestone.geometry.Shard(0)}})
    mesh = tilestone.geometry.Mesh((2,), names=["ep"])
    state = {}
    for name, parameter in model.named_parameters():
        key = name if own_keys else None
        state[name] = tilestone.ShardedTensor.from_param(parameter, mesh, rules, key=key, rank=rank)
    return model, state


def _expert_state(
    seed: int, rank: int, own_keys: bool
) -> tuple[dict[str, Any], torch.nn.Module, torch.optim.Optimizer]:
    model, state = _experts(seed, rank, own_keys)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    found = get_param_id_to_sharded_param_map(state, model.parameters())
    assert [found[n] for n in range(4)] == list(state.values())
    sharded = optimizer.state_dict()
    optim_state_to_sharding_state(sharded, found, ("step",))  # type: ignore[arg-type]
    # The keys in the checkpoint: rules keep applying to the names of the parameters.
    megatron.utils.add_prefix_for_sharding(state, "module.")
    megatron.utils.replace_prefix_for_sharding(state, "module.", "old.")
    megatron.utils.apply_prefix_mapping(state, {"old.experts": "moe", "old.head": "output"})
    with pytest.raises(ValueError, match="moe.weight"):
        megatron.utils.replace_prefix_for_sharding(state, "module.", "")
    return {"model": state, "optimizer": sharded}, model, optimizer


@pytest.mark.parametrize("own_keys", [True, False])
def test_parameters_from_param_are_found_renamed_and_have_optimizer_states(
    tmp_path: pathlib.Path, own_keys: bool
) -> None:
    made = [_expert_state(1, rank, own_keys) for rank in range(2)]
    path = str(tmp_path)

    def save(comm: tilestone.Communicator) -> None:
        tilestone.save(made[comm.rank][0], path, group=comm, dialect="megatron", overwrite=True)

    def load(comm: tilestone.Communicator) -> None:
        state, model, optimizer = _expert_state(7, comm.rank, own_keys)
        tilestone.load(state, path, group=comm)
        trained, moments = made[comm.rank][1], made[comm.rank][2].state_dict()["state"]
        pairs = zip(model.experts.parameters(), trained.experts.parameters(), strict=True)
        assert all(torch.equal(ours, saved) for ours, saved in pairs)
        for number in (0, 1):
            found = optimizer.state_dict()["state"][number]["exp_avg"]
            assert torch.equal(found, moments[number]["exp_avg"])

    run_ranks(2, save)
    stored = tilestone.load(path)
    assert stored["moe.weight"].shape == (8, 3) and stored["output.bias"].shape == (2,)
    assert stored["optimizer.state.exp_avg.experts.weight"].shape == (8, 3)
    assert stored["optimizer.state.exp_avg_sq.head.bias"].shape == (2,)
    run_ranks(2, load)
    entity = made[0][0]["model"]["experts.weight"]
    with pytest.raises(tilestone.MismatchError, match="old.experts|moe.weight"):
        make_sharded_optimizer_tensor(entity, torch.zeros(1), "optimizer.state.x")
