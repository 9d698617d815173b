"""The cases: one function for each."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import async_saves
import by_files
import megatron_core
import megatron_exchange
import metadata
import planning
import programs
import ranks
import restart
import scaling
from contestants import Contestant, Cpp, CppNoChecksum, TensorStore, Tensors, Tilestone
from contestants import cache_policies, everybody
from limits import DirectWrite, drop_caches
from measure import CONTROL, Case, Plan, Rounds, Table, run_case, timed
from targets import SUBJECT


def copies(tensors: Tensors) -> Tensors:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def _contest(case: Case, plan: Plan, tensors: Tensors, others: list[Contestant]) -> Case:
    """Compares Tilestone from Python (twice) and from C++ with others on the same tensors."""
    case.bytes = sum(t.nbytes for t in tensors.values())
    cpp = Cpp(tensors, plan.root)
    try:
        run_case(case, [Tilestone(CONTROL), *cache_policies(), cpp, *others], tensors, copies(tensors), plan)
        if wrong := cpp.different():
            raise RuntimeError(f"the C++ contestant loaded {wrong} tensors with wrong values")
    finally:
        cpp.close()
    return case


def large_tensors(scale: float) -> Tensors:
    rows = max(1, int(4096 * scale))
    return {f"w{i}": torch.randn(rows, 4096 * 8) for i in range(4)}


def large(case: Case, plan: Plan) -> Case:
    return _contest(case, plan, large_tensors(plan.scale), everybody())


def small_tensors(scale: float) -> Tensors:
    count = max(1, int(20_000 * scale))
    return {f"layer{i // 10}.p{i % 10}": torch.randn(1024) for i in range(count)}


def small(case: Case, plan: Plan) -> Case:
    tensors = small_tensors(plan.scale)
    others = [c for c in everybody() if not isinstance(c, TensorStore)]  # a directory per tensor
    return _contest(case, plan, tensors, others)


def memory(case: Case, plan: Plan) -> Case:
    mib = max(16, int(1024 * min(1.0, plan.scale)))
    table = Table(
        f"peak memory above {mib} MiB of tensors, MiB",
        "One save and one load, each in a fresh process: the kernel's VmHWM minus the resident "
        "memory before the call. Pages of files count while they are mapped; page cache that no "
        "process maps does not count.", ["who", "save", "load"])
    for entry in [*everybody(), Cpp]:
        path = plan.root / "memory" / "checkpoint"
        row = [entry.name]
        for phase in ("save", "load"):
            try:
                found = programs.python("memory.py", entry.name, phase, str(mib), path)
            except RuntimeError as error:
                case.fail(phase, entry.name, error)
                row.append("failed")
                continue
            own = entry.saved_by is None or phase == "load"
            row.append(f"{found['peak_bytes'] / 2**20:.0f}" if own else "-")
            case.figures[f"peak {phase}, {entry.name}, MiB"] = found["peak_bytes"] / 2**20
        table.rows.append(row)
        shutil.rmtree(path.parent, ignore_errors=True)
    case.tables.append(table)
    return case


WRITING_ROUNDS = 9  # the expected difference is smaller than the disk's variation


def writing(case: Case, plan: Plan) -> Case:
    tensors = large_tensors(plan.scale)
    case.bytes = sum(t.nbytes for t in tensors.values())
    checked = Cpp(tensors, plan.root)
    unchecked = CppNoChecksum(tensors, plan.root)
    limit = DirectWrite(case.bytes)
    savers: list[tuple[str, Callable[[Path], float | None]]] = [(limit.name, limit.run)]
    for name, process in ((SUBJECT, checked), (CONTROL, checked), (unchecked.name, unchecked)):
        savers.append((name, lambda path, p=process: p.save(tensors, path)))
    path = plan.root / "checkpoint"
    order = random.Random(plan.seed)
    rounds = Rounds(case, replace(plan, rounds=WRITING_ROUNDS))
    try:
        while rounds.another():
            order.shuffle(savers)
            for name, save in savers:
                shutil.rmtree(path, ignore_errors=True)
                drop_caches()
                case.add("save", name, timed(lambda s=save: s(path)))
    finally:
        checked.close()
        unchecked.close()
        shutil.rmtree(path, ignore_errors=True)
    case.tables.append(_packing(case, plan))
    return case


def _packing(case: Case, plan: Plan) -> Table:
    mib = max(64, int(2048 * min(1.0, plan.scale)))
    table = Table(
        "packing tensors into a save's buffers, with and without the CRC-32",
        f"{mib} MiB, 8 MiB at a time, into 256 MiB of buffers that are reused; medians of 7 runs.",
        ["threads", "without s", "with s", "with ÷ without", "GB/s with"])
    for line in programs.json_lines(programs.BIN / "checksum_cost", str(mib)):
        ratio = line["with_crc_seconds"] / line["seconds"]
        table.rows.append([str(line["threads"]), f"{line['seconds']:.3f}",
                           f"{line['with_crc_seconds']:.3f}", f"{ratio:.3f}",
                           f"{line['bytes'] / line['with_crc_seconds'] / 1e9:.1f}"])
        case.figures[f"pack with ÷ without CRC, {line['threads']} threads"] = ratio
    return table


@dataclass
class Entry:
    title: str
    what: str
    run: Callable[[Case, Plan], Case]
    share: float  # approximate share of the total time

    def new_case(self) -> Case:
        return Case(self.title, self.what)


ALL = {
    "large": Entry("large, 1 rank", "2 GiB in large tensors from 1 rank.", large, 7),
    "small": Entry("20,000 × 4 KiB", "20,000 tensors of 4 KiB from 1 rank.", small, 7),
    "large4": Entry("large, 4 ranks", "4 ranks of 0.5 GiB each, tensors sharded by rows.",
                    ranks.same_layout, 5),
    "gpt": Entry("GPT, 2 × 2 ranks", "A GPT's parameters and AdamW state, about 1.5 GB, FSDP2 × TP "
                 "layout on 2 × 2 ranks.", ranks.gpt, 4),
    "megatron": Entry("Megatron-Core, 4 ranks", "The same GPT in Megatron-Core's layout, TP 2 × DP 2, "
                      "beside stock dist_checkpointing.", megatron_core.megatron, 4),
    "exchange": Entry("Megatron-Core, fully parallel", "A quarter of that GPT on 4 and on 8 ranks, "
                      "loaded by each method in which ranks read for each other.",
                      megatron_exchange.exchange, 2),
    "restart": Entry("a restart, 8 ranks", "A quarter of that GPT, TP 8, loaded in the saved "
                     "layout.", restart.restart, 2),
    "reshard4": Entry("row to column, 4 ranks",
                      "1 GiB saved by rows on 4 ranks, loaded by columns on 4.",
                      lambda case, plan: ranks.reshard(case, plan, 4), 2),
    "reshard8": Entry("row to column, 8 ranks",
                      "1 GiB saved by rows on 8 ranks, loaded by columns on 8.",
                      lambda case, plan: ranks.reshard(case, plan, 8), 3),
    "memory": Entry("peak memory", "Each contestant in processes of its own.", memory, 2),
    "writing": Entry("writing, 1 rank", "2 GiB in large tensors saved from C++ by 1 rank, compared "
                     "with the disk's limit, and with the same program without CRC-32.",
                     writing, 4),
    "metadata": Entry("metadata", "`.metadata` of 1,024 ranks × 500 tensors.", metadata.metadata,
                      1),
    "planning": Entry("planning", "Save planning for jobs of up to 16,384 ranks.",
                      planning.planning, 2),
    "growth": Entry("planning, growth", "How the cost grows with ranks and tensors.",
                    planning.growth, 0.5),
    "by_files": Entry("saves without a communicator", "Up to 16,384 ranks that one machine stands "
                      "for.", by_files.by_files, 6),
    "async": Entry("saves in the background", "4 GiB from 1 rank, beside nothing and beside loops.",
                   async_saves.async_saves, 4),
    "scaling": Entry("scaling", "Saves and loads against bytes, tensors and ranks.",
                     scaling.scaling, 1),
}
