"""Saves in the background."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy
import pytest
from children import in_child
from thread_ranks import run_ranks

import tilestone
from tilestone._calls import async_save


class Slow:
    """A `progress` function that holds a save in flight until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self, _: tilestone.Progress) -> None:
        self.began.set()
        assert self.go.wait(60)


def state(first: int) -> dict[str, Any]:
    return {"w": numpy.arange(first, first + 1000.0), "inner": (1, numpy.arange(3)), "step": first}


def saved(path: pathlib.Path) -> int:
    """The step of the checkpoint, whose arrays must belong to it."""
    loaded = tilestone.load(path)
    assert (loaded["w"] == state(loaded["step"])["w"]).all()
    assert (loaded["inner"][1] == numpy.arange(3)).all()
    assert tilestone.open(path).verify().ok
    step: int = loaded["step"]
    return step


def files(number: int) -> tilestone.ByFiles:
    return tilestone.ByFiles(0, 1, "one run of a test", number=number)


@pytest.mark.parametrize("waits", ["result", "session", "manager"])
def test_a_progress_function_that_waits_for_its_own_save_ends_it_with_an_error(
    tmp_path: pathlib.Path, waits: str
) -> None:
    begun = threading.Event()

    def progress(_: tilestone.Progress) -> None:
        assert begun.wait(60)
        if waits == "result":
            saving.result()
        elif waits == "session":
            session.save(state(2), tmp_path / "b")
        else:
            manager.save(2, state(2))

    with tilestone.Session() as session:
        manager = tilestone.CheckpointManager(tmp_path / "run", progress=progress)
        if waits == "manager":
            manager.save(1, state(1))
            assert manager.last_save is not None
            saving = manager.last_save
        else:
            saving = session.async_save(state(1), tmp_path / "a", progress=progress)
        begun.set()
        with pytest.raises(tilestone.InvalidArgumentError, match="waits for that save itself"):
            saving.result(60)


@pytest.mark.parametrize("by_files", [False, True])
def test_the_state_may_change_once_the_call_returns(tmp_path: pathlib.Path, by_files: bool) -> None:
    """The docstring of `async_save`; also that a state is released, and callbacks."""
    for step in range(3):
        given = state(step)
        array = weakref.ref(given["w"])
        options: dict[str, Any] = {"by_files": files(step)} if by_files else {}
        saving = tilestone.async_save(given, tmp_path / str(step), **options)
        assert saving.staged.done() and saving.staged.result(0) is None
        given["w"][:] = -1
        given["inner"][1][:] = -1
        del given
        assert array() is None
        called = threading.Event()
        saving.durable.add_done_callback(lambda step: step.done() and called.set())
        result = saving.result(60)
        assert result.save_id == saving.save_id and result.bytes_written >= saving.bytes
        assert saving.done() and saving.durable.exception() is None and not saving.skipped
        assert called.wait(60)
        assert saved(tmp_path / str(step)) == step


