"""Fully parallel saves and loads of whole checkpoints: every kind of entity, on four ranks.

Ranks are TP 2 × DP 2. Ranks 0 and 2 hold replicas of the same shards, and so do ranks 1 and 3. All
four ranks hold everything that is not sharded.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilestone.megatron as tm
from ranks import Worlds
from test_cache_policy import forget, from_disk
from test_megatron_files import _megatron
from tilestone.megatron.dict_utils import dict_list_map_outplace, nested_values
from tilestone.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from tilestone.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

WHOLE = torch.arange(8 * 6.0).reshape(8, 6)
BOXES = [3, 2, 1, 2]  # rows of an irregular tensor that ranks 0 to 3 hold


def _group(rank: int, everybody: bool) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return None if everybody else groups[rank % 2]


def _half(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(2)[rank % 2].clone()


def _glu(kinds: Any, rank: int, tensor: torch.Tensor) -> Any:
    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        return {
            "halves": [
                kinds.ShardedTensor.from_rank_offsets(
                    key, half, (0, 2 * i + rank % 2, 4), replica_id=replica_id
                )
                for i, half in enumerate(data.chunk(2))
            ]
        }

    replica = (0, 0, rank // 2)
    return kinds.ShardedTensorFactory(
        "glu", tensor, build, lambda part: torch.cat(part["halves"]), replica
    )


def _slices(rank: int, factor: int) -> list[Any]:
    """Flattened slices of this rank's half of an optimizer's state: its own, and a shared one."""
    half = _half(WHOLE, rank).reshape(-1) * factor
    tp, dp = rank % 2, rank // 2

    def part(key: str, begin: int, end: int, replica: Any) -> Any:
        return tm.ShardedTensor.from_rank_offsets_flat(
            key, half[begin:end].clone(), (4, 6), (0, tp, 2),
            flattened_range=slice(begin, end), replica_id=replica,
        )  # fmt: skip

    own = [("exp_avg", 0, 7, 0), ("exp_avg", 7, 7, 0)] if dp == 0 else [("exp_avg", 7, 24, 0)]
    both = [("exp_avg_sq", 0, 11, (0, 0, dp)), ("exp_avg_sq", 11, 24, (0, 0, dp))]
    return [part(*each) for each in own + both]


def _state(kinds: Any, rank: int, factor: int = 1, flat: bool = True) -> dict[str, Any]:
    """This rank's state. With factor 0 it is a template, with data in some of the entities."""
    tp, dp = rank % 2, rank // 2
    given = None if factor == 0 else {"a": [rank % 2]}

    def tensor(key: str, data: torch.Tensor, *grid: Any, replica: Any) -> Any:
        return kinds.ShardedTensor.from_rank_offsets(
            key, data * factor, *grid, replica_id=replica
        )

    begin = sum(BOXES[:rank])
    rows = WHOLE[begin : begin + BOXES[rank]] * factor
    state = {
        "layers": [
            tensor(f"layer.{i}", _half(WHOLE.repeat(1, i + 1), rank), (0, tp, 2), replica=(0, 0, dp))
            for i in range(5)
        ],
        "norms": {i: tensor(f"norm.{i}", WHOLE[i].to(torch.bfloat16), replica=(0, tp, dp))
                  for i in range(4)},
        "glu": _glu(kinds, rank, torch.cat([h.chunk(2)[tp] for h in WHOLE.chunk(2)]) * factor),
        "mixed": [
            {"extra": kinds.ShardedObject("extra", given and [1, 2], (1,), (0,), (0, tp, dp))},
            [tensor("scalar", torch.tensor(7.0), replica=rank), 5, "text"],
        ],
        "rng": kinds.ShardedObject("rng", given, (2,), (tp,), replica_id=dp),
        "uneven": kinds.ShardedTensor(
            "uneven", rows, rows.dtype, tuple(rows.shape), (8, 6), (begin, 0), None
        ),
        "own": kinds.LocalNonpersistentObject({"rank": rank}),
        "step": 3 if factor else "the caller's",
        "args": {"lr": 0.5, "empty": {}, "betas": (0.9, 0.95)},
    }  # fmt: skip
    if flat:
        state["flat"] = _slices(rank, factor)
    return state


