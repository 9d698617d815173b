"""tilestone.dcp on several ranks: drop-in and plug-in, with torch's own functions beside them."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from ranks import Worlds
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tilestone
import tilestone.dcp as dcp

warnings.simplefilter("ignore")


def state_of(world: int, scale: float, rank: int) -> dict[str, Any]:
    """Sharded in both of torch's ways, unevenly and emptily; the same on all ranks; a rank's own."""
    mesh = init_device_mesh("cpu", (world,))
    rows = torch.arange(15, dtype=torch.float32).reshape(3, 5) * scale
    places = [f"rank:{each}/cpu" for each in range(world)]
    older = sharded_tensor.zeros(ChunkShardingSpec(0, places), 5, 2)
    several = sharded_tensor.zeros(ChunkShardingSpec(0, places + places), 7, 2)  # on each rank
    for shard in older.local_shards() + several.local_shards():
        shard.tensor.fill_(scale * (rank + 1 + shard.metadata.shard_offsets[0]))
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.T.contiguous(), mesh, [Shard(0)]),
        "one": distribute_tensor(rows[:1].contiguous(), mesh, [Shard(0)]),  # rank 0 has all
        "same": distribute_tensor(rows + 1, mesh, [Replicate()]),
        "older": older,
        "several": several,
        "plain": torch.arange(4) * scale,
        "n": {"step": 7 * scale, f"of_rank_{rank}": [rank * scale]},
    }


def values(state: dict[str, Any]) -> Any:
    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(value) for key, value in item.items()}
        if isinstance(item, sharded_tensor.ShardedTensor):
            return [shard.tensor.tolist() for shard in item.local_shards()]
        whole = item.full_tensor() if hasattr(item, "full_tensor") else item
        return whole.tolist() if isinstance(whole, torch.Tensor) else whole

    return plain(state)


def all_ways(rank: int, world: int, folder: str) -> list[str]:
    """Each of the saves, loaded in each of the ways."""
    state = state_of(world, 1, rank)
    lowest = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    saves = {
        "drop-in": lambda path: dcp.save(state, checkpoint_id=path),
        "torch plans": lambda path: dcp.save(state, checkpoint_id=path, planner=lowest),
        "plug-in": lambda path: stock.save(state, storage_writer=dcp.FileSystemWriter(path)),
        "in the background": lambda path: dcp.async_save(state, checkpoint_id=path).result(),
        "torch": lambda path: stock.save(state, checkpoint_id=path),
    }
    done = []
    for number, (name, save) in enumerate(saves.items()):
        path = f"{folder}/{number}"
        for _ in range(2):  # the second time over the first
            saved = save(path)
        assert isinstance(saved, stock.Metadata) and saved.planner_data["n.step"] == ("n", "step")
        reader = dcp.FileSystemReader(path)
        loads: list[Any] = [
            lambda wanted, path=path: dcp.load(wanted, checkpoint_id=path),
            lambda wanted, reader=reader: stock.load(wanted, storage_reader=reader),
            lambda wanted, path=path: stock.load(wanted, checkpoint_id=path),
        ]
        for load in loads:
            wanted = state_of(world, 0, rank)
            load(wanted)
            assert values(wanted) == values(state), name
        if name != "torch" and rank == 0:
            with tilestone.open(path) as opened:
                found = opened.verify()
                assert found.ok and found.items_without_checksum == 0
                assert opened.world_size == world
            assert tilestone.gc(path) == []
        done.append(name)
        dist.barrier()
    return done


def test_what_one_way_saves_all_ways_load(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    assert worlds[2].run(all_ways, str(tmp_path)) == [
        ["drop-in", "torch plans", "plug-in", "in the background", "torch"]
    ] * 2


def older(shards: list[Any], boxes: list[Any], size: tuple[int, ...], group: Any = None) -> Any:
    """A ShardedTensor of float32 from this rank's shards and from the boxes of all, by rank."""
    made = [
        sharded_tensor.ShardMetadata(list(at), list(shape), f"rank:{rank}/cpu")
        for rank, at, shape in boxes
    ]
    properties = sharded_tensor.metadata.TensorProperties(dtype=torch.float32)
    whole = sharded_tensor.ShardedTensorMetadata(made, torch.Size(size), properties)
    own = [each for each in made if each.placement.rank() == dist.get_rank()]
    local = [sharded_tensor.Shard(*pair) for pair in zip(shards, own, strict=True)]
    return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(
        local, whole, process_group=group
    )


