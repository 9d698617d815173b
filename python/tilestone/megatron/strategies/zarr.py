"""The backend "zarr", which Megatron-Core had up to 0.15, by Tilestone's engine."""

from __future__ import annotations

from tilestone.megatron.strategies._engine import EngineLoadStrategy, EngineSaveStrategy
from tilestone.megatron.strategies.base import StrategyAction, register_own


def register_default_zarr_strategies() -> None:
    """Makes the strategies of this module those of the backend ("zarr", 1)."""
    register_own(StrategyAction.LOAD_SHARDED, "zarr", 1, ZarrLoadShardedStrategy())
    register_own(StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy("zarr", 1))


class ZarrSaveShardedStrategy(EngineSaveStrategy):
    """Saves each tensor as an array of zarr, of which every cell of the grid is a file.

    Args:
        backend: the format's name, "zarr".
        version: of the format, 1.
    """


class ZarrLoadShardedStrategy(EngineLoadStrategy):
    """Loads arrays of zarr.

    The parts of tensors may be others than those that were saved.
    """

    backend = "zarr"
