"""How the parts of a checkpoint are saved and loaded. Registers Tilestone's own strategies."""

from __future__ import annotations

from tilestone.megatron.strategies.base import StrategyAction, register_default_strategy
from tilestone.megatron.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from tilestone.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tilestone.megatron.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

for _action, _backend, _strategy in (
    (StrategyAction.LOAD_COMMON, "torch", TorchCommonLoadStrategy()),
    (StrategyAction.SAVE_COMMON, "torch", TorchCommonSaveStrategy("torch", 1)),
    (StrategyAction.LOAD_SHARDED, "torch_dist", TorchDistLoadShardedStrategy()),
    (StrategyAction.SAVE_SHARDED, "torch_dist", TorchDistSaveShardedStrategy("torch_dist", 1)),
    (StrategyAction.LOAD_SHARDED, "zarr", ZarrLoadShardedStrategy()),
    (StrategyAction.SAVE_SHARDED, "zarr", ZarrSaveShardedStrategy("zarr", 1)),
):
    register_default_strategy(_action, _backend, 1, _strategy)
