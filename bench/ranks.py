"""Cases with several torch ranks. Each case has one world; calls are timed between barriers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contestants import Contestant, Dcp, DropIn, PlugIn, Safetensors, Tensors, Tilestone
from contestants import TorchCheckpointing
from contestants import TilestoneLoad, TorchSave
from limits import DirectWrite, Read, drop_caches, warm_caches
from measure import CONTROL, Case, Plan, Rounds, Table, folder

Job = Callable[[Case, Plan], None]

# Seconds that ranks wait for others, if a contestant fails on some ranks only.
TIMEOUT = 180


def _contestants() -> list[Contestant]:
    return [Tilestone(), Tilestone(CONTROL), DropIn(), PlugIn(), Dcp(1), Dcp(2), TorchSave(),
            Safetensors(), TorchCheckpointing()]


class World:
    """This rank and its communication with the others.

    The harness has a process group of its own, so that unfinished operations of a failed contestant
    in the default group don't affect it.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * TIMEOUT))

    def barrier(self) -> None:
        dist.barrier(self._group)

    def sum(self, value: int) -> int:
        total = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return int(total.item())

    def decided(self, by_rank_0: Callable[[], bool]) -> bool:
        return self.sum(int(self.rank == 0 and by_rank_0())) > 0

    def timed(self, work: Callable[[], float | None]) -> float:
        """Seconds from the first rank's start to the last rank's end.

        If a rank fails, all ranks raise RuntimeError with the error of the lowest failed rank.
        """
        error = ""
        self.barrier()
        begin = time.perf_counter()
        try:
            work()
        except Exception as failure:  # reported to all ranks below
            error = f"rank {self.rank}: {type(failure).__name__}: {failure}"
        self.barrier()
        seconds = time.perf_counter() - begin
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self._group)
        for found in errors:
            if found:
                raise RuntimeError(found)
        return seconds

    def clear(self, path: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.barrier()

    def cold(self) -> None:
        self.barrier()
        if self.rank == 0:
            drop_caches()
        self.barrier()


def disk_bytes() -> int:
    """Bytes that this process has read from the disk so far."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no read_bytes")


class Opens:
    """Counts by strace which files under `path` this process opens, and how often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace")

    def __enter__(self) -> Opens:
        self._strace = subprocess.Popen(
            ["strace", "-f", "-y", "-e", "trace=open,openat,openat2", "-o", self._log.name,
             "-p", str(os.getpid())], stderr=subprocess.DEVNULL)
        while "TracerPid:\t0\n" in Path("/proc/self/status").read_text(encoding="ascii"):
            if self._strace.poll() is not None:
                raise RuntimeError("strace could not attach to this process")
            time.sleep(0.01)
        time.sleep(0.2)  # until strace has attached to the other threads too
        return self

    def __exit__(self, *_: object) -> None:
        self._strace.send_signal(signal.SIGINT)
        self._strace.wait()
        # Each line ends with a file descriptor and the path of its file or directory.
        opened = re.compile(r"= \d+<" + re.escape(str(self._path)) + r"/([^>]*)>\s*$")
        found = (opened.search(line) for line in self._log)
        self.names = Counter(match.group(1) for match in found if match)
        self._log.close()


def measure(case: Case, plan: Plan, who: list[Contestant], saved: Tensors, wanted: Tensors,
             count_reads: bool = False) -> None:
    order = random.Random(plan.seed)
    world = World()
    limit = DirectWrite(case.bytes)
    rounds = Rounds(case, plan)
    while world.decided(rounds.another):
        entries: list[Contestant | DirectWrite] = [*who, limit]
        order.shuffle(entries)
        for entry in entries:
            path = plan.root / folder(entry.name)
            world.clear(path)
            world.cold()
            if isinstance(entry, DirectWrite):
                _limits(case, world, entry, path)
            elif not case.failed(entry.name):
                time_one(case, world, entry, saved, wanted, path)
            world.clear(path)
    if count_reads:
        _count_reads(case, plan, world, who, saved, wanted)


def _limits(case: Case, world: World, limit: DirectWrite, path: Path) -> None:
    """Measures the limits on rank 0 only, with enough concurrent requests to saturate a disk."""
    alone = world.rank == 0
    case.add("save", limit.name, world.timed(lambda: limit.run(path) if alone else None))
    for read in (Read(8, True), Read(4, False)):
        world.cold()
        work = (lambda r=read: r.run(path)) if alone else (lambda: None)
        case.add("cold load", read.name, world.timed(work))


def time_one(case: Case, world: World, entry: Contestant, saved: Tensors, wanted: Tensors,
         path: Path) -> None:
    phase = "save"
    try:
        case.add(phase, entry.name, world.timed(lambda: entry.save(saved, path)))
        phase = "load"
        world.cold()
        case.add("cold load", entry.name, world.timed(lambda: entry.load(wanted, path)))
        if world.rank == 0:
            warm_caches(path)
        case.add("warm load", entry.name, world.timed(lambda: entry.load(wanted, path)))
    except RuntimeError as error:  # of all ranks at once: see World.timed
        case.drop(entry.name)
        case.fail(phase, entry.name, error)


def _count_reads(case: Case, plan: Plan, world: World, who: list[Contestant], saved: Tensors,
                 wanted: Tensors) -> None:
    """Counts the bytes read from disk and the files opened by a cold load, over all ranks."""
    table = Table("reads of one cold load, all ranks together",
                  "Opened files are counted by strace, in a separate load.",
                  ["who", "bytes from the disk ÷ bytes wanted", "files opened"])
    for entry in who:
        if case.failed(entry.name) or entry.name == CONTROL:
            continue
        path = plan.root / folder(entry.name)
        world.clear(path)
        world.timed(lambda e=entry, p=path: e.save(saved, p))
        world.cold()
        before = disk_bytes()
        world.timed(lambda e=entry, p=path: e.load(wanted, p))
        ratio = world.sum(disk_bytes() - before) / case.bytes
        with Opens(path.resolve()) as opens:
            world.timed(lambda e=entry, p=path: e.load(wanted, p))
        opened = world.sum(opens.names.total())
        table.rows.append([entry.name, f"{ratio:.3f}", str(opened)])
        case.figures[f"bytes read ÷ wanted, {entry.name}"] = ratio
        world.clear(path)
    case.tables.append(table)


def _entry(rank: int, world: int, rendezvous: str, job: Job, case: Case, plan: Plan,
           results) -> None:
    torch.set_num_threads(1)
    if rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank,
                            world_size=world, timeout=timedelta(seconds=TIMEOUT))
    job(case, plan)
    if rank == 0:
        results.put(case)
    dist.destroy_process_group()


