"""What `reuse` saves: bytes, seconds and CPU of each step of a run, with it and without it.

    reuse.py [--mib 1024] [--steps 8] [--rounds 3] [--dir DIR]

States, of tensors of 8 MiB: LoRA (95 % frozen), a mixture of experts of which a step touches one of
eight (with a part that every step changes), dense. With and without `reuse` take turns. Figures are
medians of the steps from the third on, in which an unchanged array is shared; CPU is that of the
process, per GiB of the state.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tilestone

EACH = 8 << 20  # bytes of a tensor
EXPERTS = 8

State = dict[str, torch.Tensor]


def lora(state: State, step: int) -> list[str]:
    """The keys that a step changes."""
    return list(state)[: max(1, len(state) // 20)]


def experts(state: State, step: int) -> list[str]:
    keys = list(state)
    shared = max(1, len(keys) // 20)
    each = (len(keys) - shared) // EXPERTS
    first = shared + step % EXPERTS * each
    return keys[:shared] + keys[first : first + each]


def dense(state: State, step: int) -> list[str]:
    return list(state)


def run(
    folder: Path, mib: int, steps: int, touched: Callable[[State, int], list[str]], reuse: bool
) -> list[tuple[int, float, float]]:
    """Bytes written, seconds and CPU seconds of each save."""
    state = {f"w{i:04}": torch.randn(EACH // 4) for i in range((mib << 20) // EACH)}
    figures = []
    with tilestone.Session() as session:
        for step in range(steps):
            for key in touched(state, step):
                state[key].add_(0.01)
            earlier = folder / str(step - 1) if reuse and step > 0 else None
            cpu, begin = time.process_time(), time.monotonic()
            result = session.save(state, folder / str(step), reuse=earlier)
            seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
            figures.append((result.bytes_written, seconds, cpu))
            if step > 1:
                shutil.rmtree(folder / str(step - 2))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("build/bench/reuse"))
    given = parser.parse_args()
    print("| state | reuse | bytes written | seconds | CPU seconds per GiB |\n|---|---|---|---|---|")
    for name, touched in (("LoRA", lora), ("experts", experts), ("dense", dense)):
        figures: dict[bool, list[tuple[int, float, float]]] = {False: [], True: []}
        for turn in range(2 * given.rounds):
            reuse = turn % 2 == 1
            shutil.rmtree(given.dir, ignore_errors=True)
            steps = run(given.dir, given.mib, given.steps, touched, reuse)
            figures[reuse] += steps[2:]
        shutil.rmtree(given.dir, ignore_errors=True)
        for reuse, steps in figures.items():
            size, seconds, cpu = (statistics.median(column) for column in zip(*steps, strict=True))
            share = size / (given.mib << 20)
            per_gib = cpu * 1024 / given.mib
            print(f"| {name} | {'yes' if reuse else 'no'} | {share:.2f} of the state "
                  f"| {seconds:.2f} | {per_gib:.2f} |")


if __name__ == "__main__":
    main()
