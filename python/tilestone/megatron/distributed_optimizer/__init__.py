"""The checkpoint formats of Megatron-Core's distributed optimizer, read, written and converted.

A rank's part of the optimizer is an `OptimizerShard`: a `Layout` that says which parameters lie
where in the flat buffers, and the state tensors of what the rank has of them. `shards_of` reads it
off a Megatron-Core DistributedOptimizer; `pack` and the constructors describe any other.

    shards = shards_of(optimizer, model_state)
    state = {"model": model_state, "optimizer": optimizer_state(shards, "fully_reshardable")}
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    megatron.save(state, path, content_metadata=kind)

    commons = load_optimizer(path, shards)  # any of the formats, into any layout
    put_into(optimizer, shards, commons)

Neither Megatron-Core nor a GPU is needed. See docs/megatron_optimizer.md.
"""

from tilestone.megatron.distributed_optimizer.formats import layout_object, optimizer_state
from tilestone.megatron.distributed_optimizer.layout import (
    Bucket,
    Buffer,
    Layout,
    Parameter,
    Slice,
    pack,
)
from tilestone.megatron.distributed_optimizer.loading import load_optimizer
from tilestone.megatron.distributed_optimizer.pieces import Piece, pieces_of
from tilestone.megatron.distributed_optimizer.shard import ADAM, OptimizerShard
from tilestone.megatron.distributed_optimizer.stock_optimizer import put_into, shards_of

__all__ = [
    "ADAM",
    "Bucket",
    "Buffer",
    "Layout",
    "OptimizerShard",
    "Parameter",
    "Piece",
    "Slice",
    "layout_object",
    "load_optimizer",
    "optimizer_state",
    "pack",
    "pieces_of",
    "put_into",
    "shards_of",
]
