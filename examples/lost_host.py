"""A training that survives the loss of a host: its newest steps lie on the hosts' disks, twice.

    python examples/lost_host.py [FOLDER]

Two "hosts" are two processes with a directory each; a real job has one process for each GPU, and
Fast("/nvme/run") on every host. In the middle of the training one host is lost, with its disk. The
job is started again, with a new, empty host in its place, and goes on from the last step that it had
saved, though the run's directory has only every tenth.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tilestone

WORLD, LAST, LOST_AFTER = 2, 14, 7


def next_state(state: dict[str, torch.Tensor], step: int) -> None:
    """One step of "training", which can't be left out or repeated without being noticed."""
    state["momentum"].mul_(0.5).add_(step)
    state["weight"].mul_(1.01).sub_(state["momentum"], alpha=0.1)


def state_of(rank: int) -> dict[str, torch.Tensor]:
    """This rank's part of the model."""
    weight = torch.arange(rank * 1000, (rank + 1) * 1000, dtype=torch.float64)
    return {"weight": weight, "momentum": torch.zeros_like(weight)}


def shards(rank: int, state: dict[str, torch.Tensor]) -> dict[str, object]:
    """The same as parts of the whole model's tensors."""
    return {
        name: tilestone.ShardedTensor.from_rank_offsets(name, tensor, (0, rank, WORLD))
        for name, tensor in state.items()
    }


def train(rank: int, folder: Path, meeting: str) -> None:
    """One rank of the job."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    fast = tilestone.Fast(folder / f"host{rank}", keep=2, copies=1)
    state = state_of(rank)
    with tilestone.CheckpointManager(folder / "run", fast=fast, drain_every=10) as manager:
        _, found = manager.restore(shards(rank, state))
        print(f"rank {rank} begins after step {found or 0}", flush=True)
        for step in range((found or 0) + 1, LAST + 1):
            next_state(state, step)
            manager.save(step, shards(rank, state))
            if found is None and step == LOST_AFTER:
                manager.wait()  # in a job this takes no longer than a step
                (folder / f"reached{rank}").touch()
                time.sleep(3600)  # here the host is lost
    torch.save(state, folder / f"end{rank}.pt")
    dist.destroy_process_group()


def start(folder: Path, number: int) -> list[multiprocessing.process.BaseProcess]:
    """Starts the job, as a scheduler does."""
    spawn = multiprocessing.get_context("spawn")
    meeting = str(folder / f"meeting{number}")
    job = [spawn.Process(target=train, args=(rank, folder, meeting)) for rank in range(WORLD)]
    for process in job:
        process.start()
    return job


def main(folder: Path) -> None:
    job = start(folder, 1)
    while not all((folder / f"reached{rank}").exists() for rank in range(WORLD)):
        assert all(process.is_alive() for process in job)
        time.sleep(0.05)
    for process in job:  # one host is lost, and the scheduler ends the job
        process.kill()
        process.join()
    shutil.rmtree(folder / "host1")
    assert not list((folder / "run").glob("step-*"))

    for process in (job := start(folder, 2)):
        process.join()
        assert process.exitcode == 0
    for rank in range(WORLD):
        expected = state_of(rank)
        for step in range(1, LAST + 1):
            next_state(expected, step)
        found = torch.load(folder / f"end{rank}.pt")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    print(f"no step is lost; the run's directory has {sorted(os.listdir(folder / 'run'))}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
