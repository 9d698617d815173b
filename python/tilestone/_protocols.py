"""What arguments of any class must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SupportsDlpack(Protocol):
    """An array: torch's, numpy's, and those of others that speak DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class Stateful(Protocol):
    """torch's Stateful protocol: modules, optimizers and dataloaders follow it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CommunicatorLike(Protocol):
    """One rank's end of a group; every rank calls the same operations in the same order.

    Timeouts are seconds, None for no limit. A TimeoutError means that one has passed, a
    ConnectionError that a rank is gone.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def describe(self) -> str:
        """The kind of communicator, for messages."""
        ...

    def gather(self, mine: bytes, root: int, timeout: float | None = None, /) -> list[bytes]:
        """At root every rank's bytes, by rank; elsewhere an empty list."""
        ...

    def scatter(
        self, parts: Sequence[bytes], root: int, timeout: float | None = None, /
    ) -> bytes:
        """parts[r], given at root, goes to rank r."""
        ...

    def broadcast(self, mine: bytes, root: int, timeout: float | None = None, /) -> bytes:
        """The bytes given at root."""
        ...

    def all_to_all(self, to: Sequence[bytes], timeout: float | None = None, /) -> list[bytes]:
        """to[r] goes to rank r; the result's [r] came from rank r."""
        ...
