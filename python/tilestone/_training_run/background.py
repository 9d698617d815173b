"""What a CheckpointManager does in the background: the save in flight, and the pruning after it."""

from __future__ import annotations

import os
import threading

from tilestone import _core, _forked
from tilestone._calls.async_save import AsyncSave
from tilestone._errors import UnsupportedError

_lock = _forked.Lock()


class Pruning:
    """Begins to remove older steps when a save has ended, also on a thread of the engine.

    Nothing is begun once the manager, or the program, has ended.
    """

    def __init__(self, run: _core.ManagedRun, is_first: bool) -> None:
        self._run = run
        self._is_first = is_first  # rank 0
        self._ended = False

    def after(self, step: int) -> None:
        with _lock:
            if self._is_first and not self._ended:
                self._run.prune_after(step)

    def end(self) -> None:
        """Waits for what was begun."""
        with _lock:
            self._ended = True
        self._run.wait()


class InFlight:
    """A save in the background."""

    def __init__(self, saving: AsyncSave, step: int, pruning: Pruning) -> None:
        self._ended = threading.Event()
        self.step = step
        self._process = os.getpid()
        self.saving = saving

        def end(_: object) -> None:
            pruning.after(step)
            self._ended.set()

        saving.durable.add_done_callback(end)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked after the save had begun."""
        return self._process != os.getpid()

    def wait(self) -> None:
        """Waits for its end without asking for its result, which the next save then raises.

        Raises:
            UnsupportedError: in a forked child.
        """
        if self.is_of_parent:
            raise UnsupportedError(
                f"the save of step {self.step} belongs to the process that this one was forked from",
                hint="go on with the manager in the parent, or make another one here",
            )
        self.saving.staged.exception()  # seals it, with stage="lazy"
        self._ended.wait()
