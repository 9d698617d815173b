"""Counts what one all_to_all of Tilestone's communicator over torch.distributed sends.

    python bench/torch_messages.py [RANKS...]

Ranks are threads of this process, with a store and messages in memory. The counts are those of all
ranks together, and exact: keys that are written to the store or read from it, without looks whether
a key is there; and messages from rank to rank. Each rank has messages for 16 other ranks.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import torch
from torch.distributed import HashStore

from tilestone._torch.arrivals import Arrivals
from tilestone._torch.comm import TorchCommunicator
from tilestone._torch.group import Shared
from tilestone._torch.transfer import Transfer

PEERS = 16
MESSAGE = b"x" * 100
TIMEOUT = 600.0


class Counts:
    """Of all ranks together."""

    def __init__(self) -> None:
        self.keys = self.messages = 0
        self.lock = threading.Lock()


class CountedStore:
    def __init__(self, store: Any, counts: Counts) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(keys: Any, *more: Any) -> Any:
            if name != "check":
                with self._counts.lock:
                    self._counts.keys += len(keys) if isinstance(keys, list) else 1
            return request(keys, *more)

        return counted


class InMemory(Transfer):
    """Moves tensors between threads."""

    def __init__(self, rank: int, boxes: list[list[Any]], counts: Counts) -> None:
        self._rank, self._boxes, self._counts = rank, boxes, counts
        self._fragment_bytes = 1 << 30
        self.device = torch.device("cpu")

    def _move(self, name: str, outgoing: Any, incoming: Any, end: float) -> None:
        for rank, tensor in outgoing:
            self._boxes[rank][self._rank].put(tensor)
        for rank, tensor in incoming:
            tensor.copy_(self._boxes[self._rank][rank].get(timeout=TIMEOUT))
        with self._counts.lock:
            self._counts.messages += len(outgoing)


def _communicator(rank: int, ranks: int, store: Any, transfer: Transfer) -> TorchCommunicator:
    comm = TorchCommunicator.__new__(TorchCommunicator)
    comm.rank, comm.size = rank, ranks
    comm._group, comm._shared, comm._transfer = object(), Shared("bench"), transfer
    comm._shared._store = store
    comm._longest_record = 64
    comm._arrivals = Arrivals(comm._shared, rank, ranks)
    comm._arrivals.longest_pause = lambda: 10.0  # type: ignore[method-assign]
    return comm


def _sent(rank: int, ranks: int) -> list[bytes]:
    to = {(rank + 1 + step) % ranks for step in range(PEERS)}
    return [MESSAGE if each in to else b"" for each in range(ranks)]


def cost(ranks: int) -> Counts:
    """The counts of one all_to_all."""
    counts, found = Counts(), [0] * ranks
    store = CountedStore(HashStore(), counts)
    boxes = [[queue.SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]

    def run(rank: int) -> None:
        comm = _communicator(rank, ranks, store, InMemory(rank, boxes, counts))
        found[rank] = sum(map(len, comm.all_to_all(_sent(rank, ranks), TIMEOUT)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if found != [len(MESSAGE) * PEERS] * ranks:
        raise RuntimeError(f"a rank of {ranks} has got other bytes than were sent to it")
    return counts


def main() -> None:
    print("| ranks | keys | messages |")
    print("|---|---|---|")
    for ranks in map(int, sys.argv[1:] or ["64", "256"]):
        counts = cost(ranks)
        print(f"| {ranks:,} | {counts.keys:,} | {counts.messages:,} |", flush=True)


if __name__ == "__main__":
    main()
