"""The torch communicator: bytes sent between real torch ranks over gloo."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any
from unittest import mock

import pytest
import ranks
import torch.distributed as dist
from save_steps import begin_save

import tilestone
from tilestone._torch.comm import TorchCommunicator

PLENTY = 60.0  # seconds; timeout of calls that must succeed
MIB = 1 << 20


def message(number: int, sender: int, receiver: int, size: int) -> bytes:
    return random.Random(f"{number} {sender} {receiver}").randbytes(size)


def check_operation(comm: TorchCommunicator, kind: str, number: int, size_of: Any):
    """Runs one operation, and compares its result with the data that the others must have sent."""

    def sent(sender: int, receiver: int) -> bytes:
        return message(number, sender, receiver, size_of(sender, receiver))

    me, everybody = comm.rank, range(comm.size)
    what = f"{kind} {number}, rank {me} of {comm.size}"
    if kind == "gather":
        expected = [sent(r, 0) for r in everybody] if me == 0 else []
        assert comm.gather(sent(me, 0), PLENTY) == expected, what
    elif kind == "scatter":
        parts = [sent(0, r) for r in everybody] if me == 0 else []
        assert comm.scatter(parts, PLENTY) == sent(0, me), what
    elif kind == "broadcast":
        mine = sent(0, 0) if me == 0 else b""
        assert comm.broadcast(mine, PLENTY) == sent(0, 0), what
    else:
        found = comm.all_to_all([sent(me, r) for r in everybody], PLENTY)
        assert found == [sent(r, me) for r in everybody], what


KINDS = ["gather", "scatter", "broadcast", "all_to_all"]


def every_operation(rank: int, world: int) -> None:
    sizes = [
        lambda sender, receiver: 0,
        lambda sender, receiver: 1,
        lambda sender, receiver: MIB,
        lambda sender, receiver: 16383 + (sender + receiver) % 3,  # the longest record, or longer
        lambda sender, receiver: sender * 777 + receiver % 3 * 5000,
    ]
    for fragment_bytes in (1 << 30, 100_000):
        comm = TorchCommunicator(fragment_bytes=fragment_bytes)
        assert (comm.rank, comm.size) == (rank, world)
        assert comm.describe() == "torch.distributed (gloo)"
        number = 0
        for size_of in sizes:
            for kind in KINDS:
                check_operation(comm, kind, number, size_of)
                number += 1


def random_operations(comm: TorchCommunicator, seed: int, count: int) -> None:
    draw = random.Random(seed)
    for number in range(count):
        kind = draw.choice(KINDS)
        a, b = (draw.randrange(draw.choice([1, 2, 100, 70_000])) for _ in range(2))
        check_operation(comm, kind, number, lambda s, r, a=a, b=b: s * a + r * b)


def many_operations(rank: int, world: int) -> None:
    random_operations(TorchCommunicator(), 1, 200)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_and_size(worlds: ranks.Worlds, size: int) -> None:
    worlds[size].run(every_operation)


@pytest.mark.parametrize("size", [2, 3])
def test_200_random_operations(worlds: ranks.Worlds, size: int) -> None:
    worlds[size].run(many_operations)


class _CountingStore:
    """Counts the keys in a rank's requests to the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.keys = 0

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(keys: Any, *more: Any) -> Any:
            self.keys += len(keys) if isinstance(keys, list) else 1
            return request(keys, *more)

        return counted


def sends_to_the_next_rank_only(rank: int, world: int) -> tuple[int, int]:
    comm = TorchCommunicator()
    comm.gather(b"", PLENTY)
    shared, moved, send = comm._shared, 0, dist.batch_isend_irecv

    def counted(moves: list[Any]) -> Any:
        nonlocal moved
        moved += len(moves)
        return send(moves)

    store, to = shared.store, [b""] * world
    to[(rank + 1) % world] = bytes([rank])
    shared._store = counting = _CountingStore(store)
    comm._arrivals.longest_pause = lambda: 0.5  # type: ignore[method-assign]
    try:
        with mock.patch.object(dist, "batch_isend_irecv", counted):
            found = comm.all_to_all(to, PLENTY)
    finally:
        shared._store = store
    before = (rank - 1) % world
    assert found == [bytes([before]) if each == before else b"" for each in range(world)]
    dist.barrier()
    return counting.keys, moved


def test_empty_messages_of_an_exchange_cost_nothing(worlds: ranks.Worlds) -> None:
    keys, moved = zip(*worlds[4].run(sends_to_the_next_rank_only), strict=True)
    assert moved == (2, 2, 2, 2)  # one message each way
    assert max(keys[1:]) < 30, keys  # polls; no key for each other rank


