"""How the ranks of a process group agree that all of them have arrived at an operation.

The steps are described in comm.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from tilestone._torch.group import CallEndedError, RanksLostError, RanksMissingError, Shared
from tilestone._torch.helper_thread import Task, poll
from tilestone._torch.transfer import rank_list

_LONGEST_POLL = 0.05  # seconds
_QUICK_POLL = 0.002  # seconds: the longest pause if there are few ranks
_PAUSE_OF_RANK = 0.0002  # seconds per rank: all ranks together poll at most 5,000 times a second
_UNUSED_KEYS = 8  # the most keys that a rank no longer needs and leaves in the store
# The least time, in seconds, for a transfer that all ranks have agreed on. The caller only waits
# until its deadline. But a transfer that is given up breaks the process group, and a busy machine
# may take seconds for it.
_LEAST_TRANSFER = 60.0


class Arrivals:
    """This rank's side of the agreement. Only for the group's helper thread."""

    def __init__(self, shared: Shared, rank: int, size: int) -> None:
        self._shared = shared
        self._rank = rank
        self._size = size

    def begin(
        self,
        name: str,
        task: Task,
        record: bytes = b"",
        before_go: Callable[[], None] | None = None,
        in_verdict: bytes = b"",
    ) -> tuple[float, bytes]:
        """Waits until all ranks have arrived.

        Args:
            record: of this rank's arrival.
            before_go: called on rank 0 before the others can learn that all have arrived.
            in_verdict: on rank 0, a record for the others.

        Returns:
            The deadline of the transfer, and the record in the verdict.
        """
        told = b""
        if self._size > 1:
            if self._shared.ended is not None:
                raise CallEndedError(
                    f"{name}: a rank has ended the call", bytes.fromhex(self._shared.ended)
                )
            verdict = self._verdict(task, record, before_go, in_verdict)
            self._raise_unless_go(name, verdict)
            told = bytes.fromhex(verdict["record"])
            self._shared.last = verdict["last"]
        return max(task.end, time.monotonic() + _LEAST_TRANSFER), told

    def records(self) -> dict[int, bytes]:
        """The records of all other ranks' arrivals at this operation."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not others:
            return {}
        keys = [f"{self._shared.operation}/{rank}" for rank in others]
        return dict(zip(others, map(bytes, self._shared.store.multi_get(keys)), strict=True))

    def _raise_unless_go(self, name: str, verdict: dict[str, Any]) -> None:
        by: int = verdict["by"]
        missing: list[int] = verdict["missing"]
        if missing:
            finder = "" if by == self._rank else f" (found by rank {by})"
            raise RanksMissingError(
                f"{name}: the deadline passed while waiting for {rank_list(missing)}{finder}",
                missing,
            )
        if verdict["error"]:
            raise CallEndedError(
                f"{name}: rank {by} has ended the call", bytes.fromhex(verdict["error"])
            )
        if verdict["refused"]:
            raise RanksLostError(f"{name}: rank {by} refused: {verdict['refused']}", [by])

    def _verdict(
        self,
        task: Task,
        record: bytes,
        before_go: Callable[[], None] | None,
        in_verdict: bytes,
    ) -> dict[str, Any]:
        arrivals = self._count()
        self._arrive(arrivals, record)
        decided = [self._verdict_key()]
        store = self._shared.store

        all_here = False

        def done() -> bool:
            nonlocal all_here
            if self._shared.ending is not None:
                return True
            all_here = self._rank == 0 and store.check(arrivals)
            return all_here or bool(store.check(decided))

        # While this rank waits, deleting takes no time from anyone.
        if not done() or len(self._shared.unused_keys) > _UNUSED_KEYS:
            self._delete_unused_keys()
        missing: list[int] = []
        if not poll(done, self.longest_pause(), task):
            missing = self._who_is_missing(arrivals)
            all_here = not missing
        # A rank that has not arrived has no record, and one that has ended the operation has an
        # empty one. In both cases there is a verdict.
        if all_here and before_go is not None and not store.check(decided):
            before_go()
        return self._decide(self.own_verdict(missing, record=in_verdict))

    def _arrive(self, arrivals: Sequence[str], record: bytes = b"") -> None:
        self._shared.store.set(arrivals[self._rank], record or "here")

    def own_verdict(
        self, missing: list[int], refused: str = "", record: bytes = b""
    ) -> dict[str, Any]:
        return {
            "by": self._rank,
            "missing": missing,
            "refused": refused,
            "error": self._shared.ending or "",
            "record": record.hex(),
            "last": self._shared.last,
        }

    def longest_pause(self) -> float:
        return min(_LONGEST_POLL, max(_QUICK_POLL, self._size * _PAUSE_OF_RANK))

    def _verdict_key(self) -> str:
        return f"{self._shared.operation}/verdict"

    def _count(self) -> list[str]:
        """Counts the operation; returns the keys under which the ranks record their arrival."""
        self._shared.operation += 1
        return [f"{self._shared.operation}/{rank}" for rank in range(self._size)]

    def end_operation(self, verdict: dict[str, Any]) -> None:
        """Takes part in an operation only to propose a verdict that is not "go".

        The proposal comes before this rank's arrival, because rank 0 proposes "go" once all ranks
        have arrived.
        """
        arrivals = self._count()
        self._decide(verdict)
        self._arrive(arrivals)

    def _decide(self, proposal: dict[str, Any]) -> dict[str, Any]:
        """Returns the verdict: this proposal, or an earlier one."""
        key = self._verdict_key()
        shared = self._shared
        kept = shared.store.compare_set(key, "", json.dumps(proposal))
        verdict: dict[str, Any] = json.loads(kept)
        if verdict["error"]:
            shared.ending = None
            if shared.call != 0:  # all ranks know, and make no more operations of the call
                shared.ended = verdict["error"]
        if not any(verdict[why] for why in ("missing", "refused", "error")):
            # All ranks are past the earlier operations.
            shared.unused_keys += shared.old_keys
            shared.old_keys.clear()
        shared.old_keys.append(f"{shared.operation}/{self._rank}")
        if self._rank == 0:
            shared.old_keys.append(key)
        return verdict

    def _delete_unused_keys(self) -> None:
        while self._shared.unused_keys:
            self._shared.store.delete_key(self._shared.unused_keys.pop())

    def _who_is_missing(self, arrivals: Sequence[str]) -> list[int]:
        missing = self._missing_in(arrivals, 0)
        if missing or self._rank == 0:
            return missing
        return [0]  # all have arrived, but it has not decided

    def _missing_in(self, arrivals: Sequence[str], first: int) -> list[int]:
        """The ranks without an entry among some adjacent ones. Usually few ranks are missing."""
        if not arrivals or self._shared.store.check(list(arrivals)):
            return []
        if len(arrivals) == 1:
            return [first]
        half = len(arrivals) // 2
        found = self._missing_in(arrivals[:half], first)
        return found + self._missing_in(arrivals[half:], first + half)
