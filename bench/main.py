"""make bench: Tilestone beside its peers, in one run, on the same bytes."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

import cases
import report
from limits import memcpy_seconds

TREE = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE",
                        help=f"which to run (default: all): {', '.join(cases.ALL)}")
    parser.add_argument("--rounds", type=int, default=3, help="times each contestant runs")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data, 1: full")
    parser.add_argument("--seed", type=int, default=1, help="of the order of contestants")
    parser.add_argument("--dir", type=Path, default=TREE / "build" / "bench",
                        help="where checkpoints are written (about 25 GB)")
    parser.add_argument("--json", type=Path, default=TREE / "build" / "bench.json")
    parser.add_argument("--table", type=Path, default=TREE / "docs" / "benchmarks.md")
    chosen = parser.parse_args()
    unknown = set(chosen.cases) - set(cases.ALL)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return chosen


def machine(options: argparse.Namespace) -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = 1 << 30
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "torch": torch.__version__,
        "memcpy_gb_s": size / memcpy_seconds(size) / 1e9,
        "rounds": options.rounds,
        "seed": options.seed,
        "scale": options.scale,
    }


def main() -> None:
    options = arguments()
    if os.geteuid() != 0:
        raise SystemExit("bench: emptying the page cache for cold loads needs root")
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine(options)
    done = []
    root = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        for name in options.cases or cases.ALL:
            print(f"bench: {name}", flush=True)
            case = cases.ALL[name](root, options.rounds, options.seed, options.scale)
            print(report.table(case), flush=True)
            done.append(case)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.write(done, facts, options.json, options.table)
    print(report.summary(done))
    print(f"bench: wrote {options.json} and {options.table}")


if __name__ == "__main__":
    main()
