"""A save in the background, and how it is started."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from tilestone import _core
from tilestone._calls.collective import SaveCall
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.values import AsyncSaveOptions

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
        done: Callable[[], bool],
        result: Callable[[float], Any],
        on_done: Callable[[Callable[[], object]], None],
    ) -> None:
        """Called by `AsyncSave`."""
        self._done = done
        self._result = result
        self._on_done = on_done

    def done(self) -> bool:
        """Whether the step has ended, well or not."""
        return self._done()

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
        return self._result(_seconds(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error with which the step has ended, or None. Waits and raises as `result` does."""
        if not self._done():
            try:
                self._result(_seconds(timeout))
            except Exception:
                if not self._done():
                    raise
        try:
            self._result(0)
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[AsyncStep], object]) -> None:
        """Calls `callback` with this object when the step has ended, or now if it has.

        It runs on a thread of Tilestone, unless the step has ended before. What it raises is
        logged.
        """
        self._on_done(lambda: callback(self))

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
        self.staged = AsyncStep(core.is_staged, core.wait_staged, core.on_staged)
        self.durable = AsyncStep(core.is_durable, core.result, core.on_durable)
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


def run_async_save(state: Any, path: str | os.PathLike[str], **given: Any) -> AsyncSave:
    """Starts a save in the background with the arguments of SaveCall, in a session."""
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, kind=AsyncSaveOptions, **given)
        options = _engine_options(call.given)
        watched = _watched(call.given)
        assert call.session is not None
        if call.files is not None:
            core = _core.async_save_by_files(
                call.session, call.bare(), call.prepare, options, watched
            )
        else:
            core = _core.async_save(
                call.session, call.prepare, call.location, call.limit, options, watched
            )
        core.on_durable(until_the_end.pop_all().close)
        return AsyncSave(core)


def end_saves() -> None:
    """At the interpreter's end: waits for saves in flight, and abandons those that take long."""
    for save_id in _core.end_async_saves(EXIT_SECONDS):
        logging.getLogger("tilestone").warning(
            "the program ends while the save %s is stuck: it was not published", save_id
        )
