"""Files of the safetensors package are read bit for bit, whole and in parts."""

from __future__ import annotations

import json
import pathlib

import pytest
import tilestone
import torch
from safetensors.torch import save_file

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
