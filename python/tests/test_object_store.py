"""Checkpoints in object stores, with a real server: each way to save and load."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy
import plain_ranks
import pytest
import ranks
import torch
from object_server import Server
from torch.distributed import checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from training_runs import load_run, save_run

import tilestone
from tilestone import dcp, megatron
from tilestone.megatron import core, training
from tilestone.megatron.strategies.async_utils import AsyncCallsQueue
from tilestone.megatron.strategies.common import TorchCommonSaveStrategy

IGNORING = tilestone.Differences(not_requested="ignore")

# ---- Places that no store takes

NOBODYS = ("gs://bucket/x", "memory://x", "file:///x", "s3:/bucket/x", pathlib.Path("s3://bucket/x"))


def calls_with(place: Any) -> list[Any]:
    state, template = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    common = TorchCommonSaveStrategy("torch", 1)
    config = core.CheckpointingConfig("torch_dist", 1)
    entity = megatron.ShardedObject("o", 1, (1,), (0,))
    return [
        lambda: tilestone.save(state, place),
        lambda: tilestone.async_save(state, place),
        lambda: tilestone.save(state, place, by_files=tilestone.ByFiles(0, 1, "a token of it")),
        lambda: tilestone.load(template, place),
        lambda: tilestone.load(place),
        lambda: tilestone.open(place),
        lambda: tilestone.Session().save(state, place),
        lambda: tilestone.CheckpointManager(place),
        lambda: tilestone.gc(place),
        lambda: tilestone.publish(place),
        lambda: tilestone.unpublished(place),
        lambda: tilestone.convert(place, "y"),
        lambda: dcp.save(state, checkpoint_id=place),
        lambda: dcp.async_save(state, checkpoint_id=place),
        lambda: dcp.load(template, checkpoint_id=place),
        lambda: stock.save(state, storage_writer=dcp.FileSystemWriter(place)),
        lambda: megatron.save({"a": 1}, place),
        lambda: megatron.load({"a": 1}, place),
        lambda: megatron.load_common_state_dict(place),
        lambda: megatron.load_tensors_metadata(place),
        lambda: megatron.check_is_distributed_checkpoint(place),
        lambda: megatron.remove_sharded_tensors(place, "a"),
        lambda: core.save_config(config, place),
        lambda: common.save_common({"a": 1}, place),
        lambda: common.save_sharded_objects({"o": entity}, place),
    ]


def refused(rank: int, world: int, folder: str) -> list[tuple[str, str]]:
    os.chdir(folder)
    found = []
    for place in NOBODYS:
        for number, call in enumerate(calls_with(place)):
            try:
                call()
                found.append((f"{place} {number}", "nothing was raised"))
            except tilestone.UnsupportedError as error:
                if "URL" not in str(error):
                    found.append((f"{place} {number}", str(error)))
            except Exception as error:
                # As torch's saves and loads report it.
                if not isinstance(error.__cause__, tilestone.UnsupportedError):
                    found.append((f"{place} {number}", repr(error)))
    return found


def test_a_url_that_no_store_takes_is_refused_by_every_call_and_makes_no_folder(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    assert worlds[2].run(refused, str(tmp_path)) == [[], []]
    assert os.listdir(tmp_path) == []

# ---- A bucket of a real server


def state_of(rank: int, world: int, number: int = 0) -> dict[str, Any]:
    """Rows of "w" for each rank, nested tensors of several kinds, and plain values."""
    rows = torch.arange(512 * 4.0).reshape(512, 4) + 10_000 * rank + number
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", rows, (0, rank, world)),
        "model": {"half": torch.arange(6, dtype=torch.bfloat16) + number, "none": torch.empty(0, 3)},
        "list": [torch.tensor(True), "text", number],
        "step": number,
    }


def whole(world: int, number: int = 0) -> torch.Tensor:
    return torch.cat([state_of(rank, world, number)["w"].data for rank in range(world)])


def expect_state(loaded: Any, number: int = 0) -> None:
    assert loaded["step"] == number and loaded["list"][1:] == ["text", number]
    assert loaded["model"]["half"].tolist() == [i + number for i in range(6)]
    assert tuple(loaded["model"]["none"].shape) == (0, 3)


def columns_of(rank: int, world: int, height: int) -> dict[str, Any]:
    part = torch.zeros(height, 4 // world)
    w = tilestone.ShardedTensor.from_rank_offsets("w", part, (1, rank, world))
    model = {"half": torch.zeros(6, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    return {"w": w, "model": model, "list": [torch.tensor(False), "", -1], "step": -1}


def test_a_state_of_one_process_comes_back_whole_and_is_replaced(bucket: str) -> None:
    path = f"{bucket}/a"
    result = tilestone.save(state_of(0, 1), path)
    loaded = tilestone.load(path)
    expect_state(loaded)
    assert numpy.array_equal(loaded["w"], whole(1).numpy())
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.save(state_of(0, 1, 5), path)
    template = {"w": torch.zeros(512, 4), "step": -1}
    assert tilestone.load(template, path, differences=IGNORING)["w"] is template["w"]
    assert torch.equal(template["w"], whole(1))
    with tilestone.Session() as session:
        session.save(state_of(0, 1, 5), path, overwrite=True)
        expect_state(session.load(columns_of(0, 1, 512), path), 5)
    with tilestone.open(path) as opened:
        assert opened.save_id != result.save_id and opened.verify().ok
        assert numpy.array_equal(opened["w"][3:9, 1:2], whole(1, 5)[3:9, 1:2].numpy())
        assert opened["list.2"] == 5 or opened.keys()
    assert tilestone.gc(path) == [] and tilestone.unpublished(path) == []


def test_names_of_a_place_are_prefixes_that_end_at_a_slash(bucket: str) -> None:
    for name, number in (("run1", 1), ("run10", 10), ("run1/in", 2)):
        tilestone.save({"n": number}, f"{bucket}/{name}")
    tilestone.save({"n": 3}, f"{bucket}/run1", overwrite=True)
    found = [tilestone.load(f"{bucket}/{name}")["n"] for name in ("run1", "run10", "run1/in")]
    assert found == [3, 10, 2]
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(f"{bucket}/run")


def save_on_each(rank: int, world: int, environment: dict[str, str], bucket: str) -> None:
    os.environ.update(environment)
    tilestone.save(state_of(rank, world), f"{bucket}/s")
    for stage in ("copy", "lazy"):
        state = state_of(rank, world, 1)
        saving = tilestone.async_save(state, f"{bucket}/{stage}", stage=stage)
        saving.staged.result()
        state["w"].data.fill_(-1)
        saving.result()


def load_on_each(rank: int, world: int, environment: dict[str, str], bucket: str, height: int) -> None:
    os.environ.update(environment)
    for name, number in (("s", 0), ("copy", 1), ("lazy", 1)):
        template = columns_of(rank, world, height)
        part = template["w"].data
        expect_state(tilestone.load(template, f"{bucket}/{name}"), number)
        assert torch.equal(part, whole(height // 512, number).chunk(world, 1)[rank])


def test_what_four_ranks_save_by_rows_two_load_by_columns(
    worlds: ranks.Worlds, object_server: Server, bucket: str
) -> None:
    worlds[4].run(save_on_each, object_server.environment, bucket)
    worlds[2].run(load_on_each, object_server.environment, bucket, 4 * 512)
    for name in ("s", "copy", "lazy"):
        with tilestone.open(f"{bucket}/{name}") as opened:
            assert opened.world_size == 4 and opened.verify().ok


def run_on_each(rank: int, world: int, environment: dict[str, str], run: str) -> list[Any]:
    os.environ.update(environment)
    keep = tilestone.Keep(last=2, best=("loss", "min", 1))
    with tilestone.CheckpointManager(run, every=10, keep=keep) as manager:
        first = manager.restore(columns_of(rank, world, world * 512))[1]
        for step in range((first or 0) + 1, (first or 0) + 51):
            loss = 0.5 if step == 20 else 1.0
            manager.save(step, state_of(rank, world, step), metrics={"loss": loss})
        manager.wait()
        # Although SeaweedFS goes on listing a prefix whose objects were removed.
        steps = [each.step for each in manager.steps()]
        found = [first, manager.latest(), manager.best(), steps, repr(manager)]
        template = columns_of(rank, world, world * 512)
        expect_state(manager.restore(template, step=20)[0], 20)
        return found


def test_a_manager_keeps_restores_and_continues_a_run(
    worlds: ranks.Worlds, object_server: Server, bucket: str
) -> None:
    run, others = f"{bucket}/run", f"{bucket}/run2"
    tilestone.save({"n": 1}, f"{others}/step-00000070")
    said = [f"CheckpointManager({run!r})"]
    environment = object_server.environment
    found = worlds[2].run(run_on_each, environment, run)
    assert found[0] == [None, 50, 20, [20, 40, 50], *said] and found[1][:3] == found[0][:3]
    found = worlds[2].run(run_on_each, environment, run)
    assert found[0] == [50, 100, 20, [20, 90, 100], *said] and found[1][:3] == found[0][:3]
    assert tilestone.load(f"{others}/step-00000070") == {"n": 1}


class Planner(stock.DefaultSavePlanner):
    """With one of the program's torch plans."""