def test_one_save_is_in_flight_and_loads_see_the_old_checkpoint(tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    tilestone.save(state(1), path)
    slow = Slow()
    saving = tilestone.async_save(state(2), path, overwrite=True, progress=slow)
    assert slow.began.wait(60)
    assert not saving.done() and "in flight" in repr(saving)
    with pytest.raises(TimeoutError, match="not ended"):
        saving.result(0.01)
    with pytest.raises(TimeoutError, match="not ended"):
        saving.durable.exception(0.01)
    for wrong in ("x", -1, float("nan"), True):
        with pytest.raises(tilestone.InvalidArgumentError, match="timeout"):
            saving.result(wrong)  # type: ignore[arg-type]
    assert saved(path) == 1
    with pytest.raises(tilestone.AlreadyExistsError, match="in flight"):
        tilestone.async_save(state(3), other, in_flight="fail")
    skipped = tilestone.async_save(state(3), other, in_flight="skip")
    assert skipped.skipped and skipped.done() and not skipped.result().published
    with pytest.raises(tilestone.AlreadyExistsError, match="under way"):
        tilestone.save(state(3), path, overwrite=True)
    threading.Timer(0.05, slow.go.set).start()
    assert tilestone.async_save(state(4), path, overwrite=True).result().published  # it waits
    assert saving.done()
    assert saved(path) == 4
    assert not other.exists()
    with pytest.raises(tilestone.InvalidArgumentError, match="in_flight must be"):
        tilestone.async_save(state(5), other, in_flight="later")
    with pytest.raises(tilestone.UnsupportedError, match="needs a communicator"):
        tilestone.async_save(state(5), other, in_flight="skip", by_files=files(0))


def test_a_failure_that_nobody_asked_for_is_raised_or_logged_by_the_next_save(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: tilestone.Progress) -> None:
        raise tilestone.StorageError("no disk")

    tilestone.save(state(1), tmp_path / "a")
    with tilestone.Session() as session:
        failed = session.async_save(state(2), tmp_path / "a", overwrite=True, progress=fail)
        assert failed.durable.exception() is not None  # asked for
        slow = Slow()
        session.async_save(state(2), tmp_path / "a", overwrite=True, progress=slow).abandon()
        slow.go.set()
        assert session.save(state(2), tmp_path / "c").published  # its program knows of the failure
        for kind in ("raise", "warn"):
            session.async_save(
                state(2), tmp_path / "a", overwrite=True, progress=fail, on_error=kind
            )
            if kind == "raise":
                with pytest.raises(tilestone.StorageError, match="an earlier.*no disk"):
                    session.save(state(3), tmp_path / "b")
        assert session.save(state(3), tmp_path / "b").published
    assert any("no disk" in record.getMessage() for record in caplog.records)
    assert saved(tmp_path / "a") == 1


def test_a_forked_child_neither_has_the_save_nor_ends_it(tmp_path: pathlib.Path) -> None:
    slow = Slow()
    saving = tilestone.async_save(state(2), tmp_path / "a", progress=slow)
    assert slow.began.wait(60)

    def child() -> None:
        nonlocal saving
        for call in (saving.result, saving.done, saving.abandon):
            with pytest.raises(tilestone.UnsupportedError, match="forked"):
                call()
        del saving, call
        assert tilestone.async_save(state(3), tmp_path / "child").result(60).published

    assert in_child(child) == 0
    slow.go.set()
    assert saving.result(60).published
    assert saved(tmp_path / "a") == 2
    assert saved(tmp_path / "child") == 3


# argv: the path, the step, how the save goes, how the program ends.
PROGRAM = """
import os, signal, sys, time
import numpy, tilestone
from tilestone._calls import async_save

path, step, save, end = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
state = {"w": numpy.arange(step, step + 1000.0), "inner": (1, numpy.arange(3)), "step": step}


def progress(_):
    if save == "fails":
        raise tilestone.StorageError("no disk")
    time.sleep(0.3 if save == "slow" else 1000)


if save == "stuck":
    async_save.EXIT_SECONDS = 0.2
if end == "sigterm":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
saving = tilestone.async_save(state, path, overwrite=True, progress=progress)
if end == "asks":
    saving.durable.exception()
if end == "exception":
    raise RuntimeError("the program fails")
if end in ("sigterm", "sigkill"):
    os.kill(os.getpid(), signal.SIGTERM if end == "sigterm" else signal.SIGKILL)
"""


def run(path: pathlib.Path, step: int, save: str, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(step), save, end]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_end_of_the_program_waits_for_a_save_or_leaves_the_previous_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "a"
    for step, end in enumerate(("return", "exception", "sigterm")):
        done = run(path, step, "slow", end)
        assert done.returncode == (1 if end == "exception" else 0), done.stderr
        assert ("the program fails" in done.stderr) == (end == "exception")
        assert saved(path) == step
    stuck = run(path, 7, "stuck", "return")
    assert stuck.returncode == 0 and "stuck" in stuck.stderr and "nobody" not in stuck.stderr
    assert saved(path) == 2
    assert run(path, 8, "stuck", "sigkill").returncode == -9
    assert saved(path) == 2
    # Nobody has asked for the last save's result, and no save comes after it.
    failed = run(path, 8, "fails", "return")
    assert f"{path} has failed, and nobody has asked for its result: no disk" in failed.stderr
    assert failed.returncode == 0 and run(path, 8, "fails", "asks").stderr == ""
    assert saved(path) == 2
    tilestone.save(state(9), path, overwrite=True)
    assert saved(path) == 9
    assert not tilestone.gc(path)


def rows(rank: int, world: int, first: float) -> dict[str, Any]:
    own = numpy.arange(8, dtype=numpy.float32).reshape(2, 4) + 8 * rank + first
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, rank, world)),
        "all": numpy.full(5, first),
        "step": int(first),
    }


