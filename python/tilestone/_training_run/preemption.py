"""SIGTERM, with which a scheduler announces that it will end the job."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import struct
import time
import weakref
from types import FrameType
from typing import Any

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._protocols import CommunicatorLike

logger = logging.getLogger("tilestone")

#: What the ranks do together, as errors call it.
WORK = "agreement on SIGTERM"

_SHARE = 0.01  # of the time, that agreements may take while steps are short
# How many steps may pass without one. It is small because the next step may take long.
_MOST_STEPS = 5
_PERIOD = 5.0  # seconds in which the ranks agree at least once, if a step takes less


class _Listener:
    """The process's handler of SIGTERM while any manager listens."""

    def __init__(self) -> None:
        self._listening: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self._before: Any = signal.SIG_DFL  # what is called too, and is put back
        self._is_called = False
        self._has_warned = False

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._receive

    def add(self, listening: Preemption) -> None:
        """Begins to listen, or does so again if the program has installed another handler.

        Raises:
            InvalidArgumentError: this is not the main thread, and nobody was listening.
        """
        if self._is_installed():
            self._listening.add(listening)
            return
        is_again = bool(self._listening)
        try:
            before = signal.signal(signal.SIGTERM, self._receive)
        except ValueError as error:
            if is_again:
                self._listening.add(listening)
                self._warn_of_other("Outside the main thread preempted() can't listen again")
                return
            raise InvalidArgumentError(
                f"only the main thread can listen for SIGTERM: {error}",
                hint="call preempted() for the first time in the main thread",
            ) from None
        self._listening.add(listening)
        if before is None:
            logger.warning(
                "The handler of SIGTERM that was not installed from Python is not called any more"
            )
        if is_again:
            self._warn_of_other(
                "preempted() listens again and calls that handler too; a SIGTERM in between was not "
                "noticed"
            )
        self._before = signal.SIG_DFL if before is None else before

    def _warn_of_other(self, outcome: str) -> None:
        if not self._has_warned:
            logger.warning(
                "Another handler of SIGTERM was installed after the first call of preempted(). %s. "
                "Install handlers before the training loop.",
                outcome,
            )
        self._has_warned = True

    def remove(self, listening: Preemption) -> None:
        """Ends to listen. The last one puts the handler back, unless the program has changed it."""
        self._listening.discard(listening)
        if not self._listening and self._is_installed():
            with contextlib.suppress(ValueError):  # not in the main thread: the next signal does it
                signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_called:  # by a handler that calls the one before it, which is this one
            return
        self._is_called = True
        try:
            for listening in list(self._listening):
                listening.received = True
            if callable(self._before):
                self._before(number, frame)
            elif not self._listening:  # the managers are gone, unclosed
                signal.signal(signal.SIGTERM, self._before)
                os.kill(os.getpid(), number)
        finally:
            self._is_called = False


_listener = _Listener()


class Preemption:
    """Whether any rank has received SIGTERM. One rank's part; used by one thread.

    The ranks agree after each step, or, while steps are so short that this would take more than a
    hundredth of the time, after every few. Rank 0 says how many.

    Args:
        comm: the ranks.

    Attributes:
        received: whether this process has received SIGTERM.
    """

    def __init__(self, comm: CommunicatorLike) -> None:
        self._comm = comm
        self.received = False
        self._agreed = False
        self._next = 1  # calls until the ranks agree again
        self._cost = math.inf  # seconds that the fastest agreement has taken here
        self._last: tuple[int, float] | None = None  # calls and time between the last two

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks know that one has received SIGTERM."""
        return self._agreed

    def install(self) -> None:
        """Begins to listen for SIGTERM.

        Raises:
            InvalidArgumentError: this is not the main thread.
        """
        _listener.add(self)

    def remove(self) -> None:
        """Ends to listen for SIGTERM."""
        _listener.remove(self)

    def agreed(self, seconds: float) -> bool:
        """Whether any rank has received SIGTERM, as all ranks have agreed. Every rank calls.

        Args:
            seconds: time limit of an agreement.

        Raises:
            TimeoutError, RankFailedError: a rank did not call.
        """
        if self._agreed:
            return True
        if self._comm.size == 1:
            self._agreed = self.received
            return self._agreed
        self._next -= 1
        if self._next > 0:
            return False
        began = time.monotonic()
        answer = _core.agree(
            WORK, self._comm,
            lambda _, __: bytes([self.received]),
            lambda _, said: (self._answer(began, said), True),
            seconds,
        )  # fmt: skip
        now = time.monotonic()
        self._cost = min(self._cost, now - began)
        self._agreed, self._next = struct.unpack("<?q", answer)
        self._last = (self._next, now)
        return self._agreed

    def _answer(self, now: float, said: list[bytes]) -> bytes:
        each = math.inf
        if self._last is not None:
            calls, ended = self._last
            each = max(now - ended, 1e-6) / calls
        return struct.pack("<?q", any(one != b"\0" for one in said), _steps(each, self._cost))


def _steps(each: float, cost: float) -> int:
    """After how many steps of `each` seconds the ranks agree again, which takes `cost` seconds."""
    if math.isinf(each):
        return 1
    most = min(_MOST_STEPS, _PERIOD / each)
    return max(1, int(min(most, math.ceil(min(most, cost / (_SHARE * each))))))
