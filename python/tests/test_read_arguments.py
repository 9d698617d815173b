"""Errors of open(...).read, similar functions and entities for invalid arguments."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy
import pytest

import tilestone


@pytest.fixture
def opened(tmp_path: pathlib.Path) -> tilestone.Checkpoint:
    tilestone.save({"m": {"x": numpy.arange(12, dtype="f4").reshape(3, 4)}, "o": {1}}, tmp_path / "c")
    return tilestone.open(tmp_path / "c")


BAD_BOXES: list[Any] = [
    ((0, 1),),
    ((0, 3), (0, 4), (0, 1)),
    (),
    ((-1, 2), (0, 4)),
    ((2, 1), (0, 4)),
    ((0, 3), (0, 5)),
    ((0, 1.5), (0, 4)),
    ((0, None), (0, 4)),
    (None, None),
    ((0, 3, 1), (0, 1)),
    ((0, 2**70), (0, 1)),
    ((0, 2**63), (0, 1)),
    ((-(2**63), 2**63 - 1), (0, 1)),
    (slice(0, 2, 2), slice(0, 1)),
    (slice(0, 2), slice(None)),
    (("a", "b"), (0, 1)),
    (b"ab", b"ab"),
    "ab",
    "0:1",
    5,
    0.5,
    False,
    {0: 1},
    pytest.param(object(), id="object"),
    tilestone.geometry.Box([0], [1]),
    tilestone.geometry.Box([0, 0], [9, 9]),
]


@pytest.mark.parametrize("box", BAD_BOXES, ids=repr)
def test_a_bad_box_is_refused_with_key_box_and_shape(box: Any, opened: tilestone.Checkpoint) -> None:
    for read in (
        lambda: opened.read("m.x", box),
        lambda: opened["m.x"].read(box),
        lambda: opened.read("m.x", box, out=numpy.zeros((3, 4), "f4")),
    ):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            read()
        assert raised.value.key == "m.x"
        assert repr(box) in str(raised.value) and "(3, 4)" in str(raised.value)
        assert "(key m.x)" in str(raised.value)


def test_boxes_of_every_kind_are_read(opened: tilestone.Checkpoint) -> None:
    boxes: list[Any] = [
        ((0, 2), (1, 3)),
        [slice(0, 2), slice(1, 3, 1)],
        numpy.array([[0, 2], [1, 3]]),
        tilestone.geometry.Box([0, 1], [2, 2]),
    ]
    for box in boxes:
        assert opened.read("m.x", box).tolist() == [[1, 2], [5, 6]]
    assert opened.read("m.x", ((3, 3), (4, 4))).shape == (0, 0)


@pytest.mark.parametrize("key", [None, 5, b"m.x", ["m.x"], "half a pair: \ud800"])
def test_a_key_that_is_not_text_is_refused_by_name(key: Any, opened: tilestone.Checkpoint) -> None:
    for call in (opened.read, opened.object, opened.object_bytes, opened.path_of, opened.__getitem__):
        with pytest.raises(tilestone.InvalidArgumentError, match="key must be a (valid Unicode )?string, not"):
            call(key)
    assert key not in opened


@pytest.mark.parametrize("index", [slice(0, 1.5), slice("a"), slice(0, 1, 0)])
def test_a_bad_index_of_a_stored_tensor_names_its_key(index: Any, opened: tilestone.Checkpoint) -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        opened["m.x"][index]
    assert raised.value.key == "m.x"


def test_an_unknown_framework_of_a_read_is_refused(opened: tilestone.Checkpoint) -> None:
    for framework in ("jax", 5, ["numpy"]):
        with pytest.raises(tilestone.InvalidArgumentError, match="framework"):
            opened.read("m.x", framework=framework)  # type: ignore[arg-type]


OUTS: list[Any] = [
    [1],
    "x",
    numpy.zeros((3, 4), "O"),
    numpy.zeros((4, 3), "f4"),
    numpy.zeros((3, 4)),
    numpy.float32(3),
    bytearray(48),
    numpy.frombuffer(bytes(48), "f4").reshape(3, 4),
    numpy.ma.zeros((3, 4), "f4"),
]


@pytest.mark.parametrize("out", OUTS, ids=lambda out: type(out).__name__)
def test_an_out_that_is_not_filled_is_refused_with_the_key(
    out: Any, opened: tilestone.Checkpoint
) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="key m.x") as raised:
        opened.read("m.x", out=out)
    assert raised.value.key == "m.x"


def test_an_entity_without_an_array_names_its_key() -> None:
    for data in (None, [1.0], "text"):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.ShardedTensor.from_rank_offsets("w", data, (0, 0, 1))
        assert raised.value.key == "w"


def test_a_container_that_holds_itself_is_refused_with_the_inner_key(
    tmp_path: pathlib.Path,
) -> None:
    many: list[Any] = [numpy.ones(2)]
    many.append({"again": many})
    one: dict[str, Any] = {}
    one["x"] = {"y": one}
    twice = {"x": numpy.ones(2)}
    for state, key in (({"a": many}, "a.1.again"), ({"b": one}, "b.x.y"), (one, "x.y")):
        for call in (tilestone.save, tilestone.load):
            with pytest.raises(tilestone.InvalidArgumentError, match="holds itself") as raised:
                call(state, tmp_path / "c")
            assert raised.value.key == key
    tilestone.save({"a": twice, "b": [twice, twice]}, tmp_path / "c")


def test_an_opaque_of_wrong_fields_is_refused_with_its_key(tmp_path: pathlib.Path) -> None:
    bad = [
        tilestone.Opaque("call", 5, "b"),  # type: ignore[arg-type]
        tilestone.Opaque("call", "a", "b", args=5),  # type: ignore[arg-type]
        tilestone.Opaque("call", "a", "b", entries=[]),  # type: ignore[arg-type]
        tilestone.Opaque("new", "a", "b", has_state=None),  # type: ignore[arg-type]
    ]
    for opaque in bad:
        with pytest.raises(tilestone.InvalidArgumentError, match="of an Opaque has the wrong type") as raised:
            tilestone.save({"m": {"o": opaque}}, tmp_path / "c")
        assert raised.value.key == "m.o"


def test_an_error_made_in_python_shows_key_and_hint() -> None:
    error = tilestone.InvalidArgumentError("no", key="a.b", hint="try yes")
    assert str(error) == "no (key a.b); try yes"
    error.add_rank(3)
    assert str(error) == "no (key a.b) (rank 3); try yes"


def test_a_key_of_nothing_or_of_the_other_kind_is_named(tmp_path: pathlib.Path) -> None:
    tilestone.save({"weight": numpy.ones(2), "step": 3, "opt": {"lr": 1}}, tmp_path / "c")
    with tilestone.open(tmp_path / "c") as opened:
        for call, key, said in (
            (opened.__getitem__, "wieght", "nothing under this key (key wieght); similar keys: weight"),
            (opened.__getitem__, "opt", "nothing under this key (key opt); there are keys below it, such as opt.lr"),
            (opened.read, "step", "the checkpoint has an object under this key, no tensor"),
            (opened.object, "weight", "the checkpoint has a tensor under this key, no object"),
        ):
            with pytest.raises(tilestone.NotFoundError) as raised:
                call(key)
            assert said in str(raised.value)
            assert raised.value.key == key
