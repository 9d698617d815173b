"""A save in its steps."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tilestone import _core
from tilestone._calls import SaveCall


class BegunSave:
    """A save on its way; made by `begin_save`. A context manager, which gives up what is not over.

    The steps are `stage`, which may be left out, `write`, `report` and `publish`, each taken once,
    in this order. A step that raises has ended the save. Used by one thread at a time, not always
    the same one; other threads run while a step works. In a child of fork the save can't go on,
    and nothing that the child does ends it.

    Attributes:
        save_id: the attempt's unique name.
        items: chunks of arrays, and objects, that this rank writes, without copies. 0 in a save by
            files of which this rank's part was published before.
        bytes: of the elements of the arrays that this rank writes, copies among them.
    """

    def __init__(self, core: _core.StepwiseSave, until_the_end: contextlib.ExitStack) -> None:
        """Used by `begin_save`."""
        self._core = core
        self._open = until_the_end
        self.save_id: str = core.save_id
        self.items: int = core.items
        self.bytes: int = core.bytes
        # At the end of the program too, while threads and process groups are still there.
        self._end = weakref.finalize(self, _give_up, core, until_the_end)

    @property
    def next(self) -> str:
        """The next step: "stage or write", "write", "report" or "publish"; "" when it is over."""
        return self._core.next

    def stage(self) -> None:
        """Copies the arrays that this rank writes, those inside objects too, into memory of the save.

        When it returns the state may change: the save holds none of its arrays any more. Without
        this step nothing is copied: the arrays must not change until `write` has returned, and the
        save holds them until then.

        Raises:
            InvalidArgumentError: this is not the next step.
            StorageError: there is no memory for it. TimeoutError: the time of the save is over.
        """
        self._take(self._core.stage)

    def write(self) -> None:
        """Writes this rank's data files and makes them durable; waits for no other rank.

        What goes wrong with them is raised by `report`, where the other ranks get to know.

        Raises:
            InvalidArgumentError: this is not the next step.
        """
        self._take(self._core.write)

    def report(self) -> None:
        """Tells the other ranks what this one has written. With a communicator every rank calls.

        Raises:
            InvalidArgumentError: this is not the next step.
            As `tilestone.save`: what writing has failed with, on this rank or, with a communicator,
            on any.
        """
        self._take(self._core.report)

    def publish(self) -> _core.SaveResult:
        """The checkpoint exists when it returns. With a communicator every rank calls.

        Returns:
            As `tilestone.save`; of a save by files with wait=False, `published` says whether this
            rank was the last one.

        Raises:
            InvalidArgumentError: this is not the next step.
            As `tilestone.save`.
        """
        result: _core.SaveResult = self._take(self._core.publish)
        self._end()
        return result

    def give_up(self) -> None:
        """Ends the save; does nothing where it is over.

        The data files that this rank has written go, and the other ranks raise RankFailedError or
        InterruptedError, which name it. By files that holds until this rank has reported; what it
        has reported stays, and the others complete it.
        """
        self._end()

    def _take(self, step: Any) -> Any:
        try:
            return step()
        finally:
            if not self._core.next:
                self._open.close()

    def __enter__(self) -> BegunSave:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_up()

    def __repr__(self) -> str:
        return f"BegunSave(save_id={self.save_id!r}, next={self.next!r})"


def _give_up(core: _core.StepwiseSave, until_the_end: contextlib.ExitStack) -> None:
    with until_the_end:
        core.give_up()


def begin_save(
    state: Mapping[Any, Any], path: str | os.PathLike[str], **options: Any
) -> BegunSave:
    """Takes a save's first step: who writes what is agreed, and the save has begun at `path`.

    The steps in a row are `tilestone.save`, with the same files and errors:

        with tilestone.begin_save(state, path) as saving:
            saving.stage()      # the state may change from here on
            saving.write()
            saving.report()
            result = saving.publish()

    Every rank calls, and with a communicator all ranks take `report` and `publish` together too;
    no other save or load of this process uses the group until the save is over. `timeout` is for
    all steps and what is done between them.

    Args:
        state, path: as for `tilestone.save`. Values and objects are taken as they are now; arrays
            are not copied (see `BegunSave.stage`).
        options: the other options of `tilestone.save`.

    Returns:
        The save, before its next step. One that is dropped, or whose `with` block ends, before it
        is published is given up (see `BegunSave.give_up`).

    Raises:
        InvalidArgumentError: `tilestone.save` has no such option.
        As `tilestone.save`.
    """
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, **options)
        if call.files is not None:
            core = _core.begin_save_by_files(call.bare(), call.prepare, call.session)
        else:
            core = _core.begin_save(call.prepare, call.place, call.comm, call.limit)
        return BegunSave(core, until_the_end.pop_all())
