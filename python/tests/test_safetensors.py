"""Files of the safetensors package are read bit for bit, whole and in parts."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tilestone
import torch
from safetensors.torch import load_file, save_file

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()) if tensor.dim() else b""


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape[:-1], shape[-1] * size))
    return raw.to(torch.uint8).view(dtype)


def every_dtype() -> dict[str, torch.Tensor]:
    tensors = {str(dtype).removeprefix("torch."): random(dtype, 5, 6) for dtype in DTYPES}
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def test_a_file_of_the_package_is_read_bit_for_bit(tmp_path: pathlib.Path) -> None:
    wanted = every_dtype()
    save_file(wanted, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for path in (tmp_path / "x.safetensors", tmp_path):
        checkpoint = tilestone.open(path)
        assert checkpoint.format == "safetensors"
        loaded = tilestone.load(path)
        assert loaded.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert loaded[key].dtype == tensor.dtype
            assert loaded[key].shape == tensor.shape
            assert bits(loaded[key]) == bits(tensor)
        report = checkpoint.verify()
        assert report.ok
        assert report.items_without_checksum == len(DTYPES)


def test_a_folder_with_an_index_is_loaded_into_a_template(tmp_path: pathlib.Path) -> None:
    weights = {f"layers.{i}.weight": torch.randn(7, 3) for i in range(4)}
    files = {"model-00001-of-00002.safetensors": (0, 1), "model-00002-of-00002.safetensors": (2, 3)}
    weight_map = {}
    for name, numbers in files.items():
        save_file({f"layers.{i}.weight": weights[f"layers.{i}.weight"] for i in numbers}, tmp_path / name)
        weight_map |= {f"layers.{i}.weight": name for i in numbers}
    index = {"metadata": {"total_size": 336}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    wanted = {key: torch.zeros(7, 3) for key in weights}
    tilestone.load(wanted, tmp_path)
    assert all(torch.equal(wanted[key], weights[key]) for key in weights)
    part = tilestone.open(tmp_path)["layers.2.weight"][2:5, 1:]
    assert torch.equal(torch.as_tensor(part), weights["layers.2.weight"][2:5, 1:])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(tilestone.CorruptError, match=r"model-00002-of-00002\.safetensors"):
        tilestone.open(tmp_path)


def test_a_save_ignores_safetensors_files_of_other_names(tmp_path: pathlib.Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "adapter.safetensors")
    tilestone.save({"w": torch.zeros(2)}, tmp_path)
    assert tilestone.open(tmp_path).format == "torch_dist"
    tilestone.save({"w": torch.ones(2)}, tmp_path, overwrite=True)
    assert (tmp_path / "adapter.safetensors").exists()
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.save({"w": torch.zeros(2)}, tmp_path / "adapter.safetensors")


def test_a_save_refuses_to_write_safetensors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(tilestone.UnsupportedError, match="convert"):
        tilestone.save({"w": torch.zeros(2)}, tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()


def test_pointers_of_git_lfs_are_named_as_such(tmp_path: pathlib.Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = tmp_path / name
        path.write_text(pointer)
        with pytest.raises(tilestone.CorruptError, match="pointer of Git LFS.*git lfs pull") as error:
            tilestone.open(path)
        assert error.value.file.endswith(name)
    with pytest.raises(tilestone.CorruptError, match="pointer of Git LFS"):
        tilestone.open(tmp_path)


def write_pieces(folder: pathlib.Path, pieces: list[dict[str, tuple[torch.Tensor, list[int]]]]) -> None:
    """Writes what torch's HuggingFaceStorageWriter(save_distributed=True) leaves: a file per rank."""
    folder.mkdir()
    for number, tensors in enumerate(pieces, 1):
        places = {key: {"saved_offsets": at} for key, (_, at) in tensors.items()}
        save_file(
            {key: tensor for key, (tensor, _) in tensors.items()},
            folder / f"shard-{number:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"},
        )


