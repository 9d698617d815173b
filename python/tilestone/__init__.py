"""Tilestone: distributed checkpoints of large models.

    import tilestone

    state = {"weight": tilestone.ShardedTensor.from_rank_offsets("weight", local, (0, rank, world)),
             "step": 1200}
    tilestone.save(state, "ckpt/step-1200")
    loaded = tilestone.load(wanted, "ckpt/step-1200")
    with tilestone.open("ckpt/step-1200") as ckpt:
        part = ckpt.read("weight", box=((0, 128), (0, 64)))

The checkpoints are in PyTorch's own format: torch.distributed.checkpoint reads and writes the same
files. torch is not required, and is only used if the caller has imported it.
"""

from tilestone import geometry
from tilestone._calls.async_save import AsyncSave, AsyncStep, async_save
from tilestone._calls.deltas import DeltaVersion, apply_delta, save_delta
from tilestone._calls.maintenance import (
    abandon, convert, gc, publish, repair, unpublished,
)
from tilestone._calls.opening import Checkpoint, open
from tilestone._calls.save_load import load, save
from tilestone._calls.session import Session
from tilestone._calls.stored_tensor import StoredTensor
from tilestone._calls.stores import Store, register_store
from tilestone._core import (
    Communicator,
    Damage,
    Leftover,
    RepairReport,
    SaveResult,
    SessionStats,
    StepInfo,
    UnpublishedSave,
    VerifyReport,
    mpi_world,
    solo,
)
from tilestone._core import VERSION as __version__
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
from tilestone._objects.converters import register_converter
from tilestone._objects.dtypes import DType, dtype_names
from tilestone._objects.entities import (
    LocalNonpersistent, ShardedObject, ShardedTensor, ShardedTensorFactory,
)
from tilestone._objects.given import PlacementRules
from tilestone._objects.opaque import Opaque
from tilestone._options.load_report import LoadReport
from tilestone._options.progress import Progress
from tilestone._options.rename import add_prefix, strip_prefix
from tilestone._options.values import (
    ByFiles, Checks, Differences, Keep, LocalCopies, Reading, Resources,
)
from tilestone._training_run.export import Export, Exported
from tilestone._training_run.fast import Fast
from tilestone._training_run.manager import CheckpointManager

__all__ = [
    "AlreadyExistsError",
    "AsyncSave",
    "AsyncStep",
    "ByFiles",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Checks",
    "Communicator",
    "CorruptError",
    "CoverageError",
    "DType",
    "Damage",
    "DeltaVersion",
    "Differences",
    "Export",
    "Exported",
    "Fast",
    "InternalError",
    "InterruptedError",
    "InvalidArgumentError",
    "Keep",
    "Leftover",
    "LoadReport",
    "LocalCopies",
    "LocalNonpersistent",
    "MismatchError",
    "NotFoundError",
    "Opaque",
    "PlacementRules",
    "Progress",
    "RankFailedError",
    "Reading",
    "RepairReport",
    "Resources",
    "SaveResult",
    "Session",
    "SessionStats",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StepInfo",
    "StorageError",
    "Store",
    "StoredTensor",
    "TimeoutError",
    "UnpublishedSave",
    "UnsafeError",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "abandon",
    "add_prefix",
    "apply_delta",
    "async_save",
    "convert",
    "dtype_names",
    "gc",
    "geometry",
    "load",
    "mpi_world",
    "open",
    "publish",
    "register_converter",
    "register_store",
    "repair",
    "save",
    "save_delta",
    "solo",
    "strip_prefix",
    "unpublished",
]
