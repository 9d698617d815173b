"""Megatron-Core's `dist_checkpointing` over Tilestone's engine.

The modules, names, parameters and defaults are those of `megatron.core.dist_checkpointing`, so a
program only has to change its imports. This package needs torch, but not Megatron-Core. Where
Megatron-Core is installed, its own entities are accepted: pass a model's `sharded_state_dict()`
as it is.
"""

from __future__ import annotations

from typing import Any

from tilestone.megatron import stock
from tilestone.megatron.core import CheckpointingException, check_is_distributed_checkpoint
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone.megatron.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from tilestone.megatron.stock import disable, enable
from tilestone.megatron.validation import StrictHandling

# Without the strategies: `import *` works where Megatron-Core is not installed.
__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "disable",
    "enable",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]


def __getattr__(name: str) -> Any:
    """Returns a strategy for stock Megatron-Core, which is imported only then."""
    if name in ("TilestoneLoadStrategy", "TilestoneSaveStrategy"):
        return getattr(stock, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
