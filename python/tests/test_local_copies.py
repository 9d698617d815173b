"""Local copies: what another rank of the group writes, in the rank's own data file."""

from __future__ import annotations

import pathlib

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestone


def state_of(shape: tuple[int, int]) -> tuple[dict[str, DTensor], dist.ProcessGroup]:
    """A tensor-parallel weight and a norm that all ranks have; the tensor-parallel group."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    weight = torch.arange(64.0).reshape(8, 8)
    norm = torch.arange(5.0)
    state = {
        "weight": distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
        "norm": distribute_tensor(norm, mesh, [Replicate(), Replicate()]),
        "bias": distribute_tensor(norm + 1, mesh, [Replicate(), Replicate()]),
    }
    return state, mesh.get_group("tp")


def save_and_load(rank: int, world: int, folder: str) -> list[tuple[int, int]]:
    state, tp_group = state_of((2, 2))
    own = dist.get_process_group_ranks(tp_group)
    results = []
    for name, options in {
        "none": {},
        "group": {"replicate": "local", "replicate_group": tp_group},
        "rule": {"replicate": "local", "replicate_group": own, "agreement": "rule"},
        "all": {"replicate": "local", "replicate_group": range(world)},
        "budget": {"replicate": "local", "replicate_group": range(world), "max_copy_bytes": 19},
    }.items():
        result = tilestone.save(state, f"{folder}/{name}", **options)
        results.append((result.copies, result.copy_bytes))
        other = state_of((1, 4))[0] if name == "all" else state_of((2, 2))[0]
        for tensor in other.values():
            tensor.to_local().zero_()
        loaded = tilestone.load(other, f"{folder}/{name}")
        for key, tensor in state.items():
            assert torch.equal(loaded[key].full_tensor(), tensor.full_tensor()), (name, key)
    stock = {key: torch.zeros(tensor.shape) for key, tensor in state.items()}
    dcp.load(stock, checkpoint_id=f"{folder}/all")  # sees nothing of copies
    for key, tensor in state.items():
        assert torch.equal(stock[key], tensor.full_tensor()), key
    return results


def refusals(rank: int, world: int, folder: str) -> list[str]:
    state, _ = state_of((2, 2))
    lonely = [dist.new_group([r]) for r in range(world)]
    texts = []
    for replicate, group in [
        ("local", None), ("local", [rank, rank]), ("local", [0, 9]), ("local", "abc"),
        ("near", [rank]), ("none", [rank]), ("local", lonely[0]), ("local", 3),
    ]:  # fmt: skip
        try:
            tilestone.save(state, f"{folder}/no", replicate=replicate, replicate_group=group)
        except tilestone.CheckpointError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_copies_follow_the_group_and_the_budget_and_change_no_load(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    of_ranks = worlds[4].run(save_and_load, str(tmp_path))
    none, group, rule, everybody, budget = (
        [of_rank[i] for of_rank in of_ranks] for i in range(5)
    )
    assert none == [(0, 0)] * 4
    assert group == rule
    assert 0 < sum(copies for copies, _ in group) < sum(copies for copies, _ in everybody)
    # Of the replicated norm and bias three copies each, of each half of the weight one.
    assert sum(copies for copies, _ in everybody) == 3 + 3 + 2
    assert budget == [(0, 0)] * 4
    for name, results in {"group": group, "all": everybody}.items():
        assert tilestone.open(tmp_path / name).verify().ok, name
        assert sum(size for _, size in results) > 0
    assert len(list((tmp_path / "all").glob("*.distcp"))) == 4  # each rank has one of its own


def test_what_is_no_replicate_group_is_refused_on_all_ranks(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    texts = worlds[4].run(refusals, str(tmp_path))
    expected = [
        "there is no replicate_group", "names rank", "rank", "list of ranks",
        'replicate is "none" or "local"', 'replicate is "none"', "without this rank",
        "list of ranks",
    ]  # fmt: skip
    for of_rank in texts:
        assert len(of_rank) == len(expected), of_rank
        for text, part in zip(of_rank, expected, strict=True):
            assert part in text
            assert text.startswith("InvalidArgumentError")
    assert not (tmp_path / "no").exists()
