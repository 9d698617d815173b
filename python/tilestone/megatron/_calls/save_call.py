"""What `serialization.save` does: checks its arguments, calls the engine or the user's strategy.

An error of the arguments is this rank's only: the save then raises it on all ranks together.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Dict, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._options import valid
from tilestone._options.values import ByFiles, Checks, LocalCopies
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._calls import background, engine_calls, user_strategies
from tilestone.megatron._ranks import Deadline
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import (
    StrategyAction,
    engine_options_of,
    get_default_strategy,
)
from tilestone.megatron.utils import _clean_metadata_for_serialization

CONTENT_METADATA_KEY = "content_metadata"


def are_used(own: Mapping[str, Any], sharded_strategy: Any) -> bool:
    """Whether a save has such an argument, or its strategy makes local copies."""
    defaults: Mapping[str, Any] = save.__kwdefaults__ or {}
    if any(value is not defaults[name] and value != defaults[name] for name, value in own.items()):
        return True
    options = engine_options_of(sharded_strategy) or {}
    return options.get("copies") is not None


def check_arguments(
    common_strategy: Any,
    strategy: Any,
    options: Dict[str, Any] | None,
    copies: LocalCopies | None,
) -> None:
    """Raises an error for arguments that contradict each other, or that only Megatron-Core has.

    Args:
        options: the engine's options for the strategy; None: it saves without the engine.
        copies: the caller's copies, or the strategy's.
    """
    if common_strategy is not None:
        raise NotImplementedError(
            "common state is always saved in one way: leave common_strategy None"
        )
    if copies is not None and options is None:
        raise InvalidArgumentError(
            f"copies can't be combined with {type(strategy).__name__}, which chooses the writers"
        )


def check_by_files(
    strategy: Any, options: Dict[str, Any] | None, process_group: Any, verify_integrity: bool
) -> None:
    """Raises an error if something of this save is not available by files."""
    if process_group is not None:
        raise InvalidArgumentError("process_group and by_files exclude each other")
    if verify_integrity:
        raise UnsupportedError(
            "verify_integrity needs a communicator: the ranks send their hashes to one another",
            hint="leave verify_integrity False: a load checks every item's checksum in any case",
        )
    if options is None:
        raise UnsupportedError(
            f"{type(strategy).__name__} needs a communicator: it saves without the engine",
            hint="leave sharded_strategy None, or save without by_files",
        )


def with_content_metadata(state: Any, content_metadata: Any) -> Any:
    """Adds the content metadata, without its process group, to a state.

    Raises:
        InvalidArgumentError: it is not a dict, holds entities, or would replace entities.
    """
    if content_metadata is not None and not isinstance(content_metadata, dict):
        kind = type(content_metadata).__name__
        raise InvalidArgumentError(f"content_metadata must be a dict or None, not {kind}")
    if not isinstance(state, dict):
        return state
    if content_metadata is not None:
        if engine_calls.holds_entities(content_metadata):
            raise InvalidArgumentError(
                "content_metadata holds sharded entities, but it is saved as common state",
                key=CONTENT_METADATA_KEY,
            )
        if engine_calls.holds_entities(state.get(CONTENT_METADATA_KEY)):
            raise InvalidArgumentError(
                "content_metadata would replace sharded entities of the state dict",
                key=CONTENT_METADATA_KEY,
                hint="store the entities under another key of the state dict",
            )
    metadata = state.get(CONTENT_METADATA_KEY) if content_metadata is None else content_metadata
    if not isinstance(metadata, dict):
        return state
    return {**state, CONTENT_METADATA_KEY: _clean_metadata_for_serialization(metadata)}


def save(
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess: Any = None,
    content_metadata: Any = None,
    verify_integrity: bool = False,
    *,
    process_group: Any = None,
    by_files: ByFiles | None = None,
    copies: LocalCopies | None = None,
    common_differs: str = "warn",
    timeout: float | None = _core.DEFAULT_TIMEOUT,
) -> _core.SaveResult | AsyncRequest | None:
    """Saves; the arguments are those of `tilestone.megatron.save`.

    Returns:
        The engine's result, or None if a strategy of the user has saved. With async_sharded_save
        the request.
    """
    group, deadline = process_group, Deadline(timeout)
    strategy, failure = _strategy(sharded_strategy)
    options = {} if strategy is None else engine_options_of(strategy)
    if copies is None and options is not None:
        copies = options.get("copies")
    state, checks = sharded_state_dict, Checks()
    try:
        state = with_content_metadata(sharded_state_dict, content_metadata)
        checks = Checks(
            access=validate_access_integrity and by_files is None,
            common_differs=common_differs if validate_access_integrity else "ignore",
        )
        check_arguments(common_strategy, strategy, options, copies)
        if verify_integrity:
            valid.refuse_any_url(checkpoint_dir, "verify_integrity, which hashes files,")
        if by_files is not None:
            check_by_files(strategy, options, group, verify_integrity)
    except Exception as error:
        failure = failure or error
    hashes = _integrity.Hashes(checkpoint_dir, group, deadline) if verify_integrity else None
    made = engine_calls.Given(
        state, checkpoint_dir, engine_calls.raiser(failure), group,
        preprocess if validate_access_integrity else None, replaces=by_files is None,
    )  # fmt: skip
    if options is None and by_files is None:
        with _ranks.call_of(group, deadline):
            return user_strategies.save(
                made, strategy, validate_access_integrity, async_sharded_save, hashes
            )
    save: Any = background.save_whole if async_sharded_save else engine_calls.engine_save
    return save(  # type: ignore[no-any-return]
        made,
        checkpoint_dir,
        group=group if by_files is None else None,
        by_files=by_files,
        overwrite=by_files is None,
        checks=checks,
        timeout=deadline.timeout(),
        hashes=hashes,
        **(options or {}) | {"copies": copies},
    )


def _strategy(given: Any) -> Tuple[Any, Exception | None]:
    """Returns the strategy, or the error, which is raised later, on all ranks together."""
    try:
        if given is None:
            return get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1), None
        if isinstance(given, tuple) and len(given) == 2:
            return get_default_strategy(StrategyAction.SAVE_SHARDED, *given), None
    except Exception as error:
        return None, error
    if all(hasattr(given, name) for name in ("save", "backend", "version")):
        return given, None
    wanted = "sharded_strategy must be a SaveShardedStrategy, (backend, version) or None"
    return None, InvalidArgumentError(f"{wanted}, not {reprlib.repr(given)}")
