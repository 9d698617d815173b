"""Checks what a pickled object may contain.

One rank writes such an object for all, so the object must be complete on every rank and in host
memory: a shard, a process group or a tensor on a device would be lost or meaningless.
"""

from __future__ import annotations

import pickle
from typing import Any

from tilestone._errors import InvalidArgumentError, hint_for_unpicklable
from tilestone._objects import converters
from tilestone._objects.stateful import is_stateful


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


class _CheckingPickler(pickle.Pickler):
    """Checks every object while pickling; the output is discarded."""

    def __init__(self, as_torch: bool) -> None:
        self._as_torch = as_torch
        # With out-of-band buffers, arrays are not copied.
        super().__init__(_NullFile(), protocol=5, buffer_callback=lambda _: None)

    def reducer_override(self, item: Any) -> Any:
        """Called by pickle for every object that is not of a plain builtin type."""
        if isinstance(item, type):
            return NotImplemented
        if is_stateful(item) and not self._as_torch:
            raise InvalidArgumentError(
                f"an object holds a {type(item).__name__}; its state_dict() and load_state_dict() "
                "are only called if it is in a dict or a list",
                hint="put it into a dict or a list, not into a tuple or another object",
            )
        converter = converters.find(item)
        if converter is None:
            return NotImplemented
        problem = converter.why_not_in_object(item)
        if problem is not None:
            raise InvalidArgumentError(
                f"an object holds {problem}; sharded and device data is only allowed in dicts, in "
                "lists and in the result of state_dict(), not inside tuples and other objects"
            )
        if converter.is_memory(item):
            return int, (), getattr(item, "__dict__", None) or None
        return NotImplemented


def check(item: Any, as_torch: bool = False) -> None:
    """Refuses an object that can't be pickled, or whose pickle would not be complete.

    Args:
        item: the object that is about to be pickled.
        as_torch: objects with state_dict() are pickled like others.

    Raises:
        InvalidArgumentError: says what the object holds, or why pickle refuses it.
    """
    try:
        _CheckingPickler(as_torch).dump(item)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"an object of {type(item).__module__}.{type(item).__qualname__} can't be pickled: "
            f"{type(error).__name__}: {error}",
            hint=hint_for_unpicklable(item),
        ) from error
