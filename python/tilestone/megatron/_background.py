"""Saves of which only the writing is in the background.

The call plans the save, by rounds of all ranks, and copies what this rank writes. A thread of this
process then writes. What Megatron-Core's queue starts in another process only waits for that thread
(see `_waiting`). When the queue finalizes the request, all ranks report what they have written, and
the save is published. What was not finalized is never published.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tilestone import _core
from tilestone._calls.collective import Prepared
from tilestone._calls.steps import BegunSave, begin_save
from tilestone._errors import InterruptedError
from tilestone.megatron import _engine_calls, _integrity, _ranks, _slots
from tilestone.megatron._async_requests import AsyncRequest
from tilestone.megatron._stock_errors import raises_stocks_errors
from tilestone.megatron._stored import literal
from tilestone.megatron._together import Deadline, together
from tilestone.megatron._waiting import Line

_NOT_HEARD = (
    "the save was abandoned: the process that waited for its writing ended early, or the request was "
    "finalized before its function had run"
)


class Writing:
    """A save whose data files a thread writes. Called, it finalizes the save, on every rank.

    If it is dropped, or the process that waits for it ends early, the save is abandoned.

    Args:
        begun: the save, whose tensors are staged.
        slot: the slot of its session, or None.
        after: called with the result once the save is published.
        then: called in the thread once the data files are written.
    """

    def __init__(
        self,
        begun: BegunSave,
        slot: _slots.Slot | None,
        after: Callable[[_core.SaveResult], None],
        then: Callable[[BegunSave], None],
    ) -> None:
        self._begun = begun
        self._slot = slot
        self._after = after
        self._line = Line()
        self._heard = threading.Event()
        self._thread = threading.Thread(
            target=_write, args=(begun, then, self._line, self._heard), name="tilestone-save",
            daemon=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _abandon, self._thread, self._line, begun, slot)
        self._thread.start()

    def request(self) -> AsyncRequest:
        """What a queue schedules."""
        return AsyncRequest(self._line.wait(), (), [self])

    @raises_stocks_errors
    def __call__(self) -> None:
        """Tells the other ranks what was written, and publishes the checkpoint.

        Raises:
            InterruptedError: the process that waited for the writing has died, on this rank.
            Also everything that `tilestone.save` raises, on every rank.
        """
        self._line.close()
        self._thread.join()
        if not self._heard.is_set():
            self.abandon()
            raise InterruptedError(_NOT_HEARD, hint="the checkpoint before it is unchanged; save again")
        try:
            self._begun.report()
            result = self._begun.publish()
        except BaseException:
            self.abandon()
            raise
        self._end.detach()
        if self._slot is not None:
            self._slot.release()
        self._after(result)

    def abandon(self) -> None:
        """Gives the save up: nothing is published, and the other ranks fail if they finalize it.

        Waits until the thread has ended, so that the next save to the location can begin.
        """
        self._end()
        self._thread.join()
        self._begun.give_up()


def _write(
    begun: BegunSave, then: Callable[[BegunSave], None], line: Line, heard: threading.Event
) -> None:
    """Runs in the thread. It must not refer to the Writing, which then could not be dropped."""
    with contextlib.suppress(Exception):  # the end of the program; report() raises what write() met
        begun.write()
        then(begun)
        if line.tell():
            heard.set()
    if not heard.is_set():
        begun.give_up()


def _abandon(
    thread: threading.Thread, line: Line, begun: BegunSave, slot: _slots.Slot | None
) -> None:
    line.close(now=True)
    if not thread.is_alive():  # otherwise the thread gives up the save, or the last reference does
        begun.give_up()
    if slot is not None:
        slot.close()


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
    slot = _slots.reserve(group, deadline)
    try:
        begun = begin_save(
            state, path, session=slot.session, timeout=deadline.timeout(), **options
        )
        try:
            together("staging of a save", group, begun.stage, deadline)
        except BaseException:
            begun.give_up()
            raise
    except BaseException:
        slot.close()
        raise
    return Writing(begun, slot, after, then).request()


def save_whole(
    given: _engine_calls.Given,
    checkpoint_dir: Any,
    *,
    hashes: _integrity.Hashes | None = None,
    **options: Any,
) -> AsyncRequest:
    """As `_engine_calls.engine_save`, in the background."""
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