def _loaded(rank: int, factor: int = 1, flat: bool = True) -> dict[str, Any]:
    """The expected result of a load of _state()."""
    from tilestone.megatron import mapping

    def value(item: Any) -> Any:
        if isinstance(item, mapping.LocalNonpersistentObject):
            return item.unwrap()
        return item.data if isinstance(item, mapping.ShardedBase) else item

    return dict_list_map_outplace(value, _state(mapping, rank, factor, flat))  # type: ignore[no-any-return]


def _differs(found: Any, wanted: Any, where: str = "") -> str:
    """The first place at which two trees differ."""
    if isinstance(wanted, (dict, list)):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return f"{where}: {found} and {wanted}"
        pairs = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        return next(filter(None, (_differs(found[k], v, f"{where}.{k}") for k, v in pairs)), "")
    if isinstance(wanted, torch.Tensor):
        same = torch.equal(found, wanted) and found.dtype == wanted.dtype
    else:
        same = type(found) is type(wanted) and found == wanted
    return "" if same else f"{where}: {found} and {wanted}"


def _template(rank: int, flat: bool = True) -> dict[str, Any]:
    state = _state(tm.mapping, rank, 0, flat)
    for layer in state["layers"][::2]:
        layer.data = None
    state["own"] = tm.LocalNonpersistentObject({"rank": rank})
    return state


