"""Tilestone's strategies as the defaults of stock Megatron-Core, in several versions of it."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import sys
import threading
import types
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import tilestone
from ranks import Worlds
from test_megatron_stock import _check, _make_directory, _megatron, _state, _stock_on_cpu
from tilestone.megatron import stock
from tilestone.megatron import _stock_strategies as strategies


def _switching(rank: int, world: int, folder: str) -> None:
    stocks = _megatron()
    from megatron.core.dist_checkpointing.strategies import base
    from megatron.core.dist_checkpointing.strategies import torch as by_name

    def remembered() -> list[Any]:
        kinds = (by_name.TorchDistSaveShardedStrategy, by_name.TorchDistLoadShardedStrategy)
        return [*(dict(vars(kind)) for kind in kinds), by_name.register_default_torch_strategies,
                {kind: dict(entries) for kind, entries in base.default_strategies.items()
                 if entries}]  # fmt: skip

    class Own(by_name.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        pass

    made_before = by_name.TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="layers")
    before = remembered()
    two_files = tilestone.Resources(files_per_rank=2)
    stock.enable(save_strategy=stock.TilestoneSaveStrategy(resources=two_files))
    stock.enable()
    with _stock_on_cpu():
        for number, save in enumerate((None, made_before, Own("torch_dist", 1))):
            path = pathlib.Path(folder, str(number))
            _make_directory(rank, path)
            stocks.save(_state(rank, True), str(path), save)
            load = by_name.TorchDistLoadShardedStrategy() if number else None
            _check(stocks.load(_state(rank, False), str(path), load), rank)
            dist.barrier()
            by_tilestone = (path / ".tilestone").exists()
            assert by_tilestone == (number < 2), number
            assert bool(list(path.glob("layers*__*_*.distcp"))) == (number == 1)
    assert isinstance(
        stocks.serialization.get_default_save_sharded_strategy(), stock.TilestoneSaveStrategy
    )
    stock.disable()
    stock.disable()
    assert remembered() == before


def test_enable_covers_defaults_and_stocks_own_classes_and_disable_undoes_it(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_switching, str(tmp_path))


def test_enable_logs_once_and_refuses_other_strategies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _megatron()
    with caplog.at_level(logging.INFO, "tilestone"):
        try:
            stock.enable()
            stock.enable()
        finally:
            stock.disable()
    assert len([record for record in caplog.records if "Tilestone" in record.message]) == 1
    with pytest.raises(tilestone.InvalidArgumentError, match="load_strategy"):
        stock.enable(load_strategy=stock.TilestoneSaveStrategy())


@pytest.fixture
def no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the strategies' classes had not been made yet."""
    monkeypatch.setattr(strategies, "_made", {})


def test_a_missing_or_unknown_megatron_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, no_classes: None
) -> None:
    stock.disable()
    core = types.ModuleType("megatron.core")
    for version, said in (("0.12.3", "0.12.3"), ("1.0", "1.0"), ("", "unknown")):
        core.__version__ = version  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "megatron.core", core)
            patched.setitem(
                sys.modules, "megatron.core.dist_checkpointing.mapping", types.ModuleType("m")
            )
            with pytest.raises(tilestone.UnsupportedError, match=said):
                stock.enable()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    for what in (stock.enable, lambda: stock.TilestoneSaveStrategy):
        with pytest.raises(tilestone.UnsupportedError, match="can't be imported"):
            what()


def _stub_of_0_19() -> dict[str, types.ModuleType]:
    """0.19's strategies as a plug-in sees them: without a base class and without a registry."""
    package = "megatron.core.dist_checkpointing"
    names = ("megatron.core", package, f"{package}.mapping", f"{package}.strategies",
             f"{package}.strategies.torch")  # fmt: skip
    modules = {name: types.ModuleType(name) for name in names}
    modules["megatron.core"].__version__ = "0.19.2"  # type: ignore[attr-defined]

    class TorchDistSaveShardedStrategy:
        def __init__(self, backend: str, version: int, keep_only_main_replica: bool = True) -> None:
            self.backend, self.version = backend, version

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            raise AssertionError("stock's own")

    class TorchDistLoadShardedStrategy:
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str) -> Any:
            raise AssertionError("stock's own")

    stub: Any = modules[f"{package}.strategies.torch"]
    stub.get_async_strategy = lambda name: (name, {"AsyncRequest": Request})
    for kind in (TorchDistSaveShardedStrategy, TorchDistLoadShardedStrategy):
        setattr(modules[f"{package}.strategies.torch"], kind.__name__, kind)
    return modules


class Request(NamedTuple):
    """The request of the queue that 0.19 names "nvrx"."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any


@dataclasses.dataclass
class ShardedObject:
    """The class in which 0.19 passes the common state."""

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: Any = 0

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


ShardedObject.__module__ = "megatron.core.dist_checkpointing.mapping"


def test_a_megatron_without_base_classes_takes_subclasses_of_its_own_strategy(
    monkeypatch: pytest.MonkeyPatch, no_classes: None, ckpt: str
) -> None:
    modules = _stub_of_0_19()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.strategies.base", None)
    by_name = modules["megatron.core.dist_checkpointing.strategies.torch"]
    save = stock.TilestoneSaveStrategy()
    assert isinstance(save, by_name.TorchDistSaveShardedStrategy)  # type: ignore[attr-defined]
    folder = pathlib.Path(ckpt)
    folder.mkdir()
    for name in ("metadata.json", "common.pt", "integrity.json"):
        (folder / name).write_text('{"sharded_backend": "torch_dist"}')
    stock.enable(save_strategy=save)
    try:
        stocks = by_name.TorchDistSaveShardedStrategy("torch_dist", 1)  # type: ignore[attr-defined]
        for step in (1, 2):
            common = ShardedObject("common_state", {"step": step})
            stocks.save({"common_state": common, "o": ShardedObject("o", [step])}, ckpt)
            sealed = (folder / "metadata.json").exists()
            assert sealed == (step == 2)  # replaced in one step, without other files
            (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        for step, finalized in ((3, False), (4, True)):
            common = ShardedObject("common_state", {"step": step})
            state = {"common_state": common, "o": ShardedObject("o", [2])}
            request = save.async_save(state, ckpt, "nvrx")
            assert type(request) is Request and request.finalize_fns
            if finalized:
                request.async_fn(*request.async_fn_args)
                request.finalize_fns[0]()
            del request
            for thread in threading.enumerate():  # gives up what was not finalized
                if thread.name == "tilestone-save":
                    thread.join(60)
            assert (folder / "metadata.json").exists()
            with tilestone.open(ckpt) as checkpoint:
                assert checkpoint.common() == {"step": 4 if finalized else 2}
                assert checkpoint.verify().ok
        assert not (folder / "common.pt").exists() and not (folder / "integrity.json").exists()
        loads = by_name.TorchDistLoadShardedStrategy()  # type: ignore[attr-defined]
        assert loads.load({"x": ShardedObject("o", None)}, ckpt, "nvrx") == {"x": [2]}
    finally:
        stock.disable()
    assert "async_save" not in vars(by_name.TorchDistSaveShardedStrategy)  # type: ignore[attr-defined]
