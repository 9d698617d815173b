"""States, hosts' directories and managers for the tests of the fast tier."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy

import tilestone

ROWS = 60


def state_of(step: int) -> dict[str, Any]:
    return {"w": numpy.full(4000, step, numpy.float32), "step": step}


def shard_of(rank: int, world: int, axis: int, data: Any) -> tilestone.ShardedTensor:
    """This rank's part of a matrix that is cut along an axis."""
    return tilestone.ShardedTensor.from_rank_offsets("w", data, (axis, rank, world))


def sharded_state(rank: int, world: int, step: int, axis: int = 0) -> dict[str, Any]:
    whole = numpy.arange(ROWS * ROWS, dtype=numpy.float64).reshape(ROWS, ROWS) + step
    part = numpy.ascontiguousarray(numpy.split(whole, world, axis)[rank])
    return {"w": shard_of(rank, world, axis, part), "step": step, "mean": numpy.full(9, step)}


def steps_in(run: pathlib.Path) -> list[int]:
    return [int(each.name[5:]) for each in sorted(run.glob("step-*"))]


def on_host(fast: pathlib.Path) -> list[int]:
    return sorted(int(each.name[5:13]) for each in fast.glob("step-*/.kept") for each in [each.parent])


def damage(file: pathlib.Path) -> None:
    """Changes one bit of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def manager_of(run: Any, fast: Any, **options: Any) -> tilestone.CheckpointManager:
    if not isinstance(fast, tilestone.Fast):
        fast = tilestone.Fast(fast)
    return tilestone.CheckpointManager(run, fast=fast, **options)


def train(
    rank: int, world: int, folder: str, steps: list[int], drain_every: int, axis: int = 0
) -> Any:
    """Restores, saves the steps, and returns what was restored."""
    with manager_of(
        f"{folder}/run", f"{folder}/host{rank}", drain_every=drain_every
    ) as manager:
        template = sharded_state(rank, world, 0, axis)
        restored, found = manager.restore(template)
        for step in steps:
            manager.save(step, sharded_state(rank, world, step, axis))
    expected = sharded_state(rank, world, found or 0, axis)
    assert restored["step"] == (found or 0)
    numpy.testing.assert_array_equal(template["w"].data, expected["w"].data)
    numpy.testing.assert_array_equal(restored["mean"], expected["mean"])
    return found
