"""The call of the engine, or of a strategy of the user, that `serialization.save` is."""

from __future__ import annotations

import reprlib
from typing import Any, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError, RankFailedError, TimeoutError
from tilestone._option_values import Checks
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
    state: Any = sharded_state_dict
    strategy, failure = _strategy(sharded_strategy)
    try:
        state = _save_arguments.with_content_metadata(sharded_state_dict, content_metadata)
    except InvalidArgumentError as error:
        failure = error
    failure = _save_arguments.unsupported(common_strategy) or failure
    options = {} if strategy is None else engine_options_of(strategy)
    if copies is None and options is not None:
        copies = options.get("copies")
    if failure is None:
        failure = _save_arguments.conflict(strategy, options, copies)
    hashes = _integrity.Hashes(checkpoint_dir, group, deadline) if verify_integrity else None
    if options is None and by_files is None:
        common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
        call = _user_strategies.Save(
            state, checkpoint_dir, strategy, common, validate_access_integrity, preprocess
        )

        def check() -> None:
            deadline.check()
            _engine_calls.raiser(failure)()

        with _ranks.call_of(group, deadline):
            request = call.begin(check) if async_sharded_save else call.run(check)
        if hashes is not None and async_sharded_save:
            request.finalize_fns.append(hashes.write)
        elif hashes is not None:
            hashes.write()
        return request  # type: ignore[no-any-return]
    if by_files is not None and failure is None:
        failure = _save_arguments.needs_communicator(strategy, group, verify_integrity)
    unchecked = validate_access_integrity and by_files is None
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

    checks = Checks()
    try:
        compares = given["common_differs"] if validate_access_integrity else "ignore"
        checks = Checks(access=unchecked, common_differs=compares)
    except InvalidArgumentError as error:
        failure = error
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
