"""The contestants: each saves a flat dict of tensors to a directory and loads it back.

A save counts until every byte is durable: contestants that do not sync on their own get an fsync
of each file and of the directory inside the timed part. A load counts until the given tensors hold the
values, as a trainer needs them; contestants that can only make tensors of their own have them
copied. "(mapped)" is the same library's mapping of the file with every page touched and nothing
copied: what a reader that never writes to its weights would pay.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

Tensors = dict[str, torch.Tensor]


class Contestant(Protocol):
    """One way to save and load."""

    name: str
    saved_by: str | None  # loads what the contestant of this name saved; None: saves itself

    def save(self, tensors: Tensors, path: Path) -> None: ...

    def load(self, tensors: Tensors, path: Path) -> None: ...


def sync_tree(path: Path) -> None:
    """fsync every file and directory under `path`."""
    for root, _, files in os.walk(path):
        for name in [*files, "."]:
            fd = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _alone() -> bool:
    return not torch.distributed.is_initialized()


class Tilestone:
    saved_by = None

    def __init__(self, name: str = "tilestone", **options: object) -> None:
        self.name = name
        self._options = options

    def save(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.save(tensors, str(path), **self._options)

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.load(tensors, str(path))


class Dcp:
    saved_by = None

    def __init__(self, threads: int) -> None:
        self.name = f"dcp, {threads} thread{'s' if threads > 1 else ''}"
        self._threads = threads

    def save(self, tensors: Tensors, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(str(path), thread_count=self._threads)
        dcp.save(tensors, storage_writer=writer, no_dist=_alone())
        if _rank() == 0:
            sync_tree(path)  # it syncs its data files; the metadata and the directory are left

    def load(self, tensors: Tensors, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(tensors, storage_reader=dcp.FileSystemReader(str(path)), no_dist=_alone())


class TorchSave:
    name = "torch.save"
    saved_by: str | None = None

    def save(self, tensors: Tensors, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        torch.save(_local(tensors), path / f"{_rank()}.pt")
        sync_tree(path)

    def load(self, tensors: Tensors, path: Path) -> None:
        _copy(torch.load(path / f"{_rank()}.pt", weights_only=True), tensors)


class TorchMmap(TorchSave):
    name = "torch.load(mmap)"
    saved_by = "torch.save"

    def load(self, tensors: Tensors, path: Path) -> None:
        _copy(torch.load(path / f"{_rank()}.pt", weights_only=True, mmap=True), tensors)


class TorchMapped(TorchSave):
    name = "torch.load (mapped)"
    saved_by = "torch.save"

    def load(self, tensors: Tensors, path: Path) -> None:
        _touch(torch.load(path / f"{_rank()}.pt", weights_only=True, mmap=True))


class Safetensors:
    name = "safetensors"
    saved_by: str | None = None

    def save(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        save_file(_local(tensors), path / f"{_rank()}.safetensors")
        sync_tree(path)

    def load(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import load_file

        _copy(load_file(path / f"{_rank()}.safetensors"), tensors)


class SafetensorsMapped(Safetensors):
    name = "safetensors (mapped)"
    saved_by = "safetensors"

    def load(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import load_file

        _touch(load_file(path / f"{_rank()}.safetensors"))


class TorchCheckpointing:
    name = "torch-checkpointing"
    saved_by = None

    def _manager(self):
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_sync_save()
        # Its direct I/O ends in EINVAL on ext4 (the last block of a file is not aligned).
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        return CheckpointManager(config)

    def save(self, tensors: Tensors, path: Path) -> None:
        manager = self._manager()
        saved = manager.save(str(path), {"model": _local(tensors)})
        if hasattr(saved, "result"):
            saved.result()
        manager.close()
        if _rank() == 0:
            sync_tree(path)

    def load(self, tensors: Tensors, path: Path) -> None:
        manager = self._manager()
        manager.load(str(path), into={"model": _local(tensors)})
        manager.close()


class TensorStore:
    """zarr2, one array a tensor, uncompressed, all of them under way at once."""

    name = "tensorstore zarr2"
    saved_by = None

    def _spec(self, path: Path, key: str) -> dict:
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / key)}}

    def save(self, tensors: Tensors, path: Path) -> None:
        import tensorstore as ts

        opened = []
        for key, tensor in tensors.items():
            array = tensor.numpy()
            chunk = _chunk_of_about(array.shape, array.itemsize, 64 << 20)
            spec = self._spec(path, key)
            spec["metadata"] = {
                "shape": array.shape,
                "chunks": chunk,
                "dtype": array.dtype.str,
                "compressor": None,
            }
            opened.append((ts.open(spec, create=True), array))
        writes = [future.result().write(array) for future, array in opened]
        for write in writes:
            write.result()
        sync_tree(path)

    def load(self, tensors: Tensors, path: Path) -> None:
        import tensorstore as ts

        opened = [(ts.open(self._spec(path, key)), tensor) for key, tensor in tensors.items()]
        reads = [(future.result().read(), tensor) for future, tensor in opened]
        for read, tensor in reads:
            tensor.copy_(torch.from_numpy(read.result()))


def _chunk_of_about(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """Whole rows of about `target` bytes."""
    if not shape:
        return shape
    row = itemsize
    for size in shape[1:]:
        row *= size
    return (max(1, min(shape[0], target // max(1, row))), *shape[1:])


def _copy(loaded: Tensors, tensors: Tensors) -> None:
    for key, tensor in _local(tensors).items():
        tensor.copy_(loaded[key])


def _touch(tensors: Tensors) -> None:
    """Reads one byte of every page."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).flatten()[::4096].sum()


def _local(tensors: Tensors) -> Tensors:
    """This rank's own tensors, for contestants that know no DTensor."""
    return {
        key: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for key, tensor in tensors.items()
    }