def two_groups_in_turn(rank: int, world: int) -> None:
    """Ranks 0, 1, 2, 3 form a grid. Each rank is in the groups of its row and its column."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    row = TorchCommunicator(groups[rank // 2])
    column = TorchCommunicator(groups[2 + rank % 2])
    assert (row.rank, column.rank) == (rank % 2, rank // 2)
    for seed in range(10):
        random_operations(row, seed, 3)
        random_operations(column, seed, 3)
    random_operations(TorchCommunicator(), 5, 10)


def test_ranks_of_two_groups_use_both_in_turn(worlds: ranks.Worlds) -> None:
    worlds[4].run(two_groups_in_turn)


def group_of_the_last_two(rank: int, world: int) -> str:
    group = dist.new_group([world - 1, world - 2])
    if rank >= world - 2:
        random_operations(TorchCommunicator(group), 6, 20)
        return "inside"
    with pytest.raises(ValueError, match="not in the process group"):
        TorchCommunicator(group)
    return "outside"


def test_ranks_outside_the_group_take_no_part(worlds: ranks.Worlds) -> None:
    assert worlds[3].run(group_of_the_last_two) == ["outside", "inside", "inside"]


def call(comm: TorchCommunicator, kind: str, timeout: float) -> None:
    parts = kind in ("scatter", "all_to_all")
    getattr(comm, kind)([b"x"] * comm.size if parts else b"x", timeout)


def one_comes_late(rank: int, world: int, kind: str, late: int) -> tuple[str, list[int]]:
    """The error of the call. The store tells the late rank when the others have their errors."""
    comm = TorchCommunicator()
    key = f"test/{kind}/{late}"
    store = dist.distributed_c10d._get_default_store()
    if rank == late:
        while store.add(key, 0) < world - 1:
            time.sleep(0.01)
    with pytest.raises(TimeoutError) as caught:
        call(comm, kind, 0.3 if rank != late else PLENTY)
    if rank != late:
        store.add(key, 1)
    random_operations(comm, 7, 5)  # the group still works
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_is_named_on_every_rank_and_the_group_still_works(
    worlds: ranks.Worlds, kind: str
) -> None:
    for late in (0, 2):
        results = worlds[3].run(one_comes_late, kind, late)
        for text, missing in results:
            assert text.startswith(f"{kind}: the deadline passed while waiting for rank"), text
            assert late in missing, text  # on a busy machine others may be late as well


def bad_call_of_rank_0(rank: int, world: int) -> str:
    comm = TorchCommunicator()
    with pytest.raises((ValueError, ConnectionError)) as caught:
        comm.scatter([b""] * (world + 1) if rank == 0 else [], PLENTY)
    random_operations(comm, 8, 5)
    return str(caught.value)


def test_refused_call_reaches_every_rank(worlds: ranks.Worlds) -> None:
    refused = "scatter: found 4 parts, expected one for each of 3 ranks"
    told = f"scatter: rank 0 refused: {refused}"
    assert worlds[3].run(bad_call_of_rank_0) == [refused, told, told]


def exchange_that_rank_1_refuses_before_rank_0_comes(rank: int, world: int) -> str:
    comm = TorchCommunicator()
    if rank == 0:  # comes when the others have
        operation = comm.last_operation() + 1
        comm._shared.store.wait([f"{operation}/{other}" for other in range(1, world)])
    with pytest.raises((ValueError, ConnectionError)) as caught:
        comm.all_to_all([b"a"] * (world + (rank == 1)), PLENTY)
    random_operations(comm, 10, 5)
    return str(caught.value)


def test_an_exchange_that_was_refused_before_the_decider_comes_reaches_every_rank(
    worlds: ranks.Worlds,
) -> None:
    refused = "all_to_all: found 4 parts, expected one for each of 3 ranks"
    told = f"all_to_all: rank 1 refused: {refused}"
    results = worlds[3].run(exchange_that_rank_1_refuses_before_rank_0_comes)
    assert results == [told, refused, told]


def keys_in_the_store(rank: int, world: int) -> list[int]:
    """The number of keys after some operations and after many."""
    comm = TorchCommunicator()
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for count in (10, 100):
        for _ in range(count):
            comm.broadcast(b"x", PLENTY)
            comm.gather(b"x", PLENTY)
            comm.scatter([b"x"] * world, PLENTY)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_store_does_not_grow(worlds: ranks.Worlds) -> None:
    few, many = worlds[2].run(keys_in_the_store)[0]
    assert many <= few + 20


class _SlowStore:
    """A store that is slow for the notices by which ranks agree on calls."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if key.startswith("notice/"):
            time.sleep(3)
        self._store.set(key, value)


