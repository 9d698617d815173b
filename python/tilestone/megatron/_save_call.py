"""What `serialization.save` does: one call of the engine, or the steps of a user's strategy.

What is wrong on this rank is found first, and raised later, by the save, on all ranks together.
"""

from __future__ import annotations

import reprlib
from typing import Any

from tilestone import _core
from tilestone._errors import (
    InvalidArgumentError,
    RankFailedError,
    TimeoutError,
    UnsupportedError,
)
from tilestone._option_values import Checks
from tilestone.megatron import _engine_calls, _ranks, _user_strategies
from tilestone.megatron._together import Deadline
from tilestone.megatron.strategies._engine import ASYNC_HINT
from tilestone.megatron.strategies.base import (
    StrategyAction,
    engine_options_of,
    get_default_strategy,
)
from tilestone.megatron.utils import _clean_metadata_for_serialization

CONTENT_METADATA_KEY = "content_metadata"


def save(
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess: Any = None,
    content_metadata: Any = None,
    *,
    process_group: Any = None,
    by_files: Any = None,
    copies: Any = None,
    common_differs: str = "warn",
    timeout: Any = _core.DEFAULT_TIMEOUT,
) -> _core.SaveResult | None:
    """Saves; the arguments are those of `tilestone.megatron.save`.

    Returns:
        The engine's result; None if a strategy of the user has saved.
    """
    deadline = Deadline(timeout)
    strategy, failure = _strategy(sharded_strategy)
    options = {} if strategy is None else engine_options_of(strategy)  # None: without the engine
    if copies is None and options is not None:
        copies = options.get("copies")
    state, checks = sharded_state_dict, Checks()
    try:
        if failure is None:
            _refuse_kinds(async_sharded_save, common_strategy)
            _refuse_conflicts(strategy, options, copies, by_files, process_group)
            state = _with_content_metadata(sharded_state_dict, content_metadata)
            compares = common_differs if validate_access_integrity else "ignore"
            checks = Checks(
                access=validate_access_integrity and by_files is None, common_differs=compares
            )
    except Exception as error:
        failure = error

    if options is None and by_files is None:
        common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
        call = _user_strategies.Save(
            state, checkpoint_dir, strategy, common, validate_access_integrity, preprocess
        )
        with _ranks.call_of(process_group, deadline):
            call.run(lambda: _raise_first(deadline, failure))
        return None
    if failure is None and hasattr(strategy, "engine_state"):
        try:
            if validate_access_integrity:
                strategy.validate_access(state, process_group, deadline.timeout())
            state = strategy.engine_state(state, process_group, deadline.timeout())
            checks = Checks(common_differs=checks.common_differs)
        except (TimeoutError, RankFailedError):
            raise  # raised on every rank, so no rank waits in the save
        except Exception as error:
            failure = error
    given = _engine_calls.Given(
        state, checkpoint_dir, _engine_calls.raiser(failure), process_group,
        preprocess if validate_access_integrity else None, replaces=by_files is None,
    )  # fmt: skip
    return _engine_calls.engine_save(
        given,
        checkpoint_dir,
        group=process_group if by_files is None else None,
        by_files=by_files,
        overwrite=by_files is None,
        checks=checks,
        timeout=deadline.timeout(),
        **(options or {}) | {"copies": copies},
    )


def _raise_first(deadline: Deadline, failure: Exception | None) -> None:
    deadline.check()
    if failure is not None:
        raise failure


def _strategy(given: Any) -> tuple[Any, Exception | None]:
    """Returns the strategy, or the error."""
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


def _refuse_kinds(async_sharded_save: bool, common_strategy: Any) -> None:
    """Raises an error for the kinds of saves that only Megatron-Core has."""
    if async_sharded_save:
        raise UnsupportedError("asynchronous saves are not supported yet", hint=ASYNC_HINT)
    if common_strategy is not None:
        raise NotImplementedError(
            "common state is always saved in one way: leave common_strategy None"
        )


def _refuse_conflicts(
    strategy: Any, options: dict[str, Any] | None, copies: Any, by_files: Any, process_group: Any
) -> None:
    """Raises an error if what is asked for is not available together.

    Args:
        options: the engine's options for the strategy; None: it saves without the engine.
        copies: the caller's copies, or the strategy's.
    """
    name = type(strategy).__name__
    chooses_writers = options is None or hasattr(strategy, "engine_state")
    if copies is not None and chooses_writers:
        raise InvalidArgumentError(
            f"copies can't be combined with {name}, which chooses the writers"
        )
    if by_files is None:
        return
    if process_group is not None:
        raise InvalidArgumentError("process_group and by_files exclude each other")
    if hasattr(strategy, "engine_state"):
        raise UnsupportedError(
            f"{name} needs a communicator: its ranks agree on the writers",
            hint="leave sharded_strategy None: by files the holders of a ShardedTensor "
            "(`holders=`) share the writing",
        )
    if options is None:
        raise UnsupportedError(
            f"{name} needs a communicator: it saves without the engine",
            hint="leave sharded_strategy None, or save without by_files",
        )


def _with_content_metadata(state: Any, content_metadata: Any) -> Any:
    """Adds the content metadata, without its process group, to a state.

    Raises:
        InvalidArgumentError: it is not a dict, holds entities, or would replace entities.
    """
    if content_metadata is not None and not isinstance(content_metadata, dict):
        kind = type(content_metadata).__name__
        raise InvalidArgumentError(f"content_metadata must be a dict or None, not {kind}")
    if not isinstance(state, dict):
        return state
    before = state.get(CONTENT_METADATA_KEY)
    if content_metadata is not None and _engine_calls.holds_entities(content_metadata):
        raise InvalidArgumentError(
            "content_metadata holds sharded entities, but it is saved as common state",
            key=CONTENT_METADATA_KEY,
        )
    if content_metadata is not None and _engine_calls.holds_entities(before):
        raise InvalidArgumentError(
            "content_metadata would replace sharded entities of the state dict",
            key=CONTENT_METADATA_KEY,
            hint="store the entities under another key of the state dict",
        )
    metadata = before if content_metadata is None else content_metadata
    if not isinstance(metadata, dict):
        return state
    return {**state, CONTENT_METADATA_KEY: _clean_metadata_for_serialization(metadata)}
