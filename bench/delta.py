"""Deltas of weights with the shapes of Qwen3-0.6B (1.2 GB of bfloat16), beside whole saves and loads.

    .venv/bin/python bench/delta.py [--layers 28] [--rounds 3] [--rows 4] [--folder DIR]

Prints a table: bytes of a delta as a share of the whole, and the seconds of making it (the base is in
memory) and of applying it in place, as a share of those of a save and a load of everything. Then the
seconds of making it if the base is on the disk, in the page cache, less those with the base in memory, and
of loading that base into new arrays, and into arrays that are there.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilestone

State = dict[str, torch.Tensor]


def weights(layers: int) -> State:
    """Random bfloat16 tensors with the names and shapes of Qwen3-0.6B."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 1024)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "self_attn.q_proj.weight": (2048, 1024),
            name + "self_attn.k_proj.weight": (1024, 1024),
            name + "self_attn.v_proj.weight": (1024, 1024),
            name + "self_attn.o_proj.weight": (1024, 2048),
            name + "mlp.gate_proj.weight": (3072, 1024),
            name + "mlp.up_proj.weight": (3072, 1024),
            name + "mlp.down_proj.weight": (1024, 3072),
            name + "input_layernorm.weight": (1024,),
            name + "post_attention_layernorm.weight": (1024,),
        }
    return {key: torch.randn(shape).mul_(0.02).to(torch.bfloat16) for key, shape in shapes.items()}


def change(state: State, share: float, bits: int) -> None:
    """Changes the low bits of about a share of all elements, in place."""
    for tensor in state.values():
        flat = tensor.view(torch.int16).view(-1)
        if share < 1:
            where = torch.randint(flat.numel(), (int(flat.numel() * share),))
            flat[where] ^= 1
        else:
            flat ^= torch.randint(1, 1 << bits, flat.shape, dtype=torch.int16)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(folder: Path, layers: int, rounds: int, share: float, bits: int) -> list[float]:
    """The delta's share of the bytes, and seconds: whole save and load, making, applying; then
    making with the base on the disk, and loading that base into new arrays and others."""
    state = weights(layers)
    reader, spare = ({key: tensor.clone() for key, tensor in state.items()} for _ in range(2))
    last = tilestone.save_delta(state, folder / "versions", anchor_every=1 << 20)
    times: list[list[float]] = [[] for _ in range(7)]
    report = last.report
    for i in range(rounds):
        base = folder / f"base-{i}"
        tilestone.save(state, base)
        tilestone.load(spare, base)
        change(state, share, bits)
        times[0].append(seconds(lambda: tilestone.save(state, folder / "whole", overwrite=True)))
        times[1].append(seconds(lambda: tilestone.load(dict(state), folder / "whole")))
        made: list[Any] = []
        times[2].append(
            seconds(
                lambda: made.append(
                    tilestone.save_delta(state, folder / "versions", base=last, anchor_every=1 << 20)
                )
            )
        )
        last = made[0]
        report = last.report
        times[3].append(seconds(lambda: tilestone.apply_delta(reader, last.path)))
        new = {key: tensor.shape for key, tensor in state.items()}
        times[5].append(
            seconds(
                lambda: tilestone.load(
                    {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in new.items()}, base
                )
            )
        )
        times[6].append(seconds(lambda: tilestone.load(spare, base)))
        times[4].append(seconds(lambda: tilestone.save_delta(state, folder / f"apart-{i}", base=base)))
        for each in ("whole", base.name, f"apart-{i}"):
            shutil.rmtree(folder / each)
        assert all(torch.equal(reader[key].view(torch.int16), state[key].view(torch.int16)) for key in state), i
    return [report.bytes / report.whole_bytes, *(statistics.median(each) for each in times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="only the first ones of the table")
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    print("| changed | bytes | save | load | make | apply | make and apply | base on disk | load into new | load |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for share, bits in ((0.01, 1), (0.1, 1), (1.0, 4), (1.0, 15))[: options.rows]:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            size, save, load, make, apply, on_disk, new, warm = measure(folder, options.layers, options.rounds, share, bits)
        finally:
            shutil.rmtree(folder)
        name = f"{share:.0%}" + (f", {bits} bits" if share == 1 else "")
        print(
            f"| {name} | {size:.2%} | {save:.2f} | {load:.2f} | {make:.2f} | {apply:.2f} "
            f"| {(make + apply) / (save + load):.2f} | {on_disk - make:+.2f} | {new:.2f} | {warm:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