def test_pieces_of_ranks_are_joined_and_one_ranks_file_is_refused_as_pieces(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {"rows": torch.arange(24.0).reshape(8, 3), "grid": torch.arange(30).reshape(5, 6)}
    ranks: list[dict[str, tuple[torch.Tensor, list[int]]]] = [
        {
            "rows": (whole["rows"][4 * r : 4 * r + 4].clone(), [4 * r, 0]),
            "grid": (whole["grid"][:, 3 * r : 3 * r + 3].clone(), [0, 3 * r]),
            f"own{r}": (torch.ones(r + 1), [0]),
        }
        for r in range(2)
    ]
    write_pieces(tmp_path / "all", ranks)
    loaded = tilestone.load(tmp_path / "all")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in whole.items())
    assert loaded["own0"].shape == (1,) and loaded["own1"].shape == (2,)
    part = tilestone.ShardedTensor.from_box("grid", torch.zeros(2, 4, dtype=torch.int64), (5, 6), [(1, 3), (1, 5)])
    tilestone.load({"grid": part}, tmp_path / "all")
    assert torch.equal(part.data, whole["grid"][1:3, 1:5])
    assert tilestone.open(tmp_path / "all").verify().ok
    caplog.clear()
    tilestone.convert(tmp_path / "all", tmp_path / "one.safetensors")
    assert torch.equal(load_file(tmp_path / "one.safetensors")["grid"], whole["grid"])
    assert "if the files of its last ranks are missing" in caplog.text

    def expect_refused(path: pathlib.Path, error: Any, text: str) -> None:
        for call in (tilestone.open, lambda p: tilestone.convert(p, tmp_path / "made")):
            with pytest.raises(error, match=text) as caught:
                call(path)
            assert caught.value.key in whole
        assert not (tmp_path / "made").exists()

    files = sorted((tmp_path / "all").iterdir())
    for file in files:
        refused = (tilestone.UnsupportedError, tilestone.CoverageError)  # the first, a later one
        expect_refused(file, refused, "pieces? of this tensor")
    files[0].unlink()
    expect_refused(tmp_path / "all", tilestone.CoverageError, "only pieces of this tensor are here")
    write_pieces(tmp_path / "twice", [ranks[1], ranks[0], ranks[1] | {"own1": ranks[0]["own0"]}])
    expect_refused(tmp_path / "twice", tilestone.CorruptError, "overlap")
    write_pieces(tmp_path / "far", [{"rows": (torch.ones(2), [2**63 - 2])}])
    expect_refused(tmp_path / "far", tilestone.CorruptError, "ends beyond any tensor")
    unnamed = {"rows": (torch.ones(2), [0])}
    write_pieces(tmp_path / "mixed", [unnamed, unnamed])
    save_file({"rows": torch.ones(2)}, tmp_path / "mixed" / "a.safetensors")
    expect_refused(tmp_path / "mixed", tilestone.UnsupportedError, "a piece of a tensor.*no pieces")


def test_whole_tensors_of_torchs_writer_are_loaded(tmp_path: pathlib.Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    wanted = {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(3)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "one"), save_distributed=True)
    dcp.save(dict(wanted), storage_writer=writer, no_dist=True)
    write_pieces(tmp_path / "replicas", [{"a": (torch.ones(2), [0])}, {"b": (torch.ones(3), [0])}])
    loaded = tilestone.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in wanted.items())
    assert sorted(tilestone.load(tmp_path / "replicas")) == ["a", "b"]
    for path in (tmp_path / "replicas").iterdir():
        assert len(tilestone.load(path)) == 1


def test_files_that_are_missing_without_an_index_are_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 3):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    text = "files are missing: of model-?-of-00003.safetensors only 2 are here"
    assert any(text in note for note in tilestone.open(tmp_path).verify().notes)
    assert set(tilestone.load(tmp_path)) == {"w1", "w3"} and text in caplog.text
    save_file({"w2": torch.ones(2)}, tmp_path / "model-00002-of-00003.safetensors")
    assert tilestone.open(tmp_path).verify().notes == []


def test_a_tensor_of_an_unknown_dtype_is_listed_and_refused_by_key(tmp_path: pathlib.Path) -> None:
    header = {
        "good": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "none": {"dtype": "F6_E2M3", "shape": [0], "data_offsets": [2, 2]},
        "odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [2, 5]},
    }
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2abc")
    checkpoint = tilestone.open(file)
    assert sorted(checkpoint.keys()) == ["good", "none", "odd"]
    assert checkpoint["good"][...].tolist() == [1, 2]
    state = {"good": torch.zeros(2, dtype=torch.uint8)}
    tilestone.load(state, file)
    assert state["good"].tolist() == [1, 2]
    report = checkpoint.verify()
    assert report.ok
    assert report.items_without_checksum == 2
    target = {"odd": torch.zeros(4)}
    for call in (
        lambda: checkpoint["odd"],
        lambda: tilestone.load(target, file),
        lambda: tilestone.convert(file, tmp_path / "made", keys=["good", "odd"]),
        lambda: tilestone.convert(file, tmp_path / "made.safetensors", keys=["odd"]),
    ):
        with pytest.raises(tilestone.UnsupportedError, match="F6_E2M3") as caught:
            call()
        assert caught.value.key == "odd"
    for whole in (lambda: tilestone.load(file), lambda: tilestone.convert(file, tmp_path / "made")):
        with pytest.raises(tilestone.UnsupportedError, match="F6_E2M3"):
            whole()
    tilestone.convert(file, tmp_path / "made", keys=["good"])
    assert sorted(tilestone.load(tmp_path / "made")) == ["good"]
