"""Second names of replicas (KEY.__tp_replica_RANK) under every strict mode."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from ranks import Worlds
from test_megatron_api import MODES
from test_megatron_stock import _make_directory, _megatron, _stock_on_cpu
from tilestone import megatron
from tilestone.megatron import stock, validation
from tilestone.megatron._stored import StoredEntities
from tilestone.megatron.strategies import torch as torch_strategies

KEYS = ("a", "b.c")
NAMED = ("plain", "second", "both")  # how the checkpoint names its replicated tensors
SIZES = (1, 2, 4)  # of tensor parallelism when it is loaded


class _Around(torch_strategies.TorchDistLoadShardedStrategy):
    """A strategy of the user, which loads as Tilestone's does."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return super().load(sharded_state_dict, checkpoint_dir)


def _state(rank: int, tp_size: int, second: bool, filled: bool) -> dict[str, Any]:
    """Tensors that are the same on all ranks, and one that is shared by rows."""
    stocks, tp, dp = _megatron(), rank % tp_size, rank // tp_size
    make = stocks.ShardedTensor.from_rank_offsets
    state = {}
    for i, key in enumerate(KEYS):
        value = torch.full((3,), i + 1.0) if filled else torch.zeros(3)
        name = f"{key}.__tp_replica_{tp}" if second else key
        state[key] = make(name, value, replica_id=(0, 0 if second else tp, dp))
    mine = torch.full((2,), float(rank)) if filled else torch.zeros(2)
    state["rows"] = make("rows", mine, (0, rank, 4))
    return state


def _save(rank: int, folder: str) -> None:
    for name in NAMED:
        path = pathlib.Path(folder, name)
        _make_directory(rank, path)
        saving = stock.TilestoneSaveStrategy(tp_replica_names=name == "both")
        state = _state(rank, 2, name == "second", filled=True)
        make = _megatron().ShardedTensor.from_rank_offsets
        state["gone"] = make("gone", torch.ones(1), replica_id=(0, rank % 2, rank // 2))
        _megatron().save(state, str(path), saving)


def _template(rank: int, tp_size: int, second: bool) -> dict[str, Any]:
    state = _state(rank, tp_size, second, filled=False)
    make = _megatron().ShardedTensor.from_rank_offsets
    state["new"] = make("new.__tp_replica_0", torch.zeros(1), replica_id=(0, 0, rank))
    return state


def _wrong(rank: int, mode: str, template: Any, load: Any) -> str:
    """What is wrong with a load; "" if nothing is."""
    missing = {"gone"} if mode in ("return_all", "raise_all", "log_all") else set()
    try:
        loaded = load(template)
    except Exception as error:
        text = str(error)
        said = [key for key in (*KEYS, "rows") if f"'{key}" in text]
        expected = mode.startswith("raise") or mode == "assume_ok_unexpected"
        named = ("new.__tp_replica_0" in text or "key new" in text) and (
            "'gone'" in text or not missing
        )
        return "" if expected and named and not said else f"{type(error).__name__}: {text}"
    if mode.startswith("return"):
        loaded, *found = loaded
        if found != [missing, {"new.__tp_replica_0"}]:
            return f"mismatches: {found}"
    expected_values = {**{key: [i + 1.0] * 3 for i, key in enumerate(KEYS)}, "rows": [rank] * 2}
    values = {key: item.tolist() for key, item in loaded.items() if key in expected_values}
    return "" if values == expected_values and "new" not in loaded else f"loaded: {loaded}"


def _cases() -> list[tuple[str, int, bool, str]]:
    """(names in the checkpoint, tensor parallel size, whether second names are asked for, mode)."""
    all_ways = [(name, size, second, "return_all")
                for name in NAMED for size in SIZES for second in (True, False)]  # fmt: skip
    others = [mode for mode in MODES if mode != "return_all"]
    return all_ways + [(name, 4, True, mode) for name in ("plain", "second") for mode in others]


def _load_all(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    stocks = _megatron()
    with _stock_on_cpu():
        _save(rank, folder)
        for name, tp_size, second, mode in _cases():
            path = str(pathlib.Path(folder, name))
            ways: dict[str, Any] = {
                "plug-in": lambda t, path=path, mode=mode: stocks.load(
                    t, path, stock.TilestoneLoadStrategy(), strict=mode),
                "megatron": lambda t, path=path, mode=mode: megatron.load(t, path, strict=mode),
                "strategy": lambda t, path=path, mode=mode: megatron.load(
                    t, path, _Around(), strict=mode),
            }  # fmt: skip
            for way, load in ways.items():
                found = _wrong(rank, mode, _template(rank, tp_size, second), load)
                if found:
                    wrong.append(f"{way} {name} tp {tp_size} {mode} {second}: {found}")
    return wrong


def test_second_names_are_neither_missing_nor_unexpected(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    for wrong in worlds[4].run(_load_all, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stored", ["w", "w.__tp_replica_1"])
def test_stored_tensors_are_named_as_they_are_requested(stored: str) -> None:
    make = megatron.ShardedTensor.from_rank_offsets
    entities = StoredEntities({stored: make(stored, torch.zeros(1))})
    asked = ["w.__tp_replica_0", "w.__tp_replica_11", "w.__tp_replica_x", "v.__tp_replica_0"]
    found = [entity.key for entity in entities.as_requested(asked)]
    assert found == asked[:2]
    assert [entity.key for entity in entities.as_requested([stored, asked[0]])] == [stored, asked[0]]
    assert [entity.key for entity in entities.as_requested(["v"])] == [stored]
    missing, unexpected = validation._determine_missing_and_unexpected_keys(
        entities, [make(key, torch.zeros(1)) for key in asked], []
    )
    assert (missing, unexpected) == (set(), set(asked[2:]))
