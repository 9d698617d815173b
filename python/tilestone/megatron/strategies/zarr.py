"""The backend "zarr", which Megatron-Core had up to 0.15, saved and loaded by the engine."""

from __future__ import annotations

from tilestone.megatron.strategies._engine import EngineLoadStrategy, EngineSaveStrategy
from tilestone.megatron.strategies.base import StrategyAction, register_own


def register_default_zarr_strategies() -> None:
    """Registers the strategies of this module for the backend ("zarr", 1)."""
    register_own(StrategyAction.LOAD_SHARDED, "zarr", 1, ZarrLoadShardedStrategy())
    register_own(StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy("zarr", 1))


class ZarrSaveShardedStrategy(EngineSaveStrategy):
    """Saves each tensor as a zarr array, with a file for each cell of the grid.

    Args:
        backend: name of the format: "zarr".
        version: version of the format: 1.
    """


class ZarrLoadShardedStrategy(EngineLoadStrategy):
    """Loads zarr arrays. The parts need not be those that were saved."""

    backend = "zarr"
