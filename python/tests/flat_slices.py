"""Slices of a flattened tensor, for tests of entities."""

from __future__ import annotations

from typing import Any

import torch

from tilestone.megatron.mapping import ShardedTensor


def flat_slice(
    begin: int, end: int, shape: tuple[int, ...], *offsets: Any, **rest: Any
) -> ShardedTensor:
    """Elements [begin, end) of a flattened part of this shape of the tensor "w"."""
    data = torch.arange(float(begin), float(end))
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, shape, *offsets, flattened_range=slice(begin, end), **rest
    )
