"""Saves to and loads from a server of S3's API on this machine, beside other libraries.

    .venv/bin/python -m pip install obstore s3torchconnector tenacity    # those that are missing are left out
    .venv/bin/python bench/object_store.py [--quick] [--rows large small ...] [--only NAME ...]

All contestants run in the same ranks, in a new order in each round. obstore puts and gets the same
bytes as one object per rank, 16 parts in progress: what server and client library allow. tensorstore
writes zarr, small tensors into its database (OCDBT). The others are writers and readers of
torch.distributed.checkpoint. CPU seconds are those of the ranks without the server's. The server
takes most of a small machine's cores, so compare ratios of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.append(str(Path(__file__).resolve().parent.parent / "python" / "tests"))
from object_server import BUCKET, KEY, SECRET, Server, environment_of, files_at  # noqa: E402

PART, IN_PROGRESS = 8 << 20, 16
SUBJECT = "tilestone"
Tensors = dict[str, torch.Tensor]


class State:
    """A rank's tensors: views of one piece of memory."""

    def __init__(self, kind: str, size: int) -> None:
        count = size // 4096 if kind == "small" else 4
        self.flat = torch.empty(size // 4)
        self.parts = self.flat.chunk(count)
        tensors = self.parts if kind == "small" else [sharded(each.view(-1, 1024), 0) for each in self.parts]
        self.tensors = {f"layer{i // 10}.p{i % 10}": part for i, part in enumerate(tensors)}

    def columns(self) -> Tensors:
        """The same memory for the columns of the tensors whose rows the rank has saved."""
        width = 1024 // dist.get_world_size()
        return {key: sharded(part.view(-1, width), 1) for key, part in zip(self.tensors, self.parts)}


def sharded(local: torch.Tensor, dim: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(dim)])


def region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where the rank's part of the tensor is."""
    where = [slice(None)] * tensor.dim()
    if isinstance(tensor, DTensor):
        dim = tensor.placements[0].dim
        size, rank = tensor.to_local().shape[dim], dist.get_rank()
        where[dim] = slice(rank * size, (rank + 1) * size)
    return tuple(where)


class Contestant:
    name = ""
    has_columns = True  # False: it has no format that knows them

    def save(self, state: State, path: str) -> None:
        raise NotImplementedError

    def load(self, state: State, tensors: Tensors, path: str) -> None:
        """`tensors`: all of the state's, or the first one, or its columns()."""
        raise NotImplementedError


class Tilestone(Contestant):
    name = SUBJECT

    def __init__(self) -> None:
        import tilestone

        self._tilestone = tilestone

    def save(self, state: State, path: str) -> None:
        self._tilestone.save(state.tensors, path)

    def load(self, state: State, tensors: Tensors, path: str) -> None:
        ignoring = self._tilestone.Differences(not_requested="ignore")
        self._tilestone.load(tensors, path, differences=ignoring)


class Obstore(Contestant):
    name = f"obstore, {IN_PROGRESS} in progress"
    has_columns = False

    def __init__(self) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL_S3"], access_key_id=KEY,
            secret_access_key=SECRET, region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(IN_PROGRESS)

    def save(self, state: State, path: str) -> None:
        import obstore

        obstore.put(
            self._store, f"{key_of(path)}/{dist.get_rank()}", bytes_of(state.flat),
            use_multipart=True, chunk_size=PART, max_concurrency=IN_PROGRESS,
        )  # fmt: skip

    def load(self, state: State, tensors: Tensors, path: str) -> None:
        import obstore

        memory, key = bytes_of(state.flat), f"{key_of(path)}/{dist.get_rank()}"
        if len(tensors) == 1:
            memory = memory[: 4 * state.parts[0].numel()]

        def get(begin: int) -> None:
            size = min(PART, len(memory) - begin)
            found = obstore.get_range(self._store, key, start=begin, length=size)
            memory[begin : begin + size] = memoryview(found).cast("B")

        list(self._threads.map(get, range(0, len(memory), PART)))


def key_of(path: str) -> str:
    return path.removeprefix(f"s3://{BUCKET}/")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


