"""Megatron-Core's `dist_checkpointing` over Tilestone's engine.

The modules, names, parameters and defaults are those of `megatron.core.dist_checkpointing`, so a
program changes its imports and nothing else. Needs torch; Megatron-Core need not be installed.
Where it is, its own entities are taken as they are: a model's `sharded_state_dict()` goes straight
in.
"""

from __future__ import annotations

from tilestone.megatron.core import CheckpointingException, check_is_distributed_checkpoint
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "check_is_distributed_checkpoint",
]
