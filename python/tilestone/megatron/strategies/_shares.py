"""What a rank's share of a fully parallel save is made of."""

from __future__ import annotations

import copy
from typing import Any

from tilestone.megatron.dict_utils import dict_list_map_outplace
from tilestone.megatron.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)


def copied(tree: Any) -> Any:
    """The same tree with entities of its own (and the same data), so that they may be changed."""

    def own(leaf: Any) -> Any:
        return copy.copy(leaf) if isinstance(leaf, ShardedBase) else leaf

    return dict_list_map_outplace(own, tree)


def built(tree: Any) -> Any:
    """The same tree with what factories build in their places, and entities of its own."""
    if isinstance(tree, dict):
        return {key: built(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [built(value) for value in tree]
    if isinstance(tree, ShardedTensorFactory):
        return built(tree.build())
    return copy.copy(tree) if isinstance(tree, ShardedBase) else tree


def _is_copy(item: Any) -> bool:
    return isinstance(item, ShardedTensor) and not is_main_replica(item.replica_id)


def without_copies(tree: Any) -> Any:
    """The tree without the tensors that other ranks write.

    A dict or list that held nothing else goes with them: left behind, it would be common state.
    """
    if not isinstance(tree, (dict, list)) or not tree:
        return tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    kept = {}
    for name, value in items:
        if _is_copy(value):
            continue
        rest = without_copies(value)
        emptied = isinstance(value, (dict, list)) and value and not rest
        if not emptied:
            kept[name] = rest
    return kept if isinstance(tree, dict) else list(kept.values())
