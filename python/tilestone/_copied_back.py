"""Arrays that a load can't fill where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CopiedBack:
    """Owns the memory that is filled in an array's stead, and copies it into the array.

    Attributes:
        target: the array.
    """

    __slots__ = ("_copy", "_memory", "target")

    def __init__(self, memory: Any, target: Any, copy: Callable[[Any, Any], Any]) -> None:
        self._memory = memory
        self.target = target
        self._copy = copy

    def finish(self) -> Any:
        """Copies; the array."""
        self._copy(self.target, self._memory)
        return self.target
