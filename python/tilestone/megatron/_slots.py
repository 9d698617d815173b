"""Sessions for saves that are written in the background.

Such a save uses its group when it is planned and when it is finalized. In between, other saves and
loads use the group, so each save in flight has a channel of its own, with a session. A session that
is free serves the next save, which then has its staging memory and its plan already.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import torch.distributed as dist

from tilestone import _core, _forked
from tilestone._calls.session import Session
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron._together import Deadline, agreed

_MOST_FREE = 1  # free sessions that a group keeps, because each one has memory for a whole save


class Slot:
    """A session, while a save uses it.

    Args:
        name: of its channel.
        session: makes the save.
        free: the group's free slots.
    """

    def __init__(self, name: str, session: Session, free: dict[str, Slot]) -> None:
        self._name = name
        self.session = session
        self._free = free

    def release(self) -> None:
        """After a save that has succeeded: the slot may serve the next one."""
        with _lock:
            if len(self._free) < _MOST_FREE:
                self._free[self._name] = self
            else:
                self.session.close()

    def close(self) -> None:
        """After a failure: the slot is not used again."""
        self.session.close()


_lock = _forked.Lock()
_of_groups: dict[Any, dict[str, Slot]] = {}  # by name; the group None: this process alone


def reserve(group: Any, deadline: Deadline) -> Slot:
    """Takes a free slot of a group, or makes one. Every rank calls, and gets the same slot.

    Args:
        group: the process group; None: this process alone.
        deadline: of the save.

    Raises:
        TimeoutError, RankFailedError: on every rank.
    """
    with _lock:
        for other in [each for each in _of_groups if _is_destroyed(each)]:
            del _of_groups[other]
        free = _of_groups.setdefault(group, {})

    def decide(said: list[bytes]) -> bytes:
        kept = set.intersection(*(set(json.loads(names)) for names in said))
        chosen = min(kept) if kept else secrets.token_hex(8)
        return json.dumps([chosen, sorted(kept)]).encode()

    _, answer = agreed(
        "beginning of a save in the background", group, lambda: None,
        lambda _: json.dumps(sorted(free)).encode(), decide, deadline,
    )  # fmt: skip
    chosen, kept = json.loads(answer)
    with _lock:
        for name in set(free) - set(kept):  # other ranks have dropped it
            free.pop(name).close()
        found = free.pop(chosen, None)
    if found is not None:
        return found
    comm: Any = _core.solo() if group is None else TorchCommunicator(group, channel=chosen)
    return Slot(chosen, Session(comm, timeout=deadline.timeout()), free)


def _is_destroyed(group: Any) -> bool:
    """Whether torch no longer knows this process group."""
    return group is not None and group not in dist.distributed_c10d._world.pg_map