def nested(rank: int, world: int, folder: str) -> None:
    """A shard of FSDP1 that is itself sharded by tensor parallelism: rows outside, columns inside."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    low, whole = rank // 2 * 2, torch.arange(24, dtype=torch.float32).reshape(4, 6)
    columns = slice(0, 4) if rank == low else slice(4, 6)

    def state(source: torch.Tensor) -> dict[str, Any]:
        part = source[low : low + 2, columns].clone()
        boxes = [(low, (0, 0), (2, 4)), (low + 1, (0, 4), (2, 2))]
        inner = older([part], boxes, (2, 6), rows)
        places = [(at + rank - low, (at, 0), (2, 6)) for at in (0, 2)]
        outer = older([torch.empty(2, 6)], places, (4, 6))
        outer.local_shards()[0].tensor = inner
        return {"w": outer, "plain": torch.ones(2)}

    def first(value: float) -> Any:  # stock can't load it: it drops the key where there is no shard
        return sharded_tensor.full(ChunkShardingSpec(0, ["rank:0/cpu"]), (3, 2), value)

    saves: list[Any] = [dcp.save, stock.save]
    for number, save in enumerate(saves):
        save(state(whole), checkpoint_id=f"{folder}/{number}")
        with tilestone.open(f"{folder}/{number}") as opened:
            assert opened.read("w").tolist() == whole.tolist()
        for load in (dcp.load, stock.load):
            wanted = state(whole * 0)
            load(wanted, checkpoint_id=f"{folder}/{number}")
            (shard,) = wanted["w"].local_shards()[0].tensor.local_shards()
            assert torch.equal(shard.tensor, whole[low : low + 2, columns]), (save, load)
        save({"first": first(2)}, checkpoint_id=f"{folder}/{number}")
        only = {"first": first(0)}
        dcp.load(only, checkpoint_id=f"{folder}/{number}")
        assert [each.tensor.sum().item() for each in only["first"].local_shards()] == [12] * (rank == 0)


def test_sharded_tensors_inside_sharded_tensors(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    worlds[4].run(nested, str(tmp_path))


class FailsOn(dcp.DefaultSavePlanner):
    """A planner that fails on one rank while it writes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self._rank:
            raise OSError("no such device")
        return super().resolve_data(write_item)


def failures(rank: int, world: int, path: str) -> None:
    dcp.save({"n": 1}, checkpoint_id=path)
    kept = []
    for failing in range(world):
        for save in (
            lambda: dcp.save(state_of(world, 1, rank), checkpoint_id=path, planner=FailsOn(failing)),
            lambda: dcp.save({"n": object if rank == failing else 2, "f": bad(rank == failing)},
                             checkpoint_id=path),
        ):  # fmt: skip
            try:
                save()
                raise AssertionError("it did not fail")
            except dcp.CheckpointException as error:
                assert failing in error.failures, error
                kept.append(error)
        assert tilestone.load(path, group=tilestone.solo()) == {"n": 1}
        dist.barrier()
    dcp.save({"n": 3}, checkpoint_id=path, planner=FailsOn(world))  # while the errors are kept
    wanted = {"n": 0}
    try:
        dcp.load({"n": 0} if rank == 0 else {"n": 0, "m": 0}, checkpoint_id=path)
        raise AssertionError("it did not fail")
    except dcp.CheckpointException as error:
        assert "Missing key in checkpoint state_dict: m" in str(error)
    dcp.load(wanted, checkpoint_id=path)
    assert wanted == {"n": 3}
    dcp.save({"n": NotOnRank1()}, checkpoint_id=path)
    try:
        dcp.load({"n": 0}, checkpoint_id=path)
        raise AssertionError("it did not fail")
    except dcp.CheckpointException as error:
        assert 1 in error.failures and "no such device on rank 1" in str(error)


