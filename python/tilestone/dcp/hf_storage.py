"""torch.distributed.checkpoint.hf_storage, with Tilestone's writer and reader."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import hf_storage as _torchs

from tilestone.dcp._hugging_face import HuggingFaceStorageReader, HuggingFaceStorageWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]


def __getattr__(name: str) -> Any:
    """Everything else is torch's."""
    return getattr(_torchs, name)
