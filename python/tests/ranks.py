"""Worlds of real torch ranks (gloo), which are kept alive over many tests.

Each rank is a process that waits for work. Work is a function of a test module and its arguments.
Every rank runs it as function(rank, world, *args).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

# Seconds without a result from any rank. Nothing here takes that long, even on a slow machine.
_HANGS = 400.0

# If a rank has more process groups than this, its world is replaced before the next test.
_MANY_GROUPS = 6

_starts = threading.Lock()


def context() -> Any:
    """What starts processes as forks of one that has imported torch and the others."""
    found = multiprocessing.get_context("forkserver")
    # Importing torch in each rank takes longer than most tests.
    found.set_forkserver_preload(["rank_imports"])
    with _starts:
        # Python before 3.13 looks for it only where it looks for installed packages.
        before = os.environ.get("PYTHONPATH")
        here = os.path.dirname(__file__)
        os.environ["PYTHONPATH"] = here if before is None else os.pathsep.join((here, before))
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return found


def die_with_the_parent() -> None:
    """Kills this rank when its parent ends. A stopped rank would not notice that otherwise."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


@dataclasses.dataclass
class Raised:
    """An exception of a rank."""

    kind: str
    bases: list[str]
    text: str
    attributes: dict[str, Any]
    trace: str


def _logged(error: BaseException) -> Raised:
    names = ("code", "message", "key", "file", "rank", "hint", "errno")
    attributes = {name: getattr(error, name) for name in names if hasattr(error, name)}
    bases = [kind.__name__ for kind in type(error).__mro__]
    return Raised(type(error).__name__, bases, str(error), attributes, traceback.format_exc())


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    die_with_the_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            result: Any = function(rank, world, *args)
        except Exception as error:
            result = _logged(error)
        pipe.send((result, len(dist.distributed_c10d._world.pg_map)))
    dist.destroy_process_group()


class World:
    """`size` ranks. A world can't be used any more after a rank was lost or hung.

    Between two calls its processes are stopped, because the loop of each gloo group wakes up a
    hundred times per second, and there are many groups.
    """

    def __init__(self, size: int) -> None:
        os.environ.update(USE_LIBUV="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        self.size = size
        self.alive = True
        self.groups = 1  # the maximum number of process groups of a rank
        self._folder = tempfile.TemporaryDirectory()
        forks = context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = forks.Pipe()
            process = forks.Process(
                target=_serve, args=(rank, size, f"{self._folder.name}/store", there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def collect(self, function: Any, *args: Any, timeout: float = _HANGS) -> list[Any]:
        """Each rank's result, or the exception that it raised, or "lost" if the rank died."""
        self.begin(function, *args)
        return self.finish(timeout=timeout)

    def begin(self, function: Any, *args: Any) -> None:
        """Starts the work on every rank and returns. finish() must follow."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args))

    def kill(self, rank: int) -> None:
        """Sends SIGKILL to one rank."""
        self._processes[rank].kill()

    def finish(self, timeout: float = _HANGS) -> list[Any]:
        """Waits for the work begun last. Returns the same as collect()."""
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in results}
            ready = wait(list(waiting), timeout)
            if not ready:
                self.close()
                raise AssertionError(
                    f"ranks {sorted(waiting.values())} hang; the others: {results}"
                )
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    results[rank], groups = self._pipes[rank].recv()
                    self.groups = max(self.groups, groups)
                except EOFError:
                    results[rank] = "lost"
                    self.alive = False
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.size)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)

    def run(self, function: Any, *args: Any, timeout: float = _HANGS) -> list[Any]:
        """Each rank's result. Fails if a rank raised an exception."""
        results = self.collect(function, *args, timeout=timeout)
        for rank, result in enumerate(results):
            if isinstance(result, Raised) or result == "lost":
                self.close()  # its ranks may be out of step, which would break other tests
            assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
            assert result != "lost", f"rank {rank} died"
        return results

    def close(self) -> None:
        """Ends the ranks: first asks them to end, then kills them."""
        self.alive = False
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


class Worlds:
    """Worlds by size. Each is started when it is first needed."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is None or not world.alive:
            world = self._worlds[size] = World(size)
        return world

    def renew(self) -> None:
        """Ends the worlds that have many process groups. No test may be using them."""
        for world in self._worlds.values():
            if world.alive and world.groups > _MANY_GROUPS:
                world.close()

    def close(self) -> None:
        for world in self._worlds.values():
            if world.alive:
                world.close()
