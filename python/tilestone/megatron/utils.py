"""Helpers for sharded state dicts: extracting parts, changing keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Tuple

from tilestone._objects import entities
from tilestone._options import valid
from tilestone.megatron.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    leaves_by_path,
    nested_values,
)
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

# Identifies the data of an entity by key and place. Copies of the same data have the same id.
_ShardId = Tuple[Any, ...]


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Identifies a tensor's data: replicas have the same id, and no other data has it.

    Returns:
        (key, offset, (start, stop) of the flattened range or None). A fourth entry, the local
        shape, is added if the offset does not identify the box: on an irregular grid, and for a box
        without elements, which may have the same offset as a full one. (Megatron-Core takes such
        boxes for replicas of each other.)
    """
    flat = getattr(sharded_tensor, "flattened_range", None)
    place = (
        sharded_tensor.key,
        tuple(sharded_tensor.global_offset),
        None if flat is None else (flat.start, flat.stop),
    )
    shape = tuple(sharded_tensor.local_shape)
    if sharded_tensor.axis_fragmentations is not None and math.prod(shape) > 0:
        return place
    return (*place, shape)


def _sharded_object_id(sharded_object: ShardedObject) -> _ShardId:
    """Identifies an object's data: (key, offset, shape of the grid)."""
    return (sharded_object.key, sharded_object.global_offset, sharded_object.global_shape)


def is_empty_slice(item: Any) -> bool:
    """Whether it is a ShardedTensor that is an empty slice of a flattened tensor."""
    flat = getattr(item, "flattened_range", None) if isinstance(item, ShardedTensor) else None
    return flat is not None and flat.start == flat.stop


def _extract(
    sharded_state_dict: ShardedStateDict, *kinds: type
) -> Tuple[ShardedStateDict, StateDict]:
    return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))


def extract_sharded_tensors(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict]:
    """(every ShardedTensor, everything else), each with the nesting of the whole."""
    return _extract(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict]:
    """(every ShardedTensor and ShardedTensorFactory, everything else), nested as the whole."""
    return _extract(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict]:
    """(tensors, factories and non-persistent objects, everything else), nested as the whole."""
    return _extract(
        sharded_state_dict, ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory
    )


def extract_sharded_base(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict]:
    """(every entity that is stored in parts, everything else), nested as the whole."""
    return _extract(sharded_state_dict, ShardedBase)


def extract_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict]:
    """(every LocalNonpersistentObject, everything else), nested as the whole."""
    return _extract(sharded_state_dict, LocalNonpersistentObject)


# Tilestone's own entities, which have a key as Megatron-Core's have.
OUR_ENTITIES = (entities.ShardedTensor, entities.ShardedObject, entities.ShardedTensorFactory)


def entities_by_path(tree: Any) -> Iterator[Tuple[str, Any]]:
    """(dotted path, entity) for every entity of a state, Tilestone's own included."""
    kinds = (*OUR_ENTITIES, ShardedBase)
    return ((path, leaf) for path, leaf in leaves_by_path(tree) if isinstance(leaf, kinds))


def key_at(entity: Any, path: str) -> str:
    """An entity's key; without its own it is the path in the state."""
    key: str = entity.key or path
    return key


def copied(tree: Any) -> Any:
    """Copies a tree with copies of its entities (and the same data), which may then be changed."""
    return dict_list_map_outplace(_own, tree)


def built(tree: Any) -> Any:
    """Does the same, and replaces each factory by its subtree."""

    def of(leaf: Any) -> Any:
        return built(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else _own(leaf)

    return dict_list_map_outplace(of, tree)


def _own(leaf: Any) -> Any:
    return copy.copy(leaf) if isinstance(leaf, ShardedBase) else leaf


def is_replica(item: Any) -> bool:
    """Whether it is a tensor that is not a main replica."""
    return isinstance(item, ShardedTensor) and any(valid.replica(item.replica_id, item.key))


class OwnReplicas:
    """Finds tensors whose shard this rank also holds as another replica, such as tied weights.

    Args:
        leaves: everything that the rank holds.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        self._seen = {self._place(each) for each in tensors if not is_replica(each)}

    def repeats(self, item: Any) -> bool:
        """Whether a leaf is a further replica. Call it once for each leaf, in order."""
        if not is_replica(item):
            return False
        place = self._place(item)
        repeated = place in self._seen
        self._seen.add(place)
        return repeated

    @staticmethod
    def _place(item: Any) -> tuple[Any, ...]:
        flat = getattr(item, "flattened_range", None)
        within = None if flat is None else (flat.start, flat.stop)
        offset = valid.entries("global_offset", item.global_offset, item.key)
        return item.key, offset, tuple(item.local_shape), within


def _change_keys(sharded_state_dict: ShardedStateDict, changed: Callable[[str], str]) -> None:
    """Gives every entity the key changed(key), in place."""
    seen = set()
    for path, item in list(entities_by_path(sharded_state_dict)):
        if isinstance(item, OUR_ENTITIES) and id(item) in seen:
            continue
        seen.add(id(item))
        if hasattr(item, "rename"):  # of a parameter
            item.rename(path, changed)
        else:
            item.key = changed(item.key)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Puts a prefix before the key of every entity, in place; keys of dicts stay."""
    _change_keys(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replaces the prefix of the key of every entity, in place; keys of dicts stay.

    Raises:
        ValueError: a key does not begin with old_prefix; nothing is changed then.
    """
    for path, item in entities_by_path(sharded_state_dict):
        if not key_at(item, path).startswith(old_prefix):
            raise ValueError(f"Expected {key_at(item, path)} to begin with prefix {old_prefix}")
    _change_keys(sharded_state_dict, lambda key: f"{new_prefix}{key[len(old_prefix):]}")


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]
) -> None:
    """Replaces prefixes of the entities' keys, in place; keys of dicts stay.

    Args:
        sharded_state_dict: the state.
        prefix_map: old prefix -> new prefix; for each key, the first one that matches is used.
    """

    def changed(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return f"{new}{key[len(old):]}"
        return key

    _change_keys(sharded_state_dict, changed)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Dequantises Transformer Engine's 8-bit tensors in the data of entities, in place.

    They become tensors of the type that was quantised. Transformer Engine is not imported, because
    without it there are no such tensors.
    """
    for item in nested_values(sharded_state_dict):
        data: Any = getattr(item, "data", None)
        names = {
            base.__name__
            for base in type(data).__mro__
            if base.__module__.split(".")[0] == "transformer_engine"
        }
        if "QuantizedTensor" in names:
            item.data = data.dequantize()
        elif "Float8Tensor" in names:  # version 1
            item.data = data.from_float8()


def _clean_metadata_for_serialization(metadata: Any) -> Any:
    """Content metadata without its process group, which can't be stored; None stays None."""
    if metadata is None:
        return None
    clean = metadata.copy()
    clean.pop("dp_cp_group", None)
    return clean
