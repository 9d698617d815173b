"""Saves of the sharded part of a checkpoint, between two steps that Megatron-Core does itself.

Megatron-Core writes common.pt before a strategy's save, and metadata.json after it. The strategy
replaces the sharded part in the existing directory, where common.pt is already the new one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from tilestone import _core
from tilestone._calls import collective, save_load
from tilestone._errors import InvalidArgumentError
from tilestone._objects import megatron_entities
from tilestone._options import valid
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import within_call
from tilestone.megatron._stored import COMMON_FILE, HARMLESS, INTEGRITY_FILE, literal
from tilestone.megatron.core import CONFIG_FNAME
from tilestone.megatron.dict_utils import leaves_by_path
from tilestone.megatron.groups import model_parallel_group
from tilestone.megatron.mapping import is_main_replica
from tilestone.megatron.utils import OwnReplicas, built

Path = str | os.PathLike[str]

_COMMON_KEY = "common_state"  # key of the ShardedObject in which 0.19 passes the common state
_SHARDED = {"ShardedTensor", "ShardedObject"}


def entities(tree: Any) -> list[Any]:
    """The leaves of nested dicts and lists that are the sharded part of a state dict.

    Raises:
        InvalidArgumentError: a leaf is not a ShardedTensor or ShardedObject; the error's key is its
            path.
    """
    found = []
    for path, leaf in leaves_by_path(tree):
        if megatron_entities.kind_of(type(leaf)) not in _SHARDED:
            raise InvalidArgumentError(
                f"a {type(leaf).__name__} is not a ShardedTensor or ShardedObject; only these "
                "belong to the sharded part of a checkpoint",
                key=path,
                hint="pass the whole state dict to save or load of dist_checkpointing, which "
                "passes the sharded part to the strategy",
            )
        found.append(leaf)
    return found


def _has_common_state(tree: Any) -> bool:
    return any(
        megatron_entities.kind_of(type(leaf)) == "ShardedObject" and leaf.key == _COMMON_KEY
        for _, leaf in leaves_by_path(tree)
    )


def remove_seals(path: Any, common_is_sharded: bool) -> None:
    """Durably removes the files by which the directory would look like a complete checkpoint.

    The common state in common.pt is already the new one, or it will be in an object. In the latter
    case nothing is removed if the old checkpoint has no common.pt and no integrity.json: then only
    .metadata, which is replaced atomically, decides between the old and the new checkpoint.
    """
    place = valid.directory(path)
    names = set(_core.names_at(place))
    if common_is_sharded and not names & {COMMON_FILE, INTEGRITY_FILE}:
        return
    doomed = [CONFIG_FNAME, INTEGRITY_FILE, *([COMMON_FILE] if common_is_sharded else [])]
    for name in doomed:
        if name in names:
            _core.remove_file(place, name)


@dataclasses.dataclass
class _Shards(collective.Prepared):
    """The sharded part of a state dict, prepared for a save."""

    harmless = HARMLESS

    tree: Any
    path: Any
    group: Any
    mains_only: bool

    def make(self) -> Mapping[Any, Any]:
        """Returns the entities by number (they have keys). First, rank 0 removes the seals."""
        valid.refuse_any_url(self.path, "a save in which Megatron-Core writes common.pt")
        if _ranks.rank(self.group) == 0:
            remove_seals(self.path, _has_common_state(self.tree))
        kept = [
            entity
            for entity in entities(built(self.tree))
            if is_main_replica(entity.replica_id)
            or not (self.mains_only or entity.data is None)
        ]
        replicas = OwnReplicas(kept)
        kept = [entity for entity in kept if not replicas.repeats(entity)]
        return {str(number): entity for number, entity in enumerate(kept)}

    def copied_group(self, given: Any) -> Any:
        """The group that was given, or the model-parallel one of Megatron's parallel_state."""
        if self.mains_only:
            raise InvalidArgumentError(
                "there are no replicas to copy with keep_only_main_replica=True: leave out copies"
            )
        return model_parallel_group(given)


def save_in_place(
    tree: Any,
    checkpoint_dir: Path,
    group: Any = None,
    mains_only: bool = False,
    *,
    tp_replica_names: bool = False,
    separation_hint: str = "",
    save: Callable[..., Any] = save_load.save,
    **options: Any,
) -> Any:
    """Saves the sharded part of a state dict. Every rank calls.

    An older metadata.json is removed first. So if the save fails, the directory still holds the old
    tensors, but is not a complete checkpoint.

    Args:
        tree: nested dicts and lists of entities; factories are built.
        checkpoint_dir: the checkpoint's directory, on a file system that all ranks share.
        group: the ranks that save together; None: those of the save that is under way, or the
            default group.
        mains_only: each shard is written by the rank of its main replica. Otherwise any rank that
            holds a shard's data may write it.
        tp_replica_names, separation_hint: as for
            `strategies.torch.TorchDistSaveShardedStrategy`.
        save: `tilestone.save`, or `background.save_in_background`.
        options: keyword arguments of `tilestone.save`.

    Returns:
        What `save` returns.

    Raises:
        As `tilestone.save`, the same on every rank.
    """
    path = literal(checkpoint_dir)
    group = _ranks.group_of_call() if group is None else group
    options["timeout"] = within_call(options.get("timeout", _core.DEFAULT_TIMEOUT))
    state: Any = _Shards(tree, path, group, mains_only)
    state.engine = {"tp_replica_names": tp_replica_names, "separation_hint": separation_hint}
    return save(
        state, path, group=group, dialect="megatron_shards", overwrite=True, **options
    )
