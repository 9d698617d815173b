"""Registered types: types that Tilestone itself does not know."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy
import pytest
import torch
from thread_ranks import run_ranks

import tilestone


class Scaled:
    """Numbers stored as integers and a scale. It is no array; the saved values are computed."""

    def __init__(self, scale: float, numbers: list[int]) -> None:
        self.scale, self.numbers = scale, numpy.array(numbers)

    def set(self, values: numpy.ndarray) -> Scaled:
        self.numbers = numpy.rint(values / self.scale).astype(int)
        return self


@tilestone.register_converter(Scaled, restore=Scaled.set)
def values_of(item: Scaled, for_load: bool) -> numpy.ndarray:
    return numpy.zeros(item.numbers.shape) if for_load else item.numbers * item.scale


class Rows:
    """A rank's rows of a table, in a class of its own."""

    def __init__(self, first: int, total: int, data: Any) -> None:
        self.first, self.total, self.data = first, total, data


def sharded(item: Rows, for_load: bool) -> tilestone.ShardedTensor:
    box = ((item.first, item.first + len(item.data)),)
    return tilestone.ShardedTensor.from_box("rows", item.data, (item.total,), box)


tilestone.register_converter(Rows, sharded, restore=lambda item, loaded: ("rows", item, loaded))


def test_a_registered_type_is_saved_as_what_its_converter_makes(ckpt: str) -> None:
    tilestone.save({"a": {"b": Scaled(0.5, [2, 4])}, "list": [Scaled(2.0, [1]), 1]}, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened.tensor_keys() == ["a.b", "list.0"]
        assert opened.read("a.b").tolist() == [1.0, 2.0]
    template = {"a": {"b": Scaled(0.25, [0, 0])}, "list": [Scaled(1.0, [0]), None]}
    loaded = tilestone.load(template, ckpt)
    assert loaded["a"]["b"] is template["a"]["b"] and loaded["list"][0] is template["list"][0]
    assert loaded["a"]["b"].numbers.tolist() == [4, 8]
    assert loaded["list"][0].numbers.tolist() == [2] and loaded["list"][1] == 1


def test_a_registered_type_may_be_the_data_of_an_entity(ckpt: str) -> None:
    whole = [3, 1, 4, 1, 5, 9]

    def run(comm: tilestone.Communicator) -> None:
        def entity(scale: float, numbers: list[int]) -> tilestone.ShardedTensor:
            where = (0, comm.rank, comm.size)
            return tilestone.ShardedTensor.from_rank_offsets("w", Scaled(scale, numbers), where)

        mine = whole[comm.rank * 3 : comm.rank * 3 + 3]
        tilestone.save({"x": entity(2.0, mine)}, ckpt, group=comm)
        wanted = {"x": entity(1.0, [0, 0, 0])}
        loaded = tilestone.load(wanted, ckpt, group=comm)["x"]
        assert loaded is wanted["x"].data and loaded.numbers.tolist() == [2 * n for n in mine]

    run_ranks(2, run)
    assert tilestone.open(ckpt).read("w").tolist() == [2.0 * n for n in whole]


def test_a_converter_may_make_an_entity_and_restore_gets_what_was_loaded(ckpt: str) -> None:
    def save(comm: tilestone.Communicator) -> None:
        data = numpy.arange(3.0) + 3 * comm.rank
        tilestone.save({"t": [Rows(3 * comm.rank, 6, data)]}, ckpt, group=comm)

    run_ranks(2, save)
    item = Rows(1, 6, torch.zeros(4, dtype=torch.float64))
    word, same, loaded = tilestone.load({"t": [item]}, ckpt)["t"][0]
    assert word == "rows" and same is item and loaded is item.data
    assert loaded.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_without_restore_a_load_gives_back_the_array_that_was_filled(ckpt: str) -> None:
    class Wrapped:
        array = numpy.arange(4.0)

    tilestone.register_converter(Wrapped, lambda item, for_load: item.array)
    tilestone.save({"x": Wrapped()}, ckpt)
    wanted = Wrapped()
    wanted.array = numpy.zeros(4)
    assert tilestone.load({"x": wanted}, ckpt)["x"] is wanted.array
    assert wanted.array.tolist() == [0.0, 1.0, 2.0, 3.0]


@dataclasses.dataclass
class Holder:
    held: Any


@pytest.mark.parametrize("place", [lambda s: (s,), Holder], ids=["tuple", "object"])
def test_a_registered_type_inside_a_leaf_is_refused_with_its_key(place: Any, ckpt: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="Scaled") as raised:
        tilestone.save({"a": {"b": place(Scaled(1.0, [1]))}}, ckpt)
    assert raised.value.key == "a.b"
    assert not pathlib.Path(ckpt, ".metadata").exists()


@pytest.mark.parametrize("made", [[1.0], None, {"x": 1}, numpy.array([None]), Scaled(1.0, [1])])
def test_a_converter_that_makes_no_array_and_no_entity_is_an_error_with_the_key(
    made: Any, ckpt: str
) -> None:
    class Odd:
        pass

    tilestone.register_converter(Odd, lambda item, for_load: made)
    with pytest.raises(tilestone.InvalidArgumentError, match="converter of Odd") as raised:
        tilestone.save({"a": {"b": Odd()}}, ckpt)
    assert raised.value.key == "a.b"


@pytest.mark.parametrize("step", ["convert", "restore"])
def test_an_exception_of_a_converter_is_raised_with_the_key(step: str, ckpt: str) -> None:
    class Failing(Scaled):
        pass

    def fail(*_: object) -> Any:
        raise LookupError("out of order")

    tilestone.save({"a": {"b": numpy.ones(2)}}, ckpt)
    convert = fail if step == "convert" else values_of
    tilestone.register_converter(Failing, convert, restore=fail)
    with pytest.raises(LookupError, match="out of order") as raised:
        tilestone.load({"a": {"b": Failing(1.0, [0, 0])}}, ckpt)
    assert any("a.b" in note for note in raised.value.__notes__)


def test_the_converter_registered_last_is_used_and_a_class_may_be_meant_by_name(
    ckpt: str,
) -> None:
    class Named:
        pass

    def saved() -> Any:
        tilestone.save({"x": Named()}, ckpt, overwrite=True)
        return tilestone.open(ckpt).read("x").tolist()

    def is_named(cls: type) -> bool:
        return cls is Named

    name = f"{Named.__module__}.{Named.__qualname__}"
    for value, kind in enumerate([Named, name, is_named, Named]):
        tilestone.register_converter(kind, lambda item, for_load, n=value: numpy.array([n]))
        assert saved() == [value]


@pytest.mark.parametrize(
    "kind", [dict, list, int, bool, str, torch.Tensor, torch.nn.Parameter, "torch.Tensor", 3, None]
)
def test_types_that_converters_can_not_handle_are_refused(kind: Any) -> None:
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.register_converter(kind, lambda item, for_load: item)


def test_a_subclass_of_torchs_tensor_may_be_registered(ckpt: str) -> None:
    class Tagged(torch.Tensor):
        pass

    tilestone.register_converter(Tagged, lambda item, for_load: item.as_subclass(torch.Tensor))
    tilestone.save({"x": torch.ones(2).as_subclass(Tagged) * 3}, ckpt)
    assert tilestone.open(ckpt).read("x").tolist() == [3.0, 3.0]


def test_torchs_converters_come_when_torch_is_loaded_later_and_not_before(ckpt: str) -> None:
    code = """
        import sys, numpy, tilestone
        class Early:
            pass
        tilestone.register_converter(Early, lambda item, for_load: numpy.ones(2))
        tilestone.save({"x": Early(), "y": numpy.ones(3)}, sys.argv[1])
        assert "torch" not in sys.modules and "tilestone._torch.tensors" not in sys.modules
        import torch
        state = {"x": Early(), "y": torch.zeros(3), "z": (torch.float32, torch.ones(2))}
        tilestone.save(state, sys.argv[1], overwrite=True)
        got = tilestone.load({"y": torch.empty(3, device="meta"), "z": None}, sys.argv[1])
        assert got["y"].tolist() == [0.0] * 3 and got["z"][0] is torch.float32, got
        """
    command = [sys.executable, "-c", textwrap.dedent(code), ckpt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
