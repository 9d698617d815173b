"""Saves and loads with strategies of the user, in the same steps as Megatron-Core.

Such a save is not atomic: the checkpoint that it replaces is lost when it begins to write. If a rank
fails after that, what has been written stays, without `metadata.json`. The ranks meet after each
step and share one deadline: if one has failed or does not arrive, all others raise. Code of a
strategy is not interrupted, so a rank that waits inside it learns of a failure only afterwards.

The ranks and the deadline are those of the call under way (`_ranks.call_of`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tilestone._errors import UnsupportedError
from tilestone._options import valid
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._calls import engine_calls
from tilestone.megatron._calls.in_place import remove_seals
from tilestone.megatron._files import storage_errors
from tilestone.megatron._ranks import on_one, together
from tilestone.megatron._shards import held
from tilestone.megatron._stored import literal
from tilestone.megatron.core import CheckpointingConfig, save_config
from tilestone.megatron.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
)
from tilestone.megatron.state_dict_utils import save_preprocess
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import StrategyAction, get_default_strategy
from tilestone.megatron.utils import copied, extract_nonpersistent, extract_sharded_base
from tilestone.megatron.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
)


def _is_object(item: Any) -> bool:
    return isinstance(item, ShardedObject)


def _prepare(checkpoint_dir: Any) -> None:
    """Creates the directory, or makes an old checkpoint there invalid.

    Otherwise the old tensors would be a valid checkpoint with the new common state.
    """
    if replaced := engine_calls.replaced_by(checkpoint_dir):
        engine_calls.logger.warning(replaced)
    valid.refuse_any_url(checkpoint_dir, "a strategy of the program")
    with storage_errors(os.fspath(checkpoint_dir), "can't create the checkpoint directory"):
        os.makedirs(checkpoint_dir, exist_ok=True)
    remove_seals(literal(checkpoint_dir), common_is_sharded=False)


def _prepared(
    given: engine_calls.Given, strategy: Any, name: str
) -> tuple[ShardedStateDict, CommonStateDict, Any]:
    """The entities, the common state, and what the ranks compare of it."""
    _ranks.deadline_of_call().check()
    given.check()
    if not hasattr(strategy, name):
        raise UnsupportedError(
            f"{type(strategy).__name__} has no {name}", hint="save with async_sharded_save=False"
        )
    sharded, common = save_preprocess(given.given, False)
    if given.preprocess is None:
        return sharded, common, common
    copied_common = dict_list_map_outplace(lambda item: item, common)
    return sharded, common, given.preprocess(copied_common)


def save(
    given: engine_calls.Given,
    sharded_strategy: Any,
    checks_access: bool,
    in_background: bool,
    hashes: _integrity.Hashes | None,
) -> AsyncRequest | None:
    """Saves common state, objects and tensors, then `metadata.json`. Every rank calls.

    Args:
        given: the state, and its directory.
        sharded_strategy: what saves its tensors.
        checks_access: as validate_access_integrity of `tilestone.megatron.save`.
        in_background: call the strategy's async_save.
        hashes: written at the end.

    Returns:
        None; in the background the strategy's request, whose last functions end the save.
    """
    group, deadline = _ranks.default_group(None), _ranks.deadline_of_call()
    common_strategy = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
    name, directory = "async_save" if in_background else "save", given.directory

    sharded, common, compared = together(
        "preparation of a save", group, lambda: _prepared(given, sharded_strategy, name)
    )
    if checks_access:
        held.check_together(lambda: nested_values(sharded), group)
        held.log_differences(compared, group)
    on_one("directory of a save", group, lambda: _prepare(directory))
    together(
        "save of the common state", group, lambda: common_strategy.save_common(common, directory)
    )
    # A fully parallel save marks in the entities who saves what; the caller's must not change.
    own = copied(sharded)
    save_own = functools.partial(_save_sharded, own, directory, sharded_strategy, common_strategy)
    request: AsyncRequest = together("save by a strategy", group, lambda: save_own(name))
    publish = functools.partial(_publish, sharded_strategy, directory)
    ends: list[Callable[[], None]] = [
        lambda: on_one("end of a save", group, publish, deadline)
    ]
    if hashes is not None:
        ends.append(hashes.write)
    if in_background:
        request.finalize_fns.extend(ends)
        return request
    for end in ends:
        end()
    return None


def _save_sharded(
    own: ShardedStateDict, directory: Any, sharded_strategy: Any, common_strategy: Any, name: str
) -> Any:
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, own = extract_matching_values(own, _is_object)
        common_strategy.save_sharded_objects(objects, directory)
    return getattr(sharded_strategy, name)(own, directory)


def _publish(strategy: Any, directory: Any) -> None:
    save_config(CheckpointingConfig(strategy.backend, strategy.version), directory)


def sharded_metadata(checkpoint_dir: Any, sharded_strategy: Any, common_strategy: Any) -> Any:
    """The tensors and objects of a checkpoint, without data, by key and unique key."""
    found = sharded_strategy.load_sharded_metadata(checkpoint_dir)
    if sharded_strategy.can_handle_sharded_objects:
        return found
    validate_sharded_objects_handling(sharded_strategy, common_strategy)
    return merge(found, common_strategy.load_sharded_metadata(checkpoint_dir))


def load(
    asked: engine_calls.Asked,
    checkpoint_dir: Any,
    strategies: tuple[Any, Any] | None,
    validate_access_integrity: bool,
    strict: StrictHandling,
) -> StateDict:
    """Loads common state, objects and tensors of a template. Every rank calls.

    Args:
        asked: the template. Its `check` raises first on a rank without strategies.
        checkpoint_dir: the checkpoint's directory.
        strategies: the sharded and the common strategy; None: this rank has none, and fails.
        validate_access_integrity, strict: as for `tilestone.megatron.load`.

    Returns:
        The state; the missing and unexpected keys are set in `asked`, as `strict` demands.
    """
    group = _ranks.default_group(None)

    def prepared() -> tuple[StateDict, ShardedStateDict, Any]:
        made: Any = asked.make()
        assert strategies is not None  # else make() has raised
        result = strategies[1].load_common(checkpoint_dir)
        own, rest = extract_nonpersistent(made)
        merge(result, dict_list_map_outplace(lambda item: item.unwrap(), own))
        stored = None
        if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
            stored = sharded_metadata(checkpoint_dir, *strategies)
        return result, extract_sharded_base(rest)[0], stored

    result, wanted, stored = together("preparation of a load", group, prepared)
    local = everybodys = None
    if validate_access_integrity or StrictHandling.requires_global_app_metadata(strict):
        local, everybodys = determine_global_metadata(wanted)

    def compared() -> Any:
        return validate_integrity_and_strict_load(
            wanted, strict, validate_access_integrity, local, everybodys, stored
        )

    sharded, missing, unexpected = together("check of a load", group, compared)
    gone = _names(wanted) - _names(sharded)

    def loaded() -> StateDict:
        return merge(result, _load_sharded(sharded, checkpoint_dir, *(strategies or ())))  # type: ignore[no-any-return]

    together("load by a strategy", group, loaded)
    asked.gives_no_place = True
    state = together("end of a load", group, lambda: asked.merge(result, gone))
    asked.missing, asked.unexpected = missing, unexpected
    return state


def _names(sharded: ShardedStateDict) -> set[str]:
    return {
        item.unique_key if isinstance(item, ShardedObject) else item.key
        for item in nested_values(sharded)
    }


def _load_sharded(
    sharded: ShardedStateDict, checkpoint_dir: Any, sharded_strategy: Any, common_strategy: Any
) -> StateDict:
    result: StateDict = {}
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, sharded = extract_matching_values(sharded, _is_object)
        result = common_strategy.load_sharded_objects(objects, checkpoint_dir)
    return merge(result, sharded_strategy.load(sharded, checkpoint_dir))  # type: ignore[no-any-return]
