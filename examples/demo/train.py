"""One rank of the demo's training job.

    train.py MESH LAST [--load CKPT] [--save CKPT --save-stock CKPT --at STEP] --report FILE

MESH is "2x2" (FSDP2 x TP), or a number of ranks (FSDP2 alone). The launcher sets RANK, WORLD_SIZE
and STORE. Rank 0 writes the losses to FILE, and all whole tensors after loading, at the save and
at the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from model import GPT, Shape, batch, lay_over, standard_library_text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tilestone


def make_mesh(words: str) -> DeviceMesh:
    sizes = tuple(int(word) for word in words.split("x"))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


class Job:
    """Model, optimizer and step of one rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.shape = Shape()
        self.mesh = mesh
        names = mesh.mesh_dim_names or ()
        self.part, self.parts = mesh.get_local_rank("dp"), mesh["dp"].size()
        self.copy = mesh.get_local_rank("tp") if "tp" in names else 0
        torch.manual_seed(0)
        self.model = GPT(self.shape)
        lay_over(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.text = standard_library_text()
        self.step = 0
        # All ranks of a tensor-parallel group draw the same dropout masks.
        torch.manual_seed(1000 + self.part)

    def train_step(self) -> float:
        """Runs one step. Returns the mean loss over all ranks."""
        self.step += 1
        characters = batch(self.text, self.shape, self.step, self.part, self.parts)
        self.optimizer.zero_grad()
        logits = self.model(characters[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def tensors(self) -> dict[str, Any]:
        """The state dicts of model and optimizer: DTensors by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def rng(self) -> tilestone.ShardedObject:
        """This data-parallel rank's generator state. One of its replicas is saved."""
        return tilestone.ShardedObject(
            "rng", torch.get_rng_state(), (self.parts,), (self.part,), replica_id=self.copy
        )

    def load(self, path: str) -> dict[str, torch.Tensor]:
        """Loads a checkpoint of any mesh. Returns the loaded tensors, each one whole."""
        # Moments exist only after a step, or when get_state_dict creates them.
        wanted: dict[str, Any] = {**self.tensors(), "step": None}
        with tilestone.open(path) as opened:
            same_mesh = sum(key.startswith("rng/") for key in opened.keys()) == self.parts
        if same_mesh:
            wanted["rng"] = self.rng()
        loaded = tilestone.load(wanted, path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        self.step = loaded["step"]
        if same_mesh:
            torch.set_rng_state(loaded["rng"])
        return whole(self.tensors())


def whole(tree: Any, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The whole tensors of a tree by dotted path. All ranks must call this."""
    if isinstance(tree, DTensor):
        return {".".join(path): tree.full_tensor().detach().clone()}
    if isinstance(tree, torch.Tensor):
        return {".".join(path): tree.detach().clone()}
    out: dict[str, torch.Tensor] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            out.update(whole(value, (*path, str(key))))
    return out


def save(job: Job, path: str, stock_path: str, report: dict[str, Any]) -> None:
    """Saves the same state with Tilestone and with stock PyTorch."""
    state = {**job.tensors(), "step": job.step, "rng": job.rng()}
    started = time.perf_counter()
    tilestone.save(state, path, overwrite=True)
    report["save_seconds"] = time.perf_counter() - started
    dcp.save({**job.tensors(), "step": job.step}, checkpoint_id=stock_path)
    report["saved"] = whole(job.tensors())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("last", type=int)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--save-stock")
    parser.add_argument("--at", type=int)
    parser.add_argument("--report", required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    # full_tensor() under FSDP2 x TP takes two gathers, and torch logs a warning each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    job = Job(make_mesh(options.mesh))
    report: dict[str, Any] = {"losses": {}}
    if options.load:
        report["loaded"] = job.load(options.load)
    while job.step < options.last:
        report["losses"][job.step] = job.train_step()
        if rank == 0 and (job.step % 10 == 0 or job.step == options.last):
            print(f"    step {job.step:3d}  loss {report['losses'][job.step - 1]:.6f}", flush=True)
        if job.step == options.at:
            save(job, options.save, options.save_stock, report)
    report["final"] = whole(job.tensors())
    if rank == 0:
        torch.save(report, options.report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
