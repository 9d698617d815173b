"""Session: what a training run keeps from one save to the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from tilestone import _core, _options
from tilestone._api import load, save
from tilestone._calls import SaveCall, communicator
from tilestone._errors import InvalidArgumentError
from tilestone._protocols import CommunicatorLike
from tilestone._steps import BegunSave, begin_save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Options of save and load that are a session's own matter.
_OWN = ("group", "comm", "coordination", "rank", "world_size", "token", "number")


def _check_timeout(timeout: Any) -> None:
    """Refuses what is no time in which a session can be made."""
    seconds = _options.seconds("timeout", timeout)
    if not seconds > 0:
        raise InvalidArgumentError(
            f"timeout is {seconds}; expected a number of seconds more than 0, or None for no limit"
        )


def _files_alone(files: Mapping[str, Any]) -> _core.Session:
    """Of a session by files without a communicator."""
    for name, value in files.items():
        if value is None:
            raise InvalidArgumentError(
                f'coordination="files" needs {name}, or a group or comm that makes the token'
            )
    return _core.Session(
        _options.whole("rank", files["rank"]),
        _options.whole("world_size", files["world_size"]),
        _options.word("token", files["token"]),
    )


class Session:
    """Saves and loads as `tilestone.save` and `tilestone.load`, and keeps what the next one needs.

    Threads and buffers; the plans of saves: while all ranks save the keys, shapes, dtypes, boxes,
    replicas and objects that they saved before, none of them sends its plan, or by rule makes one,
    and any rank's change is noticed; and the token of saves by files, with the number of saves to each path. Used by one
    thread at a time. A context manager, which closes it.

    Args:
        group: the torch process group whose ranks make the session, and then each save and load,
            together; by default torch.distributed's default group where it is initialised.
        comm: a communicator instead of a group, as for `save`.
        coordination: "communicator": saves go through the group. "files": they go through files
            alone (see `save`). With a group or comm, rank 0 makes the token and sends it to all,
            and no other message is needed; with rank, world_size and token there is none at all.
        rank, world_size, token: of a session by files without a group or comm, as for `save`.
        timeout: seconds for the message that makes the token; None for no limit.

    Raises:
        InvalidArgumentError: arguments that contradict each other or are out of range.
        TimeoutError, RankFailedError: not all ranks of the group made the session.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        comm: CommunicatorLike | None = None,
        coordination: str = "communicator",
        rank: int | None = None,
        world_size: int | None = None,
        token: str | None = None,
        timeout: float | None = _core.DEFAULT_TIMEOUT,
    ) -> None:
        way = _options.word("coordination", coordination)
        if way not in ("communicator", "files"):
            raise InvalidArgumentError(
                f'coordination is "communicator" or "files", not "{way}"'
            )
        self._by_files = way == "files"
        self._group = group
        self._core: _core.Session | None = None
        files = {"rank": rank, "world_size": world_size, "token": token}
        if any(value is not None for value in files.values()):
            if not self._by_files or group is not None or comm is not None:
                raise InvalidArgumentError(
                    'rank, world_size and token are for coordination="files" without a group or comm'
                )
            _check_timeout(timeout)  # of no effect, and no reason to take any
            self._core = _files_alone(files)
            self._comm: CommunicatorLike = _core.solo()
        else:
            self._comm = communicator(group, comm)
            self._core = _core.Session(
                self._comm, _options.limit_of(timeout), lambda: _check_timeout(timeout)
            )

    def _open(self) -> _core.Session:
        if self._core is None:
            raise InvalidArgumentError("the session is closed")
        return self._core

    def _refuse(self, options: Mapping[str, Any]) -> None:
        for name in _OWN:
            if name in options:
                raise InvalidArgumentError(f"{name} is the session's: give it to Session")

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._open().rank

    @property
    def world_size(self) -> int:
        """How many ranks save."""
        return self._open().size

    @property
    def token(self) -> str:
        """What names this session's saves by files: the same text on all its ranks."""
        return self._open().token

    @property
    def stats(self) -> _core.SessionStats:
        """What was counted so far, on this rank."""
        return self._open().stats

    def prepare(self, state: Mapping[Any, Any], **options: Any) -> int:
        """Makes ready the memory in which `BegunSave.stage` puts such a state.

        Touching memory for the first time takes several times as long as the copy: after this the
        first save stages as fast as the later ones. Nothing is written, nothing is sent, and no
        other rank takes part. The memory is the session's, as long as no save that is on its way
        has it.

        Args:
            state: as for `tilestone.save`: what will be saved, or what has its structure.
            options: the options of those saves that are not the session's.

        Returns:
            The memory's bytes: of what this rank wrote when the session last saved a state of this
            structure, else of what it would write by rule.

        Raises:
            InvalidArgumentError: the session is closed, an option is the session's or no option of
                a save, or the state can't be saved.
            StorageError: there is no memory for it.
        """
        session = self._open()
        self._refuse(options)
        who: dict[str, Any] = {"group": self._group, "comm": session}
        if self._by_files:
            who = {
                "comm": session, "coordination": "files", "rank": session.rank,
                "world_size": session.size, "token": session.token,
            }  # fmt: skip
        with contextlib.ExitStack() as until_the_end:
            call = SaveCall(state, os.curdir, until_the_end, **who, **options)
            return session.prepare(call.prepare)

    def save(
        self, state: Mapping[Any, Any], path: str | os.PathLike[str], **options: Any
    ) -> _core.SaveResult:
        """Saves as `tilestone.save` does, with its options but those that are the session's.

        By files, the ranks' first saves to a path are one save, their second ones another, and so
        on, failed ones included. A rank that was started again alone completes its save by
        `tilestone.save` with this token and the save's number.

        Args:
            state, path: as for `tilestone.save`.
            options: its other options (wait too, by files).

        Returns:
            What this rank did.

        Raises:
            InvalidArgumentError: the session is closed, or an option is the session's.
            As `tilestone.save`.
        """
        return save(state, path, **self._who(path, options), **options)

    def begin_save(
        self, state: Mapping[Any, Any], path: str | os.PathLike[str], **options: Any
    ) -> BegunSave:
        """Takes a save's first step as `tilestone.begin_save` does, with the session's memory.

        `BegunSave.stage` copies into memory that the session keeps. By files it counts as a save.

        Args:
            state, path: as for `tilestone.save`.
            options: its other options (wait too, by files).

        Returns:
            The save, which may outlive the session.

        Raises:
            InvalidArgumentError: the session is closed, or an option is the session's.
            As `tilestone.begin_save`.
        """
        return begin_save(state, path, **self._who(path, options), **options)

    def _who(self, path: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """Who takes part in the next save to a path, as options of it."""
        session = self._open()
        self._refuse(options)
        # Read by save() as the ranks that take part.
        comm = cast("CommunicatorLike", session)
        if not self._by_files:
            return {"group": self._group, "comm": comm}
        number = session.by_files(_options.directory(path)).number
        return {
            "comm": comm, "coordination": "files", "rank": session.rank,
            "world_size": session.size, "token": session.token, "number": number,
        }  # fmt: skip

    def load(
        self,
        wanted: Mapping[Any, Any] | str | os.PathLike[str],
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> dict[Any, Any]:
        """Loads as `tilestone.load` does, with the session's group or comm.

        A session by rank, world_size and token has none: each rank then loads alone.

        Args:
            wanted, path: as for `tilestone.load`.
            options: its other options.

        Returns:
            As `tilestone.load`.

        Raises:
            InvalidArgumentError: the session is closed, or an option is the session's.
            As `tilestone.load`.
        """
        self._open()
        self._refuse(options)
        return load(wanted, path, comm=self._comm, **options)

    def close(self) -> None:
        """Gives up what is kept; further calls but this one are InvalidArgumentErrors."""
        self._core = None

    def __enter__(self) -> Session:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
