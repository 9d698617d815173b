"""Computes a rank's share of a fully parallel save."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tilestone._options import valid
from tilestone.megatron._distribution import ShardDistribution
from tilestone.megatron.dict_utils import dict_list_map_outplace, nested_values
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone.megatron.utils import _sharded_tensor_shard_id, _ShardId


def copied(tree: Any) -> Any:
    """Copies a tree with copies of its entities (and the same data), which may then be changed."""

    def own(leaf: Any) -> Any:
        return copy.copy(leaf) if isinstance(leaf, ShardedBase) else leaf

    return dict_list_map_outplace(own, tree)


def built(tree: Any) -> Any:
    """Copies a tree with copies of its entities, and with each factory replaced by its subtree."""
    if isinstance(tree, dict):
        return {key: built(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [built(value) for value in tree]
    if isinstance(tree, ShardedTensorFactory):
        return built(tree.build())
    return copy.copy(tree) if isinstance(tree, ShardedBase) else tree


def _name(shard_id: _ShardId) -> str:
    return hashlib.blake2b(repr(shard_id).encode(), digest_size=12).hexdigest()


def _is_copy(item: Any) -> bool:
    return isinstance(item, ShardedTensor) and any(valid.replica(item.replica_id, item.key))


class OwnReplicas:
    """Finds tensors whose shard this rank also holds as another replica, such as tied weights.

    Args:
        leaves: everything that the rank holds.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        self._seen = {self._place(each) for each in tensors if not _is_copy(each)}

    def repeats(self, item: Any) -> bool:
        """Whether a leaf is a further replica. Call it once for each leaf, in order."""
        if not _is_copy(item):
            return False
        place = self._place(item)
        is_copy = place in self._seen
        self._seen.add(place)
        return is_copy

    @staticmethod
    def _place(item: Any) -> tuple[Any, ...]:
        flat = getattr(item, "flattened_range", None)
        within = None if flat is None else (flat.start, flat.stop)
        return item.key, tuple(item.global_offset), tuple(item.local_shape), within


def saved_by(distribution: ShardDistribution) -> bytes:
    """What a group of ranks saves of the shards it holds, and what it does not save."""
    chosen = distribution.shards_in_this_group
    others = [shard for shard in distribution.shard_to_metadata if shard not in chosen]
    words = {"saved": list(map(_name, chosen)), "others": list(map(_name, others))}
    return json.dumps(words).encode()


def unsaved_by_all(said: list[bytes]) -> bytes:
    """The shards that no group saves; `said` has the result of saved_by() of each rank, or b""."""
    saved: set[str] = set()
    others: set[str] = set()
    for words in filter(None, said):
        group = json.loads(words)
        saved.update(group["saved"])
        others.update(group["others"])
    return json.dumps(sorted(others - saved)).encode()


def written_by_others(kept_ids: Collection[int]) -> Callable[[Any], bool]:
    """Makes a test for tensors that other ranks write: no main replica, none of these ids."""
    return lambda item: _is_copy(item) and id(item) not in kept_ids


def left_to_engine(tree: Any, unsaved: bytes) -> set[int]:
    """The ids of the tensors in a tree that no group saves, by the result of unsaved_by_all()."""
    names = set(json.loads(unsaved))
    if not names:
        return set()
    tensors = (item for item in nested_values(tree) if isinstance(item, ShardedTensor))
    return {id(item) for item in tensors if _name(_sharded_tensor_shard_id(item)) in names}


def without_copies(tree: Any, is_copy: Callable[[Any], bool]) -> Any:
    """Copies the tree without some of its tensors.

    A dict or list that held nothing else is removed too, because it would become common state. What
    is left out of another list keeps its place there, so that the list has its length on all ranks.

    Args:
        tree: a tree of entities.
        is_copy: called once for each leaf, in order; returns whether to leave it out.
    """
    rest = _rest_of(tree, is_copy)
    return type(tree)() if rest is _LEFT_OUT else rest


_LEFT_OUT = LocalNonpersistentObject(None)


def _rest_of(tree: Any, is_copy: Callable[[Any], bool]) -> Any:
    if is_copy(tree):
        return _LEFT_OUT
    if not isinstance(tree, (dict, list)) or not tree:
        return tree
    if isinstance(tree, dict):
        rests = {key: _rest_of(value, is_copy) for key, value in tree.items()}
        kept = {key: rest for key, rest in rests.items() if rest is not _LEFT_OUT}
        return kept or _LEFT_OUT
    rest = [_rest_of(value, is_copy) for value in tree]
    return _LEFT_OUT if all(each is _LEFT_OUT for each in rest) else rest
