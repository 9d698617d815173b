"""Steps of which every rank of a group learns how they went on the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tilestone import _core, _options
from tilestone._errors import InvalidArgumentError, RankFailedError, TimeoutError
from tilestone._torch_comm import TorchCommunicator

Result = TypeVar("Result")
Group = dist.ProcessGroup

_LEAST = 0.001  # seconds: what a step gets whose time is over, to end with the step's own error


class Deadline:
    """When a call ends that takes several steps with other ranks, which share its time.

    Args:
        timeout: seconds from now on; None: no limit. What is no timeout counts as the default: the
            call's first step refuses it on all ranks.
    """

    def __init__(self, timeout: Any = _core.DEFAULT_TIMEOUT) -> None:
        self._given = timeout
        self._end = time.monotonic() + _options.limit_of(timeout)

    def check(self) -> None:
        """
        Raises:
            InvalidArgumentError: the timeout is none.
        """
        if not _options.seconds("timeout", self._given) > 0:
            raise InvalidArgumentError(f"timeout is {self._given}; expected seconds, more than 0")

    def seconds(self) -> float:
        """What is left, for an agreement: more than 0, infinite without a limit."""
        return max(_LEAST, self._end - time.monotonic())

    def timeout(self) -> float | None:
        """What is left, as a `timeout=` of a call, which refuses what is no timeout."""
        try:
            self.check()
        except InvalidArgumentError:
            return self._given  # type: ignore[no-any-return]
        return None if self._given is None else self.seconds()


def default_group(group: Group | None) -> Group | None:
    """The group itself, else the default one, else (torch.distributed is not in use) None."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def size_of(group: Group | None) -> int:
    """How many ranks it has; 1 without torch.distributed."""
    return 1 if group is None else dist.get_world_size(group)


def together(
    work: str,
    group: Group | None,
    step: Callable[[], Result],
    deadline: Deadline | None = None,
) -> Result:
    """step() on every rank of a group; what it raises on one, all raise."""
    return agreed(work, group, step, lambda result: b"", lambda said: b"", deadline)[0]


def agreed(
    work: str,
    group: Group | None,
    step: Callable[[], Result],
    words: Callable[[Result], bytes],
    decide: Callable[[list[bytes]], bytes],
    deadline: Deadline | None = None,
) -> tuple[Result, bytes]:
    """step() on every rank of a group, and what one rank decides of the words of all.

    Args:
        work: what it is, for errors.
        group: None: this rank alone.
        step: what it raises on one rank, all raise.
        words: what a rank says of its result.
        decide: makes the answer, which every rank gets, of what the ranks have said. Runs on rank 0
            of the group, once all ranks have done the step.
        deadline: of the call that the step is part of; None: a time of its own. The step itself is
            not stopped.

    Raises:
        TimeoutError: the deadline passed; `work` and the missing ranks are named.
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
    seconds = (deadline or Deadline()).seconds()
    try:
        answer = _core.agree(work, comm, say, lambda round, said: (decide(said), True), seconds)
    except (TimeoutError, RankFailedError) as error:
        if failure and error is not failure[0]:
            raise failure[0] from error  # why this rank came late, or the others did not come
        raise
    return result[0], answer