class TensorStore(Contestant):
    name = "tensorstore, s3"

    def __init__(self) -> None:
        import tensorstore

        self._store = tensorstore
        self._context = tensorstore.Context()  # without one, each array has a database of its own

    def _open(self, path: str, key: str, tensor: torch.Tensor, **options: Any) -> Any:
        base = {
            "driver": "s3", "bucket": BUCKET, "path": f"{key_of(path)}/", "aws_region": "us-east-1",
            "endpoint": os.environ["AWS_ENDPOINT_URL_S3"], "aws_credentials": {"type": "environment"},
        }  # fmt: skip
        if tensor.dim() == 1:
            place = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
        else:
            place = {**base, "path": f"{base['path']}{key}/"}
        spec = {"driver": "zarr", "kvstore": place}
        return self._store.open(spec, context=self._context, **options)

    def save(self, state: State, path: str) -> None:
        small = next(iter(state.tensors.values())).dim() == 1
        transaction = self._store.Transaction() if small else None
        opened = []
        for key, tensor in state.tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            row = 4 * local[0].numel()
            chunks = [math.gcd(len(local), PART // row), *local.shape[1:]]
            array = self._open(
                path, key, tensor, open=not small, create=True, dtype=self._store.float32,
                shape=list(tensor.shape), chunk_layout=self._store.ChunkLayout(chunk_shape=chunks),
                codec=self._store.CodecSpec({"driver": "zarr", "compressor": None}),
                transaction=transaction,
            )  # fmt: skip
            opened.append((array, region(tensor), local))
        writes = [array.result()[where].write(local.numpy()) for array, where, local in opened]
        if transaction is not None:  # its writes end with it
            return transaction.commit_sync()
        for write in writes:
            write.result()

    def load(self, state: State, tensors: Tensors, path: str) -> None:
        opened = [(self._open(path, key, tensor), tensor) for key, tensor in tensors.items()]
        reads = [(array.result()[region(tensor)].read(), tensor) for array, tensor in opened]
        for read, tensor in reads:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(torch.from_numpy(read.result()))


class ByTorch(Contestant):
    """A writer and a reader of torch.distributed.checkpoint."""

    def _writer(self, path: str) -> Any:
        raise NotImplementedError

    def _reader(self, path: str) -> Any:
        raise NotImplementedError

    def save(self, state: State, path: str) -> None:
        dcp.save(state.tensors, storage_writer=self._writer(path))

    def load(self, state: State, tensors: Tensors, path: str) -> None:
        dcp.load(tensors, storage_reader=self._reader(path))


class S3Fs(ByTorch):
    name = "FsspecWriter, s3fs"

    def __init__(self) -> None:
        import s3fs  # noqa: F401
        from torch.distributed.checkpoint import _fsspec_filesystem  # noqa: F401

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
        from s3torchconnector import S3ClientConfig, dcp  # noqa: F401
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
    for kind in (Tilestone, Obstore, S3TorchConnector, S3Fs, TensorStore):
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


@dataclasses.dataclass
class Case:
    what: str
    kind: str  # of State, or "delay"
    world: int
    bytes: int
    rounds: int
    only: list[str]
    end: float  # of time.time(): no round but the first begins later

    def goes_on(self, number: int) -> bool:
        """The same on every rank."""
        late = torch.tensor([float(number > 0 and time.time() > self.end)])
        dist.broadcast(late, 0)
        return number < self.rounds and not late


def phases_of(case: Case, each: Contestant, state: State, path: str) -> dict[str, Callable[[], None]]:
    """What is timed, in this order. The first one saves."""
    found = {"save": lambda: each.save(state, path)}
    if case.kind == "delay":
        return found
    found["load"] = lambda: each.load(state, state.tensors, path)
    if case.world == 1:
        first = dict([next(iter(state.tensors.items()))])
        found["one tensor"] = lambda: each.load(state, first, path)
    elif each.has_columns:
        columns = state.columns()
        found["columns"] = lambda: each.load(state, columns, path)
    return found


def expect_loaded(state: State, phase: str, number: int, name: str) -> None:
    """Of rank r all elements are r + number."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for i, part in enumerate(state.parts):
        if phase == "columns":
            right = (part.view(world, -1) == torch.arange(world).view(-1, 1) + number).all()
        else:
            right = (part == (rank + number if phase == "load" or i == 0 else -1)).all()
        assert bool(right), f"{name} has loaded other values ({phase})"


def rank_of(rank: int, case: Case, rendezvous: str, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=case.world
    )
    state, everybody = State(case.kind, case.bytes // case.world), contestants(case.only)
    order, times, number = random.Random(1), Times(), 0
    while case.goes_on(number):
        order.shuffle(everybody)
        for each in everybody:
            path = f"s3://{BUCKET}/{case.kind}{case.world}/{each.name.split(',')[0]}{number}"
            said = []
            for phase, work in phases_of(case, each, state, path).items():
                state.flat.fill_(rank + number if phase == "save" else -1)
                took = timed(work)
                if phase != "save":
                    expect_loaded(state, phase, number, each.name)
                times.setdefault((phase, each.name), []).append(took)
                said.append(f"{phase} {took[0]:.2f} s")
            if rank == 0:
                print(f"bench: {case.what}: {each.name}: {', '.join(said)}", flush=True)
                files_at(os.environ["AWS_ENDPOINT_URL_S3"]).rm(path, recursive=True)
            dist.barrier()
        number += 1
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def measured(case: Case) -> Times:
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    folder = tempfile.mkdtemp()
    ranks = [
        context.Process(target=rank_of, args=(rank, case, f"{folder}/store", out))
        for rank in range(case.world)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    shutil.rmtree(folder)
    if any(each.exitcode for each in ranks):
        raise SystemExit(f"bench: {case.what}: a rank has failed")
    times: Times = out.get()
    return times


def table(case: Case, times: Times) -> str:
    phases = list(dict.fromkeys(phase for phase, _ in times))
    middle = {
        place: [statistics.median(each[i] for each in found) for i in (0, 1)]
        for place, found in times.items()
    }
    cells = [f"{phase}, s | × {SUBJECT}'s | CPU, s" for phase in phases]
    lines = [f"## {case.what}", "", f"| | {' | '.join(cells)} |", "|---" * (1 + 3 * len(phases)) + "|"]
    for name in sorted({name for _, name in times}, key=lambda name: middle["save", name][0]):
        row = [name]
        for phase in phases:
            if (phase, name) not in middle:
                row += [""] * 3
                continue
            seconds, cpu = middle[phase, name]
            own = middle.get((phase, SUBJECT), [seconds])[0]
            row += [f"{seconds:.2f}", f"{seconds / own:.2f}", f"{cpu:.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    rounds = max(len(each) for each in times.values())
    return "\n".join([*lines, "", f"{case.bytes / 2**20:.0f} MiB in all; medians of {rounds}.", ""])


async def answer_later(reader: Any, writer: Any, port: int, seconds: float) -> None:
    """One connection of the proxy."""
    from_server, to_server = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)

    async def back() -> None:
        while block := await from_server.read(1 << 18):
            writer.write(block)
            await writer.drain()

    answers = asyncio.create_task(back())
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(seconds)
            to_server.write(head)
            found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            left = int(found[1]) if found else 0
            while left > 0:
                block = await reader.read(min(left, 1 << 18))
                to_server.write(block)
                await to_server.drain()
                left -= len(block) or left
    except (asyncio.IncompleteReadError, ConnectionError):
        answers.cancel()
        to_server.close()
        writer.close()


def serve_later(port: int, seconds: float, out: Any) -> None:
    """A proxy that lets each request wait."""

    async def serve() -> None:
        server = await asyncio.start_server(
            lambda reader, writer: answer_later(reader, writer, port, seconds),
            "127.0.0.1", 0, limit=1 << 20,
        )  # fmt: skip
        out.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """The URL of a proxy of this server."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    proxy = context.Process(target=serve_later, args=(int(url.rpartition(":")[2]), seconds, out))
    proxy.start()
    try:
        yield f"http://127.0.0.1:{out.get()}"
    finally:
        proxy.kill()
        proxy.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = ("large", "ranks", "small", "delay")
    parser.add_argument("--rows", nargs="*", choices=rows, default=rows)
    parser.add_argument("--scale", type=float, default=1.0, help="1: 2 GiB, and 20,000 × 4 KiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1 round at a scale of 0.02")
    parser.add_argument("--seconds", type=float, default=780, help="no further round after these")
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.rounds = 0.02, 1
    large = max(1, int(128 * options.scale)) << 24
    small = max(10, int(20_000 * options.scale)) << 12
    os.environ.update(USE_LIBUV="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    cases = {
        "large": [("large tensors, 1 rank", "large", 1, large, None)],
        "ranks": [("large tensors, 4 ranks", "large", 4, large, None)],
        "small": [("tensors of 4 KiB, 1 rank", "small", 1, small, None)],
        "delay": [(f"{ms} ms more for each request, 1 rank", "delay", 1, large // 2, ms) for ms in (0, 50)],
    }  # fmt: skip
    chosen = [case for row in options.rows for case in cases[row]]
    began, found = time.time(), []
    for done, (what, kind, world, size, ms) in enumerate(chosen, 1):
        only = options.only or ([SUBJECT, Obstore.name] if kind == "delay" else [])
        end = began + options.seconds * done / len(chosen)
        case = Case(what, kind, world, size, options.rounds, only, end)
        with Server() as server, contextlib.ExitStack() as stack:
            os.environ.update(server.environment)
            if ms is not None:
                os.environ.update(environment_of(stack.enter_context(delayed(server.url, ms / 1000))))
            found.append(table(case, measured(case)))
    print("\n".join(found))
    print(f"bench: {time.time() - began:.0f} seconds in all")


if __name__ == "__main__":
    main()
