"""Saves to and loads from a server of S3's API on this machine, beside other libraries.

    .venv/bin/python -m pip install obstore s3torchconnector tenacity    # those that are missing are left out
    .venv/bin/python bench/object_store.py [--scale 1] [--rounds 3]

All contestants run in the same ranks, in a new order in each round. obstore puts and gets the same
bytes as one object per rank, 16 parts in progress: what server and client library allow. The others
are writers and readers of torch.distributed.checkpoint. CPU seconds are those of the ranks without
the server's. The server takes most of a small machine's cores, so compare ratios of one run only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.append(str(Path(__file__).resolve().parent.parent / "python" / "tests"))
from object_server import BUCKET, KEY, SECRET, Server, files_at  # noqa: E402

PART, IN_PROGRESS = 8 << 20, 16
SUBJECT = "tilestone"


class State:
    """A rank's tensors: views of one piece of memory."""

    def __init__(self, kind: str, size: int) -> None:
        count = 4 if kind == "large" else size // 4096
        self.flat = torch.empty(size // 4)
        parts = self.flat.chunk(count)
        if kind == "large":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parts = [DTensor.from_local(part.view(-1, 1024), mesh, [Shard(0)]) for part in parts]
        self.tensors = {f"layer{i // 10}.p{i % 10}": part for i, part in enumerate(parts)}


class Tilestone:
    name = SUBJECT

    def save(self, state: State, path: str) -> None:
        import tilestone

        tilestone.save(state.tensors, path)

    def load(self, state: State, path: str) -> None:
        import tilestone

        tilestone.load(state.tensors, path)


class Obstore:
    name = f"obstore, {IN_PROGRESS} in progress"

    def __init__(self) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL_S3"], access_key_id=KEY,
            secret_access_key=SECRET, region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(IN_PROGRESS)

    def _key(self, path: str) -> str:
        return f"{path.removeprefix(f's3://{BUCKET}/')}/{dist.get_rank()}"

    def save(self, state: State, path: str) -> None:
        import obstore

        obstore.put(
            self._store, self._key(path), memoryview(state.flat.numpy()).cast("B"),
            use_multipart=True, chunk_size=PART, max_concurrency=IN_PROGRESS,
        )  # fmt: skip

    def load(self, state: State, path: str) -> None:
        import obstore

        memory, key = memoryview(state.flat.numpy()).cast("B"), self._key(path)

        def get(begin: int) -> None:
            size = min(PART, len(memory) - begin)
            found = obstore.get_range(self._store, key, start=begin, length=size)
            memory[begin : begin + size] = memoryview(found).cast("B")

        list(self._threads.map(get, range(0, len(memory), PART)))


class ByTorch:
    """A writer and a reader of torch.distributed.checkpoint."""

    def _writer(self, path: str) -> Any:
        raise NotImplementedError

    def _reader(self, path: str) -> Any:
        raise NotImplementedError

    def save(self, state: State, path: str) -> None:
        dcp.save(state.tensors, storage_writer=self._writer(path))

    def load(self, state: State, path: str) -> None:
        dcp.load(state.tensors, storage_reader=self._reader(path))


class S3Fs(ByTorch):
    name = "FsspecWriter, s3fs"

    def __init__(self) -> None:
        import s3fs  # noqa: F401

        url = os.environ["AWS_ENDPOINT_URL_S3"]
        self._options = {"key": KEY, "secret": SECRET, "endpoint_url": url}

    def _writer(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(path, sync_files=False, **self._options)

    def _reader(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(path, **self._options)


class S3TorchConnector(ByTorch):
    name = "s3torchconnector"

    def __init__(self) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        self._config = S3ClientConfig(force_path_style=True)
        self._client = S3Client(
            region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL_S3"],
            s3client_config=self._config,
        )  # fmt: skip

    def _at_the_server(self, made: Any) -> Any:
        made.fs._client = self._client
        return made

    def _writer(self, path: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        return self._at_the_server(S3StorageWriter("us-east-1", path, self._config))

    def _reader(self, path: str) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        return self._at_the_server(S3StorageReader("us-east-1", path, self._config))


def contestants(names: list[str]) -> list[Any]:
    found = []
    for kind in (Tilestone, Obstore, S3TorchConnector, S3Fs):
        if names and kind.name not in names:
            continue
        try:
            found.append(kind())
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"bench: {kind.name} is left out: {error}", flush=True)
    return found


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds until the last rank has done it, and the CPU seconds of all ranks."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    work()
    cpu = torch.tensor([time.process_time() - used])
    dist.barrier()
    seconds = time.perf_counter() - begin
    dist.all_reduce(cpu)
    return seconds, float(cpu)


Times = dict[tuple[str, str], list[tuple[float, float]]]


def rank_of(
    rank: int, world: int, kind: str, size: int, rounds: int, names: list[str],
    rendezvous: str, out: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    state, everybody, order = State(kind, size // world), contestants(names), random.Random(1)
    times: Times = {}
    for number in range(rounds):
        order.shuffle(everybody)
        for each in everybody:
            path = f"s3://{BUCKET}/{kind}{world}/{each.name.split(',')[0]}{number}"
            state.flat.fill_(rank + number)
            saved = timed(lambda: each.save(state, path))  # noqa: B023
            state.flat.zero_()
            loaded = timed(lambda: each.load(state, path))  # noqa: B023
            assert bool((state.flat == rank + number).all()), f"{each.name} has loaded other values"
            for phase, took in (("save", saved), ("load", loaded)):
                times.setdefault((phase, each.name), []).append(took)
            if rank == 0:
                print(f"bench: {kind}, {world} ranks: {each.name}: save {saved[0]:.2f} s, "
                      f"load {loaded[0]:.2f} s", flush=True)
                files_at(os.environ["AWS_ENDPOINT_URL_S3"]).rm(path, recursive=True)
            dist.barrier()
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def measured(world: int, kind: str, size: int, options: Any) -> Times:
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    folder = tempfile.mkdtemp()
    ranks = [
        context.Process(
            target=rank_of,
            args=(rank, world, kind, size, options.rounds, options.only, f"{folder}/store", out),
        )
        for rank in range(world)
    ]  # fmt: skip
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    shutil.rmtree(folder)
    if any(each.exitcode for each in ranks):
        raise SystemExit(f"bench: {kind}, {world} ranks: a rank has failed")
    times: Times = out.get()
    return times


def table(what: str, size: int, times: Times) -> str:
    lines = [f"## {what}", "", "| | save, s | × tilestone's | CPU, s | load, s | × tilestone's | CPU, s |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    middle = {
        place: [statistics.median(each[i] for each in found) for i in (0, 1)]
        for place, found in times.items()
    }
    for name in sorted({name for _, name in times}, key=lambda name: middle["save", name][0]):
        row = [name]
        for phase in ("save", "load"):
            seconds, cpu = middle[phase, name]
            own = middle.get((phase, SUBJECT), [seconds])[0]
            row += [f"{seconds:.2f}", f"{seconds / own:.2f}", f"{cpu:.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", f"{size / 2**20:.0f} MiB in all.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="1: 1 GiB, and 20,000 × 4 KiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants")
    options = parser.parse_args()
    large = max(1, int(256 * options.scale)) << 22
    small = max(10, int(20_000 * options.scale)) << 12
    os.environ.update(USE_LIBUV="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    cases = [("large tensors, 1 rank", 1, "large", large), ("large tensors, 4 ranks", 4, "large", large),
             ("tensors of 4 KiB, 1 rank", 1, "small", small)]  # fmt: skip
    found = []
    for what, world, kind, size in cases:
        with Server() as server:
            os.environ.update(server.environment)
            found.append(table(what, size, measured(world, kind, size, options)))
    print("\n".join(found))


if __name__ == "__main__":
    main()
