"""The exceptions of Tilestone, one class for each code of the engine's one error type.

All derive from `CheckpointError`; those that mean what a builtin exception means derive from it
too, so `except FileNotFoundError` and `except TimeoutError` work as everywhere in Python. On a
failed save or load every rank raises the same error.
"""

from __future__ import annotations

import builtins
import errno as _errno
import os
import re


class CheckpointError(Exception):
    """Something failed.

    Attributes:
        code: the engine's name of the reason, "not_found" for example.
        message: what failed, with what was expected and what was found.
        key: the state dict key concerned, or "".
        file: the file concerned, or "".
        rank: the rank that failed, or -1 where that is not known.
        hint: what to try, or "".
        errno: the operating system's error number, or None.

    Those that are an OSError have its `strerror` and `filename` (or None) too.
    """

    code = "internal"
    _usual_errno: int | None = None
    message: str
    key: str
    file: str
    rank: int
    hint: str

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
        self.text = "" if message is None else text  # the engine's whole wording
        self.message = text if message is None else message
        self.key = key
        self.file = file
        self.rank = rank
        self.hint = hint
        self.errno = self._usual_errno if errno is None else errno
        if isinstance(self, OSError):
            # What code that knows only OSError looks at.
            reason = self.message if self.errno is None else os.strerror(self.errno)
            for name, value in (("filename", file or None), ("strerror", reason)):
                setattr(self, name, value)

    def add_key(self, key: str) -> None:
        """Says which key was concerned, where that is not known yet (called by the binding)."""
        if not self.key:
            self.key = key
            self.text += f" (key {key})" if self.text and key else ""

    def add_rank(self, rank: int) -> None:
        """Says which rank failed, where that is not known yet (called by the binding)."""
        if self.rank < 0:
            self.rank = rank
            self.text += f" (rank {rank})" if self.text else ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        key = f" (key {self.key})" if self.key else ""
        rank = f" (rank {self.rank})" if self.rank >= 0 else ""
        return self.message + key + rank + (f"; {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments travel as state: errors cross process borders in launchers.
        state = dict(self.__dict__, errno=self.errno)
        if isinstance(self, OSError):
            state |= {"filename": self.filename, "strerror": self.strerror}
        return (type(self), (str(self),), state)

    def __setstate__(self, state: dict[str, object] | None) -> None:
        for name, value in (state or {}).items():
            setattr(self, name, value)


class InvalidArgumentError(CheckpointError, ValueError):
    """The caller passed something that can't be meant."""

    code = "invalid_argument"


class NotFoundError(CheckpointError, FileNotFoundError, KeyError):
    """No such checkpoint, key or file."""

    code = "not_found"
    _usual_errno = _errno.ENOENT


class AlreadyExistsError(CheckpointError, FileExistsError):
    """A valid checkpoint stands here and `overwrite` was not asked for."""

    code = "already_exists"
    _usual_errno = _errno.EEXIST


class MismatchError(CheckpointError, ValueError):
    """A dtype or shape differs between ranks, or between state and checkpoint."""

    code = "mismatch"


class CoverageError(CheckpointError, ValueError):
    """An element is written by nobody, written twice, or not to be found."""

    code = "coverage"


class CorruptError(CheckpointError):
    """Bytes of a checkpoint are damaged, truncated or contradict one another."""

    code = "corrupt"


class UnsafeError(CheckpointError):
    """Content that looks like an attack, not like damage. It was refused, not run."""

    code = "unsafe"


class UnsupportedError(CheckpointError, NotImplementedError):
    """Well-formed, but this version of Tilestone can't do it."""

    code = "unsupported"


class StorageError(CheckpointError, OSError):
    """The operating system said no; `errno` says why."""

    code = "io"


class TimeoutError(CheckpointError, builtins.TimeoutError):
    """A deadline passed."""

    code = "timeout"
    _usual_errno = _errno.ETIMEDOUT


class RankFailedError(CheckpointError, ConnectionError):
    """Another rank failed or vanished; `rank` says which, where that is known."""

    code = "rank_failed"


class InternalError(CheckpointError, RuntimeError):
    """A defect of Tilestone."""

    code = "internal"


class InterruptedError(CheckpointError):
    """The caller of another rank stopped it (Ctrl-C), or code of that caller raised.

    The rank that was stopped raises what stopped it: KeyboardInterrupt, the callback's exception.
    """

    code = "interrupted"


_CLASSES: dict[str, type[CheckpointError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        MismatchError,
        CoverageError,
        CorruptError,
        UnsafeError,
        UnsupportedError,
        StorageError,
        TimeoutError,
        RankFailedError,
        InternalError,
        InterruptedError,
    )
}


for _kind in (CheckpointError, *_CLASSES.values()):
    _kind.__module__ = "tilestone"  # where users find it


def _as_in_python(text: str) -> str:
    """Hints of the engine name an option as in C++: `overwrite = true`."""
    return re.sub(r"\b([a-z_]+) = true\b", r"\1=True", text)


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
