"""A thread for work that can block, so that the caller need not wait beyond its deadline."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tilestone import _core

CHECK_EVERY = 0.05  # seconds between a waiting caller's calls of its `check`
GRACE = 1.5  # seconds after the deadline in which the helper may still report its result
_SHORTEST_POLL = 0.0002  # seconds
_FIRST_POLL = 0.02  # the first pause, as a share of the longest
LAST_WORDS = 1.0  # seconds for messages that have no deadline of their own

Check = Callable[[], None] | None  # called by a caller while it waits; raises to end the wait


class StuckError(Exception):
    """A request or a transfer did not end by its deadline."""


class Task:
    """Work for a helper thread.

    `end`: the time.monotonic() at which the work stops waiting; it may be moved to an earlier time.
    """

    def __init__(self, work: Callable[[Task], Any], end: float) -> None:
        self._work = work
        self.end = end
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work(self)
        except BaseException as error:
            self.error = error
        finally:
            del self._work  # it holds the process group
            self.over.set()


class Helper:
    """A thread that runs work that can block, one task after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._last: Task | None = None
        self._thread = threading.Thread(target=self._serve, name="tilestone-comm", daemon=True)
        self._thread.start()
        _helpers.add(self)

    def is_alive(self) -> bool:
        """False in a forked child."""
        return self._thread.is_alive()

    def is_busy(self) -> bool:
        """Whether it still runs a task that its caller no longer waits for."""
        return self._last is not None and not self._last.over.is_set()

    def do(
        self,
        work: Callable[[Task], Any],
        end: float,
        check: Check = None,
        goes_on: bool = False,
    ) -> Any:
        """Runs `work` in the thread; returns or raises what it does.

        An exception from `check` or from a signal handler ends the wait at once. It also ends the
        work, unless `goes_on` is set: the work then goes on until there is other work.

        Raises:
            StuckError: the work has not ended GRACE seconds after `end` (at `end` if the thread was
                busy before).
        """
        if self._last is not None:
            self._last.end = min(self._last.end, time.monotonic() + LAST_WORDS)
        grace = 0 if self.is_busy() else GRACE
        task = self._last = Task(work, end)
        self._queue.put(task)
        try:
            while not task.over.is_set():
                if check is not None:
                    check()
                left = end + grace - time.monotonic()
                if not task.over.wait(max(0, min(left, CHECK_EVERY))) and left <= 0:
                    raise StuckError
        except BaseException:
            if not goes_on:
                task.end = 0
            raise
        if task.error is not None:
            raise task.error
        return task.result

    def stop(self, seconds: float) -> bool:
        """Asks the thread to end; returns whether it did so within that time."""
        if self._last is not None:
            self._last.end = 0
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task


def poll(done: Callable[[], bool], longest: float, task: Task, end: float = math.inf) -> bool:
    """Waits until done() is true; False if the task's time or `end` is over before that.

    `longest`: the longest pause between two calls of done(), in seconds.
    """
    pause = max(_SHORTEST_POLL, longest * _FIRST_POLL)
    while not done():
        left = min(task.end, end) - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, longest)
    return True


_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()


@atexit.register
def _stop_helpers() -> None:
    """Ends the threads: one that returned from torch while the interpreter ends would abort it.

    A thread that is stuck in a request is left behind: it waits at the point where it would abort.
    """
    if not all([helper.stop(LAST_WORDS) for helper in list(_helpers)]):
        _core.leave_threads_behind()