def expect_rows(path: pathlib.Path, world: int, first: float) -> None:
    loaded = tilestone.load(path, group=tilestone.solo())
    assert (loaded["w"] == numpy.arange(8.0 * world).reshape(2 * world, 4) + first).all()
    assert (loaded["all"] == first).all() and loaded["step"] == first
    assert tilestone.open(path).verify().ok


def files_of(path: pathlib.Path) -> list[str]:
    """The small files of saves."""
    return [name for name in os.listdir(path / ".tilestone") if "receipt" in name or "end" in name]


def wait_for(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come about")


def test_ranks_meet_in_the_call_and_then_in_files(tmp_path: pathlib.Path) -> None:
    """By rounds: formats, dialects, overwrite; what ranks hear of a save in flight and of its
    failure; the memory bound. Ranks are threads."""
    world = 3
    slow = Slow()
    gate = threading.Barrier(world)

    def fail(_: tilestone.Progress) -> None:
        raise tilestone.StorageError("no disk")

    def run(comm: tilestone.Communicator) -> None:
        with tilestone.Session(group=comm) as session:

            def save(name: str, first: int, **options: Any) -> tilestone.AsyncSave:
                given = rows(comm.rank, world, first)
                saving = session.async_save(given, tmp_path / name, timeout=60, **options)
                given["w"].data[:] = -1
                given["all"][:] = -1
                return saving

            ids = [save("a", 1).save_id]
            for kind in ({}, {"dialect": "megatron"}, {"format": "zarr", "dialect": "megatron"}):
                for first in (2, 3):  # fresh, and over the one before, which is still in flight
                    saving = save(f"kind{len(kind)}", first, overwrite=True, **kind)
                    ids.append(saving.save_id)
                assert saving.result().published
                gate.wait()
                expect_rows(tmp_path / f"kind{len(kind)}", world, 3)
                gate.wait()
            assert len(set(ids)) == len(ids)
            # One rank is slow: all ranks hear that the save is in flight.
            only = {"progress": slow} if comm.rank == 1 else {}
            saving = save("slow", 4, **only)
            with pytest.raises(tilestone.AlreadyExistsError, match="in flight"):
                save("other", 5, in_flight="fail")
            skipped = save("other", 5, in_flight="skip")
            assert skipped.skipped and not saving.done()
            assert not (tmp_path / "other").exists()
            gate.wait()
            slow.go.set()
            assert session.save(rows(comm.rank, world, 6), tmp_path / "next").published  # it waits
            assert saving.done() and saving.result().bytes_written > 0
            # A failure of one rank: on all ranks, once. All programs ask for the second.
            for asks in (False, True):
                only = {"progress": fail} if comm.rank == 2 else {}
                failed = save("slow", 7, overwrite=True, **only)
                wait_for(failed.done)
                if asks:
                    error = failed.durable.exception()
                    assert isinstance(error, tilestone.StorageError)
                    assert comm.rank == 2 or error.rank == 2  # there it is the program's own
                gate.wait()
                if not asks:
                    with pytest.raises(tilestone.StorageError, match="earlier.*no disk") as one:
                        save("last", 8)
                    assert one.value.rank == 2
            result = save("last", 8, max_staged_bytes=0).result()
            assert result.bytes_written >= 32
            gate.wait()
            expect_rows(tmp_path / "slow", world, 4)
            expect_rows(tmp_path / "last", world, 8)
            with pytest.raises(tilestone.MismatchError, match="key w"):
                session.async_save(
                    {"w": rows(comm.rank, world, 1)["w"] if comm.rank else numpy.zeros(3)},
                    tmp_path / "bad",
                )

    run_ranks(world, run)
    assert len(list((tmp_path / "last").glob("*.distcp"))) > world
    for name in ("a", "kind0", "kind1", "kind2", "slow", "next", "last"):
        # Files for a rank that is late may stay (background_meeting.cc). They are leftovers like any others.
        tilestone.gc(tmp_path / name, delete=True)
        assert not files_of(tmp_path / name)
    tilestone.save(rows(0, 1, 9), tmp_path / "slow", overwrite=True)
    assert not tilestone.gc(tmp_path / "slow")


def test_ranks_that_call_different_functions_fail_at_once(tmp_path: pathlib.Path) -> None:
    """Also in the first call of the function. Ranks are threads."""

    def run(comm: tilestone.Communicator) -> None:
        given = rows(comm.rank, 2, 1)
        options: dict[str, Any] = {"group": comm, "overwrite": True, "timeout": 60}
        tilestone.save(given, tmp_path, **options)
        first, second = "rank 0: async_save at ", "; rank 1: save at "
        with pytest.raises(tilestone.MismatchError, match=f"{first}.*{second}"):
            (tilestone.save if comm.rank else tilestone.async_save)(given, tmp_path, **options)
        with pytest.raises(tilestone.MismatchError, match=f"{first}.*; rank 1: load at "):
            if comm.rank == 0:
                tilestone.async_save(given, tmp_path, **options)
            else:
                tilestone.load(given, tmp_path, group=comm, timeout=60)
        for name, values in (("on_error", ("raise", "warn")), ("in_flight", ("wait", "skip"))):
            own: dict[str, Any] = {name: values[comm.rank]}
            with pytest.raises(tilestone.MismatchError, match=f'{name}.*"{values[1]}"'):
                tilestone.async_save(given, tmp_path, **own, **options)
        assert tilestone.async_save(rows(comm.rank, 2, 2), tmp_path, **options).result().published

    run_ranks(2, run)
    expect_rows(tmp_path, 2, 2)


def _torch_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    path = pathlib.Path(folder)
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}

    def state(first: int) -> dict[str, Any]:
        own = torch.arange(8.0).reshape(2, 4) + 8 * rank + first
        return {"w": DTensor.from_local(own, mesh, [Shard(0)]), "step": first}

    # Training goes on beside the save: the group's collectives are free at once.
    for first in range(3):
        given = state(first)
        saving = tilestone.async_save(given, path / str(first))
        total = torch.ones(1)
        dist.all_reduce(total)
        given["w"].to_local().fill_(-1)
        told[f"sum{first}"] = total.item()
    told["published"] = saving.result(60).published
    sub = dist.new_group(list(range(world)))
    told["sub"] = tilestone.async_save(state(7), path / "sub", group=sub).result(60).published
    # Ctrl-C during the call ends it on all ranks.
    given = state(8)
    if rank == 1:
        given["inner"] = Pressed(a=1)
    try:
        tilestone.async_save(given, path / "interrupted")
        told["interrupted"] = "returned"
    except BaseException as error:
        told["interrupted"] = type(error).__name__
    told["after"] = tilestone.async_save(state(9), path / "after").result(60).published
    return told


