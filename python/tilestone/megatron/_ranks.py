"""Ranks of torch.distributed, and steps that they take together, so that each learns of a failure.

Without torch.distributed the program is one rank. A group of None means the ranks of the call that
is under way (see `call_of`), otherwise torch's default group.
"""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import InvalidArgumentError, RankFailedError, TimeoutError
from tilestone._options import valid
from tilestone._torch.comm import TorchCommunicator

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


Result = TypeVar("Result")
Group = dist.ProcessGroup

_LEAST = 0.001  # seconds for a step whose time is over, so that it ends with its own error


class Deadline:
    """The end of a call that takes several steps with other ranks, which share its time.

    Args:
        timeout: seconds from now; None: no limit. An invalid timeout counts as the default, because
            the first step of the call refuses it on all ranks.
    """

    def __init__(self, timeout: Any = _core.DEFAULT_TIMEOUT) -> None:
        self._given = timeout
        self._end = time.monotonic() + valid.limit_of(timeout)

    def check(self) -> None:
        """
        Raises:
            InvalidArgumentError: the timeout is invalid.
        """
        valid.time_limit(self._given)

    def seconds(self) -> float:
        """The remaining time in seconds: more than 0; infinite without a limit."""
        return max(_LEAST, self._end - time.monotonic())

    def timeout(self) -> float | None:
        """The remaining time, for a `timeout=` of a call; an invalid timeout is passed on."""
        try:
            self.check()
        except InvalidArgumentError:
            return self._given  # type: ignore[no-any-return]
        return None if self._given is None else self.seconds()


def within_call(timeout: Any = _core.DEFAULT_TIMEOUT) -> Any:
    """A `timeout=` for a call that may be part of a save or load that is under way.

    Returns:
        The time that the save or load has left, or `timeout` if that is less and not the default.
    """
    deadline = deadline_of_call()
    left = None if deadline is None else deadline.timeout()
    if deadline is None or (timeout is not None and not isinstance(timeout, (int, float))):
        return timeout  # an invalid one is refused by the call
    if left is None:
        return None if timeout == _core.DEFAULT_TIMEOUT else timeout
    return left if timeout is None else min(timeout, left)


def deadline_or_default(given: Deadline | None) -> Deadline:
    """A deadline that was given, or that of the save or load under way, or the default one."""
    return given or deadline_of_call() or Deadline()


def together(
    work: str,
    group: Group | None,
    step: Callable[[], Result],
    deadline: Deadline | None = None,
) -> Result:
    """Calls step() on every rank of a group. If it raises on one rank, all ranks raise."""
    return agreed(work, group, step, _nothing, _nothing, deadline)[0]


def on_one(
    work: str, group: Group | None, step: Callable[[], Result], deadline: Deadline | None = None
) -> Result:
    """Calls step() on rank 0 of a group; returns its result on all ranks, or raises on all."""
    answer: Result
    _, answer = agreed(work, group, lambda: None, _nothing, lambda said: step(), deadline)
    return answer


def _nothing(_: object) -> None:
    """What is said by a rank that has nothing to say."""


def agreed(
    work: str,
    group: Group | None,
    step: Callable[[], Result],
    words: Callable[[Result], Any],
    decide: Callable[[list[Any]], Any],
    deadline: Deadline | None = None,
) -> tuple[Result, Any]:
    """Calls step() on every rank of a group; then one rank decides for all.

    Args:
        work: name of the work, for error messages.
        group: the ranks; None: this rank alone.
        step: if it raises on one rank, all ranks raise.
        words: makes a rank's message from its result: a value that can be pickled.
        decide: makes the answer, which every rank gets, from the messages of all ranks. Runs on
            rank 0 of the group, after all ranks have done the step.
        deadline: of the call that the step is part of; None: see deadline_or_default. The step
            itself is not interrupted.

    Raises:
        TimeoutError: the deadline passed; `work` and the missing ranks are named.
    """
    if group is None or size(group) <= 1:
        alone = step()
        return alone, decide([words(alone)])
    result: list[Result] = []
    failure: list[BaseException] = []
    try:
        result.append(step())
    except BaseException as error:  # sent to the other ranks, and raised by the call below
        failure.append(error)

    def say(round: int, answer: bytes) -> bytes:
        if failure:
            raise failure[0]
        return pickle.dumps(words(result[0]))

    def answer_to(round: int, said: list[bytes]) -> tuple[bytes, bool]:
        return pickle.dumps(decide(list(map(pickle.loads, said)))), True

    comm = TorchCommunicator(group)
    seconds = deadline_or_default(deadline).seconds()
    try:
        answer = _core.agree(work, comm, say, answer_to, seconds)
    except (TimeoutError, RankFailedError) as error:
        if failure and error is not failure[0]:
            raise failure[0] from error  # this rank's failure explains the timeout
        raise
    return result[0], pickle.loads(answer)
