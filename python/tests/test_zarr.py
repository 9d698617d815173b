"""Compares the zarr format with the zarr package and tensorstore."""

from __future__ import annotations

import io
import json
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  # makes numpy know "bfloat16", as zarr 2 needs it
import numpy
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from thread_ranks import run_ranks

import tilestone

Array = NDArray[Any]
Reader = Callable[[pathlib.Path], Array]
GOLDEN = pathlib.Path(__file__).resolve().parent.parent.parent / "tests" / "golden"
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
]  # fmt: skip


def by_zarr(path: pathlib.Path) -> Array:
    return numpy.asarray(zarr.open_array(str(path), mode="r")[...])


def by_tensorstore(path: pathlib.Path) -> Array:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return numpy.asarray(tensorstore.open(spec).result().read().result())


READERS = pytest.mark.parametrize("read", [by_zarr, by_tensorstore])


def values(shape: tuple[int, ...], dtype: str) -> Array:
    count = int(numpy.prod(shape))
    return (numpy.arange(count) % 113).astype(dtype).reshape(shape)


def same(found: Array, wanted: Array) -> bool:
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


def cells(whole: Array, cell: tuple[int, ...], rank: int, ranks: int) -> list[Any]:
    """The shards of one rank: every ranks-th cell of the grid."""
    grid = [range(0, n, c) for n, c in zip(whole.shape, cell, strict=True)]
    places = numpy.array(numpy.meshgrid(*grid, indexing="ij")).reshape(len(grid), -1).T
    shards = []
    for place in places[rank::ranks]:
        offset = tuple(int(at) for at in place)
        part = whole[tuple(slice(o, o + c) for o, c in zip(offset, cell, strict=True))]
        box = [(o, o + n) for o, n in zip(offset, part.shape, strict=True)]
        shards.append((box, numpy.ascontiguousarray(part)))
    return shards


def save_cells(path: pathlib.Path, arrays: dict[str, tuple[Array, tuple[int, ...]]]) -> None:
    def rank(comm: tilestone.Communicator) -> None:
        state: dict[str, Any] = {}
        for key, (whole, cell) in arrays.items():
            for box, part in cells(whole, cell, comm.rank, comm.size):
                state[f"{key} {box}"] = tilestone.ShardedTensor.from_box(
                    key, part, whole.shape, box
                )
        tilestone.save(state, path, group=comm, format="zarr")

    run_ranks(2, rank)


@READERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_opens_elsewhere(dtype: str, read: Reader, tmp_path: pathlib.Path) -> None:
    whole = values((5, 7), dtype)
    tilestone.save({"w": whole}, tmp_path / "c", format="zarr")
    assert same(read(tmp_path / "c" / "w"), whole)


