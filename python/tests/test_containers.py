"""Containers of any class: flattened where stock flattens them, and restored with their class."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import pathlib
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestone
import tilestone.dcp
from tilestone._objects import containers
from ranks import Worlds


class Frozen(Mapping):
    """A Mapping whose items can't be set."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(Frozen):
    """A Mapping that can't be made from a dict."""

    def __init__(self, items: Any, more: Any) -> None:
        super().__init__(items)


class Settable(Frozen, MutableMapping):
    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._items[key]

    def __copy__(self) -> Settable:
        return Settable(self._items)


class Special(torch.Tensor):
    pass


def attributed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = 1
    return tensor


class Attributed(dict):
    pass


class Mirrored(dict):
    """A dict whose items are attributes too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Name(str):
    pass


class Color(str, enum.Enum):
    RED = "red"


class Tensors(list):
    name = "none"


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Box:
    x: Any


def named(items: Any) -> Tensors:
    out = Tensors(items)
    out.name = "kept"
    return out


CONTAINERS = {
    "UserDict": lambda a, b: collections.UserDict(a=a, b=b),
    "MappingProxyType": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "Mapping": lambda a, b: Frozen({"a": a, "b": b}),
    "MutableMapping": lambda a, b: Settable({"a": a, "b": b}),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=a, b=b),
    "OrderedDict": lambda a, b: collections.OrderedDict(a=a, b=b),
    "list": lambda a, b: named([a, b]),
}


def contents(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, Mapping) else list(container)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_containers_have_stocks_keys_and_come_back_as_they_were(
    kind: str, writer: str, ckpt: str
) -> None:
    make = CONTAINERS[kind]
    state = {"c": make(torch.arange(3.0), {"deep": torch.ones(2)}), "x": 1}
    if writer == "stock":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    else:
        tilestone.save(state, ckpt)
    names = ("0", "1") if kind == "list" else ("a", "b")
    metadata = dcp.FileSystemReader(ckpt).read_metadata()
    assert set(metadata.state_dict_metadata) == {f"c.{names[0]}", f"c.{names[1]}.deep", "x"}
    first = torch.zeros(3)
    template = make(first, {"deep": torch.zeros(2)})
    loaded = tilestone.load({"c": template, "x": None}, ckpt)
    assert type(loaded["c"]) is type(template) and contents(loaded["c"])[0] is first
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert contents(loaded["c"])[1]["deep"].tolist() == [1.0, 1.0]
    if kind == "list":
        assert loaded["c"].name == "kept"
    if kind == "defaultdict":
        assert loaded["c"].default_factory is list


def test_a_container_that_cannot_be_made_again_is_refused_with_key_and_class(ckpt: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="Stubborn") as raised:
        tilestone.save({"a": {"b": Stubborn({"x": torch.ones(2)}, 1)}}, ckpt)
    assert raised.value.key == "a.b"
    assert not pathlib.Path(ckpt, ".metadata").exists()


def test_other_attributes_of_a_container_are_logged_once_with_its_key(
    ckpt: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_logged", set())
    attributed = Attributed(x=torch.ones(1))
    attributed.note = "lost"
    ordered = collections.OrderedDict(x=torch.ones(1))
    ordered.note, ordered._metadata = 1, {}
    state = {
        "a": {"b": attributed, "again": attributed},
        "d": collections.defaultdict(int, x=1),
        "o": ordered,
        "mirrored": Mirrored(x=1),
        "model": torch.nn.Linear(2, 2).state_dict(),
        "no factory": collections.defaultdict(None, x=1),
        "user": collections.UserDict(x=1),
    }
    with caplog.at_level(logging.WARNING, "tilestone"):
        tilestone.save(state, ckpt)
        tilestone.load(state, ckpt)
    said = [record.getMessage().split(";")[0] for record in caplog.records]
    here = Attributed.__module__
    assert said == [
        f"a.b: the items of a {here}.Attributed are saved, but not its attribute note",
        "d: the items of a collections.defaultdict are saved, but not its default_factory",
        "o: the items of a collections.OrderedDict are saved, but not its attribute note",
    ]


def test_keys_that_are_not_plain_text_come_back_as_the_templates(ckpt: str) -> None:
    state = {Color.RED: torch.ones(1), Name("n"): {Color.RED: 1}, 2**70: 2, None: 3, 4: 4, "t": 5}
    tilestone.save(state, ckpt)
    loaded = tilestone.load(state, ckpt)
    assert loaded == state
    assert [type(key) for key in loaded] == [type(key) for key in state]
    assert [type(key) for key in loaded[Name("n")]] == [Color]


@pytest.mark.parametrize("place", [lambda s: (s,), lambda s: Pair(1, s), lambda s: Box([s])])
def test_a_stateful_inside_a_leaf_is_refused_with_its_key(
    place: Any, ckpt: str
) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="holds a Linear") as raised:
        tilestone.save({"a": {"b": place(torch.nn.Linear(2, 2))}}, ckpt)
    assert raised.value.key == "a.b" and "a dict or a list" in raised.value.hint
    assert not pathlib.Path(ckpt, ".metadata").exists()


def _dtensor(world: int, value: float = 0.0) -> DTensor:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0).reshape(4, 2) + value
    return distribute_tensor(whole, mesh, [Shard(0)])


def _reshard_containers(rank: int, world: int, ckpt: str) -> list[Any]:
    def tree(value: float) -> dict[str, Any]:
        return {
            "user": collections.UserDict(w=_dtensor(world, value)),
            "list": Tensors([_dtensor(world, value + 1)]),
        }

    tilestone.save(tree(10), ckpt)
    loaded = tilestone.load(tree(0), ckpt)
    assert type(loaded["user"]) is collections.UserDict and type(loaded["list"]) is Tensors
    return [loaded["user"]["w"].full_tensor().tolist(), loaded["list"][0].full_tensor().tolist()]


def test_dtensors_in_containers_are_saved_whole(worlds: Worlds, ckpt: str) -> None:
    whole = (torch.arange(8.0).reshape(4, 2) + 10).tolist()
    for got in worlds[2].run(_reshard_containers, ckpt):
        assert got == [whole, (torch.tensor(whole) + 1).tolist()]
    with tilestone.open(ckpt) as opened:
        assert opened.read("user.w").tolist() == whole  # not one rank's part


def _save_in_objects(rank: int, world: int, ckpt: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,))
    part = torch.ones(2)
    holders = {
        "namedtuple": Pair(_dtensor(world), 1),
        "tuple": (_dtensor(world),),
        "dataclass": Box([_dtensor(world)]),
        "object": types.SimpleNamespace(deep={"x": (1, _dtensor(world))}),
        "replicated": Box(distribute_tensor(part, mesh, [Replicate()])),
        "mesh": Box(mesh),
        "group": Box(torch.distributed.group.WORLD),
        "entity": Box(tilestone.ShardedTensor.from_rank_offsets("k", part, (0, rank, world))),
        "device": Box(torch.empty(3, device="meta")),
        "wrapper": Box(torch.masked.masked_tensor(part, part > 0)),
        "lambda": Box(lambda: 0),
        "optimizer in a tuple": (torch.optim.SGD([torch.nn.Parameter(_dtensor(world))]),),
        "class of tensor": (part.as_subclass(Special),),
        "tensor with attributes": (attributed(torch.ones(1)),),
    }
    said = []
    for name, holder in holders.items():
        try:
            tilestone.save({"a": {"b": holder}}, ckpt)
            said.append((name, None, None))
        except tilestone.CheckpointError as error:
            said.append((name, type(error).__name__, error.key))
    return said


def test_objects_that_hold_sharded_or_device_data_are_refused_with_their_key(
    worlds: Worlds, ckpt: str
) -> None:
    for said in worlds[2].run(_save_in_objects, ckpt):
        for name, error, key in said:
            assert (error, key) == ("InvalidArgumentError", "a.b"), name
    assert not pathlib.Path(ckpt, ".metadata").exists()


def test_what_cannot_be_pickled_is_refused_with_what_helps(ckpt: str) -> None:
    class Handle:
        def __reduce__(self) -> Any:
            raise TypeError("no")

    for item, helps in ((Handle(), "register_converter"), (lambda: 0, "leave it out")):
        for state in ({"a": item}, {"a": (1, item)}):
            with pytest.raises(tilestone.InvalidArgumentError, match="can't be pickled") as raised:
                tilestone.save(state, ckpt)
            assert raised.value.key == "a"
            if state["a"] is item:
                assert helps in raised.value.hint


def test_a_list_that_contains_itself_is_refused_with_its_key(ckpt: str) -> None:
    ring: list[Any] = [torch.ones(2)]
    ring.append(ring)
    with pytest.raises(tilestone.InvalidArgumentError, match="itself") as raised:
        tilestone.save({"ring": ring}, ckpt)
    assert raised.value.key.startswith("ring.1")


NO_MEMORY = {
    **{
        name: lambda name=name: torch.empty(4, dtype=getattr(torch, name))
        for name in ("int4", "uint4", "int1", "uint1", "uint7", "bits8", "bits4x2")
    },
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "uninitialized": lambda: torch.nn.LazyLinear(3).weight,
    "functional": lambda: torch._to_functional_tensor(torch.ones(2)),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NO_MEMORY)
@pytest.mark.parametrize("place", ["tree", "tuple", "object"])
def test_tensors_whose_elements_are_not_their_memory_are_refused(
    name: str, place: str, ckpt: str
) -> None:
    tensor = NO_MEMORY[name]()
    value = {"tree": tensor, "tuple": (tensor,), "object": Box(tensor)}[place]
    with pytest.raises(tilestone.CheckpointError) as raised:
        tilestone.save({"a": {"b": value}}, ckpt)
    assert raised.value.key == "a.b", raised.value
    assert not pathlib.Path(ckpt, ".metadata").exists()


def test_tensors_inside_a_function_transform_are_refused_with_their_key(ckpt: str) -> None:
    said: list[str] = []

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.save({"x": tensor}, ckpt)
        said.append(raised.value.key)
        return tensor.sum()

    torch.vmap(inside)(torch.ones(3, 2))
    torch.func.grad(inside)(torch.ones(3))
    assert said == ["x", "x"]


def test_arrays_that_are_more_than_their_elements_are_not_taken_for_plain_ones(ckpt: str) -> None:
    masked = numpy.ma.masked_array([1.0, 2.0], [True, False])
    tilestone.save({"x": masked}, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened.tensor_keys() == [] and opened.object_keys() == ["x"]


def test_keys_come_back_as_they_were_saved_without_a_template(ckpt: str) -> None:
    x = torch.ones(2)
    state = {
        "ints": {0: x, 1: {"a": 2}, 25: 3}, "text": {"0": x, "7": 1}, "mixed": {3: 1, "4": x, "b": 5},
        "kinds": {None: x, True: 1, 0.5: 2, (1, "a", None): 3, b"k": 4, -3: 5, "plain": 6},
        "numpy": {numpy.int64(4): 1, numpy.float64(2.5): x}, "list": [{7: x}, {"8": 1}],
        "counter": collections.Counter({2: 1, 4: 2}), 5: {6: {7: x}}, "": {8: 9},
        None: 1, 2.5: x, (1, "r"): 3, b"r": 4,
    }  # fmt: skip
    tilestone.save(state, ckpt)
    loaded = tilestone.load(ckpt)

    def expect(a: Any, b: Any) -> None:
        if isinstance(a, Mapping):
            assert isinstance(b, dict) and set(a) == set(b)
            kinds = {key: type(key) for key in b}
            for key, value in a.items():
                known = isinstance(key, (numpy.generic, str))
                assert known or kinds[next(k for k in b if k == key)] is type(key)
                expect(value, b[key])
        elif isinstance(a, list):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                expect(one, other)
        else:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    expect(state, loaded)
    stock: dict[str, Any] = {"ints": {0: torch.zeros(2), 25: 0}}
    dcp.load(stock, checkpoint_id=ckpt)  # planner_data has text
    assert torch.equal(stock["ints"][0], x) and stock["ints"]["25"] == 3


def test_the_state_of_an_optimizer_and_a_scheduler_is_whole_without_a_template(ckpt: str) -> None:
    def made(steps: int) -> tuple[Any, Any]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 25])
        for _ in range(steps):
            parameter.sum().backward()
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler

    optimizer, scheduler = made(3)
    tilestone.save({"o": optimizer, "s": scheduler}, ckpt)
    loaded = tilestone.load(ckpt)
    again, other = made(0)
    again.load_state_dict(loaded["o"])
    other.load_state_dict(loaded["s"])
    moments = next(iter(again.state.values()))
    assert torch.equal(moments["exp_avg"], next(iter(optimizer.state.values()))["exp_avg"])
    assert dict(other.milestones) == {2: 1, 4: 2, 25: 1}


EMPTY = {
    "state": {},
    "nested": {"deep": {"er": {}, "w": 1}},
    "list": [{}, [{}], {"x": {}}],
    "tuple": ({}, [{}, ()]),
    "numbers": {3: {}, 4: 5},
    "others": {None: {}},
    "ordered": collections.OrderedDict(),
    "w": [],
}


@pytest.mark.parametrize("dialect", ["pytorch", "megatron"])
@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_empty_dicts_come_back(ckpt: str, dialect: str, format: str) -> None:
    tilestone.save(EMPTY, ckpt, dialect=dialect, format=format)
    assert tilestone.load(ckpt) == EMPTY
    assert tilestone.gc(ckpt) == []
    # A template loads as it does without them.
    if dialect == "pytorch":
        assert tilestone.load({"state": {}, "w": None}, ckpt) == {"state": {}, "w": []}
        with pytest.raises(tilestone.NotFoundError, match=r"state\.0"):
            tilestone.load({"state": {0: torch.zeros(1)}}, ckpt)


def test_stock_torch_finds_in_a_checkpoint_with_empty_dicts_what_it_would_write(
    ckpt: str, tmp_path: pathlib.Path
) -> None:
    state = {"model": {"w": torch.arange(3.0)}, "optimizer": {"state": {}, "groups": [{"lr": 1}]}}
    tilestone.save(state, ckpt)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = dcp.FileSystemReader(ckpt).read_metadata()
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    wanted = {"model": {"w": torch.zeros(3)}, "optimizer": {"state": {}, "groups": [{"lr": 0}]}}
    dcp.load(wanted, checkpoint_id=ckpt, no_dist=True)
    assert wanted["optimizer"] == state["optimizer"]
    assert torch.equal(wanted["model"]["w"], state["model"]["w"])
    tilestone.dcp.save(state, checkpoint_id=tmp_path / "by_dcp", no_dist=True)
    by_dcp = dcp.FileSystemReader(tmp_path / "by_dcp").read_metadata()
    assert by_dcp.state_dict_metadata.keys() == stock.state_dict_metadata.keys()


def test_an_optimizer_that_has_not_stepped_and_a_manager_keep_empty_dicts(
    tmp_path: pathlib.Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    with tilestone.CheckpointManager(tmp_path / "run", strict=True) as manager:
        manager.save(1, {"optimizer": adam.state_dict()})
        manager.wait()
        assert tilestone.load(manager.path(1)) == {"optimizer": adam.state_dict()}
        model(torch.ones(2)).sum().backward()
        adam.step()
        manager.save(2, {"optimizer": adam.state_dict()})  # nothing is lost beside step 1
        manager.wait()
    back = tilestone.load(manager.path(1))["optimizer"]
    assert back["state"] == {}
    torch.optim.AdamW(model.parameters()).load_state_dict(back)


def test_the_order_of_dicts_stays(ckpt: str) -> None:
    numbers = {key: torch.full((1,), float(key)) for key in (10, 2, 30, 1)}
    state = {"z": numbers, "b": {"y": 1, "empty": {}, "x": torch.ones(1)}, "a": 3, "c": {}}
    for format in ("torch_dist", "zarr"):
        tilestone.save(state, ckpt, format=format, overwrite=True)
        back = tilestone.load(ckpt)
        assert list(back) == ["z", "b", "a", "c"]
        assert list(back["z"]) == [10, 2, 30, 1]
        assert list(back["b"]) == ["y", "empty", "x"]


def test_the_order_of_stocks_checkpoints_stays(ckpt: str) -> None:
    dcp.save({"z": torch.ones(1), "b": {"y": 1, "x": 2}, "a": 3}, checkpoint_id=ckpt, no_dist=True)
    back = tilestone.load(ckpt)
    assert list(back) == ["z", "b", "a"]
    assert list(back["b"]) == ["y", "x"]


def test_keys_with_the_same_text_are_refused(ckpt: str) -> None:
    for state in ({1: {"a": 1}, "1": {"b": 2}}, {"m": {None: [{"a": 1}], "None": {"b": 2}}}):
        with pytest.raises(tilestone.InvalidArgumentError, match="1|m.None"):
            tilestone.save(state, ckpt)


def test_the_log_says_that_keys_of_stocks_files_are_text(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"milestones": {2: 1, 40: 2}, "w": torch.ones(1)}, checkpoint_id=ckpt)
    with caplog.at_level(logging.INFO, "tilestone"):
        assert tilestone.load(ckpt)["milestones"] == {"2": 1, "40": 2}
        tilestone.load(ckpt)
    said = [each.getMessage() for each in caplog.records if "strings" in each.getMessage()]
    assert len(said) == 1 and "milestones" in said[0]
