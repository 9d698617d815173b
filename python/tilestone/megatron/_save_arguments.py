"""The arguments of a save: which of them contradict each other, and what they mean for the engine.

An error is this rank's only: the save then raises it on all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Dict

from tilestone import _calls, _core
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone.megatron import _engine_calls
from tilestone.megatron.strategies._engine import ASYNC_HINT, COPIES
from tilestone.megatron.strategies.base import engine_options_of
from tilestone.megatron.utils import _clean_metadata_for_serialization

CONTENT_METADATA_KEY = "content_metadata"

#: The arguments of `tilestone.megatron.save` that Megatron-Core's save does not have, with their
#: defaults.
OWN: Mapping[str, Any] = MappingProxyType({
    "process_group": None,
    "timeout": _core.DEFAULT_TIMEOUT,
    "common_differs": "warn",
    "agreement": "exchange",
    "replicate": "none",
    "replicate_group": None,
    "max_copy_bytes": None,
    "tp_replica_names": False,
    "coordination": "communicator",
    "rank": None,
    "world_size": None,
    "token": None,
    "number": 0,
    "wait": True,
})


def are_used(own: Mapping[str, Any], sharded_strategy: Any) -> bool:
    """Whether a save has such an argument, or its strategy makes local copies."""
    if any(value is not OWN[name] and value != OWN[name] for name, value in own.items()):
        return True
    options = engine_options_of(sharded_strategy) or {}
    return any(name in options for name in COPIES)


def unsupported(async_sharded_save: bool, common_strategy: Any) -> Exception | None:
    """Returns an error for the kinds of saves that only Megatron-Core has."""
    if async_sharded_save:
        return UnsupportedError("asynchronous saves are not supported yet", hint=ASYNC_HINT)
    if common_strategy is not None:
        return NotImplementedError(
            "common state is always saved in one way: leave common_strategy None"
        )
    return None


def conflict(
    strategy: Any,
    options: Dict[str, Any] | None,
    agreement: str,
    copies: Mapping[str, Any],
    tp_replica_names: bool,
) -> Exception | None:
    """Returns an error if an option needs the engine to choose the writers, but the strategy does.

    Args:
        options: the engine's options for the strategy; None: it saves without the engine.
        copies: options for local copies.
    """
    if options is not None and not hasattr(strategy, "engine_state"):
        return None
    wanted = f"agreement={agreement!r}" if agreement != "exchange" else ""
    if copies:
        wanted = f"replicate={copies['replicate']!r}"
    if tp_replica_names and options is None:
        wanted = "tp_replica_names=True"
    if not wanted:
        return None
    return InvalidArgumentError(
        f"{wanted} can't be combined with {type(strategy).__name__}, which chooses the writers"
    )


def by_files(
    coordination: str, **files: Any
) -> tuple[Dict[str, Any], InvalidArgumentError | None]:
    """Returns the options of `tilestone.save` for a save by files (empty for other saves), and the
    error if options of a save by files were given without it, to be raised on all ranks."""
    try:
        if _calls.is_by_files(coordination):
            return {"coordination": coordination, "overwrite": False, **files}, None
        _calls.refuse_files(files)
    except InvalidArgumentError as error:
        return {}, error
    return {}, None


def needs_communicator(strategy: Any, process_group: Any) -> Exception | None:
    """Returns an error if an option of this save is not available by files."""
    if process_group is not None:
        return InvalidArgumentError('process_group has no meaning with coordination="files"')
    if hasattr(strategy, "engine_state"):
        return UnsupportedError(
            f"{type(strategy).__name__} needs a communicator: its ranks agree on the writers",
            hint='leave sharded_strategy None: with coordination="files" the holders of a '
            "ShardedTensor (`holders=`) share the writing",
        )
    if strategy is not None and engine_options_of(strategy) is None:
        return UnsupportedError(
            f"{type(strategy).__name__} needs a communicator: it saves without the engine",
            hint='leave sharded_strategy None, or save with coordination="communicator"',
        )
    return None


def local_copies(
    options: Dict[str, Any] | None, replicate: str, group: Any, most: int | None
) -> Dict[str, Any]:
    """Returns the engine's options for local copies: the caller's, else the strategy's."""
    if replicate != "none" or group is not None or most is not None:
        return {"replicate": replicate, "replicate_group": group, "max_copy_bytes": most}
    of_strategy = {} if options is None else options
    return {name: of_strategy[name] for name in COPIES if name in of_strategy}


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
        if _engine_calls.holds_entities(content_metadata):
            raise InvalidArgumentError(
                "content_metadata holds sharded entities, but it is saved as common state",
                key=CONTENT_METADATA_KEY,
            )
        if _engine_calls.holds_entities(state.get(CONTENT_METADATA_KEY)):
            raise InvalidArgumentError(
                "content_metadata would replace sharded entities of the state dict",
                key=CONTENT_METADATA_KEY,
                hint="store the entities under another key of the state dict",
            )
    metadata = state.get(CONTENT_METADATA_KEY) if content_metadata is None else content_metadata
    if not isinstance(metadata, dict):
        return state
    return {**state, CONTENT_METADATA_KEY: _clean_metadata_for_serialization(metadata)}
