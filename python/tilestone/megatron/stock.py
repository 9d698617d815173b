"""Tilestone inside stock Megatron-Core: strategies for its own `dist_checkpointing`.

    from tilestone.megatron.stock import TilestoneLoadStrategy, TilestoneSaveStrategy

    dist_checkpointing.save(state, path, sharded_strategy=TilestoneSaveStrategy())
    dist_checkpointing.load(state, path, sharded_strategy=TilestoneLoadStrategy())

or, for a program that offers no place for a strategy, once at its start

    tilestone.megatron.stock.enable()

Megatron-Core is imported when one of these is first used, and nowhere else in the package. Known
are its versions 0.13 to 0.19.
"""

from __future__ import annotations

from typing import Any

from tilestone.megatron import _stock_strategies
from tilestone.megatron._enable import disable, enable

__all__ = ["TilestoneLoadStrategy", "TilestoneSaveStrategy", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """The strategies' classes, made with Megatron-Core's base classes when first asked for."""
    if name in _stock_strategies.NAMES:
        return _stock_strategies.find_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
