"""The arguments of a save: which of them contradict each other, and what they mean for the engine.

An error is this rank's only: the save then raises it on all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Dict

from tilestone import _core
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._options.values import LocalCopies
from tilestone.megatron import _engine_calls
from tilestone.megatron.strategies.base import engine_options_of
from tilestone.megatron.utils import _clean_metadata_for_serialization

CONTENT_METADATA_KEY = "content_metadata"

#: The arguments of `tilestone.megatron.save` that Megatron-Core's save does not have, with their
#: defaults.
OWN: Mapping[str, Any] = MappingProxyType({
    "process_group": None, "by_files": None, "copies": None, "common_differs": "warn",
    "timeout": _core.DEFAULT_TIMEOUT,
})  # fmt: skip


def are_used(own: Mapping[str, Any], sharded_strategy: Any) -> bool:
    """Whether a save has such an argument, or its strategy makes local copies."""
    if any(value is not OWN[name] and value != OWN[name] for name, value in own.items()):
        return True
    options = engine_options_of(sharded_strategy) or {}
    return options.get("copies") is not None


def check(
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
    if copies is not None and (options is None or hasattr(strategy, "engine_state")):
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
    if hasattr(strategy, "engine_state"):
        raise UnsupportedError(
            f"{type(strategy).__name__} needs a communicator: its ranks agree on the writers",
            hint="leave sharded_strategy None: by files the holders of a ShardedTensor "
            "(`holders=`) share the writing",
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
