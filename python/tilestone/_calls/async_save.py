"""Saves in the background: the function async_save, and the sessions behind it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilestone import _core, _forked
from tilestone._calls.collective import SaveCall, communicator, files_of, group_of, is_destroyed
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.keywords import checked, keywords
from tilestone._options.values import AsyncSaveOptions, ByFiles
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from tilestone._options.values import AsyncSaveKeywords
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

#: How long the interpreter's end waits for saves in flight, in seconds. A save that has not ended
#: by then is abandoned.
EXIT_SECONDS = 20.0


def _seconds(timeout: float | None) -> float:
    limit = valid.seconds("timeout", timeout)
    if not limit >= 0:  # NaN too
        raise InvalidArgumentError(f"timeout must be at least 0 seconds, not {timeout}")
    return limit


class AsyncStep:
    """A step of a save that ends on another thread: a future by convention."""

    def __init__(
        self,
        steps: Sequence[_core.Pending],
        before: Callable[[], object],
        value: Callable[[], Any] = lambda: None,
    ) -> None:
        """Called by `AsyncSave`. `before` a wait, the save is sealed; `value` is the result."""
        self._steps = steps
        self._before = before
        self._value = value

    def done(self) -> bool:
        """Whether the step has ended, well or not."""
        return all(each.done() for each in self._steps)

    def result(self, timeout: float | None = None) -> Any:
        """Waits until the step has ended.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Returns:
            For `AsyncSave.durable` the same as `tilestone.save`; None for `AsyncSave.staged`.

        Raises:
            TimeoutError: the step has not ended after `timeout` seconds. It goes on.
            UnsupportedError: in a forked child; the save belongs to the parent.
            Also the error with which the step has ended.
        """
        seconds = _seconds(timeout)
        self._before()
        for each in self._steps:
            each.result(seconds)
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error with which the step has ended, or None. Waits and raises as `result` does."""
        if not self.done():
            try:
                self.result(timeout)
            except Exception:
                if not self.done():
                    raise
        try:
            self.result(0)
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[AsyncStep], object]) -> None:
        """Calls `callback` with this object when the step has ended, or now if it has.

        It runs on a thread of Tilestone, unless the step has ended before. What it raises is
        logged.
        """

        def after(number: int) -> None:
            if number == len(self._steps):
                callback(self)
            else:
                self._steps[number].on_done(lambda: after(number + 1))

        after(0)

    def __repr__(self) -> str:
        return f"AsyncStep({'done' if self.done() else 'in progress'})"


class AsyncSave:
    """A save that goes on in the background, made by `async_save`.

    It may be dropped: the save goes on. In a forked child it still belongs to the parent: what
    waits or changes something raises UnsupportedError there.

    Attributes:
        staged: the state may change. It has ended when `async_save` returns, but with stage="lazy"
            its result() or exception() ends it: see `async_save`.
        durable: the checkpoint exists, or the save has failed.
        save_id: the unique name of this attempt; "" if the save was skipped or never began.
        bytes: bytes of the elements of the arrays that this rank writes.
        skipped: whether nothing is saved, because of in_flight="skip".
    """

    def __init__(self, core: _core.AsyncSave) -> None:
        """Called by `async_save`."""
        self._core = core
        self.staged = AsyncStep([core.staged], core.seal)
        self.durable = AsyncStep([core.durable], core.seal, core.result)
        self.save_id: str = core.save_id
        self.bytes: int = core.bytes
        self.skipped: bool = core.skipped

    def done(self) -> bool:
        """The same as `durable.done`."""
        return self.durable.done()

    def result(self, timeout: float | None = None) -> _core.SaveResult:
        """The same as `durable.result`."""
        found: _core.SaveResult = self.durable.result(timeout)
        return found

    def abandon(self) -> None:
        """Ends the save soon, on every rank, unless it is being published. Does not wait.

        `durable` then fails with InterruptedError, and what was at the path before stays.
        """
        self._core.abandon()

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "done" if self.done() else "in flight"
        return f"AsyncSave(save_id={self.save_id!r}, {state})"


def _engine_options(given: dict[str, Any]) -> _core.AsyncOptions:
    """What the engine needs before the first round; that finds the values that are invalid."""
    options = _core.AsyncOptions()
    with contextlib.suppress(InvalidArgumentError):
        checked("async_save", AsyncSaveOptions, given).fill(options)
    return options


def _watched(given: dict[str, Any]) -> Any:
    """What watches the tensors of a save with stage="lazy"; None if nothing can be watched."""
    if given.get("stage") != "lazy" or "torch" not in sys.modules:
        return None
    from tilestone._torch import live

    return live.Watched()


def run_async_save(
    state: Any, path: str | os.PathLike[str], hold: _core.Hold | None = None, **given: Any
) -> AsyncSave:
    """Starts a save in the background with the arguments of SaveCall, in a session.

    With a `hold`, it is neither reported nor published before hold.release(), and the session's next
    save does not wait for it.
    """
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, kind=AsyncSaveOptions, **given)
        options = _engine_options(call.given)
        watched = _watched(call.given)
        core = _core.async_save(
            call.comm, call.prepare, call.location, call.limit, options, watched, call.bare(), hold
        )
        core.durable.on_done(until_the_end.pop_all().close)
        return AsyncSave(core)


