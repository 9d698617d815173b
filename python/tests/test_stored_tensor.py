"""Indexing of stored tensors, and other ways to read an open checkpoint that arrays and dicts have."""

from __future__ import annotations

import pathlib

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import basic_indices

import tilestone

ARRAY = numpy.arange(4 * 5 * 6, dtype=numpy.float32).reshape(4, 5, 6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("stored") / "ckpt")
    model = torch.nn.Linear(3, 2)
    state = {
        "a": ARRAY, "bf": torch.ones(2, 3, dtype=torch.bfloat16), "none": numpy.array(7.0),
        "model": {**model.state_dict(), "extra": {"x": 1}},
    }  # fmt: skip
    tilestone.save(state, made)
    return made


@settings(max_examples=200, deadline=None)
@given(index=basic_indices(ARRAY.shape, allow_newaxis=False))
def test_indexing_is_numpys(path: str, index: object) -> None:
    for framework in ("numpy", "torch"):
        with tilestone.open(path, framework=framework) as ckpt:
            numpy.testing.assert_array_equal(numpy.asarray(ckpt["a"][index]), ARRAY[index])


@pytest.mark.parametrize("index", [4, -5, (0, 0, 6)])
def test_an_integer_outside_is_an_index_error(path: str, index: object) -> None:
    with tilestone.open(path) as ckpt, pytest.raises(tilestone.InvalidArgumentError) as raised:
        ckpt["a"][index]
    assert isinstance(raised.value, IndexError) and "(4, 5, 6)" in str(raised.value)
    with tilestone.open(path) as ckpt:
        assert len(list(ckpt["a"])) == len(ckpt["a"]) == 4


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., ...), None, True, "x", 1.5, [0, 1]])
def test_what_is_no_basic_index_is_refused(path: str, index: object) -> None:
    with tilestone.open(path) as ckpt, pytest.raises(tilestone.InvalidArgumentError) as raised:
        ckpt["a"][index]
    assert raised.value.key == "a"


def test_a_stored_tensor_becomes_an_array(path: str) -> None:
    with tilestone.open(path) as ckpt:
        numpy.testing.assert_array_equal(numpy.asarray(ckpt["a"]), ARRAY)
        assert numpy.asarray(ckpt["a"], dtype="f8").dtype == numpy.float64
        with pytest.raises(ValueError, match="without a copy"):
            numpy.asarray(ckpt["a"], copy=False)
        assert torch.equal(ckpt["bf"].torch(), torch.ones(2, 3, dtype=torch.bfloat16))
        assert ckpt["none"].numpy() == 7 and ckpt["none"][()] == 7 and ckpt["none"].ndim == 0
        assert ckpt["a"].size == 120 and ckpt["a"].nbytes == 480


def test_a_part_of_the_state_is_read_as_a_state_dict(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    with tilestone.open(path) as ckpt:
        read = ckpt.state_dict("model.", into="torch")
        assert read.pop("extra.x") == 1
        model.load_state_dict(read)
        assert set(ckpt.state_dict()) == set(ckpt.keys())
        with pytest.raises(tilestone.NotFoundError, match=r"modle\."):
            ckpt.state_dict("modle.")
        assert ckpt.keys("model.*") == [key for key in ckpt.keys() if key.startswith("model.")]
        assert ckpt.keys("a", "b?") == ["a", "bf"] and ckpt.keys("A") == []
        assert ckpt.get("nothing") is None and ckpt.get("a").key == "a"
        assert "torch_dist" in repr(ckpt) and "480" not in str(ckpt["a"])


def test_only_the_box_of_an_index_is_read(tmp_path: pathlib.Path) -> None:
    made = str(tmp_path / "ckpt")
    tilestone.save({"a": numpy.zeros((64, 1 << 20), numpy.uint8)}, made)
    with tilestone.open(made) as ckpt:
        assert ckpt["a"][-1].shape == (1 << 20,)
        file = next(tmp_path.glob("ckpt/*.distcp"))
        with file.open("r+b") as data:
            data.truncate(file.stat().st_size // 2)  # the rows behind are lost
        assert ckpt["a"][3, ::2].shape == (1 << 19,)
