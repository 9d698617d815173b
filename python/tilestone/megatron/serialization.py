"""Saving and loading sharded state dicts: the functions of Megatron-Core's `dist_checkpointing`.

A save or load with Tilestone's own strategies is one call of the engine. If one rank fails, every
rank raises. A save leaves either the old checkpoint or the complete new one. All bytes that are
read are checked. The caller's state dict is never changed.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Dict, Tuple, Union

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.values import ByFiles, Checks, Differences, LocalCopies
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._calls import engine_calls, save_call, user_strategies
from tilestone.megatron._ranks import Deadline
from tilestone.megatron.core import raises_stocks_errors
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    engine_options_of,
    get_default_strategy,
)
from tilestone.megatron.strategies.common import TorchCommonLoadStrategy
from tilestone.megatron.validation import (
    StrictHandling,
    parse_strict_flag,
    report_by_mode,
    verify_checkpoint_and_load_strategy,
)

logger = logging.getLogger(__name__)

# Content of a checkpoint: a tensor's key or an object's unique key -> the entity without data.
CkptShardedMetadata = Dict[str, Union[ShardedTensor, ShardedObject]]
_Directory = Union[str, "os.PathLike[str]"]

_MISSING_TOO = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)


@raises_stocks_errors
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: _Directory,
    sharded_strategy: Union[LoadShardedStrategy, Tuple[str, int], None] = None,
    common_strategy: Union[LoadCommonStrategy, Tuple[str, int], None] = None,
    validate_access_integrity: bool = True,
    strict: Union[str, StrictHandling] = StrictHandling.ASSUME_OK_UNEXPECTED,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    allow_classes: Any = (),
    cast: bool = True,
) -> Union[StateDict, Tuple[StateDict, set[str], set[str]]]:
    """Loads a checkpoint. Its division among ranks need not match the save's. Every rank calls.

    Args:
        sharded_state_dict: the template: entities in nested dicts and lists. The entities' tensors
            are filled in place; entities without data get tensors on the CPU. Common values are
            ignored. A LocalNonpersistentObject is replaced by the object that it holds.
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: (backend, version), a LoadShardedStrategy, or None to choose by the files.
            A strategy class of the user is called as Megatron-Core calls it.
        common_strategy: the same for common state.
        validate_access_integrity: refuse a template in which the main replicas of all ranks leave
            out a part of a tensor, or contain a part twice.
        strict: what to do about keys that are not in the checkpoint (*unexpected*) and keys that no
            rank asks for (*missing*), see StrictHandling. An object counts by its key, not by its
            unique key.
        async_strategy: ignored.
        verify_integrity: compare the files with the hashes in `integrity.json`, if a save has
            written that file; the ranks divide the files among them. A file that is missing, differs
            or is not named there is damage. Tilestone's own checksums are always compared.
        process_group: the ranks that load; None: torch's default group, or this process alone
            if torch.distributed is not initialised.
        timeout: limit for the whole load in seconds; None: no limit.
        allow_classes: names of further classes that may be instantiated, as for `tilestone.load`.
            Objects of other classes come back as `tilestone.Opaque`. Namespaces, BytesIO, signals
            and Megatron's enums are always allowed.
        cast: convert tensors whose stored dtype differs from the wanted one, as Megatron-Core does
            (for example bfloat16 weights to float32). False: a different dtype is an error.

    Returns:
        The common state of the checkpoint, with the loaded values in the places of the entities.
        Empty slices of flattened tensors are left out, as in Megatron-Core. With the modes
        RETURN_*: (state, missing keys, unexpected keys). Missing keys are the same on every rank;
        unexpected keys are this rank's. Unexpected entities are left out of the state.

    Raises:
        CheckpointingException: the load failed; raised on every rank.
        ValueError: `strict` is not the name of a mode.
    """
    strategies, failure = _load_strategies(checkpoint_dir, sharded_strategy, common_strategy)
    mode = StrictHandling.ASSUME_OK_UNEXPECTED
    try:
        mode = parse_strict_flag(strict)
    except ValueError as error:
        strategies, failure = None, error
    deadline = Deadline(timeout)

    def check() -> None:
        deadline.check()
        if failure is not None:
            raise failure
        if verify_integrity:
            rank, size = _ranks.rank(process_group), _ranks.size(process_group)
            _integrity.check(checkpoint_dir, rank, size)

    asked = engine_calls.Asked(sharded_state_dict, check)
    options = _load_options(strategies, sharded_strategy, common_strategy)
    if options is None:
        with _ranks.call_of(process_group, deadline):
            state = user_strategies.load(
                asked, checkpoint_dir, strategies, validate_access_integrity, mode
            )
    else:
        asked.judge = functools.partial(report_by_mode, mode)
        state = engine_calls.engine_load(
            asked,
            checkpoint_dir,
            group=process_group,
            timeout=timeout,
            allow_classes=allow_classes,
            cast=cast,
            differences=_differences(mode),
            checks=Checks(access=validate_access_integrity),
            **options,
        )
    if StrictHandling.requires_returning_mismatch_keys(mode):
        return state, asked.missing, asked.unexpected
    return state


def _differences(mode: StrictHandling) -> Differences:
    """What the engine does about keys so that the mode can judge them."""
    return Differences(
        not_in_checkpoint="error" if mode == StrictHandling.ASSUME_OK_UNEXPECTED else "ignore",
        not_requested="report" if mode in _MISSING_TOO else "ignore",
    )


def _load_strategies(
    checkpoint_dir: _Directory, sharded_strategy: Any, common_strategy: Any
) -> Tuple[Tuple[Any, Any] | None, Exception | None]:
    """Returns the strategies, or the error, which is raised later, on all ranks together."""
    try:
        found = verify_checkpoint_and_load_strategy(
            checkpoint_dir, sharded_strategy, common_strategy
        )
        return found, None
    except Exception as error:
        return None, error


def _load_options(
    strategies: Tuple[Any, Any] | None, sharded_given: Any = None, common_given: Any = None
) -> dict[str, Any] | None:
    """Returns the engine's options for these strategies; None if they load without the engine.

    A rank that could not find its strategies goes the way of the ones that it was given, because
    the other ranks go it too.
    """
    if strategies is None:
        given = (sharded_given, common_given)
        callable_ones = [
            each
            for each in given
            if hasattr(each, "check_backend_compatibility") and not isinstance(each, type)
        ]
        return {} if not callable_ones else _options_of_all(callable_ones)
    return _options_of_all(strategies)


def _options_of_all(strategies: Iterable[Any]) -> dict[str, Any] | None:
    options: dict[str, Any] = {}
    for strategy in strategies:
        found = engine_options_of(strategy)
        if type(strategy) is TorchCommonLoadStrategy:
            found = {}
        if found is None:
            return None
        options |= found
    return options


@raises_stocks_errors
def load_common_state_dict(checkpoint_dir: _Directory) -> StateDict:
    """Loads the common state of a checkpoint, tensors on the CPU. Each rank calls on its own.

    Raises:
        CheckpointingException: there is no checkpoint, or its common state can't be read.
    """
    _, common = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common.load_common(checkpoint_dir)  # type: ignore[no-any-return]


@raises_stocks_errors
def load_tensors_metadata(
    checkpoint_dir: _Directory, sharded_strategy: Union[LoadShardedStrategy, None] = None
) -> CkptShardedMetadata:
    """Describes the tensors of a checkpoint. Each rank calls on its own.

    Args:
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: the strategy that reads; None: that of the checkpoint.

    Returns:
        key -> ShardedTensor of the whole tensor, without data: global shape and dtype.

    Raises:
        CheckpointingException: there is no checkpoint, or it can't be read.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    # As Megatron-Core, whose strategies join with "/".
    given = checkpoint_dir if valid.is_url(checkpoint_dir) else pathlib.Path(checkpoint_dir)
    return strategy.load_tensors_metadata(given)  # type: ignore[no-any-return]


