"""The performance targets, and the values measured for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from measure import CONTROL, Case

SUBJECT = "tilestone"
KEEP = "tilestone, cache=keep"
BUFFERED = ("safetensors", "torch.save", "dcp, 1 thread", "dcp, 2 threads", "torch-checkpointing")
READS = ("cold load", "warm load")


def control_spread(times: dict[str, list[float]]) -> float:
    """The difference of two contestants with the same code, as their ratio minus 1.

    It is the larger one of the difference of their medians and of their typical difference within
    a round ÷ √rounds, because with few rounds two medians may agree by accident.
    """
    if CONTROL not in times or SUBJECT not in times:
        return 0.0
    a, b = times[SUBJECT], times[CONTROL]
    within = median(_apart(x, y) for x, y in zip(a, b))
    return max(_apart(median(a), median(b)), within / math.sqrt(min(len(a), len(b))))


def _apart(a: float, b: float) -> float:
    return max(a / b, b / a) - 1


def best_limit(times: dict[str, list[float]]) -> float | None:
    """Median seconds of the fastest one of the machine's limits."""
    return min((median(t) for name, t in times.items() if name.startswith("limit:")), default=None)


@dataclass
class Measured:
    value: float
    spread: float = 0.0  # of the A/A control: the relative uncertainty of the value


@dataclass
class Target:
    what: str
    goal: float
    at_most: bool
    unit: str
    measure: Callable[[dict[str, Case]], Measured | None]  # None: not measured in this run

    def verdict(self, found: Measured) -> str:
        met = found.value <= self.goal if self.at_most else found.value >= self.goal
        near = abs(found.value / self.goal - 1) <= found.spread
        return ("met" if met else "missed") + (", within the control's spread" if near else "")


def _phase(cases: dict[str, Case], case: str, phase: str) -> dict[str, list[float]] | None:
    times = cases[case].times.get(phase) if case in cases else None
    return times if times and SUBJECT in times else None


def _of_limit(case: str, phase: str):
    def measure(cases: dict[str, Case]) -> Measured | None:
        times = _phase(cases, case, phase)
        limit = best_limit(times) if times else None
        if not times or limit is None:
            return None
        return Measured(limit / median(times[SUBJECT]), control_spread(times))

    return measure


def _times(case: str, phase: str, peer: str):
    """The peer's time ÷ Tilestone's."""

    def measure(cases: dict[str, Case]) -> Measured | None:
        times = _phase(cases, case, phase)
        if not times or peer not in times:
            return None
        return Measured(median(times[peer]) / median(times[SUBJECT]), control_spread(times))

    return measure


def _kept(case: str, phase: str, peers: tuple[str, ...]):
    """The time with cache="keep" ÷ that of the fastest one of these peers."""

    def measure(cases: dict[str, Case]) -> Measured | None:
        times = _phase(cases, case, phase)
        found = [median(times[peer]) for peer in peers if peer in times] if times else []
        if not times or KEEP not in times or not found:
            return None
        return Measured(median(times[KEEP]) / min(found), control_spread(times))

    return measure


def _best_peer(case: str, phase: str):
    def measure(cases: dict[str, Case]) -> Measured | None:
        times = _phase(cases, case, phase)
        if not times:
            return None
        peers = [median(t) for name, t in times.items()
                 if not name.startswith(("limit:", SUBJECT))]
        if not peers:
            return None
        return Measured(min(peers) / median(times[SUBJECT]), control_spread(times))

    return measure


def _figure(case: str, name: str):
    def measure(cases: dict[str, Case]) -> Measured | None:
        figures = cases[case].figures if case in cases else {}
        return Measured(figures[name]) if name in figures else None

    return measure


def _rule_grows(cases: dict[str, Case]) -> Measured | None:
    figures = cases["planning"].figures if "planning" in cases else {}
    if "rule 64, s" not in figures or "rule 16384, s" not in figures:
        return None
    return Measured(figures["rule 16384, s"] / figures["rule 64, s"], figures["rule, spread"])


def _by_files_grows(cases: dict[str, Case]) -> Measured | None:
    figures = cases["by_files"].figures if "by_files" in cases else {}
    if "calls 64" not in figures or "calls 16384" not in figures:
        return None
    return Measured(figures["calls 16384"] / figures["calls 64"])


def _checksum_cost(cases: dict[str, Case]) -> Measured | None:
    times = _phase(cases, "writing", "save")
    if not times or "no checksums" not in times:
        return None
    return Measured(median(times[SUBJECT]) / median(times["no checksums"]), control_spread(times))


def _at_least(what: str, goal: float, measure, unit: str = "×") -> Target:
    return Target(what, goal, False, unit, measure)


def _at_most(what: str, goal: float, measure, unit: str) -> Target:
    return Target(what, goal, True, unit, measure)


