"""Calls that fail on one rank: the next save of all ranks works. Over gloo."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist

import tilestone
from tilestone._torch.comm import TorchCommunicator

PATIENCE = 0.5  # seconds; timeout of calls that can't succeed
PLENTY = 60.0  # seconds; timeout of calls that must succeed


def save(path: str, rank: int, world: int, timeout: float) -> str:
    """Saves. Returns the name of the raised exception, or ""."""
    tensor = tilestone.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world))
    try:
        tilestone.save({"w": tensor}, path, overwrite=True, timeout=timeout)
    except tilestone.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disturbed_calls(rank: int, world: int, folder: str, seed: int) -> None:
    for number in range(3):
        mine = random.Random(f"{seed} {number} {rank}")
        way = mine.choice(["make", "make", "skip", "twice", "elsewhere"])
        path = f"{folder}/{number % 2}"
        if way == "elsewhere":
            save(f"{folder}/typo-{rank}", rank, world, PATIENCE)
        elif way != "skip":
            save(path, rank, world, PATIENCE)
        if way == "twice":
            save(path, rank, world, PATIENCE)
        dist.barrier()
        error = save(path, rank, world, PLENTY)
        assert not error, f"seed {seed}, call {number}, rank {rank}: {error}"
        dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_the_next_save_that_all_make_works(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, size: int
) -> None:
    for seed in range(6):
        worlds[size].run(disturbed_calls, str(tmp_path / f"{size}-{seed}"), seed)


def one_skips(rank: int, world: int, folder: str) -> list[str]:
    numbers = [0, 1, 2, 3] if rank != 1 else [0, 1, 3, 4]
    return [save(f"{folder}/{number}", rank, world, PLENTY) for number in [*numbers, 5]]


def test_a_skipped_save_is_noticed_at_once_on_every_rank_until_all_make_the_same_one(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    started = time.monotonic()
    first, skipper = worlds[2].run(one_skips, str(tmp_path))
    assert time.monotonic() - started < PLENTY / 2
    assert [bool(error) for error in first] == [False, False, True, True, False]
    assert first == skipper
    for part in (f"rank 0: save at {tmp_path}/2", f"rank 1: save at {tmp_path}/3"):
        assert part in first[2]


def another_group_on_rank_1(rank: int, world: int, folder: str) -> str:
    alone = dist.new_group([1])
    group, timeout = (alone, PLENTY) if rank == 1 else (dist.group.WORLD, PATIENCE)
    try:
        tilestone.save({"w": torch.ones(2)}, f"{folder}/{rank}", group=group, timeout=timeout)
        text = ""
    except tilestone.TimeoutError as error:
        text = str(error)
    dist.barrier()
    assert save(f"{folder}/after", rank, world, PLENTY) == ""
    return text


def test_the_error_of_ranks_that_pass_different_groups_has_a_hint(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    first, other = worlds[2].run(another_group_on_rank_1, str(tmp_path))
    assert other == ""  # it saves as a group of one
    assert "waiting for rank 1, which is in no save or load" in first
    assert "the same group" in first


def two_threads(rank: int, world: int, folder: str, in_order: bool) -> list[str]:
    errors: list[str] = []

    def work(name: str) -> None:
        for number in range(1 if in_order else 3):
            timeout = PLENTY if in_order else 4 * PATIENCE
            errors.append(save(f"{folder}/{name}-{number}", rank, world, timeout))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
        time.sleep(PATIENCE if in_order else 0)
    for thread in threads:
        thread.join()
    dist.barrier()
    assert save(f"{folder}/last", rank, world, PLENTY) == ""
    return errors


def test_saves_of_two_threads_on_one_group_follow_one_another(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    assert worlds[2].run(two_threads, str(tmp_path), True) == [["", ""], ["", ""]]


def test_the_group_still_works_after_two_threads_save_in_different_orders(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for errors in worlds[2].run(two_threads, str(tmp_path), False):
        for error in errors:
            assert not error or error.startswith(("MismatchError", "TimeoutError")), error


def wait_for(path: pathlib.Path) -> None:
    end = time.monotonic() + PLENTY
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def signal_after(path: pathlib.Path, number: signal.Signals) -> None:
    """Sends the signal to this process once the file exists."""
    wait_for(path)
    os.kill(os.getpid(), number)


def interrupted_while_waiting(rank: int, world: int, folder: str, stopped: int) -> tuple[str, float]:
    """Rank `stopped` gets SIGINT while it waits for a busy rank, which ends after it."""
    inside = pathlib.Path(folder) / f"inside{stopped}"
    ended = pathlib.Path(folder) / f"ended{stopped}"

    def build(key, data, replica_id, flattened_range):  # type: ignore[no-untyped-def]
        if rank == (stopped + 1) % world:
            inside.touch()
            wait_for(ended)
        return tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))

    factory = tilestone.ShardedTensorFactory("w", torch.ones(2), build, lambda tree: tree)
    sender = threading.Thread(target=signal_after, args=(inside, signal.SIGINT))
    started = time.monotonic()
    raised = ""
    try:
        if rank == stopped:
            sender.start()
        tilestone.save({"w": factory}, f"{folder}/{stopped}", timeout=PLENTY)
    except (KeyboardInterrupt, tilestone.CheckpointError) as error:
        raised = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    if rank == stopped:
        ended.touch()
        sender.join()
    assert save(f"{folder}/{stopped}", rank, world, PLENTY) == ""
    return raised, seconds


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_an_interrupt_on_one_rank_reaches_the_others_long_before_their_deadline(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, stopped: int
) -> None:
    results = worlds[3].run(interrupted_while_waiting, str(tmp_path), stopped)
    for rank, (raised, seconds) in enumerate(results):
        assert seconds < PLENTY / 2
        kind = "KeyboardInterrupt" if rank == stopped else "InterruptedError"
        assert raised.startswith(kind), (rank, raised)
        assert rank == stopped or f"rank {stopped}" in raised


class OwnError(Exception):
    """An exception type that the library does not know."""


def stopped_by_a_handler(
    rank: int, world: int, folder: str, work: str, stopped: int, kind: type[BaseException]
) -> str:
    """A handler of SIGUSR1 raises on rank `stopped` while another rank is busy inside the call."""
    inside, raised = pathlib.Path(folder) / "inside", pathlib.Path(folder) / "raised"

    def build(key, data, replica_id, flattened_range):  # type: ignore[no-untyped-def]
        if rank == (stopped + 1) % world:
            inside.touch()
            wait_for(raised)
        return tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))

    def handler(*_: object) -> None:
        raised.touch()
        raise kind("from a handler")

    factory = tilestone.ShardedTensorFactory("w", torch.ones(2), build, lambda tree: tree)
    sender = threading.Thread(target=signal_after, args=(inside, signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    if rank == stopped:
        sender.start()
    try:
        getattr(tilestone, work)({"w": factory}, f"{folder}/stored", timeout=PLENTY)
        text = ""
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGUSR1, before)
    if rank == stopped:
        sender.join()
    after = save(f"{folder}/after", rank, world, PLENTY)
    assert after == "", (text, after)
    return text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OwnError])
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("work", ["save", "load"])
def test_an_exception_of_a_signal_handler_reaches_the_other_ranks_with_name_and_rank(
    worlds: ranks.Worlds,
    tmp_path: pathlib.Path,
    work: str,
    stopped: int,
    kind: type[BaseException],
) -> None:
    if work == "load":
        tilestone.save({"w": torch.ones(6)}, tmp_path / "stored")
    texts = worlds[3].run(stopped_by_a_handler, str(tmp_path), work, stopped, kind)
    said = f"{kind.__name__}: from a handler"
    for rank, text in enumerate(texts):
        if rank == stopped:
            assert text == said
        else:
            assert text.startswith("InterruptedError: "), text
            assert f"{said} (rank {stopped})" in text
            assert "torch.distributed" not in text and "callback" not in text, text


def stopped_in_a_broadcast(rank: int, world: int, folder: str, stopped: int) -> str:
    """A handler raises on rank `stopped` when it and the others have what is broadcast in a load."""
    broadcast = TorchCommunicator.broadcast

    def interrupted(self: Any, *args: Any) -> Any:
        broadcast(self, *args)
        raise OwnError("from a handler")

    patched = interrupted if rank == stopped else broadcast
    with mock.patch.object(TorchCommunicator, "broadcast", patched):
        try:
            tilestone.load({"w": torch.ones(6)}, folder, timeout=PLENTY)
            text = ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    tilestone.load({"w": torch.ones(6)}, folder, timeout=PLENTY)
    return text


@pytest.mark.parametrize("stopped", [0, 1])
def test_an_exception_of_a_handler_is_raised_unchanged_if_the_others_go_on_to_the_exchange(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, stopped: int
) -> None:
    tilestone.save({"w": torch.ones(6)}, tmp_path)
    texts = worlds[3].run(stopped_in_a_broadcast, str(tmp_path), stopped)
    for rank, text in enumerate(texts):
        assert (text == "OwnError: from a handler") == (rank == stopped), text
        assert f"OwnError: from a handler (rank {stopped})" in text or rank == stopped, text


def stopped_before_the_last_scatter(rank: int, world: int, folder: str) -> str:
    """A handler raises on rank 1 as it enters the last scatter of an async_save."""
    entered, last = 0, 0
    scatter = TorchCommunicator.scatter

    def counted(self: Any, *args: Any) -> Any:
        nonlocal entered
        entered += 1
        if rank == 1 and entered == last:
            raise OwnError("from a handler")
        return scatter(self, *args)

    def start() -> tilestone.AsyncSave:
        return tilestone.async_save({"w": torch.ones(6)}, folder, overwrite=True, timeout=PLENTY)

    start().result()  # the first one may need another round
    with mock.patch.object(TorchCommunicator, "scatter", counted):
        start().result()
        last = 2 * entered
        text = ""
        try:
            start()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    assert entered == last
    assert save(folder, rank, world, PLENTY) == ""
    return text


def test_an_exception_of_a_handler_in_the_last_message_of_an_async_save_is_raised_on_every_rank(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    texts = worlds[3].run(stopped_before_the_last_scatter, str(tmp_path))
    for rank, text in enumerate(texts):
        assert (text == "OwnError: from a handler") == (rank == 1), text
        assert "OwnError: from a handler (rank 1)" in text or rank == 1, text


def with_a_destroyed_group(rank: int, world: int, folder: str) -> None:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    for work in (tilestone.save, tilestone.async_save, tilestone.load):
        with pytest.raises(tilestone.InvalidArgumentError, match="process group was destroyed"):
            work({"w": torch.ones(2)}, folder, group=group)


def test_a_destroyed_group_is_said_to_be_one(worlds: ranks.Worlds, tmp_path: pathlib.Path) -> None:
    worlds[2].run(with_a_destroyed_group, str(tmp_path))


def interrupted_before_the_others_come(
    rank: int, world: int, folder: str, stopped: int, again: bool
) -> tuple[str, float]:
    """Rank `stopped` gets SIGINT while it is the only rank in a save; it may call again."""
    started = time.monotonic()
    if rank == stopped:
        newest = TorchCommunicator.newest

        def interrupted(self: Any, wait_s: float, *more: Any) -> Any:
            if wait_s > 0:  # it has arrived, and waits
                os.kill(os.getpid(), signal.SIGINT)
            return newest(self, wait_s, *more)

        with (
            mock.patch.object(TorchCommunicator, "newest", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            save(folder, rank, world, PLENTY)
    dist.barrier()
    raised = save(folder, rank, world, PLENTY) if again or rank != stopped else ""
    seconds = time.monotonic() - started
    dist.barrier()
    assert save(folder, rank, world, PLENTY) == ""
    return raised, seconds


@pytest.mark.parametrize(("stopped", "again"), [(0, False), (2, False), (0, True), (2, True)])
def test_who_is_interrupted_before_the_others_come_fails_them_within_seconds_or_comes_again(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, stopped: int, again: bool
) -> None:
    results = worlds[3].run(interrupted_before_the_others_come, str(tmp_path), stopped, again)
    for rank, (raised, seconds) in enumerate(results):
        assert seconds < 20
        if again or rank == stopped:
            assert raised == ""
        else:
            assert raised.startswith("InterruptedError: "), raised
            assert f"rank {stopped} left the call" in raised
