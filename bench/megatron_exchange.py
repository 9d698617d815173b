"""Fully parallel loads in Megatron-Core's layout: bytes read and memory used by each rank.

Nothing is timed. Each save and each load is a job of its own, because a failed call leaves its
process group unusable, and because memory that an earlier call keeps would not be counted.
"""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

import memory
import ranks
from measure import Case, Plan, Table, folder
from megatron_core import TP, Native, PlugIn, Stock, state, without_cuda

WORLDS = (4, 8)
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
PART = 0.25  # share of the GPT of 1.5 GB
LIMIT = 90  # seconds per job, because ranks may wait for one another forever
IMPORTS = ("torch", "torch.distributed.checkpoint", "tilestone.megatron",
           "megatron.core.dist_checkpointing.strategies.fully_parallel")
NOTE = """\
Each figure is of one rank. Bytes are those that a cold load reads from the disk (`read_bytes` of \
`/proc/self/io`). The ranks share a machine, so data that one rank has read is in the page cache \
for the others. Memory is the kernel's VmHWM of the first load in a process minus the resident \
memory before it; it includes the destination tensors."""


class ByAlgorithm(Stock):
    """Stock's load wrapper with one of its three algorithms to exchange the loaded shards."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(f"stock, {algorithm}", True)
        self._algorithm = algorithm

    def wrapped(self) -> tuple[Any, Any]:
        save, load = super().wrapped()
        load.exchange_algo = self._algorithm
        return save, load


def contestants() -> list[Any]:
    return [Native("tilestone"), Native("tilestone, fully parallel", True),
            PlugIn("stock with Tilestone's strategies"),
            PlugIn("stock with Tilestone's strategies, fully parallel", True),
            *(ByAlgorithm(algorithm) for algorithm in ALGORITHMS)]


def _prepared(entry: Any) -> None:
    """Prepares this process so that stock can run in it."""
    without_cuda()
    warnings.simplefilter("ignore")  # stock uses deprecated functions of torch
    for name in IMPORTS:
        import_module(name)
    entry.wrapped()


def _path(entry: Any, plan: Plan) -> Path:
    """Path of the contestant's checkpoint. All of stock's algorithms load the same one."""
    return plan.root / ("stock" if isinstance(entry, ByAlgorithm) else folder(entry.name))


def _save(entry: Any, case: Case, plan: Plan) -> None:
    _prepared(entry)
    saved = state(plan.scale * PART)
    case.bytes = sum(part.data.nbytes * (TP if part.axis >= 0 else 1) for part in saved.values())
    entry.save(saved, _path(entry, plan))


def _load(entry: Any, case: Case, plan: Plan) -> None:
    _prepared(entry)
    wanted, world, path = state(plan.scale * PART), ranks.World(), _path(entry, plan)
    world.cold()
    peak = memory.peak(os.getpid(), lambda: entry.load(wanted, path))
    world.cold()
    before = ranks.disk_bytes()
    entry.load(wanted, path)
    mine = [ranks.disk_bytes() - before, peak]
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, mine)
    read, peaks = [each[0] for each in figures], [each[1] for each in figures]
    case.figures = {"least": min(read), "most": max(read), "all": sum(read), "peak": max(peaks)}


def _row(case: Case, plan: Plan, world: int, entry: Any) -> list[str]:
    found = Case(case.name, case.what, case.bytes)
    try:
        jobs = [_load] if _path(entry, plan).exists() else [_save, _load]
        for job in jobs:
            found = ranks.run(partial(job, entry), world, found, plan, LIMIT, IMPORTS)
    except TimeoutError as error:
        return [str(world), entry.name, *[_failed(case, world, entry, error, str(error))] * 4]
    except Exception as error:  # of any rank; the other contestants still run
        return [str(world), entry.name, *[_failed(case, world, entry, error, "failed")] * 4]
    case.bytes = found.bytes
    least, most, peak = (f"{found.figures[what] / 2**20:.1f}" for what in ("least", "most", "peak"))
    ratio = found.figures["all"] / found.bytes
    return [str(world), entry.name, least, most, f"{ratio:.3f}", peak]


def _failed(case: Case, world: int, entry: Any, error: Exception, cell: str) -> str:
    """Records a failure; returns the table cell. A rank's error is the last line of its message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    case.fail(f"{world} ranks", entry.name, lines[-1])
    return cell


def exchange(case: Case, plan: Plan) -> Case:
    table = Table("fully parallel loads: bytes read and memory per rank", NOTE,
                  ["ranks", "who", "MiB read: minimum of a rank", "maximum of a rank",
                   "all ÷ bytes of the checkpoint", "peak memory, maximum of a rank, MiB"])
    for world in WORLDS:
        here = replace(plan, root=plan.root / str(world))
        here.root.mkdir()
        for entry in contestants():
            table.rows.append(_row(case, here, world, entry))
        shutil.rmtree(here.root)
    table.note += f" The checkpoint has {case.bytes / 2**20:.0f} MiB."
    case.tables.append(table)
    return case
