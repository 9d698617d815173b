"""Errors of the strategies for stock Megatron-Core: what its programs catch catches them too."""

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
    """How such an error is pickled: as the one of Tilestone's that it is."""
    kind: type[CheckpointError] = type(error).__mro__[1]
    return (kind, *CheckpointError.__reduce__(error)[1:])


@functools.cache
def _also_stocks(kind: Any) -> Any:
    """A class of the same name that is also an error of Megatron-Core's, and torch's of a load."""
    try:
        stock = importlib.import_module(_CORE).CheckpointingException
    except ImportError:
        return kind
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__reduce__": _plain,
        "failures": {},  # torch's error has one for each rank; ours says which rank it was
    }
    return type(kind.__name__, (kind, stock, CheckpointException), members)


def raises_stocks_errors(function: Function) -> Function:
    """A function whose errors are also Megatron-Core's CheckpointingException.

    And the CheckpointException that stock's loads of the format torch_dist raise: torch's.
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
