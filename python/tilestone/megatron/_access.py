"""Do the parts that all ranks hold make whole tensors and objects, each exactly once?

A tensor's boxes tile it if and only if their signed corners cancel out but for those of the whole:
a box is the sum of 2^n quadrants, +1 or -1 at each corner, and quadrants are independent. So a
check is one sum over the corners, whatever the boxes look like: cells of a regular grid, an
irregular one, or the boxes of flat slices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Tuple

import numpy as np

from tilestone import _core
from tilestone._errors import CoverageError, MismatchError
from tilestone.megatron.mapping import ShardedObject, is_main_replica

# An entity and the rank that holds it.
_Held = Tuple[int, Any]


def check_access(global_metadata: Iterable[Iterable[Any]]) -> None:
    """Checks the entities of all ranks.

    Args:
        global_metadata: for each rank its ShardedTensors and ShardedObjects, with or without data.

    Raises:
        CheckpointingException: ranks describe a tensor or object differently, or main replicas
            overlap, leave something out or reach beyond it; naming key and ranks. The same error
            wherever the same metadata is checked.
    """
    by_key: defaultdict[str, list[_Held]] = defaultdict(list)
    for rank, entities in enumerate(global_metadata):
        for entity in entities:
            by_key[entity.key].append((rank, entity))
    for key, held in by_key.items():
        objects = [isinstance(entity, ShardedObject) for _, entity in held]
        if any(objects) != all(objects):
            raise MismatchError("ranks hold both a tensor and an object of this key", key=key)
        if objects[0]:
            _check_objects(key, held)
        else:
            _check_tensor(key, held)


def _check_equal(key: str, held: Sequence[_Held], names: Sequence[str]) -> None:
    """Refuses entities that differ in one of these attributes."""
    first_rank, first = held[0]
    for rank, entity in held:
        for name in names:
            one, other = getattr(first, name), getattr(entity, name)
            if (tuple(one) if isinstance(one, list) else one) != (
                tuple(other) if isinstance(other, list) else other
            ):
                raise MismatchError(
                    f"rank {first_rank} and rank {rank} differ in {name}: {one} and {other}",
                    key=key,
                )


def _check_tensor(key: str, held: Sequence[_Held]) -> None:
    _check_equal(key, held, ("dtype", "global_shape", "has_regular_grid"))
    if held[0][1].has_regular_grid:
        _check_equal(key, held, ("local_shape", "axis_fragmentations"))
    shape = tuple(held[0][1].global_shape)
    owners: list[int] = []
    boxes: list[Tuple[Tuple[int, ...], Tuple[int, ...]]] = []
    for rank, entity in held:
        parts = list(_boxes(entity))
        _check_bounds(key, rank, shape, parts)
        if is_main_replica(entity.replica_id):
            boxes += parts
            owners += [rank] * len(parts)
    offsets = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    if not _tile(shape, offsets, offsets + sizes):
        text = f"Invalid access pattern for {held[0][1]}: "
        text += _fault(shape, offsets, offsets + sizes, owners)
        raise CoverageError(text, key=key)


def _boxes(entity: Any) -> Iterable[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """(offset, shape) of what an entity holds, boxes without elements left out."""
    local, leading = tuple(entity.local_shape), entity.prepend_axis_num
    offset = tuple(entity.global_offset)
    flat = getattr(entity, "flattened_range", None)
    if flat is None:
        parts = [((0,) * len(local), local)]
    else:
        found = _core.flat_range_to_boxes(local, flat.start, flat.stop)
        parts = [(tuple(box.offset), tuple(box.shape)) for box in found]
    for inside, shape in parts:
        if math.prod(shape):
            begin = tuple(o + i for o, i in zip(offset, (0,) * leading + inside))
            yield begin, (1,) * leading + shape


def _check_bounds(
    key: str,
    rank: int,
    shape: Tuple[int, ...],
    boxes: Iterable[Tuple[Tuple[int, ...], Tuple[int, ...]]],
) -> None:
    for offset, size in boxes:
        if any(o < 0 or o + s > whole for o, s, whole in zip(offset, size, shape)):
            raise CoverageError(
                f"Invalid access pattern: rank {rank} holds elements {_text(offset, size)}, which "
                f"lie outside the tensor of shape {shape}",
                key=key,
            )


def _text(offset: Sequence[int], size: Sequence[int]) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset, size)) + "]"


def _tile(shape: Tuple[int, ...], begins: np.ndarray, ends: np.ndarray) -> bool:
    """Whether boxes inside a tensor (n x axes, non-empty) hold each of its elements once."""
    if not math.prod(shape):
        return True  # of no elements
    if not len(begins):
        return False
    whole = np.array(shape)
    cut = np.flatnonzero((begins != 0).any(axis=0) | (ends != whole).any(axis=0)).tolist()
    if not cut:
        return len(begins) == 1
    corners, signs = [], []
    for picks in itertools.product((0, 1), repeat=len(cut)):
        columns = [(ends if pick else begins)[:, axis] for pick, axis in zip(picks, cut)]
        corners.append(np.stack(columns, axis=1))
        signs.append(np.full(len(begins), (-1) ** sum(picks), dtype=np.int64))
    places, numbers = np.unique(np.concatenate(corners), axis=0, return_inverse=True)
    sums = np.zeros(len(places), dtype=np.int64)
    np.add.at(sums, numbers.reshape(-1), np.concatenate(signs))
    # Those of the whole tensor, at 0 and at its size along each axis.
    left = sums != 0
    if int(left.sum()) != 2 ** len(cut):
        return False
    at_end = places[left] == whole[cut]
    expected = np.where(at_end.sum(axis=1) % 2, -1, 1)
    return bool((at_end | (places[left] == 0)).all() and (sums[left] == expected).all())


def _fault(
    shape: Tuple[int, ...], begins: np.ndarray, ends: np.ndarray, owners: Sequence[int]
) -> str:
    """What is wrong with boxes that don't tile a tensor."""
    for i in range(len(begins)):
        low = np.maximum(begins[i + 1 :], begins[i])
        high = np.minimum(ends[i + 1 :], ends[i])
        common = np.flatnonzero((low < high).all(axis=1))
        if common.size:
            j = int(common[0])
            where = _text(low[j].tolist(), (high[j] - low[j]).tolist())
            return f"rank {owners[i]} and rank {owners[i + 1 + j]} both hold elements {where}"
    held, count = int((ends - begins).prod(axis=1).sum()), math.prod(shape)
    ranks = ", ".join(map(str, sorted(set(owners)))) or "none"
    return f"{count - held} of {count} elements have no main replica (ranks with one: {ranks})"


def _check_objects(key: str, held: Sequence[_Held]) -> None:
    _check_equal(key, held, ("global_shape",))
    places: Counter[str] = Counter()
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, entity in held:
        if is_main_replica(entity.replica_id):
            places[entity.unique_key] += 1
            ranks[entity.unique_key].append(rank)
    twice = {name: ranks[name] for name, count in places.items() if count > 1}
    if twice:
        told = "; ".join(f"{name} on ranks {', '.join(map(str, r))}" for name, r in twice.items())
        raise CoverageError(f"Duplicate ShardedObject keys: {list(twice)} ({told})", key=key)
    for rank, entity in held:
        if any(not 0 <= o < s for o, s in zip(entity.global_offset, entity.global_shape)):
            text = f"{entity.unique_key} of rank {rank} lies outside its grid"
            raise CoverageError(f"Invalid access pattern: {text}", key=key)
    missing = math.prod(held[0][1].global_shape) - len(places)
    if missing:
        raise CoverageError(
            f"Invalid access pattern: {missing} ShardedObject are missing. Existing shards: "
            f"{sorted(places)}",
            key=key,
        )
