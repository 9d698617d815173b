"""Folders of torch_checkpointing are read bit for bit into any sharding, and it loads ours."""

from __future__ import annotations

import os
import pathlib
import shutil
import zipfile
import zlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_fsdp import SHAPES, checksums, state_of, trained
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import tilestone


def _gathered(manager: Any, data: Any, group: Any = None) -> dict[int, Any]:
    got: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(got, data, group)
    return dict(enumerate(got))


def manager(resharder: bool) -> CheckpointManager:
    """The package's manager. It gathers its metadata on CUDA devices only."""
    DefaultMetadataManager._all_gather_pickled_data = _gathered  # type: ignore[method-assign]
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    if resharder:
        config.default = ItemSpec(resharder=DefaultResharder())
    return config.build()


def write(path: str, state: dict[str, Any], resharder: bool = True) -> None:
    made = manager(resharder)
    made.save(path, state)
    made.close()


def save_model(rank: int, world: int, shape: tuple[int, ...], path: str) -> dict[str, int]:
    state = state_of(*trained(shape, seed=1, steps=2))
    write(path, state)
    write(path + "-plain", state, resharder=False)
    return checksums(state)


def load_model(rank: int, world: int, shape: tuple[int, ...], path: str) -> dict[str, int]:
    model, optimizer = trained(shape, seed=2, steps=1)
    state = tilestone.load(state_of(model, optimizer), path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return checksums(state)


def test_a_model_of_four_ranks_is_loaded_bit_for_bit_on_others(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    saved = worlds[4].run(save_model, (2, 2), ckpt)[0]
    assert len(saved) == 12 + 12 * 3
    assert not pathlib.Path(ckpt + "-plain", "metadata.pkl").exists()
    for shape in SHAPES:
        size = 4 if shape == (2, 2) else shape[0]
        for path in (ckpt, ckpt + "-plain"):
            for loaded in worlds[size].run(load_model, shape, path):
                assert loaded == saved
    assert tilestone.open(ckpt).verify().ok


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "w": torch.randn(10, 6),
        "t": torch.randn(6, 10).t(),
        "b": torch.randn(7).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "conv": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "of_storage": torch.randn(9)[2:7],
    }


def distributed(world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    tensors = whole()
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()
    }
    state["copied"] = distribute_tensor(tensors["w"], mesh, [Replicate()])
    local = torch.arange(12.0).view(3, 4).t()
    state["strided"] = DTensor.from_local(local, mesh, [Shard(0)])
    state["tied"] = state["w"]
    return state


def save_many(rank: int, world: int, path: str) -> None:
    optimizer = {
        "state": {0: {"step": torch.tensor(4.0)}, 1: {"step": torch.tensor(5.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
    }
    state = {
        "model": {**distributed(world), "pair": (torch.ones(2), 3), "none": None},
        "optimizer": optimizer,
        "step": 5,
        "rng": {"seed": rank, "state": torch.full((2,), rank)},
        "one": torch.arange(3),
    }
    write(path, state)
    if rank == 0:
        shutil.copytree(path, path + "-lost", dirs_exist_ok=True)
        os.remove(f"{path}-lost/model_2.pt")


def test_all_that_a_folder_holds_is_read(worlds: ranks.Worlds, ckpt: str) -> None:
    worlds[4].run(save_many, ckpt)
    checkpoint = tilestone.open(ckpt)
    assert checkpoint.format == "torch_checkpointing"
    report = checkpoint.verify()
    assert report.ok, report
    loaded = tilestone.load(ckpt)
    for name, tensor in whole().items():
        assert torch.equal(loaded["model"][name], tensor), name
    assert torch.equal(loaded["model"]["copied"], whole()["w"])
    assert torch.equal(loaded["model"]["tied"], whole()["w"])
    assert torch.equal(loaded["model"]["strided"], torch.arange(12.0).view(3, 4).t().repeat(4, 1))
    assert loaded["optimizer"]["param_groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}
    ]
    assert loaded["optimizer"]["state"][1]["step"].item() == 5
    assert loaded["step"] == 5 and loaded["model"]["none"] is None
    assert loaded["one"].tolist() == [0, 1, 2]
    assert loaded["model"]["pair"][0].tolist() == [1, 1]
    # What each rank has of its own.
    assert loaded["rng"] == {"seed": 0, "state": loaded["rng"]["state"]}
    assert loaded["rng"]["state"].tolist() == [0, 0]
    assert loaded["rng.seed.__rank_3"] == 3
    assert loaded["rng.state.__rank_2"].tolist() == [2, 2]


def test_missing_files_are_named(worlds: ranks.Worlds, ckpt: str) -> None:
    worlds[4].run(save_many, ckpt)
    with pytest.raises(tilestone.CheckpointError, match=r"model_2\.pt") as caught:
        tilestone.open(ckpt + "-lost")
    assert caught.value.file == "model_2.pt" and caught.value.key.startswith("model.")
    # Only replicas are lost.
    os.remove(f"{ckpt}/optimizer_3.pt")
    checkpoint = tilestone.open(ckpt)
    assert tilestone.load(ckpt)["optimizer"]["state"][1]["step"].item() == 5
    damages = checkpoint.verify().damages
    assert [damage.file for damage in damages] == ["optimizer_3.pt"]


def one_rank_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(8, 5), "layers": [{"b": torch.randn(3)}, {"b": torch.ones(2)}]},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(8, 5)}}, "param_groups": [{"lr": 0.5}]},
        "step": 7,
    }


