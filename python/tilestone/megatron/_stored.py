"""Reads a Megatron-Core checkpoint on one rank: keys, shapes and common state."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tilestone import _core
from tilestone._calls import binding, opening
from tilestone._errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilestone._options import valid
from tilestone.megatron.mapping import ShardedStateDict, ShardedTensor, StateDict

logger = logging.getLogger("tilestone.megatron")

COMMON_FILE = "common.pt"
DIALECT = "megatron"  # also of what a strategy has saved before metadata.json is written
_WAIT_FOR_OTHERS = 60.0  # seconds to wait for other ranks that remove the same keys
INTEGRITY_FILE = "integrity.json"
_ENUMS = {
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": (
        "ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope",
    ),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
}  # fmt: skip

# Classes whose objects are in the checkpoints of Megatron's programs, and whose creation has no
# effect.
HARMLESS = frozenset(
    ["argparse.Namespace", "types.SimpleNamespace", "_io.BytesIO", "io.BytesIO", "signal.Signals"]
    + [f"signal.{name}" for name in signal.Signals.__members__]
    + [f"{module}.{name}" for module, names in _ENUMS.items() for name in names]
    + ["megatron.core.optimizer.optimizer_config.OptimizerConfig"]
)


def harmless_classes() -> list[Any]:
    """The harmless classes that can be imported here."""
    found = []
    for full_name in sorted(HARMLESS):
        module, _, name = full_name.rpartition(".")
        try:
            made = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if isinstance(made, type):
            found.append(made)
    return found


def literal(checkpoint_dir: Any) -> Any:
    """The directory as Megatron-Core means it: a leading "~" is an ordinary character."""
    path = os.fspath(checkpoint_dir) if isinstance(checkpoint_dir, os.PathLike) else checkpoint_dir
    is_home = isinstance(path, (str, bytes)) and path[:1] in ("~", b"~")
    return os.path.join(os.curdir, os.fsdecode(path)) if is_home else path


def open_stored(checkpoint_dir: str | os.PathLike[str]) -> opening.Checkpoint:
    """Opens a checkpoint; its arrays are torch tensors."""
    return opening.open(literal(checkpoint_dir), framework="torch")


def open_sharded(checkpoint_dir: str | os.PathLike[str]) -> opening.Checkpoint:
    """Does the same, also for what a strategy alone has saved, without `metadata.json`."""
    return opening.open_as(DIALECT, literal(checkpoint_dir), framework="torch")


def common_state(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Loads the state that is saved once for all ranks, tensors on the CPU.

    Raises:
        CheckpointingException: there is no checkpoint, or it has no common state.
    """
    with open_sharded(checkpoint_dir) as checkpoint:
        common = common_of(checkpoint)
    if common is None:
        path = os.path.join(checkpoint_dir, COMMON_FILE)
        raise NotFoundError(f"Common file {path} does not exist", file=path)
    return common


def common_of(checkpoint: opening.Checkpoint) -> StateDict | None:
    """The same for an open checkpoint; None if it has no common state."""
    bridge = binding.Bridge(framework="torch", harmless=HARMLESS)
    common: Any = checkpoint._handle.common(bridge)
    return common  # type: ignore[no-any-return]


def sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], entities: Any, kind: type[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the tensors by key, and the ShardedObjects by unique key, all without data.

    Args:
        checkpoint_dir: also of what a strategy alone has saved.
        entities: the module whose classes they have.
        kind: class of the result.

    Raises:
        UnsupportedError: a stored object is not a ShardedObject; it has the object's key.
    """
    found = {}
    with open_sharded(checkpoint_dir) as checkpoint:
        for key in checkpoint.object_keys():
            try:
                found[key] = entities.ShardedObject.empty_from_unique_key(key)
            except (AssertionError, ValueError, IndexError) as error:
                text = "a stored object is not a ShardedObject"
                raise UnsupportedError(text, key=key) from error
        return kind(found | tensors_metadata(checkpoint, entities.ShardedTensor))


def tensors_metadata(
    checkpoint: opening.Checkpoint, kind: Any = ShardedTensor
) -> ShardedStateDict:
    """Returns key -> ShardedTensor (of class `kind`) of the whole tensor, without data."""
    found = {}
    for key in checkpoint.tensor_keys():
        stored = checkpoint[key]
        data = torch.empty(stored.shape, dtype=stored.dtype.torch, device="meta")
        found[key] = kind.from_rank_offsets(key, data).without_data()
    return found


def remove_keys(checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
    """Removes tensors and objects whose keys begin with a prefix, and logs what was removed.

    Raises:
        CheckpointingException: see `tilestone.megatron.remove_sharded_tensors`.
    """
    if not isinstance(key_prefix, str):
        raise InvalidArgumentError(f"key_prefix must be a str, not {type(key_prefix).__name__}")
    path = valid.directory(literal(checkpoint_dir))
    removed = _core.remove_keys(path, key_prefix, _WAIT_FOR_OTHERS)
    if removed.keys:
        logger.info(
            "Removed %s keys that begin with %r from %s, and %s files with %s bytes",
            len(removed.keys), key_prefix, checkpoint_dir, len(removed.files), removed.bytes,
        )  # fmt: skip
    elif not removed.by_other:
        logger.warning(
            "No key in %s begins with %r: nothing was removed", checkpoint_dir, key_prefix
        )


_SECOND = re.compile(r"(.+)\.__tp_replica_(0|[1-9][0-9]*)", re.DOTALL)


class StoredEntities(dict[str, Any]):
    """The entities of a checkpoint that Tilestone reads, without data, by key or unique key."""

    def as_requested(self, keys: Iterable[str]) -> list[Any]:
        """The entities, each tensor under the names by which these keys request it.

        Args:
            keys: the keys that are requested.
        """
        stored = {entity.key for entity in super().values()}
        requested = set(keys)
        names: dict[str, list[str]] = {}
        for key in sorted(requested - stored):
            found = self._stored_as(key, stored)
            if found is not None:
                names.setdefault(found, [found] if found in requested else []).append(key)
        entities = []
        for entity in super().values():
            for name in names.get(entity.key, [entity.key]):
                named = entity if name == entity.key else copy.copy(entity)
                named.key = name
                entities.append(named)
        return entities

    @staticmethod
    def _stored_as(key: str, stored: set[str]) -> str | None:
        """The stored key that a load takes for a requested one; None if there is none."""
        second = _SECOND.fullmatch(key)
        if second is None:
            return None
        plain = second[1]
        if plain in stored:
            return plain
        others = [name for name in stored if name.startswith(plain)]
        ranks = {name: match for name in others if (match := _SECOND.fullmatch(name))}
        same = [name for name, match in ranks.items() if match[1] == plain]
        return min(same, key=lambda name: int(ranks[name][2]), default=None)


class StockStoredEntities(StoredEntities):
    """The same for Megatron-Core, which compares these values with what is requested.

    Its strategies never learn what is requested before they load, and it leaves out what it does not
    find among these values. So `values` looks for the request among the local variables of the
    function that compares: `local_metadata`, `global_metadata`. For any other caller the tensors
    have their plain names.
    """

    def values(self) -> Any:
        """The entities, under the names by which the calling comparison's ranks request them."""
        local = sys._getframe(1).f_locals
        ranks = [*(local.get("global_metadata") or ()), local.get("local_metadata") or ()]
        if "local_metadata" not in local:
            return super().values()
        return self.as_requested(entity.key for entities in ranks for entity in entities)
