"""Stateful objects at any depth; templates without state or memory."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestone
from ranks import Raised, Worlds


class Counter:
    """A Stateful of plain values."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Scalar(Counter):
    """A Stateful whose state is not a dict."""

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


def trained(kind: type = torch.optim.Adam, seed: int = 3) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def fresh(kind: type = torch.optim.Adam) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    return model, kind(model.parameters(), lr=0.5)


def assert_equal_states(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    else:
        assert a == b


def test_statefuls_anywhere_in_the_tree_are_given_their_state(ckpt: str) -> None:
    model, optimizer = trained()
    state = {
        "train": {"parts": [model, {"opt": optimizer}], "user": collections.UserDict(c=Counter(3))},
        "scalars": [Scalar(7), torch.ones(1)],
    }
    tilestone.save(state, ckpt)
    with tilestone.open(ckpt) as opened:
        assert "train.parts.0.0.weight" in opened and "train.user.c.count" in opened
        assert "train.parts.1.opt.state.0.exp_avg" in opened and opened["scalars.0"] == 7
    other, other_optimizer = trained(seed=9)
    counter, scalar = Counter(0), Scalar(0)
    wanted = {
        "train": {
            "parts": [other, {"opt": other_optimizer}],
            "user": collections.UserDict(c=counter),
        },
        "scalars": [scalar, torch.zeros(1)],
    }
    loaded = tilestone.load(wanted, ckpt)
    assert loaded["train"]["parts"][0] is other
    assert loaded["train"]["parts"][1]["opt"] is other_optimizer
    assert loaded["train"]["user"]["c"] is counter and counter.count == 3
    assert loaded["scalars"][0] is scalar and scalar.count == 7
    assert_equal_states(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal_states(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_an_optimizer_without_state_gets_the_checkpoints(
    kind: Any, writer: str, ckpt: str
) -> None:
    model, _ = trained()
    if kind is torch.optim.LBFGS:
        optimizer = kind(model.parameters(), max_iter=3, line_search_fn=None)
        target = torch.randn(5, 2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((model(torch.ones(5, 4)) - target) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        model, optimizer = trained(kind)
    state = {"train": {"opt": optimizer.state_dict()}, "model": model.state_dict()}
    if writer == "stock":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    else:
        tilestone.save({"train": {"opt": optimizer}, "model": model}, ckpt)
    other = fresh()[0]
    other_optimizer = kind(other.parameters())
    tilestone.load({"train": {"opt": other_optimizer}, "model": other}, ckpt)
    assert_equal_states(other_optimizer.state_dict(), optimizer.state_dict())


def test_state_that_is_not_requested_is_an_error_with_keys_and_a_hint(ckpt: str) -> None:
    model = trained()[0]
    tilestone.save({"m": {"model": model, "more": 1}, "other": 2}, ckpt)
    smaller = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.load({"m": {"model": smaller}}, ckpt)
    assert raised.value.key == "m.model.1.bias"
    assert "m.model.1.weight" in str(raised.value) and "instead of the object" in raised.value.hint
    assert "more" not in raised.value.message
    # The hint's solution: a dict requests only the keys that it has.
    loaded = tilestone.load({"m": {"model": smaller.state_dict()}}, ckpt)
    assert torch.equal(loaded["m"]["model"]["0.weight"], model[0].weight)


def _stages(rank: int, world: int, ckpt: str, names: list[list[str]]) -> Any:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names[rank]})
    state = {"model": model} if rank == 0 or names[rank] else {"step": None}
    tilestone.load(state, ckpt)
    return sorted(model.state_dict())


def test_pipeline_stages_ask_for_their_parts_of_one_model(worlds: Worlds, ckpt: str) -> None:
    whole = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
    tilestone.save({"model": whole, "step": 4}, ckpt)
    for names in ([["a", "b"], ["c"]], [["a", "b", "c"], []]):
        worlds[2].run(_stages, ckpt, names)
    for result in worlds[2].collect(_stages, ckpt, [["a"], ["c"]]):
        assert isinstance(result, Raised) and result.kind == "MismatchError"
        assert result.attributes["key"] == "model.b.bias"


def _fresh_sharded(rank: int, world: int, ckpt: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))

    def make() -> tuple[torch.nn.Parameter, Any]:
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        return weight, torch.optim.Adam([weight])

    weight, optimizer = make()
    weight.sum().backward()
    optimizer.step()
    tilestone.save({"opt": optimizer}, ckpt)
    tilestone.load({"opt": make()[1]}, ckpt)


def test_sharded_state_that_an_optimizer_has_not_made_is_an_error(
    worlds: Worlds, ckpt: str
) -> None:
    for result in worlds[2].collect(_fresh_sharded, ckpt):
        assert isinstance(result, Raised) and result.kind == "MismatchError", result
        assert result.attributes["key"].startswith("opt.state.0.exp_avg")
        assert "get_optimizer_state_dict" in result.attributes["hint"]


def test_modules_on_meta_get_memory(ckpt: str) -> None:
    model = trained()[0]
    tilestone.save({"model": model, "list": [model, torch.ones(1)]}, ckpt)
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    other[1].to_empty(device="cpu")
    kept = other[1].weight
    tilestone.load({"model": other}, ckpt)
    assert_equal_states(dict(other.state_dict()), dict(model.state_dict()))
    assert other[1].weight is kept  # an optimizer may hold it
    assert isinstance(other[0].weight, torch.nn.Parameter) and other[0].weight.requires_grad


def test_a_stateful_that_stays_on_meta_is_an_error(ckpt: str) -> None:
    class Wrapper(Counter):
        def __init__(self, model: torch.nn.Module) -> None:
            self.model = model

        def state_dict(self) -> Any:
            return self.model.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.model.load_state_dict(state)

    model = torch.nn.Linear(2, 2)
    tilestone.save({"model": Wrapper(model)}, ckpt)
    with torch.device("meta"):
        other = torch.nn.Linear(2, 2)
    with pytest.raises(tilestone.InvalidArgumentError, match="meta"):
        tilestone.load({"model": Wrapper(other)}, ckpt)


def _meta_dtensors(rank: int, world: int, ckpt: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(15.0).reshape(5, 3)
    tilestone.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, ckpt)
    out = []
    for placement in (Shard(0), Shard(1), Replicate()):
        local = distribute_tensor(whole, mesh, [placement]).to_local()
        meta = DTensor.from_local(
            local.to("meta"), mesh, [placement], run_check=False, shape=(5, 3), stride=(3, 1)
        )
        loaded = tilestone.load({"w": meta}, ckpt)["w"]
        assert type(loaded) is DTensor and loaded.placements == (placement,)
        assert loaded.device_mesh == mesh and loaded.device.type == "cpu"
        out.append(loaded.full_tensor().tolist() == whole.tolist())
    return out


def test_meta_dtensors_come_back_as_dtensors(worlds: Worlds, ckpt: str) -> None:
    for result in worlds[3].run(_meta_dtensors, ckpt):
        assert result == [True, True, True]


def test_a_state_dict_that_is_another_stateful_is_refused(ckpt: str) -> None:
    wrapper = types.SimpleNamespace(load_state_dict=print)
    wrapper.state_dict = lambda: wrapper
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"a": [{"b": wrapper}]}, ckpt)
    assert raised.value.key == "a.0.b"


