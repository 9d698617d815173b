"""Runs contestants interleaved, in a new random order in each round, and keeps all times."""

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
class Table:
    """A table of other figures than contestants' times."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Case:
    """The results of a case. Times are in seconds: phase -> contestant -> one for each round."""

    name: str
    what: str
    bytes: int = 0
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # read by the table of targets
    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # contestant, phase and error
    rounds_left_out: int = 0  # for lack of time

    def add(self, phase: str, who: str, seconds: float) -> None:
        self.times.setdefault(phase, {}).setdefault(who, []).append(seconds)

    def fail(self, phase: str, who: str, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
        self.failures.append(f"{who}, {phase}: {lines[0][:300]}")
        print(f"bench: {self.name}: FAILED: {self.failures[-1]}", flush=True)

    def failed(self, who: str) -> bool:
        return any(failure.startswith(f"{who}, ") for failure in self.failures)

    def drop(self, who: str) -> None:
        """Drops all times of a contestant that failed, because they can't be trusted."""
        for times in self.times.values():
            times.pop(who, None)


@dataclass
class Plan:
    """How a case is run."""

    root: Path  # where checkpoints are written
    rounds: int
    seed: int
    scale: float
    deadline: float  # time.monotonic(); no round begins that would end later


class Rounds:
    """Counts rounds, and tells whether there is time for another one."""

    def __init__(self, case: Case, plan: Plan) -> None:
        self._case = case
        self._plan = plan
        self._done = 0
        self._begin = time.monotonic()

    def another(self) -> bool:
        if self._done > 0:
            mean = (time.monotonic() - self._begin) / self._done
            if self._done >= self._plan.rounds:
                return False
            if time.monotonic() + mean > self._plan.deadline:
                self._case.rounds_left_out = self._plan.rounds - self._done
                return False
        self._done += 1
        print(f"bench: {self._case.name}: round {self._done} of {self._plan.rounds}", flush=True)
        return True


def timed(work: Callable[[], float | None]) -> float:
    """The seconds that `work` takes, or returns if it measured them in another process."""
    begin = time.perf_counter()
    own = work()
    return time.perf_counter() - begin if own is None else own


def run_case(
    case: Case, contestants: list[Contestant], tensors: Tensors, targets: Tensors, plan: Plan
) -> Case:
    """Times save, cold load, load again and warm load of all contestants and limits in each round.
    """
    order = random.Random(plan.seed)
    limit = DirectWrite(case.bytes)
    reads = [Read(8, True), Read(2, False), Read(4, False), Read(1, False)]
    rounds = Rounds(case, plan)
    while rounds.another():
        _saves(case, contestants, limit, tensors, plan.root, order)
        _loads(case, contestants, reads, plan.root / folder(limit.name), targets, plan.root, order)
    for name in [limit.name, *(entry.name for entry in contestants)]:
        shutil.rmtree(plan.root / folder(name), ignore_errors=True)
    return case


def _saves(
    case: Case,
    contestants: list[Contestant],
    limit: DirectWrite,
    tensors: Tensors,
    root: Path,
    order: random.Random,
) -> None:
    savers: list[tuple[str, Callable[[Path], float | None]]] = [(limit.name, limit.run)]
    for entry in contestants:
        if entry.saved_by is None and not case.failed(entry.name):
            savers.append((entry.name, lambda path, e=entry: e.save(tensors, path)))
    order.shuffle(savers)
    for name, save in savers:
        path = root / folder(name)
        shutil.rmtree(path, ignore_errors=True)
        drop_caches()
        try:
            case.add("save", name, timed(lambda: save(path)))
        except Exception as error:  # a peer's failure is a result; the others still run
            case.drop(name)
            case.fail("save", name, error)


def _loads(
    case: Case,
    contestants: list[Contestant],
    reads: list[Read],
    limit_path: Path,
    targets: Tensors,
    root: Path,
    order: random.Random,
) -> None:
    loads: list[tuple[str, Path, Callable[[], float | None]]] = []
    for entry in contestants:
        if not entry.loads or case.failed(entry.name) or case.failed(entry.saved_by or ""):
            continue
        path = root / folder(entry.saved_by or entry.name)
        loads.append((entry.name, path, lambda e=entry, p=path: e.load(targets, p)))
    for read in reads:
        loads.append((read.name, limit_path, lambda r=read: r.run(limit_path)))
    order.shuffle(loads)
    for name, path, work in loads:
        try:
            drop_caches()
            case.add("cold load", name, timed(work))
            case.add("load again", name, timed(work))
            warm_caches(path)
            case.add("warm load", name, timed(work))
        except Exception as error:  # as above
            case.drop(name)
            case.fail("load", name, error)


def folder(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
