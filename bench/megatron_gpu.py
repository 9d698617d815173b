"""Megatron-Core's GPT on one GPU: trains, saves and resumes with tilestone.megatron.training.

    python bench/megatron_gpu.py FOLDER [--cpu]

It prints the times of saves and loads, how long saves in the background keep the training waiting,
and the times of Megatron-Core's own save of the same state. The exit status is 1 if the resumed
training has other losses or other weights than the uninterrupted one. --cpu: a small model, without
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples" / "megatron"))

import gpt  # noqa: E402
import on_cpu  # noqa: E402

import tilestone.megatron  # noqa: E402
from tilestone.megatron import training  # noqa: E402
from tilestone.megatron.training.async_utils import maybe_finalize_async_save  # noqa: E402

LAYOUT = on_cpu.Layout()
LARGE = gpt.Shape(
    layers=12, width=1536, heads=16, vocabulary=32000, context=256, gated=True, half=True
)


class Run:
    """A model, its optimizer and its progress."""

    def __init__(self, cpu: bool, folder: pathlib.Path, start: pathlib.Path | None = None) -> None:
        self.cpu = cpu
        self.shape = gpt.Shape(gated=True, half=True) if cpu else LARGE
        chunks = gpt.make_chunks(self.shape, LAYOUT)
        if not cpu:
            chunks = [each.cuda() for each in chunks]
        self.models = gpt.wrapped(chunks, use_distributed_optimizer=True)
        self.optimizer = gpt.make_optimizer(self.models)
        self.step = 0
        self.context: dict[str, Any] = {}
        self.arguments = argparse.Namespace(
            save=str(folder),
            load=start and str(start),
            ckpt_step=2 if start else None,
            exit_on_missing_checkpoint=True,
            use_distributed_optimizer=True,
            async_save=False,
        )

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call and what it gave to the GPU take."""
        self.sync()
        started = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - started

    def sync(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def train(self, last: int) -> list[float | None]:
        losses = []
        while self.step < last:
            losses.append(gpt.train_step(self.models, self.optimizer, self.shape, self.step))
            self.step += 1
        return losses

    def save(self) -> None:
        training.save_checkpoint(
            self.step, self.models, self.optimizer, None, 0, self.context, args=self.arguments
        )

    def load(self) -> None:
        self.step, _ = training.load_checkpoint(
            self.models, self.optimizer, None, args=self.arguments
        )

    def weights(self) -> list[torch.Tensor]:
        return [each.detach().cpu() for model in self.models for each in model.parameters()]

    def state(self) -> dict[str, Any]:
        """A sharded state dict. A save of Megatron-Core changes the shapes of what is in it."""
        model = gpt.unwrapped(self.models[0]).sharded_state_dict()
        kind = {"distrib_optim_sharding_type": "dp_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, metadata=kind)
        return {"model": model, "optimizer": optimizer}


def compare(cpu: bool, folder: pathlib.Path) -> bool:
    """Whether a resumed training is the uninterrupted one."""
    run = Run(cpu, folder / "run")
    run.train(2)
    first = run.seconds(run.save)
    losses = run.train(4)
    again = run.seconds(run.save)
    path = pathlib.Path(training.get_checkpoint_name(str(folder / "run"), 2, return_base_dir=True))
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    print(f"a checkpoint of {size / 2**30:.2f} GiB; save_checkpoint: {first:.3f} s, then {again:.3f} s")
    resumed = Run(cpu, folder / "resumed", start=folder / "run")
    gpt.fill(resumed.models, lambda key, shape: torch.zeros(shape))
    print(f"load_checkpoint: {resumed.seconds(resumed.load):.3f} s")
    same = losses == resumed.train(4) and all(
        torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for ours, theirs in zip(resumed.weights(), run.weights(), strict=True)
    )
    print(f"the resumed training: {'the same losses and weights' if same else 'DIFFERS'}")
    return same


def measure_background(cpu: bool, folder: pathlib.Path) -> None:
    run = Run(cpu, folder / "background", start=folder / "run")
    run.load()
    run.arguments.async_save = True
    blocked = []
    for last in range(3, 7):
        run.train(last)
        blocked.append(run.seconds(run.save))
        maybe_finalize_async_save(run.context, blocking=True)
    maybe_finalize_async_save(run.context, blocking=True, terminate=True)
    waits = ", ".join(f"{each:.3f}" for each in blocked)
    print(f"save_checkpoint in the background blocked for {waits} s")


def measure_stock(cpu: bool, folder: pathlib.Path) -> None:
    from megatron.core import dist_checkpointing

    run = Run(cpu, folder / "none")
    run.train(1)
    for name, save in (
        ("megatron.core.dist_checkpointing", dist_checkpointing.save),
        ("tilestone.megatron", tilestone.megatron.save),
    ):
        times = []
        for number in range(3):
            path = folder / f"{name}-{number}"
            path.mkdir()
            state = run.state()
            times.append(run.seconds(lambda: save(state, str(path))))
        print(f"{name}.save: median {statistics.median(times):.3f} s of {len(times)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="where checkpoints are written; new")
    parser.add_argument("--cpu", action="store_true", help="a small model, without a GPU")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    store = dist.FileStore(str(folder / "store"), 1)
    if options.cpu:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        there = torch.device("cuda", 0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=there
        )
        on_cpu.import_megatron()
    with on_cpu.on_cpu() if options.cpu else contextlib.nullcontext(), on_cpu.laid_over(LAYOUT):
        same = compare(options.cpu, folder)
        measure_background(options.cpu, folder)
        measure_stock(options.cpu, folder)
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
