"""What the entities of `tilestone.megatron.mapping` are made of: class, holders, merging, places."""

from __future__ import annotations

import math
import operator
import sys
from abc import ABCMeta
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid

if TYPE_CHECKING:
    from typing_extensions import Self

_OURS = "tilestone.megatron.mapping"
_FOREIGN_MODULE = "dist_checkpointing.mapping"
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
_ENTITIES = ("ShardedBase", "ShardedTensor", "ShardedObject", "ShardedTensorFactory")


class EntityType(ABCMeta):
    """Metaclass: Megatron-Core's class of the same name counts as a subclass.

    The reverse holds too: once a program has imported Megatron-Core, its functions accept these
    classes as its own. Without that they would save such an entity as part of the common state.
    """

    counted: Any = None  # Megatron-Core's module that accepts these classes

    def __subclasscheck__(cls, other: type) -> bool:
        # A user's subclass must not accept Megatron-Core's class.
        if cls.__module__ == _OURS and not EntityType.is_counting:
            for base in getattr(other, "__mro__", ()):
                if base.__name__ == cls.__name__ and base.__module__.endswith(_FOREIGN_MODULE):
                    return True
        return super().__subclasscheck__(other)

    is_counting = False  # True while Megatron-Core's classes ask whether they are subclasses

    @staticmethod
    def count(megatrons: Any) -> None:
        """Makes Megatron-Core's classes in a module accept these classes."""
        if not all(hasattr(megatrons, name) for name in _ENTITIES):
            return  # the module is still being imported
        EntityType.counted = megatrons
        EntityType.is_counting = True
        try:
            for name in _ENTITIES:
                getattr(megatrons, name).register(getattr(sys.modules[_OURS], name))
        finally:
            EntityType.is_counting = False


class Entity(metaclass=EntityType):
    """Base of the entities. Creating one makes Megatron-Core's classes accept them."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        megatrons = sys.modules.get(_MEGATRON_MODULE)
        if megatrons is not None and megatrons is not EntityType.counted:
            EntityType.count(megatrons)
        return super().__new__(cls)


class WithHolders:
    """An entity whose holders may be known.

    Attributes:
        replica_id: which replica of its data this is.
        holders: global ranks that hold the same data, including this one; None: not known. Setting
            another replica_id sets it to None, because the entity is then a replica of other data.
    """

    replica_id: Any
    holders: Optional[Tuple[int, ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "replica_id" and "holders" in vars(self) and value != self.replica_id:
            object.__setattr__(self, "holders", None)
        object.__setattr__(self, name, value)


def passed_on(factory: WithHolders, built: Any) -> Any:
    """Gives the entities of a subtree that a factory has built the factory's holders, in place.

    Entities that have holders keep them. Entities with another replica_id get none.
    """
    if factory.holders is not None:
        _pass_on(factory, built)
    return built


def _pass_on(factory: WithHolders, built: Any) -> None:
    if isinstance(built, (dict, list)):
        for inner in built.values() if isinstance(built, dict) else built:
            _pass_on(factory, inner)
    elif isinstance(built, WithHolders) and built.holders is None:
        if built.replica_id == factory.replica_id:
            built.holders = factory.holders


def merged(loaded: Any, factories: Any, path: Tuple[Any, ...], kind: type) -> Any:
    """Replaces the loaded subtrees of factories by the merged values, in place.

    Args:
        loaded: the loaded state.
        factories: a tree of the factories, each in its place. A list may be a dict from index to
            value.
        path: path of both, for error messages.
        kind: class of the factories.

    Returns:
        loaded; the merged value if factories is itself a factory.

    Raises:
        ValueError: loaded lacks the place of a factory.
    """
    if isinstance(factories, kind):
        return factories.merge_fn(loaded)  # type: ignore[attr-defined]
    held, places = _entries(loaded), _entries(factories)
    if isinstance(factories, list):
        fits = isinstance(loaded, list) and held.keys() == places.keys()
    else:
        are_trees = isinstance(factories, dict) and isinstance(loaded, (dict, list))
        fits = are_trees and held.keys() >= places.keys()
    if not fits:
        where = "/".join(map(str, path)) or "the top"
        raise ValueError(
            f"a {type(loaded).__name__} with {list(held)} was loaded at {where}, where a "
            f"{type(factories).__name__} has factories at {list(places)}"
        )
    for name, inner in places.items():
        loaded[name] = merged(loaded[name], inner, (*path, name), kind)
    return loaded


def _entries(tree: Any) -> dict[Any, Any]:
    """The values of a dict by key, of a list by index."""
    if isinstance(tree, dict):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, list) else {}


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
