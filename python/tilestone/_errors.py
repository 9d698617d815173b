"""The exceptions of Tilestone, one class for each code of the engine's one error type.

All derive from `CheckpointError`; those that mean what a builtin exception means derive from it
too, so `except FileNotFoundError` and `except TimeoutError` work as everywhere in Python. On a
failed save or load every rank raises the same error.
"""

from __future__ import annotations

import builtins


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
    """

    code = "internal"
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
        self.text = text
        self.message = text if message is None else message
        self.key = key
        self.file = file
        self.rank = rank
        self.hint = hint
        self.errno = errno

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments travel as state: errors cross process borders in launchers.
        return (type(self), (self.text,), dict(self.__dict__, errno=self.errno))

    def __setstate__(self, state: dict[str, object] | None) -> None:
        for name, value in (state or {}).items():
            setattr(self, name, value)


class InvalidArgumentError(CheckpointError, ValueError):
    """The caller passed something that can't be meant."""

    code = "invalid_argument"


class NotFoundError(CheckpointError, FileNotFoundError, KeyError):
    """No such checkpoint, key or file."""

    code = "not_found"


class AlreadyExistsError(CheckpointError, FileExistsError):
    """A valid checkpoint stands here and `overwrite` was not asked for."""

    code = "already_exists"


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
    """Content that a well-meaning writer does not produce. It was refused, not run."""

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


def make_error(
    code: str, text: str, message: str, key: str, file: str, rank: int, hint: str, errno: int
) -> CheckpointError:
    """The exception for an error of the engine (called by the binding)."""
    kind = _CLASSES.get(code, InternalError)
    return kind(
        text, message=message, key=key, file=file, rank=rank, hint=hint, errno=errno or None
    )
