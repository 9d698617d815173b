"""Arrays that are filled: read(out=) and load into memory of every kind."""

from __future__ import annotations

import mmap
import pathlib
import warnings
from typing import Any

import numpy
import pytest
import torch

import tilestone

STORED = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)


@pytest.fixture
def stored(ckpt: str) -> str:
    tilestone.save({"x": STORED, "c": STORED.astype(numpy.complex64) * (1 + 2j)}, ckpt)
    return ckpt


def _records() -> Any:
    return numpy.zeros((3, 4), [("a", "u1"), ("x", "f4"), ("b", "u1")])["x"]


def _misaligned() -> Any:
    return numpy.zeros(49, numpy.uint8)[1:].view(numpy.float32).reshape(3, 4)


FILLED = {
    "contiguous": lambda: numpy.zeros((3, 4), "f4"),
    "foreign byte order": lambda: numpy.zeros((3, 4), ">f4"),
    "record field": _records,
    "misaligned": _misaligned,
    "foreign record field": lambda: numpy.zeros((3, 4), [("a", "u1"), ("x", ">f4")])["x"],
    "transposed": lambda: numpy.zeros((4, 3), "f4").T,
    "reversed": lambda: numpy.zeros((3, 4), "f4")[::-1, ::-1],
    "memmap": lambda: numpy.memmap("/dev/zero", "f4", "c", shape=(3, 4)),
    "tensor": lambda: torch.zeros(3, 4),
    "leaf": lambda: torch.zeros(3, 4, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3, 4)),
    "offset": lambda: torch.zeros(100)[7:55].reshape(4, 12)[:3, 2:10:2],
    "inference": lambda: _inference(),
    "negated": lambda: torch.zeros(3, 4, dtype=torch.complex64).conj().imag,
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 4)


@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.parametrize("way", ["read", "box", "load", "sharded"])
def test_memory_of_every_kind_is_filled_in_place(kind: str, way: str, stored: str) -> None:
    out = FILLED[kind]()
    if way == "read":
        assert tilestone.open(stored).read("x", out=out) is out
    elif way == "box":
        assert tilestone.open(stored)["x"].read(((0, 3), (0, 4)), out=out) is out
    elif way == "load":
        assert tilestone.load({"x": out}, stored)["x"] is out
    else:
        part = tilestone.ShardedTensor.from_box("x", out, (3, 4), ((0, 3), (0, 4)))
        assert tilestone.load({"any": part}, stored)["any"] is out
    assert out.tolist() == STORED.tolist()


@pytest.mark.parametrize("way", ["read", "load"])
def test_a_lazily_conjugated_tensor_is_filled(way: str, stored: str) -> None:
    base = torch.zeros(3, 4, dtype=torch.complex64)
    out = base.conj()
    if way == "read":
        tilestone.open(stored).read("c", out=out)
    else:
        assert tilestone.load({"c": out}, stored)["c"] is out
    assert out[1, 1] == 5 + 10j and base[1, 1] == 5 - 10j


def _read_only_map(folder: pathlib.Path) -> Any:
    path = folder / "map"
    path.write_bytes(bytes(48))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 48, prot=mmap.PROT_READ)
    return numpy.frombuffer(mapped, "f4").reshape(3, 4)


