"""Arrays that a load can't fill in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CopiedBack:
    """Owns memory that is filled in place of an array, and passes it on when it is full.

    Args:
        memory: what is filled: an array, or the owner of a view.
        target: the object in the template.
        put: put(target, memory) returns what the load returns: the target after the memory was
            copied into it, or an object that replaces the target.
    """

    __slots__ = ("_memory", "_put", "_target")

    def __init__(self, memory: Any, target: Any, put: Callable[[Any, Any], Any]) -> None:
        self._memory = memory
        self._target = target
        self._put = put

    def finish(self) -> Any:
        """Passes the filled memory on; returns what the load returns."""
        memory = self._memory
        if isinstance(memory, CopiedBack):
            memory = memory.finish()
        return self._put(self._target, memory)