def dcp_on_each(rank: int, world: int, environment: dict[str, str], bucket: str) -> None:
    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (world,))
    rows = torch.arange(12.0).reshape(4, 3)

    def state(scale: float) -> dict[str, Any]:
        sharded = distribute_tensor(rows * scale, mesh, [Shard(0)])
        return {"rows": sharded, "plain": torch.arange(4) * scale, "n": {"step": 7 * scale}}

    def expect(loaded: dict[str, Any], scale: float) -> None:
        assert torch.equal(loaded["rows"].full_tensor(), rows * scale)
        assert loaded["plain"].tolist() == [scale * i for i in range(4)]
        assert loaded["n"]["step"] == 7 * scale

    def saved_and_loaded(scale: float, path: str, save: Any, load: Any) -> None:
        made = save(state(scale), checkpoint_id=path)
        metadata = made.result() if hasattr(made, "result") else made
        assert metadata.state_dict_metadata["rows"].size == torch.Size([4, 3])
        loaded = state(0)
        load(loaded, checkpoint_id=path)
        expect(loaded, scale)

    def planned(state: Any, checkpoint_id: str) -> Any:
        return dcp.save(state, checkpoint_id=checkpoint_id, planner=Planner())

    def read_as_planned(state: Any, checkpoint_id: str) -> None:
        reader = dcp.FileSystemReader(checkpoint_id)
        stock.load(state, storage_reader=reader, planner=stock.DefaultLoadPlanner())

    saved_and_loaded(1, f"{bucket}/d", dcp.save, dcp.load)
    saved_and_loaded(2, f"{bucket}/d", planned, read_as_planned)
    saved_and_loaded(3, f"{bucket}/a", dcp.async_save, read_as_planned)
    dcp.enable()
    try:
        saved_and_loaded(4, f"{bucket}/d", stock.save, stock.load)
        saved_and_loaded(5, f"{bucket}/e", stock.async_save, dcp.load)
    finally:
        dcp.disable()
    for name in "dae":
        with tilestone.open(f"{bucket}/{name}") as opened:
            assert "Tilestone" in opened.writer and opened.verify().ok


