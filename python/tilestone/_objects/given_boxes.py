"""Boxes and flat ranges as callers write them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError

BoxLike: TypeAlias = _core.Box | Sequence[tuple[int, int] | slice]


def flat_range(key: str, flattened_range: slice | tuple[int, int]) -> tuple[int, int]:
    """(begin, end) of the flat range of this key."""
    pair: Any = flattened_range
    if isinstance(flattened_range, slice) and flattened_range.step in (None, 1):
        pair = (flattened_range.start, flattened_range.stop)
    try:
        begin, end = pair
        return operator.index(begin), operator.index(end)
    except (TypeError, ValueError):
        what = f"flattened_range must be slice(begin, end) or (begin, end), not {flattened_range!r}"
        raise InvalidArgumentError(what, key=str(key)) from None


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Adds the key to an error that does not name one."""
    try:
        yield
    except CheckpointError as error:
        error.add_key(str(key))
        raise


def box_of(key: str, box: _core.Box | Sequence[tuple[int, int]]) -> _core.Box:
    """The box of this key."""
    with naming(key):
        return to_box(box)


def to_box(box: BoxLike) -> _core.Box:
    """A Box from (start, stop) pairs or slices with both ends.

    Raises:
        InvalidArgumentError: it is something else; a start or stop is missing or is not a 64-bit
            whole number; or a stop is before its start.
    """
    if isinstance(box, _core.Box):
        return box
    try:
        pairs = [_ends(part) for part in box]
        offset, shape = [start for start, _ in pairs], [stop - start for start, stop in pairs]
    except TypeError:
        offset, shape = [-1], []
    if len(offset) != len(shape) or any(not 0 <= n < 1 << 63 for n in offset + shape):
        raise InvalidArgumentError(f"a box must be (start, stop) for each dim, not {box!r}")
    return _core.Box(offset, shape)


def _ends(part: Any) -> tuple[int, int]:
    """(start, stop) of one dim of a box; TypeError if it is neither a pair nor a slice."""
    if isinstance(part, (str, bytes)) or (isinstance(part, slice) and part.step not in (None, 1)):
        raise TypeError
    ends: tuple[Any, ...] = (
        (part.start, part.stop) if isinstance(part, slice) else tuple(part)
    )
    if len(ends) != 2:
        raise TypeError
    return operator.index(ends[0]), operator.index(ends[1])