def test_a_parameter_on_the_meta_device_comes_back_as_a_parameter(ckpt: str) -> None:
    tilestone.save({"w": torch.ones(2), "frozen": torch.arange(3), "t": torch.ones(1)}, ckpt)
    with torch.device("meta"):
        weight = torch.nn.Parameter(torch.empty(2))
        weight.tensor_model_parallel = True
        wanted = {
            "w": weight,
            "frozen": torch.nn.Parameter(torch.empty(3, dtype=torch.int64), requires_grad=False),
            "t": torch.empty(1, requires_grad=True),
        }
    loaded = tilestone.load(wanted, ckpt)
    assert type(loaded["w"]) is type(loaded["frozen"]) is torch.nn.Parameter
    assert type(loaded["t"]) is torch.Tensor and loaded["t"].requires_grad
    assert loaded["w"].requires_grad and not loaded["frozen"].requires_grad
    assert loaded["w"].tensor_model_parallel and loaded["w"].tolist() == [1.0, 1.0]


class Tied(torch.nn.Module):
    """A weight at three places, one of them in a nested module, and a buffer at two."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 5))
        self.register_buffer("scale", torch.randn(2))
        self.inner.register_buffer("scale", torch.randn(2))
        if tied:
            self.head.weight = self.inner[0].weight = self.emb.weight
            self.inner._buffers["scale"] = self.scale


def expect_tied(model: torch.nn.Module, like: torch.nn.Module) -> None:
    assert model.head.weight is model.emb.weight is model.inner[0].weight
    assert model.inner.scale is model.scale
    assert len(list(model.parameters())) == len(list(like.parameters()))
    assert torch.equal(model.emb.weight, like.emb.weight) and model.emb.weight.requires_grad
    assert torch.equal(model.scale, like.scale) and not model.scale.is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_come_back_tied(ckpt: str, device: str) -> None:
    model = Tied()
    tilestone.save({"m": model, "other": model.emb}, ckpt)
    with torch.device(device):
        blank, other = Tied(), torch.nn.Embedding(5, 3)
    other.weight = blank.emb.weight  # a tie between two objects of the state
    tilestone.load({"m": blank, "other": other}, ckpt)
    expect_tied(blank, model)
    assert other.weight is blank.emb.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stored_values_that_differ_under_a_tie_are_refused(ckpt: str, device: str) -> None:
    apart = Tied(tied=False)
    apart.inner[0].weight.data.copy_(apart.emb.weight.data)
    scale = apart.inner.scale.clone()
    apart.inner.scale.copy_(apart.scale)
    tilestone.save({"m": apart}, ckpt)
    with torch.device(device):
        blank = Tied()
    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.load({"m": blank}, ckpt)
    assert "m.emb.weight" in str(raised.value) and "m.head.weight" in str(raised.value)
    apart.head.weight.data.copy_(apart.emb.weight.data)
    apart.inner.scale.copy_(scale)
    tilestone.save({"m": apart}, ckpt, overwrite=True)
    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.load({"m": blank}, ckpt)
    assert "m.scale" in str(raised.value) and "m.inner.scale" in str(raised.value)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_tied_entries_of_a_dict_on_meta_share_memory(ckpt: str, keep_vars: bool) -> None:
    model = Tied()
    tilestone.save(model.state_dict(), ckpt)
    with torch.device("meta"):
        blank = Tied()
    loaded = tilestone.load(blank.state_dict(keep_vars=keep_vars), ckpt)
    assert loaded["emb.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert (loaded["emb.weight"] is loaded["head.weight"]) == keep_vars
    again = tilestone.load(blank.state_dict(keep_vars=keep_vars), ckpt)
    assert loaded["emb.weight"].data_ptr() != again["emb.weight"].data_ptr()
    blank.load_state_dict(loaded, assign=True)
    assert torch.equal(blank.head.weight, model.emb.weight)
    if keep_vars:
        expect_tied(blank, model)
