"""Saves in the background: how long they keep a training loop waiting, and how they slow it down.

    async_saves.py CONTESTANT MIB DIR      one contestant in this fresh process; prints JSON

Each contestant saves large tensors of one rank several times, first while nothing else runs, then
beside a loop that is bound by memory and one that is bound by computing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SAVES = 4  # beside nothing; the first one is reported apart
Saved = Callable[[], object]  # waits until the checkpoint is durable
Start = Callable[[dict[str, torch.Tensor], Path], Saved]


def _tilestone(**options: Any) -> Start:
    import tilestone

    return lambda state, path: tilestone.async_save(state, path, **options).result


def _prepared() -> Start:
    import tilestone

    session = tilestone.Session()
    prepared: list[int] = []

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        return session.async_save(state, path).result

    start.prepare = lambda state, _: prepared.append(session.prepare(state))  # type: ignore[attr-defined]
    return start


class _Lazy:
    """A save that is sealed a training step after its call. The step takes longer than a save."""

    def __init__(self, saving: Any, step: float) -> None:
        self._saving = saving
        self._step = step

    def seal(self) -> float:
        """Called once, when the call has returned. Returns the seconds that sealing takes."""
        time.sleep(self._step)
        self._step = 0
        begin = time.perf_counter()
        self._saving.staged.result()
        return time.perf_counter() - begin

    def __call__(self) -> object:
        time.sleep(self._step)
        return self._saving.result()


def _lazy(dtensors: bool) -> Start:
    import tilestone

    session: Any = None
    given: dict[str, Any] = {}
    step = 0.0

    def prepare(state: dict[str, torch.Tensor], folder: Path) -> None:
        nonlocal session, step
        given.update(_dtensors(state) if dtensors else state)
        session = tilestone.Session()
        session.prepare(given)
        for _ in range(2):
            begin = time.perf_counter()
            session.save(given, folder / "once", overwrite=True)
            step = 1.5 * (time.perf_counter() - begin)
        shutil.rmtree(folder / "once")

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        return _Lazy(session.async_save(given, path, stage="lazy"), step)

    start.prepare = prepare  # type: ignore[attr-defined]
    return start


def _dtensors(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same memory in DTensors of one rank."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    return {key: DTensor.from_local(each, mesh, [Shard(0)]) for key, each in state.items()}


def _blocking() -> Start:
    import tilestone

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        tilestone.save(state, path)
        return lambda: None

    return start


def _drop_in() -> Start:
    import tilestone.dcp as dcp

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        return dcp.async_save(state, checkpoint_id=path, no_dist=True).result

    return start


def _dcp(process: bool, plug_in: bool = False) -> Start:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if not dist.is_initialized():
        store = dist.HashStore() if not process else dist.TCPStore("localhost", 0, 1, True)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0" if not process else str(store.port))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    if plug_in:
        from tilestone.dcp import FileSystemWriter
    else:
        from torch.distributed.checkpoint import FileSystemWriter

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        writer = FileSystemWriter(path, sync_files=True)
        return dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result

    return start


def _torch_checkpointing() -> Start:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    from contestants import sync_tree

    config = CheckpointManager.Config()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(config)

    def start(state: dict[str, torch.Tensor], path: Path) -> Saved:
        saved = manager.save(str(path), {"model": state})

        def wait() -> None:
            saved.result()
            sync_tree(path)

        return wait

    return start


CONTESTANTS: dict[str, Callable[[], Start]] = {
    "tilestone": lambda: _tilestone(),
    "tilestone (again)": lambda: _tilestone(),
    "tilestone, Session.prepare": _prepared,
    "tilestone, lazy": lambda: _lazy(dtensors=False),
    "tilestone, lazy, DTensors": lambda: _lazy(dtensors=True),
    "tilestone.save (blocking)": _blocking,
    "tilestone.dcp.async_save": _drop_in,
    "DCP async_save, thread, Tilestone's writer": lambda: _dcp(False, plug_in=True),
    "DCP async_save, thread": lambda: _dcp(False),
    "DCP async_save, process": lambda: _dcp(True),
    "torch-checkpointing": _torch_checkpointing,
}


def _copy_seconds(state: dict[str, torch.Tensor]) -> float:
    """A warm copy of the tensors by all threads: the least of five."""
    copies = {key: tensor.clone() for key, tensor in state.items()}
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for key, tensor in state.items():
            copies[key].copy_(tensor)
        times.append(time.perf_counter() - begin)
    return min(times)


class _Peak:
    """The largest resident size while it is open, beyond that at the beginning, in bytes."""

    def __enter__(self) -> _Peak:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._status("VmHWM") - self._before

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise RuntimeError(f"no {name}")


def _steps(step: Callable[[], object], until: threading.Event | None) -> float:
    """The mean seconds of a step: of 20, or of all until the event and at least 3."""
    count, begin = 0, time.perf_counter()
    while count < 3 or (count < 20 if until is None else not until.is_set()):
        step()
        count += 1
    return (time.perf_counter() - begin) / count


def _slow_down(start: Start, state: dict[str, torch.Tensor], path: Path,
               step: Callable[[], object]) -> float:
    """How much longer a step takes while a save is written: 0.05 is 5 %."""
    _steps(step, None)
    alone = _steps(step, None)
    wait = start(state, path)
    durable = threading.Event()

    def watch() -> None:
        wait()
        durable.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    beside = _steps(step, durable)
    watcher.join()
    return beside / alone - 1


def _measure(name: str, mib: int, folder: Path) -> dict[str, float]:
    state = {f"w{i}": torch.full((mib << 16,), float(i)) for i in range(4)}  # MIB in all
    start = CONTESTANTS[name]()
    with contextlib.suppress(AttributeError):
        start.prepare(state, folder)  # type: ignore[attr-defined]
    blocked, durable = [], []
    with _Peak() as peak:
        for i in range(SAVES):
            begin = time.perf_counter()
            wait = start(state, folder / str(i))
            blocked.append(time.perf_counter() - begin)
            if isinstance(wait, _Lazy):
                blocked[-1] += wait.seal()
            wait()
            durable.append(time.perf_counter() - begin)
            shutil.rmtree(folder / str(i))
    found = {"copy": _copy_seconds(state), "first": blocked[0], "first durable": durable[0],
             "blocked": statistics.median(blocked[1:]), "durable": statistics.median(durable[1:]),
             "peak": peak.bytes}
    large, other = torch.ones(32 << 20), torch.ones(32 << 20)
    square = torch.ones(1024, 1024)
    for loop, step in (("memory", lambda: large.add_(other)), ("compute", lambda: square @ square)):
        found[f"{loop}-bound"] = _slow_down(start, state, folder / loop, step)
        shutil.rmtree(folder / loop)
    return found


def async_saves(case: Any, plan: Any) -> Any:
    """The case `async` of bench/run."""
    import programs
    from measure import Rounds, Table

    mib = max(64, int(4096 * plan.scale))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    rounds = Rounds(case, plan)
    while rounds.another():
        for name in CONTESTANTS:
            folder = plan.root / "async"
            folder.mkdir(exist_ok=True)
            try:
                found[name].append(programs.python("async_saves.py", name, str(mib), folder))
            except Exception as error:  # the other contestants still run
                case.fail("async save", name, error)
            shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for name, runs in found.items():
        if not runs:
            continue
        mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append([name, *(f"{1000 * mid[key]:.0f}" for key in ("copy", "first", "blocked")),
                     *(f"{mid[key]:.2f}" for key in ("first durable", "durable")),
                     f"{mid['peak'] / 2**20:.0f}",
                     *(f"{100 * mid[key]:.0f} %" for key in ("memory-bound", "compute-bound"))])
        case.figures[f"blocked / copy, {name}"] = mid["blocked"] / mid["copy"]
    case.tables.append(Table(
        "Saves in the background",
        f"{mib} MiB in 4 tensors from 1 rank; medians. Blocked is the time until the call returns. "
        f"Copy is a warm copy of the same bytes by torch, with all threads, in the same process. "
        f"After a lazy call there is a pause of 1.5 x a blocking save, in place of a training step; "
        f"blocked is the call and the sealing after the pause, and durable includes the pause. "
        f"Peak is the memory beyond the tensors. The last columns say by how much a step of a loop "
        f"takes longer while a save is written.",
        ["", "copy, ms", "first: blocked, ms", "later: blocked, ms", "first: durable, s",
         "later: durable, s", "peak, MiB", "memory-bound loop", "compute-bound loop"], rows))
    return case


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
