"""Trains an FSDP2 model on two CPU ranks and saves it while the training goes on.

    python examples/async_training.py [FOLDER]

Rank 0 prints the mean time of a step without saves, with blocking saves, and with saves in the
background, and how long each save kept the training waiting. In the end the last checkpoint is
loaded and compared.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import tilestone

RANKS = 2
STEPS = 30
EVERY = 10  # steps from one save to the next
WIDTH = 1024


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model, sharded over all ranks, and its optimizer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step}


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    save: Callable[[dict[str, Any], int], object] | None,
) -> tuple[float, list[float]]:
    """Trains STEPS steps. Returns the seconds of a step without saves, and of each save."""
    batch = torch.randn(64, WIDTH)
    steps, saves = 0.0, []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += time.perf_counter() - began
        if save is not None and step % EVERY == 0:
            began = time.perf_counter()
            save(state_of(model, optimizer, step), step)
            saves.append(time.perf_counter() - began)
    return steps / STEPS, saves


def run(rank: int, folder: str) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    path = pathlib.Path(folder)
    model, optimizer = make()
    train(model, optimizer, None)  # warm up: the optimizer has its state afterwards

    def blocking(state: dict[str, Any], step: int) -> None:
        tilestone.save(state, path / f"blocking-{step}")

    saving: list[tilestone.AsyncSave] = []

    def background(state: dict[str, Any], step: int) -> None:
        saving.append(tilestone.async_save(state, path / f"step-{step}"))

    for name, save in (("without saves", None), ("save", blocking), ("async_save", background)):
        seconds, saves = train(model, optimizer, save)
        if rank == 0:
            waits = ", ".join(f"{1000 * each:.0f}" for each in saves)
            print(f"{name}: {1000 * seconds:.1f} ms a step" + (f"; saves: {waits} ms" if waits else ""))
    result = saving[-1].result()  # the last checkpoint is durable
    expected = state_of(model, optimizer, STEPS)
    before = [value.clone() for value in expected["model"].values()]
    for value in expected["model"].values():
        value.to_local().zero_()
    tilestone.load(expected, path / f"step-{STEPS}")
    same = all(torch.equal(new.to_local(), old.to_local())
               for new, old in zip(expected["model"].values(), before, strict=True))
    if rank == 0:
        print(f"published {result.save_id}; loaded and compared: {'equal' if same else 'DIFFERENT'}")
    dist.destroy_process_group()
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as place:
        mp.spawn(run, args=(place,), nprocs=RANKS)
