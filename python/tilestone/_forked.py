"""What a forked child has inherited: torch's process groups, and locks.

Their connections, and the store's, are the parent's, which goes on using them: a child that wrote
to them would break the parent's group, or wait for answers that the parent gets.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

from tilestone._errors import UnsupportedError

_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def _note_fork() -> None:
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torch, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        _inherited.add(group)


os.register_at_fork(after_in_child=_note_fork)


class Lock:
    """A lock that a child finds free, though a thread of the parent may have held it."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def check(group: Any, process: int) -> None:
    """Refuses a group that was made, or first used in the process `process`, before a fork.

    Raises:
        UnsupportedError: saying what to do.
    """
    if group in _inherited or process != os.getpid():
        raise UnsupportedError(
            "the process group was made before this process was forked; its connections are the "
            "parent's",
            hint="save and load in the parent, or alone with comm=tilestone.solo()",
        )