class Pressed(dict[str, Any]):
    """A part of a state; the user presses Ctrl-C while it is read."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def test_torch_ranks_train_on_while_a_save_is_written(worlds: Any, tmp_path: pathlib.Path) -> None:
    for world in (2, 4):
        folder = tmp_path / str(world)
        for rank, told in enumerate(worlds[world].run(_torch_ranks, str(folder))):
            kind = "KeyboardInterrupt" if rank == 1 else "InterruptedError"
            expected = {"published": True, "sub": True, "interrupted": kind, "after": True}
            assert told == expected | {f"sum{first}": world for first in range(3)}, rank
        for name, first in (("0", 0), ("1", 1), ("2", 2), ("sub", 7), ("after", 9)):
            loaded = tilestone.load(folder / name)
            assert loaded["step"] == first
            whole = numpy.arange(8.0 * world).reshape(2 * world, 4) + first
            assert numpy.array_equal(loaded["w"], whole)
        assert not (folder / "interrupted" / ".metadata").exists()


def test_a_session_of_async_save_lives_as_long_as_its_group(tmp_path: pathlib.Path) -> None:
    """Each `tilestone.solo()` is a group: its copies and threads go with it, its save goes on."""
    sessions = async_save._sessions._of_group
    before = dict(sessions)
    for step in range(3):
        slow = Slow()
        saving = tilestone.async_save(
            state(step), tmp_path / str(step), group=tilestone.solo(), progress=slow
        )
        assert sessions == before
        slow.go.set()
        saving.result()
        assert saved(tmp_path / str(step)) == step
    group = tilestone.solo()
    for step in range(3, 6):
        tilestone.async_save(state(step), tmp_path / str(step), group=group)
        assert len(sessions) == len(before) + 1
    del group
    assert sessions == before
    # The last save of the group has ended, or goes on: its program would wait for it at its end.
    while not (tmp_path / "5" / ".metadata").exists():
        time.sleep(0.01)
