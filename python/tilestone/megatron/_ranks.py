"""Ranks of torch.distributed; without torch.distributed the program is one rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def rank(group: Any = None) -> int:
    """This process's rank in a group (None: the default one); 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size(group: Any = None) -> int:
    """The number of ranks of a group (None: the default one); 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, or the default one; None without torch.distributed."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def barrier() -> None:
    """Waits for all ranks of the default group; does nothing without torch.distributed."""
    if dist.is_initialized():
        dist.barrier()


def from_first(value: Any) -> Any:
    """Returns rank 0's value on every rank of the default group, each of which calls."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]
