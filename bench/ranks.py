"""Cases of several torch ranks: one world a case, all contestants in it, timed between barriers."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contestants import Contestant, Dcp, Safetensors, Tensors, Tilestone, TorchCheckpointing
from contestants import TorchSave
from limits import DirectWrite, Read, drop_caches, warm_caches
from measure import CONTROL, Case

Job = Callable[[Case, Path, int, int, float], None]


def _contestants() -> list[Contestant]:
    return [Tilestone(), Tilestone(CONTROL), Dcp(1), Dcp(2), TorchSave(), Safetensors(),
            TorchCheckpointing()]


def _timed(work: Callable[[], None]) -> float:
    """Seconds from the first rank's start to the last rank's end."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def _clear(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _cold() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        drop_caches()
    dist.barrier()


def _disk_bytes() -> int:
    """Bytes that this process has had fetched from the disk so far."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no read_bytes")


def _sum(value: int) -> int:
    total = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item())


def _measure(case: Case, who: list[Contestant], saved: Tensors, wanted: Tensors, root: Path,
             rounds: int, seed: int) -> None:
    order = random.Random(seed)
    rank = dist.get_rank()
    limit = DirectWrite(case.bytes)
    for _ in range(rounds):
        entries: list[Contestant | DirectWrite] = [*who, limit]
        order.shuffle(entries)
        for entry in entries:
            path = root / "".join(c if c.isalnum() else "-" for c in entry.name)
            _clear(path)
            _cold()
            if isinstance(entry, DirectWrite):
                work = (lambda: limit.run(path)) if rank == 0 else (lambda: None)
                case.add("save", limit.name, _timed(work))
                for read in (Read(8, True), Read(4, False)):
                    _cold()
                    work = (lambda r=read: r.run(path)) if rank == 0 else (lambda: None)
                    case.add("cold load", read.name, _timed(work))
            else:
                _one(case, entry, saved, wanted, path)
            _clear(path)


def _one(case: Case, entry: Contestant, saved: Tensors, wanted: Tensors, path: Path) -> None:
    case.add("save", entry.name, _timed(lambda: entry.save(saved, path)))
    _cold()
    before = _disk_bytes()
    case.add("cold load", entry.name, _timed(lambda: entry.load(wanted, path)))
    read = _sum(_disk_bytes() - before)
    case.facts[f"cold load, bytes from the disk ÷ bytes wanted, {entry.name}"] = round(read / case.bytes, 3)
    if dist.get_rank() == 0:
        warm_caches(path)
    case.add("warm load", entry.name, _timed(lambda: entry.load(wanted, path)))


def _entry(rank: int, world: int, rendezvous: str, job: Job, case: Case, root: Path, rounds: int,
           seed: int, scale: float, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank,
                            world_size=world)
    try:
        job(case, root, rounds, seed, scale)
        if rank == 0:
            results.put(case)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _run(job: Job, world: int, case: Case, root: Path, rounds: int, seed: int,
         scale: float) -> Case:
    os.environ.setdefault("USE_LIBUV", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", job, case, root, rounds, seed, scale, results)
        mp.spawn(_entry, arguments, nprocs=world, join=True)
    return results.get()


def _sharded(mesh, dim: int, rows: int, columns: int, count: int) -> Tensors:
    from torch.distributed.tensor import DTensor, Shard

    world = mesh.size()
    shape = [rows, columns]
    shape[dim] //= world
    return {
        f"w{i}": DTensor.from_local(torch.randn(shape), mesh, [Shard(dim)], run_check=False)
        for i in range(count)
    }


def _same_layout_job(case: Case, root: Path, rounds: int, seed: int, scale: float) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(4, int(4096 * scale) // 4 * 4)
    saved = _sharded(mesh, 0, rows, 4096 * 8, 4)
    wanted = _sharded(mesh, 0, rows, 4096 * 8, 4)
    case.bytes = 4 * rows * 4096 * 8 * 4
    _measure(case, _contestants(), saved, wanted, root, rounds, seed)


def same_layout(name: str, what: str, root: Path, rounds: int, seed: int, scale: float) -> Case:
    return _run(_same_layout_job, 4, Case(name, what, 0), root, rounds, seed, scale)


def _reshard_job(case: Case, root: Path, rounds: int, seed: int, scale: float) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(64, int(8192 * scale) // 64 * 64)
    saved = _sharded(mesh, 0, rows, 8192, 4)
    wanted = _sharded(mesh, 1, rows, 8192, 4)
    case.bytes = 4 * rows * 8192 * 4
    who = [Tilestone(), Tilestone(CONTROL), Dcp(1)]  # the others don't reshard on a CPU
    _measure(case, who, saved, wanted, root, rounds, seed)


def reshard(name: str, what: str, world: int, root: Path, rounds: int, seed: int,
            scale: float) -> Case:
    return _run(_reshard_job, world, Case(name, what, 0), root, rounds, seed, scale)


def _gpt_shapes(layers: int, width: int, vocabulary: int) -> dict[str, tuple[tuple[int, ...], int]]:
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
    for name, (shape, tp_dim) in _gpt_shapes(10, width, 4 * width).items():
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


def _gpt_job(case: Case, root: Path, rounds: int, seed: int, scale: float) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    saved, wanted = _gpt_state(mesh, scale), _gpt_state(mesh, scale)
    case.bytes = sum(t.numel() * t.element_size() for t in saved.values())
    _measure(case, _contestants(), saved, wanted, root, rounds, seed)


def gpt(name: str, what: str, root: Path, rounds: int, seed: int, scale: float) -> Case:
    return _run(_gpt_job, 4, Case(name, what, 0), root, rounds, seed, scale)