@raises_stocks_errors
def load_sharded_metadata(
    checkpoint_dir: _Directory,
    sharded_strategy: Union[LoadShardedStrategy, None] = None,
    common_strategy: Union[LoadCommonStrategy, None] = None,
) -> CkptShardedMetadata:
    """Describes the tensors and objects of a checkpoint. Each rank calls on its own.

    Args:
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy, common_strategy: the strategies that read; None: those of the checkpoint.

    Returns:
        As load_tensors_metadata; also, for each object, unique key -> ShardedObject without data.
        The common state, which later versions of Megatron-Core store as an object, is not included.

    Raises:
        CheckpointingException: there is no checkpoint, or it can't be read.
    """
    strategies = verify_checkpoint_and_load_strategy(
        checkpoint_dir, sharded_strategy, common_strategy
    )
    return user_strategies.sharded_metadata(checkpoint_dir, *strategies)  # type: ignore[no-any-return]


@raises_stocks_errors
def load_plain_tensors(
    checkpoint_dir: _Directory,
    *,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
) -> StateDict:
    """Loads all tensors of a checkpoint, whole, on every rank. Every rank calls.

    Args:
        checkpoint_dir: the checkpoint's directory.
        process_group, timeout: as for load().

    Returns:
        key -> tensor on the CPU; also the common state, as in Megatron-Core.

    Raises:
        CheckpointingException: the load failed; raised on every rank.
    """
    strategies, failure = _load_strategies(checkpoint_dir, None, None)

    def describe() -> None:
        engine_calls.raiser(failure)()
        asked.given = load_tensors_metadata(checkpoint_dir)

    asked = engine_calls.Asked({}, describe)
    if _load_options(strategies) is None:
        with _ranks.call_of(process_group, Deadline(timeout)):
            return user_strategies.load(
                asked, checkpoint_dir, strategies, False, StrictHandling.ASSUME_OK_UNEXPECTED
            )
    return engine_calls.engine_load(asked, checkpoint_dir, group=process_group, timeout=timeout)


