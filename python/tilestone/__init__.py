"""Tilestone: distributed checkpoints of large models.

    import tilestone

    state = {"weight": tilestone.ShardedTensor.from_rank_offsets("weight", local, (0, rank, world)),
             "step": 1200}
    tilestone.save(state, "ckpt/step-1200")
    loaded = tilestone.load(wanted, "ckpt/step-1200")
    with tilestone.open("ckpt/step-1200") as ckpt:
        part = ckpt.read("weight", box=((0, 128), (0, 64)))

Checkpoints are PyTorch's own (torch.distributed.checkpoint reads and writes the same files).
torch is not needed, and not imported unless the caller has done so.
"""

from tilestone._api import load, save
from tilestone._checkpoint import Checkpoint, StoredTensor, gc, open
from tilestone._core import (
    Box,
    Communicator,
    Damage,
    Leftover,
    LocalBoxes,
    MergedSharding,
    Mesh,
    Partial,
    Replicate,
    SaveResult,
    Shard,
    StridedShard,
    VerifyReport,
    dtypes,
    flat_range_to_boxes,
    held_boxes,
    local_boxes,
    merge_shardings,
    mpi_world,
    replica_holders,
    replica_id,
    run_ranks,
    solo,
)
from tilestone._core import VERSION as __version__
from tilestone._dtypes import DType
from tilestone._entities import (
    LocalNonpersistent,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone._errors import (
    AlreadyExistsError,
    CheckpointError,
    CorruptError,
    CoverageError,
    InternalError,
    InterruptedError,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    RankFailedError,
    StorageError,
    TimeoutError,
    UnsafeError,
    UnsupportedError,
)
from tilestone._opaque import Opaque
from tilestone._plugins import register_converter
from tilestone._progress import Progress

__all__ = [
    "AlreadyExistsError",
    "Box",
    "Checkpoint",
    "CheckpointError",
    "Communicator",
    "CorruptError",
    "CoverageError",
    "DType",
    "Damage",
    "InternalError",
    "InterruptedError",
    "InvalidArgumentError",
    "Leftover",
    "LocalBoxes",
    "LocalNonpersistent",
    "MergedSharding",
    "Mesh",
    "MismatchError",
    "NotFoundError",
    "Opaque",
    "Partial",
    "Progress",
    "RankFailedError",
    "Replicate",
    "SaveResult",
    "Shard",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "StoredTensor",
    "StridedShard",
    "TimeoutError",
    "UnsafeError",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "dtypes",
    "flat_range_to_boxes",
    "gc",
    "held_boxes",
    "load",
    "local_boxes",
    "merge_shardings",
    "mpi_world",
    "open",
    "register_converter",
    "replica_holders",
    "replica_id",
    "run_ranks",
    "save",
    "solo",
]