def test_dcp_saves_and_loads_in_all_its_ways(
    worlds: ranks.Worlds, object_server: Server, bucket: str
) -> None:
    worlds[2].run(dcp_on_each, object_server.environment, bucket)


def test_what_writes_files_itself_is_refused(bucket: str) -> None:
    path, state = f"{bucket}/w", {"w": torch.ones(3)}
    as_safetensors = dcp.FileSystemWriter(
        path, serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS
    )
    common = TorchCommonSaveStrategy("torch", 1)
    for call in (
        lambda: stock.save(state, storage_writer=as_safetensors),
        lambda: dcp.save(state, checkpoint_id=path, use_collectives=False),
        lambda: common.save_common({"a": 1}, path),
        lambda: core.save_config(core.CheckpointingConfig("torch_dist"), path),
        lambda: megatron.save({"a": 1}, path, verify_integrity=True),
        lambda: tilestone.save(state, path, format="zarr"),
    ):
        with pytest.raises((tilestone.UnsupportedError, stock.CheckpointException)) as raised:
            call()
        assert "needs a directory" in str(raised.value) or "zarr" in str(raised.value)
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(path)


def megatron_on_each(rank: int, world: int, environment: dict[str, str], bucket: str) -> list[Any]:
    os.environ.update(environment)
    path = f"{bucket}/m"

    def state(filled: bool) -> dict[str, Any]:
        data = torch.arange(6.0).reshape(2, 3) + 10 * rank if filled else torch.zeros(2, 3)
        of_rank = megatron.ShardedObject("o", [rank] if filled else None, (world,), (rank,))
        entity = megatron.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))
        return {"w": entity, "o": of_rank, "step": 7 if filled else 0}

    megatron.save(state(True), f"{path}1")
    request = megatron.save(state(True), path, async_sharded_save=True)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    loaded = megatron.load(state(False), path)
    assert torch.equal(loaded["w"], state(True)["w"].data) and loaded["o"] == [rank]
    assert megatron.load(state(False), f"{path}1")["o"] == [rank]
    try:
        megatron.save(state(True), f"{path}2", verify_integrity=True)
        raise AssertionError("verify_integrity was not refused")
    except tilestone.UnsupportedError as error:
        assert "verify_integrity" in str(error)
    megatron.save(state(True), path)  # over the files with fixed names
    assert torch.equal(megatron.load(state(False), path)["w"], state(True)["w"].data)
    assert megatron.load_common_state_dict(path)["step"] == 7
    megatron.remove_sharded_tensors(path, "o") if rank == 0 else None
    return sorted(megatron.load_tensors_metadata(path))


