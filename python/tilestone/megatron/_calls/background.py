"""Saves of which only the writing is in the background.

Such a save is one of `tilestone.async_save`, which is held back between writing and publishing. What
Megatron-Core's queue starts in another process only waits until this rank has written (`Wait`);
nothing depends on that process. When the queue finalizes the request, the ranks meet, so that each
learns who has failed or is gone; then the save goes on, and is published. What was not finalized is
never published.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tilestone import _core
from tilestone._calls.async_save import AsyncSave, start
from tilestone._errors import InvalidArgumentError, MismatchError, UnsupportedError
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._calls import engine_calls
from tilestone.megatron._calls.async_requests import AsyncRequest
from tilestone.megatron._ranks import Deadline, agreed
from tilestone.megatron._stored import literal
from tilestone.megatron.core import raises_stocks_errors

_LOOK_EVERY = 5.0  # seconds between looks whether the trainer still exists


@dataclasses.dataclass
class Wait:
    """The function of a request: returns when this rank has written, or the trainer has ended. Can be
    pickled.

    Args:
        address: of the trainer's socket, which ends all connections when this rank has written,
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
    with line, contextlib.suppress(OSError):  # it may have been called before
        line.shutdown(socket.SHUT_RDWR)  # in all processes that have inherited it
        while True:  # until none waits to be accepted
            line.accept()[0].close()


def _end(line: socket.socket, ended: threading.Event) -> None:
    ended.set()
    _end_connections(line)


def _give_up(saving: AsyncSave, process: int) -> None:
    if os.getpid() != process:
        return
    saving.abandon()
    with contextlib.suppress(Exception):  # then the next save to the location can begin
        saving.durable.exception()


def _expect_one(save_ids: list[str]) -> None:
    if len(set(save_ids)) > 1:
        raise MismatchError(
            "the ranks finalize different saves", hint="finalize in the same order on every rank"
        )


class Writing:
    """A save that is held back. Called, it finalizes the save, on every rank.

    If it is dropped, the save is abandoned.

    Args:
        saving, hold: the save, and what holds it.
        group, deadline: of the save; by files the group is None.
        after: called with the result once the save is published.
        then: called with the save's id once this rank's data files are written, on the save's thread.
    """

    def __init__(
        self,
        saving: AsyncSave,
        hold: _core.Hold,
        group: Any,
        deadline: Deadline,
        after: Callable[[_core.SaveResult], None],
        then: Callable[[str], None],
    ) -> None:
        self._saving = saving
        self._hold = hold
        self._group = group
        self._deadline = deadline
        self._after = after
        self._end = weakref.finalize(self, _give_up, saving, os.getpid())
        line = socket.socket(socket.AF_UNIX)
        self._address = f"\0tilestone-{secrets.token_hex(16)}"  # in no folder, so nothing remains
        line.bind(self._address)
        line.listen()
        self._ended = ended = threading.Event()  # the writing, well or not
        # These must not refer to the Writing, which then could not be dropped.
        hold.written.on_done(lambda: then(saving.save_id))
        hold.written.on_done(lambda: _end(line, ended))
        saving.durable.add_done_callback(lambda _: _end(line, ended))  # if it can't write
        _held.add(self)

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
        if not self._end.alive:
            raise InvalidArgumentError("the save is over")
        try:
            agreed(
                "finalizing a save", self._group, self._wait_for_writing,
                lambda _: self._saving.save_id, _expect_one, self._deadline,
            )  # fmt: skip
            self._hold.release()
            result = self._saving.result()
        except BaseException:
            self.abandon()
            raise
        self._end.detach()
        self._after(result)

    def _wait_for_writing(self) -> None:
        """Raises what this rank has failed with."""
        while not self._ended.wait(1):
            self._saving.done()  # ends it once its time is over
        if self._saving.done():
            self._saving.result()

    def abandon_at_exit(self) -> None:
        """Asks the save to end, and does not wait."""
        if self._end.detach() is not None:
            with contextlib.suppress(UnsupportedError):  # in a forked child
                self._saving.abandon()

    def abandon(self) -> None:
        """Gives the save up: nothing is published, and the other ranks fail if they finalize it.

        Waits until it has ended, so that the next save to the location can begin.
        """
        self._end()


_held: weakref.WeakSet[Writing] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """Before the interpreter's end waits for saves in the background, these among them."""
    for each in list(_held):
        each.abandon_at_exit()


def save_in_background(
    state: Any,
    path: Any,
    *,
    group: Any = None,
    after: Callable[[_core.SaveResult], None] = lambda result: None,
    then: Callable[[str], None] = lambda save_id: None,
    **options: Any,
) -> AsyncRequest:
    """Begins a save. Every rank calls. When it returns, the state may change.

    Args:
        state, path, options: as for `tilestone.save`, `timeout` until the save is published.
        group: the process group; None: torch's default group.
        after: called on every rank when the save is published.
        then: called with the save's id once this rank's data files are written.

    Returns:
        The request, to be scheduled and finalized on every rank.

    Raises:
        As `tilestone.save`, on every rank.
    """
    hold, deadline = _core.Hold(), Deadline(options.get("timeout", _core.DEFAULT_TIMEOUT))
    if options.get("by_files") is None:
        group = _ranks.default_group(group)
    saving = start(state, path, group=group, hold=hold, **options)
    try:
        return Writing(saving, hold, group, deadline, after, then).request()
    except BaseException:
        saving.abandon()
        raise


def save_whole(
    given: engine_calls.Given,
    checkpoint_dir: Any,
    *,
    hashes: _integrity.Hashes | None = None,
    **options: Any,
) -> AsyncRequest:
    """As `engine_calls.engine_save`, in the background."""
    given.take_options(options, hashes)

    def hash_files(save_id: str) -> None:
        if hashes is not None:
            hashes.save_id = save_id
            hashes.hash_files()

    request = save_in_background(
        given, literal(checkpoint_dir), dialect="megatron", after=given.end, then=hash_files,
        **{"overwrite": True, **options},
    )  # fmt: skip
    given.forget()
    if hashes is not None:
        request.finalize_fns.append(hashes.write)
    return request
