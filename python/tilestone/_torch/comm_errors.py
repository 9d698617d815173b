"""The exceptions of a communicator written in Python. Any other exception is a bug in it."""

from __future__ import annotations

from collections.abc import Sequence


class RanksMissingError(TimeoutError):
    """The deadline passed. `ranks`: the missing ranks, by their numbers in the group."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class RanksLostError(ConnectionError):
    """The connection to a rank broke. `ranks`: its number in the group; empty if unknown."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class CallEndedError(ConnectionError):
    """Another rank ended the call with an error. `error`: that rank's error, encoded."""

    def __init__(self, message: str, error: bytes) -> None:
        super().__init__(message)
        self.error = error
