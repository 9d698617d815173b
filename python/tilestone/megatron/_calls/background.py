"""Saves of which only the writing is in the background.

The call plans the save, by rounds of all ranks, and copies what this rank writes. A thread of this
process then writes. What Megatron-Core's queue starts in another process only waits for that thread
(`Wait`); nothing depends on that process. When the queue finalizes the request, all ranks report what they have written, and
the save is published. What was not finalized is never published.

Such a save uses its group when it is planned and when it is finalized. In between, other saves and
loads use the group, so each save in flight has a channel of its own, with a session (`Slot`). A
session that is free serves the next save, which then has its staging memory and its plan already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from tilestone import _core, _forked
from tilestone._calls.collective import Prepared, is_destroyed
from tilestone._calls.session import Session
from tilestone._calls.steps import BegunSave, begin_save
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._calls import engine_calls
from tilestone.megatron._calls.async_requests import AsyncRequest
from tilestone.megatron._ranks import Deadline, agreed, together
from tilestone.megatron.core import raises_stocks_errors
from tilestone.megatron._stored import literal

_LOOK_EVERY = 5.0  # seconds between looks whether the trainer still exists


@dataclasses.dataclass
class Wait:
    """The function of a request: returns when the thread has ended, or the trainer. Can be pickled.

    Args:
        address: of the trainer's socket, which ends all connections when the thread has written,
            and refuses new ones from then on.
        process: the trainer's process.
    """

    address: str
    process: int

    def __call__(self) -> None:
        """Waits."""
        with socket.socket(socket.AF_UNIX) as mine:
            with contextlib.suppress(ConnectionError, ProcessLookupError):
                mine.settimeout(_LOOK_EVERY)
                mine.connect(self.address)
                while True:
                    try:
                        mine.recv(1)
                        return
                    except TimeoutError:
                        os.kill(self.process, 0)  # raises ProcessLookupError


def _end_connections(line: socket.socket) -> None:
    line.shutdown(socket.SHUT_RDWR)  # in all processes that have inherited it
    with contextlib.suppress(OSError):  # once none waits to be accepted
        while True:
            line.accept()[0].close()


_MOST_FREE = 1  # free sessions that a group keeps, because each one has memory for a whole save


@dataclasses.dataclass(eq=False)
class Slot:
    """A session, while a save uses it.

    Attributes:
        name: of its channel.
        session: makes the save.
        free: the group's free slots.
    """

    name: str
    session: Session
    free: dict[str, Slot]

    def release(self) -> None:
        """After a save that has succeeded: the slot may serve the next one."""
        with _lock:
            if len(self.free) < _MOST_FREE:
                self.free[self.name] = self


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
        for other in [each for each in _of_groups if is_destroyed(each)]:
            del _of_groups[other]
        free = _of_groups.setdefault(group, {})

    def decide(said: list[set[str]]) -> tuple[str, set[str]]:
        kept = set.intersection(*said)
        return (min(kept) if kept else secrets.token_hex(8)), kept

    _, (chosen, kept) = agreed(
        "beginning of a save in the background", group, lambda: None, lambda _: set(free), decide,
        deadline,
    )  # fmt: skip
    with _lock:
        for name in set(free) - kept:  # other ranks have dropped it
            del free[name]
        found = free.pop(chosen, None)
    if found is not None:
        return found
    comm: Any = _core.solo() if group is None else TorchCommunicator(group, channel=chosen)
    return Slot(chosen, Session(comm, timeout=deadline.timeout()), free)


class Writing:
    """A save whose data files a thread writes. Called, it finalizes the save, on every rank.

    If it is dropped, the save is abandoned.

    Args:
        begun: the save, whose tensors are staged.
        slot: the slot of its session, or None.
        after: called with the result once the save is published.
        then: called in the thread once the data files are written.
    """

    def __init__(
        self,
        begun: BegunSave,
        slot: Slot | None,
        after: Callable[[_core.SaveResult], None],
        then: Callable[[BegunSave], None],
    ) -> None:
        self._begun = begun
        self._slot = slot
        self._after = after
        line = socket.socket(socket.AF_UNIX)
        self._address = f"\0tilestone-{secrets.token_hex(16)}"  # in no folder, so nothing remains
        line.bind(self._address)
        line.listen()
        self._thread = threading.Thread(
            target=_write, args=(begun, then, line), name="tilestone-save", daemon=True
        )
        self._thread.start()

    def request(self) -> AsyncRequest:
        """What a queue schedules."""
        return AsyncRequest(Wait(self._address, os.getpid()), (), [self])

    @raises_stocks_errors
    def __call__(self) -> None:
        """Tells the other ranks what was written, and publishes the checkpoint.

        Raises:
            InvalidArgumentError: it was called before.
            Also everything that `tilestone.save` raises, on every rank.
        """
        self._thread.join()
        try:
            self._begun.report()
            result = self._begun.publish()
        except BaseException:
            self.abandon()
            raise
        if self._slot is not None:
            self._slot.release()
        self._after(result)

    def abandon(self) -> None:
        """Gives the save up: nothing is published, and the other ranks fail if they finalize it.

        Waits until the thread has ended, so that the next save to the location can begin.
        """
        self._thread.join()
        self._begun.give_up()


def _write(begun: BegunSave, then: Callable[[BegunSave], None], line: socket.socket) -> None:
    """Runs in the thread. It must not refer to the Writing, which then could not be dropped."""
    with line:
        try:
            with contextlib.suppress(Exception):  # report() raises what write() met
                begun.write()
                then(begun)
        finally:
            _end_connections(line)


def save_in_background(
    state: Prepared,
    path: Any,
    *,
    group: Any = None,
    by_files: Any = None,
    after: Callable[[_core.SaveResult], None] = lambda result: None,
    then: Callable[[BegunSave], None] = lambda begun: None,
    timeout: Any = _core.DEFAULT_TIMEOUT,
    **options: Any,
) -> AsyncRequest:
    """Begins a save. Every rank calls. When it returns, the state may change.

    Args:
        state, path, by_files, options: as for `tilestone.save`.
        group: the process group; None: torch's default group.
        after: called on every rank when the save is published.
        then: called in the thread once this rank's data files are written.
        timeout: seconds from now until the save is published.

    Returns:
        The request, to be scheduled and finalized on every rank.

    Raises:
        As `tilestone.save`, on every rank.
    """
    deadline = Deadline(timeout)
    if by_files is not None:
        begun = begin_save(state, path, by_files=by_files, timeout=timeout, **options)
        begun.stage()
        return Writing(begun, None, after, then).request()
    group = _ranks.default_group(group)
    slot = reserve(group, deadline)
    begun = begin_save(state, path, session=slot.session, timeout=deadline.timeout(), **options)
    try:
        together("staging of a save", group, begun.stage, deadline)
    except BaseException:
        begun.give_up()
        raise
    return Writing(begun, slot, after, then).request()


def save_whole(
    given: engine_calls.Given,
    checkpoint_dir: Any,
    *,
    hashes: _integrity.Hashes | None = None,
    **options: Any,
) -> AsyncRequest:
    """As `engine_calls.engine_save`, in the background."""
    given.take_options(options, hashes)

    def hash_files(begun: BegunSave) -> None:
        if hashes is not None:
            hashes.save_id = begun.save_id
            hashes.hash_files()

    request = save_in_background(
        given, literal(checkpoint_dir), dialect="megatron", after=given.end, then=hash_files,
        **{"overwrite": True, **options},
    )  # fmt: skip
    given.forget()
    if hashes is not None:
        request.finalize_fns.append(hashes.write)
    return request
