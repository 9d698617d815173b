"""Fully parallel saves and loads around strategies of the user: Megatron-Core's distribution."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilestone
from ranks import Raised, Worlds
from tilestone.megatron import exchange_utils, mapping, utils
from tilestone.megatron.strategies import base
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

Id = tuple[Any, ...]


def _stock() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import exchange_utils as found
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        dist_checkpointing.exchange_utils = found
        dist_checkpointing.fully_parallel = fully_parallel
    return dist_checkpointing


# ---- The distribution alone ----


def _dense(seed: random.Random, ranks: int) -> dict[Id, list[int]]:
    """Parameters on all ranks, and slices of an optimizer's state on some ranks."""
    layers = {("layer.weight", (i, 0), None): list(range(ranks)) for i in range(seed.randrange(60))}
    slices: dict[Id, list[int]] = {}
    for i in range(seed.randrange(60)):
        first = seed.randrange(ranks)
        slices[("optimizer.exp_avg", (i,), (0, i))] = list(range(first, min(ranks, first + 2)))
    return {**layers, **slices}


def _experts(seed: random.Random, ranks: int) -> dict[Id, list[int]]:
    """The same as _dense(), and experts that every k-th rank holds."""
    step = seed.choice([2, 4])
    found = _dense(seed, ranks)
    for i in range(seed.randrange(200)):
        found[("experts.weight", (i, 0, 0), None)] = list(range(i % step % ranks, ranks, step))
    return found


@pytest.mark.parametrize("layout", [_dense, _experts])
def test_the_distribution_is_that_of_stock(layout: Any) -> None:
    stock = _stock().exchange_utils.distribute_shards_to_ranks
    for number in range(40):
        seed = random.Random(number)
        ranks = seed.choice([1, 2, 3, 8, 40])
        shards = layout(seed, ranks)
        for shard in list(shards)[:5]:  # a rank that lists a shard twice
            shards[shard] = sorted([*shards[shard], shards[shard][0]])
        sizes = {shard: seed.choice([0, 4, 4, 1 << 20, seed.randrange(99)]) for shard in shards}
        outside = {shard for shard in shards if seed.random() < 0.2}
        expected = stock(shards, sizes, ranks, outside)
        found = exchange_utils.distribute_shards_to_ranks(shards, sizes, ranks, outside)
        assert found == expected and list(found) == list(expected)


def test_a_shard_that_no_rank_of_the_group_holds_is_refused() -> None:
    for holders in ([], [2], [-1]):
        with pytest.raises(tilestone.InvalidArgumentError):
            exchange_utils.distribute_shards_to_ranks({"a": holders}, {"a": 1}, 2, set())


# ---- Four ranks ----


class _SavedBy(base.AsyncSaveShardedStrategy):
    """Records the arguments of its calls."""

    def __init__(self) -> None:
        super().__init__("mock", 1)
        self.given: Any = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.given = sharded_state_dict

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        self.given = sharded_state_dict
        return "a request"

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class _LoadedBy(base.LoadShardedStrategy):
    """Fills every tensor with its offset, and loads each object as its position and this rank."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[Any] = []
        self.fails = fails
        self.cached_global_metadata = "metadata"

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        if self.fails:
            raise tilestone.CorruptError("damaged")
        self.asked += sharded_state_dict.values()
        return {name: _value(item) for name, item in sharded_state_dict.items()}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return "tensors"

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return "all"

    def check_backend_compatibility(self, loaded_backend: Any) -> Any:
        return f"{loaded_backend} ok"

    def check_version_compatibility(self, loaded_version: Any) -> Any:
        return f"{loaded_version} ok"

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


def _value(item: Any) -> Any:
    if not isinstance(item, mapping.ShardedTensor):
        return {"object": [item.global_offset]}
    return torch.full(item.local_shape, float(sum(item.global_offset) + 1), dtype=item.dtype)


def _state(
    kinds: Any, rank: int, world: int, data: bool = True, empty: bool = True
) -> dict[str, Any]:
    """Tensors of many sizes and objects: on all ranks, on pairs of ranks, on one rank.

    Stock's validation does not accept a tensor without elements.
    """

    def tensor(key: str, shape: tuple[int, ...], *offsets: Any, replica_id: Any = 0) -> Any:
        dtype = torch.bfloat16 if len(key) % 2 else torch.float32
        local = torch.full(shape, float(len(key)), dtype=dtype)
        item = kinds.ShardedTensor.from_rank_offsets(key, local, *offsets, replica_id=replica_id)
        if not data:
            item.data = None
        return item

    half, member = divmod(rank, 2)
    return {
        "all": [tensor(f"all.{'x' * i}", (7 * i + 1, 3), replica_id=(0, 0, rank)) for i in range(9)],
        "mixed": [
            tensor("pair", (5, 4), (0, half, 2), replica_id=member),
            kinds.ShardedObject("object", {"a": 1}, (2,), (half,), replica_id=member),
            tensor("scalar", (), replica_id=rank),
        ],
        "own": {"one": tensor("one", (3,), (0, rank, world)),
                5: tensor("none", (0,) if empty else (1,), replica_id=rank)},
        "rng": kinds.ShardedObject("rng", [rank], (world,), (rank,)),
    }


def _ids(state: Any) -> dict[Id, Any]:
    from tilestone.megatron.dict_utils import nested_values

    return {
        utils._sharded_tensor_shard_id(item): item.replica_id
        for item in nested_values(state)
        if isinstance(item, mapping.ShardedTensor)
    }


def _pairs(rank: int, world: int) -> Any:
    """The group of two neighbouring ranks that has this rank."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    return groups[rank // 2]