@READERS
def test_odd_shapes_and_keys_open_elsewhere(read: Reader, tmp_path: pathlib.Path) -> None:
    arrays = {
        "scalar": values((), "float32"),
        "none": values((0, 3), "float32"),
        "a/b/ключ ✓": values((2, 3, 4), "int64"),
        "layers.0.weight": values((1,), "bfloat16"),
    }
    tilestone.save(dict(arrays), tmp_path / "c", format="zarr")
    for key, whole in arrays.items():
        assert same(read(tmp_path / "c" / key), whole), key


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    cell=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    dtype=st.sampled_from(["bfloat16", "uint8", "float64"]),
)
def test_random_grids_open_elsewhere_and_come_back(
    shape: list[int], cell: list[int], dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("zarr") / "c"
    whole = values(tuple(shape), dtype)
    save_cells(path, {"w": (whole, tuple(cell[: len(shape)]))})
    assert same(by_zarr(path / "w"), whole)
    assert same(by_tensorstore(path / "w"), whole)
    with tilestone.open(path) as checkpoint:
        assert checkpoint.format == "zarr"
        assert same(numpy.asarray(checkpoint.read("w")), whole)
        assert checkpoint.verify().ok


@READERS
def test_megatron_checkpoints_written_by_other_packages_are_read(read: Reader) -> None:
    """Both packages read the goldens as expected, so comparisons with them are meaningful."""
    folder = GOLDEN / "megatron-core-0.13.1" / "zarr-w4"
    with tilestone.open(folder) as checkpoint:
        assert len(checkpoint.tensor_keys()) == 11
        for key in checkpoint.tensor_keys():
            assert same(numpy.asarray(checkpoint.read(key)), read(folder / key)), key


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_arrays_that_the_zarr_package_wrote_are_read(
    order: str, separator: str, tmp_path: pathlib.Path
) -> None:
    whole = values((5, 7), "int32")
    store = zarr.NestedDirectoryStore if separator == "/" else zarr.DirectoryStore
    array = zarr.create(
        whole.shape,
        chunks=(2, 3),
        dtype=whole.dtype,
        store=store(str(tmp_path / "c" / "w")),
        order=order,
        compressor=None,
        fill_value=None,
        dimension_separator=separator,
    )
    array[...] = whole
    (tmp_path / "c" / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    )
    with tilestone.open(tmp_path / "c") as checkpoint:
        assert same(numpy.asarray(checkpoint.read("w")), whole)
        assert same(numpy.asarray(checkpoint.read("w", [(1, 4), (2, 6)])), whole[1:4, 2:6])


def test_compressed_arrays_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    zarr.save_array(str(tmp_path / "c" / "w"), values((5, 7), "int32"))
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(tilestone.UnsupportedError) as caught:
        tilestone.open(tmp_path / "c")
    assert "w/.zarray" in str(caught.value) and "compressed with blosc" in str(caught.value)


def test_objects_are_archives_that_torch_loads(tmp_path: pathlib.Path) -> None:
    import torch

    path = tmp_path / "c"
    state = {
        "rng": tilestone.ShardedObject("rng", {"seed": [1, 2**70]}, (1,), (0,)),
        "step": 7,
    }
    tilestone.save(state, path, format="zarr")
    archive = (path / "rng" / "shard_0_1.pt").read_bytes()
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    assert torch.load(path / "rng" / "shard_0_1.pt", weights_only=True) == {"seed": [1, 2**70]}
    assert torch.load(path / "step.pt", weights_only=True) == 7
    loaded = tilestone.load({"rng": state["rng"], "step": 0}, path)
    assert loaded["step"] == 7


def test_irregular_shards_and_dtypes_that_zarr_lacks_are_refused_by_key(
    tmp_path: pathlib.Path,
) -> None:
    def uneven(comm: tilestone.Communicator) -> None:
        begin, end = ((0, 2), (2, 5))[comm.rank]
        part = values((end - begin,), "float32")
        shard = tilestone.ShardedTensor.from_box("a/w", part, (5,), [(begin, end)])
        tilestone.save({"w": shard}, tmp_path / "c", group=comm, format="zarr")

    with pytest.raises(tilestone.InvalidArgumentError) as caught:
        run_ranks(2, uneven)
    assert caught.value.key == "a/w"
    for name in ("float8_e4m3fn", "float8_e5m2"):
        state = {"f8": numpy.zeros(3, name)}
        with pytest.raises(tilestone.InvalidArgumentError) as caught:
            tilestone.save(state, tmp_path / "c", format="zarr")
        assert caught.value.key == "f8"
    assert not list((tmp_path / "c").glob("[!.]*"))


def test_a_zarr_checkpoint_is_replaced_as_a_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c"
    tilestone.save({"old": values((5, 7), "float32")}, path, format="zarr")
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.save({"new": values((3,), "float32")}, path, format="zarr")
    for kind in ("zarr", "torch_dist"):
        tilestone.save({kind: values((3,), "float32")}, path, format=kind, overwrite=True)
        with tilestone.open(path) as checkpoint:
            assert checkpoint.keys() == [kind]
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
        assert (path / "metadata.json").exists() == (kind == "zarr")
    assert not (path / "old").exists()
    (tmp_path / ".c.tilestone-01234567-89ab-4cde-8f01-23456789abcd" / "w").mkdir(parents=True)
    assert [found.name for found in tilestone.gc(path, delete=True)] == [
        "../.c.tilestone-01234567-89ab-4cde-8f01-23456789abcd"
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_an_unknown_format_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(tilestone.UnsupportedError):
        tilestone.save({"w": 1}, tmp_path / "c", format="zar")
