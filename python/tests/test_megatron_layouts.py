"""Loads checkpoints of all versions and backends in random layouts, and while another job saves."""

from __future__ import annotations

import os
import pathlib
import random
from typing import Any

import torch
import torch.distributed as dist

import tilestone
import tilestone.megatron as tm
from ranks import Worlds
from test_goldens import GOLDEN, goldens
from tilestone.megatron import serialization
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.strategies import base
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from tilestone.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
NAMES = [name for name in goldens() if name.startswith("megatron-core-")]


def _cuts(seed: random.Random, length: int, parts: int) -> list[int]:
    return [0, *sorted(seed.randint(0, length) for _ in range(parts - 1)), length]


def _replicas(seed: random.Random, ranks: int, parts: int) -> list[list[int]]:
    """The ranks that hold each part, at least one each. The first one has the main replica."""
    holders: list[list[int]] = [[] for _ in range(parts)]
    for place, rank in enumerate(seed.sample(range(ranks), ranks)):
        holders[place % parts].append(rank)
    return holders


def _box(key: str, whole: torch.Tensor, axis: int, begin: int, end: int, replica: int) -> Any:
    offset = tuple(begin if d == axis else 0 for d in range(whole.dim()))
    shape = tuple(end - begin if d == axis else n for d, n in enumerate(whole.shape))
    return tm.ShardedTensor(
        key, None, whole.dtype, shape, tuple(whole.shape), offset, None, replica_id=replica
    )


def _parts(
    seed: random.Random, key: str, whole: torch.Tensor, rank: int, ranks: int
) -> list[tuple[Any, torch.Tensor]]:
    """This rank's entities of a tensor, without data, and their expected values.

    All ranks must use the same seed.
    """
    kind = seed.choice(["boxes", "slices", "whole", "two axes"])
    count = seed.randint(1, ranks)
    axis = seed.randrange(whole.dim()) if whole.dim() else 0
    mine = [
        (part, members.index(rank))
        for part, members in enumerate(_replicas(seed, ranks, count))
        if rank in members
    ]
    if whole.dim() == 0 or kind == "whole":
        entity = tm.ShardedTensor.from_rank_offsets(key, whole, replica_id=rank).without_data()
        return [(entity, whole)]
    if kind == "slices":
        flat, cuts = whole.reshape(-1), _cuts(seed, whole.numel(), count)
        return [
            (
                tm.ShardedTensor.from_rank_offsets_flat(
                    key, flat[cuts[p] : cuts[p + 1]], tuple(whole.shape),
                    flattened_range=slice(cuts[p], cuts[p + 1]), replica_id=replica,
                ).without_data(),
                flat[cuts[p] : cuts[p + 1]],
            )
            for p, replica in mine if cuts[p] < cuts[p + 1]
        ]  # fmt: skip
    cuts = _cuts(seed, whole.shape[axis], count)
    return [
        (
            _box(key, whole, axis, cuts[p], cuts[p + 1], replica),
            whole.narrow(axis, cuts[p], cuts[p + 1] - cuts[p]),
        )
        for p, replica in mine
    ]