def all_targets() -> list[Target]:
    targets = []
    for case, name in (("large", "1 rank"), ("large4", "4 ranks")):
        targets += [
            _at_least(f"save, large, {name}: share of the write limit", 0.95,
                      _of_limit(case, "save")),
            _at_least(f"save, large, {name}: DCP (its default, 1 thread)", 2.5,
                      _times(case, "save", "dcp, 1 thread")),
            _at_least(f"save, large, {name}: DCP, 2 threads", 2.5,
                      _times(case, "save", "dcp, 2 threads")),
            _at_least(f"save, large, {name}: the fastest peer", 1.0, _best_peer(case, "save")),
            _at_least(f"cold load, large, {name}: share of the read limit", 0.95,
                      _of_limit(case, "cold load")),
        ]
    targets += [
        _at_least("save, large, 1 rank, from C++, 9 rounds: share of the write limit", 0.95,
                  _of_limit("writing", "save")),
        _at_least("cold load, large, 1 rank: torch.load(mmap)", 1.0,
                  _times("large", "cold load", "torch.load(mmap)")),
        _at_least("warm load, large, 1 rank: DCP", 6.0,
                  _times("large", "warm load", "dcp, 1 thread")),
        _at_least("warm load, large, 1 rank: safetensors", 1.5,
                  _times("large", "warm load", "safetensors")),
        _at_most("cold load with cache=keep, large, 1 rank: ÷ the fastest buffered peer", 1.0,
                 _kept("large", "cold load", BUFFERED), "×"),
        _at_most("load again with cache=keep, large, 1 rank: ÷ safetensors", 1.1,
                 _kept("large", "load again", ("safetensors",)), "×"),
        _at_least("save, GPT, 2 × 2 ranks: DCP, 1 thread", 2.5,
                  _times("gpt", "save", "dcp, 1 thread")),
        _at_least("20,000 × 4 KiB, save: safetensors", 3.0,
                  _times("small", "save", "safetensors")),
        _at_least("20,000 × 4 KiB, cold load: safetensors", 2.0,
                  _times("small", "cold load", "safetensors")),
        _at_least("20,000 × 4 KiB, warm load: safetensors", 2.0,
                  _times("small", "warm load", "safetensors")),
    ]
    for case, ranks in (("reshard4", 4), ("reshard8", 8)):
        name = f"row to column, {ranks} ranks"
        targets += [
            _at_most(f"{name}: bytes read ÷ bytes wanted", 1.05,
                     _figure(case, "bytes read ÷ wanted, tilestone"), "×"),
            _at_least(f"{name}, cold: share of the read limit", 0.85, _of_limit(case, "cold load")),
            _at_least(f"{name}, cold: two_phase=never", 1.0,
                      _times(case, "cold load", "tilestone, two_phase=never")),
            _at_least(f"{name}, warm: DCP", 5.0, _times(case, "warm load", "dcp, 1 thread")),
        ]
    targets += [
        _at_least("planning 1,024 × 500 by exchange: DCP's steps", 100,
                  _figure("planning", "plan, dcp ÷ tilestone")),
        _at_most("planning 16,384 × 1,000 by exchange", 10,
                 _figure("planning", "plan dense 16384 x 1000, s"), "s"),
        _at_most("planning 16,384 × 1,000 by exchange: memory", 4,
                 _figure("planning", "plan dense 16384 x 1000, GiB"), "GiB"),
        _at_most("planning by rule: a rank's time at 16,384 ranks ÷ at 64", 1.2, _rule_grows, "×"),
        _at_most("restart with local copies, 8 ranks: data files that a rank opens", 1,
                 _figure("restart", "data files of a rank, tilestone, replicate=local"), "files"),
        _at_most("by files, 16,384 ranks: from the last receipt to the checkpoint", 10,
                 _figure("by_files", "published 16384, s"), "s"),
        _at_most("by files, 16,384 ranks: entries of a directory that a rank lists", 256,
                 _figure("by_files", "listed 16384"), "entries"),
        _at_most("by files: calls of a rank at 16,384 ranks ÷ at 64", 1.2, _by_files_grows, "×"),
        _at_most("Megatron-Core's distribution, 2,048 × 1,000", 0.3,
                 _figure("planning", "distribution, s"), "s"),
        _at_least("reading `.metadata` of 512,000 shards: pickle.load", 20,
                  _figure("metadata", "parse, pickle ÷ tilestone")),
        _at_most("peak memory of a save above the tensors", 256,
                 _figure("memory", "peak save, tilestone, MiB"), "MiB"),
        _at_most("peak memory of a load above the tensors", 256,
                 _figure("memory", "peak load, tilestone, MiB"), "MiB"),
        _at_most("checksums: a save's time ÷ that without them", 1.03, _checksum_cost, "×"),
    ]
    return targets
