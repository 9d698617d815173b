"""The backend "zarr", which Megatron-Core had up to 0.15, saved and loaded by the engine."""

from __future__ import annotations

from tilestone.megatron.strategies.torch import EngineLoadStrategy, EngineSaveStrategy


class ZarrSaveShardedStrategy(EngineSaveStrategy):
    """Saves each tensor as a zarr array, with a file for each cell of the grid.

    Args:
        backend: name of the format: "zarr".
        version: version of the format: 1.
    """


class ZarrLoadShardedStrategy(EngineLoadStrategy):
    """Loads zarr arrays. The parts need not be those that were saved."""

    backend = "zarr"
