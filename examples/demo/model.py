"""A small character-level GPT, and its sharding over a mesh of ranks."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    layers: int = 3
    width: int = 96
    heads: int = 4
    context: int = 64
    batch: int = 12  # sequences per step over all ranks; divisible by 1, 2 and 3
    characters: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a feed-forward layer. Under tensor parallelism a rank has some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.dropout = shape.dropout
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (self.heads(project(y)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.feed_norm(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Takes characters and returns the logits of the next characters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.characters, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.characters, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.tokens(characters) + self.places(torch.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TENSOR_PARALLEL = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def lay_over(model: GPT, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism over the mesh dim "tp", if there is one, then FSDP2 over "dp"."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
    data = mesh["dp"] if "tp" in names else mesh
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)


def standard_library_text(limit: int = 2_000_000) -> torch.Tensor:
    """The source of Python's standard library as characters, a text that every machine has."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:limit]), dtype=torch.uint8).clamp(max=127)


def batch(text: torch.Tensor, shape: Shape, step: int, part: int, parts: int) -> torch.Tensor:
    """This data-parallel rank's sequences of a step. Together they are the same on any mesh."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - shape.context - 1, (shape.batch,), generator=generator)
    mine = starts[part * shape.batch // parts : (part + 1) * shape.batch // parts]
    return torch.stack([text[s : s + shape.context + 1] for s in mine.tolist()]).long()
