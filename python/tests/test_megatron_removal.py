"""remove_sharded_tensors: stock Megatron-Core and Tilestone load the remaining checkpoint."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
import zlib
from typing import Any

import pytest
import torch

import tilestone
from ranks import Worlds
from test_goldens import GOLDEN
from test_megatron_files import _megatron
from tilestone import megatron
from tilestone.megatron import stock
from tilestone.megatron.mapping import ShardedObject, ShardedTensor


def _crc(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def _rest_through_stock(
    rank: int, world: int, path: str, expected: dict[str, Any], gone: list[str]
) -> None:
    """Stock reads the metadata, the common state, and all remaining tensors and objects."""
    stocks = _megatron()
    serialization = stocks.serialization
    wanted = serialization.load_sharded_metadata(path)
    wanted.pop("common_state/shard_0_1", None)  # 0.16 treats it as an ordinary object
    assert not any(key.startswith(prefix) for key in wanted for prefix in gone)
    tensors = {key: value for key, value in expected["tensors"].items() if key in wanted}
    for key in tensors:  # stock needs destination memory
        dtype = getattr(torch, expected["tensors"][key]["dtype"])
        wanted[key] = stocks.ShardedTensor.from_rank_offsets(
            key, torch.zeros(expected["tensors"][key]["shape"], dtype=dtype)
        )
    objects = {key for key in expected["objects"] if not key.startswith(tuple(gone))}
    assert set(wanted) == {*tensors, *objects}
    assert len(tensors) + len(objects) < len(expected["tensors"]) + len(expected["objects"])
    from megatron.core.transformer.enums import AttnType

    with torch.serialization.safe_globals([AttnType, getattr]):
        loaded = stocks.load(wanted, path, validate_access_integrity=False)
    assert loaded["iteration"] == 1200
    for key, what in tensors.items():
        assert _crc(loaded[key]) == what["crc32"], key


def _own(world: int) -> dict[str, Any]:
    """The content that _save_own saves, in the form of the goldens' expected values."""
    whole = torch.arange(6.0).reshape(2, 3)
    keys = ("mlp.a", "mlp.b", "row")
    tensors = {
        key: {"dtype": "float32", "shape": [2, 3], "crc32": _crc(whole)} for key in keys
    }
    return {"tensors": tensors, "objects": {"mlp.o/shard_0_1": "", "rng/shard_0_1": ""}}


def _save_own(rank: int, world: int, path: str) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    state: dict[str, Any] = {"iteration": 1200}
    for key in ("mlp.a", "mlp.b", "row"):
        state[key] = ShardedTensor.from_rank_offsets(key, whole.chunk(world)[rank], (0, rank, world))
    for key in ("mlp.o", "rng"):
        state[key] = ShardedObject(key, [rank], (1,), (0,), replica_id=rank)
    megatron.save(state, path)


@pytest.mark.parametrize("name", ["hint-w1", "hint-w2", "hint-w4", "own"])
def test_stock_loads_what_is_left_of_goldens_and_of_own_checkpoints(
    worlds: Worlds, ckpt: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tilestone.megatron")
    folder = pathlib.Path(ckpt)
    if name == "own":
        worlds[2].run(_save_own, ckpt)
        expected = _own(2)
    else:
        golden = GOLDEN / "megatron-core-0.16.1" / name
        shutil.copytree(golden, folder)
        expected = json.loads(pathlib.Path(f"{golden}.expected.json").read_text())
    gone = ["mlp", "rng"]  # tensors, and objects
    megatron.remove_sharded_tensors(ckpt, gone[0])
    assert "keys that begin with 'mlp' from" in caplog.text
    assert not list(folder.glob("mlp__*"))
    stock.TilestoneLoadStrategy().remove_sharded_tensors(folder, gone[1])
    worlds[1].run(_rest_through_stock, ckpt, expected, gone)
    with tilestone.open(ckpt) as opened:
        assert [damage for damage in opened.verify().damages if damage.key] == []
    before = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    megatron.remove_sharded_tensors(ckpt, "mlp")
    assert f"No key in {ckpt} begins with 'mlp'" in caplog.text
    assert before == {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    template = {"row": ShardedTensor.from_rank_offsets(
        "row", torch.zeros(expected["tensors"]["row"]["shape"]))}  # fmt: skip
    loaded, missing, unexpected = megatron.load(template, ckpt, strict="return_all")
    assert unexpected == set() and "mlp.fc1" not in missing
    assert loaded["iteration"] == 1200
    megatron.save(loaded, ckpt)  # it can be replaced like any other checkpoint
    assert len(megatron.load_sharded_metadata(ckpt)) == 0


def test_keys_that_can_not_be_removed_are_refused_by_name(ckpt: str) -> None:
    for golden, words in (("0.13.1/flat-w2", "a flattened tensor"), ("0.13.1/zarr-w2", "zarr")):
        folder = pathlib.Path(ckpt, golden)
        shutil.copytree(GOLDEN / f"megatron-core-{golden}", folder)
        before = sorted(path for path in folder.rglob("*"))
        key = sorted(megatron.load_tensors_metadata(folder))[0]
        with pytest.raises(tilestone.UnsupportedError, match=words):
            megatron.remove_sharded_tensors(folder, key)
        assert before == sorted(path for path in folder.rglob("*"))
        for prefix in ("", 3):
            with pytest.raises(tilestone.InvalidArgumentError):
                megatron.remove_sharded_tensors(folder, prefix)  # type: ignore[arg-type]
    with pytest.raises(tilestone.NotFoundError):
        megatron.remove_sharded_tensors(ckpt, "a")