def _ids(tree: Any) -> Any:
    """The identities of a tree's objects, and their replica ids."""
    if isinstance(tree, dict):
        return {key: _ids(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_ids(value) for value in tree]
    fields = vars(tree) if isinstance(tree, tm.mapping.ShardedBase) else {}
    return id(tree), {name: (id(v), copy.copy(v) if name != "data" else 0)
                      for name, v in fields.items()}  # fmt: skip


def _round_trip(rank: int, world: int, folder: str, everybody: bool) -> None:
    group = _group(rank, everybody)
    saves = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    loads = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    state = _state(tm.mapping, rank)
    before = _ids(state)
    tm.save(state, folder, saves)
    assert _ids(state) == before, "the caller's state dict is unchanged"
    template = _template(rank)
    before = _ids(template)
    loaded = tm.load(template, folder, loads, strict="raise_all")
    assert _ids(template) == before
    template["flat"] = loaded["flat"] = list(loaded["flat"])
    wanted = _loaded(rank)
    # Empty slices are removed, as in stock.
    wanted["flat"] = [each for each in wanted["flat"] if each.numel()]
    assert _differs(loaded, wanted) == ""
    assert loaded["layers"][1] is template["layers"][1].data


@pytest.mark.parametrize("everybody", [False, True])
def test_every_entity_goes_through_a_fully_parallel_save_and_load(
    worlds: Worlds, tmp_path: pathlib.Path, everybody: bool
) -> None:
    worlds[4].run(_round_trip, str(tmp_path / "ckpt"), everybody)


def _refused(rank: int, world: int, folder: str) -> list[str]:
    """The errors of several kinds of invalid states on each rank."""
    group = _group(rank, False)

    def said(change: Any, validate: bool = True, load: bool = False) -> str:
        base: Any = TorchDistLoadShardedStrategy() if load else TorchDistSaveShardedStrategy(
            "torch_dist", 1
        )  # fmt: skip
        wrapper = FullyParallelLoadStrategyWrapper if load else FullyParallelSaveStrategyWrapper
        state = _template(rank) if load else _state(tm.mapping, rank)
        change(state)
        call: Any = tm.load if load else tm.save
        try:
            call(state, folder, wrapper(base, group), validate_access_integrity=validate)
        except Exception as error:  # a program's own error keeps its type on its rank
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def no_copies(state: Any) -> None:
        state["layers"][2].replica_id = (0, 0, 0)

    def no_mains(state: Any) -> None:
        state["layers"][2].replica_id = (0, 0, 1)

    def broken(state: Any) -> None:
        if rank == 2:
            state["layers"][2].global_offset = None

    def no_factory(state: Any) -> None:
        def build(*_: Any) -> Any:
            raise RuntimeError("no glue")

        if rank == 3:
            state["glu"].build_fn = build

    def unknown(state: Any) -> None:
        if rank == 1:
            state["layers"][2].key = "unknown"

    texts = [said(no_copies), said(no_mains), said(broken), said(no_factory)]
    texts += [said(no_mains, False), said(broken, False), said(no_factory, False)]
    assert "layer.2" in tm.load_tensors_metadata(folder), "a replica is saved if no main one exists"
    texts.append(said(no_copies, False))  # one of the replicas is saved
    texts += [said(no_copies, load=True), said(no_copies, False, True)]
    texts += [said(unknown, False, True), said(no_factory, False, True)]
    return texts


def test_an_error_on_one_rank_is_raised_on_all(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    results = worlds[4].run(_refused, str(tmp_path / "ckpt"))
    twice = "Invalid access pattern: box [0:4, 0:18] is held by the main replicas of ranks 0 and 2"
    lacking = "layer.2", "[0:8, 0:18]"
    expected = [
        (twice, "key layer.2"), ("Invalid access pattern", *lacking), ("key layer.2",), ("no glue",),
        ("nothing",), ("key layer.2",), ("no glue",), ("nothing",),
        (twice,), ("nothing",), ("unknown",), ("no glue",),
    ]  # fmt: skip
    for texts in results:
        assert len(texts) == len(expected)
        for text, first, words in zip(texts, results[0], expected, strict=True):
            assert all(word in text for word in words), (text, words)
            assert text == first or "no glue" in text


def _with_stock(rank: int, world: int, folder: str) -> None:
    """Stock loads the saved checkpoint, and stock's own entities can be saved."""
    stock = _megatron()
    group = _group(rank, False)
    saves = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    state = _state(stock.mapping, rank, flat=False)
    state["mixed"] = state["mixed"][:1]  # stock can't load lists that also have common values
    before = _ids(state)
    tm.save(state, folder, saves)
    assert _ids(state) == before
    template, wanted = _state(stock.mapping, rank, 0, flat=False), _loaded(rank, flat=False)
    template["mixed"], wanted["mixed"] = template["mixed"][:1], wanted["mixed"][:1]
    assert _differs(stock.load(template, folder), wanted) == ""


def test_stock_loads_a_fully_parallel_save(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    worlds[4].run(_with_stock, str(path))


def _bytes_read(rank: int, world: int, folder: str, everybody: bool) -> int:
    """This rank's bytes read in a load of 4 MiB that all ranks want, and 4 MiB that two want."""
    group = _group(rank, everybody)
    wide = torch.full((1 << 16, 4), 1.5)

    def state() -> dict[str, Any]:
        tensor = tm.ShardedTensor.from_rank_offsets
        tp, dp = rank % 2, rank // 2
        shared = {f"a{i}": tensor(f"a{i}", wide.clone(), replica_id=rank) for i in range(4)}
        halves = [
            tensor(f"b{i}", wide.clone(), (0, tp, 2), replica_id=(0, 0, dp)) for i in range(2)
        ]
        return {**shared, "halves": halves}

    saves = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    tm.save(state(), folder, saves)
    wanted = state()
    for item in nested_values(wanted):
        item.data.zero_()
    loads = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    forget(folder)
    dist.barrier()
    before = from_disk()
    loaded = tm.load(wanted, folder, loads)
    read = from_disk() - before
    assert all(torch.equal(tensor, wide) for tensor in nested_values(loaded))
    return read


@pytest.mark.parametrize("everybody", [False, True])
def test_a_load_reads_each_stored_byte_once(
    worlds: Worlds, ckpt: str, everybody: bool
) -> None:
    read = worlds[4].run(_bytes_read, ckpt, everybody)
    stored = 8 << 20
    if sum(read) > 0:  # reads come from a disk
        assert stored <= sum(read) < 1.1 * stored, read
        assert max(read) < 0.5 * stored, read
