"""Arguments of a CheckpointManager that one rank refuses, and the numbers of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tilestone import _core
from tilestone._calls.collective import Prepared
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._options import valid
from tilestone._protocols import CommunicatorLike


class Refused(Prepared):
    """In place of a state: why this rank's arguments were refused. All ranks then raise it."""

    def __init__(self, error: InvalidArgumentError) -> None:
        self._error = error

    def make(self) -> Mapping[Any, Any]:
        raise self._error


def refuse(
    work: str, comm: CommunicatorLike, error: CheckpointError, timeout: Any
) -> NoReturn:
    """Raises why this rank refuses its arguments, on all ranks that do the same work."""

    def say(_: int, __: bytes) -> bytes:
        raise error

    if comm.size > 1:
        error.add_rank(comm.rank)
        try:
            _core.agree(work, comm, say, lambda _, __: (b"", True), valid.limit_of(timeout))
        except CheckpointError as failure:
            if failure is not error:
                raise error from failure  # others did not come, or made another call
    raise error


def numbers_of(metrics: Any) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics must be a dict of numbers by name, not {metrics!r}")
    found = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("text is no number")
            found[valid.word("the name of a metric", name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"the metric {name!r} must be a number, not {value!r}"
            ) from error
    return found
