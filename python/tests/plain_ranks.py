"""Ranks without torch and without a process group: forks of one process, each with a rank number.

As a program it runs one of its scenarios and prints the result as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import tilestone

TOKEN = "one run of a test"
LIMIT = 120.0  # seconds; after that a rank counts as hung


def state(rank: int, world: int) -> dict[str, Any]:
    """Two rows of "w", declared and undeclared replicas, and arrays and values of all ranks."""
    rows = numpy.arange(8, dtype=numpy.float32).reshape(2, 4) + 8 * rank
    everywhere = numpy.arange(500, dtype=numpy.int64)
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", rows, (0, rank, world)),
        "all": tilestone.ShardedTensor.from_rank_offsets(
            "all", everywhere, replica_id=rank, holders=range(world)
        ),
        "plain": [numpy.full(300, i, numpy.float64) for i in range(world)],
        "step": 7,
        "nested": {"names": ["a", "b"]},
    }


def expect_state(path: str, world: int) -> None:
    """Checks that the path has a whole checkpoint of these states, without and with a template."""
    loaded = tilestone.load(path)
    assert (loaded["w"] == numpy.arange(8.0 * world).reshape(2 * world, 4)).all()
    assert (loaded["all"] == numpy.arange(500)).all()
    assert [part[0] for part in loaded["plain"]] == list(range(world))
    assert loaded["step"] == 7 and loaded["nested"] == {"names": ["a", "b"]}
    wanted = tilestone.load({"w": state(0, 1)["w"]} if world == 1 else {"step": 0}, path)
    assert wanted.keys() <= {"w", "step"}
    with tilestone.open(path) as opened:
        assert opened.verify().ok
        assert opened.world_size == world


def save(
    path: str,
    rank: int,
    world: int,
    made: dict[str, Any] | None = None,
    wait: bool = True,
    **options: Any,
) -> tilestone.SaveResult:
    """Saves one rank's state."""
    made = state(rank, world) if made is None else made
    by_files = tilestone.ByFiles(rank, world, TOKEN, wait=wait)
    return tilestone.save(made, path, by_files=by_files, timeout=LIMIT, **options)


def begin(body: Callable[[int], Any], rank: int) -> tuple[int, int]:
    """Forks a process that runs body(rank). Returns its id, and a file descriptor of its result."""
    here, there = os.pipe()
    process = os.fork()
    if process != 0:
        os.close(there)
        return process, here
    try:
        said: list[Any] = ["done", body(rank)]
    except tilestone.CheckpointError as error:
        said = [type(error).__name__, str(error)]
    except BaseException as error:
        said = ["failed", repr(error)]
    os.write(there, json.dumps(said).encode())
    os._exit(0)


def end(begun: tuple[int, int]) -> list[Any]:
    """Waits for a process. Returns ["done", result], [error, its text], or ["killed", signal]."""
    process, here = begun
    with os.fdopen(here, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(process, 0)[1]
    return ["killed", os.WTERMSIG(status)] if os.WIFSIGNALED(status) else json.loads(said)


def forked(body: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    """Runs these ranks concurrently, and returns their results."""
    return [end(each) for each in [begin(body, rank) for rank in ranks]]


# ---- Scenarios


def together(path: str) -> list[Any]:
    def body(rank: int) -> list[Any]:
        result = save(path, rank, 4)
        assert result.published
        expect_state(path, 4)  # once it is published
        return [result.save_id, result.bytes_written, result.items_written]

    done = forked(body, range(4))
    assert tilestone.unpublished(path) == [] and tilestone.gc(path) == []
    forked(lambda rank: save(path + "-again", rank, 4).published, range(4))
    return done


def one_by_one(path: str) -> list[Any]:
    said = []
    for rank in (2, 0, 3, 1):
        done = forked(lambda rank: save(path, rank, 4, wait=False).published, [rank])
        found = [
            [each.missing, each.complete, each.alive, each.failure, str(each)]
            for each in tilestone.unpublished(path)
        ]
        said.append([done[0], found])
    expect_state(path, 4)
    return said


def killed(path: str) -> list[Any]:
    def dies(rank: int) -> None:
        save(path, rank, 4, progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))

    waiting = [begin(lambda rank: save(path, rank, 4).published, rank) for rank in (0, 1, 3)]
    first = end(begin(dies, 2))
    again = end(begin(lambda rank: save(path, rank, 4).published, 2))
    said = [first, again, *map(end, waiting)]
    expect_state(path, 4)
    in_store = path.startswith("s3:")  # where gc can't know what lives
    for left in tilestone.gc(path, delete=not in_store):
        assert "__2_" in left.name  # written by the killed process
    expect_state(path, 4)
    return said


def twins(path: str) -> list[Any]:
    said = forked(lambda rank: save(path, rank, 4).published, [0, 1, 1, 2, 2, 2, 3])
    expect_state(path, 4)
    assert tilestone.gc(path) == []
    return said


def refused(path: str) -> dict[str, Any]:
    def differing(rank: int) -> dict[str, Any]:
        box = numpy.full(3, rank)
        return {"p": tilestone.ShardedTensor.from_rank_offsets("p", box)}

    def only_one(rank: int, what: Any) -> dict[str, Any]:
        return {"step": 1} | ({} if rank == 0 else {"extra": what})

    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        "differing replicas": differing,
        "an object of one rank": lambda rank: only_one(rank, "x"),
        "a state that can't be pickled": lambda rank: {"f": (lambda: 0) if rank else 1},
        "an unknown holder": lambda rank: {
            "p": tilestone.ShardedTensor.from_rank_offsets("p", numpy.zeros(3), holders=[rank, 9])
        },
    }
    said: dict[str, Any] = {}
    for name, make in cases.items():
        at = f"{path}-{name}"
        said[name] = forked(lambda rank: save(at, rank, 2, make(rank)).published, range(2))  # noqa: B023
        assert not os.path.exists(os.path.join(at, ".metadata"))
    # By rule, each rank writes one of two arrays. Only rank 1 has one of them.
    arrays = [{"a": numpy.zeros(4), "b": numpy.zeros(4)}, {"a": numpy.zeros(4)}]
    said["an array of one rank"] = forked(
        lambda rank: save(path + "-array", rank, 2, arrays[rank]).published, range(2)
    )
    said["another world"] = forked(
        lambda rank: save(path + "-world", rank, 2 + rank, {"step": 1}).published, range(2)
    )
    return said


def completed(path: str) -> list[Any]:
    """Both reports exist, but nobody publishes: each rank wrote to a directory of its own."""
    for rank in (0, 1):
        forked(lambda rank: save(f"{path}-{rank}", rank, 2, wait=False).published, [rank])
        shutil.copytree(f"{path}-{rank}", path, dirs_exist_ok=True)
    (found,) = tilestone.unpublished(path)
    try:
        tilestone.load(path)
        opening = ""
    except tilestone.NotFoundError as error:
        opening = str(error)
    try:
        tilestone.abandon(path, period=0)
        abandoning = ""
    except tilestone.UnsupportedError as error:
        abandoning = str(error)
    published = tilestone.publish(path)
    expect_state(path, 2)
    return [found.complete, found.save_id == published, opening, abandoning]


if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    assert "torch" not in sys.modules
    print(json.dumps(result))
