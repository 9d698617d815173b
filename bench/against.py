"""Compares the installed package with that of another revision: the same cases, round by round.

    against.py FOLDER [CASE...]

FOLDER contains the other revision's package `tilestone`; tools/bench_against makes it. In each round
every case runs three times, in random order: with the other package ("before"), with the installed
one ("now"), and with the installed one once more ("again", the control). Each run has processes of
its own, which save and load once before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import cases
import megatron_core
import ranks
from contestants import Contestant, Tilestone, TilestoneLoad
from measure import Case, Plan

BEFORE, NOW, AGAIN = "before", "now", "again"
Times = dict[tuple[str, str], dict[str, list[float]]]  # (case, phase) -> package -> seconds


@dataclass
class Job:
    """What one rank does in one run. `states` makes the state to save and the one to load into."""

    states: Callable[[float], tuple[Any, Any]]
    contestant: Contestant

    def __call__(self, case: Case, plan: Plan) -> None:
        saved, wanted = self.states(plan.scale)
        world = ranks.World()
        for one in (Case("warm-up", ""), case):
            world.clear(plan.root)
            world.cold()
            ranks.time_one(one, world, self.contestant, saved, wanted, plan.root)
            case.failures = one.failures or case.failures
        world.clear(plan.root)


def _large(scale: float) -> tuple[Any, Any]:
    saved = cases.large_tensors(scale)
    return saved, cases.copies(saved)


def _small(scale: float) -> tuple[Any, Any]:
    saved = cases.small_tensors(scale)
    return saved, cases.copies(saved)


def _megatron(scale: float) -> tuple[Any, Any]:
    return megatron_core.state(scale), megatron_core.state(scale)


# Name -> number of ranks, states. All run with the package's own save and load but "megatron".
CASES = {
    "large": (1, _large),
    "small": (1, _small),
    "large4": (4, ranks.same_layout_states),
    "gpt": (4, ranks.gpt_states),
    "reshard4": (4, ranks.reshard_states),
    "megatron": (4, _megatron),
}


def _contestant(name: str, cache: str | None) -> Contestant:
    if name == "megatron":
        return megatron_core.Native("tilestone")
    if cache is None:
        return Tilestone()
    import tilestone

    option: dict[str, object] = {"cache": cache}  # of revisions before there was `Reading`
    if hasattr(tilestone, "Reading"):
        option = {"reading": tilestone.Reading(cache=cache)}  # type: ignore[arg-type]
    made = TilestoneLoad(cache, **option)
    made.name = "tilestone"
    return made


def _worker(name: str, options: argparse.Namespace) -> None:
    """One run of a case with the package that Python finds; prints its times as JSON."""
    world, states = CASES[name]
    plan = Plan(options.dir / "checkpoint", 1, 0, options.scale, float("inf"))
    job = Job(states, _contestant(name, options.cache))
    case = ranks.run(job, world, Case(name, ""), plan, limit=ranks.TIMEOUT)
    if case.failures:
        raise SystemExit(case.failures[0])
    print(json.dumps({phase: times["tilestone"][0] for phase, times in case.times.items()}))


def _run(name: str, package: Path | None, options: argparse.Namespace) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    command = [sys.executable, __file__, "--worker", "--dir", str(options.dir),
               "--scale", str(options.scale), str(package or "-"), name]
    command += ["--cache", options.cache] if options.cache else []
    ran = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"bench: {name} with {package or 'the installed package'}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> Times:
    order = random.Random(options.seed)
    times: Times = {}
    for number in range(1, options.rounds + 1):
        for name in options.cases or list(CASES):
            print(f"bench: round {number} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            packages = [(BEFORE, options.package), (NOW, None), (AGAIN, None)]
            order.shuffle(packages)
            for who, package in packages:
                for phase, seconds in _run(name, package, options).items():
                    times.setdefault((name, phase), {}).setdefault(who, []).append(seconds)
    return times


def table(times: Times) -> str:
    """The medians over the rounds. "before ÷ now" above 1: the installed package is faster."""
    lines = ["| case | phase | before s | now s | before ÷ now | again ÷ now | spread of rounds |",
             "|---|---|---|---|---|---|---|"]
    for (name, phase), of in times.items():
        before = [a / b for a, b in zip(of[BEFORE], of[NOW], strict=True)]
        again = [a / b for a, b in zip(of[AGAIN], of[NOW], strict=True)]
        lines.append(
            f"| {name} | {phase} | {median(of[BEFORE]):.3f} | {median(of[NOW] + of[AGAIN]):.3f} "
            f"| {median(of[BEFORE]) / median(of[NOW] + of[AGAIN]):.2f} | {median(again):.2f} "
            f"| {min(before):.2f} to {max(before):.2f} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="against", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, metavar="FOLDER")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each package")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data; 1 is full size")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of packages")
    parser.add_argument("--cache", choices=["bypass", "keep"],
                        help="of loads, but in the case megatron; else each package's default")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written (about 5 GB)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = arguments()
    if options.worker:
        _worker(options.cases[0], options)
        return
    if os.geteuid() != 0:
        raise SystemExit("bench: emptying the page cache for cold loads needs root")
    if not (options.package / "tilestone").is_dir():
        raise SystemExit(f"bench: {options.package} contains no package `tilestone`")
    options.package = options.package.resolve()
    parent = options.dir or Path(__file__).resolve().parent.parent / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    options.dir = Path(tempfile.mkdtemp(dir=parent))
    try:
        print(table(measure(options)))
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
