"""Session: what a training run keeps from one save to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core
from tilestone._calls.async_save import AsyncSave, run_async_save
from tilestone._calls.collective import SaveCall, communicator, files_of
from tilestone._calls.save_load import load, run_save
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.values import AsyncSaveOptions, ByFiles
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._options.values import AsyncSaveKeywords, LoadKeywords, SaveKeywords


def _is_alone(by_files: Any, group: Any) -> bool:
    """Whether a session by files needs no group: its ByFiles says all of rank, size and token."""
    if by_files is None:
        return False
    if not isinstance(by_files, ByFiles):
        raise InvalidArgumentError(f"by_files must be a tilestone.ByFiles, not {by_files!r}")
    if by_files.number != 0:
        raise InvalidArgumentError("by_files.number: a session counts its saves itself")
    if by_files.rank is None and by_files.world_size is None and by_files.token is None:
        return False
    if group is not None:
        raise InvalidArgumentError(
            "rank, world_size and token of by_files come from the group: leave out one or the other"
        )
    files_of(by_files)
    return True


class Session:
    """Saves and loads as `tilestone.save` and `tilestone.load` do, and keeps what is used again.

    A session keeps threads and buffers. It keeps the plans of saves: while all ranks save the same
    keys, shapes, dtypes, boxes, replicas and objects as before, no rank sends its plan (or, by
    files, makes a new one); a change on any rank is noticed. It also keeps the token of saves by
    files and counts the saves to each path.

    One thread may use it at a time. As a context manager it is closed at the end of the block.

    Args:
        group: the ranks that create the session, and make every save and load, together: as for
            `save`.
        by_files: a `ByFiles`: saves go only through files. Without rank, world_size and token,
            rank 0 of the group creates the token and sends it to all ranks, which is the only
            message. With all three there is no message, and no group. `wait` and `torch_rank_local`
            hold for all saves; the session counts `number`.
        timeout: seconds for the message with the token; None for no limit.

    Raises:
        InvalidArgumentError: arguments contradict each other or are out of range.
        TimeoutError, RankFailedError: not all ranks of the group created the session.
    """

    def __init__(
        self,
        group: ProcessGroup | CommunicatorLike | None = None,
        *,
        by_files: ByFiles | None = None,
        timeout: float | None = _core.DEFAULT_TIMEOUT,
    ) -> None:
        self._core: _core.Session | None = None
        self._by_files = by_files
        self._group = group
        if _is_alone(by_files, group):
            assert by_files is not None
            valid.time_limit(timeout)  # not used here, but an invalid one is still refused
            files = by_files.made()
            self._core = _core.Session(files.rank, files.world_size, files.token)
            self._comm: CommunicatorLike = _core.solo()
        else:
            self._comm = communicator(group)
            self._core = _core.Session(
                self._comm, valid.limit_of(timeout), lambda: valid.time_limit(timeout)
            )

    def _open(self) -> _core.Session:
        """The engine's session."""
        if self._core is None:
            raise InvalidArgumentError("the session is closed")
        return self._core

    def _refuse(self, options: Mapping[str, object]) -> None:
        for name in ("group", "by_files"):
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

    def prepare(self, state: Mapping[Any, Any], **options: Unpack[AsyncSaveKeywords]) -> int:
        """Prepares the memory into which `async_save` copies such a state.

        Touching memory for the first time takes several times as long as the copy itself. After
        this call the first save stages as fast as the later ones. Nothing is written or sent, and
        no other rank takes part. The session owns the memory while no unfinished save uses it.

        Args:
            state: as for `tilestone.save`: the state that will be saved, or one with the same
                structure.
            options: the options of these saves, except those fixed by the session. Of those that
                only `async_save` has, max_staged_bytes matters.

        Returns:
            The size of the memory, in bytes: what this rank wrote when the session last saved a
            state of this structure, otherwise what it would write in a save by files; at most
            max_staged_bytes.

        Raises:
            InvalidArgumentError: the session is closed, an option is fixed by the session or
                unknown, or the state can't be saved.
            StorageError: there is not enough memory.
        """
        who = self._who(options)
        with contextlib.ExitStack() as until_the_end:
            call = SaveCall(
                state, os.curdir, until_the_end, kind=AsyncSaveOptions, **who, **options
            )
            most = checked("save", AsyncSaveOptions, call.given).max_staged_bytes
            return self._open().prepare(call.prepare, most)

    def _difference(
        self, state: Any, path: str | os.PathLike[str], **options: Unpack[AsyncSaveKeywords]
    ) -> str:
        """What differs first between the state and the checkpoint at the path; "": nothing does.

        One pass over the state, on every rank; nothing is written. Raises what `save` raises before
        it begins.
        """
        who = self._who(options)
        with contextlib.ExitStack() as until_the_end:
            call = SaveCall(state, path, until_the_end, kind=AsyncSaveOptions, **who, **options)
            return _core.difference_from_saved(
                call.prepare, call.location, self._open(), call.limit
            )

    def save(
        self,
        state: Mapping[Any, Any],
        path: str | os.PathLike[str],
        **options: Unpack[SaveKeywords],
    ) -> _core.SaveResult:
        """Saves as `tilestone.save` does.

        By files, the first saves of all ranks to a path are one save, their second
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
        return run_save(state, path, **self._next_save(path, options), **options)

    def async_save(
        self,
        state: Mapping[Any, Any],
        path: str | os.PathLike[str],
        **options: Unpack[AsyncSaveKeywords],
    ) -> AsyncSave:
        """Saves as `tilestone.async_save` does, with the session's memory.

        One such save of the session is in flight at a time (`in_flight`). Its other saves wait for
        it, and raise or log its failure if nobody has asked for its result. By files this counts as
        a save to the path.

        Args:
            state, path: as for `tilestone.save`.
            options: the options of `tilestone.async_save`, except those fixed by the session.

        Returns:
            The save, which may outlive the session.

        Raises:
            InvalidArgumentError: the session is closed, or an option is fixed by the session or
                unknown.
            Also everything that `tilestone.async_save` raises.
        """
        return run_async_save(state, path, **self._next_save(path, options), **options)

    def _who(self, options: Mapping[str, object]) -> dict[str, Any]:
        """The arguments that say who takes part in a save. `options`: the caller's options."""
        session = self._open()
        self._refuse(options)
        if self._by_files is None:
            return {"group": self._group, "session": session}
        files = dataclasses.replace(
            self._by_files, rank=session.rank, world_size=session.size, token=session.token
        )
        return {"group": self._group, "session": session, "by_files": files}

    def _next_save(
        self, path: str | os.PathLike[str], options: Mapping[str, object]
    ) -> dict[str, Any]:
        """The same for the next save to a path; by files, it is counted."""
        if self._by_files is None:
            return self._who(options)
        # First, because a save whose options are refused counts too.
        number = self._open().by_files(valid.directory(path)).number
        who = self._who(options)
        who["by_files"] = dataclasses.replace(who["by_files"], number=number)
        return who

    def load(
        self,
        wanted: Mapping[Any, Any] | str | os.PathLike[str],
        path: str | os.PathLike[str] | None = None,
        **options: Unpack[LoadKeywords],
    ) -> dict[Any, Any]:
        """Loads as `tilestone.load` does, with the session's group.

        A session whose ByFiles has a rank has none, so each rank loads alone.

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
        return load(wanted, path, group=self._comm, **options)

    def close(self) -> None:
        """Releases everything that is kept. Calls after this one raise InvalidArgumentError.

        It does not wait for a save in the background, which goes on: `AsyncSave.result` does. A
        second close() does nothing.
        """
        self._core = None

    def __repr__(self) -> str:
        if self._core is None:
            return "Session(closed)"
        return f"Session(rank {self.rank} of {self.world_size}{', by files' * bool(self._by_files)})"

    def __enter__(self) -> Session:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
