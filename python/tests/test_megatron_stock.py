"""Tilestone's strategies in stock Megatron-Core, alone and in its wrappers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import pathlib
import unittest.mock
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tilestone
from ranks import Raised, Worlds
from tilestone.megatron import groups, stock
from test_goldens import GOLDEN

LAYERS = torch.arange(2 * 8 * 12.0).reshape(2, 8, 12)  # layers, rows, columns
COLUMNS = torch.arange(6 * 8).reshape(6, 8).to(torch.bfloat16)
UNEVEN = torch.arange(8 * 3.0).reshape(8, 3)
GLU = torch.arange(16.0)
EMBEDDING = torch.arange(10 * 4.0).reshape(10, 4)
BIG = 40_000  # elements of each replicated tensor


def _megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
    return dist_checkpointing


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Keeps tensors on the CPU that stock creates on a GPU or moves there."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _stock_on_cpu() -> Iterator[None]:
    patch = unittest.mock.patch.object
    with (
        _OnCpu(),
        patch(torch.cuda, "synchronize", lambda *_: None),
        patch(torch.cuda, "current_device", lambda: "cpu"),
        # Stock's writers are child processes.
        unittest.mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _state(rank: int, filled: bool, data: bool = True) -> dict[Any, Any]:
    """Entities of every kind on 4 ranks, TP 2 x DP 2 (rank = 2 dp + tp); zeros for a load."""
    mapping = _megatron().mapping
    tp, dp = rank % 2, rank // 2
    scale = 1 if filled else 0

    def sharded(key: str, local: torch.Tensor, *offsets: Any, **options: Any) -> Any:
        made = mapping.ShardedTensor.from_rank_offsets(
            key, local.clone() * scale, *offsets, **{"replica_id": (0, 0, dp), **options}
        )
        return made if data else made.without_data()

    def halves(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        return {
            name: mapping.ShardedTensor.from_rank_offsets(
                key, half.contiguous(), (0, tp + 2 * i, 4), replica_id=replica_id
            )
            for i, (name, half) in enumerate(zip("wv", tensor.chunk(2), strict=True))
        }

    uneven = UNEVEN[:5] if tp == 0 else UNEVEN[5:]
    irregular = mapping.ShardedTensor(
        "uneven", uneven.clone() * scale, uneven.dtype, tuple(uneven.shape), tuple(UNEVEN.shape),
        (5 * tp, 0), None, (0, 0, dp),
    )  # fmt: skip
    return {
        "model": {
            "layers": [
                sharded("layers", LAYERS[i].chunk(2)[tp], (0, i, 2), (1, tp, 2), prepend_axis_num=1)
                for i in range(2)
            ],
            7: {"columns": sharded("columns", COLUMNS.chunk(2, 1)[tp], (1, tp, 2))},
            "uneven": irregular if data else irregular.without_data(),
            "glu": mapping.ShardedTensorFactory(
                "glu", torch.cat([h.chunk(2)[tp] for h in GLU.chunk(2)]) * scale, halves,
                lambda sub: torch.cat([sub["w"], sub["v"]]), (0, 0, dp),
            ),
            "embedding": sharded("embedding", EMBEDDING.chunk(2)[tp], (0, tp, 2),
                                 allow_shape_mismatch=True),
            "extra": mapping.ShardedObject(
                "extra", io.BytesIO(b"state") if filled else None, (1,), (0,), (0, tp, dp)
            ),
        },
        "big": {
            f"big{i}": sharded(f"big{i}", torch.full((BIG,), i + 1.0), replica_id=(0, tp, dp))
            for i in range(8)
        },
        "rng": mapping.ShardedObject(
            "rng", [{"seed": tp, "t": torch.arange(3)}] if filled else None, (2,), (tp,), (0, dp)
        ),
        "own": mapping.LocalNonpersistentObject([rank]),
        "iteration": 12 if filled else None,
    }  # fmt: skip


def _check(loaded: Any, rank: int) -> None:
    tp = rank % 2
    model = loaded["model"]
    for i in range(2):
        assert torch.equal(model["layers"][i], LAYERS[i].chunk(2)[tp])
    assert torch.equal(model[7]["columns"], COLUMNS.chunk(2, 1)[tp])
    assert torch.equal(model["uneven"], UNEVEN[:5] if tp == 0 else UNEVEN[5:])
    assert torch.equal(model["glu"], torch.cat([h.chunk(2)[tp] for h in GLU.chunk(2)]))
    assert torch.equal(model["embedding"], EMBEDDING.chunk(2)[tp])
    assert model["extra"].getvalue() == b"state"
    for i in range(8):
        assert loaded["big"][f"big{i}"].eq(i + 1.0).all()
    assert loaded["rng"][0]["seed"] == tp and torch.equal(loaded["rng"][0]["t"], torch.arange(3))
    assert loaded["own"] == [rank] and loaded["iteration"] == 12
    assert not any(t.requires_grad for t in model["layers"])


def _strategies(names: str) -> tuple[Any, Any]:
    """(save, load) strategies: "ours" or "stock", in the wrappers if the name ends with "+"."""
    _megatron()
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as stocks

    makers = {
        "ours": (stock.TilestoneSaveStrategy, stock.TilestoneLoadStrategy),
        "main": (lambda: stock.TilestoneSaveStrategy(keep_only_main_replica=True), None),
        "stock": (
            lambda: stocks.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            stocks.TorchDistLoadShardedStrategy,
        ),
    }
    saving, loading = names.split()
    save, load = makers[saving.strip("+")][0](), makers[loading.strip("+")][1]()
    if saving.endswith("+"):
        save = fully_parallel.FullyParallelSaveStrategyWrapper(save, _groups["dp"])
    if loading.endswith("+"):
        load = fully_parallel.FullyParallelLoadStrategyWrapper(load, _groups["dp"])
    return save, load


_groups: dict[str, Any] = {}


def _make_groups(rank: int) -> None:
    if not _groups:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        _groups["dp"] = groups[rank % 2]


def _sizes(path: pathlib.Path) -> list[int]:
    """Bytes of Tilestone's data files by rank."""
    return [sum(f.stat().st_size for f in path.glob(f"*-*__{r}_*.distcp")) for r in range(4)]


