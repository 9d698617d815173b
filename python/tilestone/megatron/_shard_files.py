"""Finds which data file of a checkpoint holds a shard, and which rank wrote that file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilestone._calls import opening
from tilestone.megatron._places import boxes_of
from tilestone.megatron._shard_lists import Row
from tilestone.megatron._stored import literal

# File names of stock writers, with or without a prefix, and of Tilestone (prefix: the save's id).
_DATA_FILE = re.compile(r"(?:.*__|__)(\d+)_\d+\.distcp")


def writer_of(file: str) -> int | None:
    """The global rank that wrote a data file, from its name; None if the name has no rank."""
    found = _DATA_FILE.fullmatch(os.path.basename(file))
    return None if found is None else int(found[1])


class _Stored:
    """The chunks of one stored tensor."""

    def __init__(self, tensor: Any) -> None:
        self._files: list[str] = tensor.files
        boxes = tensor.boxes
        self._dims = len(tensor.shape)
        size = (len(boxes), self._dims)
        self._begins = np.array([box.offset for box in boxes], np.int64).reshape(size)
        shapes = np.array([box.shape for box in boxes], np.int64).reshape(size)
        self._ends = self._begins + shapes
        self._places = {(box.offset, box.shape): i for i, box in enumerate(boxes)}

    def file_of(self, boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
        """The file with the most elements of these boxes (the first such file), or None."""
        elements: dict[str, int] = {}
        for offset, shape in boxes:
            if len(offset) != self._dims:
                return None
            place = self._places.get((offset, shape))
            if place is not None:  # a box as it was stored
                count = int(np.prod(shape, dtype=np.int64))
                elements[self._files[place]] = elements.get(self._files[place], 0) + count
                continue
            ends = np.minimum(self._ends, np.add(offset, shape))
            sizes = np.clip(ends - np.maximum(self._begins, offset), 0, None).prod(axis=1)
            for i in np.flatnonzero(sizes):
                elements[self._files[i]] = elements.get(self._files[i], 0) + int(sizes[i])
        return max(elements, key=lambda file: elements[file]) if elements else None


def files_of(checkpoint_dir: str | os.PathLike[str], rows: Sequence[Row]) -> list[str | None]:
    """Finds for each shard the data file of the checkpoint that has most of its elements.

    The entry is None if the checkpoint holds no element of the shard. Only metadata is read, once.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata can't be read.
    """
    found: list[str | None] = []
    stored: dict[str, _Stored | None] = {}
    with opening.open(literal(checkpoint_dir)) as checkpoint:
        keys = set(checkpoint.tensor_keys())
        for row in rows:
            key = row[0]
            if key not in stored:
                stored[key] = _Stored(checkpoint[key]) if key in keys else None
            tensor = stored[key]
            local, offset, prepended, flat = row[2], row[4], row[7], row[9]
            boxes = boxes_of(local, offset, prepended, flat)
            found.append(None if tensor is None else tensor.file_of(boxes))
    return found
