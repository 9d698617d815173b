"""Checks before a save or load: between ranks, and between what is requested and what is stored.

As in Megatron-Core, *missing* keys are stored but requested by no rank, and *unexpected* keys are
requested but not stored.
"""

from __future__ import annotations

import logging
import os
import reprlib
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, List, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, MismatchError, NotFoundError
from tilestone._options import valid
from tilestone.megatron._shards import held
from tilestone.megatron._shards.held import log_differences as _validate_common_state_dict
from tilestone.megatron._stored import StoredEntities
from tilestone.megatron.core import maybe_load_config
from tilestone.megatron.dict_utils import extract_matching_values, nested_values
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from tilestone.megatron.strategies.base import StrategyAction, get_default_strategy

logger = logging.getLogger(__name__)

# The entities of one rank, without data; the same for each rank.
_LocalMetadata = List[Union[ShardedTensor, ShardedObject]]
_GlobalMetadata = Sequence[_LocalMetadata]


class StrictHandling(Enum):
    """What a load does about unexpected and missing keys.

    Missing keys are known only if all ranks exchange what they request. The modes *_UNEXPECTED do
    not exchange it, and ignore missing keys.
    """

    # Unexpected keys make the load itself fail. The default.
    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    # Unexpected keys are logged as a warning and left out of the load.
    LOG_UNEXPECTED = "log_unexpected"
    # Unexpected and missing keys are logged as a warning.
    LOG_ALL = "log_all"
    # Unexpected keys are an error.
    RAISE_UNEXPECTED = "raise_unexpected"
    # Unexpected and missing keys are an error.
    RAISE_ALL = "raise_all"
    # `load` also returns unexpected keys.
    RETURN_UNEXPECTED = "return_unexpected"
    # `load` also returns unexpected and missing keys.
    RETURN_ALL = "return_all"
    # Unexpected keys are left out of the load, and nothing is logged.
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether the checkpoint's keys must be known before it is loaded."""
        return val != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether the requests of all ranks must be known."""
        return val in (
            StrictHandling.IGNORE_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
            StrictHandling.LOG_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether `load` returns (state, missing keys, unexpected keys) instead of the state."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: Union[str, StrictHandling]) -> StrictHandling:
    """Returns the mode of that name; a mode, also stock Megatron-Core's, stands for itself.

    Raises:
        ValueError: there is no such mode.
    """
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict.value if isinstance(strict, Enum) else strict)
    except (ValueError, TypeError) as error:
        names = ", ".join(repr(mode.value) for mode in StrictHandling)
        raise InvalidArgumentError(
            f"Invalid strict flag: {strict!r} is none of {names}"
        ) from error


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: _LocalMetadata | None = None,
    global_metadata: _GlobalMetadata | None = None,
    ckpt_sharded_metadata: dict[str, Any] | None = None,
) -> Tuple[ShardedStateDict, set[str], set[str]]:
    """Compares what is requested with what is stored, and the ranks with one another.

    Args:
        sharded_state_dict: this rank's request: entities only.
        strict: what to do about unexpected and missing keys.
        validate_access_integrity: check that the ranks' parts make whole tensors and objects.
        local_metadata: this rank's request without data; None: made here.
        global_metadata: each rank's request; None: missing keys are not determined.
        ckpt_sharded_metadata: what is stored, as load_sharded_metadata returns it. Only
            ASSUME_OK_UNEXPECTED does not need it.

    Returns:
        (the requested entities that are stored, missing keys, unexpected keys). Missing keys are
        the same on every rank; unexpected keys are this rank's.

    Raises:
        CheckpointingException: required metadata is None; `strict` refuses some keys; or as
            validate_sharding_integrity.
    """
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise InvalidArgumentError(
                "Cannot verify checkpoint mismatch with ckpt_sharded_metadata=None."
            )
        if local_metadata is None:
            local_metadata = [item.without_data() for item in nested_values(sharded_state_dict)]
        asked_by_all = (
            global_metadata if StrictHandling.requires_global_app_metadata(strict) else None
        )
        missing, unexpected = _determine_missing_and_unexpected_keys(
            ckpt_sharded_metadata, local_metadata, asked_by_all
        )
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected)
        report_by_mode(strict, missing, unexpected)
        if strict == StrictHandling.IGNORE_ALL:
            missing, unexpected = set(), set()
    if validate_access_integrity:
        if global_metadata is None:
            raise InvalidArgumentError(
                "Cannot check sharding intergrity without global_metadata (None)."
            )
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, missing, unexpected


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
) -> Tuple[Any, Any]:
    """Returns the strategies that load a checkpoint.

    Args:
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: a LoadShardedStrategy, (backend, version), or None: that of the
            checkpoint.
        common_strategy: a LoadCommonStrategy, (backend, version), or None: that of the checkpoint.

    Returns:
        (sharded strategy, common strategy)

    Raises:
        CheckpointingException: there is no such directory or no checkpoint in it, or a strategy
            can't load it.
    """
    directory = os.fsdecode(valid.directory(checkpoint_dir))
    config = maybe_load_config(checkpoint_dir)
    if config is None and not (valid.is_url(directory) or os.path.isdir(directory)):
        problem = "is not a directory" if os.path.lexists(directory) else "does not exist"
        raise NotFoundError(f"Checkpoint directory {directory} {problem}", file=directory)
    if config is None:
        raise NotFoundError(
            f"{directory} is not a distributed checkpoint", file=directory
        )
    if sharded_strategy is None:
        sharded_strategy = (config.sharded_backend, config.sharded_backend_version)
    sharded_strategy = _load_strategy(StrategyAction.LOAD_SHARDED, sharded_strategy)
    if common_strategy is None:
        common_strategy = (config.common_backend, config.common_backend_version)
    common_strategy = _load_strategy(StrategyAction.LOAD_COMMON, common_strategy)
    sharded_strategy.check_backend_compatibility(config.sharded_backend)
    sharded_strategy.check_version_compatibility(config.sharded_backend_version)
    common_strategy.check_backend_compatibility(config.common_backend)
    common_strategy.check_version_compatibility(config.common_backend_version)
    return sharded_strategy, common_strategy


def _load_strategy(action: StrategyAction, given: Any) -> Any:
    """The strategy of an argument, which is a strategy that loads or (backend, version)."""
    if isinstance(given, tuple) and len(given) == 2:
        return get_default_strategy(action, *given)
    methods = [hasattr(given, f"check_{what}_compatibility") for what in ("backend", "version")]
    if isinstance(given, type) or not all(methods):
        argument = action.value.removeprefix("load_") + "_strategy"
        wanted = f"{argument} must be a strategy that loads, (backend, version) or None"
        raise InvalidArgumentError(f"{wanted}, not {reprlib.repr(given)}")
    return given


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Returns what is requested without the entities of some keys; the argument is not changed.

    Raises:
        CheckpointingException: a leaf is not an entity.
    """

    def is_removed(item: Any) -> bool:
        if not isinstance(item, ShardedBase):
            raise InvalidArgumentError(f"a {type(item).__name__} was found among sharded entities")
        return item.key in sharded_keys_to_remove

    _, kept = extract_matching_values(sharded_state_dict, is_removed)
    return kept  # type: ignore[no-any-return]