def _mapped(folder: pathlib.Path, mode: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor over a file mapping. torch does not know whether it is writable."""
    path = folder / "mapped"
    path.write_bytes(bytes(8 << 20))
    array = numpy.memmap(path, numpy.uint8, mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array).view(dtype)


MAPPED = {
    "start": lambda flat: flat[:12].reshape(3, 4),
    "end": lambda flat: flat[-12:].reshape(3, 4),
    "large gaps": lambda flat: flat.as_strided((3, 4), (400_000, 3)),
    "parameter": lambda flat: torch.nn.Parameter(flat[:12].reshape(3, 4)),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_a_tensor_on_a_read_only_map_is_refused_with_its_key(
    kind: str, stored: str, tmp_path: pathlib.Path
) -> None:
    out = MAPPED[kind](_mapped(tmp_path, "r"))
    calls: list[Any] = [
        lambda: tilestone.open(stored).read("x", out=out),
        lambda: tilestone.load({"c": torch.zeros(3, 4, dtype=torch.complex64), "x": out}, stored),
        lambda: tilestone.load(
            {"a": [tilestone.ShardedTensor.from_box("x", out, (3, 4), ((0, 3), (0, 4)))]}, stored
        ),
    ]
    for call in calls:
        with pytest.raises(tilestone.InvalidArgumentError, match="read-only") as raised:
            call()
        assert raised.value.key == "x"
    assert not out.any()


@pytest.mark.parametrize("kind", MAPPED)
@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_tensor_on_a_writable_map_is_filled(
    kind: str, mode: str, stored: str, tmp_path: pathlib.Path
) -> None:
    out = MAPPED[kind](_mapped(tmp_path, mode))
    assert tilestone.open(stored).read("x", out=out) is out
    assert out.tolist() == STORED.tolist()
    with torch.no_grad():
        out.zero_()
    assert tilestone.load({"x": out}, stored)["x"] is out
    assert out.tolist() == STORED.tolist()


def test_a_conjugated_tensor_on_a_read_only_map_is_refused(
    stored: str, tmp_path: pathlib.Path
) -> None:
    out = _mapped(tmp_path, "r", torch.complex64)[:12].reshape(3, 4).conj()
    for call in (
        lambda: tilestone.open(stored).read("c", out=out),
        lambda: tilestone.load({"c": out}, stored),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match="read-only") as raised:
            call()
        assert raised.value.key == "c"


class ReadOnly:
    """A read-only array that supports DLPack."""

    def __init__(self) -> None:
        self.array = numpy.zeros((3, 4), "f4")
        self.array.flags.writeable = False

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


READ_ONLY = {
    "bytes": lambda folder: numpy.frombuffer(bytes(48), "f4").reshape(3, 4),
    "map": _read_only_map,
    "broadcast": lambda folder: numpy.broadcast_to(numpy.zeros(4, "f4"), (3, 4)),
    "dlpack": lambda folder: ReadOnly(),
}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only_memory_is_refused_by_read_and_replaced_by_load(
    kind: str, stored: str, tmp_path: pathlib.Path
) -> None:
    out = READ_ONLY[kind](tmp_path)
    before = bytes(numpy.asarray(getattr(out, "array", out)))
    with pytest.raises(tilestone.InvalidArgumentError, match="read-only"):
        tilestone.open(stored).read("x", out=out)
    loaded = tilestone.load({"x": out}, stored)["x"]
    assert loaded is not out and loaded.tolist() == STORED.tolist()
    assert bytes(numpy.asarray(getattr(out, "array", out))) == before


class Strided:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def _windows() -> Any:
    return numpy.lib.stride_tricks.as_strided(numpy.zeros(6, "f4"), (3, 4), (4, 4))


SHARED = {
    "expanded": lambda: torch.zeros(4).expand(3, 4),
    "windows": lambda: torch.zeros(6).as_strided((3, 4), (1, 1)),
    "numpy expanded": lambda: numpy.lib.stride_tricks.as_strided(
        numpy.zeros(4, "f4"), (3, 4), (0, 4)
    ),
    "numpy windows": _windows,
    "dlpack expanded": lambda: Strided(torch.zeros(4).expand(3, 4)),
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "sparse": lambda: torch.zeros(3, 4).to_sparse(),
    "list": lambda: [0.0] * 12,
    "text": lambda: numpy.full((3, 4), "text"),
}


@pytest.mark.parametrize("kind", SHARED)
def test_memory_without_a_place_for_each_element_is_refused(kind: str, stored: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.open(stored).read("x", out=SHARED[kind]())
    if kind not in ("meta", "list", "text"):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.load({"x": SHARED[kind]()}, stored)
        assert raised.value.key == "x"


@pytest.mark.parametrize("way", ["read", "load", "module"])
def test_autograd_notices_a_load_in_place(way: str, stored: str, tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    product = (weight * weight).sum()  # saves weight for backward
    if way == "read":
        tilestone.open(stored).read("x", out=weight)
    elif way == "load":
        tilestone.load({"a": [{"b": tilestone.LocalNonpersistent(weight)}], "x": weight}, stored)
    else:
        module = torch.nn.Module()
        module.weight = weight
        tilestone.save({"m": module}, tmp_path / "m")
        tilestone.load({"m": module}, tmp_path / "m")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_values_that_are_not_loaded_keep_their_version(stored: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    product = (weight * weight).sum()
    tilestone.load({"kept": tilestone.LocalNonpersistent(weight), "x": torch.zeros(3, 4)}, stored)
    product.backward()
