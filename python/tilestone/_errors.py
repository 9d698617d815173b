"""Tilestone's exceptions: one class for each error code of the engine.

All derive from `CheckpointError`. A class that corresponds to a builtin exception also derives from
that one, so `except FileNotFoundError` and `except TimeoutError` work as usual. If a save or load
fails, every rank raises the same error.
"""

from __future__ import annotations

import builtins
import errno as _errno
import os
import re


class CheckpointError(Exception):
    """The base class of all errors that Tilestone raises.

    Attributes:
        code: the engine's name for the kind of error, "not_found" for example.
        message: what failed, what was expected and what was found.
        key: the key of the state dict, or "".
        file: the file, or "".
        rank: the rank that failed, or -1 if that is not known.
        hint: what to try, or "".
        errno: the operating system's error number, or None.

    Subclasses of OSError also have its `strerror` and its `filename` (which may be None).
    """

    code = "internal"
    _usual_errno: int | None = None

    def __init__(
        self,
        text: str = "",
        *,
        message: str | None = None,
        key: str = "",
        file: str = "",
        rank: int = -1,
        hint: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__(text)
        self.text = "" if message is None else text  # the engine's complete text
        self.message = text if message is None else message
        self.key = key
        self.file = file
        self.rank = rank
        self.hint = hint
        self.errno = self._usual_errno if errno is None else errno
        if isinstance(self, OSError):
            # For code that only knows OSError.
            reason = self.message if self.errno is None else os.strerror(self.errno)
            for name, value in (("filename", file or None), ("strerror", reason)):
                setattr(self, name, value)

    def add_key(self, key: str) -> None:
        """Sets the key if it is not set yet (called by the binding)."""
        if not self.key:
            self.key = key
            self.text += f" (key {key})" if self.text and key else ""

    def add_rank(self, rank: int) -> None:
        """Sets the rank that failed if it is not set yet (called by the binding)."""
        if self.rank < 0:
            self.rank = rank
            self.text += f" (rank {rank})" if self.text else ""

    def add_hint(self, hint: str) -> None:
        """Adds what to try to the hint."""
        self.hint += ("; " if self.hint else "") + hint
        self.text += f"; {hint}" if self.text else ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        reason = os.strerror(self.errno) if self.errno and self._usual_errno is None else ""
        reason = "" if reason in self.message else f": {reason}"
        key = f" (key {self.key})" if self.key else ""
        file = "" if self.file in self.message else f" (file {self.file})"
        rank = f" (rank {self.rank})" if self.rank >= 0 else ""
        return self.message + reason + key + file + rank + (f"; {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[object, ...]:
        # Launchers pass errors between processes; the keyword arguments are pickled as state.
        state = dict(self.__dict__, errno=self.errno)
        if isinstance(self, OSError):
            state |= {"filename": self.filename, "strerror": self.strerror}
        return (type(self), (str(self),), state)

    def __setstate__(self, state: dict[str, object] | None) -> None:
        for name, value in (state or {}).items():
            setattr(self, name, value)


class InvalidArgumentError(CheckpointError, ValueError):
    """The caller passed an invalid argument."""

    code = "invalid_argument"


class NotFoundError(CheckpointError, FileNotFoundError, KeyError):
    """There is no checkpoint, key or file of this name.

    If a checkpoint exists but one of its data files is missing, that is a CorruptError.
    """

    code = "not_found"
    _usual_errno = _errno.ENOENT


class AlreadyExistsError(CheckpointError, FileExistsError):
    """There is already a valid checkpoint, and `overwrite` is False."""

    code = "already_exists"
    _usual_errno = _errno.EEXIST


class MismatchError(CheckpointError, ValueError):
    """A dtype or shape differs between ranks, or between state and checkpoint."""

    code = "mismatch"


class CoverageError(CheckpointError, ValueError):
    """An element is written by no rank, written twice, or missing from the checkpoint."""

    code = "coverage"


class CorruptError(CheckpointError):
    """Files of a checkpoint are damaged, truncated or missing, or contradict each other."""

    code = "corrupt"


class UnsafeError(CheckpointError):
    """The content looks like an attack, not like damage. It was refused and not executed."""

    code = "unsafe"


class UnsupportedError(CheckpointError, NotImplementedError):
    """The request or file is valid, but this version of Tilestone does not support it."""

    code = "unsupported"


class StorageError(CheckpointError, OSError):
    """The operating system reported an error; `errno` says which."""

    code = "io"


class TimeoutError(CheckpointError, builtins.TimeoutError):
    """A deadline passed."""

    code = "timeout"
    _usual_errno = _errno.ETIMEDOUT


class RankFailedError(CheckpointError, ConnectionError):
    """Another rank failed or is gone; `rank` says which one, if that is known."""

    code = "rank_failed"


class InternalError(CheckpointError, RuntimeError):
    """A bug in Tilestone."""

    code = "internal"


class InterruptedError(CheckpointError):
    """Another rank was stopped by its caller (Ctrl-C), or its caller's code raised an exception.

    The rank that was stopped raises the cause itself: KeyboardInterrupt, or the exception of a
    callback.
    """

    code = "interrupted"


_CLASSES = {kind.code: kind for kind in CheckpointError.__subclasses__()}

for _kind in (CheckpointError, *_CLASSES.values()):
    _kind.__module__ = "tilestone"  # the public name


def _as_in_python(text: str) -> str:
    """Rewrites options in the engine's hints, `overwrite = true`, as Python keyword arguments."""
    text = re.sub(r"\bdifferences\.([a-z_]+) = kReport\b", r'differences=Differences(\1="report")', text)
    text = re.sub(r"\b([a-z_]+) = true\b", r"\1=True", text)
    return re.sub(r"\b([a-z_]+) = false\b", r"\1=False", text)


def make_error(
    code: str, text: str, message: str, key: str, file: str, rank: int, hint: str, errno: int
) -> CheckpointError:
    """The exception for an error of the engine (called by the binding)."""
    kind = _CLASSES.get(code, InternalError)
    if hint and text.endswith(hint):
        text, hint = text.removesuffix(hint) + _as_in_python(hint), _as_in_python(hint)
    return kind(
        text, message=message, key=key, file=file, rank=rank, hint=hint, errno=errno or None
    )


def hint_for_unpicklable(item: object) -> str:
    """What to try with an object that can't be pickled."""
    kind = type(item)
    if kind.__module__ == "builtins":
        return "leave it out of the state, or keep what it stands for as plain values"
    return (
        "leave it out of the state, or say with "
        f"`tilestone.register_converter({kind.__qualname__}, ...)` what is saved in its place"
    )