@raises_stocks_errors
def load_content_metadata(
    checkpoint_dir: _Directory | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[Any, Any] | None:
    """Returns the content metadata that was given to `save(..., content_metadata=...)`.

    Args:
        checkpoint_dir: the checkpoint's directory.
        preloaded_state_dict: the common state or a loaded state; then no file is read.

    Returns:
        The content metadata; None if the checkpoint has none.

    Raises:
        ValueError: both arguments are None.
        CheckpointingException: there is no checkpoint, or its common state can't be read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise InvalidArgumentError("checkpoint_dir or preloaded_state_dict must be given")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(save_call.CONTENT_METADATA_KEY)


@raises_stocks_errors
def remove_sharded_tensors(checkpoint_dir: _Directory, key_prefix: str) -> None:
    """Removes the tensors and objects whose keys begin with a prefix from an existing checkpoint.

    One rank or several may call: one of them removes, and each returns once the keys are gone. The
    checkpoint is replaced atomically: at any moment, also after a crash, it is the old checkpoint
    or the one without these keys. After that, data files that hold nothing else are deleted (a
    prefix has its own files if Megatron-Core's separation_hint was set); in other files the bytes
    stay. A program that has the checkpoint open may find files missing. The common state stays.

    Args:
        checkpoint_dir: the checkpoint's directory; its format must be torch_dist, written by any
            program. An `integrity.json` is removed too, because its hashes would be wrong.
        key_prefix: prefix of tensors' keys and of objects' unique keys; not empty. If no key has
            it, a warning is logged and nothing changes. (Megatron-Core looks for files whose names
            have the prefix first, and removes nothing if there are none.)

    Raises:
        CheckpointingException: there is no checkpoint; a save to it is running; or its index can't
            be rewritten, because its format is zarr (a directory for each tensor) or because
            flattened tensors of Megatron-Core up to 0.15 would remain.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


@raises_stocks_errors
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: _Directory,
    sharded_strategy: Union[SaveShardedStrategy, Tuple[str, int], None] = None,
    common_strategy: Union[SaveCommonStrategy, Tuple[str, int], None] = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
    content_metadata: dict[Any, Any] | None = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    process_group: Any = None,
    by_files: ByFiles | None = None,
    copies: LocalCopies | None = None,
    common_differs: str = "warn",
    timeout: float | None = _core.DEFAULT_TIMEOUT,
) -> _core.SaveResult | AsyncRequest | None:
    """Saves a sharded state dict. Every rank calls.

    When the call returns, or an asynchronous save is finalized, the checkpoint is complete and
    durable. Until then an existing checkpoint in the directory stays valid; it is replaced as a
    whole. An unfinished save of Megatron-Core is replaced too. A warning says what is replaced. The
    directory is created if it does not exist. If it holds files that belong to neither, the save
    fails and names them.

    Args:
        sharded_state_dict: entities in nested dicts and lists. All other values are common state,
            which is saved from rank 0. LocalNonpersistentObjects are not saved.
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: (backend, version), which is ("torch_dist", 1) or ("zarr", 1); a
            SaveShardedStrategy; or None for ("torch_dist", 1). A strategy class of the user is
            called as Megatron-Core calls it: an existing checkpoint is lost when the save begins to
            write, and a failed save leaves no checkpoint. The ranks meet before and after its call,
            which is not interrupted: a rank that has failed in it raises its own error and all
            others RankFailedError, and `timeout` limits how long they wait for each other.
        common_strategy: must be None.
        validate_access_integrity: refuse a state in which the main replicas of all ranks leave out
            a part of a tensor, or contain a part twice; also compare the ranks' common state.
        async_sharded_save: return a request when the state may change. A thread of this process
            writes; whatever runs the request's function waits for it. Finalizing the request, on
            every rank, publishes the checkpoint; a save that is not finalized is not published.
        preprocess_common_before_consistancy_check: takes a copy of the common state and returns
            what the ranks compare. It does not change what is saved.
        content_metadata: a dict without entities, for a program to read before it loads the
            checkpoint. It is saved as the common state's "content_metadata", replaces an entry of
            that name, and is saved without its "dp_cp_group".
        async_strategy: ignored: each queue takes the request.
        verify_integrity: also write `integrity.json`, the SHA-256 of each file in the directory,
            once the checkpoint is published. The ranks divide the files among them. (Every item has
            a checksum in any case, which is compared when the item is read.) Must be the same on
            all ranks: otherwise the checkpoint is published, and the ranks that hash wait for the
            others until the deadline, or until those are in another call.
        process_group: the ranks that save; None: torch's default group, or this process alone
            if torch.distributed is not initialised.
        by_files: a `tilestone.ByFiles`: the ranks coordinate only through small files in the
            directory, without torch.distributed, and nothing is replaced. process_group must be
            None, and sharded_strategy None or ("torch_dist", 1). docs/megatron.md ("Groups and
            timeouts") says what else differs.
        copies: a `tilestone.LocalCopies`: each rank also writes to its own data file what it holds
            and another rank of the copies' group writes, as for `tilestone.save`. The group is a
            process group, a `groups.Group`, or ranks in process_group; None: the model-parallel
            group (tensor and pipeline parallel) of Megatron's parallel_state. None: as the strategy
            says; by default no copies. Can't be combined with a strategy class of the user, or
            zarr.
        common_differs: "warn" or "error": what to do if the ranks' common states differ, or the
            replicas of a ShardedObject, or those of a ShardedTensor of at most 64 KiB without
            declared holders.
        timeout: limit for the whole save in seconds, finalizing included; None: no limit.

    Returns:
        With async_sharded_save the request: an AsyncRequest with Megatron-Core's interface, to be
        scheduled in `AsyncCallsQueue` (of `strategies.async_utils` here, or of Megatron-Core).
        Otherwise what `tilestone.save` returns, such as the number and bytes of this rank's local
        copies, if the call has an argument that Megatron-Core's save does not have (from
        process_group on, with another value than the default), or a strategy that makes local
        copies. Otherwise None, as in Megatron-Core: its programs end if a save that is not
        asynchronous returns something else. None also if a strategy class of the user has saved.

    Raises:
        CheckpointingException: the save failed; raised on every rank. An existing checkpoint in the
            directory is unchanged (but see `sharded_strategy`). By files it is raised on this rank
            and on those that wait for it.
        NotImplementedError: a common_strategy was given.
    """
    own = {
        "process_group": process_group, "by_files": by_files, "copies": copies,
        "common_differs": common_differs, "timeout": timeout,
    }  # fmt: skip
    result = save_call.save(
        sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy,
        validate_access_integrity, async_sharded_save, preprocess_common_before_consistancy_check,
        content_metadata, verify_integrity, **own,
    )  # fmt: skip
    if async_sharded_save or save_call.are_used(own, sharded_strategy):
        return result
    return None


@raises_stocks_errors
def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """Returns the strategy that saves tensors and objects in a format.

    Raises:
        CheckpointingException: there is none; the message lists the existing ones.
    """
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)  # type: ignore[no-any-return]


@raises_stocks_errors
def get_default_save_common_strategy(
    backend: str = "torch", version: int = 1
) -> SaveCommonStrategy:
    """Returns the strategy that saves common state beside a sharded strategy of the user.

    Raises:
        CheckpointingException: there is none; the message lists the existing ones.
    """
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)  # type: ignore[no-any-return]


@raises_stocks_errors
def get_default_load_sharded_strategy(checkpoint_dir: _Directory) -> LoadShardedStrategy:
    """Returns the strategy that loads a checkpoint's tensors and objects.

    Raises:
        CheckpointingException: there is no checkpoint, or no strategy loads its format.
    """
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]  # type: ignore[no-any-return]
