"""torch.distributed.checkpoint.format_utils, with Tilestone's writer and reader.

    python -m tilestone.dcp.format_utils torch_to_dcp FILE DIRECTORY
    python -m tilestone.dcp.format_utils dcp_to_torch DIRECTORY FILE
"""

from __future__ import annotations

import os
import runpy
from typing import Any

import torch
from torch.distributed.checkpoint import format_utils as _torchs
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from tilestone.dcp._enable import enable
from tilestone.dcp._reader import FileSystemReader
from tilestone.dcp._writer import FileSystemWriter

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Converts a checkpoint into one file of torch.save; this process holds all of it.

    Args:
        dcp_checkpoint_dir: the checkpoint's directory.
        torch_save_path: the file.
    """
    state: dict[str, Any] = {}
    planner: Any = _EmptyStateDictLoadPlanner
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(dcp_checkpoint_dir),
        planner=planner(),
        no_dist=True,
    )
    torch.save(state, torch_save_path)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Converts a file of torch.save into a checkpoint; this process holds all of it.

    Args:
        torch_save_path: the file. It is loaded with weights_only=False, as in torch.
        dcp_checkpoint_dir: the checkpoint's directory.
    """
    state = torch.load(torch_save_path, weights_only=False)
    writer = FileSystemWriter(dcp_checkpoint_dir)
    _save_state_dict(state, storage_writer=writer, no_dist=True)


def __getattr__(name: str) -> Any:
    """Everything else is torch's."""
    return getattr(_torchs, name)


if __name__ == "__main__":
    enable()
    runpy.run_path(_torchs.__file__, run_name="__main__")