def _distributions(rank: int, world: int) -> None:
    stock = _stock()
    pair = _pairs(rank, world)
    for group in (None, dist.group.WORLD, pair):
        for for_load in (False, True):
            state = _state(stock.mapping, rank, world)
            expected = stock.exchange_utils.determine_main_replica_uniform_distribution(
                state, group, for_load
            )
            found = exchange_utils.determine_main_replica_uniform_distribution(
                state, group, for_load
            )
            full = {shard: shard[:3] for shard in found.shard_to_metadata}  # ours may have shapes
            assert {full[k]: v for k, v in found.main_rank_for_shard.items()} == (
                expected.main_rank_for_shard
            )
            assert {full[k] for k in found.shards_in_this_group} == expected.shards_in_this_group
            assert {full[k]: v for k, v in found.all_ranks_for_shard.items()} == (
                expected.all_ranks_for_shard
            )
            assert set(full.values()) == set(expected.shard_to_metadata)
            for shard, metadata in found.shard_to_metadata.items():
                other = expected.shard_to_metadata[full[shard]]
                for name in ("key", "dtype", "local_shape", "global_shape", "global_offset",
                             "axis_fragmentations", "replica_id", "prepend_axis_num",
                             "allow_shape_mismatch"):  # fmt: skip
                    assert getattr(metadata, name) == getattr(other, name), name
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert exchange_utils.determine_main_replica_uniform_distribution(state, alone) is None


def test_a_groups_distribution_is_that_of_stock(worlds: Worlds) -> None:
    worlds[4].run(_distributions)


def _saves(rank: int, world: int) -> None:
    stock = _stock()
    pair = _pairs(rank, world)
    for group in (None, pair):
        expected = _state(stock.mapping, rank, world, empty=False)
        stock.fully_parallel.FullyParallelSaveStrategyWrapper(
            _StockSaves("mock", 1), group
        ).apply_saving_parallelization(expected)
        ours = FullyParallelSaveStrategyWrapper(_SavedBy(), group, True)
        assert ours.cached_distribution is None
        state = _state(mapping, rank, world, empty=False)
        ours.save(state, "nowhere")
        assert _ids(ours.base_strategy.given) == _ids(expected)
        assert _ids(state) == _ids(expected), "the caller sees who saves what, as with stock"
        assert ours.base_strategy.given["all"][3].data is state["all"][3].data
        assert ours.cached_distribution is not None
        mains = ours.cached_distribution.main_rank_for_shard.values()
        assert set(mains) <= set(range(dist.get_world_size(group)))
        assert ours.async_save(state, "nowhere") == "a request"
        assert ours.backend == "mock" and ours.can_handle_sharded_objects


def _StockSaves(*args: Any) -> Any:
    """A strategy of stock that is never called."""
    strategies = _stock().fully_parallel

    class Saves(strategies.SaveShardedStrategy):  # type: ignore[misc, name-defined]
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            raise AssertionError

    return Saves(*args)


def test_a_save_gives_the_base_strategy_what_stock_gives_it(worlds: Worlds) -> None:
    worlds[4].run(_saves)


