"""Arrays that a load can't fill where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CopiedBack:
    """Owns the memory that is filled in an array's stead, and hands it on when it is full.

    Args:
        memory: what is filled: an array, or the owner of a view.
        target: the object that stands in the template.
        put: put(target, memory) gives what a load gives back: the target after the memory was
            copied into it, or an object that replaces it.
    """

    __slots__ = ("_memory", "_put", "_target")

    def __init__(self, memory: Any, target: Any, put: Callable[[Any, Any], Any]) -> None:
        self._memory = memory
        self._target = target
        self._put = put

    def finish(self) -> Any:
        """Hands the memory on; what a load gives back."""
        memory = self._memory
        if isinstance(memory, CopiedBack):
            memory = memory.finish()
        return self._put(self._target, memory)
