"""Weights in and out: memory at a large size, and mapped reads beside safetensors'.

    .venv/bin/python bench/weights.py memory [--gib 8] [--folder DIR]
    .venv/bin/python bench/weights.py mapped [--gib 2] [--rounds 7] [--folder DIR]

`memory`: the kernel's VmHWM during each call minus the resident memory before it, in a process of its
own. It needs up to five times the size on the disk, and for `apply_delta` in place the size in memory.
`mapped`: seconds of opening a file and touching each of its pages, and of unmapping it, of both libraries
in turn on the same files, and the page faults of one such load.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tilestone
from memory import peak

COLUMNS = 1024  # of each tensor, in bfloat16
CHUNK = 1 << 25  # elements that are made at once


def make(folder: Path, gib: int, changed: bool) -> None:
    """Two safetensors files of 8 random tensors each; `changed`: in 1 % of the elements."""
    rows = gib * (1 << 30) // 2 // 16 // COLUMNS
    folder.mkdir()
    random = numpy.random.default_rng(1)
    block = random.integers(0, 1 << 16, CHUNK, numpy.uint16)
    for file in range(2):
        size = rows * COLUMNS * 2
        header: dict[str, Any] = {
            f"layer.{file}.{i}": {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [i * size, (i + 1) * size]}
            for i in range(8)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"model-{file + 1:05}-of-00002.safetensors", "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for at in range(0, 8 * size // 2, CHUNK):
                piece = numpy.roll(block, at // CHUNK * 977 + file)[: 8 * size // 2 - at]
                if changed:
                    piece[random.integers(0, piece.size, piece.size // 100)] ^= 1
                out.write(piece.tobytes())


def sharded(gib: int) -> dict[str, DTensor]:
    """This rank's half of each tensor; rank and world are in the environment."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{Path.cwd()}/ranks", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = gib * (1 << 30) // 2 // 16 // COLUMNS // 2

    def made() -> DTensor:
        return DTensor.from_local(torch.zeros((rows, COLUMNS), dtype=torch.bfloat16), mesh, [Shard(0)])

    return {f"layer.{i}": made() for i in range(16)}


def write_pieces(state: dict[str, DTensor], joined: bool) -> None:
    import tilestone.dcp as dcp

    files = {key: 1 + i % 2 for i, key in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(
        "joined" if joined else "pieces", files, save_distributed=True, enable_consolidation=joined
    )
    dcp.save(state, storage_writer=writer)


#: By name: what is done first, what is measured, and what is removed after it, in a folder with the
#: versions `a` and `b`.
CALLS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], str]] = {
    "two ranks: written and joined": (sharded, lambda state: write_pieces(state, True), "joined"),
    "two ranks: pieces written": (sharded, lambda state: write_pieces(state, False), ""),
    "convert of pieces": (
        int, lambda _: tilestone.convert("pieces", "whole", format="safetensors"), "whole",
    ),
    "tilestone delta": (int, lambda _: tilestone.save_delta("b", "d.safetensors", base="a"), "b"),
    "apply_delta to a folder": (
        int, lambda _: tilestone.apply_delta("a", "d.safetensors", to="c"), "c",
    ),
    "apply_delta in place": (
        lambda _: tilestone.open("a").state_dict(into="torch"),
        lambda state: tilestone.apply_delta(state, "d.safetensors"), "",
    ),
    "mapped, opened": (
        int, lambda _: tilestone.open("a", mapped=True, framework="torch").state_dict(into="torch"), "",
    ),
    "convert to torch_checkpointing": (
        int, lambda _: tilestone.convert("a", "tc", format="torch_checkpointing"), "a",
    ),
    "verify torch_checkpointing": (int, lambda _: tilestone.open("tc").verify(), ""),
    "convert from torch_checkpointing": (int, lambda _: tilestone.convert("tc", "td"), "tc"),
}  # fmt: skip


def memory_of(name: str, gib: int) -> None:
    """Prints the peak of one call, in this process."""
    import tilestone.dcp  # noqa: F401  # so that it does not count

    first, call, _ = CALLS[name]
    made = first(gib)
    began = time.perf_counter()
    taken = peak(os.getpid(), lambda: call(made))
    print(f"| {name} | {taken / (1 << 20):.0f} | {time.perf_counter() - began:.1f} |", flush=True)


def memory(folder: Path, gib: int) -> None:
    make(folder / "a", gib, False)
    make(folder / "b", gib, True)
    print(f"| {gib} GiB | MiB above | seconds |\n|---|---|---|", flush=True)
    for name, (_, _, removed) in CALLS.items():
        command = [sys.executable, __file__, "memory", "--gib", str(gib), "--call", name]
        ranks = range(2 if "two ranks" in name else 1)
        (folder / "ranks").unlink(missing_ok=True)
        each = [subprocess.Popen(command, cwd=folder, env={**os.environ, "RANK": str(rank)}) for rank in ranks]
        if any([process.wait() for process in each]):
            sys.exit(f"failed: {name}")
        if removed:
            shutil.rmtree(folder / removed)


def touch(tensors: dict[str, torch.Tensor]) -> None:
    """Reads one byte of every page."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).flatten()[::4096].sum()


def load_ours(file: Path) -> None:
    checkpoint = tilestone.open(file.parent, mapped=True, framework="torch")
    touch(checkpoint.read_many(checkpoint.tensor_keys()))


def mapped(folder: Path, gib: int, rounds: int) -> None:
    state = {f"w{i}": torch.full((gib << 8, COLUMNS // 4), float(i)).repeat(1, 4) for i in range(4)}
    tilestone.save(state, folder / "td")
    tilestone.convert(folder / "td", folder / "tilestone", format="safetensors")
    for name in ("safetensors", "copied"):
        (folder / name).mkdir()
    save_file(state, folder / "safetensors" / "model.safetensors")
    shutil.copyfile(folder / "safetensors" / "model.safetensors", folder / "copied" / "model.safetensors")
    del state
    loads = {"tilestone": load_ours, "safetensors": lambda file: touch(load_file(file))}
    print("| file | ours | safetensors | ratio | page faults |\n|---|---|---|---|---|")
    for written in ("tilestone", "safetensors", "copied"):
        (file,) = (folder / written).glob("*.safetensors")
        file.read_bytes()  # into the page cache
        seconds: dict[str, list[float]] = {name: [] for name in loads}
        faults = {}
        for i in range(rounds):
            for name in sorted(loads, reverse=i % 2 == 1):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                began = time.perf_counter()
                loads[name](file)
                gc.collect()
                seconds[name].append(time.perf_counter() - began)
                faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        ours, theirs = (statistics.median(seconds[name]) for name in loads)
        said = " and ".join(str(faults[name]) for name in loads)
        print(f"| {written} | {ours:.4f} | {theirs:.4f} | {ours / theirs:.2f} | {said} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["memory", "mapped"])
    parser.add_argument("--gib", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        memory_of(options.call, options.gib)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if options.what == "memory":
            memory(folder, options.gib or 8)
        else:
            mapped(folder, options.gib or 2, options.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
