"""Trains a small GPT, saves it with Tilestone, and resumes training on other meshes.

    demo.py FOLDER

All files are written to FOLDER, which is emptied first. The exit status is 1 if a comparison fails.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).resolve().parent
SAVE_AT = 30
LAST = 50


@dataclasses.dataclass
class Comparison:
    """One row of the table."""

    what: str
    count: int
    unit: str
    differing: int
    delta: float


def announce(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def train(folder: Path, name: str, mesh: str, last: int, *words: str) -> dict[str, Any]:
    """Runs train.py with one process for each rank of the mesh. Returns rank 0's report."""
    world = 1
    for word in mesh.split("x"):
        world *= int(word)
    report = folder / f"{name}.report"
    command = [sys.executable, str(HERE / "train.py"), mesh, str(last), *words, "--report", report]
    shared = {"WORLD_SIZE": str(world), "STORE": str(folder / f"{name}.store")}
    fixed = {"OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": "lo"}
    started = time.perf_counter()
    processes = [
        subprocess.Popen(command, env={**os.environ, **fixed, **shared, "RANK": str(rank)})
        for rank in range(world)
    ]
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):  # the others would wait for it forever
            for process in processes:
                process.kill()
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    if any(codes):
        sys.exit(f"demo: {name}: ranks ended with exit codes {codes}")
    print(f"    {world} rank{'s' if world > 1 else ''}, {time.perf_counter() - started:.1f} s")
    return torch.load(report)


def compare(what: str, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> Comparison:
    """Compares whole tensors by key."""
    if a.keys() != b.keys():
        sys.exit(f"demo: {what}: the keys differ: {sorted(a.keys() ^ b.keys())[:5]}")
    differing, delta = 0, 0.0
    for key in a:
        differing += not torch.equal(a[key], b[key])
        if a[key].numel():
            delta = max(delta, float((a[key].double() - b[key].double()).abs().max()))
    return Comparison(what, len(a), "tensors", differing, delta)


def compare_losses(what: str, a: dict[int, float], b: dict[int, float]) -> Comparison:
    """Compares the losses of the steps that both runs made."""
    steps = sorted(a.keys() & b.keys())
    deltas = [abs(a[step] - b[step]) for step in steps]
    return Comparison(what, len(steps), "losses", sum(d != 0 for d in deltas), max(deltas))


def stock_load(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that stock PyTorch's dcp.load reads from a checkpoint."""
    state = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def read_without_torch(ours: Path, stock: Path) -> Comparison:
    """Compares both checkpoints by Tilestone, in a process without torch."""
    command = [sys.executable, str(HERE / "read_without_torch.py"), str(ours), str(stock)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"    written by {result['writers'][0]} and by {result['writers'][1]}")
    what = "stock-written, read by Tilestone without torch"
    return Comparison(
        what, result["tensors"], "tensors", result["differing"], result["delta"]
    )


def table(rows: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table(title="Comparisons, bit for bit")
    for name, side in (("what", "left"), ("compared", "right"), ("differ", "right"),
                       ("max delta", "right"), ("", "left")):  # fmt: skip
        out.add_column(name, justify=side)  # type: ignore[arg-type]
    for row in rows:
        verdict = "equal" if row.differing == 0 else "DIFFERENT"
        counted = f"{row.count} {row.unit}"
        out.add_row(row.what, counted, str(row.differing), str(row.delta), verdict)
    Console(width=110).print(out)


def main(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ours, stock = folder / f"step-{SAVE_AT}", folder / f"stock-{SAVE_AT}"
    rows = []

    announce(f"training on 2 x 2 ranks (FSDP2 x TP), saving at step {SAVE_AT}, ending at {LAST}")
    saving = ["--save", str(ours), "--save-stock", str(stock), "--at", str(SAVE_AT)]
    whole = train(folder, "uninterrupted", "2x2", LAST, *saving)
    print(f"    tilestone.save took {whole['save_seconds'] * 1000:.0f} ms on rank 0")

    for mesh, name in (("2x2", "2 x 2 ranks"), ("3", "3 ranks"), ("1", "1 rank")):
        last = LAST if mesh == "2x2" else SAVE_AT + 10
        alone = "" if "x" in mesh else " (FSDP2 alone)"
        announce(f"resuming from the checkpoint on {name}{alone}")
        again = train(folder, f"on-{mesh}", mesh, last, "--load", str(ours))
        rows.append(compare(f"loaded on {name} / saved", again["loaded"], whole["saved"]))
        if mesh == "2x2":
            rows.append(compare(f"step {LAST} / uninterrupted", again["final"], whole["final"]))
            rows.append(
                compare_losses("losses / uninterrupted", again["losses"], whole["losses"])
            )

    announce("stock PyTorch reads Tilestone's checkpoint; Tilestone reads a stock checkpoint")
    rows.append(compare("stock dcp.load / saved", stock_load(ours, whole["saved"]), whole["saved"]))
    rows.append(read_without_torch(ours, stock))

    announce(f"tilestone ls {ours.name}")
    subprocess.run([sys.executable, "-m", "tilestone", "ls", str(ours)], check=True)
    print()
    table(rows)
    return 1 if any(row.differing for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
