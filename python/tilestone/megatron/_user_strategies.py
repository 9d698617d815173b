"""Saves and loads with strategies of the user, in the same steps as Megatron-Core.

Such a save is not atomic: the checkpoint that it replaces is lost when it begins to write. If a rank
fails after that, what has been written stays, and the other ranks notice only through their own
steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tilestone._errors import RankFailedError, StorageError
from tilestone.megatron import _engine_calls, _ranks
from tilestone.megatron._in_place import remove_seals
from tilestone.megatron._stored import literal
from tilestone.megatron.core import CheckpointingConfig, save_config
from tilestone.megatron.dict_utils import extract_matching_values, merge
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from tilestone.megatron.state_dict_utils import load_preprocess, save_preprocess
from tilestone.megatron.strategies._shares import copied
from tilestone.megatron.utils import extract_sharded_base
from tilestone.megatron.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
)


def _is_object(item: Any) -> bool:
    return isinstance(item, ShardedObject)


def _make_directory(checkpoint_dir: Any) -> None:
    """Rank 0 creates the directory, or makes an old checkpoint there invalid. Every rank calls.

    Otherwise the old tensors would be a valid checkpoint with the new common state. If rank 0 fails,
    every rank raises.
    """
    failure: Exception | None = None
    if _ranks.rank() == 0:
        try:
            _prepare(checkpoint_dir)
        except Exception as error:
            failure = error
    problem = _ranks.from_first(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if problem is not None:
        raise RankFailedError(f"rank 0 failed before anything was written: {problem}", rank=0)


def _prepare(checkpoint_dir: Any) -> None:
    if replaced := _engine_calls.replaced_by(checkpoint_dir):
        _engine_calls.logger.warning(replaced)
    try:
        os.makedirs(checkpoint_dir, exist_ok=True)
    except OSError as error:
        path = os.fspath(checkpoint_dir)
        message = "can't create the checkpoint directory"
        raise StorageError(message=message, file=path, errno=error.errno) from error
    remove_seals(literal(checkpoint_dir), common_is_sharded=False)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Any,
    sharded_strategy: Any,
    common_strategy: Any,
    validate_access_integrity: bool,
    preprocess: Callable[[CommonStateDict], StateDict] | None,
) -> None:
    """Saves common state, objects and tensors, then `metadata.json`. Every rank calls."""
    sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity, preprocess)
    _make_directory(checkpoint_dir)
    common_strategy.save_common(common, checkpoint_dir)
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, sharded = extract_matching_values(sharded, _is_object)
        common_strategy.save_sharded_objects(objects, checkpoint_dir)
    # A fully parallel save marks in the entities who saves what; the caller's must not change.
    sharded_strategy.save(copied(sharded), checkpoint_dir)
    if _ranks.rank() == 0:
        config = CheckpointingConfig(sharded_strategy.backend, sharded_strategy.version)
        save_config(config, checkpoint_dir)
    _ranks.barrier()


def sharded_metadata(checkpoint_dir: Any, sharded_strategy: Any, common_strategy: Any) -> Any:
    """The tensors and objects of a checkpoint, without data, by key and unique key."""
    found = sharded_strategy.load_sharded_metadata(checkpoint_dir)
    if sharded_strategy.can_handle_sharded_objects:
        return found
    validate_sharded_objects_handling(sharded_strategy, common_strategy)
    return merge(found, common_strategy.load_sharded_metadata(checkpoint_dir))


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Any,
    sharded_strategy: Any,
    common_strategy: Any,
    validate_access_integrity: bool,
    strict: StrictHandling,
) -> tuple[StateDict, set[str], set[str]]:
    """Loads common state, objects and tensors. Every rank calls.

    Returns:
        (state, missing keys, unexpected keys), as `strict` demands.
    """
    result = common_strategy.load_common(checkpoint_dir)
    template, nonpersistent, factories = load_preprocess(sharded_state_dict)
    merge(result, nonpersistent)
    sharded, _ = extract_sharded_base(template)
    stored = local = everybodys = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        stored = sharded_metadata(checkpoint_dir, sharded_strategy, common_strategy)
    if validate_access_integrity or StrictHandling.requires_global_app_metadata(strict):
        local, everybodys = determine_global_metadata(sharded)
    sharded, missing, unexpected = validate_integrity_and_strict_load(
        sharded, strict, validate_access_integrity, local, everybodys, stored
    )
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, sharded = extract_matching_values(sharded, _is_object)
        merge(result, common_strategy.load_sharded_objects(objects, checkpoint_dir))
    merge(result, sharded_strategy.load(sharded, checkpoint_dir))
    return apply_factory_merges(result, factories), missing, unexpected
