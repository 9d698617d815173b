"""One of several real torch ranks is killed with SIGKILL during saves over a checkpoint."""

from __future__ import annotations

import pathlib
import random
import time
from typing import Any

import conftest
import numpy
import pytest
import ranks
import torch

import tilestone

WORLD = 3
TIMEOUT = 10  # seconds for a save
SLACK = 15  # seconds, for delays on a busy machine
ELEMENTS = 40_000  # per rank


def numbers(generation: int, first: int, count: int) -> torch.Tensor:
    """Elements that encode their generation and position."""
    return (generation << 32) + torch.arange(first, first + count)


def state_of(rank: int, world: int, generation: int) -> dict[str, Any]:
    mine = numbers(generation, rank * ELEMENTS, ELEMENTS)
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, rank, world)),
        "plain": numbers(generation, 0, 3001),
        "step": generation,
    }


def save_for_ever(rank: int, world: int, path: str, first: int) -> dict[str, Any]:
    """Saves generations until one fails. Returns which one, its error, and the time."""
    log = pathlib.Path(f"{path}.{rank}")
    done = -1
    generation = first
    while True:
        log.write_text(str(generation))
        try:
            tilestone.save(
                state_of(rank, world, generation), path, overwrite=True, timeout=TIMEOUT,
                resources=tilestone.Resources(threads=1),
            )
        except tilestone.CheckpointError as error:
            ended = time.monotonic()
            kind = type(error).__name__
            return {"done": done, "kind": kind, "text": str(error), "ended": ended}
        done = generation
        generation += 1


def wait_until_begun(path: str, first: int) -> None:
    for _ in range(12000):
        if all(begun_by(path, rank) >= first for rank in range(WORLD)):
            return
        time.sleep(0.01)
    raise AssertionError("a rank does not begin a save")


def begun_by(path: str, rank: int) -> int:
    """The last generation that a rank began; -1 before the first, and during a write of the log."""
    log = pathlib.Path(f"{path}.{rank}")
    text = log.read_text() if log.exists() else ""
    return int(text) if text else -1


def begun_last(path: str) -> int:
    """The newest generation that any rank began."""
    return max(begun_by(path, rank) for rank in range(WORLD))


def whole_generation(path: str) -> int:
    """The generation of the existing checkpoint. Fails unless it is whole, bit for bit."""
    with tilestone.open(path) as opened:
        generation = opened["step"]
        whole = numbers(generation, 0, WORLD * ELEMENTS).numpy()
        assert numpy.array_equal(opened.read("w"), whole)
        assert numpy.array_equal(opened.read("plain"), numbers(generation, 0, 3001).numpy())
        assert opened.verify().ok
        return generation


def save_anew(path: str, generation: int) -> None:
    """Saves by one rank, overwriting everything. Checks that no other files remain."""
    whole = numbers(generation, 0, WORLD * ELEMENTS)
    state = {**state_of(0, 1, generation), "w": whole}
    save_id = tilestone.save(state, path, overwrite=True).save_id
    assert whole_generation(path) == generation
    for file in pathlib.Path(path).rglob("*"):
        fixed = file.name in (".metadata", ".tilestone", "lock")
        assert fixed or save_id in file.name, f"{file} is a leftover"


def strike(path: str, first: int, random_: random.Random) -> tuple[int, int]:
    """Kills one rank of a world. Returns the last acknowledged generation and the survivors."""
    world = ranks.World(WORLD)
    victim = random_.randrange(WORLD)
    try:
        world.begin(save_for_ever, path, first)
        wait_until_begun(path, first)
        time.sleep(random_.uniform(0, 0.3))
        killed = time.monotonic()
        world.kill(victim)
        results = world.finish(timeout=TIMEOUT + SLACK)
    finally:
        world.close()
    acknowledged = first - 1
    for rank, told in enumerate(results):
        if rank == victim:
            assert told == "lost"
            continue
        assert isinstance(told, dict), f"rank {rank}: {told}"
        assert told["kind"] in ("RankFailedError", "TimeoutError"), told
        assert told["ended"] <= killed + TIMEOUT + SLACK, told
        acknowledged = max(acknowledged, told["done"])
    return acknowledged, WORLD - 1


def test_a_killed_rank_leaves_the_old_or_the_new_checkpoint_and_no_rank_hangs(
    tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    rounds = request.config.getoption("--kills")
    random_ = random.Random(rounds)
    path = str(tmp_path / "latest")
    acknowledged_count = under_way_count = survivors = 0
    first = 1
    save_anew(path, 0)
    for _ in range(rounds):
        acknowledged, survived = strike(path, first, random_)
        begun = begun_last(path)
        survivors += survived
        found = whole_generation(path)
        assert found in (acknowledged, begun), (found, acknowledged, begun)
        acknowledged_count += found == acknowledged
        under_way_count += found != acknowledged
        first = max(begun, found) + 2
        save_anew(path, first - 1)
    line = (
        f"{rounds} kills of torch ranks: {acknowledged_count} found the acknowledged generation, "
        f"{under_way_count} the one being saved; {survivors} survivors raised before their deadline"
    )
    request.node.user_properties.append((conftest.KILLS, line))