class NotOnRank1:
    """An object that rank 1 can't make from what is stored."""

    def __init__(self) -> None:
        self.x = 1

    def __setstate__(self, state: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no such device on rank 1")


def bad(fails: bool) -> Any:
    """An object that can't be saved, or one that can."""
    return (lambda: None) if fails else 1


def test_a_failure_of_one_rank_reaches_all_and_changes_nothing(worlds: Worlds, ckpt: str) -> None:
    worlds[2].run(failures, ckpt)


def other_ways(rank: int, world: int, folder: str) -> None:
    # torch's planner uses cached plans, which carry the order of an earlier save.
    for step in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = state_of(world, step + 1, rank)
        stock.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/cached"), planner=planner)
        wanted = state_of(world, 0, rank)
        dcp.load(wanted, checkpoint_id=f"{folder}/cached")
        assert values(wanted) == values(state)
    # A part of the ranks, one rank alone, and each rank for itself.
    alone = dist.new_group([1])
    if rank == 1:
        for way in ({"process_group": alone}, {"no_dist": True}):
            dcp.save({"n": 1}, checkpoint_id=f"{folder}/part", **way)
            stock.save({"n": 2}, storage_writer=dcp.FileSystemWriter(f"{folder}/part"), **way)
            wanted = {"n": 0}
            dcp.load(wanted, checkpoint_id=f"{folder}/part", **way)
            assert wanted == {"n": 2}
    for step in range(2):
        state = state_of(world, step + 1, rank)
        # Of the same names, but each rank's own; and of a class that the engine does not create.
        state["own"] = {"w": torch.full((2,), rank + 1.0), "n": rank, "args": argparse.Namespace(n=rank)}
        dcp.save(state, checkpoint_id=f"{folder}/own", use_collectives=False)
        for load in (dcp.load, stock.load):
            wanted = state_of(world, 0, rank)
            wanted["own"] = {"w": torch.zeros(2), "n": None, "args": None}
            planner = dcp.DefaultLoadPlanner()
            load(wanted, checkpoint_id=f"{folder}/own", planner=planner)
            assert values(wanted) == values(state)
            assert planner.metadata.state_dict_metadata["own.w"].size == (2,)
        dist.barrier()
    whole = {"rows": torch.zeros(3, 5), "own": {"n": None}}
    if rank == 0:  # in another layout the parts of all ranks
        dcp.load(whole, checkpoint_id=f"{folder}/own", no_dist=True)
        assert whole["rows"].tolist() == (torch.arange(15.0).reshape(3, 5) * 2).tolist()
        assert whole["own"]["n"] == 0
    try:
        wanted = {"own": {"n": 0}} if rank == 0 else {"own": {"no": 0}}
        dcp.load(wanted, checkpoint_id=f"{folder}/own")
        raise AssertionError("it did not fail")
    except dcp.CheckpointException as error:  # on every rank
        assert list(error.failures) == [1] and "own.no" in str(error.failures[1][0])
    try:  # a rank that does not see the others' directory
        dcp.load({"own": {"n": 0}}, checkpoint_id=f"{folder}/{('own', 'none')[rank]}")
        raise AssertionError("it did not fail")
    except dcp.CheckpointException as error:
        assert list(error.failures) == [1] and "none" in str(error.failures[1][0])
    try:
        dcp.save({"n": 1}, checkpoint_id=f"{folder}/cached", use_collectives=False)
        raise AssertionError("it did not fail")
    except RuntimeError as error:
        assert "torch would load it in the place" in str(error)


def test_cached_plans_parts_of_the_ranks_and_no_collectives(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(other_ways, str(tmp_path))


def trained(kind: str, seed: int) -> Any:
    """A model of FSDP1 over replicas, or of FSDP2 over tensor parallelism, and its optimizer."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "HSDP":
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True, device_id=torch.device("cpu"),
        )  # fmt: skip
    else:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = fully_shard(parallelize_module(model, mesh["inner"], plan), mesh=mesh["outer"])
    optimizer = torch.optim.Adam(model.parameters(), lr=seed / 10)
    for _ in range(seed):
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def models(rank: int, world: int, folder: str) -> None:
    for kind in ("HSDP", "FSDP2 over TP"):
        saved = trained(kind, 2)
        parts = get_state_dict(*saved)
        path = f"{folder}/{kind}"
        dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=path)
        for load in (dcp.load, stock.load):
            loaded = trained(kind, 1)
            weights, moments = get_state_dict(*loaded)
            state = {"model": weights, "optimizer": moments}
            load(state, checkpoint_id=path)
            set_state_dict(
                *loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            whole = StateDictOptions(full_state_dict=True)
            for a, b in zip(
                get_state_dict(*saved, options=whole), get_state_dict(*loaded, options=whole)
            ):
                assert values(a) == values(b), kind


def test_models_of_fsdp1_and_fsdp2_resume(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    worlds[4].run(models, str(tmp_path))


def in_a_process(rank: int, world: int, folder: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    multiprocessing.current_process()._config["daemon"] = False  # so that torch may start one
    way = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    dcp.enable()
    saves: list[Any] = [
        lambda state, path: dcp.async_save(state, checkpoint_id=path, **way),
        lambda state, path: stock.async_save(state, checkpoint_id=path, **way),
    ]
    for number, save in enumerate(saves):
        path = f"{folder}/{number}"
        saved = save({"plain": torch.ones(3), "n": number}, path).result()
        assert type(saved) is stock.Metadata and saved.storage_meta.save_id
        with tilestone.open(path) as opened:
            assert opened.writer.startswith("Tilestone") and opened["n"] == number
    from torch.distributed.checkpoint import _async_process_executor

    executor = _async_process_executor._ProcessBasedAsyncCheckpointExecutor()
    # torch's error, where torch gives it; its first parameter may be passed by name
    failed = executor.execute_save(staging_future_or_state_dict={"n": 1}).exception()
    assert "`checkpoint_id` must be specified" in str(failed)
    dcp.disable()
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends the process


def test_async_save_in_a_process(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    worlds[1].run(in_a_process, str(tmp_path))
