"""Sends bytes between the ranks of a torch.distributed process group.

A wait that times out inside gloo closes the connections of the whole process group, which the
training job may need later. So a rank only starts a transfer when it knows that all ranks have
arrived. The steps of one operation are:

1. Every rank counts its operations. All ranks make the same operations in the same order, starting
   from a number that they agreed on when the call (a save or load) began. A rank that arrives at
   an operation records this under the operation's number in the store of the process group.
2. Rank 0 waits until all ranks have arrived and proposes "go". Any rank whose deadline passes first
   proposes "stop" and names the missing ranks.
3. The store keeps the first proposal (compare and set). It is the verdict for all ranks: either
   every rank starts the transfer, or every rank raises the same error, also a rank that arrives
   late. After a "stop" nothing was sent, and the ranks agree on the next operation's number.
4. The transfer uses the group's own sends, receives and broadcasts. Its messages can't be mistaken
   for those of another operation, because all ranks took part in all transfers before it.

A rank's record of its arrival contains its message, if that is short, or else the message's size.
In the same way rank 0 leaves a record for each rank in a scatter, and in a broadcast one in the
verdict. So only long messages need a transfer. In an all_to_all a rank's record has the sizes
of all messages that it sends, and rank 0 leaves for each rank those of the messages that it gets.

If a caller's deadline passes during the transfer, the caller raises an error while the transfer
goes on. The process group is only broken if a rank dies, or is cut off for long, between verdict
and transfer; gloo offers no way to avoid this.

A request to the store is a blocking read of a socket without a timeout. If the store's host is cut
off, it lasts until the link is back or the kernel gives up the connection many minutes later. So
everything that can block runs in one helper thread for each process group, and the caller waits
for that thread until its deadline. A stuck helper continues once the link is back.

Ranks agree on calls through short notices in the store (see tilestone/comm/call.h). Members put
their notices into a queue that the coordinator (rank 0) reads; the coordinator puts each answer
under the member's name. A rank that leaves a call before its end proposes its error as the verdict
of the operation that the other ranks are in or will reach.

The process of rank 0 may end right after a call, and with it the store. So rank 0 marks the verdict
of the call's last operation. Every other rank then counts itself in one entry of the store when it
has its message, and rank 0 leaves when the count is complete, or after a few seconds.

The store's entries of an operation are deleted once all ranks have arrived at a later one.
"""

from __future__ import annotations

import array
import contextlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tilestone import _forked
from tilestone._torch.arrivals import Arrivals
from tilestone._torch.group import (
    CallEndedError,
    RanksLostError,
    RanksMissingError,
    shared_by,
)
from tilestone._torch.helper_thread import LAST_WORDS, Check, StuckError, Task, poll
from tilestone._torch.transfer import Transfer, rank_list

_FRAGMENT_BYTES = 1 << 30  # the most bytes of one send, receive or broadcast
# How long, in seconds, rank 0 waits for the ranks that have not taken a call's last message.
_WAIT_FOR_TAKERS = 5.0
_NEVER = math.inf
# A message that becomes a record has fewer bytes than _RECORDS_BYTES by the number of ranks, within
# these limits.
_RECORDS_BYTES = 1 << 20
_LONGEST_RECORD = 1 << 14
_SHORTEST_RECORD = 64


def _size_in(record: bytes) -> int | None:
    """The size of a message that is too long for its record, or None."""
    return int(record[1:]) if record[:1] == b"#" else None


def _sizes_record(sizes: Sequence[int]) -> bytes:
    """A record of one size for each rank. Most sizes of a large group are 0."""
    return zlib.compress(array.array("q", sizes).tobytes(), 1)


def _sizes_in(record: bytes) -> Sequence[int]:
    return array.array("q", zlib.decompress(record))


def _end_of(timeout_s: float | None) -> float:
    return _NEVER if timeout_s is None else time.monotonic() + timeout_s


