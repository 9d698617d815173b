"""Objects that a forked child inherits: torch's process groups, and locks.

The connections of a process group and of its store belong to the parent, which goes on using them.
A child that used them would break the parent's group, or wait for answers that the parent gets.
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
    """A lock that is free in a forked child, even if a thread of the parent held it."""

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
    """Refuses a process group that was inherited through a fork.

    Args:
        group: the torch process group.
        process: the id of the process that first used the group here.

    Raises:
        UnsupportedError: the group was created, or first used, before this process was forked.
    """
    if group in _inherited or process != os.getpid():
        raise UnsupportedError(
            "the process group was created before this process was forked; its connections belong "
            "to the parent",
            hint="save and load in the parent, or alone with group=tilestone.solo()",
        )