def _read(path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All tensors as read by this rank alone, and the unique keys of the objects."""
    with tilestone.open(path, framework="torch") as opened:
        return {key: opened.read(key) for key in opened.tensor_keys()}, opened.object_keys()


def _layout(
    number: int, tensors: dict[str, torch.Tensor], rank: int, ranks: int, data: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A template of this rank's parts of all tensors, and the expected result of a load."""
    seed = random.Random(number)
    template: dict[str, Any] = {}
    wanted = {}
    for key, whole in tensors.items():
        for i, (entity, part) in enumerate(_parts(seed, key, whole, rank, ranks)):
            if data or i % 2:
                entity.data = torch.empty_like(part).contiguous()
            template[f"{key}/{i}"], wanted[f"{key}/{i}"] = entity, part
    return template, wanted


def _expect(loaded: dict[str, Any], wanted: dict[str, torch.Tensor], where: Any) -> None:
    for name, part in wanted.items():
        found = loaded[name].view(torch.uint8) if part.dim() else loaded[name]
        expected = part.contiguous().view(torch.uint8) if part.dim() else part
        assert loaded[name].dtype == part.dtype, (where, name)
        assert torch.equal(found, expected), (where, name)


class _Foreign(base.LoadShardedStrategy):
    """A user's own strategy around the checkpoint's one, so that the wrapper does the exchange."""

    can_handle_sharded_objects = True

    def __init__(self, path: str) -> None:
        self.path = path

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        with tilestone.open(self.path, framework="torch") as opened:
            return {
                name: opened.read(item.key)[
                    tuple(slice(o, o + n) for o, n in zip(item.global_offset, item.local_shape))
                ] if isinstance(item, tm.ShardedTensor) else None
                for name, item in sharded_state_dict.items()
            }  # fmt: skip

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        raise AssertionError

    load_sharded_metadata = check_backend_compatibility = check_version_compatibility = (
        load_tensors_metadata
    )


def _goldens_into_layouts(rank: int, world: int, folder: str) -> int:
    halves = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 4]), dist.new_group([2, 5])]
    half, pair = halves[rank // 3], pairs[rank % 3]
    for number, name in enumerate(NAMES):
        path = str(GOLDEN / name)
        tensors, objects = _read(path)
        # Three ranks; each half of the world has another layout.
        template, wanted = _layout(number * 2 + rank // 3, tensors, rank % 3, 3, data=True)
        for key in objects:
            template[key] = tm.ShardedObject.empty_from_unique_key(key, replica_id=rank % 3)
        loaded = tm.load(template, path, process_group=half)
        _expect(loaded, wanted, name)
        assert loaded["iteration"] == 1200 and set(objects) <= set(loaded)
        if number % 2 == 0:
            continue
        # Six ranks, fully parallel.
        template, wanted = _layout(1000 + number, tensors, rank, world, data=number % 4 == 1)
        own = serialization.get_default_load_sharded_strategy(path)
        group = (None, pair, half)[number % 3]
        loads = FullyParallelLoadStrategyWrapper(own, group)
        _expect(tm.load(template, path, loads), wanted, name)
        if number % 3 == 1:
            _goes_on(rank, world, folder + str(number), tensors, number, group)
    return len(NAMES)


def _goes_on(
    rank: int, world: int, folder: str, tensors: dict[str, torch.Tensor], number: int, group: Any
) -> None:
    """Saves fully parallel in one layout, and loads in another one, by strategies of both kinds."""
    # As in stock, a slice without elements is not stored. Neither is an empty tensor that consists
    # of slices only.
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel() > 0}
    state, wanted = _layout(2000 + number, tensors, rank, world, data=False)
    for name, part in wanted.items():
        state[name].data = part.contiguous()
    saves = TorchDistSaveShardedStrategy("torch_dist", 1)
    tm.save(state, folder, FullyParallelSaveStrategyWrapper(saves, group))
    template, wanted = _layout(3000 + number, tensors, rank, world, data=True)
    loads = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    _expect(tm.load(template, folder, loads), wanted, number)
    template, wanted = _layout(4000 + number, tensors, rank, world, data=number % 2 == 0)
    boxes = {
        name: item for name, item in template.items()
        if getattr(item, "flattened_range", None) is None
    }  # fmt: skip
    algorithm = ALGORITHMS[number % len(ALGORITHMS)]
    foreign = FullyParallelLoadStrategyWrapper(_Foreign(folder), group, False, algorithm)
    _expect(foreign.load(boxes, folder), {name: wanted[name] for name in boxes}, algorithm)


def test_goldens_of_every_kind_come_in_random_layouts_of_three_and_six_ranks(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    loaded = worlds[6].run(_goldens_into_layouts, str(tmp_path / "ckpt"))
    assert loaded[0] >= 15
    kinds = {name.split("/")[1].split("-")[0] for name in NAMES}
    assert kinds == {"mc", "fp", "hint", "flat", "zarr"}


# ---- A job that saves, and another that loads ----


def _rows(rank: int, world: int, value: float) -> dict[str, Any]:
    rows = torch.full((12 // world, 5), value)
    return {
        "rows": tm.ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world)),
        "all": tm.ShardedTensor.from_rank_offsets("all", torch.full((7,), value), replica_id=rank),
        "o": tm.ShardedObject("o", value, (1,), (0,), replica_id=rank),
    }


def _saves(rank: int, world: int, folder: str, enough: str) -> int:
    """Saves the values 1, 2, …, until the file `enough` exists. Returns the number of saves."""
    number = 0
    while True:
        last = [os.path.exists(enough)]
        dist.broadcast_object_list(last, 0)
        number += 1
        tm.save({**_rows(rank, world, float(number)), "step": float(number)}, folder)
        if last[0]:
            return number


def _loads(rank: int, world: int, folder: str, enough: str) -> list[Any]:
    """The result of each load (a value or an error) until there are four values.

    Then creates `enough`.
    """
    found: list[Any] = []
    while len({value for value in found if isinstance(value, float)}) < 4:
        try:
            loaded = tm.load(_rows(rank, world, 0.0), folder)
        except tilestone.CheckpointError as error:
            found.append(type(error).__name__)
            continue
        tensors = [item for item in nested_values(loaded) if isinstance(item, torch.Tensor)]
        values = {loaded["o"], loaded["step"], *(v for t in tensors for v in t.flatten().tolist())}
        assert len(tensors) == 2 and len(values) == 1, values
        found.append(values.pop())
    pathlib.Path(enough).touch()
    return found


def test_a_load_beside_a_job_that_saves_gives_one_checkpoint_or_an_error_on_all_ranks(
    worlds: Worlds, ckpt: str, tmp_path: pathlib.Path
) -> None:
    enough = tmp_path / "enough"
    worlds[2].begin(_saves, ckpt, str(enough))
    try:
        found = worlds[3].run(_loads, ckpt, str(enough))
    finally:
        enough.touch()
        saved = worlds[2].finish()
    assert saved[0] == saved[1] and isinstance(saved[0], int), saved
    assert found[0] == found[1] == found[2]
    values = [value for value in found[0] if isinstance(value, float)]
    assert values == sorted(values) and values[-1] <= saved[0]
    assert {value for value in found[0] if isinstance(value, str)} <= {"NotFoundError"}
