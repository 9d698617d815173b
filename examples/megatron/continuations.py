"""Trains small Megatron-Core GPTs, and resumes them from their checkpoints in other layouts.

    continuations.py [FOLDER]

Four CPU ranks over gloo train each model for four steps, with a checkpoint after two. Each layout
resumes from that checkpoint and trains the remaining two steps. The program prints one row for each
resumed run. The row compares the loaded state with the checkpoint, and the final state with that
of the uninterrupted run.

The checkpoints are written to FOLDER, which must not exist. The exit status is 1 if a resumed run
differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import gpt
import on_cpu
import torch
import torch.distributed as dist
from on_cpu import Layout

import tilestone
from tilestone.megatron import training

RANKS = 4
SAVED_AT, LAST = 2, 4
# Another layout adds the same numbers in another order, so results differ by rounding.
TOLERANCE = 1e-5

# Name -> the model, the layout that trains it from the start, and the layouts that resume it.
MODELS: dict[str, tuple[gpt.Shape, Layout, list[Layout]]] = {
    "dense": (
        gpt.Shape(gated=True),
        Layout(tp=2, pp=2),
        [Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, vpp=2), Layout(tp=2), Layout()],
    ),
    "experts": (
        gpt.Shape(layers=2, experts=4, gated=True),
        Layout(pp=2, ep=2),
        [Layout(pp=2, ep=2), Layout(ep=4), Layout(tp=2, ep=2)],
    ),
    # The random number sequence continues only in the same layout.
    "dropout": (gpt.Shape(layers=2, dropout=0.1), Layout(tp=2, pp=2), [Layout(tp=2, pp=2)]),
}  # fmt: skip


@dataclasses.dataclass
class Continuation:
    """A row of the table: the differences after loading and after the last step."""

    model: str
    layout: str
    is_same_layout: bool
    tensors: int
    missing: int
    mismatched: int
    loaded_delta: float
    last_delta: float

    @property
    def is_right(self) -> bool:
        if self.missing or self.mismatched or self.loaded_delta:
            return False
        return self.last_delta <= (0.0 if self.is_same_layout else TOLERANCE)


class Training:
    """A rank's part of a model, its optimizer and its progress, in one layout.

    Args:
        folder: the folder to which the run saves.
        start: the folder of the run to resume from, after SAVED_AT steps. None starts from the
            beginning.
    """

    def __init__(
        self, shape: gpt.Shape, layout: Layout, folder: Path, start: Path | None = None
    ) -> None:
        self.shape = shape
        self.models = gpt.wrapped(gpt.make_chunks(shape, layout), use_distributed_optimizer=True)
        self.optimizer = gpt.make_optimizer(self.models)
        self.step = 0
        # The arguments of a training program. All others have Megatron's defaults.
        self.arguments = argparse.Namespace(
            save=str(folder),
            load=start and str(start),
            ckpt_step=SAVED_AT,
            exit_on_missing_checkpoint=True,
            use_distributed_optimizer=True,
            dist_ckpt_optim_fully_reshardable=True,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
        )
        gpt.fill(self.models, gpt.initial)
        self.optimizer.reload_model_params()

    def save(self) -> None:
        # No process groups are given, so those of Megatron-Core's parallel_state are used.
        training.save_checkpoint(
            self.step, self.models, self.optimizer, None, 0, args=self.arguments
        )

    def load(self) -> None:
        self.step, _ = training.load_checkpoint(
            self.models, self.optimizer, None, args=self.arguments
        )

    def train(self, last: int) -> None:
        while self.step < last:
            gpt.train_step(self.models, self.optimizer, self.shape, self.step)
            self.step += 1


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, each one whole."""
    with tilestone.open(path, framework="torch") as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.tensor_keys()}


def delta(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two corresponding elements, over the common keys."""
    deltas = [
        float((left[key].double() - right[key].double()).abs().max())
        for key in left.keys() & right.keys()
        if left[key].shape == right[key].shape
    ]
    return max(deltas)


def compare(name: str, layout: Layout, trained: Path, mine: Path) -> Continuation:
    """The row of a resumed run, from both runs' checkpoints after SAVED_AT and LAST steps."""

    def both(step: int) -> list[dict[str, torch.Tensor]]:
        folders = (trained, mine)
        names = [training.get_checkpoint_name(f, step, return_base_dir=True) for f in folders]
        return [tensors_of(Path(name)) for name in names]

    saved, loaded = both(SAVED_AT)
    shared = saved.keys() & loaded.keys()
    return Continuation(
        name,
        str(layout),
        is_same_layout=layout == MODELS[name][1],
        tensors=len(saved),
        missing=len(saved.keys() ^ loaded.keys()),
        mismatched=sum(saved[key].shape != loaded[key].shape for key in shared),
        loaded_delta=delta(saved, loaded),
        last_delta=delta(*both(LAST)),
    )


def go_on(name: str, folder: Path) -> list[Continuation]:
    """Trains a model without interruption, then resumes it in each layout. All ranks call this."""
    shape, first, layouts = MODELS[name]
    trained = folder / "trained"
    with on_cpu.laid_over(first):
        run = Training(shape, first, trained)
        for step in (SAVED_AT, LAST):
            run.train(step)
            run.save()
    rows = []
    for layout in layouts:
        mine = folder / str(layout).replace(" ", "")
        with on_cpu.laid_over(layout):
            run = Training(shape, layout, mine, start=trained)
            run.load()
            run.save()
            run.train(LAST)
            run.save()
        if dist.get_rank() == 0:
            rows.append(compare(name, layout, trained, mine))
    return rows


def run_rank(rank: int, folder: Path) -> None:
    """Runs one rank. Rank 0 prints the table, and exits with 1 if a row is wrong."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    rows = []
    with on_cpu.on_cpu():
        for name in MODELS:
            rows += go_on(name, folder / name)
    dist.destroy_process_group()
    if rank == 0:
        print_table(rows)
        sys.exit(any(not row.is_right for row in rows))


def print_table(rows: list[Continuation]) -> None:
    heads = ("layout", "tensors", "missing", "mismatched", "max_delta loaded", "max_delta last")
    widths = (22, 7, 7, 10, 16, 14)
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1].model != row.model:
            shape, first, _ = MODELS[row.model]
            print(f"\n{row.model}: trained {LAST} steps at {first}, saved after {SAVED_AT}")
            print("  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)))
        deltas = [f"{x:.1e}" if x else "0.0" for x in (row.loaded_delta, row.last_delta)]
        cells = (row.layout, row.tensors, row.missing, row.mismatched, *deltas)
        text = "  ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True))
        print(text + ("" if row.is_right else "  WRONG"))


def main() -> None:
    os.environ.setdefault("USE_LIBUV", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_cpu.import_megatron()  # once, for all ranks
    gc.freeze()  # so that collections in the ranks skip the imported modules
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/checkpoints").resolve()
        folder.mkdir(parents=True)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
            wait(running)
            if any(rank.exitcode for rank in ranks):  # the others would wait for it forever
                for rank in ranks:
                    rank.kill()
        sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
