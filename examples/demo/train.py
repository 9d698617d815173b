"""One rank of the demo's training job."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
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

KILLED = 2  # the rank that dies in the middle of a save
TIMEOUT = 5  # seconds for that save; the default is 30 minutes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the ranks of one run do."""

    mesh: tuple[int, ...]  # (2, 2): FSDP2 x TP; (3,): FSDP2 alone
    run: Path  # the run's directory
    last: int  # the last step
    resume: int | None = None  # the step to load
    save: int | None = None  # the step to save, in a stock checkpoint too
    kill: int | None = None  # from this step on, every tenth is saved, until a rank dies in the save
    managed: str | None = None  # the place of another run, in which every tenth step is saved

    def checkpoint(self, step: int) -> str:
        return str(self.run / f"step-{step}")

    def stock(self, step: int) -> str:
        return str(self.run.parent / "stock" / f"step-{step}")


class Job:
    """Model, optimizer and step of one rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.shape = Shape()
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

    def state(self) -> dict[str, Any]:
        """What is saved. Of each data-parallel rank's generator state one replica is written."""
        rng = tilestone.ShardedObject(
            "rng", torch.get_rng_state(), (self.parts,), (self.part,), replica_id=self.copy
        )
        return {**self.tensors(), "step": self.step, "rng": rng}

    def load(self, path: str) -> None:
        """Loads a checkpoint of any mesh."""
        wanted = self.state()
        with tilestone.open(path) as opened:
            same_mesh = sum(key.startswith("rng/") for key in opened.keys()) == self.parts
        if not same_mesh:
            del wanted["rng"]
        loaded = tilestone.load(wanted, path)
        self.take(loaded)
        if same_mesh:
            torch.set_rng_state(loaded["rng"])

    def take(self, loaded: Mapping[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        self.step = loaded["step"]


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


@contextlib.contextmanager
def timed(report: dict[str, Any], name: str) -> Iterator[None]:
    """Puts the milliseconds of a call of all ranks into the report."""
    dist.barrier()
    started = time.perf_counter()
    yield
    report[name] = (time.perf_counter() - started) * 1000


def save_both(job: Job, plan: Plan, report: dict[str, Any]) -> None:
    """Saves the same state with Tilestone and with stock PyTorch."""
    state = job.state()
    with timed(report, "save"):
        tilestone.save(state, plan.checkpoint(job.step))
    tensors = {**job.tensors(), "step": job.step}
    with timed(report, "stock_save"):
        dcp.save(tensors, checkpoint_id=plan.stock(job.step))
    report["saved"] = whole(job.tensors())


def load_both(job: Job, plan: Plan, step: int, report: dict[str, Any]) -> None:
    """Loads a checkpoint into the job; for comparison, stock PyTorch loads its own."""
    tensors = job.tensors()
    with timed(report, "stock_load"):
        dcp.load(tensors, checkpoint_id=plan.stock(step))
    with timed(report, "load"):
        tilestone.load(job.tensors(), plan.checkpoint(step))
    job.load(plan.checkpoint(step))
    report["loaded"] = whole(job.tensors())


def die_in_the_save(folder: Path) -> None:
    """Makes SIGKILL end this process as soon as it has created its data file in `folder`."""

    def watch() -> None:
        while not list(folder.glob(f"*__{KILLED}_0.distcp")):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def killed_in_a_save(job: Job, plan: Plan, report: dict[str, Any]) -> bool:
    """Saves; one rank is killed. False if the save was faster."""
    path = plan.checkpoint(job.step)
    if dist.get_rank() == KILLED:
        die_in_the_save(Path(path))
    started = time.perf_counter()
    try:
        tilestone.save(job.state(), path, timeout=TIMEOUT)
        return False
    except tilestone.CheckpointError as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["error_after"] = time.perf_counter() - started
        return True


def train_with_manager(job: Job, plan: Plan, report: dict[str, Any]) -> None:
    """Goes on from the step that was loaded, or restores the newest one, without random states."""
    with tilestone.CheckpointManager(plan.managed, keep=tilestone.Keep(last=2)) as manager:
        if plan.resume is None:
            job.take(manager.restore({**job.tensors(), "step": 0})[0])
        while job.step < plan.last:
            loss = job.train_step()
            report["losses"][job.step] = loss
            if job.step % 10 == 0:
                manager.save(job.step, {**job.tensors(), "step": job.step})
    report["managed"] = whole(job.tensors())


def train(job: Job, plan: Plan, report: dict[str, Any]) -> bool:
    """Trains until the last step. False if a save failed, because a rank was killed in it."""
    while job.step < plan.last:
        loss = job.train_step()
        report["losses"][job.step] = loss
        if dist.get_rank() == 0 and job.step % 10 == 0:
            print(f"    step {job.step:3d}  loss {loss:.6f}", flush=True)
        if job.step == plan.save:
            save_both(job, plan, report)
        if plan.kill is not None and job.step >= plan.kill and job.step % 10 == 0:
            if killed_in_a_save(job, plan, report):
                return False
    return True


def run_rank(plan: Plan, rank: int, world: int, store: Path, file: Path) -> None:
    """Rank 0 writes what happened to `file`: losses by step, whole tensors, times."""
    # full_tensor() under FSDP2 x TP takes two gathers, and torch logs a warning each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", plan.mesh, mesh_dim_names=("dp", "tp")[: len(plan.mesh)])
    job = Job(mesh)
    report: dict[str, Any] = {"losses": {}}
    if plan.resume is not None:
        load_both(job, plan, plan.resume, report)
    if plan.managed is not None:
        train_with_manager(job, plan, report)
    complete = train(job, plan, report)
    if rank == 0:
        torch.save(report, file)
    if complete:
        dist.destroy_process_group()
