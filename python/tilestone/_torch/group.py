"""What all communicators over one torch.distributed process group share, and their exceptions."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from tilestone import _core, _forked
from tilestone._torch.helper_thread import Helper


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


class Shared:
    """The state that all communicators over one process group share.

    Args:
        name: of the group.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.process = os.getpid()
        self._store: Any = None
        self._helper: Helper | None = None
        self.operation = 0  # number of the last operation, or of the call
        self.call = 0  # number of the current call
        self.ending: str | None = None  # the error, in hex, with which this rank ends the call
        self.ended: str | None = None  # the error, in hex, with which any rank has ended the call
        self.last = False  # the operation is the last of a call; on rank 0, the next one
        self.old_keys: list[str] = []  # keys that this rank must delete later
        self.unused_keys: list[str] = []  # keys that this rank can delete now
        self.moving_with: list[int] = []  # the ranks that a transfer waits for
        self.memory = _core.CallMemory()
        self.inbox: list[tuple[int, bytes]] = []  # received notices
        self.announced = 0  # coordinator: the number of the newest notice that it knows of
        self.unread: list[int] = []  # coordinator: the numbers of notices not received yet
        self.last_answer = b""  # member

    @property
    def helper(self) -> Helper:
        if self._helper is None or not self._helper.is_alive():
            self._helper = Helper()
            weakref.finalize(self, self._helper.stop, 0)
        return self._helper

    @property
    def store(self) -> Any:
        """Only for the helper thread, because connecting can block."""
        if self._store is None:
            # A clone has its own connection, so waiting here blocks nothing else in the process.
            default: Any = _get_default_store()
            self._store = PrefixStore(f"tilestone/{self._name}", default.clone())
        return self._store


_shared: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()
_shared_lock = _forked.Lock()


def shared_by(group: dist.ProcessGroup) -> Shared:
    """The shared state of `group`.

    Raises:
        UnsupportedError: this process inherited the group through a fork.
    """
    with _shared_lock:
        shared = _shared.get(group) or _shared.setdefault(group, Shared(group.group_name))
    _forked.check(group, shared.process)
    return shared
