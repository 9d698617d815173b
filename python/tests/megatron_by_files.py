"""Ranks of a Megatron job without a process group: forks of one process, each with a rank number.

As a program it runs one of its scenarios and prints the result as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import plain_ranks
import torch
import torch.distributed as dist

import tilestone
import tilestone.megatron as megatron

TOKEN = "a run of a Megatron job"
LAYERS = torch.arange(4 * 8 * 12.0).reshape(4, 8, 12)  # layers, rows, columns
NORMS = torch.arange(4 * 12.0).reshape(4, 12)
EMBEDDING = torch.arange(24 * 12.0).reshape(24, 12).to(torch.bfloat16)
COMMON = {"iteration": 12, "args": {"lr": 0.5, "betas": (0.9, 0.95)}, "seen": torch.arange(5)}


def state(
    rank: int, tensor_size: int, pipeline_size: int, mapping: Any, filled: bool
) -> dict[str, Any]:
    """A rank's state in a pipeline whose stages have tensor-parallel layers; empty for a load.

    Norms are replicated on the ranks of a stage, and the first rank has the main replica. The first
    and the last stage have a replica of the embedding. If `mapping` is Tilestone's, each of them
    declares the other one in `holders`.
    """
    tensor, stage = rank % tensor_size, rank // tensor_size
    scale = 1 if filled else 0
    own = range(4 * stage // pipeline_size, 4 * (stage + 1) // pipeline_size)

    def layer(index: int) -> dict[str, Any]:
        return {
            "weight": mapping.ShardedTensor.from_rank_offsets(
                "layers.weight", LAYERS[index].chunk(tensor_size)[tensor].clone() * scale,
                (0, index, 4), (1, tensor, tensor_size), prepend_axis_num=1,
            ),
            "norm": mapping.ShardedTensor.from_rank_offsets(
                "layers.norm", NORMS[index].clone() * scale, (0, index, 4), prepend_axis_num=1,
                replica_id=(0, tensor, 0),
            ),
            "extra": mapping.ShardedObject(
                "layers.extra", f"of layer {index}" if filled else None, (4,), (index,),
                replica_id=(0, tensor, 0),
            ),
        }  # fmt: skip

    made: dict[str, Any] = {"layers": {index: layer(index) for index in own}}
    last = pipeline_size - 1
    if stage in (0, last):
        embedding = mapping.ShardedTensor.from_rank_offsets(
            "embedding", EMBEDDING.chunk(tensor_size)[tensor].clone() * scale,
            (0, tensor, tensor_size), replica_id=(0 if stage == 0 else 1, 0, 0),
        )  # fmt: skip
        if mapping is megatron.mapping and filled and last > 0:
            embedding.holders = (tensor, last * tensor_size + tensor)
        made["embedding"] = embedding
    made["rng"] = mapping.ShardedObject(
        "rng", [rank] if filled else None, (pipeline_size, tensor_size), (stage, tensor)
    )
    return made | COMMON if filled else made


def check(loaded: dict[str, Any], rank: int, tensor_size: int, pipeline_size: int) -> None:
    """Checks a loaded state()."""
    tensor, stage = rank % tensor_size, rank // tensor_size
    own = range(4 * stage // pipeline_size, 4 * (stage + 1) // pipeline_size)
    assert list(loaded["layers"]) == list(own)
    for index, layer in loaded["layers"].items():
        assert torch.equal(layer["weight"], LAYERS[index].chunk(tensor_size)[tensor])
        assert torch.equal(layer["norm"], NORMS[index])
        assert layer["extra"] == f"of layer {index}"
    if "embedding" in loaded:
        assert torch.equal(loaded["embedding"], EMBEDDING.chunk(tensor_size)[tensor])
    assert loaded["iteration"] == 12 and loaded["args"] == COMMON["args"]
    assert torch.equal(loaded["seen"], COMMON["seen"])


def save(path: str, rank: int, token: str = TOKEN, wait: bool = True, **options: Any) -> None:
    """Saves one of 4 ranks, with tensor-parallel size 2 and pipeline-parallel size 2."""
    assert not dist.is_initialized()
    made = options.pop("made", None) or state(rank, 2, 2, megatron.mapping, True)
    given = {"timeout": plain_ranks.LIMIT, "content_metadata": {"format": 2}} | options
    megatron.save(made, path, by_files=tilestone.ByFiles(rank, 4, token, wait=wait), **given)


# ---- Scenarios


def together(path: str) -> list[Any]:
    return plain_ranks.forked(lambda rank: save(path, rank), range(4))


def race(path: str) -> list[Any]:
    """Two concurrent runs. Each of them finds the location empty when it begins."""
    for token in (TOKEN, "another run of it"):
        plain_ranks.forked(lambda rank: save(path, rank, token, wait=False), [0])  # noqa: B023

    def body(number: int) -> None:
        save(path, number // 2, TOKEN if number % 2 else "another run of it", wait=False)

    said = plain_ranks.forked(body, range(2, 8))
    left = [each.save_id for each in tilestone.unpublished(path)]
    tilestone.gc(path, delete=True)
    return [said, len(left), len(tilestone.unpublished(path))]


def dead_publisher(path: str) -> list[Any]:
    """The remaining files if the last rank dies after it has claimed the location by .metadata."""
    for rank in range(4):  # separate locations, so that no rank finds all reports
        own = f"{path}-{rank}"
        plain_ranks.forked(lambda rank: save(own, rank, wait=False), [rank])  # noqa: B023
        shutil.copytree(own, path, dirs_exist_ok=True)
    whole = f"{path}-whole"
    shutil.copytree(path, whole)
    save_id = tilestone.publish(whole)
    shutil.copy(f"{whole}/.metadata", path)
    with open(f"{path}/.tilestone/{save_id}.outcome", "w") as outcome:
        outcome.write("published\n")
    try:
        tilestone.open(path)
        opening = ""
    except tilestone.NotFoundError as error:
        opening = str(error)
    second = plain_ranks.forked(lambda rank: save(path, rank, "another run of it"), [0])
    return [save_id, opening, *second]


if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    print(json.dumps(result))
