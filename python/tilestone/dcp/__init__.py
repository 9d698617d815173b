"""torch.distributed.checkpoint's names over Tilestone's engine.

    import tilestone.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

`save`, `load`, `async_save`, the writers and readers of file systems and of Hugging Face folders and
`format_utils` are Tilestone's, with torch's signatures and meaning; everything else is torch's own. The checkpoints are torch's
format: stock torch reads them, and Tilestone reads those of stock torch. docs/from_dcp.md lists the
differences.
"""

import sys

import torch.distributed.checkpoint as _torchs
from torch.distributed.checkpoint import (
    api,
    default_planner,
    logger,
    logging_handlers,
    metadata,
    optimizer,
    planner,
    planner_helpers,
    resharding,
    staging,
    stateful,
    storage,
    utils,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tilestone.dcp import filesystem, hf_storage, state_dict_loader, state_dict_saver
from tilestone.dcp._enable import disable, enable
from tilestone.dcp._hugging_face import HuggingFaceStorageReader, HuggingFaceStorageWriter
from tilestone.dcp._reader import FileSystemReader
from tilestone.dcp._writer import FileSystemWriter
from tilestone.dcp.state_dict_loader import load, load_state_dict
from tilestone.dcp.state_dict_saver import async_save, save, save_state_dict

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "api",
    "async_save",
    "default_planner",
    "disable",
    "enable",
    "filesystem",
    "hf_storage",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "logger",
    "logging_handlers",
    "metadata",
    "optimizer",
    "planner",
    "planner_helpers",
    "resharding",
    "save",
    "save_state_dict",
    "staging",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "utils",
]

# These modules need nothing from Tilestone, so they are torch's under Tilestone's names too.
for _module in (
    api, default_planner, logger, logging_handlers, metadata, optimizer, planner, planner_helpers,
    resharding, staging, stateful, storage, utils,
):  # fmt: skip
    sys.modules[_module.__name__.replace(_torchs.__name__, __name__)] = _module


def __getattr__(name: str) -> object:
    """What other versions of torch have besides."""
    return getattr(_torchs, name)
