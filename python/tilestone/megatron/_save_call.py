"""The call of the engine, or of a strategy of the user, that `serialization.save` is."""

from __future__ import annotations

import reprlib
from typing import Any, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError, RankFailedError, TimeoutError
from tilestone._options.values import Checks
from tilestone.megatron import (
    _background,
    _engine_calls,
    _integrity,
    _ranks,
    _save_arguments,
    _user_strategies,
)
from tilestone.megatron._together import Deadline
from tilestone.megatron.strategies.async_utils import AsyncRequest
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
    verify_integrity: bool = False,
    **own: Any,
) -> _core.SaveResult | AsyncRequest | None:
    """Saves; the arguments are those of `tilestone.megatron.save`.

    Args:
        own: the arguments that only Tilestone has.

    Returns:
        The engine's result, or None if a strategy of the user has saved. With async_sharded_save
        the request.
    """
    given: dict[str, Any] = {**_save_arguments.OWN, **own}
    by_files, copies = given["by_files"], given["copies"]
    group, deadline = given["process_group"], Deadline(given["timeout"])
    strategy, failure = _strategy(sharded_strategy)
    options = {} if strategy is None else engine_options_of(strategy)
    if copies is None and options is not None:
        copies = options.get("copies")
    chooses = hasattr(strategy, "engine_state")  # it chooses the writers, and checks the access
    state, checks = sharded_state_dict, Checks()
    try:
        state = _save_arguments.with_content_metadata(sharded_state_dict, content_metadata)
        checks = Checks(
            access=validate_access_integrity and by_files is None and not chooses,
            common_differs=given["common_differs"] if validate_access_integrity else "ignore",
        )
        _save_arguments.check(common_strategy, strategy, options, copies)
        if by_files is not None:
            _save_arguments.check_by_files(strategy, options, group, verify_integrity)
    except Exception as error:
        failure = failure or error
    hashes = _integrity.Hashes(checkpoint_dir, group, deadline) if verify_integrity else None
    if options is None and by_files is None:
        common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
        call = _user_strategies.Save(
            state, checkpoint_dir, strategy, common, validate_access_integrity, preprocess
        )
        return _by_strategy(call, failure, group, deadline, hashes, async_sharded_save)
    if chooses and failure is None:
        state, failure = _chosen(strategy, state, group, deadline, validate_access_integrity)
    made = _engine_calls.Given(
        state, checkpoint_dir, _engine_calls.raiser(failure), group,
        preprocess if validate_access_integrity else None, replaces=by_files is None,
    )  # fmt: skip
    save: Any = _background.save_whole if async_sharded_save else _engine_calls.engine_save
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


def _by_strategy(
    call: _user_strategies.Save,
    failure: Exception | None,
    group: Any,
    deadline: Deadline,
    hashes: _integrity.Hashes | None,
    in_background: bool,
) -> AsyncRequest | None:
    """Saves with a strategy of the user; returns None, or the request of a save in the background."""

    def check() -> None:
        deadline.check()
        _engine_calls.raiser(failure)()

    with _ranks.call_of(group, deadline):
        request: AsyncRequest | None = call.begin(check) if in_background else call.run(check)
    if hashes is not None and request is not None:
        request.finalize_fns.append(hashes.write)
    elif hashes is not None:
        hashes.write()
    return request


def _chosen(
    strategy: Any, state: Any, group: Any, deadline: Deadline, validates: bool
) -> Tuple[Any, Exception | None]:
    """The state in which a strategy has marked who writes what, or this rank's error."""
    try:
        if validates:
            strategy.validate_access(state, group, deadline.timeout())
        return strategy.engine_state(state, group, deadline.timeout()), None
    except (TimeoutError, RankFailedError):
        raise  # raised on every rank, so no rank waits in the save
    except Exception as error:
        return state, error


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
