"""The machine's limits, measured with plain system calls in the same rounds as the contestants."""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BLOCK = 8 << 20  # bytes


def _aligned_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, BLOCK)
    buffer.write(os.urandom(1 << 16) * (BLOCK >> 16))  # touched, and not all zeros
    return buffer


class DirectWrite:
    """Writes a new file by direct I/O in 8 MiB blocks, `depth` at a time, then fsync."""

    name = "limit: direct write"

    def __init__(self, total: int, depth: int = 8) -> None:
        self._blocks = max(1, total // BLOCK)
        self._depth = depth
        self._buffers: queue.Queue[mmap.mmap] = queue.Queue()
        for _ in range(depth):
            self._buffers.put(_aligned_buffer())
        self._threads = ThreadPoolExecutor(depth)

    def run(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_WRONLY | os.O_DIRECT
        fd = os.open(path / "limit", flags)
        try:
            os.posix_fallocate(fd, 0, self._blocks * BLOCK)
            list(self._threads.map(lambda i: self._write(fd, i), range(self._blocks)))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write(self, fd: int, index: int) -> None:
        buffer = self._buffers.get()
        try:
            assert os.pwrite(fd, buffer, index * BLOCK) == BLOCK
        finally:
            self._buffers.put(buffer)


class Read:
    """Reads a file into reused buffers, `depth` blocks at a time, direct or buffered."""

    def __init__(self, depth: int, direct: bool) -> None:
        self.name = f"limit: {'direct' if direct else 'buffered'} read, depth {depth}"
        self._flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        self._depth = depth
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(depth)

    def run(self, path: Path) -> None:
        fd = os.open(path / "limit", self._flags)
        try:
            blocks = os.fstat(fd).st_size // BLOCK
            list(self._threads.map(lambda i: self._read(fd, i), range(blocks)))
        finally:
            os.close(fd)

    def _read(self, fd: int, index: int) -> None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = mmap.mmap(-1, BLOCK)
        assert os.preadv(fd, [self._local.buffer], index * BLOCK) == BLOCK


def memcpy_seconds(total: int, rounds: int = 3) -> float:
    """Median seconds of a single-threaded copy of `total` bytes into warm memory."""
    source = torch.ones(total, dtype=torch.uint8).numpy()
    target = source.copy()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def warm_caches(path: Path) -> None:
    """Reads every file under `path` into the page cache, because direct reads don't fill it."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.read(BLOCK):
                    pass


def drop_caches() -> None:
    """Writes dirty pages to disk, then empties the page cache. Needs root."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as control:
        control.write("3\n")
