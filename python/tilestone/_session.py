"""Session: what a training run keeps from one save to the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tilestone import _core, _options
from tilestone._api import load_with, save_with
from tilestone._calls import SaveCall, communicator, is_by_files
from tilestone._errors import InvalidArgumentError
from tilestone._protocols import CommunicatorLike
from tilestone._steps import BegunSave, begin_save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._option_types import (
        AllSaveOptions,
        SessionLoadOptions,
        SessionSaveOptions,
    )

#: Options of save and load that are fixed by the session.
_OWN = ("group", "comm", "coordination", "rank", "world_size", "token", "number")


def _files_alone(files: Mapping[str, object]) -> _core.Session:
    """The engine's session for saves by files without a communicator."""
    for name, value in files.items():
        if value is None:
            raise InvalidArgumentError(
                f'coordination="files" needs {name}, or a group or comm to create the token'
            )
    return _core.Session(
        _options.whole("rank", files["rank"]),
        _options.whole("world_size", files["world_size"]),
        _options.word("token", files["token"]),
    )


class Session:
    """Saves and loads as `tilestone.save` and `tilestone.load` do, and keeps what is used again.

    A session keeps threads and buffers. It keeps the plans of saves: while all ranks save the same
    keys, shapes, dtypes, boxes, replicas and objects as before, no rank sends its plan (or, with
    agreement="rule", makes a new one); a change on any rank is noticed. It also keeps the token of
    saves by files and counts the saves to each path.

    One thread may use it at a time. As a context manager it is closed at the end of the block.

    Args:
        group: the torch process group whose ranks create the session, and make every save and load,
            together; by default torch.distributed's default group if it is initialised.
        comm: a communicator instead of a group, as for `save`.
        coordination: "communicator": saves go through the group. "files": saves go only through
            files (see `save`). With a group or comm, rank 0 creates the token and sends it to all
            ranks, which is the only message. With rank, world_size and token there is no message.
        rank, world_size, token: for a session by files without a group or comm, as for `save`.
        timeout: seconds for the message with the token; None for no limit.

    Raises:
        InvalidArgumentError: arguments contradict each other or are out of range.
        TimeoutError, RankFailedError: not all ranks of the group created the session.
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
        self._by_files = is_by_files(coordination)
        self._group = group
        self._core: _core.Session | None = None
        files = {"rank": rank, "world_size": world_size, "token": token}
        if any(value is not None for value in files.values()):
            if not self._by_files or group is not None or comm is not None:
                raise InvalidArgumentError(
                    'rank, world_size and token are only allowed with coordination="files" and '
                    "without a group or comm"
                )
            _options.time_limit(timeout)  # not used here, but an invalid one is still refused
            self._core = _files_alone(files)
            self._comm: CommunicatorLike = _core.solo()
        else:
            self._comm = communicator(group, comm)
            self._core = _core.Session(
                self._comm, _options.limit_of(timeout), lambda: _options.time_limit(timeout)
            )

    def _open(self) -> _core.Session:
        if self._core is None:
            raise InvalidArgumentError("the session is closed")
        return self._core

    def _refuse(self, options: Mapping[str, object]) -> None:
        for name in _OWN:
            if name in options:
                raise InvalidArgumentError(f"{name} is fixed by the session: pass it to Session")

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
        """The token of this session's saves by files, the same string on all its ranks."""
        return self._open().token

    @property
    def stats(self) -> _core.SessionStats:
        """The counters of this session so far, on this rank."""
        return self._open().stats

    def prepare(self, state: Mapping[Any, Any], **options: Unpack[SessionSaveOptions]) -> int:
        """Prepares the memory into which `BegunSave.stage` copies such a state.

        Touching memory for the first time takes several times as long as the copy itself. After
        this call the first save stages as fast as the later ones. Nothing is written or sent, and
        no other rank takes part. The session owns the memory while no unfinished save uses it.

        Args:
            state: as for `tilestone.save`: the state that will be saved, or one with the same
                structure.
            options: the options of these saves, except those fixed by the session.

        Returns:
            The size of the memory, in bytes: what this rank wrote when the session last saved a
            state of this structure, otherwise what it would write with agreement="rule".

        Raises:
            InvalidArgumentError: the session is closed, an option is fixed by the session or
                unknown, or the state can't be saved.
            StorageError: there is not enough memory.
        """
        all_options: AllSaveOptions = {**self._who(options), **options}
        with contextlib.ExitStack() as until_the_end:
            call = SaveCall(state, os.curdir, until_the_end, **all_options)
            return self._open().prepare(call.prepare)

    def save(
        self,
        state: Mapping[Any, Any],
        path: str | os.PathLike[str],
        **options: Unpack[SessionSaveOptions],
    ) -> _core.SaveResult:
        """Saves as `tilestone.save` does.

        With coordination="files", the first saves of all ranks to a path are one save, their second
        saves are another one, and so on; failed saves count. If only one rank was restarted, it
        completes its save with `tilestone.save`, this token and the save's number.

        Args:
            state, path: as for `tilestone.save`.
            options: the options of `tilestone.save`, except those fixed by the session.

        Returns:
            What this rank did.

        Raises:
            InvalidArgumentError: the session is closed, or an option is fixed by the session or
                unknown.
            Also everything that `tilestone.save` raises.
        """
        all_options: AllSaveOptions = {**self._next_save(path, options), **options}
        return save_with(state, path, **all_options)

    def begin_save(
        self,
        state: Mapping[Any, Any],
        path: str | os.PathLike[str],
        **options: Unpack[SessionSaveOptions],
    ) -> BegunSave:
        """Begins a save as `tilestone.begin_save` does, with the session's memory.

        `BegunSave.stage` copies into memory that the session keeps. With coordination="files" this
        counts as a save to the path.

        Args:
            state, path: as for `tilestone.save`.
            options: the options of `tilestone.save`, except those fixed by the session.

        Returns:
            The save, which may outlive the session.

        Raises:
            InvalidArgumentError: the session is closed, or an option is fixed by the session or
                unknown.
            Also everything that `tilestone.begin_save` raises.
        """
        all_options: AllSaveOptions = {**self._next_save(path, options), **options}
        return begin_save(state, path, **all_options)

    def _who(self, options: Mapping[str, object]) -> AllSaveOptions:
        """The options that say who takes part in a save. `options`: the caller's options."""
        session = self._open()
        self._refuse(options)
        # A save accepts a session in place of a communicator.
        comm = cast("CommunicatorLike", session)
        if not self._by_files:
            return {"group": self._group, "comm": comm}
        return {
            "comm": comm, "coordination": "files", "rank": session.rank,
            "world_size": session.size, "token": session.token,
        }  # fmt: skip

    def _next_save(
        self, path: str | os.PathLike[str], options: Mapping[str, object]
    ) -> AllSaveOptions:
        """The same for the next save to a path; by files, it is counted."""
        if not self._by_files:
            return self._who(options)
        # First, because a save whose options are refused counts too.
        number = self._open().by_files(_options.directory(path)).number
        who = self._who(options)
        who["number"] = number
        return who

    def load(
        self,
        wanted: Mapping[Any, Any] | str | os.PathLike[str],
        path: str | os.PathLike[str] | None = None,
        **options: Unpack[SessionLoadOptions],
    ) -> dict[Any, Any]:
        """Loads as `tilestone.load` does, with the session's group or comm.

        A session with rank, world_size and token has neither, so each rank loads alone.

        Args:
            wanted, path: as for `tilestone.load`.
            options: its other options.

        Returns:
            The same as `tilestone.load`.

        Raises:
            InvalidArgumentError: the session is closed, or an option is fixed by the session or
                unknown.
            Also everything that `tilestone.load` raises.
        """
        self._open()
        self._refuse(options)
        return load_with(wanted, path, comm=self._comm, **options)

    def close(self) -> None:
        """Releases everything that is kept. Calls after this one raise InvalidArgumentError.

        A second close() does nothing.
        """
        self._core = None

    def __enter__(self) -> Session:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
