"""Protocols: the methods that arguments of any class must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tilestone import _core


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

    def gather(self, mine: bytes, timeout: float | None = None, /) -> list[bytes]:
        """On rank 0, every rank's bytes in the order of ranks; on other ranks an empty list."""
        ...

    def scatter(self, parts: Sequence[bytes], timeout: float | None = None, /) -> bytes:
        """Sends parts[r], given on rank 0, to rank r; returns this rank's part."""
        ...

    def broadcast(self, mine: bytes, timeout: float | None = None, /) -> bytes:
        """Returns the bytes given on rank 0."""
        ...

    def all_to_all(
        self, to: Sequence[bytes], timeout: float | None = None, /
    ) -> Sequence[bytes | bytearray]:
        """Sends to[r] to rank r; element r of the result came from rank r."""
        ...


class PlacementLike(Protocol):
    """A placement of torch: Shard, Replicate, or another one with these methods."""

    def is_shard(self) -> bool: ...

    def is_replicate(self) -> bool: ...

    def is_partial(self) -> bool: ...


class RankArray(Protocol):
    """An array of global ranks, as torch's DeviceMesh holds it."""

    @property
    def shape(self) -> Sequence[int]: ...

    def flatten(self) -> RankArray: ...

    def tolist(self) -> Any: ...


class DeviceMeshLike(Protocol):
    """torch's DeviceMesh."""

    @property
    def mesh(self) -> RankArray: ...

    @property
    def mesh_dim_names(self) -> Sequence[str] | None: ...

    def get_rank(self) -> int: ...


class DtensorLike(Protocol):
    """torch's DTensor, or an object like it. to_local() returns its memory, not a copy."""

    @property
    def device_mesh(self) -> _core.Mesh | DeviceMeshLike: ...

    @property
    def placements(self) -> Sequence[_core.Shard | _core.Replicate | PlacementLike]: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def to_local(self) -> SupportsDlpack: ...
