"""Steps of which every rank of a group learns how they went on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._torch_comm import TorchCommunicator

Result = TypeVar("Result")
Group = dist.ProcessGroup


def default_group(group: Group | None) -> Group | None:
    """The group itself, else the default one, else (torch.distributed is not in use) None."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def size_of(group: Group | None) -> int:
    """How many ranks it has; 1 without torch.distributed."""
    return 1 if group is None else dist.get_world_size(group)


def together(work: str, group: Group | None, step: Callable[[], Result]) -> Result:
    """step() on every rank of a group; what it raises on one, all raise."""
    return agreed(work, group, step, lambda result: b"", lambda said: b"")[0]


def agreed(
    work: str,
    group: Group | None,
    step: Callable[[], Result],
    words: Callable[[Result], bytes],
    decide: Callable[[list[bytes]], bytes],
) -> tuple[Result, bytes]:
    """step() on every rank of a group, and what one rank decides of the words of all.

    Args:
        work: what it is, for errors.
        group: None: this rank alone.
        step: what it raises on one rank, all raise.
        words: what a rank says of its result.
        decide: makes the answer, which every rank gets, of what the ranks have said.
    """
    if group is None or size_of(group) <= 1:
        alone = step()
        return alone, decide([words(alone)])
    result: list[Result] = []
    failure: list[BaseException] = []
    try:
        result.append(step())
    except BaseException as error:  # it goes to the other ranks, and out of the call below
        failure.append(error)

    def say(round: int, answer: bytes) -> bytes:
        if failure:
            raise failure[0]
        return words(result[0])

    comm = TorchCommunicator(group)
    answer = _core.agree(
        work, comm, say, lambda round, said: (decide(said), True), _core.DEFAULT_TIMEOUT
    )
    return result[0], answer
