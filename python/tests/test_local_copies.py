"""Local copies: a rank's data file has copies of items that other ranks of the group write."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestone


def state_of(shape: tuple[int, int]) -> tuple[dict[str, DTensor], dist.ProcessGroup]:
    """A tensor-parallel weight, a norm that all ranks have, and the tensor-parallel group."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    weight = torch.arange(64.0).reshape(8, 8)
    norm = torch.arange(100.0, 105.0)  # bytes that occur in no other tensor
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
    for name, copies in {
        "none": None,
        "group": tilestone.LocalCopies(tp_group),
        "ranks": tilestone.LocalCopies(own),
        "all": tilestone.LocalCopies(range(world)),
        "budget": tilestone.LocalCopies(range(world), max_bytes=19),
    }.items():
        result = tilestone.save(state, f"{folder}/{name}", copies=copies)
        results.append((result.copies, result.copy_bytes))
        other = state_of((1, 4))[0] if name == "all" else state_of((2, 2))[0]
        for tensor in other.values():
            tensor.to_local().zero_()
        loaded = tilestone.load(other, f"{folder}/{name}")
        for key, tensor in state.items():
            assert torch.equal(loaded[key].full_tensor(), tensor.full_tensor()), (name, key)
    stock = {key: torch.zeros(tensor.shape) for key, tensor in state.items()}
    dcp.load(stock, checkpoint_id=f"{folder}/all")  # it ignores copies
    for key, tensor in state.items():
        assert torch.equal(stock[key], tensor.full_tensor()), key
    return results


def refusals(rank: int, world: int, folder: str) -> list[str]:
    state, _ = state_of((2, 2))
    lonely = [dist.new_group([r]) for r in range(world)]
    texts = []
    for group in (None, [rank, rank], [0, 9], lonely[0], object()):
        try:
            copies = tilestone.LocalCopies(group)  # type: ignore[arg-type]
            tilestone.save(state, f"{folder}/no", copies=copies)
        except tilestone.CheckpointError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def damage_and_repair(path: pathlib.Path) -> None:
    """Damages one of the four copies of the norm's elements, then all four."""
    elements = torch.arange(100.0, 105.0).numpy().tobytes()
    whole = {file: file.read_bytes() for file in path.glob("*.distcp")}
    assert all(elements in data for data in whole.values())
    first, *others = sorted(whole)
    damaged = {file: data.replace(elements, b"x" * len(elements)) for file, data in whole.items()}
    first.write_bytes(damaged[first])
    phases = []
    report = tilestone.repair(path, progress=lambda progress: phases.append(progress.phase))
    assert [(damage.file, damage.key) for damage in report.mended] == [(first.name, "norm")]
    assert report.now.ok and phases
    assert first.read_bytes() == whole[first]
    assert tilestone.repair(path).mended == []
    for file in [first, *others]:
        file.write_bytes(damaged[file])
    report = tilestone.repair(path)
    assert report.mended == [] and not report.now.ok
    assert {damage.key for damage in report.now.damages} == {"norm"}


