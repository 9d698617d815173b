"""The save of a CheckpointManager that is in flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tilestone._calls.async_save import AsyncSave
from tilestone._errors import UnsupportedError
from tilestone._training_run.fast import HostSave


class InFlight:
    """A save in the background.

    Args:
        end: called with the step and the save id once the save has ended, also on a thread of the
            engine.

    Attributes:
        written: the end of the save; with a fast tier, not that of its draining.
    """

    def __init__(self, saving: AsyncSave, step: int, end: Callable[[int, str], None]) -> None:
        self._ended = threading.Event()
        self.written = saving.local if isinstance(saving, HostSave) else saving.durable
        self.step = step
        self._process = os.getpid()
        self.saving = saving

        def ended(_: object) -> None:
            try:
                end(step, saving.save_id)
            finally:
                self._ended.set()

        self.written.add_done_callback(ended)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked after the save had begun."""
        return self._process != os.getpid()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for its end without asking for its result, which the next save then raises.

        Returns:
            Whether it has ended, after `seconds` at most.

        Raises:
            UnsupportedError: in a forked child.
            InvalidArgumentError: in a callback of that save.
        """
        if self.is_of_parent:
            raise UnsupportedError(
                f"the save of step {self.step} belongs to the process that this one was forked from",
                hint="go on with the manager in the parent, or make another one here",
            )
        self.saving._core.expect_other_thread()
        self.saving.staged.exception()  # seals it, with stage="lazy"
        return self._ended.wait(seconds)
