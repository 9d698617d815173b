"""The last statement of a program is a save or a load, and ranks end right after it.

Rank 0 hosts the store of the process group, so its end takes the store from the others.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist

import tilestone
import tilestone.megatron
from tilestone._torch.arrivals import Arrivals
from tilestone._torch.comm import TorchCommunicator

ROWS = 3


def row(rank: int, world: int, value: float = 1.0) -> dict[str, Any]:
    data = torch.full((ROWS,), rank + value)
    return {"w": tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))}


def save(comm: Any, path: str) -> None:
    tilestone.save(row(comm.rank, comm.size), path, group=comm, overwrite=True, timeout=60)


def load(comm: Any, path: str) -> None:
    save(comm, path)
    loaded = tilestone.load(row(comm.rank, comm.size, 0.0), path, group=comm, timeout=60)
    assert loaded["w"].tolist() == [comm.rank + 1.0] * ROWS


def save_sharded(comm: Any, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    tilestone.megatron.save(row(comm.rank, comm.size), path)


def refuse_to_save(comm: Any, path: str) -> None:
    state = row(comm.rank, comm.size)
    if comm.rank == comm.size - 1:
        state["lock"] = sys  # can't be saved
    with pytest.raises(tilestone.CheckpointError, match=f"lock.*rank {comm.size - 1}"):
        tilestone.save(state, path, group=comm, timeout=60)


def refuse_to_load(comm: Any, path: str) -> None:
    with pytest.raises(tilestone.NotFoundError, match="no checkpoint"):
        tilestone.load(row(comm.rank, comm.size), path, group=comm, timeout=60)


def end_at_once() -> None:
    os._exit(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def destroy_the_group() -> None:
    dist.destroy_process_group()
    sys.exit(0)


def end_the_interpreter() -> None:
    sys.exit(0)


def slow() -> TorchCommunicator:
    """Every rank but rank 0 takes the last message of a call late, also over other groups."""
    go_on = Arrivals._raise_unless_go

    def late(self: Arrivals, name: str, verdict: dict[str, Any]) -> None:
        if self._rank != 0 and verdict["last"]:
            pathlib.Path(os.environ["ENDED_RANKS_PATH"] + f".late{self._rank}").touch()
            time.sleep(0.3)
        go_on(self, name, verdict)

    mock.patch.object(Arrivals, "_raise_unless_go", late).start()
    return TorchCommunicator()


class DiesBeforeItAnswers(TorchCommunicator):
    """Rank 0 is killed when it has published, and before it sends its last message."""

    def scatter(self, parts: Any, *more: Any, **named: Any) -> bytes:
        path = pathlib.Path(os.environ["ENDED_RANKS_PATH"])
        if self.rank == 0 and any((path / name).exists() for name in (".metadata", "taken")):
            kill_itself()
        return super().scatter(parts, *more, **named)


class Stateful:
    """Notes that rank 0 takes over what it has loaded."""

    def __init__(self, rank: int, path: str) -> None:
        self._rank, self._path = rank, path

    def state_dict(self) -> dict[str, Any]:
        return {"a": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._rank == 0:
            pathlib.Path(self._path).mkdir()
            pathlib.Path(self._path, "taken").touch()


def load_and_lose(comm: Any, path: str) -> None:
    os.environ["ENDED_RANKS_PATH"] = f"{path}.load"
    state = row(comm.rank, comm.size) | {"s": Stateful(comm.rank, f"{path}.load")}
    tilestone.save(state, path, group=comm, timeout=60)
    state["w"].data.zero_()
    loaded = tilestone.load(state, path, group=comm, timeout=60)
    assert loaded["w"].tolist() == [comm.rank + 1.0] * ROWS


def _join(rank: int, world: int, ports: Any) -> None:
    """Joins the group. `ports`: a queue with which rank 0 tells the others its store's port."""
    port = 0 if rank == 0 else ports.get()
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False)
    for _ in range(world - 1 if rank == 0 else 0):
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _rank(rank: int, world: int, ports: Any, kind: Any, work: Any, end: Any, path: str) -> None:
    """One process. Leaves the text of its error in a file."""
    ranks.die_with_the_parent()
    torch.set_num_threads(1)
    os.environ["ENDED_RANKS_PATH"] = path
    _join(rank, world, ports)
    try:
        work(kind(), path)
    except BaseException as error:
        pathlib.Path(f"{path}.error{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(3)
    if rank == 0:
        end()
    os._exit(0)


def run(
    world: int, work: Callable[[Any, str], None], end: Any, path: pathlib.Path, kind: Any
) -> list[str]:
    """The errors of the ranks. Rank 0 ends by `end`, the others by os._exit."""
    ports = ranks.context().SimpleQueue()
    processes = [
        ranks.context().Process(target=_rank, args=(r, world, ports, kind, work, end, str(path)))
        for r in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    allowed = {0, -signal.SIGKILL} if end is kill_itself or kind is DiesBeforeItAnswers else {0}
    found = [error.read_text() for error in sorted(path.parent.glob(f"{path.name}.error*"))]
    codes = [process.exitcode for process in processes]
    if codes[0] not in allowed or any(codes[1:]):
        found.append(f"exit codes {codes}")
    return found


@pytest.mark.parametrize(
    ("work", "end", "world"),
    [
        (save, end_at_once, 2),
        (save, kill_itself, 4),
        (save, end_the_interpreter, 4),
        (save_sharded, destroy_the_group, 3),
        (load, end_at_once, 4),
        (load, kill_itself, 2),
        (load, destroy_the_group, 4),
        (refuse_to_save, end_at_once, 4),
        (refuse_to_load, kill_itself, 3),
    ],
)
def test_rank_0_may_end_right_after_its_last_call_and_every_other_rank_ends_well(
    work: Any, end: Any, world: int, tmp_path: pathlib.Path
) -> None:
    assert run(world, work, end, tmp_path / "c", slow) == []
    assert len(list(tmp_path.glob("c.late*"))) == world - 1


@pytest.mark.parametrize("work", [save, load_and_lose])
def test_ranks_that_lose_rank_0_before_its_last_answer_find_out_that_all_is_done(
    work: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "c"
    assert run(3, work, kill_itself, path, DiesBeforeItAnswers) == []
    assert tilestone.open(path).verify().ok
