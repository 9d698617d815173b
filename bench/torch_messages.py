"""What one all_to_all of Tilestone's communicator over torch.distributed costs, by number of ranks.

    python bench/torch_messages.py [RANKS...]

Ranks are threads of this process over one real TCPStore. Messages between them go through memory,
so what they cost over sockets comes on top; the table therefore counts them. In the sparse case
each rank has messages for 16 ranks, in the dense one for all of them.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a line for each client of the store

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import TCPStore

from tilestone._torch_arrivals import Arrivals
from tilestone._torch_comm import TorchCommunicator
from tilestone._torch_group import Shared
from tilestone._torch_transfer import Transfer

PEERS = 16
MESSAGE = b"x" * 100
TIMEOUT = 600.0


class Counts:
    """Of all ranks together."""

    def __init__(self) -> None:
        self.requests = self.keys = self.messages = 0
        self.lock = threading.Lock()


class CountedStore:
    def __init__(self, store: Any, counts: Counts) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(keys: Any, *more: Any) -> Any:
            with self._counts.lock:
                self._counts.requests += 1
                # Looking whether all ranks have arrived is one request, as often as it is made.
                if name != "check":
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
    return comm


def _sent(rank: int, ranks: int, peers: int) -> list[bytes]:
    to = {(rank + 1 + step) % ranks for step in range(peers)}
    return [MESSAGE if each in to else b"" for each in range(ranks)]


def cost(ranks: int, peers: int) -> tuple[float, float, Counts]:
    """(seconds, CPU seconds of all ranks, counts) of one all_to_all."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counts, found = Counts(), [0] * ranks
    boxes = [[queue.SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]
    start = threading.Barrier(ranks + 1)

    def run(rank: int) -> None:
        client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        store = CountedStore(PrefixStore("bench", client), counts)
        comm = _communicator(rank, ranks, store, InMemory(rank, boxes, counts))
        comm.gather(b"", 0, TIMEOUT)
        start.wait()
        start.wait()
        found[rank] = sum(map(len, comm.all_to_all(_sent(rank, ranks, peers), TIMEOUT)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    start.wait()
    counts.requests = counts.keys = counts.messages = 0
    begin, cpu = time.monotonic(), time.process_time()
    start.wait()
    for thread in threads:
        thread.join()
    if found != [len(MESSAGE) * peers] * ranks:
        raise RuntimeError(f"a rank of {ranks} has got other bytes than were sent to it")
    return time.monotonic() - begin, time.process_time() - cpu, counts


def main() -> None:
    print("| ranks | messages of a rank | s | CPU s | requests | keys | sent messages |")
    print("|---|---|---|---|---|---|---|")
    for ranks in map(int, sys.argv[1:] or ["64", "256", "1024"]):
        for peers in (PEERS, ranks - 1):
            seconds, cpu, counts = cost(ranks, peers)
            numbers = f"{counts.requests:,} | {counts.keys:,} | {counts.messages:,}"
            print(f"| {ranks:,} | {peers:,} | {seconds:.2f} | {cpu:.2f} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
