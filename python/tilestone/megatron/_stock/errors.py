"""Errors that programs written for stock Megatron-Core catch as its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tilestone._errors import CheckpointError

_CORE = "megatron.core.dist_checkpointing.core"

# Options of the engine's hints in Megatron-Core's words; None: it has none.
_WORDS = {
    "checks.access": "validate_access_integrity",
    "checks.common_differs": "common_differs",
    "differences.not_in_checkpoint": 'strict="log_unexpected" (in training: dist_ckpt_strictness)',
    "differences.not_requested": "strict (in training: dist_ckpt_strictness)",
    "differences.other_shape": None,
    "rename": None,
}

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
            error.word_options(_WORDS)
            _make_stocks(error)
            raise

    return call  # type: ignore[return-value]
