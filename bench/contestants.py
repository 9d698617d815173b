"""The contestants: each saves a flat dict of tensors to a directory and loads it back.

A save ends when every byte is durable. For contestants that do not sync on their own, the timed
part includes an fsync of each file and of the directory. A load ends when the given tensors hold
the values, as a trainer needs them. Contestants that can only create new tensors have these copied.
"(mapped)" means that the same library maps the file, every page is touched, and nothing is copied:
the cost for a reader that never writes to its weights.
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
    """One way to save and load. Both calls return None, or the seconds that they measured."""

    name: str
    saved_by: str | None = None  # the contestant whose files are loaded; None: its own
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
    """fsync one file and its directory; other ranks may be using that directory."""
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
    """Tilestone's load with an option. On one rank, it loads the files saved by plain Tilestone."""

    def __init__(self, way: str, **options: object) -> None:
        super().__init__(f"tilestone, {way}")
        self.saved_by = "tilestone"
        self._load_options = options

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        tilestone.load(tensors, str(path), **self._load_options)


class TilestoneMapped(Tilestone):
    """Files saved by plain Tilestone, as mapped tensors."""

    def __init__(self) -> None:
        super().__init__("tilestone (mapped)")
        self.saved_by = "tilestone"

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone

        checkpoint = tilestone.open(str(path), mapped=True, framework="torch")
        _touch(checkpoint.read_many(checkpoint.tensor_keys()))


def cache_policies() -> list[Contestant]:
    import tilestone

    return [
        TilestoneLoad(f"cache={cache}", reading=tilestone.Reading(cache=cache))
        for cache in ("bypass", "keep")
    ]


class Cpp(Contestant):
    """The C++ interface, in a process of its own with the same tensors. It times only the call.

    It gets the tensors from a checkpoint that Tilestone saves once.
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
            raise RuntimeError(f"save_load: {answer or 'the process ended'}")
        return float(answer)

    def save(self, tensors: Tensors, path: Path) -> float:
        return self._ask(f"save {path}")

    def load(self, tensors: Tensors, path: Path) -> float:
        return self._ask(f"load {path}")

    def different(self) -> int:
        """The number of tensors that differ from the saved ones after the last load."""
        return int(self._ask("same"))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class CppNoChecksum(Cpp):
    """The same with a CRC-32 that does nothing, to measure the cost of checksums in a save.

    Its checkpoints have wrong checksums, so it does not load.
    """

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
            sync_tree(path)  # DCP syncs its data files, but not the metadata and the directory

    def load(self, tensors: Tensors, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(tensors, storage_reader=dcp.FileSystemReader(str(path)), no_dist=_alone())


class DropIn(Contestant):
    """tilestone.dcp in the place of torch.distributed.checkpoint."""

    name = "tilestone.dcp"

    def save(self, tensors: Tensors, path: Path) -> None:
        import tilestone.dcp as dcp

        dcp.save(tensors, checkpoint_id=str(path), no_dist=_alone())

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone.dcp as dcp

        dcp.load(tensors, checkpoint_id=str(path), no_dist=_alone())


class PlugIn(Contestant):
    """torch plans; Tilestone's writer and reader move the bytes. A save is durable."""

    name = "dcp, Tilestone's writer"

    def save(self, tensors: Tensors, path: Path) -> None:
        import tilestone.dcp
        import torch.distributed.checkpoint as dcp

        writer = tilestone.dcp.FileSystemWriter(str(path))
        dcp.save(tensors, storage_writer=writer, no_dist=_alone())

    def load(self, tensors: Tensors, path: Path) -> None:
        import tilestone.dcp
        import torch.distributed.checkpoint as dcp

        reader = tilestone.dcp.FileSystemReader(str(path))
        dcp.load(tensors, storage_reader=reader, no_dist=_alone())


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
        # Its direct I/O fails with EINVAL on ext4 (the last block of a file is not aligned).
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
    """zarr2, one array per tensor, uncompressed, all arrays concurrently."""

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
    """One instance of each contestant that needs only tensors and a path."""
    return [
        Tilestone(),
        TilestoneMapped(),
        DropIn(),
        PlugIn(),
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
    """This rank's local tensors, for contestants that don't support DTensor."""
    return {
        key: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for key, tensor in tensors.items()
    }
