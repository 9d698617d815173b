"""Reads, writes and converts the formats of Megatron-Core's distributed optimizer.

An `OptimizerShard` is a rank's part of the optimizer: a `Layout`, which says where each parameter
is in the flat buffers, and the state tensors of the rank's slices. `shards_of` makes it from a
Megatron-Core DistributedOptimizer; for any other optimizer use `pack` and the constructors.

    shards = shards_of(optimizer, model_state)
    state = {"model": model_state, "optimizer": optimizer_state(shards, "fully_reshardable")}
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    megatron.save(state, path, content_metadata=kind)

    commons = load_optimizer(path, shards)  # any of the formats, into any layout
    put_into(optimizer, shards, commons)

Neither Megatron-Core nor a GPU is needed. See docs/megatron_optimizer.md.
"""

from tilestone.megatron.distributed_optimizer.formats import (
    layout_object,
    load_optimizer,
    optimizer_state,
)
from tilestone.megatron.distributed_optimizer.layout import (
    ADAM,
    Bucket,
    Buffer,
    Layout,
    OptimizerShard,
    Parameter,
    Slice,
    pack,
)
from tilestone.megatron.distributed_optimizer.model_layouts import (
    model_layouts,
    write_layouts,
)
from tilestone.megatron.distributed_optimizer.pieces import Piece, pieces_of
from tilestone.megatron.distributed_optimizer.stock_optimizer import (
    layout_objects,
    put_into,
    shards_of,
)

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
    "layout_objects",
    "load_optimizer",
    "model_layouts",
    "optimizer_state",
    "pack",
    "pieces_of",
    "put_into",
    "shards_of",
    "write_layouts",
]
