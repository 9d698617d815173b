"""What is saved and loaded: one function a case."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import ranks
from contestants import (
    Contestant,
    Dcp,
    Safetensors,
    SafetensorsMapped,
    TensorStore,
    Tensors,
    Tilestone,
    TorchCheckpointing,
    TorchMapped,
    TorchMmap,
    TorchSave,
)
from measure import CONTROL, Case, run_case


def everybody() -> list[Contestant]:
    return [
        Tilestone(),
        Tilestone(CONTROL),
        Dcp(1),
        Dcp(os.cpu_count() or 1),
        TorchSave(),
        TorchMmap(),
        TorchMapped(),
        Safetensors(),
        SafetensorsMapped(),
        TensorStore(),
        TorchCheckpointing(),
    ]


def _copies(tensors: Tensors) -> Tensors:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def large(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """2 GiB in large tensors from 1 rank."""
    rows = max(1, int(4096 * scale))
    tensors = {f"w{i}": torch.randn(rows, 4096 * 8) for i in range(4)}
    case = Case("large, 1 rank", large.__doc__ or "", sum(t.nbytes for t in tensors.values()))
    return run_case(case, everybody(), tensors, _copies(tensors), root, rounds, seed)


def small(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """20,000 tensors of 4 KiB from 1 rank."""
    count = max(1, int(20_000 * scale))
    tensors = {f"layer{i // 10}.p{i % 10}": torch.randn(1024) for i in range(count)}
    case = Case("20,000 × 4 KiB", small.__doc__ or "", sum(t.nbytes for t in tensors.values()))
    who = [c for c in everybody() if not isinstance(c, TensorStore)]  # one directory a tensor
    return run_case(case, who, tensors, _copies(tensors), root, rounds, seed)


def large_four(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """4 ranks of 0.5 GiB each, tensors sharded by rows."""
    return ranks.same_layout("large, 4 ranks", large_four.__doc__ or "", root, rounds, seed, scale)


def gpt(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """A GPT's parameters and AdamW state, about 1.5 GB, FSDP2 × TP layout on 2 × 2 ranks."""
    return ranks.gpt("GPT, 2 × 2 ranks", gpt.__doc__ or "", root, rounds, seed, scale)


def reshard_four(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """1 GiB saved by rows on 4 ranks, loaded by columns on 4."""
    return ranks.reshard("row to column, 4 ranks", reshard_four.__doc__ or "", 4, root, rounds,
                         seed, scale)


def reshard_eight(root: Path, rounds: int, seed: int, scale: float) -> Case:
    """1 GiB saved by rows on 8 ranks, loaded by columns on 8."""
    return ranks.reshard("row to column, 8 ranks", reshard_eight.__doc__ or "", 8, root, rounds,
                         seed, scale)


ALL = {
    "large": large,
    "small": small,
    "large4": large_four,
    "gpt": gpt,
    "reshard4": reshard_four,
    "reshard8": reshard_eight,
}