def stock_load(path: str, into: dict[str, Any], resharder: bool) -> Any:
    made = manager(resharder)
    try:
        return made.load(path, into, strict=True)
    finally:
        made.close()


def stock_load_ranks(rank: int, world: int, path: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    model = {
        "w": distribute_tensor(torch.zeros(8, 5), mesh, [Shard(0)]),
        "layers": [{"b": torch.zeros(3)}, {"b": torch.zeros(2)}],
    }
    stock_load(path, {"model": model}, resharder=True)
    return model["w"].full_tensor(), model["layers"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_the_package_loads_what_is_converted(worlds: ranks.Worlds, tmp_path: pathlib.Path) -> None:
    state = one_rank_state()
    tilestone.save(state, tmp_path / "ours")
    target = tmp_path / "theirs"
    result = tilestone.convert(tmp_path / "ours", target, format="torch_checkpointing")
    assert result.format == "torch_checkpointing"
    assert sorted(path.name for path in target.iterdir()) == [
        "metadata.pkl", "model_0.pt", "optimizer_0.pt", "step_0.pt"
    ]
    empty: dict[str, Any] = {
        "model": {"w": torch.zeros(8, 5), "layers": [{"b": torch.zeros(3)}, {"b": torch.zeros(2)}]},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(8, 5)}}, "param_groups": [{"lr": 0.0}]},
        "step": 0,
    }
    assert same(stock_load(str(target), empty, resharder=False), state)
    for tensor, layers in worlds[4].run(stock_load_ranks, str(target)):
        assert torch.equal(tensor, state["model"]["w"])
        assert same(layers, state["model"]["layers"])
    assert same(tilestone.load(target), state)
    assert tilestone.open(target).verify().ok
    with pytest.raises(tilestone.CheckpointError, match="exists"):
        tilestone.convert(tmp_path / "ours", target, format="torch_checkpointing")
    # And back.
    tilestone.convert(target, tmp_path / "again", format="torch_dist")
    assert same(tilestone.load(tmp_path / "again"), state)


def test_a_flat_state_becomes_the_item_model(tmp_path: pathlib.Path) -> None:
    state = {"layers.0.weight": torch.randn(3, 2), "head.bias": torch.ones(2), "x" * 300: torch.ones(1)}
    tilestone.save(state, tmp_path / "ours")
    tilestone.convert(tmp_path / "ours", tmp_path / "theirs", format="torch_checkpointing")
    into = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
    loaded = stock_load(str(tmp_path / "theirs"), into, resharder=False)
    assert same(loaded["model"], state)


