"""The contestants: each saves a flat dict of tensors to a directory and loads it back.

A save counts until every byte is durable: contestants that do not sync on their own get an fsync
of each file and of the directory inside the timed part. A load counts until the given tensors hold the
values, as a trainer needs them; contestants that can only make tensors of their own have them
copied. "(mapped)" is the same library's mapping of the file with every page touched and nothing
copied: what a reader that never writes to its weights would pay.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]
PROGRAMS = Path(__file__).resolve().parent.parent / "build" / "release"


class Contestant:
    """One way to save and load. Either returns None, or the seconds that it has measured itself."""

    name: str
    saved_by: str | None = None  # loads what the contestant of this name saved; None: saves itself
    loads = True

    def save(self, tensors: Tensors, path: Path) -> float | None:
        raise NotImplementedError

    def load(self, tensors: Tensors, path: Path) -> float | None:
        raise NotImplementedError


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """fsync every file and directory under `path`."""
    for root, _, files in os.walk(path):
        for name in [*files, "."]:
            _sync(os.path.join(root, name))


def sync_file(file: Path) -> None:
    """fsync one file and its directory, in which other ranks may be at work."""
    _sync(file)
    _sync(file.parent)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _alone() -> bool:
    return not torch.distributed.is_initialized()


class Tilestone(Contestant):
    def __init__(self, name: str = "tilestone", **options: object) -> None:
        self.name = name
        self._options = options

    def save(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.save(tensors, str(path), **self._options)

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.load(tensors, str(path))


class TilestoneLoad(Tilestone):
    """Tilestone's load with an option; alone, of the files that plain Tilestone saved."""

    def __init__(self, **options: str) -> None:
        super().__init__(", ".join(["tilestone", *(f"{k}={v}" for k, v in options.items())]))
        self.saved_by = "tilestone"
        self._load_options = options

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.load(tensors, str(path), **self._load_options)


def cache_policies() -> list[Contestant]:
    return [TilestoneLoad(cache="bypass"), TilestoneLoad(cache="keep")]


class Cpp(Contestant):
    """The C++ interface, in a process of its own with the same tensors, which times the call alone.

    The tensors come to it through a checkpoint that Tilestone saves once.
    """

    name = "tilestone, C++"

    def __init__(self, tensors: Tensors, root: Path) -> None:
        seed = root / "cpp-tensors"
        Tilestone().save(tensors, seed)
        self._start(seed, {})
        shutil.rmtree(seed)

    def _start(self, seed: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [PROGRAMS / "bin" / "save_load", seed], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, **environment})
        self._expect("ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _expect(self, wanted: str) -> None:
        answer = self._process.stdout.readline().strip()
        if answer != wanted:
            raise RuntimeError(f"save_load: expected {wanted!r}, got {answer!r}")

    def _ask(self, command: str) -> float:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise RuntimeError(f"save_load: {answer or 'it ended'}")
        return float(answer)

    def save(self, tensors: Tensors, path: Path) -> float:
        return self._ask(f"save {path}")

    def load(self, tensors: Tensors, path: Path) -> float:
        return self._ask(f"load {path}")

    def different(self) -> int:
        """How many tensors the last load did not fill with what was saved."""
        return int(self._ask("same"))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class CppNoChecksum(Cpp):
    """The same with a CRC-32 that does nothing: what checksums cost a save. Can't be loaded."""

    name = "no checksums"
    loads = False

    def _start(self, seed: Path, environment: dict[str, str]) -> None:
        preload = PROGRAMS / "bench" / "libno_checksum.so"
        super()._start(seed, {**environment, "LD_PRELOAD": str(preload)})


class Dcp(Contestant):
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


class TorchSave(Contestant):
    name = "torch.save"

    def save(self, tensors: Tensors, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{_rank()}.pt"
        torch.save(_local(tensors), file)
        sync_file(file)

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


class Safetensors(Contestant):
    name = "safetensors"

    def save(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{_rank()}.safetensors"
        save_file(_local(tensors), file)
        sync_file(file)

    def load(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import load_file

        _copy(load_file(path / f"{_rank()}.safetensors"), tensors)


class SafetensorsMapped(Safetensors):
    name = "safetensors (mapped)"
    saved_by = "safetensors"

    def load(self, tensors: Tensors, path: Path) -> None:
        from safetensors.torch import load_file

        _touch(load_file(path / f"{_rank()}.safetensors"))


class TorchCheckpointing(Contestant):
    name = "torch-checkpointing"

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


class TensorStore(Contestant):
    """zarr2, one array a tensor, uncompressed, all of them under way at once."""

    name = "tensorstore zarr2"

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


def everybody() -> list[Contestant]:
    """One of each that needs nothing but tensors and a path."""
    return [
        Tilestone(),
        Dcp(1),
        Dcp(os.cpu_count() or 1),
        TorchSave(),
        TorchMmap(),
        TorchMapped(),
        Safetensors(),
        SafetensorsMapped(),
        TensorStore(),
        TorchCheckpointing(),
    ]


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
