"""make bench: compares Tilestone with its peers in one run, on the same data."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
import traceback
from pathlib import Path

import torch

import cases
import report
from limits import memcpy_seconds
from measure import Case, Plan

TREE = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE",
                        help=f"cases to run (default: all): {', '.join(cases.ALL)}")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each contestant")
    parser.add_argument("--minutes", type=float, default=40,
                        help="total time; rounds that would exceed it are left out and reported")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data; 1 is full size")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of contestants")
    parser.add_argument("--dir", type=Path, default=TREE / "build" / "bench",
                        help="where checkpoints are written (about 25 GB)")
    parser.add_argument("--json", type=Path, default=TREE / "build" / "bench.json")
    parser.add_argument("--table", type=Path, default=TREE / "docs" / "benchmarks.md")
    parser.add_argument("--only-report", type=Path, nargs="+", metavar="JSON",
                        help="measure nothing; write the tables of an earlier run again, with the "
                             "cases of further runs in the place of its own")
    parser.add_argument("--remark", help="a sentence for the page, for example about the build")
    chosen = parser.parse_args()
    unknown = set(chosen.cases) - set(cases.ALL)
    if unknown:
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    return chosen


def machine(options: argparse.Namespace) -> dict:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = 1 << 30
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memcpy_gb_s": size / memcpy_seconds(size) / 1e9,
        "rounds": options.rounds,
        "seed": options.seed,
        "scale": options.scale,
    }


def run_case(entry: cases.Entry, options: argparse.Namespace, minutes: float) -> Case:
    """Runs one case in its own folder, within its time. An error is listed as a failure."""
    case = entry.new_case()
    root = Path(tempfile.mkdtemp(dir=options.dir))
    plan = Plan(root, options.rounds, options.seed, options.scale,
                time.monotonic() + 60 * minutes)
    try:
        return entry.run(case, plan)
    except Exception as error:  # the other cases still run; the report lists the error
        traceback.print_exc()
        case.fail("the whole case", "all", error)
        return case
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(options: argparse.Namespace) -> tuple[dict[str, Case], dict]:
    if os.geteuid() != 0:
        raise SystemExit("bench: emptying the page cache for cold loads needs root")
    options.dir.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    facts = machine(options)
    names = options.cases or list(cases.ALL)
    done: dict[str, Case] = {}
    for i, name in enumerate(names):
        left = options.minutes - (time.monotonic() - begin) / 60
        shares = [cases.ALL[later].share for later in names[i:]]
        mine = max(0.0, left) * shares[0] / sum(shares)
        print(f"bench: {name} ({i + 1} of {len(names)}), about {mine:.1f} minutes", flush=True)
        done[name] = run_case(cases.ALL[name], options, mine)
        print(report.table(done[name]), flush=True)
        facts["minutes"] = (time.monotonic() - begin) / 60
        report.save(done, facts, options.json)  # so that an interrupted run keeps its results
    return done, facts


def main() -> None:
    options = arguments()
    done, facts = report.merged(options.only_report) if options.only_report else measure(options)
    if options.remark:
        facts["remark"] = options.remark
    report.render(done, facts, options.table)
    print(report.targets_table(done))
    print(report.summary(done))
    print(report.failures(done))
    print(f"bench: wrote {options.table}")


if __name__ == "__main__":
    main()
