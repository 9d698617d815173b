"""The function async_save, and the sessions behind it."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core, _forked
from tilestone._calls.async_save import AsyncSave, end_saves, run_async_save
from tilestone._calls.collective import communicator, files_of, group_of
from tilestone._errors import InvalidArgumentError
from tilestone._options.keywords import keywords
from tilestone._options.values import AsyncSaveOptions, ByFiles
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._options.values import AsyncSaveKeywords


def _is_destroyed(group: Any) -> bool:
    """Whether this is a process group that torch knows no more."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not isinstance(group, c10d.ProcessGroup):
        return False
    return group not in c10d._world.pg_map


class _Sessions:
    """A session for each group, so that staging memory and plans serve the next save too.

    It is kept as long as the group. A session holds a communicator written in Python, so these are
    kept until the program ends.
    """

    def __init__(self) -> None:
        self._lock = _forked.Lock()
        self._process = os.getpid()
        # A function that returns the group, or None once that is gone; and its session.
        self._of_group: dict[Any, tuple[Callable[[], Any], _core.Session]] = {}
        self._parents: list[Any] = []  # a forked child keeps its parent's: it must not end them

    def of_group(self, found: Any) -> _core.Session:
        """The session of a process group or communicator; None: of this rank alone."""
        key = None if found is None else id(found)
        with self._lock:
            self._forget_the_parents()
            for other, (of, _) in list(self._of_group.items()):
                if _is_destroyed(of()):
                    del self._of_group[other]
            known = self._of_group.get(key)
        if known is not None and known[0]() is found:
            return known[1]
        session = _core.Session(communicator(found))
        with self._lock:
            known = self._of_group.get(key)
            if known is None or known[0]() is not found:
                known = self._of_group[key] = (self._reference(found, key), session)
            return known[1]

    def _reference(self, group: Any, key: Any) -> Callable[[], Any]:
        if not isinstance(group, _core.Communicator):
            return lambda: group

        # Takes no lock, because it may run at any point of this thread. The session's save goes on.
        def forget(reference: Any) -> None:
            if self._process == os.getpid() and self._of_group.get(key, (None,))[0] is reference:
                del self._of_group[key]

        return weakref.ref(group, forget)

    def of_files(self, files: ByFiles) -> _core.Session:
        """The session of a rank that saves by files."""
        key = ("files", files.rank, files.world_size)
        with self._lock:
            self._forget_the_parents()
            if key not in self._of_group:
                made = ByFiles(*key[1:], files.token).made()
                session = _core.Session(made.rank, made.world_size, made.token)
                self._of_group[key] = (lambda: None, session)
            return self._of_group[key][1]

    def close(self) -> None:
        """At the interpreter's end, after all saves."""
        with self._lock:
            self._forget_the_parents()
            self._of_group.clear()

    def _forget_the_parents(self) -> None:
        if self._process != os.getpid():
            self._parents.append(self._of_group)
            self._of_group, self._process = {}, os.getpid()


_sessions = _Sessions()


# Runs before the library's own end of its calls, which was registered earlier.
@atexit.register
def _exit() -> None:
    end_saves()
    _sessions.close()


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
    if by_files is None:
        found = group_of(group)
        core = _sessions.of_group(found)
        return run_async_save(state, path, group=found, session=core, **options)
    if group is not None:
        raise InvalidArgumentError("group and by_files exclude each other")
    files = files_of(by_files)
    core = _sessions.of_files(files)
    return run_async_save(state, path, session=core, by_files=files, **options)
