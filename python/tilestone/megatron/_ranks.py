"""Ranks of torch.distributed; without torch.distributed the program is one rank.

A group of None means the ranks of the call that is under way (see `call_of`), otherwise torch's
default group.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# (process group or None, its Deadline or None) of the save or load under way in this thread.
_under_way: contextvars.ContextVar[tuple[Any, Any]] = contextvars.ContextVar(
    "call", default=(None, None)
)


@contextlib.contextmanager
def call_of(group: dist.ProcessGroup | None, deadline: Any = None) -> Iterator[None]:
    """Makes these ranks and this Deadline those of all calls inside that are given none.

    Megatron-Core's interface of a strategy has no parameter for them, so that strategies of the
    user, and what these call in turn, could not learn of them otherwise.

    Args:
        group, deadline: None: those of the enclosing call, if there is one.
    """
    outer_group, outer_deadline = _under_way.get()
    made = (outer_group if group is None else group, deadline or outer_deadline)
    token = _under_way.set(made)
    try:
        yield
    finally:
        _under_way.reset(token)


def group_of_call() -> dist.ProcessGroup | None:
    """The ranks of the call that is under way; None: torch's default group."""
    return _under_way.get()[0]  # type: ignore[no-any-return]


def deadline_of_call() -> Any:
    """The Deadline of the call that is under way, or None."""
    return _under_way.get()[1]


def rank(group: Any = None) -> int:
    """This process's rank in a group; 0 without torch.distributed."""
    return dist.get_rank(default_group(group)) if dist.is_initialized() else 0


def size(group: Any = None) -> int:
    """The number of ranks of a group; 1 without torch.distributed."""
    return dist.get_world_size(default_group(group)) if dist.is_initialized() else 1


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, or what None means; None without torch.distributed."""
    if group is not None or not dist.is_initialized():
        return group
    found = group_of_call()
    return dist.group.WORLD if found is None else found


def barrier() -> None:
    """Waits for all ranks; does nothing without torch.distributed."""
    if dist.is_initialized():
        dist.barrier(default_group(None))
