"""Random round trips from N to M real torch ranks, half of them with stock DCP on one side."""

from __future__ import annotations

import itertools
import pathlib
import random

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import mentions
from test_torch_tensors import crc, random_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestone

# World size -> (ranks, shape) of the meshes that the cases use. Some meshes leave out ranks.
MESHES = {
    1: [([0], (1,)), ([0], (1, 1))],
    2: [([0, 1], (2,)), ([0, 1], (1, 2)), ([1, 0], (2,)), ([1], (1,))],
    3: [([0, 1, 2], (3,)), ([0, 2], (2,)), ([2, 1, 0], (3, 1))],
    4: [([0, 1, 2, 3], (4,)), ([0, 1, 2, 3], (2, 2)), ([3, 1, 2, 0], (2, 2)), ([1, 2, 3], (3,)),
        ([0, 1, 2, 3], (2, 1, 2))],
    8: [(list(range(8)), (8,)), (list(range(8)), (2, 4)), (list(range(8)), (2, 2, 2)),
        ([7, 5, 3, 1], (2, 2)), ([6, 4, 0], (3,))],
}  # fmt: skip
DTYPES = ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "float8_e4m3fn", "complex64"]
_meshes: dict[tuple, DeviceMesh] = {}


def mesh_of(members: list[int], shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of these ranks. All ranks of the world must call this in the same order."""
    key = (tuple(members), shape)
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", torch.tensor(members).reshape(shape))
    return _meshes[key]


def global_tensors(seed: int) -> dict[str, torch.Tensor]:
    """The global tensors of a seed: the same on every rank of every world."""
    draw = random.Random(seed)
    tensors = {}
    for index in range(draw.randint(3, 6)):
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(draw.randint(0, 3)))
        tensors[f"t{index}"] = random_tensor(draw.choice(DTYPES), shape, seed * 100 + index)
    return tensors


def irregular(
    key: str, whole: torch.Tensor, draw: random.Random, rank: int, world: int
) -> tilestone.ShardedTensor:
    """This rank's slab after random cuts along the first dim. Some slabs are empty."""
    n = whole.shape[0]
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(world - 1)), n]
    low, high = cuts[rank], cuts[rank + 1]
    box = ((low, high), *((0, k) for k in whole.shape[1:]))
    return tilestone.ShardedTensor.from_box(key, whole[low:high].clone(), tuple(whole.shape), box)


def flat(
    key: str, whole: torch.Tensor, draw: random.Random, rank: int, world: int
) -> tilestone.ShardedTensor:
    """This rank's slice of the flattened tensor."""
    n = whole.numel()
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(world - 1)), n]
    where = (cuts[rank], cuts[rank + 1])
    data = whole.reshape(-1)[slice(*where)].clone()
    return tilestone.ShardedTensor.from_rank_offsets_flat(
        key, data, tuple(whole.shape), flattened_range=where
    )


def laid_out(seed: int, rank: int, world: int, side: str, role: str) -> dict:
    """The tensors of a seed as this rank holds them when the given side writes or reads."""
    draw = random.Random(f"{seed} {world} {role}")
    state = {}
    for key, whole in global_tensors(seed).items():
        members, shape = draw.choice(MESHES[world])
        mesh = mesh_of(members, shape)
        kind = draw.choice(["dtensor", "dtensor", "plain", "wrapped"])
        if kind == "plain" or whole.dim() == 0:
            state[key] = whole.clone()
        elif kind == "wrapped" and side == "tilestone":
            state[key] = draw.choice([irregular, flat])(key, whole, draw, rank, world)
        else:
            placements = [
                draw.choice([Shard(draw.randrange(whole.dim())), Replicate()]) for _ in shape
            ]
            state[key] = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    return state


def local_of(value: object) -> torch.Tensor:
    if isinstance(value, tilestone.ShardedTensor):
        value = value.data
    return value.to_local() if isinstance(value, DTensor) else value  # type: ignore[return-value]


def objects(seed: int) -> dict:
    return {"step": seed, "nested": {"text": f"seed {seed}", "pair": (seed, None)}}


def write(rank: int, world: int, seeds: list[int], side: str, folder: str) -> None:
    for seed in seeds:
        state = {**laid_out(seed, rank, world, side, "writer"), "objects": objects(seed)}
        path = f"{folder}/{seed}"
        if side == "stock":
            dcp.save(state, checkpoint_id=path)
        else:
            tilestone.save(state, path)


