"""Protocols: the methods that arguments of any class must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SupportsDlpack(Protocol):
    """An array of torch, of numpy, or of another library that supports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class Stateful(Protocol):
    """torch's Stateful protocol, which modules, optimizers and dataloaders implement."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CommunicatorLike(Protocol):
    """One rank's end of a group; every rank calls the same operations in the same order.

    Timeouts are in seconds; None means no limit. TimeoutError means that a timeout has passed,
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
        """On root, every rank's bytes in the order of ranks; on other ranks an empty list."""
        ...

    def scatter(
        self, parts: Sequence[bytes], root: int, timeout: float | None = None, /
    ) -> bytes:
        """Sends parts[r], given on root, to rank r; returns this rank's part."""
        ...

    def broadcast(self, mine: bytes, root: int, timeout: float | None = None, /) -> bytes:
        """Returns the bytes given on root."""
        ...

    def all_to_all(self, to: Sequence[bytes], timeout: float | None = None, /) -> list[bytes]:
        """Sends to[r] to rank r; element r of the result came from rank r."""
        ...
