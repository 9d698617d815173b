"""Bytes between the ranks of a torch.distributed process group.

A wait that times out inside gloo closes the connections of the whole process group, which may be
the one that the training job goes on with. So no rank enters a transfer before all are known to be
there. One operation goes like this:

1. Every rank counts its operations; all make the same calls in the same order, so the number is the
   same everywhere. A rank that comes says so under the number in the store of the process group.
2. One rank (the operation's root, or rank 0) waits until all have come and proposes "go". A rank
   whose deadline passes first, that one or any other, proposes "stop" and names who is missing.
3. The store keeps the first proposal (compare and set), and that is the verdict for all: either
   every rank goes on to the transfer, or every rank raises the same error, the late ones included.
   After a "stop" nothing was sent, and the group is in step for the next operation.
4. The transfer uses the group's own sends, receives and broadcasts. Its messages can't be taken for
   another operation's, since all ranks took part in all transfers before it.

Only a rank that dies between verdict and transfer, or a transfer that is slower than the deadline,
leaves the process group broken; gloo offers nothing else.

A store's entries of an operation are deleted once all ranks have come to a later one.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

_PIECE_BYTES = 1 << 30  # of one send, receive or broadcast
_SHORTEST_POLL = 0.0005  # seconds
_LONGEST_POLL = 0.05  # seconds
_QUICK_POLL = 0.002  # seconds: the longest pause of few ranks
_PAUSE_OF_RANK = 0.0002  # seconds a rank: all together poll 5,000 times a second at most
_LEAST_TRANSFER = 1.0  # seconds for a transfer that all ranks have agreed on
_LONGEST_WAIT = datetime.timedelta(days=1)  # of one wait inside torch
_NAMED_RANKS = 8
_NEVER = math.inf


class RanksMissingError(TimeoutError):
    """The deadline passed. `ranks`: who was missing, by their numbers in the group."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class RanksLostError(ConnectionError):
    """The connection to a rank broke. `ranks`: its number in the group, or nothing if unknown."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


@dataclasses.dataclass
class _Shared:
    """What all communicators over one process group have in common."""

    store: PrefixStore
    operation: int = 0  # number of the last one
    old_keys: list[str] = dataclasses.field(default_factory=list)  # this rank deletes them


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


def _shared_by(group: dist.ProcessGroup) -> _Shared:
    shared = _shared.get(group)
    if shared is None:
        # A clone has its own connection: waiting here holds up nobody else in the process.
        store: Any = _get_default_store()
        shared = _Shared(PrefixStore(f"tilestone/{group.group_name}", store.clone()))
        _shared[group] = shared
    return shared


def _transfer_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's backend wants its tensors: the CPU if it can, else the current device."""
    config = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"
    kinds = [part.split(":")[0] for part in config.split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = next((kind for kind in kinds if kind != "cpu"), "cuda")
    return torch.device(kind, torch.accelerator.current_device_index())


def _rank_list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = [str(rank) for rank in ranks[:_NAMED_RANKS]]
    more = len(ranks) - len(named)
    last = f"{more} more" if more else named.pop()
    return f"ranks {', '.join(named)} and {last}"


def _end_of(timeout_s: float | None) -> float:
    return _NEVER if timeout_s is None else time.monotonic() + timeout_s


class TorchCommunicator:
    """This rank's end of a torch.distributed process group.

    Every rank of the group makes the same calls in the same order, from one thread at a time; ranks
    outside it take no part. Each call takes `timeout_s` in seconds (None: no limit) and may raise

    * RanksMissingError (a TimeoutError) when a rank did not come in time: the same on every rank,
      and the group may be used again;
    * RanksLostError (a ConnectionError) when a rank was lost in the transfer, which breaks the
      process group, or when another rank's call was refused;
    * ValueError for a root or a number of parts that can't be meant.

    The first two have `ranks`, the numbers in the group of the missing ranks, as far as they are known.
    With NCCL bytes travel through tensors on the current device.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        """Joins `group` (None: the default group). Not collective.

        Raises ValueError when this rank is outside the group. `piece_bytes`: longer messages go in
        pieces of this size; the same on every rank.
        """
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # torch has a number for "not a member"
            raise ValueError("this rank is not in the process group")
        self._group = group
        self._device = _transfer_device(group)
        self._piece_bytes = piece_bytes
        self._shared = _shared_by(group)
        self._store = self._shared.store
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def describe(self) -> str:
        """The name of this kind of communicator, for messages."""
        backend: str = dist.get_backend(self._group)
        if backend == "undefined":  # one for each kind of device
            backend = str(dist.get_backend_config(self._group))
        return f"torch.distributed ({backend})"

    def gather(self, mine: bytes, root: int, timeout_s: float | None = None) -> list[bytes]:
        """At `root`: every rank's bytes, by rank. Elsewhere: an empty list."""
        self._check_root("gather", root)
        end = self._begin("gather", root, _end_of(timeout_s))
        if self.rank != root:
            self._exchange("gather", {root: mine}, [], end)
            return []
        received = self._exchange("gather", {}, self._others(), end)
        return [received.get(rank, mine) for rank in range(self.size)]

    def scatter(
        self, parts: Sequence[bytes], root: int, timeout_s: float | None = None
    ) -> bytes:
        """`parts[r]`, given at `root`, goes to rank r. Elsewhere `parts` is not looked at."""
        self._check_root("scatter", root)
        if self.rank == root:
            self._check_parts("scatter", parts)
        end = self._begin("scatter", root, _end_of(timeout_s))
        if self.rank != root:
            return self._exchange("scatter", {}, [root], end)[root]
        self._exchange("scatter", {rank: parts[rank] for rank in self._others()}, [], end)
        return parts[root]

    def broadcast(self, mine: bytes, root: int, timeout_s: float | None = None) -> bytes:
        """The bytes given at `root`. Elsewhere `mine` is not looked at."""
        self._check_root("broadcast", root)
        end = self._begin("broadcast", root, _end_of(timeout_s))
        if self.size == 1:
            return mine
        size = self._number(len(mine) if self.rank == root else 0)
        self._broadcast_tensor(size, root, end)
        total = int(size.item())
        buffer = bytearray(mine) if self.rank == root else bytearray(total)
        for begin in range(0, total, self._piece_bytes):
            piece = self._view(buffer, begin)
            moving = piece.to(self._device)
            self._broadcast_tensor(moving, root, end)
            if self.rank != root:
                self._land(piece, moving)
        return bytes(buffer)

    def all_to_all(self, to: Sequence[bytes], timeout_s: float | None = None) -> list[bytes]:
        """`to[r]` goes to rank r; the result's [r] came from rank r."""
        self._check_parts("all_to_all", to)
        end = self._begin("all_to_all", 0, _end_of(timeout_s))
        others = self._others()
        received = self._exchange("all_to_all", {rank: to[rank] for rank in others}, others, end)
        return [received.get(rank, to[self.rank]) for rank in range(self.size)]

    # Agreeing that all are there.

    def _begin(self, name: str, decider: int, end: float) -> float:
        """Returns when all ranks have come; the end of the transfer's time."""
        if self.size > 1:
            try:
                verdict = self._verdict(decider, end)
            except RuntimeError as error:  # torch's own: the store's server is gone
                raise RanksLostError(
                    f"{name}: the store of the process group can't be reached: {error}", []
                ) from error
            self._raise_unless_go(name, verdict)
        return max(end, time.monotonic() + _LEAST_TRANSFER)

    def _raise_unless_go(self, name: str, verdict: dict[str, Any]) -> None:
        by: int = verdict["by"]
        missing: list[int] = verdict["missing"]
        if missing:
            finder = "" if by == self.rank else f" (found by rank {by})"
            raise RanksMissingError(
                f"{name}: the deadline passed while waiting for {_rank_list(missing)}{finder}",
                missing,
            )
        if verdict["refused"]:
            raise RanksLostError(f"{name}: rank {by} refused: {verdict['refused']}", [by])

    def _verdict(self, decider: int, end: float) -> dict[str, Any]:
        arrivals = self._arrive()
        decided = [self._verdict_key()]

        def done() -> bool:
            if self.rank == decider and self._store.check(arrivals):
                return True
            return bool(self._store.check(decided))

        longest = min(_LONGEST_POLL, max(_QUICK_POLL, self.size * _PAUSE_OF_RANK))
        missing = [] if self._poll(done, longest, end) else self._who_is_missing(arrivals, decider)
        return self._decide({"by": self.rank, "missing": missing, "refused": ""})

    def _verdict_key(self) -> str:
        return f"{self._shared.operation}/verdict"

    def _arrive(self) -> list[str]:
        """Counts the operation and tells the store. Returns the keys under which the ranks do."""
        self._shared.operation += 1
        arrivals = [f"{self._shared.operation}/{rank}" for rank in range(self.size)]
        self._store.set(arrivals[self.rank], "here")
        return arrivals

    def _decide(self, proposal: dict[str, Any]) -> dict[str, Any]:
        """The verdict: this proposal, or the one that came before it."""
        key = self._verdict_key()
        kept = self._store.compare_set(key, "", json.dumps(proposal))
        verdict: dict[str, Any] = json.loads(kept)
        shared = self._shared
        if not verdict["missing"] and not verdict["refused"]:  # all are past earlier operations
            for old in shared.old_keys:
                self._store.delete_key(old)
            shared.old_keys.clear()
        shared.old_keys.append(f"{shared.operation}/{self.rank}")
        if self.rank == 0:
            shared.old_keys.append(key)
        return verdict

    def _who_is_missing(self, arrivals: Sequence[str], decider: int) -> list[int]:
        missing = [rank for rank, key in enumerate(arrivals) if not self._store.check([key])]
        if missing or self.rank == decider:
            return missing
        return [decider]  # all have come, and it has not decided

    @staticmethod
    def _poll(done: Callable[[], bool], longest: float, end: float) -> bool:
        """False when the time is over first. `longest`: of a pause, seconds."""
        pause = _SHORTEST_POLL
        while not done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, longest)
        return True

    # Moving the bytes. All ranks are known to be there.

    def _exchange(
        self, name: str, outgoing: dict[int, bytes], incoming: Iterable[int], end: float
    ) -> dict[int, bytes]:
        """Sends to some ranks and receives from others: first all sizes, then all payloads."""
        sizes = {rank: self._number(0) for rank in incoming}
        self._move(
            name,
            [(rank, self._number(len(data))) for rank, data in outgoing.items()],
            list(sizes.items()),
            end,
        )
        buffers = {rank: bytearray(int(size.item())) for rank, size in sizes.items()}
        arriving = [(rank, piece) for rank, data in buffers.items() for piece in self._cut(data)]
        landing = [(rank, torch.empty_like(p, device=self._device)) for rank, p in arriving]
        if self._device.type == "cpu":
            landing = arriving
        leaving = [
            (rank, piece.to(self._device))
            for rank, data in outgoing.items()
            for piece in self._cut(bytearray(data))
        ]
        self._move(name, leaving, landing, end)
        for (_, piece), (_, landed) in zip(arriving, landing, strict=True):
            self._land(piece, landed)
        return {rank: bytes(data) for rank, data in buffers.items()}

    def _move(
        self,
        name: str,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
        end: float,
    ) -> None:
        peers = [rank for rank, _ in incoming] + [rank for rank, _ in outgoing]
        moves = [self._p2p(dist.irecv, rank, tensor) for rank, tensor in incoming]
        moves += [self._p2p(dist.isend, rank, tensor) for rank, tensor in outgoing]
        if not moves:
            return
        try:
            works = dist.batch_isend_irecv(moves)
        except RuntimeError as error:
            raise self._lost(name, [], error) from error
        # gloo gives a work for each move, NCCL one for all.
        waiting = peers if len(works) == len(peers) else [-1] * len(works)
        for peer, work in zip(waiting, works, strict=True):
            self._wait(name, [peer] if peer >= 0 else [], work, end)

    def _p2p(self, kind: Any, rank: int, tensor: torch.Tensor) -> dist.P2POp:
        peer = dist.get_global_rank(self._group, rank)
        return dist.P2POp(kind, tensor, peer, self._group, self._shared.operation % (1 << 30))

    def _broadcast_tensor(self, tensor: torch.Tensor, root: int, end: float) -> None:
        source = dist.get_global_rank(self._group, root)
        work = dist.broadcast(tensor, source, group=self._group, async_op=True)
        self._wait("broadcast", [root] if self.rank != root else [], work, end)

    def _wait(self, name: str, peers: list[int], work: Any, end: float) -> None:
        left = max(0.001, end - time.monotonic())
        longest = _LONGEST_WAIT.total_seconds()
        try:
            work.wait(datetime.timedelta(seconds=min(left, longest)))
        except RuntimeError as error:
            if end - time.monotonic() <= 0:
                raise RanksMissingError(
                    f"{name}: the deadline passed in the transfer"
                    + (f" with {_rank_list(peers)}" if peers else ""),
                    peers,
                ) from error
            raise self._lost(name, peers, error) from error

    def _lost(self, name: str, peers: list[int], error: RuntimeError) -> RanksLostError:
        who = _rank_list(peers) if peers else "a rank"
        return RanksLostError(f"{name}: lost the connection to {who}: {error}", peers)

    def _number(self, value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._device)

    def _view(self, buffer: bytearray, begin: int) -> torch.Tensor:
        """A piece of the buffer as a tensor; `begin` lies inside it."""
        count = min(self._piece_bytes, len(buffer) - begin)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=begin)

    def _cut(self, buffer: bytearray) -> list[torch.Tensor]:
        return [self._view(buffer, begin) for begin in range(0, len(buffer), self._piece_bytes)]

    @staticmethod
    def _land(piece: torch.Tensor, landed: torch.Tensor) -> None:
        if landed.data_ptr() != piece.data_ptr():
            piece.copy_(landed)

    # Arguments. A call that is refused counts here too, as it does on the other ranks, and they
    # are told.

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self.size:
            last = self.size - 1
            self._refuse(f"{name}: root is {root}, expected a rank from 0 to {last}")

    def _check_parts(self, name: str, parts: Sequence[bytes]) -> None:
        if len(parts) != self.size:
            expected = f"expected one for each of {self.size} ranks"
            self._refuse(f"{name}: found {len(parts)} parts, {expected}")

    def _refuse(self, message: str) -> NoReturn:
        if self.size > 1:
            self._arrive()
            self._decide({"by": self.rank, "missing": [], "refused": message})
        raise ValueError(message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]