def test_megatron_saves_loads_and_removes_keys(
    worlds: ranks.Worlds, object_server: Server, bucket: str
) -> None:
    assert worlds[2].run(megatron_on_each, object_server.environment, bucket) == [["w"]] * 2
    names = {name.rpartition("/")[2] for name in object_server.files().find(f"{bucket}/m")}
    assert {".metadata", "metadata.json", "common.pt"} <= names
    assert megatron.check_is_distributed_checkpoint(f"{bucket}/m")
    assert not megatron.check_is_distributed_checkpoint(f"{bucket}/n")
    with pytest.raises(tilestone.NotFoundError, match="is not a distributed checkpoint"):
        megatron.load({}, f"{bucket}/n")


def test_a_training_run_of_megatron_is_resumed_and_keeps_what_it_should(bucket: str) -> None:
    run = f"{bucket}/run"
    assert load_run(run) == 0
    for iteration in (100, 200, 300):
        save_run(run, iteration, save_retain_interval=200)
    assert load_run(run) == 300
    assert training.read_metadata(training.get_checkpoint_tracker_filename(run)) == (300, False)
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(f"{run}/iter_0000100")
    assert tilestone.open(f"{run}/iter_0000200").verify().ok
    save_run(run, 400, release=True)
    assert training.read_metadata(training.get_checkpoint_tracker_filename(run)) == (0, True)


def command(*words: str) -> str:
    line = [sys.executable, "-m", "tilestone", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def test_the_command_line_takes_places_in_stores(bucket: str, tmp_path: pathlib.Path) -> None:
    path, local, back = f"{bucket}/a", str(tmp_path / "local"), f"{bucket}/back"
    tilestone.save(state_of(0, 1), path)
    assert "model.half" in command("ls", path) and "torch_dist" in command("inspect", path)
    assert command("verify", path).startswith("ok")
    command("convert", path, local, "--to", "torch_dist")
    command("convert", local, back, "--to", "torch_dist")
    command("convert", path, f"{bucket}/between", "--to", "torch_dist")
    command("convert", path, f"{bucket}/zarr", "--to", "zarr")
    for place in (back, local):
        assert command("diff", path, place).startswith("no difference: 4 tensors and 3 objects")
    for place in (local, back, f"{bucket}/between", f"{bucket}/zarr"):
        expect_state(tilestone.load(place))
        assert numpy.array_equal(tilestone.load(place)["w"], whole(1).numpy())
    single = str(tmp_path / "whole.safetensors")
    tilestone.convert(path, single, format="safetensors", keys=["w"])
    tilestone.convert(single, f"{bucket}/again", format="torch_dist")
    assert numpy.array_equal(tilestone.load(f"{bucket}/again")["w"], whole(1).numpy())
    assert command("gc", path) == "no leftovers\n"


def scenario(name: str, path: str) -> Any:
    line = [sys.executable, plain_ranks.__file__, name, path]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["together", "one_by_one"])
def test_ranks_without_a_process_group_save_by_files(name: str, bucket: str) -> None:
    assert scenario(name, f"{bucket}/f")
    plain_ranks.expect_state(f"{bucket}/f", 4)
