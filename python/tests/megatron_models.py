"""Real models and optimizers of Megatron-Core on CPU ranks, and several ways to save and load them.

The models and the replacement of CUDA are those of examples/megatron.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pathlib
import sys
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import tilestone
from tilestone import megatron

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples" / "megatron"))

import gpt  # noqa: E402
import on_cpu  # noqa: E402

FULLY_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
DP_RESHARDABLE = {**FULLY_RESHARDABLE, "distrib_optim_sharding_type": "dp_reshardable"}


@contextlib.contextmanager
def stock_on_cpu() -> Iterator[None]:
    """on_cpu() for a daemon process, which must be allowed to start stock's writer processes."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with on_cpu.on_cpu(), unittest.mock.patch.dict(config, daemon=False):
        yield


def _stock() -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def _stock_strategies() -> tuple[Any, Any]:
    from megatron.core.dist_checkpointing.strategies import torch as stocks

    save = stocks.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    return save, stocks.TorchDistLoadShardedStrategy()


def save_by(way: str, state: Any, path: pathlib.Path, **options: Any) -> None:
    """Saves a sharded state dict.

    Args:
        way: "ours": tilestone.megatron.save; "plain": tilestone.save; "stock": Megatron-Core's
            save with its own strategy; "plugin": with Tilestone's.
        state: the state.
        path: the checkpoint's new directory.
        options: options of the call.
    """
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    if way == "ours":
        megatron.save(state, path, **options)
    elif way == "plain":
        tilestone.save(state, path, **options)
    else:
        stock = way == "stock"
        strategy = _stock_strategies()[0] if stock else megatron.TilestoneSaveStrategy()
        _stock().save(state, str(path), strategy, **options)


def load_by(way: str, state: Any, path: pathlib.Path) -> Any:
    """Loads a sharded state dict by a way of save_by(). It must have all keys of the checkpoint."""
    if way == "ours":
        return megatron.load(state, path, strict="raise_all")
    if way == "plain":
        return tilestone.load(state, path, differences=tilestone.Differences(not_requested="error"))
    stock = way == "stock"
    strategy = _stock_strategies()[1] if stock else megatron.TilestoneLoadStrategy()
    loaded, missing, unexpected = _stock().load(state, str(path), strategy, strict="return_all")
    # In our checkpoints stock lists the object with the common state that Megatron-Core 0.19 uses.
    assert not unexpected and missing <= ({"common_state"} if stock else set()), missing
    return loaded


def whole_state(
    models: list[Any], optimizer: Any, metadata: dict[str, Any], loading: bool = False
) -> dict[str, Any]:
    """The sharded state of models and optimizer, like that of Megatron's training."""
    state = gpt.model_state(models, metadata)
    sharded = optimizer.sharded_state_dict(state, is_loading=loading, metadata=dict(metadata))
    return {**state, "optimizer": sharded, "iteration": None if loading else 7}


def fill_all(models: list[Any], optimizer: Any, value: gpt.Value, metadata: dict[str, Any]) -> None:
    """Sets weights and optimizer states to their values by key, as if they were loaded."""
    state = whole_state(models, optimizer, metadata, loading=True)
    gpt.fill(models, value)
    optimizer.load_state_dict(gpt.filled(state["optimizer"], value))


def take(models: list[Any], optimizer: Any, state: dict[str, Any]) -> None:
    """Loads a state into models and optimizer."""
    gpt.load_models(models, state)
    optimizer.load_state_dict(state["optimizer"])