def test_damage_is_found_and_saves_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ckpt"
    write(str(path), {"model": {"w": torch.randn(100)}, "note": {"text": "abc"}})
    with pytest.raises(tilestone.CheckpointError, match="torch_checkpointing"):
        tilestone.save({"a": torch.ones(1)}, path)
    with pytest.raises(tilestone.CheckpointError, match="torch_checkpointing"):
        tilestone.save({"a": torch.ones(1)}, path, overwrite=True)
    file = path / "model_0.pt"
    with zipfile.ZipFile(file) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
        content = archive.read(record)
    at = file.read_bytes().index(content)
    assert at % 64 == 0 and zlib.crc32(content) == record.CRC
    damaged = bytearray(file.read_bytes())
    damaged[at + 40] ^= 1
    file.write_bytes(damaged)
    report = tilestone.open(path).verify()
    assert [damage.key for damage in report.damages] == ["model.w"]
    with pytest.raises(tilestone.CheckpointError, match="damaged"):
        tilestone.load(path)
    damaged[at + 40] ^= 1
    name = damaged.index(b"w", damaged.index(b"data.pkl"))
    damaged[name] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(tilestone.CheckpointError, match="checksum"):
        tilestone.open(path)


def test_files_that_are_no_such_folder_are_not_taken_for_one(tmp_path: pathlib.Path) -> None:
    torch.save({"a": 1}, tmp_path / "dataloader_0.pt")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(tmp_path)
    tilestone.save({"a": torch.ones(1)}, tmp_path)


def test_values_of_ranks_that_have_no_checksum_of_their_own_are_kept(tmp_path: pathlib.Path) -> None:
    same = torch.arange(8.0)
    for rank in range(2):
        own = same + 10 * rank
        torch.save(
            {"part": own[2:5], "t": own.view(2, 4).t(), "same": same[2:5], "same_t": same[:6:2]},
            tmp_path / f"model_{rank}.pt",
        )
    checkpoint = tilestone.open(tmp_path, framework="torch")
    assert sorted(checkpoint.keys()) == [
        *("model.part", "model.part.__rank_1", "model.same", "model.same_t"),
        *("model.t", "model.t.__rank_1"),
    ]
    assert checkpoint.read("model.part").tolist() == [2, 3, 4]
    assert checkpoint.read("model.part.__rank_1").tolist() == [12, 13, 14]
    assert checkpoint.read("model.t.__rank_1").tolist() == (same + 10).view(2, 4).t().tolist()
    torch.serialization.set_crc32_options(False)
    try:
        for rank in range(2):
            torch.save({"w": same + rank}, tmp_path / f"model_{rank}.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = tilestone.open(tmp_path, framework="torch")
    assert torch.equal(checkpoint.read("model.w"), same)
    assert torch.equal(checkpoint.read("model.w.__rank_1"), same + 1)


def test_other_kinds_under_one_key_and_keys_like_those_of_other_ranks_are_kept(
    tmp_path: pathlib.Path,
) -> None:
    one, two = torch.arange(2.0), torch.arange(2.0) + 5
    torch.save({"t": one, "t.__rank_1": 3, "n": 1, "o": one}, tmp_path / "model_0.pt")
    torch.save({"t": two, "t.__rank_1": 3, "n": one, "o": 7}, tmp_path / "model_1.pt")
    torch.save({"n": two}, tmp_path / "model_2.pt")
    checkpoint = tilestone.open(tmp_path, framework="torch")
    found = {key: checkpoint[key] for key in checkpoint.object_keys()}
    assert found == {"model.n": 1, "model.o.__rank_1": 7, "model.t.__rank_1": 3}
    read = {key: checkpoint.read(key).tolist() for key in checkpoint.tensor_keys()}
    assert read == {
        "model.t": [0, 1], "model.o": [0, 1], "model.t.__rank_1_": [5, 6],
        "model.n.__rank_1": [0, 1], "model.n.__rank_2": [5, 6],
    }


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)


def test_no_pickle_makes_a_stand_in_for_what_cannot_be_read(tmp_path: pathlib.Path) -> None:
    torch.save([Holder()], tmp_path / "held_0.pt")
    for module in (b"", b"tilestone.unreadable"):
        made = b"\x8c" + bytes([len(module)]) + module + b"\x8c\x05value\x93)\x81"
        pickled = b"\x80\x04}(\x8c\x01x" + made + b"\x8c\x01y](" + made + b"e\x8c\x01nK\x05u."
        with zipfile.ZipFile(tmp_path / "model_0.pt", "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
        checkpoint = tilestone.open(tmp_path)
        assert sorted(checkpoint.keys()) == ["held", "model.n", "model.x", "model.y"]
        assert checkpoint.object("model.n") == 5
        for key in ("model.x", "model.y", "held"):
            with pytest.raises(tilestone.CheckpointError, match=key):
                checkpoint.object(key)
