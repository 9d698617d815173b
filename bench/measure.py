"""Runs contestants interleaved, in a new random order each round, and keeps every time."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from contestants import Contestant, Tensors
from limits import DirectWrite, Read, drop_caches, warm_caches

CONTROL = "tilestone (again)"  # the A/A control: the same code as another contestant


@dataclass
class Case:
    """Times in seconds: phase -> contestant -> one a round."""

    name: str
    what: str
    bytes: int
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    facts: dict[str, float | str] = field(default_factory=dict)

    def add(self, phase: str, who: str, seconds: float) -> None:
        self.times.setdefault(phase, {}).setdefault(who, []).append(seconds)


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run_case(
    case: Case,
    contestants: list[Contestant],
    tensors: Tensors,
    targets: Tensors,
    root: Path,
    rounds: int,
    seed: int,
) -> Case:
    """Save, cold load and warm load of every contestant and the limits, `rounds` times."""
    order = random.Random(seed)
    limit = DirectWrite(case.bytes)
    reads = [Read(8, True), Read(2, False), Read(4, False), Read(1, False)]
    for _ in range(rounds):
        savers = [entry for entry in contestants if entry.saved_by is None]
        entries: list[Contestant | DirectWrite] = [*savers, limit]
        order.shuffle(entries)
        for entry in entries:
            path = root / _folder(entry.name)
            shutil.rmtree(path, ignore_errors=True)
            drop_caches()
            if isinstance(entry, DirectWrite):
                case.add("save", entry.name, timed(lambda: limit.run(path)))
            else:
                case.add("save", entry.name, timed(lambda: entry.save(tensors, path)))
        _loads(case, contestants, reads, root / _folder(limit.name), targets, root, order)
    for entry in [*contestants, limit]:
        shutil.rmtree(root / _folder(entry.name), ignore_errors=True)
    return case


def _loads(
    case: Case,
    contestants: list[Contestant],
    reads: list[Read],
    limit_path: Path,
    targets: Tensors,
    root: Path,
    order: random.Random,
) -> None:
    loads: list[tuple[str, Path, Callable[[], None]]] = []
    for entry in contestants:
        path = root / _folder(entry.saved_by or entry.name)
        loads.append((entry.name, path, lambda e=entry, p=path: e.load(targets, p)))
    for read in reads:
        loads.append((read.name, limit_path, lambda r=read: r.run(limit_path)))
    order.shuffle(loads)
    for name, path, work in loads:
        drop_caches()
        case.add("cold load", name, timed(work))
        warm_caches(path)
        case.add("warm load", name, timed(work))


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