def test_copies_follow_the_group_and_the_budget_and_change_no_load(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    of_ranks = worlds[4].run(save_and_load, str(tmp_path))
    none, group, listed, everybody, budget = (
        [of_rank[i] for of_rank in of_ranks] for i in range(5)
    )
    assert none == [(0, 0)] * 4
    assert group == listed
    assert 0 < sum(copies for copies, _ in group) < sum(copies for copies, _ in everybody)
    # Three copies each of the replicated norm and bias, and one of each half of the weight.
    assert sum(copies for copies, _ in everybody) == 3 + 3 + 2
    assert budget == [(0, 0)] * 4
    for name, results in {"group": group, "all": everybody}.items():
        assert tilestone.open(tmp_path / name).verify().ok, name
        assert sum(size for _, size in results) > 0
    assert len(list((tmp_path / "all").glob("*.distcp"))) == 4  # one per rank
    damage_and_repair(tmp_path / "all")


def test_a_repair_of_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(tilestone.NotFoundError):
        tilestone.repair(tmp_path)


def test_an_invalid_group_of_copies_is_refused_on_all_ranks(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    texts = worlds[4].run(refusals, str(tmp_path))
    expected = [
        "copies.group is empty", "names rank", "rank", "without this rank", "list of ranks",
    ]  # fmt: skip
    for of_rank in texts:
        assert len(of_rank) == len(expected), of_rank
        for text, part in zip(of_rank, expected, strict=True):
            assert part in text
            assert text.startswith("InvalidArgumentError")
    assert not (tmp_path / "no").exists()


def megatron_saves(rank: int, world: int, folder: str) -> str:
    """Saves on 4 ranks with TP and DP groups of 2 ranks in Megatron's parallel_state."""
    import megatron_layouts

    import tilestone.megatron as megatron
    from tilestone.megatron.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from tilestone.megatron.strategies.torch import TorchDistSaveShardedStrategy

    def state() -> dict[str, Any]:
        """A state that all ranks hold. Rank 0 has the main replica."""
        norm = torch.arange(6.0)
        return {"norm": megatron.ShardedTensor.from_rank_offsets("norm", norm, replica_id=rank)}

    def refused(name: str, **options: Any) -> str:
        with pytest.raises(tilestone.InvalidArgumentError) as error:
            megatron.save(state(), f"{folder}/{name}", **options)
        assert not pathlib.Path(folder, name).exists()
        return str(error.value)

    text = refused("no", copies=tilestone.LocalCopies())
    parallel_state = megatron_layouts.megatron().parallel_state
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, copies=tilestone.LocalCopies())
    with megatron_layouts.initialised(parallel_state, tensor_model_parallel_size=2) as groups:
        megatron.save(state(), f"{folder}/default", copies=tilestone.LocalCopies())
        megatron.save(state(), f"{folder}/given", copies=tilestone.LocalCopies(groups.tp))
        megatron.save(state(), f"{folder}/strategy", strategy)
        megatron.save(
            state(), f"{folder}/all", strategy, copies=tilestone.LocalCopies(range(world))
        )
        megatron.save(state(), f"{folder}/budget", copies=tilestone.LocalCopies(max_bytes=23))
        wrapper = FullyParallelSaveStrategyWrapper(strategy, groups.dp)
        megatron.save(state(), f"{folder}/wrapped", wrapper)
    return text


def test_megatron_saves_copy_within_the_model_parallel_group_or_raise(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for text in worlds[4].run(megatron_saves, str(tmp_path)):
        assert "parallel_state is not initialised" in text
    elements = torch.arange(6.0).numpy().tobytes()
    places_of = {"default": 2, "given": 2, "strategy": 2, "all": 4, "budget": 1, "wrapped": 2}
    for name, places in places_of.items():
        files = list((tmp_path / name).glob("*.distcp"))
        assert sum(elements in file.read_bytes() for file in files) == places, name
        assert tilestone.open(tmp_path / name).verify().ok


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"copies": tilestone.LocalCopies()}, "copies.group"),
        ({"copies": [0, 1]}, "copies"),
        ({"resources": "two"}, "resources"),
        ({"timeout": "a minute"}, "timeout"),
    ],
)
def test_by_files_an_invalid_option_on_one_rank_fails_on_the_others(
    tmp_path: pathlib.Path, wrong: dict[str, Any], says: str
) -> None:
    first, second = (tilestone.ByFiles(rank, 2, "the first start", wait=False) for rank in (0, 1))
    tilestone.save({"step": 3}, tmp_path / "a", by_files=first)
    with pytest.raises(tilestone.InvalidArgumentError, match=says):
        tilestone.save({"step": 3}, tmp_path / "a", by_files=second, **wrong)
    (found,) = tilestone.unpublished(tmp_path / "a")
    assert says in found.failure and found.abandoned
