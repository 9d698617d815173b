"""A run's directory behind a link of 100 MB/s: with a fast tier on the hosts' disks, and without.

    .venv/bin/python bench/fast_tier.py [--mib 256] [--rounds 3] [--rate 100]

Two ranks, each with a "host" of its own: a directory on this machine's disk. The run's directory is a
store of this process (tilestone.register_store) over a directory, which moves --rate million bytes a
second, both ranks together. Prints a table in Markdown: medians of --rounds runs, in seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORLD = 2
WORK = 1.0  # seconds of a training step


class Link:
    """Lets bytes pass at a rate."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            wait = self._free - time.monotonic()
        time.sleep(max(0.0, wait))


class Writer:
    def __init__(self, path: Path, link: Link) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._link = path, link
        self._file = path.with_name(path.name + f".{os.getpid()}.part").open("wb")

    def write(self, data: bytes, /) -> None:
        self._link.take(len(data))
        self._file.write(data)

    def close(self) -> None:
        self._file.close()
        os.replace(self._file.name, self._path)


def store_of(root: Path, link: Link) -> Any:
    import tilestone

    def tag_of(path: Path) -> str:
        found = path.stat()
        return f"{found.st_ino}-{found.st_mtime_ns}"

    def stat(name: str) -> Any:
        try:
            found = (root / name).stat()
            return found.st_size, found.st_mtime, tag_of(root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def listing(prefix: str, deep: bool) -> Any:
        every = [p for p in root.rglob("*") if p.is_file() and not p.name.endswith(".part")]
        names = sorted(str(p.relative_to(root)) for p in every)
        names = [name for name in names if name.startswith(prefix)]
        rest = {name: name[len(prefix) :] for name in names}
        folders = sorted({prefix + r.partition("/")[0] for r in rest.values() if "/" in r})
        shown = [name for name in names if deep or "/" not in rest[name]]
        found = [(name, stat(name)) for name in shown]  # some may have been removed meanwhile
        return [(name, *facts[:2]) for name, facts in found if facts], [] if deep else folders

    def get(name: str, offset: int, size: int, tag: str) -> bytes:
        with (root / name).open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        link.take(len(data))
        return data

    def put(name: str, data: bytes, tag: str | None) -> bool:
        path = root / name
        if tag is not None and (path.exists() if tag == "" else tag_of(path) != tag):
            return False
        writer = Writer(path, link)
        writer.write(data)
        writer.close()
        return True

    def remove(names: list[str]) -> None:
        for name in names:
            (root / name).unlink(missing_ok=True)

    return tilestone.Store(
        stat=stat, listing=listing, get=get, put=put, remove=remove, has_tags=True,
        create=lambda name: Writer(root / name, link),
    )  # fmt: skip


def measure(rank: int, folder: Path, size: int, rate: float, is_fast: bool) -> dict[str, float]:
    """Five steps, a save after the second and the fourth; then a restart."""
    import numpy

    import tilestone

    link = Link(rate / WORLD)
    tilestone.register_store(f"slow{folder.name}", lambda url: store_of(folder / url.partition("://")[2], link))
    data = numpy.random.default_rng(rank).random(size // WORLD // 8)
    offsets = (0, rank, WORLD)
    made = tilestone.ShardedTensor.from_rank_offsets("w", data, offsets)
    given: dict[str, Any] = {"fast": tilestone.Fast(folder / f"host{rank}")} if is_fast else {}
    found: dict[str, float] = {}
    began = time.monotonic()
    with tilestone.CheckpointManager(f"slow{folder.name}://run", every=2, **given) as manager:
        for step in range(1, 6):
            time.sleep(WORK)
            call = time.monotonic()
            manager.save(step, {"w": made})
            if step == 4:  # memory and plans are there
                found["blocked"] = time.monotonic() - call
                saving = manager.last_save
                for name in ("local", "durable"):
                    if hasattr(saving, name):
                        at = f"{name}_at"
                        getattr(saving, name).add_done_callback(
                            lambda _, at=at, call=call: found.setdefault(at, time.monotonic() - call)
                        )
            if step == 5:
                found["loop of 5 s"] = time.monotonic() - began
    renamed = {name.removesuffix("_at"): value for name, value in found.items()}
    loaded = numpy.empty_like(data)
    with tilestone.CheckpointManager(f"slow{folder.name}://run", every=2, **given) as manager:
        began = time.monotonic()
        target = tilestone.ShardedTensor.from_rank_offsets("w", loaded, offsets)
        assert manager.restore({"w": target})[1] == 4
        renamed["restart"] = time.monotonic() - began
    assert (loaded == data).all()
    return renamed


def rank_main(rank: int, place: str, size: int, rate: float, pipe: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{place}/group", rank=rank, world_size=WORLD
    )
    while (work := pipe.recv()) is not None:
        pipe.send(measure(rank, Path(work[0]), size, rate, work[1]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100.0, help="million bytes a second")
    given = parser.parse_args()
    place = tempfile.mkdtemp(dir=".")
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORLD):
        here, there = spawn.Pipe()
        process = spawn.Process(
            target=rank_main, args=(rank, os.path.abspath(place), given.mib << 20, given.rate * 1e6, there)
        )
        process.start()
        pipes.append(here)
        processes.append(process)
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(given.rounds):
        for is_fast in (True, False) if number % 2 == 0 else (False, True):
            folder = Path(place) / f"r{number}{'f' if is_fast else 'p'}"
            folder.mkdir()
            for pipe in pipes:
                pipe.send((str(folder.resolve()), is_fast))
            of_ranks = [pipe.recv() for pipe in pipes]
            rows[is_fast].append({name: max(r[name] for r in of_ranks) for name in of_ranks[0]})
            shutil.rmtree(folder)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    shutil.rmtree(place)
    names = ["blocked", "local", "durable", "loop of 5 s", "restart"]
    print(f"| {given.mib} MiB, {given.rate:.0f} MB/s | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for is_fast, label in ((False, "straight"), (True, "fast tier")):
        cells = [
            f"{statistics.median(r[name] for r in rows[is_fast]):.2f}" if name in rows[is_fast][0] else "-"
            for name in names
        ]
        print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