def _empty_beside_full(rank: int, world: int) -> dict[Id, Any]:
    """An irregular grid: rank 0 has no elements, at the same offset as rank 1, which has all."""
    local = torch.zeros((0, 4)) if rank == 0 else torch.ones((6, 4))
    shard = mapping.ShardedTensor(
        "bucket", local, local.dtype, tuple(local.shape), (6, 4), (0, 0), None,
        replica_id=max(0, rank - 1),
    )  # fmt: skip
    wrapper = FullyParallelSaveStrategyWrapper(_SavedBy())
    wrapper.save({"a": shard}, "nowhere")
    return _ids(wrapper.base_strategy.given)


def test_an_empty_shard_is_no_copy_of_a_full_one_at_its_offset(worlds: Worlds) -> None:
    given = worlds[4].run(_empty_beside_full)
    assert list(given[0].values()) == [0]
    assert sorted(value for rank in given[1:] for value in rank.values()) == [0, 1, 1]


def _loads(rank: int, world: int, folder: str) -> list[str]:
    pair = _pairs(rank, world)
    asked = []
    for algorithm in ("broadcast", "gather_rounds", "gather_object"):
        for group in (None, pair):
            loads = _LoadedBy()
            wrapper = FullyParallelLoadStrategyWrapper(loads, group, False, algorithm)
            state = _state(mapping, rank, world, data=algorithm == "broadcast")
            before = _ids(state)
            loaded = wrapper.load(state, folder)
            _assert_loaded(state, loaded)
            assert _ids(state) == before
            if algorithm == "broadcast":  # data of other ranks is in the given array
                assert all(a is b.data for a, b in zip(loaded["all"], state["all"])
                           if utils._sharded_tensor_shard_id(b) not in _asked_ids(loads))  # fmt: skip
            assert wrapper.cached_global_metadata == "metadata"
            if group is None and algorithm == "broadcast":
                asked = sorted(item.key for item in loads.asked)
    assert wrapper.load_tensors_metadata(folder) == "tensors"
    assert wrapper.load_sharded_metadata(folder) == "all"
    assert wrapper.check_backend_compatibility("b") == "b ok"
    assert wrapper.check_version_compatibility(1) == "1 ok"
    with pytest.raises(NotImplementedError, match="gather_rounds"):
        exchange_utils.exchange_by_distribution({}, {}, None, None, "by mail")  # type: ignore[arg-type]
    return asked


def _asked_ids(loads: _LoadedBy) -> set[Id]:
    tensors = [item for item in loads.asked if isinstance(item, mapping.ShardedTensor)]
    return {utils._sharded_tensor_shard_id(item) for item in tensors}


def _assert_loaded(wanted: Any, loaded: Any) -> None:
    if isinstance(wanted, (dict, list)):
        assert type(wanted) is type(loaded) and len(wanted) == len(loaded)
        pairs = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        for name, inner in pairs:
            _assert_loaded(inner, loaded[name])
    elif isinstance(wanted, mapping.ShardedTensor):
        assert loaded.dtype == wanted.dtype and torch.equal(loaded, _value(wanted)), wanted
    else:
        assert loaded == _value(wanted)


def test_a_load_by_any_algorithm_reads_each_shard_once(worlds: Worlds, tmp_path: Any) -> None:
    asked = worlds[4].run(_loads, str(tmp_path / "none"))
    keys = [key for rank in asked for key in rank]
    expected = [f"all.{'x' * i}" for i in range(9)] + ["none", "scalar"]
    expected += ["pair", "object"] * 2 + ["one", "rng"] * 4
    assert sorted(keys) == sorted(expected)
    assert all(1 <= sum(key.startswith("all.") for key in rank) <= 4 for rank in asked)


def _fails(rank: int, world: int, what: str) -> None:
    state = _state(mapping, rank, world)
    if what == "load":
        FullyParallelLoadStrategyWrapper(_LoadedBy(fails=rank == 2)).load(state, "nowhere")
        return
    if what == "state" and rank == 2:
        state["own"]["one"].global_offset = None
    if what == "twice" and rank == 2:
        state["all"][0].replica_id = 0
        state["all"][0].key = "one.more"
        state["all"][0].global_shape = (2, 3)
    FullyParallelSaveStrategyWrapper(_SavedBy()).save(state, "nowhere")


@pytest.mark.parametrize(
    ("what", "said"), [("load", "damaged"), ("state", "key one"), ("twice", "one.more")]
)
def test_a_failure_on_one_rank_fails_on_all(worlds: Worlds, what: str, said: str) -> None:
    for result in worlds[4].collect(_fails, what):
        assert isinstance(result, Raised) and said in result.text
        assert "CheckpointError" in result.bases
