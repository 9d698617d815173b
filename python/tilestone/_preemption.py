"""SIGTERM, with which a scheduler announces that it will end the job."""

from __future__ import annotations

import logging
import signal
import struct
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._protocols import CommunicatorLike

logger = logging.getLogger("tilestone")

#: What the ranks do together, as errors call it.
WORK = "agreement on SIGTERM"

_PERIOD = 5.0  # seconds between two agreements of the ranks
_MOST_STEPS = 1000


class Preemption:
    """Whether any rank has received SIGTERM. One rank's part; used by one thread.

    The ranks agree now and then: at steps that they all know, about every five seconds, so that an
    agreement costs nothing that can be measured. Rank 0 chooses the step of the next agreement by
    the time that the steps since the last one have taken.

    Args:
        comm: the ranks.
        clock: the time in seconds; for tests.
    """

    def __init__(
        self, comm: CommunicatorLike, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._comm = comm
        self._clock = clock
        self._received = False
        self._agreed = False
        self._installed = False
        self._before: Any = None
        self._next: int | None = None  # the first step at which the ranks agree again
        self._last: tuple[int, float] | None = None  # step and time of the last agreement

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks know that one has received SIGTERM."""
        return self._agreed

    def install(self) -> None:
        """Begins to listen for SIGTERM.

        Raises:
            InvalidArgumentError: this is not the main thread.
        """
        if self._installed:
            return
        try:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        except ValueError as error:
            raise InvalidArgumentError(
                f"only the main thread can listen for SIGTERM: {error}",
                hint="call preempted() for the first time in the main thread",
            ) from None
        if self._before is None:
            logger.warning(
                "The handler of SIGTERM that was not installed from Python is not called any more"
            )
        self._installed = True

    def remove(self) -> None:
        """Puts the handler that was there before back, unless another one was installed since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(
                signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before
            )
        self._installed = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._before):
            self._before(number, frame)

    def agreed(self, step: int, seconds: float) -> bool:
        """Whether any rank has received SIGTERM, as all ranks have agreed. Every rank calls.

        Args:
            step: the step that was done; the same on every rank.
            seconds: time limit of an agreement.

        Raises:
            TimeoutError, RankFailedError: a rank did not call.
        """
        if self._agreed or (self._next is not None and step < self._next):
            return self._agreed
        if self._comm.size == 1:
            self._agreed = self._received
            return self._agreed
        now = self._clock()
        answer = _core.agree(
            WORK, self._comm,
            lambda _, __: bytes([self._received]),
            lambda _, said: (self._answer(step, now, said), True),
            seconds,
        )  # fmt: skip
        self._agreed, self._next = struct.unpack("<?q", answer)
        self._last = (step, now)
        return self._agreed

    def _answer(self, step: int, now: float, said: list[bytes]) -> bytes:
        steps = 1
        if self._last is not None and step > self._last[0]:
            each = (now - self._last[1]) / (step - self._last[0])
            steps = int(min(_MOST_STEPS, max(1, _PERIOD / max(each, 1e-6))))
        return struct.pack("<?q", any(one != b"\0" for one in said), step + steps)