def _determine_missing_and_unexpected_keys(
    ckpt_sharded_metadata: dict[str, Any],
    local_metadata: _LocalMetadata,
    global_metadata: _GlobalMetadata | None = None,
) -> Tuple[set[str], set[str]]:
    """Returns (keys stored and requested by no rank, keys requested by this rank and not stored).

    Without global_metadata the first set is empty.
    """
    asked_here = {item.key for item in local_metadata}
    asked = asked_here.union(*({item.key for item in each} for each in global_metadata or ()))
    entities: Iterable[Any] = ckpt_sharded_metadata.values()
    if isinstance(ckpt_sharded_metadata, StoredEntities):
        entities = ckpt_sharded_metadata.as_requested(asked)
    stored = {item.key for item in entities}
    unexpected = asked_here - stored
    missing = set() if global_metadata is None else stored - asked
    if missing:
        logger.debug(f"Dist ckpt load missing keys: {missing}")
    if unexpected:
        logger.debug(f"Dist ckpt load unexpected keys: {unexpected}")
    return missing, unexpected


def _listed(keys: set[str]) -> str:
    """Prints a set as Python does, but in order."""
    return "{" + ", ".join(map(repr, sorted(keys))) + "}"


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Reports missing and unexpected keys; does nothing if there are none.

    Args:
        missing_keys: keys that are stored and requested by no rank.
        unexpected_keys: keys that this rank requests and that are not stored.
        raise_error: raise an error; otherwise log a warning.

    Raises:
        CheckpointingException: there are such keys, and raise_error is set.
    """
    parts = []
    if missing_keys:
        parts.append(
            "the checkpoint holds keys that no rank asks for. Missing keys (for all ranks): "
            + _listed(missing_keys)
        )
    if unexpected_keys:
        parts.append(
            "the checkpoint does not hold all requested keys. Unexpected keys (for this rank): "
            + _listed(unexpected_keys)
        )
    if not parts:
        return
    if raise_error:
        raise MismatchError("; ".join(parts))
    logger.warning("; ".join(parts))


def report_by_mode(strict: StrictHandling, missing: set[str], unexpected: set[str]) -> None:
    """Does the same if the mode logs or raises such keys."""
    raises = strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
    if raises or strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        maybe_report_missing_and_unexpected_keys(missing, unexpected, raises)


def validate_sharding_integrity(
    global_metadata: Iterable[Iterable[Any]], common_state_dict: CommonStateDict | None = None
) -> None:
    """Checks that the parts of all ranks make whole tensors and objects, each exactly once.

    Every rank checks the same metadata and raises the same error. (In Megatron-Core only rank 0
    raises, and the others wait for it in their next collective.)

    Args:
        global_metadata: for each rank its entities without data, see determine_global_metadata.
        common_state_dict: also compare this common state between ranks; a difference from rank 0's
            is logged as a warning. None: not compared.

    Raises:
        CheckpointingException: ranks describe a tensor or object differently, or main replicas
            overlap, leave a part out or exceed the tensor.
    """
    if common_state_dict is not None:
        _validate_common_state_dict(common_state_dict)
    held.check_access(global_metadata)


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[_LocalMetadata, _GlobalMetadata]:
    """Returns this rank's entities and those of each rank, all without data. Every rank calls.

    Without torch.distributed there is one rank.
    """
    local = [item.without_data() for item in nested_values(sharded_state_dict)]
    if not torch.distributed.is_initialized():
        return local, [local]
    return local, held.gather(local)


def validate_sharded_objects_handling(sharded_strategy: Any, common_strategy: Any) -> None:
    """Checks that one of the two strategies stores sharded objects.

    Raises:
        CheckpointingException: both have can_handle_sharded_objects = False.
    """
    if (
        not sharded_strategy.can_handle_sharded_objects
        and not common_strategy.can_handle_sharded_objects
    ):
        raise InvalidArgumentError(
            "Either sharded strategy or common strategy must implement ShardedObjects handling; "
            f"neither {sharded_strategy} nor {common_strategy} does"
        )
