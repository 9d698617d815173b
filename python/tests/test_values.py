"""Objects: plain data, foreign classes, hostile pickles."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pathlib
import pickle
import subprocess
import sys
import zipfile

import numpy
import pytest
import torch

import tilestone
from tilestone._objects import pickling


class Colour(enum.Enum):
    RED = 1


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b


PLAIN = {
    "none": None,
    "true": True,
    "int": -7,
    "int64": [2**63 - 1, -(2**63)],
    "big": [2**63, -(2**63) - 1, 2**200, -(2**200)],
    "float": [0.1, float("inf"), -0.0, 5e-324],
    "text": ["", "ключ/слой ✓", "\x00\n", "\U0001f642"],
    "bytes": [b"", b"\x00\xff" * 9],
    "list": [1, [2, [3, []]]],
    "tuple": (1, (2,), ()),
    "dict": ({"a": {1: "int key", None: 2.5, True: "x"}},),
}


@pytest.mark.parametrize("key", PLAIN)
def test_plain_data_comes_back_equal_and_of_the_same_types(key: str, ckpt: str) -> None:
    tilestone.save({"x": PLAIN[key]}, ckpt)
    loaded = tilestone.load({"x": None}, ckpt)["x"]
    assert repr(loaded) == repr(PLAIN[key])


def test_a_tree_keeps_its_containers_and_keys(ckpt: str) -> None:
    def tree(value: int) -> dict:
        return collections.OrderedDict(
            inner={3: {"a": value, "empty": {}}, "list": [numpy.full(2, value), {"x": value}]},
            options=[{"lr": value}, {"lr": value}],
        )

    tilestone.save(tree(5), ckpt)
    loaded = tilestone.load(tree(0), ckpt)
    assert isinstance(loaded, collections.OrderedDict)
    assert repr(loaded) == repr(tree(5))


def test_arrays_inside_tuples_come_back_as_arrays(ckpt: str) -> None:
    state = {"rng": ("MT19937", numpy.arange(5, dtype=numpy.uint32), 624, 0.0)}
    tilestone.save(state, ckpt)
    loaded = tilestone.load({"rng": ("", numpy.zeros(5, numpy.uint32), 0, 0.0)}, ckpt)["rng"]
    assert loaded[0] == "MT19937" and loaded[2:] == (624, 0.0)
    assert isinstance(loaded[1], numpy.ndarray)
    assert loaded[1].dtype == numpy.uint32 and loaded[1].tolist() == [0, 1, 2, 3, 4]


OBJECTS = {
    "namespace": (argparse.Namespace(lr=0.1, layers=[1, 2], name="x"), {"argparse.Namespace"}),
    "enum": (Colour.RED, {"test_values.Colour"}),
    "slots": (Slots(1, 2), {"test_values.Slots"}),
}


def shown(value: object) -> str:
    return f"{value.a} {value.b}" if isinstance(value, Slots) else repr(value)


@pytest.mark.parametrize("name", OBJECTS)
def test_foreign_objects_are_opaque_unless_their_class_is_allowed(
    name: str, ckpt: str
) -> None:
    value, allow = OBJECTS[name]
    tilestone.save({"x": value}, ckpt)
    told = tilestone.load({"x": None}, ckpt)["x"]
    assert isinstance(told, tilestone.Opaque)
    made = tilestone.load({"x": None}, ckpt, allow_classes=allow)["x"]
    assert type(made) is type(value)
    assert shown(made) == shown(value)
    with tilestone.open(ckpt) as opened:
        assert shown(opened.object("x", allow_classes=allow)) == shown(value)


def test_a_namespace_is_shown_with_its_contents(ckpt: str) -> None:
    tilestone.save({"x": argparse.Namespace(lr=0.5)}, ckpt)
    with tilestone.open(ckpt) as opened:
        told = opened["x"]
    assert (told.module, told.name) == ("argparse", "Namespace")
    assert told.state == {"lr": 0.5}


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.target}",)


def test_a_hostile_pickle_in_a_checkpoint_runs_nothing(ckpt: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "executed"
    tilestone.save({"x": [Attack(str(target))], "y": 1}, ckpt)
    target.unlink(missing_ok=True)
    with tilestone.open(ckpt) as opened:
        (told,) = opened["x"]
        assert told.full_name == f"{os.system.__module__}.system"
        assert told.args == (f"touch {target}",)
        opened.verify()
    tilestone.load({"x": None, "y": None}, ckpt)
    tilestone.load({"x": None}, ckpt, allow_classes=["argparse.Namespace", "os.path"])
    command = [sys.executable, "-m", "tilestone", "ls", ckpt]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert not target.exists()


RUNS = {f"protocol {n}": None for n in range(6)} | {
    "INST": b"(S'touch %s'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch %s'\no.",
    "getattr": b"\x80\x02c__builtin__\ngetattr\ncos\npath\nX\x06\0\0\0system\x86RX\x01\0\0\0a\x85R.",
    "extension": b"\x80\x02\x82\x01X\x01\0\0\0a\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("place", ["metadata", "item"])
@pytest.mark.parametrize("how", RUNS)
def test_a_hostile_pickle_of_any_protocol_is_refused_and_runs_nothing(
    how: str, place: str, ckpt: str, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "executed"
    raw = RUNS[how]
    if raw is None:
        hostile = pickle.dumps(Attack(str(target)), protocol=int(how[-1]))
    else:
        hostile = raw % str(target).encode() if b"%s" in raw else raw
    tilestone.save({"x": "text" * 1000}, ckpt)
    if place == "metadata":
        file = pathlib.Path(ckpt, ".metadata")
        file.write_bytes(hostile)
    else:  # the place where torch.load would run it
        (file,) = pathlib.Path(ckpt).glob("*.distcp")
        file.write_bytes(hostile + file.read_bytes()[len(hostile) :])
    refused, named = tilestone.UnsafeError, "system"
    if place == "item":
        refused, named = tilestone.CorruptError, "zip header"
    elif how in ("protocol 0", "INST", "OBJ"):
        refused, named = tilestone.UnsupportedError, "protocols 0 and 1"
    elif how == "extension":
        named = "extension code"
    with pytest.raises(refused) as raised, tilestone.open(
        ckpt, checks=tilestone.Checks(checksums=False)
    ) as opened:
        opened["x"]
    assert named in raised.value.message and raised.value.file.endswith(file.name)
    command = [sys.executable, "-m", "tilestone", "verify", ckpt]
    done = subprocess.run(command, capture_output=True, text=True)
    codes = {tilestone.UnsafeError: 4, tilestone.CorruptError: 1, tilestone.UnsupportedError: 2}
    assert done.returncode == codes[refused], done.stderr
    assert not target.exists()


def test_an_unallowed_object_stays_opaque_inside_an_allowed_one(ckpt: str) -> None:
    tilestone.save({"x": argparse.Namespace(inner=Colour.RED)}, ckpt)
    made = tilestone.load({"x": None}, ckpt, allow_classes=["argparse.Namespace"])["x"]
    assert isinstance(made, argparse.Namespace)
    assert isinstance(made.inner, tilestone.Opaque)


def test_invalid_unicode_text_survives(ckpt: str) -> None:
    tilestone.save({"x": "lone \ud800 surrogate"}, ckpt)
    assert tilestone.load({"x": None}, ckpt)["x"] == "lone \ud800 surrogate"


def test_two_dict_keys_that_become_one_are_refused(ckpt: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"a": {None: 1, "None": 2}}, ckpt)
    assert raised.value.key == "a.None"
    assert not zipfile.is_zipfile(ckpt)


def test_dicts_with_tuple_keys_are_values_like_those_with_other_keys(
    monkeypatch: pytest.MonkeyPatch, ckpt: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("Python was asked to pickle a plain value")

    plain = {(1, "a"): 1, ((2, None), 0.5, True): [2], (): b"x", "k": 3, None: 4, 1.5: 5, False: 6}
    state = {"leaf": (plain,), "tree": plain}
    with monkeypatch.context() as patch:
        patch.setattr(pickling, "dumps", refuse)
        tilestone.save(state, ckpt)
    loaded = tilestone.load({"leaf": None, "tree": dict.fromkeys(plain)}, ckpt)
    assert loaded == state
    assert [type(key) for key in loaded["leaf"][0]] == [type(key) for key in plain]
    assert torch.load(io.BytesIO(tilestone.open(ckpt).object_bytes("leaf"))) == (plain,)