def run(job: Job, world: int, case: Case, plan: Plan, limit: float | None = None,
        imports: Sequence[str] = ()) -> Case:
    """Runs the job on `world` ranks. Returns the case as rank 0's job leaves it.

    After `limit` seconds all ranks are killed and TimeoutError is raised. With `imports`, the ranks
    are forked from a small process that has imported these modules, so they start at once.
    """
    os.environ.setdefault("USE_LIBUV", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    method = "forkserver" if imports else "spawn"
    context = mp.get_context(method)
    if imports:
        context.set_forkserver_preload(list(imports))
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as rendezvous:
        started = mp.start_processes(
            _entry, (world, f"{rendezvous}/store", job, case, plan, results), nprocs=world,
            join=False, start_method=method)
        _join(started, limit)
    return results.get()


def _join(started: mp.ProcessContext, limit: float | None) -> None:
    """Waits for all ranks. If one fails, the others are ended and its error is raised."""
    end = None if limit is None else time.monotonic() + limit
    while not started.join(None if end is None else max(0.0, end - time.monotonic())):
        if end is not None and time.monotonic() >= end:
            for process in started.processes:
                process.kill()
                process.join()
            raise TimeoutError(f"not finished after {limit:.0f} s")


def _sharded(mesh, dim: int, rows: int, columns: int, count: int) -> Tensors:
    from torch.distributed.tensor import DTensor, Shard

    world = mesh.size()
    shape = [rows, columns]
    shape[dim] //= world
    return {
        f"w{i}": DTensor.from_local(torch.randn(shape), mesh, [Shard(dim)], run_check=False)
        for i in range(count)
    }


def same_layout_states(scale: float) -> tuple[Tensors, Tensors]:
    """This rank's part of what is saved, and of what is loaded into."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(4, int(4096 * scale) // 4 * 4)
    return _sharded(mesh, 0, rows, 4096 * 8, 4), _sharded(mesh, 0, rows, 4096 * 8, 4)


def _global_bytes(state: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def _same_layout_job(case: Case, plan: Plan) -> None:
    saved, wanted = same_layout_states(plan.scale)
    case.bytes = _global_bytes(saved)
    measure(case, plan, _contestants(), saved, wanted)


def same_layout(case: Case, plan: Plan) -> Case:
    return run(_same_layout_job, 4, case, plan)


def reshard_states(scale: float) -> tuple[Tensors, Tensors]:
    """As same_layout_states: saved by rows, loaded by columns."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(64, int(8192 * scale) // 64 * 64)
    return _sharded(mesh, 0, rows, 8192, 4), _sharded(mesh, 1, rows, 8192, 4)


def _reshard_job(case: Case, plan: Plan) -> None:
    saved, wanted = reshard_states(plan.scale)
    case.bytes = _global_bytes(saved)
    import tilestone

    ways = [TilestoneLoad(f"two_phase={way}", reading=tilestone.Reading(two_phase=way))
            for way in ("never", "always")]
    who = [Tilestone(), Tilestone(CONTROL), *ways, Dcp(1)]  # the others can't reshard on a CPU
    measure(case, plan, who, saved, wanted, count_reads=True)


def reshard(case: Case, plan: Plan, world: int) -> Case:
    return run(_reshard_job, world, case, plan)


def gpt_shapes(layers: int, width: int, vocabulary: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Parameter -> (shape, tensor-parallel dim or -1)."""
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"embedding": ((vocabulary, width), 0)}
    for layer in range(layers):
        at = f"layers.{layer}"
        shapes[f"{at}.qkv.weight"] = ((3 * width, width), 0)
        shapes[f"{at}.proj.weight"] = ((width, width), 1)
        shapes[f"{at}.fc1.weight"] = ((4 * width, width), 0)
        shapes[f"{at}.fc2.weight"] = ((width, 4 * width), 1)
        shapes[f"{at}.norm1.weight"] = ((width,), -1)
        shapes[f"{at}.norm2.weight"] = ((width,), -1)
    return shapes


def _gpt_state(mesh, scale: float) -> Tensors:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    width = max(64, int(1024 * scale**0.5) // 64 * 64)
    state: Tensors = {}
    for name, (shape, tp_dim) in gpt_shapes(10, width, 4 * width).items():
        local = list(shape)
        local[0] //= mesh.size(0)
        placements = [Shard(0), Replicate()]
        if tp_dim == 0:
            placements = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
        elif tp_dim == 1:
            placements = [Shard(0), Shard(1)]
        if tp_dim >= 0:
            local[tp_dim] //= mesh.size(1)
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            state[f"{kind}.{name}"] = DTensor.from_local(
                torch.randn(local), mesh, placements, run_check=False, shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride())
    return state


def gpt_states(scale: float) -> tuple[Tensors, Tensors]:
    """As same_layout_states: a GPT's parameters and AdamW state."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _gpt_state(mesh, scale), _gpt_state(mesh, scale)


def _gpt_job(case: Case, plan: Plan) -> None:
    saved, wanted = gpt_states(plan.scale)
    case.bytes = _global_bytes(saved)
    measure(case, plan, _contestants(), saved, wanted)


def gpt(case: Case, plan: Plan) -> Case:
    return run(_gpt_job, 4, case, plan)
