"""Tilestone inside stock Megatron-Core: strategies for its own `dist_checkpointing`.

    from tilestone.megatron.stock import TilestoneLoadStrategy, TilestoneSaveStrategy

    dist_checkpointing.save(state, path, sharded_strategy=TilestoneSaveStrategy())
    dist_checkpointing.load(state, path, sharded_strategy=TilestoneLoadStrategy())

or, for a program that has no option for a strategy, once at its start

    tilestone.megatron.stock.enable()

Megatron-Core is imported when one of these is first used; nothing else in the package imports it.
Versions 0.13 to 0.19 are supported.
"""

from __future__ import annotations

from typing import Any

from tilestone.megatron import _stock_strategies
from tilestone.megatron._enable import disable, enable

__all__ = ["TilestoneLoadStrategy", "TilestoneSaveStrategy", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """Returns a strategy's class, which is made on demand from Megatron-Core's base class."""
    if name in _stock_strategies.NAMES:
        return _stock_strategies.find_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
