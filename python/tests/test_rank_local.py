"""Torch's rank-local mode: checkpoints that stock ranks save with use_collectives=False."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import zlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tilestone

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"


def state_of(world: int, scale: float) -> dict[str, Any]:
    """Rows over all ranks, columns over half of them with two replicas, and values of all ranks."""
    rows = torch.arange(35, dtype=torch.float32).reshape(7, 5) * scale
    mesh = init_device_mesh("cpu", (world,))
    halves = init_device_mesh("cpu", (2, world // 2)) if world > 1 else mesh
    columns = [Replicate(), Shard(1)] if world > 1 else [Shard(1)]

    def sharded(whole: torch.Tensor, over: Any, placements: list[Any]) -> DTensor:
        local = torch.zeros_like(whole) if scale == 0 else whole
        return torch.distributed.tensor.distribute_tensor(local, over, placements)

    return {
        "rows": sharded(rows, mesh, [Shard(0)]),
        "columns": sharded(rows.T.contiguous() + 1, halves, columns),
        "turned": torch.arange(6.0).reshape(2, 3).T * scale,  # not in C order
        "same": torch.arange(4) * int(scale),
        "step": 7 * int(scale),
    }


def values(state: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.tolist() if isinstance(whole, torch.Tensor) else whole

    return {key: plain(value) for key, value in state.items()}


def save_stock(rank: int, world: int, path: str) -> dict[str, Any]:
    state = state_of(world, 1)
    dcp.save(state, checkpoint_id=path, use_collectives=False)
    return values(state)


def save_ours(rank: int, world: int, path: str) -> dict[str, Any]:
    state = state_of(world, 1)
    files = tilestone.ByFiles(rank, world, "a run of a test", torch_rank_local=True)
    done = tilestone.save(state, path, by_files=files)
    assert done.published
    return values(state)


def load_stock(rank: int, world: int, path: str) -> dict[str, Any]:
    state = state_of(world, 0)
    dcp.load(state, checkpoint_id=path)
    return values(state)


def load_ours(rank: int, world: int, path: str, alone: bool) -> dict[str, Any]:
    state = state_of(world, 0)
    loaded = tilestone.load(state, path, own_rank=rank) if alone else tilestone.load(state, path)
    return values(loaded)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tilestone", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_rank_local_stock_checkpoints_load_everywhere_and_can_be_published(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    saved = worlds[4].run(save_stock, ckpt)[0]
    names = {path.name for path in pathlib.Path(ckpt).iterdir()}
    assert {f"__{rank}.metadata" for rank in range(4)} < names and ".metadata" not in names
    for alone in (False, True):
        assert worlds[4].run(load_ours, ckpt, alone) == [saved] * 4
    assert worlds[2].run(load_ours, ckpt, False) == [saved] * 2
    assert worlds[1].run(load_ours, ckpt, True) == [saved]
    lost = shutil.copytree(ckpt, ckpt + "-lost")
    pathlib.Path(lost, "__1_0.distcp").unlink()
    with pytest.raises(tilestone.CorruptError, match="data file of the checkpoint is missing"):
        tilestone.load({"step": 0}, lost, own_rank=1)
    with tilestone.open(ckpt) as checkpoint:
        assert checkpoint.rank_local
        assert len(checkpoint["columns"].boxes) == 4

    short = ckpt + "-short"
    shutil.copytree(ckpt, short)
    pathlib.Path(short, "__3.metadata").unlink()
    with pytest.raises(tilestone.CorruptError, match="rank 3"):
        tilestone.open(short)
    assert command("publish", short).returncode != 0
    assert "__2.metadata" in {path.name for path in pathlib.Path(short).iterdir()}

    done = command("publish", ckpt)
    assert done.returncode == 0, done.stderr
    assert not list(pathlib.Path(ckpt).glob("__*.metadata"))
    with tilestone.open(ckpt) as checkpoint:
        assert not checkpoint.rank_local
        assert len(checkpoint["columns"].boxes) == 2
        assert checkpoint.verify().ok
    for size in (4, 2, 1):
        assert worlds[size].run(load_stock, ckpt) == [saved] * size
    assert worlds[2].run(load_ours, ckpt, False) == [saved] * 2


def test_stock_ranks_load_our_rank_local_checkpoints_before_and_after_publishing(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    saved = worlds[4].run(save_ours, ckpt)[0]
    names = {path.name for path in pathlib.Path(ckpt).iterdir()}
    assert {f"__{rank}.metadata" for rank in range(4)} < names and ".metadata" not in names
    assert worlds[4].run(load_stock, ckpt) == [saved] * 4
    assert worlds[4].run(load_ours, ckpt, True) == [saved] * 4
    assert worlds[2].run(load_ours, ckpt, False) == [saved] * 2
    assert tilestone.publish(ckpt) == tilestone.open(ckpt).save_id
    assert not list(pathlib.Path(ckpt).glob("__*.metadata"))
    for size in (4, 2):
        assert worlds[size].run(load_stock, ckpt) == [saved] * size
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.save(
            {"a": 1}, ckpt, by_files=tilestone.ByFiles(0, 1, "another run", torch_rank_local=True),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["dcp-w1-ranklocal", "dcp-w4-ranklocal"])
def test_a_golden_of_stock_torch_is_published_with_every_value(
    name: str, tmp_path: pathlib.Path
) -> None:
    golden = GOLDEN / "torch-2.14.1" / name
    path = tmp_path / name
    shutil.copytree(golden, path)
    done = command("publish", str(path))
    assert done.returncode == 0, done.stderr
    expected = json.loads(golden.with_name(name + ".expected.json").read_text())
    with tilestone.open(path) as checkpoint:
        assert not checkpoint.rank_local and checkpoint.verify().ok
        for key, wanted in expected["tensors"].items():
            found = checkpoint.read(key)
            assert zlib.crc32(found.tobytes()) == wanted["crc32"], key
    assert not list(path.glob("__*.metadata")) and (path / ".metadata").exists()
    assert command("publish", str(path)).returncode != 0  # it is an ordinary checkpoint


def test_own_rank_loads_alone(ckpt: str) -> None:
    tilestone.save({"a": 1}, ckpt)
    assert tilestone.load({"a": 0}, ckpt, own_rank=3) == {"a": 1}
    with pytest.raises(tilestone.InvalidArgumentError, match="own_rank is -1"):
        tilestone.load({"a": 0}, ckpt, own_rank=-1)
    with pytest.raises(tilestone.InvalidArgumentError, match="own_rank must be a whole number"):
        tilestone.load({"a": 0}, ckpt, own_rank=True)
