"""What may stand inside an object that is pickled.

One rank writes such an object for all, so it must be whole on each of them, and in the memory of
the host: a shard, a group of processes or a tensor on a device would be lost or meaningless.
"""

from __future__ import annotations

import pickle
from typing import Any

from tilestone import _converters
from tilestone._errors import InvalidArgumentError
from tilestone._stateful import is_stateful


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Looker(pickle.Pickler):
    """Pickles to nowhere and looks at every object on the way."""

    def __init__(self) -> None:
        # Out of band, arrays are not copied.
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)

    def reducer_override(self, item: Any) -> Any:
        """Called by pickle for everything but plain builtins."""
        if isinstance(item, type):
            return NotImplemented
        if is_stateful(item):
            raise InvalidArgumentError(
                f"an object holds a {type(item).__name__}, whose state_dict() is saved and "
                "load_state_dict() is called only in dicts and lists",
                hint="put it into a dict or a list, not into a tuple or another object",
            )
        converter = _converters.find(item)
        if converter is None:
            return NotImplemented
        problem = converter.why_not_in_object(item)
        if problem is not None:
            raise InvalidArgumentError(
                f"an object holds {problem}; sharded and device data is found in dicts, in lists "
                "and in what state_dict() gives, not inside tuples and other objects"
            )
        if converter.is_memory(item):
            return int, (), getattr(item, "__dict__", None) or None
        return NotImplemented


def check(item: Any) -> None:
    """Refuses an object that can't be pickled, or of which a pickle would not hold all.

    Args:
        item: what is about to be pickled.

    Raises:
        InvalidArgumentError: saying what the object holds, or why pickle refuses it.
    """
    try:
        _Looker().dump(item)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"an object of {type(item).__module__}.{type(item).__qualname__} can't be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error