def _make_directory(rank: int, path: pathlib.Path) -> None:
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()


def _all_ways(rank: int, world: int, folder: str) -> dict[str, list[int]]:
    _make_groups(rank)
    stocks, found = _megatron(), {}
    with _stock_on_cpu():
        for names in ("ours stock", "stock ours", "ours+ ours+", "main ours", "main+ stock"):
            path = pathlib.Path(folder, names.replace(" ", "-"))
            _make_directory(rank, path)
            save, load = _strategies(names)
            stocks.save(_state(rank, True), str(path), save)
            for data in (True, False):
                wanted = _state(rank, False, data)
                first = wanted["model"]["layers"][0].data
                loaded, missing, unexpected = stocks.load(
                    wanted, str(path), load, strict="return_all"
                )
                _check(loaded, rank)
                assert missing == unexpected == set(), names
                if data and "+" not in names:
                    assert loaded["model"]["layers"][0].data_ptr() == first.data_ptr()
            found[names] = _sizes(path)
    return found


def test_both_ways_alone_and_in_the_wrappers_every_entity_comes_back(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    sizes = worlds[4].run(_all_ways, str(tmp_path))[0]
    for names in ("ours stock", "ours+ ours+"):
        # All ranks hold 8 equal tensors. Each rank writes two, whatever the wrapper chooses.
        assert all(size < 2.5 * 4 * BIG for size in sizes[names]), (names, sizes)
    main = sizes["main ours"]
    assert main[0] > 8 * 4 * BIG and max(main[2:]) < 4 * BIG  # only main replicas, which rank 0 has
    in_wrapper = sizes["main+ stock"]
    assert max(in_wrapper) < 5 * 4 * BIG and min(in_wrapper) > 0  # distributed by Megatron-Core
    for name in ("ours-stock", "main+-stock"):
        with tilestone.open(tmp_path / name) as checkpoint:
            assert checkpoint.dialect == "megatron" and checkpoint.verify().ok
            assert checkpoint.common()["iteration"] == 12


def _copies(rank: int, world: int, folder: str) -> dict[str, list[int]]:
    """Local copies in stock's save; the model-parallel groups are {0, 1} and {2, 3}."""
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    _make_groups(rank)
    stocks, found = _megatron(), {}
    pairs = [[0, 1], [2, 3]]
    process_group = [dist.new_group(pair) for pair in pairs][rank // 2]
    group = groups.Group(2, rank % 2, tuple(pairs[rank // 2]), process_group)
    given = {"process": process_group, "group": group, "ranks": pairs[rank // 2], "wrapped": group}
    with _stock_on_cpu():
        for name, copies_group in given.items():
            path = pathlib.Path(folder, name)
            _make_directory(rank, path)
            ours = stock.TilestoneSaveStrategy(copies=tilestone.LocalCopies(copies_group))
            if name == "wrapped":
                ours = fully_parallel.FullyParallelSaveStrategyWrapper(ours, _groups["dp"])
            stocks.save(_state(rank, True), str(path), ours)
            for load in ("ours", "stock"):
                _check(stocks.load(_state(rank, False), str(path), _strategies(f"ours {load}")[1]),
                       rank)  # fmt: skip
            found[name] = _sizes(path)
        for number, (options, problem) in enumerate([
            (
                {"keep_only_main_replica": True, "copies": tilestone.LocalCopies(group)},
                "keep_only_main_replica",
            ),
            ({"copies": tilestone.LocalCopies()}, "parallel_state is not initialised"),
            (
                {"copies": tilestone.LocalCopies(groups.Group(2, rank % 2, None))},
                "ranks are not known",
            ),
            ({"copies": tilestone.LocalCopies([3 - rank])}, "copies.group"),
        ]):  # fmt: skip
            path = pathlib.Path(folder, f"refused-{number}")
            _make_directory(rank, path)
            ours = stock.TilestoneSaveStrategy(**options)
            with pytest.raises(tilestone.InvalidArgumentError, match=problem):
                stocks.save(_state(rank, True), str(path), ours)
            dist.barrier()
            assert not (path / "metadata.json").exists() and not (path / ".metadata").exists()
    return found


def test_local_copies_inside_stock_follow_any_group_and_are_refused_for_main_replicas_alone(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    sizes = worlds[4].run(_copies, str(tmp_path))[0]
    for name, by_rank in sizes.items():
        # Each rank writes two of 8 equal tensors, and copies of its neighbour's two.
        assert all(4 * 4 * BIG < size < 4.5 * 4 * BIG for size in by_rank), (name, by_rank)
        with tilestone.open(tmp_path / name) as checkpoint:
            assert checkpoint.verify().ok


def _second_names(rank: int, world: int, folder: str) -> None:
    """Second names of replicated tensors as seen by torch, Megatron-Core and Tilestone."""
    stocks, path, (tp, dp) = _megatron(), pathlib.Path(folder, "named"), (rank % 2, rank // 2)
    _make_directory(rank, path)

    def second(i: int) -> Any:
        key = f"big{i}.__tp_replica_{tp}"
        return stocks.ShardedTensor.from_rank_offsets(key, torch.zeros(BIG), replica_id=(0, 0, dp))

    with _stock_on_cpu():
        saving = stock.TilestoneSaveStrategy(tp_replica_names=True)
        stocks.save(_state(rank, True), str(path), saving)
        for names in ("ours stock", "ours ours"):
            loading = _strategies(names)[1]
            _check(stocks.load(_state(rank, False), str(path), loading), rank)
            wanted = {f"big{i}": second(i) for i in range(8)}
            loaded = stocks.load(wanted, str(path), loading, validate_access_integrity=False)
            for i in range(8):
                assert loaded[f"big{i}"].eq(i + 1).all(), (names, i)
    names = [f"big3.__tp_replica_{i}" for i in range(2)] + ["big3"]
    tensors = {name: torch.zeros(BIG) for name in names}
    dcp.load(tensors, checkpoint_id=path)
    assert all(tensor.eq(4).all() for tensor in tensors.values())


def test_second_names_of_replicas_are_the_same_bytes_for_torch_and_stock(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_second_names, str(tmp_path))
    with tilestone.open(tmp_path / "named") as checkpoint:
        assert not [key for key in checkpoint.keys() if "__tp_replica" in key]
        assert checkpoint.verify().ok
    assert sum(_sizes(tmp_path / "named")) < 9 * 4 * BIG  # each of the 8 tensors once


def _trains(rank: int, world: int, folder: str) -> None:
    """Saves several iterations like Megatron's training: with the same two wrapped strategies."""
    _make_groups(rank)
    stocks, root = _megatron(), pathlib.Path(folder)
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    wrap = fully_parallel.FullyParallelSaveStrategyWrapper
    context: dict[str, Any] = {}
    for mains_only in (False, True):
        ours = stock.TilestoneSaveStrategy(keep_only_main_replica=mains_only)
        context["save_strategy"] = wrap(ours, _groups["dp"], do_cache_distribution=True)
        context["load_strategy"] = fully_parallel.FullyParallelLoadStrategyWrapper(
            stock.TilestoneLoadStrategy(), _groups["dp"]
        )
        with _stock_on_cpu():
            for iteration in (1, 2, 3):
                path = root / str(mains_only) / f"iter_{iteration:07d}"
                _make_directory(rank, path)
                state = _state(rank, True)
                state["big"]["big0"].data.fill_(iteration)
                state["iteration"] = iteration
                if iteration == 2:
                    bad = stocks.ShardedObject("bad", lambda: 0, (1,), (0,), (0, rank, 0))
                    with pytest.raises(tilestone.InvalidArgumentError, match="pickled"):
                        stocks.save({**state, "bad": bad}, str(path), context["save_strategy"],
                                    validate_access_integrity=False)  # fmt: skip
                    assert not (path / "metadata.json").exists()
                stocks.save(state, str(path), context["save_strategy"],
                            validate_access_integrity=iteration == 1)  # fmt: skip
                loaded = stocks.load(_state(rank, False), str(path), context["load_strategy"])
                assert loaded["big"]["big0"].eq(iteration).all()
                assert loaded["iteration"] == iteration
                assert loaded["model"]["extra"].getvalue() == b"state"


def test_wrapped_strategies_serve_a_whole_training_failed_saves_included(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_trains, str(tmp_path))
    assert len(list(tmp_path.glob("*/iter_*/metadata.json"))) == 6


def _written_as(rank: int, world: int, folder: str) -> None:
    """The same directory written in other ways, and tied weights that one rank holds twice."""
    stocks = _megatron()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with _stock_on_cpu(), unittest.mock.patch.dict(os.environ, HOME=folder):
            save, load = stock.TilestoneSaveStrategy(), stock.TilestoneLoadStrategy()
            ways = ("relative", "slash/", pathlib.Path("a") / "..", f"{folder}/absolute", "~", "~x")
            for number, path in enumerate(ways):
                if rank == 0:
                    os.makedirs(path, exist_ok=True)
                dist.barrier()
                stocks.save(_tied(rank, number), str(path), save)
                loaded = stocks.load(_tied(rank, 0), str(path), load)
                assert loaded["in"].eq(number).all() and loaded["out"].eq(number).all()
                assert set(load.load_tensors_metadata(path)) == {"embedding"}
    finally:
        os.chdir(before)


def _tied(rank: int, value: float) -> dict[str, Any]:
    made = _megatron().ShardedTensor.from_rank_offsets
    return {
        name: made("embedding", torch.full((2,), float(value)), (0, rank, 4), replica_id=replica)
        for replica, name in enumerate(("in", "out"))
    }


def test_other_spellings_of_a_path_and_two_replicas_on_one_rank_work_as_in_stock(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_written_as, str(tmp_path))
    assert (tmp_path / "~" / ".metadata").exists() and (tmp_path / "~x" / ".metadata").exists()


def _overwrites(rank: int, world: int, folder: str) -> None:
    _make_groups(rank)
    stocks, path = _megatron(), pathlib.Path(folder)
    with _stock_on_cpu():
        save, load = _strategies("stock ours")
        stocks.save(_state(rank, True), folder, save)
        ours = stock.TilestoneSaveStrategy()
        _fails(rank, path, ours)
        stocks.save(_state(rank, True), folder, ours)
        _check(stocks.load(_state(rank, False), folder, load), rank)
        dist.barrier()
        assert not any(name.name.startswith("__") for name in path.glob("*.distcp"))
        before = set(path.iterdir())
        dist.barrier()
        stocks.save(_state(rank, True), folder, _strategies("main+ ours")[0])
        _check(stocks.load(_state(rank, False), folder, load), rank)
        dist.barrier()
        assert len(set(path.iterdir()) - before) == 4  # data files
        assert (path / "mine.distcp").read_text() == (path / "x" / ".zarray").read_text() == "mine"
        request = stocks.save(_state(rank, True), folder, ours, async_sharded_save=True)
        # Stock has already written the new common.pt. It must not be loaded with the old tensors.
        assert not (path / "metadata.json").exists()
        dist.barrier()
        request.execute_sync()
        _check(stocks.load(_state(rank, False), folder, load), rank)


def _fails(rank: int, path: pathlib.Path, ours: Any) -> None:
    """A save that fails on one rank keeps the old files, but not as a whole checkpoint."""
    if rank == 0:
        (path / "mine.distcp").write_text("mine")
        (path / "x").mkdir()
        (path / "x" / ".zarray").write_text("mine")
    dist.barrier()
    state = _state(rank, True)
    if rank == 3:
        state["broken"] = _megatron().ShardedTensor.from_rank_offsets("broken", torch.ones(1))
        state["broken"].data = None
    assert (path / "metadata.json").exists()
    dist.barrier()
    data = sorted(path.glob("*.distcp"))
    dist.barrier()
    with pytest.raises(tilestone.InvalidArgumentError, match="without data") as raised:
        _megatron().save(state, str(path), ours, validate_access_integrity=False)
    assert raised.value.key == "broken" and raised.value.rank == 3
    dist.barrier()
    assert not (path / "metadata.json").exists() and sorted(path.glob("*.distcp")) == data
    assert not _megatron().check_is_distributed_checkpoint(str(path))
    with tilestone.open(path) as old:
        assert old.read("uneven").shape == (8, 3)
    dist.barrier()


def test_a_checkpoint_is_replaced_in_place_and_a_failed_save_leaves_no_whole_one(
    worlds: Worlds, ckpt: str
) -> None:
    pathlib.Path(ckpt).mkdir()
    worlds[4].run(_overwrites, ckpt)
    with tilestone.open(ckpt) as checkpoint:
        assert checkpoint.verify().ok
    pathlib.Path(ckpt, "metadata.json").unlink()
    with pytest.raises(tilestone.CorruptError, match=r"metadata\.json"):
        tilestone.open(ckpt)


@dataclasses.dataclass
class Odd:
    """A class that a load creates only if it is allowed."""

    a: int


def _shapes(rank: int, world: int, folder: str) -> None:
    """Checks other padding, another dtype, groups of different keys, and disallowed objects."""
    stocks = _megatron()
    with _stock_on_cpu():
        path = pathlib.Path(folder, "ckpt")
        _make_directory(rank, path)
        state = _state(rank, True)
        state["odd"] = stocks.mapping.ShardedObject(
            "odd", Odd(1) if rank == 0 else None, (1,), (0,), rank
        )
        stocks.save(state, str(path), stock.TilestoneSaveStrategy())
        whole = torch.cat([EMBEDDING, torch.zeros(2, 4)]).to(torch.float64)
        for name in ("ours ours", "ours stock"):
            wanted = stocks.ShardedTensor.from_rank_offsets(
                "embedding", torch.ones(3, 4, dtype=torch.float64), (0, rank, 4),
                allow_shape_mismatch=True,
            )  # fmt: skip
            loaded = stocks.load({"e": wanted}, str(path), _strategies(name)[1])["e"]
            assert torch.equal(loaded, whole.chunk(4)[rank])
        load = stock.TilestoneLoadStrategy(allow_classes=[f"{Odd.__module__}.Odd"])
        odd = stocks.mapping.ShardedObject("odd", None, (1,), (0,))
        only = {("odd", (0,), None): odd} if rank == 2 else {}
        got = load.load(only, path)
        assert got == ({("odd", (0,), None): Odd(1)} if rank == 2 else {})
        _checks_refusals(rank, path, only)


def _checks_refusals(rank: int, path: pathlib.Path, only: Any) -> None:
    load, save = stock.TilestoneLoadStrategy(), stock.TilestoneSaveStrategy()
    with (
        unittest.mock.patch.object(torch.serialization, "get_safe_globals", list),
        pytest.raises(tilestone.UnsafeError, match="allow_classes") as raised,
    ):
        load.load(only, path)
    assert raised.value.key == "odd/shard_0_1" and raised.value.rank == 2
    absent = _megatron().ShardedTensor.from_rank_offsets("absent", torch.ones(1))
    with pytest.raises(tilestone.NotFoundError, match="absent"):
        load.load({"w": absent} if rank == 3 else {}, path)
    values: Any = {"a": [3]} if rank == 1 else {}
    for call in (load.load, save.save):
        with pytest.raises(tilestone.InvalidArgumentError, match="dist_checkpointing") as invalid:
            call(values, path)
        assert invalid.value.key == "a.0"
    for refused in (
        lambda: load.check_backend_compatibility("other"),
        lambda: load.check_version_compatibility(2),
        lambda: stock.TilestoneSaveStrategy("zarr", 1),
    ):
        with pytest.raises(tilestone.UnsupportedError):
            refused()


def test_other_shapes_and_dtypes_are_accepted_and_refusals_reach_every_rank(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_shapes, str(tmp_path))


def _goldens(rank: int, world: int) -> int:
    stocks, count, objects = _megatron(), 0, 0
    from megatron.core.transformer.enums import AttnType

    load = stock.TilestoneLoadStrategy()
    folders = sorted(path for path in GOLDEN.glob("megatron-core-*/*-w[134]") if path.is_dir())
    for path in folders:
        expected = json.loads(pathlib.Path(f"{path}.expected.json").read_text())
        wanted = stocks.serialization.load_sharded_metadata(str(path), load)
        assert set(wanted) == {*expected["tensors"], *expected["objects"]}, path
        with torch.serialization.safe_globals([AttnType, getattr]):
            if path.parent.name == "megatron-core-0.19.2":  # 0.16 requires common.pt
                loaded = load.load(wanted, path)
            else:
                loaded = stocks.load(wanted, str(path), load, validate_access_integrity=False)
                assert loaded["iteration"] == 1200
        for key, what in expected["tensors"].items():
            tensor = loaded[key]
            assert list(tensor.shape) == what["shape"] and tensor.is_contiguous(), (path, key)
            stored = tensor.flatten().view(torch.uint8).numpy().tobytes()
            assert zlib.crc32(stored) == what["crc32"], (path, key)
            count += 1
        for key in expected["objects"]:
            if key.startswith("rng_state/"):
                assert f"'seed': {loaded[key][0]['seed']}" in expected["objects"][key]
                objects += 1
            elif key == "layer.self_attention._extra_state/shard_0_1":
                assert loaded[key].getvalue() == b"extra state"
                objects += 1
    assert objects > len(folders)
    assert len({path.parent.name for path in folders}) == 5
    assert {path.name for path in folders} >= {"zarr-w4", "flat-w4", "fp-w4", "hint-w4"}
    return count


def test_goldens_of_every_version_and_backend_load_through_stock(worlds: Worlds) -> None:
    assert worlds[1].run(_goldens)[0] > 200


def test_a_file_that_cant_be_removed_first_is_an_error_on_every_rank(
    worlds: Worlds, ckpt: str
) -> None:
    pathlib.Path(ckpt, "metadata.json").mkdir(parents=True)
    for result in worlds[4].collect(_save_nothing, ckpt):
        assert isinstance(result, Raised) and result.kind == "StorageError"
        assert result.attributes["file"].endswith("metadata.json")
        assert result.attributes["rank"] == 0


def _save_nothing(rank: int, world: int, folder: str) -> None:
    _megatron()
    stock.TilestoneSaveStrategy().save({}, folder)
