"""Errors that programs written for stock Megatron-Core catch as its own."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tilestone._errors import CheckpointError

_CORE = "megatron.core.dist_checkpointing.core"

# What messages call an option, and its name in Megatron-Core.
_NAMES = (
    (re.compile(r"\bchecks\.access\b"), "validate_access_integrity"),
    (re.compile(r"\bChecks\.common_differs\b"), "common_differs"),
    (re.compile(r"agree on (differences\.not_\w+) "), r"agree on strict, which sets \1 "),
)
# What hints say of options that only tilestone.load has, and Megatron-Core's words for it.
_WORDS = (
    (re.compile(r'(; |^)differences=Differences\(other_shape="report"\) leaves .* as it is'), ""),
    (re.compile(r": load with rename=tilestone\.\w+\(.*\)$"), ""),
    (
        re.compile(r'differences=Differences\(not_in_checkpoint="report"\) loads'),
        'strict="log_unexpected" (in training: dist_ckpt_strictness) loads',
    ),
)
_CELL = re.compile(r"(/shard_)[\d.]+_[\d.]+$")  # of an object, at the end of its unique key

Function = TypeVar("Function", bound=Callable[..., Any])


def _plain(error: CheckpointError) -> tuple[object, ...]:
    """Reduces such an error for pickling to Tilestone's own error type."""
    kind: type[CheckpointError] = type(error).__mro__[1]
    return (kind, *CheckpointError.__reduce__(error)[1:])


@functools.cache
def _with_bases(kind: Any, *others: Any) -> Any:
    """A class of the same name as an error's that has further bases."""
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__reduce__": _plain,
        "failures": {},  # torch's error has an entry for each rank; ours names the rank itself
    }
    return type(kind.__name__, (kind, *others), members)


def _reword(error: CheckpointError) -> None:
    """Makes an error name options that Megatron-Core's functions have."""
    for engines, own in _NAMES:
        error.message, error.text = (engines.sub(own, each) for each in (error.message, error.text))
    hint = error.hint
    for engines, own in _WORDS:
        hint = engines.sub(own, hint)
    grid = _CELL.sub(r"\1", error.key)
    if grid != error.key and f" {grid}" in hint and "strict=" in hint:  # others of it are stored
        similar = hint.rpartition("; ")[0]
        hint = f"{similar}; objects can't be resharded: request the places of the save"
    if hint != error.hint:
        end = f"; {hint}" if hint else ""
        error.text = error.text and error.text.removesuffix(f"; {error.hint}") + end
        error.hint = hint


def _make_stocks(error: CheckpointError) -> None:
    """Gives an error the classes that a program may catch: torch's, and Megatron-Core's if the
    process has imported it."""
    from torch.distributed.checkpoint.api import CheckpointException

    stock = getattr(sys.modules.get(_CORE), "CheckpointingException", None)
    if not isinstance(error, CheckpointException):
        others = [kind for kind in (stock, CheckpointException) if kind is not None]
        kind: Any = type(error)
        error.__class__ = _with_bases(kind, *others)


def raises_stocks_errors(function: Function) -> Function:
    """Makes a function's errors instances of torch's CheckpointException too, which stock's saves
    and loads of torch_dist raise, and of Megatron-Core's CheckpointingException if that is imported.
    """

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except CheckpointError as error:
            _reword(error)
            _make_stocks(error)
            raise

    return call  # type: ignore[return-value]
