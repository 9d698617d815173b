"""Moves bytes between ranks of a torch.distributed process group.

All ranks that take part in a transfer are known to have arrived (see comm.py).
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tilestone._torch.group import RanksLostError, RanksMissingError, Shared

_LONGEST_WAIT = datetime.timedelta(days=1)  # the limit of one wait inside torch
_NAMED_RANKS = 8


def rank_list(ranks: Sequence[int]) -> str:
    """The ranks, for a message."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = [str(rank) for rank in ranks[:_NAMED_RANKS]]
    more = len(ranks) - len(named)
    last = f"{more} more" if more else named.pop()
    return f"ranks {', '.join(named)} and {last}"


def transfer_device(group: dist.ProcessGroup) -> torch.device:
    """The device for the group's tensors: the CPU if the backend supports it.

    Otherwise the device that the group was bound to (`init_process_group(device_id=...)`), or the
    current one.
    """
    config = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"
    kinds = [part.split(":")[0] for part in config.split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = next((kind for kind in kinds if kind != "cpu"), "cuda")
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == kind and bound.index is not None:
        return bound
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _memory_of(data: bytes) -> Any:
    """The memory of what is sent, without a copy. torch refuses a buffer that is read-only."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    memory: Any = (ctypes.c_char * len(data)).from_address(address)
    memory.owner = data  # a transfer that has failed may still read it
    return memory


class Transfer:
    """This rank's sends, receives and broadcasts. Only for the group's helper thread.

    `end`: the time.monotonic() at which a transfer that has not ended fails. The methods raise
    RanksMissingError at `end`, and RanksLostError if a connection is lost.
    """

    def __init__(self, group: dist.ProcessGroup, shared: Shared, fragment_bytes: int) -> None:
        self._group = group
        self._shared = shared
        self._fragment_bytes = fragment_bytes
        self.device = transfer_device(group)

    def exchange(
        self, name: str, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], end: float
    ) -> dict[int, bytearray]:
        """Sends to some ranks and receives from others, by rank: `incoming` has the sizes."""
        buffers = {rank: bytearray(size) for rank, size in incoming.items()}
        arriving = [
            (rank, fragment) for rank, data in buffers.items() for fragment in self._cut(data)
        ]
        landing = [(rank, torch.empty_like(p, device=self.device)) for rank, p in arriving]
        if self.device.type == "cpu":
            landing = arriving
        leaving = [
            (rank, fragment.to(self.device))
            for rank, data in outgoing.items()
            for fragment in self._cut(_memory_of(data))
        ]
        self._move(name, leaving, landing, end)
        for (_, fragment), (_, landed) in zip(arriving, landing, strict=True):
            self._land(fragment, landed)
        return buffers

    def broadcast(self, data: bytes, size: int, end: float) -> bytes:
        """Returns the `size` bytes that are `data` on rank 0."""
        rank = dist.get_rank(self._group)
        buffer = bytearray(data) if rank == 0 else bytearray(size)
        for begin in range(0, size, self._fragment_bytes):
            fragment = self._view(buffer, begin)
            moving = fragment.to(self.device)
            source = dist.get_global_rank(self._group, 0)
            work = dist.broadcast(moving, source, group=self._group, async_op=True)
            self._wait("broadcast", [0] if rank != 0 else [], work, end)
            if rank != 0:
                self._land(fragment, moving)
        return bytes(buffer)

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
        # gloo returns one work for each move, NCCL one for all moves.
        waiting = peers if len(works) == len(peers) else [-1] * len(works)
        for peer, work in zip(waiting, works, strict=True):
            self._wait(name, [peer] if peer >= 0 else [], work, end)

    def _p2p(self, kind: Any, rank: int, tensor: torch.Tensor) -> dist.P2POp:
        peer = dist.get_global_rank(self._group, rank)
        return dist.P2POp(kind, tensor, peer, self._group, self._shared.operation % (1 << 30))

    def _wait(self, name: str, peers: list[int], work: Any, end: float) -> None:
        left = max(0.001, end - time.monotonic())
        longest = _LONGEST_WAIT.total_seconds()
        self._shared.moving_with = peers
        try:
            work.wait(datetime.timedelta(seconds=min(left, longest)))
        except RuntimeError as error:
            if end - time.monotonic() <= 0:
                raise RanksMissingError(
                    f"{name}: the deadline passed in the transfer"
                    + (f" with {rank_list(peers)}" if peers else ""),
                    peers,
                ) from error
            raise self._lost(name, peers, error) from error
        finally:
            self._shared.moving_with = []

    @staticmethod
    def _lost(name: str, peers: list[int], error: RuntimeError) -> RanksLostError:
        who = rank_list(peers) if peers else "a rank"
        return RanksLostError(f"{name}: lost the connection to {who}: {error}", peers)

    def _view(self, buffer: Any, begin: int) -> torch.Tensor:
        """The fragment of the buffer that starts at `begin`, as a tensor; `begin` < len(buffer)."""
        count = min(self._fragment_bytes, len(buffer) - begin)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=begin)

    def _cut(self, buffer: Any) -> list[torch.Tensor]:
        return [self._view(buffer, begin) for begin in range(0, len(buffer), self._fragment_bytes)]

    @staticmethod
    def _land(fragment: torch.Tensor, landed: torch.Tensor) -> None:
        if landed.data_ptr() != fragment.data_ptr():
            fragment.copy_(landed)