def saves_over_a_slow_store(rank: int, world: int, path: str) -> None:
    shared = TorchCommunicator()._shared
    store = shared.store
    shared._store = _SlowStore(store)
    try:
        tilestone.save({"step": 1}, path, timeout=PLENTY)
    finally:
        shared._store = store


def test_a_slow_store_does_not_end_a_call_before_its_deadline(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    worlds[2].run(saves_over_a_slow_store, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened["step"] == 1


class _PausingStore(_SlowStore):
    """A store that makes the rank pause after its notices of arrival."""

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if value == "here":
            time.sleep(1)


def ends_a_call_and_refuses_an_operation(rank: int, world: int, path: str) -> list[str]:
    comm = TorchCommunicator()
    shared = comm._shared
    store = shared.store
    said = []
    if rank == 1:
        shared._store = _PausingStore(store)
    try:
        with begin_save({"step": 1}, path, timeout=PLENTY) as saving:
            if rank == 0:
                saving.write()
                saving.report()
    except tilestone.CheckpointError as error:
        said.append(str(error))
    try:
        comm.all_to_all([b""] * (world + rank), PLENTY)
    except (ValueError, ConnectionError) as error:
        said.append(str(error))
    finally:
        shared._store = store
    dist.barrier()
    random_operations(comm, 8, 5)
    return said


def test_no_rank_waits_for_the_transfer_of_a_rank_that_pauses_at_the_end(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    first, second = worlds[2].run(ends_a_call_and_refuses_an_operation, ckpt)
    assert ["rank 1" in text for text in first] == [True, True], first
    assert second == ["all_to_all: found 3 parts, expected one for each of 2 ranks"]


class Clock:
    """What the caller of an operation sees as the time."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def is_slow_in_the_transfer(rank: int, world: int) -> tuple[str, list[int]]:
    """When all ranks have agreed to continue, rank 0's deadline passes; rank 1 waits for that."""
    comm = TorchCommunicator()
    comm.all_to_all([b"x"] * world, PLENTY)
    store = dist.distributed_c10d._get_default_store()
    exchange = comm._transfer.exchange
    clock = Clock()
    said, missing = "", []

    def slow(*arguments: Any) -> Any:
        if rank == 0:
            clock.ahead = 2 * PLENTY
        else:
            store.wait(["test/deadline passed"])
        return exchange(*arguments)

    comm._transfer.exchange = slow  # type: ignore[method-assign]
    try:
        with mock.patch("tilestone._torch.helper_thread.time", clock):
            comm.all_to_all([b"x"] * world, PLENTY)
    except TimeoutError as error:
        said, missing = str(error), error.ranks  # type: ignore[attr-defined]
        store.set("test/deadline passed", "")
    comm._transfer.exchange = exchange  # type: ignore[method-assign]
    assert comm.all_to_all([bytes([rank])] * world, PLENTY) == [bytes([r]) for r in range(world)]
    dist.barrier()
    return said, missing


def test_the_group_still_works_after_a_transfer_slower_than_the_deadline(
    worlds: ranks.Worlds,
) -> None:
    first, second = worlds[2].run(is_slow_in_the_transfer)
    assert second == ("", [])
    assert first == ("all_to_all: the deadline passed in the transfer with rank 1", [1])


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def last_rank_dies(rank: int, world: int, when: str) -> tuple[list[int], float]:
    comm = TorchCommunicator()
    comm.all_to_all([b"x"] * world, PLENTY)
    if rank == world - 1 and when == "before the call":
        die()
    if rank == world - 1:
        # All ranks have agreed to continue by then.
        comm._transfer.exchange = die  # type: ignore[assignment]
    begin = time.monotonic()
    with pytest.raises((TimeoutError, ConnectionError)) as caught:
        # Rank 1 says who is missing before rank 0, which decides, has given up.
        comm.all_to_all([b"x"] * world, 2.0 if rank == 1 else 20.0)
    return caught.value.ranks, time.monotonic() - begin


@pytest.mark.parametrize("when", ["before the call", "before the transfer"])
def test_killed_rank_is_named_by_the_others(when: str) -> None:
    world = ranks.World(3)
    try:
        *survivors, dead = world.collect(last_rank_dies, when)
        assert dead == "lost"
        for result in survivors:
            assert not isinstance(result, ranks.Raised), result
            missing, seconds = result
            assert missing == [2]
            assert seconds < 30
    finally:
        world.close()
