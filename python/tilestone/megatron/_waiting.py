"""How another process waits until a thread of the trainer has written a save.

Megatron-Core's queues run a request's function in another process: in a fork of the trainer, or in a
worker that was started earlier. Here that process writes nothing. It connects to a socket of the
trainer, waits for one byte, and answers it. If its connection ends without the answer, it has died,
and the save is abandoned.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import struct
from typing import Any

from tilestone._errors import InterruptedError, InvalidArgumentError

_WRITTEN, _HEARD = b"w", b"h"
_LOOK_EVERY = 5.0  # seconds between looks whether the trainer still exists
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer


@dataclasses.dataclass
class Wait:
    """The function of a request: returns when the thread has written. Can be pickled.

    Args:
        address: of the trainer's socket.
        process: the trainer's process.
        line: the trainer's end; not pickled. A fork inherits it, and closes its copy.
    """

    address: str
    process: int
    line: Line | None = None

    def __reduce__(self) -> Any:
        return Wait, (self.address, self.process)

    def __call__(self) -> None:
        """Waits.

        Raises:
            InterruptedError: the save was abandoned, or the trainer has ended.
            InvalidArgumentError: it has been called before, and had been told.
        """
        if self.line is not None and os.getpid() != self.process:
            self.line.socket.close()
        with socket.socket(socket.AF_UNIX) as mine:
            try:
                mine.connect(self.address)
                if self._received(mine) == _WRITTEN:
                    mine.sendall(_HEARD)
                    return
            except (ConnectionError, ProcessLookupError):
                pass
        if self.line is not None and self.line.heard:
            raise InvalidArgumentError(
                "the request of an asynchronous save was executed twice",
                hint="either schedule a request in a queue or call its execute_sync, once",
            )
        raise InterruptedError(
            "the save was abandoned by the process that saves, or this process has ended",
            hint="nothing was published: save again",
        )

    def _received(self, mine: socket.socket) -> bytes:
        mine.settimeout(_LOOK_EVERY)
        while True:
            try:
                return mine.recv(1)
            except TimeoutError:
                os.kill(self.process, 0)  # raises ProcessLookupError


class Line:
    """The trainer's end, used by the thread that writes.

    Attributes:
        heard: whether a process has heard that all is written.
    """

    def __init__(self) -> None:
        self.heard = False
        self._address = f"\0tilestone-{secrets.token_hex(16)}"  # in no folder, so nothing remains
        self._process = os.getpid()
        self._talk: socket.socket | None = None
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self._address)
        self.socket.listen()

    def wait(self) -> Wait:
        """The function that waits at the other end."""
        return Wait(self._address, self._process, self)

    def tell(self) -> bool:
        """Says that all is written. Returns when a process has heard it, or after close().

        Returns:
            False if none has heard it: the process has died, or there was none before close().
        """
        while True:
            try:
                talk, _ = self.socket.accept()
            except OSError:  # closed
                return False
            with talk:
                if not _is_of_this_user(talk):
                    continue
                self._talk = talk
                try:
                    talk.sendall(_WRITTEN)
                    self.heard = talk.recv(1) == _HEARD
                    return self.heard
                except OSError:
                    return False

    def close(self, now: bool = False) -> None:
        """Ends tell(). Processes that have already connected are still told, unless `now`."""
        for end in (self.socket, self._talk if now else None):
            try:
                if end is not None and os.getpid() == self._process:
                    end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is closed


def _is_of_this_user(talk: socket.socket) -> bool:
    given = talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(given)[1] == os.getuid())