def read(rank: int, world: int, seeds: list[int], side: str, folder: str) -> int:
    checked = 0
    for seed in seeds:
        wanted = laid_out(seed, rank, world, side, "reader")
        expected = {key: crc(local_of(value)) for key, value in wanted.items()}
        for value in wanted.values():
            local = local_of(value)
            local.view(torch.uint8).zero_() if local.dim() else local.zero_()
        wanted["objects"] = {"step": None, "nested": {"text": None, "pair": None}}
        if side == "stock":
            dcp.load(wanted, checkpoint_id=f"{folder}/{seed}")
            loaded = wanted
        else:
            loaded = tilestone.load(wanted, f"{folder}/{seed}")
        assert loaded["objects"] == objects(seed)
        for key, value in expected.items():
            assert crc(local_of(loaded[key])) == value, f"seed {seed}, {key}, rank {rank}"
            checked += 1
    return checked


def round_trips(
    worlds: ranks.Worlds, writers: int, readers: int, sides: tuple[str, str], folder: pathlib.Path
) -> None:
    seeds = [1000 * writers + 100 * readers + i for i in range(4)]
    path = folder / "-".join(sides)
    path.mkdir()
    worlds[writers].run(write, seeds, sides[0], str(path))
    counts = worlds[readers].run(read, seeds, sides[1], str(path))
    assert all(count >= 3 * len(seeds) for count in counts)


SIDES = [("tilestone", "stock"), ("stock", "tilestone"), ("tilestone", "tilestone")]


# One test for all of a number of writers, because each test's meshes take a new world.
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_four_random_states_come_back_on_other_ranks_through_either_side(
    writers: int, worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for readers, sides in itertools.product([1, 2, 3, 4], SIDES):
        folder = tmp_path / f"{readers}"
        folder.mkdir(exist_ok=True)
        round_trips(worlds, writers, readers, sides, folder)


@pytest.mark.parametrize(("writers", "readers"), [(8, 8), (8, 3), (2, 8)])
def test_random_states_come_back_on_and_from_eight_ranks(
    writers: int, readers: int, worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    round_trips(worlds, writers, readers, ("tilestone", "tilestone"), tmp_path)


def save_in_subgroup(rank: int, world: int, path: str) -> str:
    group = dist.new_group([1, 3])
    mesh = mesh_of([1, 3], (2,))
    whole = torch.arange(10.0)
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    replicated = distribute_tensor(whole + 1, mesh, [Replicate()], src_data_rank=None)
    if rank not in (1, 3):
        return "outside"
    tilestone.save({"x": tensor, "y": replicated}, path, group=group)
    wanted = {"x": torch.zeros(10), "y": torch.zeros(10)}
    tilestone.load(wanted, path, group=group)
    assert torch.equal(wanted["x"], whole) and torch.equal(wanted["y"], whole + 1)
    return "inside"


def test_a_subgroup_saves_and_loads_without_the_others(worlds: ranks.Worlds, ckpt: str) -> None:
    assert worlds[4].run(save_in_subgroup, ckpt) == ["outside", "inside", "outside", "inside"]
    with tilestone.open(ckpt) as opened:
        assert opened.world_size == 2
        assert opened.read("x").tolist() == list(range(10))
        assert opened.read("y").tolist() == list(range(1, 11))


def save_replicas(rank: int, world: int, path: str) -> int:
    mesh = mesh_of([0, 1, 2, 3], (4,))
    state = {
        f"w{i}": distribute_tensor(torch.full((1000,), float(i)), mesh, [Replicate()])
        for i in range(8)
    }
    return tilestone.save(state, path).items_written


def test_replicas_are_written_once_and_by_all_ranks_in_turn(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    assert worlds[4].run(save_replicas, ckpt) == [2, 2, 2, 2]


def load_columns_and_replicas(rank: int, world: int, path: str) -> bool:
    mesh = mesh_of([0, 1, 2, 3], (4,))
    whole = torch.arange(512 * 2048, dtype=torch.float32).reshape(512, 2048)
    tilestone.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, path)
    wanted = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
    tilestone.load(wanted, path, reading=tilestone.Reading(two_phase="always"))
    own = wanted["w"].to_local()
    replica = {"w": torch.zeros_like(whole)}
    tilestone.load(
        replica, path, reading=tilestone.Reading(two_phase="always"),
        resources=tilestone.Resources(buffer_bytes=1 << 20),
    )  # fmt: skip
    return torch.equal(own, whole.chunk(4, dim=1)[rank]) and torch.equal(replica["w"], whole)


def test_rows_are_loaded_as_columns_and_as_replicas_in_two_phases(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    assert worlds[4].run(load_columns_and_replicas, ckpt) == [True] * 4