def end_saves() -> None:
    """At the interpreter's end: waits for saves in flight, and abandons those that take long."""
    for save_id in _core.end_async_saves(EXIT_SECONDS):
        logging.getLogger("tilestone").warning(
            "the program ends while the save %s is stuck: it was not published", save_id
        )


class _Sessions:
    """A session for each group, so that staging memory and plans serve the next save too.

    It is kept as long as the group. A session holds a communicator written in Python, so these are
    kept until the program ends.
    """

    def __init__(self) -> None:
        self._lock = _forked.Lock()
        # A function that returns the group, or None once that is gone; and its session.
        self._of_group: dict[Any, tuple[Callable[[], Any], _core.Session]] = {}
        self._parents: list[Any] = []  # a forked child keeps its parent's: it must not end them
        os.register_at_fork(after_in_child=self._forget_the_parents)

    def of_group(self, found: Any) -> _core.Session:
        """The session of a process group or communicator; None: of this rank alone."""
        key = id(found)
        with self._lock:
            for other, (of, _) in list(self._of_group.items()):
                if is_destroyed(of()):
                    del self._of_group[other]
            if key in self._of_group:
                return self._of_group[key][1]
            session = _core.Session(communicator(found))
            self._of_group[key] = (self._reference(found, key), session)
            return session

    def _reference(self, group: Any, key: Any) -> Callable[[], Any]:
        if not isinstance(group, _core.Communicator):
            return lambda: group
        # Takes no lock, because it may run at any point of this thread. The session's save goes on.
        return weakref.ref(group, lambda _: self._of_group.pop(key, None))

    def of_files(self, files: ByFiles) -> _core.Session:
        """The session of a rank that saves by files."""
        key = ("files", files.rank, files.world_size)
        with self._lock:
            if key not in self._of_group:
                made = ByFiles(*key[1:], files.token).made()
                session = _core.Session(made.rank, made.world_size, made.token)
                self._of_group[key] = (lambda: None, session)
            return self._of_group[key][1]

    def close(self) -> None:
        """At the interpreter's end, after all saves."""
        with self._lock:
            self._of_group.clear()

    def _forget_the_parents(self) -> None:
        self._parents.append(self._of_group)
        self._of_group = {}


_sessions, _of_held = _Sessions(), _Sessions()  # a held save is not the last one of other saves


# Runs before the library's own end of its calls, which was registered earlier.
@atexit.register
def _exit() -> None:
    end_saves()
    _sessions.close()
    _of_held.close()


def start(
    state: Any, path: str | os.PathLike[str], *, group: Any = None, by_files: Any = None, **given: Any
) -> AsyncSave:
    """Starts a save in the session that is kept for these ranks. `given`: as for run_async_save."""
    sessions = _sessions if given.get("hold") is None else _of_held
    if by_files is None:
        found = group_of(group)
        core = sessions.of_group(found)
        return run_async_save(state, path, group=found, session=core, **given)
    if group is not None:
        raise InvalidArgumentError("group and by_files exclude each other")
    files = files_of(by_files)
    core = sessions.of_files(files)
    return run_async_save(state, path, session=core, by_files=files, **given)


@keywords(AsyncSaveOptions)
def async_save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    group: ProcessGroup | CommunicatorLike | None = None,
    by_files: ByFiles | None = None,
    **options: Unpack[AsyncSaveKeywords],
) -> AsyncSave:
    """Saves as `save` does, but returns as soon as the state may change. Every rank must call it.

        saving = tilestone.async_save(state, path)
        ...                                          # the training goes on
        saving.result()                              # the checkpoint exists

    The call plans, and copies what this rank writes. A thread then writes the copies and publishes
    the checkpoint. It uses no collectives, and does not hold the GIL while bytes move. What was at
    `path` before stands until then, and loads see it. A second save to the same path is refused
    meanwhile.

    With `stage="lazy"` large tensors of torch are copied after the call. A snapshot is one step,
    or the save fails and names the key. The next step of a torch optimizer,
    `AsyncSave.staged.result()` or `AsyncSave.result()` seals it; docs/saving.md says what must not
    happen before.

    One save is in flight at a time: by default the next `async_save` of the same group waits for
    it. Tilestone keeps a session for each group as long as the group exists, so from the second save
    on the memory for the copies is there already (`Session.prepare` makes it so for the first one).
    A group that the program drops, such as a `tilestone.solo()` made for one call, takes its
    session along once the save has ended.

    If the program ends while a save is in flight, the interpreter waits for it, at most 20 seconds.
    Then the save is abandoned, and the checkpoint before it stands.

    Args:
        state, path, group, by_files: as for `save`.
        options: the options of `save`, and stage, on_error, in_flight and max_staged_bytes
            (docs/options.md). `timeout` counts from this call until the checkpoint is durable.

    Returns:
        The save: `AsyncSave.result` waits for it. It may be dropped.

    Raises:
        What `save` raises for failures before the files are written. Later failures are raised by
        `AsyncSave.result`. If a rank does not ask for that, the next `async_save` of the group
        raises the error on every rank, instead of saving, or logs it if the failed save had
        on_error="warn".
        AlreadyExistsError: with in_flight="fail", the previous save is still in flight.
    """
    return start(state, path, group=group, by_files=by_files, **options)
