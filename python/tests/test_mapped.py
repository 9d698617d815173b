"""Tensors over private mappings of a checkpoint's files."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import numpy
import pytest
import thread_ranks
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import tilestone


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "w": torch.randn(300, 70),
        "b": torch.randn(1001).to(torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "z": torch.randn(4, 3, dtype=torch.complex64),
    }


def maps_of(name: str) -> int:
    """How many mappings of a file of this name the process has."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(name) for line in lines)


def data_file(folder: pathlib.Path) -> pathlib.Path:
    (found,) = [*folder.glob("*.distcp"), *folder.glob("*.safetensors")]
    return found


WRITERS = {
    "tilestone": lambda made, folder: tilestone.save(made, folder),
    "stock": lambda made, folder: dcp.save(made, checkpoint_id=folder, no_dist=True),
    "safetensors": lambda made, folder: (
        folder.mkdir(),
        save_file(made, folder / "model.safetensors"),
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_are_the_files_bytes(writer: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ckpt"
    WRITERS[writer](state(), folder)
    before = data_file(folder).read_bytes()
    checkpoint = tilestone.open(folder, mapped=True)
    assert writer == "stock" or maps_of(data_file(folder).name) == 1
    loaded = checkpoint.state_dict(into="torch")
    for key, tensor in state().items():
        assert torch.equal(loaded[key], tensor) and loaded[key].dtype == tensor.dtype
    # Copy on write: neither the file nor what others read changes.
    loaded["w"].zero_()
    assert data_file(folder).read_bytes() == before
    assert torch.equal(tilestone.open(folder, framework="torch").read("w"), state()["w"])
    assert checkpoint.verify().ok


def test_a_checkpoint_that_is_one_file_is_mapped(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file(state(), file)
    loaded = tilestone.open(file, mapped=True, framework="torch").read("w")
    assert torch.equal(loaded, state()["w"]) and maps_of(file.name) > 0


@pytest.mark.parametrize("writer", ["tilestone", "safetensors"])
def test_a_mapping_lasts_as_long_as_its_tensors(writer: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ckpt"
    WRITERS[writer](state(), folder)
    name = data_file(folder).name
    checkpoint = tilestone.open(folder, mapped=True, framework="torch")
    checkpoint.read("w").zero_()
    assert checkpoint.read("w").sum() == 0  # the same memory
    kept = checkpoint.read("b")
    checkpoint.close()
    del checkpoint
    assert maps_of(name) == 1 and torch.equal(kept, state()["b"])
    del kept
    assert maps_of(name) == 0


def save_halves(comm: tilestone.Communicator, path: pathlib.Path) -> None:
    mine = numpy.arange(6.0) + 6 * comm.rank
    w = tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, comm.rank, comm.size))
    tilestone.save({"w": w, "n": {"text": "abc"}}, path, group=comm)


def test_what_is_no_run_is_read_and_checked(tmp_path: pathlib.Path) -> None:
    values = numpy.arange(12.0)
    thread_ranks.run_ranks(2, lambda comm: save_halves(comm, tmp_path / "halves"))
    tilestone.save({"w": values}, tmp_path / "zarr", format="zarr")
    for name in ("halves", "zarr"):
        checkpoint = tilestone.open(tmp_path / name, mapped=True)
        assert (checkpoint.read("w") == values).all()
        assert (checkpoint["w"][2:5] == values[2:5]).all()
    tilestone.save({"w": values}, tmp_path / "whole")
    part = tilestone.open(tmp_path / "whole", mapped=True)["w"][2:5]
    assert maps_of(data_file(tmp_path / "whole").name) == 0 and (part == values[2:5]).all()


def test_tensors_that_share_bytes_are_read(tmp_path: pathlib.Path) -> None:
    a = torch.arange(16.0)
    torch.save({"a": a, "b": a, "c": a[8:16]}, tmp_path / "model_0.pt")
    checkpoint = tilestone.open(tmp_path, mapped=True, framework="torch")
    checkpoint.read("model.a").zero_()
    assert torch.equal(checkpoint.read("model.b"), a)
    assert torch.equal(checkpoint.read("model.c"), a[8:16])


def test_nothing_is_checked_but_by_verify(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ckpt"
    tilestone.save(state(), folder)
    file = data_file(folder)
    content = bytearray(file.read_bytes())
    at = content.index(state()["w"].numpy().tobytes())
    content[at + 400] ^= 1
    file.write_bytes(content)
    checkpoint = tilestone.open(folder, mapped=True, framework="torch")
    assert (checkpoint.read("w") != state()["w"]).sum() == 1
    assert [damage.key for damage in checkpoint.verify().damages] == ["w"]
    with pytest.raises(tilestone.CorruptError):
        tilestone.open(folder).read("w")


def test_an_item_beyond_the_end_of_its_file_is_an_error(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ckpt"
    tilestone.save(state(), folder)
    os.truncate(data_file(folder), 100)
    checkpoint = tilestone.open(folder, mapped=True)
    with pytest.raises(tilestone.CorruptError):
        checkpoint.read("w")


SHORTENED = """
import os, sys, tilestone
checkpoint = tilestone.open(sys.argv[1], mapped=True)
array = checkpoint.read("w")
os.truncate(sys.argv[2], 4096)
array.sum()
"""


def test_a_file_that_is_shortened_in_place_ends_the_process(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "ckpt"
    tilestone.save(state(), folder)
    command = [sys.executable, "-c", SHORTENED, str(folder), str(data_file(folder))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGBUS


def test_stores_are_refused(bucket: str) -> None:
    tilestone.save({"w": torch.ones(3)}, bucket)
    with pytest.raises(tilestone.UnsupportedError, match="mapped"):
        tilestone.open(bucket, mapped=True)
