"""The call of the engine, or of a strategy of the user, that `serialization.save` is."""

from __future__ import annotations

import reprlib
from typing import Any, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError, RankFailedError, TimeoutError
from tilestone.megatron import _engine_calls, _ranks, _save_arguments, _user_strategies
from tilestone.megatron.strategies._together import Deadline
from tilestone.megatron.strategies.base import (
    StrategyAction,
    engine_options_of,
    get_default_strategy,
)


def save(
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess: Any = None,
    content_metadata: Any = None,
    **own: Any,
) -> _core.SaveResult | None:
    """Saves; the arguments are those of `tilestone.megatron.save`.

    Args:
        own: the arguments that only Tilestone has.

    Returns:
        The engine's result; None if a strategy of the user has saved.
    """
    given = {**_save_arguments.OWN, **own}
    by_files, stray = _save_arguments.by_files(**{name: given.pop(name) for name in _BY_FILES})
    copying = {name: given.pop(name) for name in _COPYING}
    group, deadline = given["process_group"], Deadline(given["timeout"])
    state: Any = sharded_state_dict
    strategy, failure = _strategy(sharded_strategy)
    try:
        state = _save_arguments.with_content_metadata(sharded_state_dict, content_metadata)
    except InvalidArgumentError as error:
        failure = error
    failure = _save_arguments.unsupported(async_sharded_save, common_strategy) or stray or failure
    options = {} if strategy is None else engine_options_of(strategy)
    copies = _save_arguments.local_copies(options, *copying.values())
    if failure is None:
        failure = _save_arguments.conflict(
            strategy, options, given["agreement"], copies, given["tp_replica_names"]
        )
    if options is None and not by_files:
        common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
        call = _user_strategies.Save(
            state, checkpoint_dir, strategy, common, validate_access_integrity, preprocess
        )

        def check() -> None:
            deadline.check()
            _engine_calls.raiser(failure)()

        with _ranks.call_of(group, deadline):
            call.run(check)
        return None
    if by_files and failure is None:
        failure = _save_arguments.needs_communicator(strategy, group)
    unchecked = validate_access_integrity and not by_files
    if failure is None and hasattr(strategy, "engine_state"):
        try:
            if validate_access_integrity:
                strategy.validate_access(state, group, deadline.timeout())
            state = strategy.engine_state(state, group, deadline.timeout())
            unchecked = False
        except (TimeoutError, RankFailedError):
            raise  # raised on every rank, so no rank waits in the save
        except Exception as error:
            failure = error

    made = _engine_calls.Given(
        state, checkpoint_dir, _engine_calls.raiser(failure), group,
        preprocess if validate_access_integrity else None, replaces=not by_files,
    )  # fmt: skip
    return _engine_calls.engine_save(
        made,
        checkpoint_dir,
        group=None if by_files else group,
        validate_access=unchecked,
        common_differs=given["common_differs"] if validate_access_integrity else "ignore",
        timeout=deadline.timeout(),
        agreement=given["agreement"],
        tp_replica_names=given["tp_replica_names"],
        **(options or {}) | copies | by_files,
    )


_BY_FILES = ("coordination", "rank", "world_size", "token", "number", "wait")
_COPYING = ("replicate", "replicate_group", "max_copy_bytes")


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
