"""A save in separate steps, which only the package of the tests has."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tilestone import _core
from tilestone._calls.collective import SaveCall

if TYPE_CHECKING:
    from tilestone._calls.session import Session

Result = TypeVar("Result")


class BegunSave:
    """A save that has begun, made by `begin_save`.

    The steps are `stage` (optional), `write`, `report` and `publish`. Each is called once, in this
    order. If a step raises, the save has ended. As a context manager, an unfinished save is given
    up at the end of the block.

    One thread may use it at a time, not always the same one; other threads can run during a step.

    Attributes:
        save_id: the unique name of this attempt.
    """

    def __init__(self, core: Any, until_the_end: contextlib.ExitStack) -> None:
        """Called by `begin_save`."""
        self._core = core
        self._open = until_the_end
        self.save_id: str = core.save_id
        # This also runs at the end of the program, while threads and process groups still exist.
        self._end = weakref.finalize(self, _give_up, core, until_the_end)

    def stage(self) -> None:
        """Copies the arrays that this rank writes, also those inside objects, into staging memory.

        After it returns, the state may change, and the save holds no references to its arrays.
        Without this step nothing is copied: the arrays must not change until `write` has returned,
        and the save holds references to them until then.

        Raises:
            InvalidArgumentError: the save is over.
            StorageError: there is not enough memory.
            TimeoutError: the save's timeout has passed.
        """
        self._step(self._core.stage)

    def write(self) -> None:
        """Writes this rank's data files and makes them durable; waits for no other rank.

        If writing fails, the error is raised by `report`, which also tells the other ranks.

        Raises:
            InvalidArgumentError: the save is over.
        """
        self._step(self._core.write)

    def report(self) -> None:
        """Tells the other ranks what this one wrote. With a communicator every rank must call it.

        Raises:
            InvalidArgumentError: the save is over.
            Also, as `tilestone.save`, the error with which writing failed on this rank or, with a
            communicator, on any rank.
        """
        self._step(self._core.report)

    def publish(self) -> _core.SaveResult:
        """Publishes the checkpoint. With a communicator every rank must call it.

        When it returns the checkpoint exists, except in a save by files with ByFiles(wait=False).

        Returns:
            The same as `tilestone.save`. With ByFiles(wait=False), `published` says
            whether this rank was the last one and published the checkpoint.

        Raises:
            InvalidArgumentError: the save is over.
            Also everything that `tilestone.save` raises.
        """
        result = self._step(self._core.publish)
        self._end()
        return result

    def give_up(self) -> None:
        """Ends an unfinished save; does nothing if the save has ended.

        The data files that this rank has written are removed, and the other ranks raise
        RankFailedError or InterruptedError, which name this rank. In a save by files this is only
        so until this rank has reported: after that its data stays, and the other ranks complete the
        save.
        """
        self._end()

    def _step(self, step: Callable[[], Result]) -> Result:
        try:
            return step()
        finally:
            if self._core.is_over:
                self._open.close()

    def __enter__(self) -> BegunSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


def _give_up(core: Any, until_the_end: contextlib.ExitStack) -> None:
    with until_the_end:
        core.give_up()


def begin_save(
    state: Any, path: str | os.PathLike[str], *, session: Session | None = None, **given: Any
) -> BegunSave:
    """Begins a save: the ranks agree who writes what, and the save is started at `path`.

    All steps together do what `tilestone.save` does, with the same files and errors. Every rank
    calls; with a communicator all ranks also call `report` and `publish` together, and no other
    save or load of this process uses the group until the save has ended. `timeout` covers all steps
    and the time between them.

    Args:
        state: as for `tilestone.save`. Arrays are not copied (see `BegunSave.stage`).
        path, given: as for `tilestone.save`.
        session: makes the save, which may outlive it.

    Returns:
        The save, ready for its next step. If it is dropped, or its `with` block ends, before it is
        published, it is given up (see `BegunSave.give_up`).
    """
    if session is not None:
        given |= session._next_save(path, given)
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, **given)
        core = _core._begin_save(  # type: ignore[attr-defined]
            call.prepare, call.location, call.comm, call.limit, call.bare()
        )
        return BegunSave(core, until_the_end.pop_all())


def finish_in_a_thread(begun: BegunSave) -> None:
    """Takes the steps in another thread than the one that has begun the save."""

    def finish() -> None:
        begun.stage()
        begun.write()
        begun.report()
        begun.publish()

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