class TorchCommunicator:
    """This rank's end of a torch.distributed process group.

    Every rank of the group makes the same operations in the same order, from one thread at a time.
    Ranks outside the group take no part. Each operation accepts `timeout_s`, in seconds (None: no
    limit), and `check`, which is called repeatedly and ends the wait if it raises. It may raise

    * RanksMissingError (a TimeoutError): a rank did not arrive in time. Every rank raises it, and
      the group can be used again. Also raised if the store does not answer in time;
    * RanksLostError (a ConnectionError): a rank was lost in the transfer, which breaks the process
      group; or another rank's operation was refused; or the store's server is gone;
    * CallEndedError (a ConnectionError): another rank has ended the call;
    * ValueError: the number of parts is invalid.

    The first two have `ranks`: the numbers in the group of the missing ranks, if they are known.
    With NCCL the bytes are sent in tensors on the device that the group is bound to, or else on
    the current one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        fragment_bytes: int = _FRAGMENT_BYTES,
    ) -> None:
        """Uses `group` (None: the default group). Not collective.

        Args:
            fragment_bytes: longer messages are split into fragments; the same on every rank.

        Raises:
            ValueError: this rank is outside the group.
            TypeError: `group` is no process group.
            UnsupportedError: this process was forked and has inherited the group.
        """
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            outside = dist.GroupMember.NON_GROUP_MEMBER
            if isinstance(group, type(outside)) and group == outside:
                raise ValueError("this rank is not in the process group")
            raise TypeError("a group is a torch process group or a communicator")
        self._group = group
        self._shared = shared_by(group)
        self._transfer = Transfer(group, self._shared, fragment_bytes)
        self.call_memory = self._shared.memory
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        longest = min(_LONGEST_RECORD, _RECORDS_BYTES // self.size)
        self._arrivals = Arrivals(self._shared, self.rank, self.size)
        self._longest_record = max(_SHORTEST_RECORD, longest)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    def describe(self) -> str:
        """The name of this kind of communicator, for messages."""
        backend: str = dist.get_backend(self._group)
        if backend == "undefined":  # there is one for each kind of device
            backend = str(dist.get_backend_config(self._group))
        return f"torch.distributed ({backend})"

    def gather(
        self, mine: bytes, timeout_s: float | None = None, check: Check = None
    ) -> list[bytes]:
        """On rank 0: every rank's bytes, in the order of ranks. On other ranks: an empty list."""
        result: list[bytes] = self._operate(self._gather, (mine,), timeout_s, check)
        return result

    def scatter(
        self, parts: Sequence[bytes], timeout_s: float | None = None, check: Check = None
    ) -> bytes:
        """Sends `parts[r]`, given on rank 0, to rank r. `parts` is ignored on other ranks."""
        result: bytes = self._operate(self._scatter, (parts,), timeout_s, check)
        return result

    def broadcast(
        self, mine: bytes, timeout_s: float | None = None, check: Check = None
    ) -> bytes:
        """Returns the bytes given on rank 0. `mine` is ignored on other ranks."""
        result: bytes = self._operate(self._broadcast, (mine,), timeout_s, check)
        return result

    def all_to_all(
        self, to: Sequence[bytes], timeout_s: float | None = None, check: Check = None
    ) -> list[bytes | bytearray]:
        """Sends `to[r]` to rank r; element r of the result came from rank r."""
        return list(self._operate(self._all_to_all, (to,), timeout_s, check))

    # Agreeing on calls (CallPort in tilestone/comm/call_port.h).

    def post(
        self, notices: dict[int, bytes], timeout_s: float | None = None, check: Check = None
    ) -> None:
        """Posts the coordinator's answers to ranks, or a member's notice to the coordinator."""

        def work(task: Task) -> None:
            store = self._shared.store
            if self.rank == 0:
                keys = [f"answer/{rank}" for rank in notices]
                if keys:
                    store.multi_set(keys, list(notices.values()))
                return
            for notice in notices.values():
                number = store.add("notices", 1)
                store.set(f"notice/{number}", f"{self.rank}\n{notice.hex()}")

        self._do("a notice", work, _end_of(timeout_s), check)

    def newest(
        self,
        wait_s: float | None = None,
        timeout_s: float | None = None,
        check: Check = None,
    ) -> list[tuple[int, bytes]]:
        """What other ranks have posted since the last call; waits up to `wait_s` for the first.

        A request to the store that takes longer than `wait_s` is waited for until `timeout_s`.
        """

        shared = self._shared

        def look() -> bool:
            shared.inbox.extend(self._queued() if self.rank == 0 else self._answers())
            return bool(shared.inbox)

        # Only here is the inbox emptied, so an interrupted caller gets its notices next time.
        waits = _end_of(wait_s)

        def work(task: Task) -> None:
            poll(look, self._arrivals.longest_pause(), task, waits)

        self._do("a notice", work, _end_of(timeout_s), check)
        found, shared.inbox = shared.inbox, []
        return found

    def last_operation(self) -> int:
        """The number of this rank's last operation, or of its last call."""
        return self._shared.operation

    def enter(self, call: int) -> None:
        """Begins the operations of a call; their numbers continue from `call`."""
        self._shared.ending = self._shared.ended = None
        self._shared.last = False
        self._shared.operation = self._shared.call = call

    def announce_last(self) -> None:
        """On rank 0: the next scatter or broadcast is the call's last message."""
        self._shared.last = True

    def leave(self) -> None:
        """Ends the call: this rank makes no more operations of it."""
        self._shared.call = 0
        self._shared.ended = None

    def abort(self, error: bytes) -> None:
        """Ends the call's operations with `error` on every rank."""
        if self._shared.call == 0 or self._shared.ended is not None:
            return
        # An operation that this rank's helper still runs sees this, too.
        self._shared.ending = error.hex()

        def work(task: Task) -> None:
            if self._shared.ending is not None:
                self._arrivals.end_operation(self._arrivals.own_verdict([]))

        self._do("ending a call", work, time.monotonic() + LAST_WORDS)

    def _queued(self) -> list[tuple[int, bytes]]:
        """On the coordinator: the members' notices, oldest first."""
        store, shared = self._shared.store, self._shared
        last = store.add("notices", 0)
        shared.unread += range(shared.announced + 1, last + 1)
        shared.announced = last
        # Announcing a notice and writing it are two requests, and a rank may pause or die between
        # them. An announced notice is looked for until it is there. Notices that the rank writes
        # later are announced later.
        keys = {number: f"notice/{number}" for number in shared.unread}
        if keys and not store.check(list(keys.values())):
            keys = {number: key for number, key in keys.items() if store.check([key])}
        if not keys:
            return []
        found = []
        for value in store.multi_get(list(keys.values())):
            rank, notice = value.decode().split("\n")
            found.append((int(rank), bytes.fromhex(notice)))
        shared.unread = [number for number in shared.unread if number not in keys]
        for key in keys.values():
            store.delete_key(key)
        return found

    def _answers(self) -> list[tuple[int, bytes]]:
        """On a member: the coordinator's newest answer, if it is new."""
        store, shared, key = self._shared.store, self._shared, f"answer/{self.rank}"
        if not store.check([key]):
            return []
        answer = bytes(store.get(key))
        if answer == shared.last_answer:
            return []
        shared.last_answer = answer
        return [(0, answer)]

    # Work in the helper thread.

    def _do(
        self,
        name: str,
        work: Callable[[Task], Any],
        end: float,
        check: Check = None,
        goes_on: bool = False,
    ) -> Any:
        def guarded(task: Task) -> Any:
            device = self._transfer.device
            if device.type != "cpu":  # each thread has its own current device
                torch.get_device_module(device).set_device(device.index)
            try:
                return work(task)
            except (RanksMissingError, RanksLostError, CallEndedError):
                raise
            except RuntimeError as error:  # from torch: the store's server is gone
                raise RanksLostError(
                    f"{name}: the store of the process group can't be reached: {error}", []
                ) from error

        _forked.check(self._group, self._shared.process)
        try:
            return self._shared.helper.do(guarded, end, check, goes_on)
        except StuckError:
            if peers := self._shared.moving_with:
                raise RanksMissingError(
                    f"{name}: the deadline passed in the transfer with {rank_list(peers)}", peers
                ) from None
            raise RanksMissingError(
                f"{name}: the deadline passed in a request to the store of the process group; is a "
                "host cut off?",
                [],
            ) from None

    def _operate(
        self, operation: Any, args: tuple[Any, ...], timeout_s: float | None, check: Check
    ) -> Any:
        name = operation.__name__.lstrip("_")
        end = _end_of(timeout_s)
        return self._do(name, lambda task: operation(task, *args), end, check, goes_on=True)

    def _gather(self, task: Task, mine: bytes) -> list[bytes]:
        record = self._record_of(mine)
        end, _ = self._arrivals.begin("gather", task, record)
        if self.rank == 0:
            received = self._receive("gather", self._arrivals.records(), end)
            return [received.get(rank, mine) for rank in range(self.size)]
        if _size_in(record) is not None:
            self._transfer.exchange("gather", {0: mine}, {}, end)
        return []

    def _scatter(self, task: Task, parts: Sequence[bytes]) -> bytes:
        if self.rank == 0:
            self._check_parts("scatter", parts)
        long = {}
        operation = self._shared.operation + 1
        own_key = f"{operation}/to/{self.rank}"

        def leave_records() -> None:
            records = {rank: self._record_of(parts[rank]) for rank in self._others()}
            long.update({r: parts[r] for r in records if _size_in(records[r]) is not None})
            keys = [f"{operation}/to/{rank}" for rank in records]
            self._shared.store.multi_set(keys, list(records.values()))

        if self.rank != 0:
            self._shared.old_keys.append(own_key)
        end, _ = self._arrivals.begin("scatter", task, b"", leave_records)
        if self.rank == 0:
            self._transfer.exchange("scatter", long, {}, end)
            self._see_taken(task)
            return parts[0]
        record = bytes(self._shared.store.get(own_key))
        part = self._receive("scatter", {0: record}, end)[0]
        self._see_taken(task)
        return part

    def _broadcast(self, task: Task, mine: bytes) -> bytes:
        if self.size == 1:
            return mine
        own = self._record_of(mine) if self.rank == 0 else b""
        end, told = self._arrivals.begin("broadcast", task, b"", in_verdict=own)
        size = _size_in(told)
        if size is not None:
            mine = self._transfer.broadcast(mine, size, end)
        elif self.rank != 0:
            mine = told[1:]
        self._see_taken(task)
        return mine

    def _all_to_all(self, task: Task, to: Sequence[bytes]) -> list[bytes | bytearray]:
        self._check_parts("all_to_all", to)
        if self.size == 1:
            return list(to)
        own_key = f"{self._shared.operation + 1}/to/{self.rank}"
        sizes = [len(part) for part in to]
        incoming: Sequence[int] = sizes

        def leave_sizes() -> None:
            nonlocal incoming
            rows = [sizes, *(_sizes_in(record) for record in self._arrivals.records().values())]
            incoming, *columns = zip(*rows, strict=True)
            keys = [f"{self._shared.operation}/to/{rank}" for rank in self._others()]
            self._shared.store.multi_set(keys, [_sizes_record(column) for column in columns])

        if self.rank != 0:
            self._shared.old_keys.append(own_key)
        end, _ = self._arrivals.begin("all_to_all", task, _sizes_record(sizes), leave_sizes)
        if self.rank != 0:
            incoming = _sizes_in(bytes(self._shared.store.get(own_key)))
        outgoing = {rank: to[rank] for rank in self._others()}
        awaited = {rank: incoming[rank] for rank in self._others()}
        received = self._transfer.exchange("all_to_all", outgoing, awaited, end)
        return [received.get(rank, to[self.rank]) for rank in range(self.size)]

    def _see_taken(self, task: Task) -> None:
        """After a call's last message: notes that this rank has it; rank 0 waits for all notes.

        No rank fails here, because each one has what it needs.
        """
        shared = self._shared
        if not shared.last:
            return
        shared.last = False
        key = f"{shared.operation}/taken"
        with contextlib.suppress(RuntimeError):  # from torch: rank 0, and the store, have ended
            if self.rank != 0:
                shared.store.add(key, 1)
                return
            shared.old_keys.append(key)
            end = time.monotonic() + _WAIT_FOR_TAKERS
            others = self.size - 1
            poll(lambda: shared.store.add(key, 0) >= others, self._arrivals.longest_pause(), task, end)

    # Records: short messages in the store.

    def _record_of(self, message: bytes) -> bytes:
        if len(message) < self._longest_record:
            return b"=" + message
        return b"#%d" % len(message)

    def _receive(self, name: str, records: dict[int, bytes], end: float) -> dict[int, bytes]:
        """The messages of these records, by rank."""
        sizes = {rank: _size_in(record) for rank, record in records.items()}
        long = {rank: size for rank, size in sizes.items() if size is not None}
        received = self._transfer.exchange(name, {}, long, end)
        return {rank: bytes(received.get(rank, record[1:])) for rank, record in records.items()}

    def _check_parts(self, name: str, parts: Sequence[bytes]) -> None:
        """A refused operation still counts, as on the other ranks, which get an error."""
        if len(parts) == self.size:
            return
        message = f"{name}: found {len(parts)} parts, expected one for each of {self.size} ranks"
        if self.size > 1:
            self._arrivals.end_operation(self._arrivals.own_verdict([], message))
        raise ValueError(message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]
