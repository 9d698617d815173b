"""A restart in the same layout: the files that each rank opens, and the bytes that it reads.

Nothing is timed. Each save and each load is a job of its own, like a real restart.
"""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ranks
from contestants import Dcp, Tilestone
from measure import Case, Plan, Table, folder
from megatron_core import Native, Part, Stock, without_cuda

WORLD = 8  # ranks of one tensor-parallel group
PART = 0.25  # share of the GPT of 1.5 GB
IMPORTS = ("torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "tilestone.megatron",
           "megatron.core.dist_checkpointing.strategies.fully_parallel")
LIMIT = 120  # seconds per job, because ranks may wait for one another forever
KINDS = ("model", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq")
NOTE = f"""\
{WORLD} tensor-parallel ranks. Norms and the position embedding are replicated on all of them, \
everything else is sharded, and each rank loads the shards that it saved. Opened files are counted \
by strace in a separate load, each file once per rank. Data files are files that hold tensors. \
Bytes are those that a cold load reads from the disk, including pages of the process's own \
libraries. The ranks share a machine, so data that one rank has read is in the page cache for the \
others."""


def _shapes(scale: float) -> dict[str, tuple[tuple[int, ...], int]]:
    """Parameter -> (shape, tensor-parallel axis or -1)."""
    width = max(64, int(1024 * (scale * PART) ** 0.5) // 64 * 64)
    shapes = ranks.gpt_shapes(10, width, 4 * width)
    shapes["position_embedding"] = ((2 * width, width), -1)
    return shapes


def _local(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """A rank's part. Replicas are equal, because a copy of a replica that differs is refused."""
    if axis < 0:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    local = list(shape)
    local[axis] //= WORLD
    return torch.randn(local)


class _DTensors:
    """The state as plain DTensors on a mesh of all ranks."""

    def __init__(self, entry: Any) -> None:
        self.entry, self.name = entry, entry.name

    def state(self, scale: float) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        return {
            f"{kind}.{name}": DTensor.from_local(
                _local(shape, axis), mesh, [Shard(axis) if axis >= 0 else Replicate()],
                run_check=False)
            for name, (shape, axis) in _shapes(scale).items() for kind in KINDS
        }


class _Entities:
    """The state as Megatron-Core's entities."""

    def __init__(self, entry: Any) -> None:
        self.entry, self.name = entry, entry.name

    def state(self, scale: float) -> Any:
        without_cuda()
        warnings.simplefilter("ignore")  # stock uses deprecated functions of torch
        self.entry.wrapped()  # imports take seconds
        rank = dist.get_rank()
        return {
            f"{kind}.{name}": Part(_local(shape, axis), axis, rank,
                                   (0, 0 if axis >= 0 else rank, 0), WORLD)
            for name, (shape, axis) in _shapes(scale).items() for kind in KINDS
        }


def contestants() -> list[Any]:
    import tilestone

    copies = Tilestone("tilestone, replicate=local", copies=tilestone.LocalCopies(range(WORLD)))
    return [_DTensors(Tilestone()), _DTensors(copies), _DTensors(Dcp(1)),
            _Entities(Native("tilestone.megatron, fully parallel", True)),
            _Entities(Stock("stock Megatron-Core, fully parallel", True))]


def _save(who: Any, case: Case, plan: Plan) -> None:
    state, world, path = who.state(plan.scale), ranks.World(), plan.root / folder(who.name)
    world.timed(lambda: who.entry.save(state, path))


def _load(who: Any, case: Case, plan: Plan) -> None:
    wanted, world, path = who.state(plan.scale), ranks.World(), plan.root / folder(who.name)
    world.cold()
    before = ranks.disk_bytes()
    world.timed(lambda: who.entry.load(wanted, path))
    read = ranks.disk_bytes() - before
    with ranks.Opens(path.resolve()) as opens:
        world.timed(lambda: who.entry.load(wanted, path))
    data = {name for name in opens.names if Path(name).suffix in (".distcp", ".tile")}
    mine = [read, len(data), sum(opens.names.values()) - sum(opens.names[name] for name in data)]
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, mine)
    reads, files, others = zip(*found, strict=True)
    case.figures = {"least": min(reads), "most": max(reads), "all": sum(reads),
                    "fewest files": min(files), "most files": max(files), "others": sum(others)}


def _row(case: Case, plan: Plan, who: Any) -> list[str]:
    try:
        for job in (_save, _load):
            found = ranks.run(partial(job, who), WORLD, Case(case.name, case.what), plan, LIMIT,
                              IMPORTS)
    except Exception as error:  # of any rank; the other contestants still run
        lines = str(error).strip().splitlines() or [type(error).__name__]
        case.fail("restart", who.name, lines[-1])
        return [who.name, *["failed"] * 6]
    path, figures = plan.root / folder(who.name), Counter(found.figures)
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    shutil.rmtree(path)
    most = int(figures["most files"])
    case.figures[f"data files of a rank, {who.name}"] = most
    fewest = int(figures["fewest files"])
    files = str(most) if most == fewest else f"{fewest}–{most}"
    return [who.name, files, f"{figures['others']:.0f}", f"{figures['least'] / 2**20:.1f}",
            f"{figures['most'] / 2**20:.1f}", f"{figures['all'] / 2**20:.1f}",
            f"{stored / 2**20:.1f}"]


def restart(case: Case, plan: Plan) -> Case:
    table = Table("a restart in the same layout", NOTE,
                  ["who", "data files that a rank opens", "opens of other files, all ranks",
                   "MiB read: minimum of a rank", "maximum of a rank", "all ranks",
                   "MiB of the checkpoint"])
    for who in contestants():
        table.rows.append(_row(case, plan, who))
    case.bytes = 4 * len(KINDS) * sum(torch.Size(shape).numel()
                                      for shape, _ in _shapes(plan.scale).values())
    table.note += f" The model and its moments have {case.bytes / 2**20:.1f} MiB."
    case.tables.append(table)
    return case
