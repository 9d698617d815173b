"""One of two torch ranks fails, in each step of a save and for each way to coordinate ranks."""

from __future__ import annotations

import itertools
import pathlib
import shutil
import time
from typing import Any

import ranks
import torch
from save_steps import BegunSave, begin_save

import tilestone

FAILING = 1
WAYS = ("exchange", "session", "files", "files without waiting", "rank-local")
PLACES = ("state", "planned", "staged", "written", "late")
TOKEN = "one run of a test of failing ranks"
SHORT = 1.0  # seconds that the other rank waits for a late one


class _Late:
    """A module whose state_dict() takes longer than the other rank waits."""

    def __init__(self, wait: Any) -> None:
        self._wait = wait

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not used."""


def _state(rank: int, world: int, first: float) -> dict[str, Any]:
    own = torch.arange(4.0) + 4 * rank + first
    every = torch.full((3,), first)
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, rank, world)),
        "p": tilestone.ShardedTensor.from_rank_offsets(
            "p", every, replica_id=rank, holders=list(range(world))
        ),
        "step": first,
    }


def _who(way: str, rank: int, world: int, number: int = 0) -> dict[str, Any]:
    if way in ("exchange", "session"):
        return {"overwrite": True}
    by_files = tilestone.ByFiles(
        rank, world, TOKEN, number=number, wait=way != "files without waiting",
        torch_rank_local=way == "rank-local",
    )  # fmt: skip
    return {"by_files": by_files}


def _come_behind(path: str) -> None:
    """Waits until the other rank has begun a save by files, so that it sees a failure at once."""
    end = time.monotonic() + 20
    while not list(pathlib.Path(path).glob(".tilestone/*.attempt")) and time.monotonic() < end:
        time.sleep(0.005)


def _fail(begin: Any, state: dict[str, Any], place: str, options: dict[str, Any]) -> None:
    """Runs the save of the failing rank."""
    if place == "state":
        state["hollow"] = (number for number in range(3))
    if place == "late":
        state["late"] = _Late(lambda: torch.distributed.barrier())
    with begin(state, **options) as saving:
        if place == "planned":
            return
        saving.stage()
        if place == "staged":
            return
        saving.write()
        if place == "written":
            return
        saving.report()
        saving.publish()


def cell(rank: int, world: int, path: str, way: str, place: str) -> str:
    """The error of this rank, or "". Checks the existing checkpoint afterwards."""
    by_files = "by_files" in _who(way, rank, world)
    session = tilestone.Session() if way == "session" else None

    def save(first: float, timeout: float, number: int = 0) -> None:
        state = _state(rank, world, first)
        options = {**_who(way, rank, world, number), "timeout": timeout}
        if session is not None:
            session.save(state, path, **options)
        else:
            tilestone.save(state, path, **options)

    def begin(state: dict[str, Any], **options: Any) -> BegunSave:
        if session is not None:
            return begin_save(state, path, **options, session=session)
        return begin_save(state, path, **options)

    if not by_files:
        save(1.0, 60)
    torch.distributed.barrier()
    said = ""
    late = place == "late"
    try:
        if rank == FAILING:
            if by_files:
                _come_behind(path)
            limit = SHORT if late and not by_files else 60
            _fail(begin, _state(rank, world, 5.0), place,
                  {**_who(way, rank, world), "timeout": limit})  # fmt: skip
        else:
            save(5.0, SHORT if late else 60)
    except (tilestone.CheckpointError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        if late and rank != FAILING:
            torch.distributed.barrier()  # now the other rank continues
    torch.distributed.barrier()
    if rank == 0 and not by_files:
        assert tilestone.load(path, group=tilestone.solo())["step"] == 1.0, (way, place)
    has_failed = by_files and any(each.abandoned for each in tilestone.unpublished(path))
    torch.distributed.barrier()
    save(5.0, 60, int(has_failed))  # the same ranks again
    torch.distributed.barrier()
    if rank == 0:
        loaded = tilestone.load(path, group=tilestone.solo())
        assert torch.as_tensor(loaded["w"]).tolist() == [5.0 + i for i in range(4 * world)]
        assert loaded["step"] == 5.0
        shutil.rmtree(path)
    torch.distributed.barrier()
    return said


def all_cells(rank: int, world: int, path: str) -> dict[tuple[str, str], str]:
    return {
        (way, place): cell(rank, world, f"{path}-{way}-{place}", way, place)
        for way, place in itertools.product(WAYS, PLACES)
        if place != "late" or way != "session"  # like "exchange"; each takes SHORT
    }


def test_the_other_rank_fails_the_checkpoint_is_whole_and_the_next_save_works(
    worlds: ranks.Worlds, ckpt: str, record_property: Any
) -> None:
    heard, failed = worlds[2].run(all_cells, ckpt)
    for (way, place), said in heard.items():
        if way == "files without waiting":
            assert said == "" or "rank 1" in said, (way, place, said)
        else:
            assert "rank 1" in said, (way, place, said)
    for (way, place), said in failed.items():
        by_files = "files" in way or way == "rank-local"
        raised = place == "state" or (place == "late" and not by_files)
        assert bool(said) == raised, (way, place, said)
    record_property("cells", len(heard))
