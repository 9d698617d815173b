"""Arithmetic of the places of entities in global tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid


def grid_of(
    key: str, rank_offsets: Sequence[Tuple[int, int, int]], axes: int
) -> tuple[list[int], list[int]]:
    """Place and number of fragments along each axis, from offsets of from_rank_offsets().

    Raises:
        InvalidArgumentError: an axis does not exist or is named twice, or a place is not below its
            number of fragments.
    """
    places, fragments = [0] * axes, [1] * axes
    seen = set()
    for axis, place, count in valid.rank_offsets(rank_offsets, key):
        if not 0 <= axis < axes or count < 1 or not 0 <= place < count:
            text = f"rank offsets {rank_offsets} do not fit a tensor of {axes} axes"
            raise InvalidArgumentError(text, key=key)
        if axis in seen:
            text = f"rank offsets {rank_offsets} name axis {axis} twice"
            raise InvalidArgumentError(text, key=key)
        seen.add(axis)
        places[axis], fragments[axis] = place, count
    return places, fragments


def with_entry(values: Sequence[int], place: int, value: int) -> Tuple[int, ...]:
    """The values, with another value at one place."""
    return (*values[:place], value, *values[place + 1 :])


def boxes_of(
    local_shape: Sequence[int], offset: Sequence[int], prepended: int, flat: tuple[int, int] | None
) -> list[tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """The boxes of the global tensor that a part consists of, each as (offset, shape).

    Args:
        local_shape: shape of the part's box, without the prepended axes.
        offset: the first element of that box in the global tensor.
        prepended: number of prepended axes.
        flat: (begin, end) if the part is a slice of the flattened box; None: it is the whole box.
    """
    leading = (1,) * prepended
    if flat is None:
        return [(tuple(offset), (*leading, *local_shape))]
    return [
        (tuple(map(operator.add, offset, (0,) * prepended + box.offset)), leading + box.shape)
        for box in _core.flat_range_to_boxes(local_shape, *flat)
    ]


def narrowed_runs(
    shape: Tuple[int, ...], flat: slice, dim: int, start: int, length: int
) -> list[tuple[slice, slice]]:
    """The runs of a flat slice that remain when a box is narrowed: (in the old box, in the new).

    The box is a row of blocks, one for each index of the axes before `dim`. Each block keeps
    `length` entries of `inner` elements.
    """
    inner = math.prod(shape[dim + 1 :])
    if length == shape[dim]:
        return [(flat, flat)] if flat.stop > flat.start else []
    old, new = shape[dim] * inner, length * inner
    runs = []
    first = flat.start // old if old else 0
    last = -(-flat.stop // old) if old else 0
    for block in range(first, last):
        shift = block * old + start * inner - block * new
        begin = max(flat.start, block * new + shift)
        end = min(flat.stop, (block + 1) * new + shift)
        if begin < end:
            runs.append((slice(begin, end), slice(begin - shift, end - shift)))
    return runs
