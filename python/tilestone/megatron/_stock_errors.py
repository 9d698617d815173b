"""Errors of the strategies for stock Megatron-Core; its programs catch them as their own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from tilestone._errors import CheckpointError

_CORE = "megatron.core.dist_checkpointing.core"

Function = TypeVar("Function", bound=Callable[..., Any])


def _plain(error: CheckpointError) -> tuple[object, ...]:
    """Reduces such an error for pickling to Tilestone's own error type."""
    kind: type[CheckpointError] = type(error).__mro__[1]
    return (kind, *CheckpointError.__reduce__(error)[1:])


@functools.cache
def _also_stocks(kind: Any) -> Any:
    """A class of the same name that is also Megatron-Core's error and torch's load error."""
    try:
        stock = importlib.import_module(_CORE).CheckpointingException
    except ImportError:
        return kind
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__reduce__": _plain,
        "failures": {},  # torch's error has an entry for each rank; ours names the rank itself
    }
    return type(kind.__name__, (kind, stock, CheckpointException), members)


def raises_stocks_errors(function: Function) -> Function:
    """Makes a function's errors instances of Megatron-Core's CheckpointingException too.

    They are also instances of torch's CheckpointException, which stock loads of torch_dist raise.
    """

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except CheckpointError as error:
            if not isinstance(error, CheckpointException):
                kind: Any = type(error)
                error.__class__ = _also_stocks(kind)
            raise

    return call  # type: ignore[return-value]
