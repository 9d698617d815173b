"""Tilestone's exceptions: one class for each error code of the engine.

All derive from `CheckpointError`. A class that corresponds to a builtin exception also derives from
that one, so `except FileNotFoundError` and `except TimeoutError` work as usual. If a save or load
fails, every rank raises the same error.
"""

from __future__ import annotations

import builtins
import errno as _errno
import os
from collections.abc import Mapping


Advice = tuple[str, str, str, str]  # text before, option, its value, text after


def _setting(option: str, value: str) -> str:
    """An option of the engine as a Python keyword argument, with its value if there is one."""
    group, _, field = option.rpartition(".")
    if not value:
        return option
    if value in ("true", "false"):
        value = value.title()
    elif value.endswith(")"):  # a function of the package
        value = f"tilestone.{value}"
    else:
        value = f'"{value}"'
    return f"{group}={group.title()}({field}={value})" if group else f"{option}={value}"


def _printable(text: str) -> str:
    """Text that can't forge lines or control a terminal: names in it may come from files."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class CheckpointError(Exception):
    """The base class of all errors that Tilestone raises.

    Attributes:
        code: the engine's name for the kind of error, "not_found" for example.
        reason: what exactly happened, if a caller may act on it: "key_not_stored",
            "shape_differs", "checkpoint_exists", ... (`Reason` in error.h); otherwise "".
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
        message: str = "",
        *,
        reason: str = "",
        key: str = "",
        file: str = "",
        rank: int = -1,
        hint: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.key = key
        self.file = file
        self.rank = rank
        self.advice: list[Advice] = [(hint, "", "", "")] if hint else []
        self._own_words: Mapping[str, str | None] = {}
        self._system = os.strerror(errno) if errno else ""
        self.errno = self._usual_errno if errno is None else errno
        if isinstance(self, OSError):
            # For code that only knows OSError.
            said = self.message if self.errno is None else os.strerror(self.errno)
            for name, value in (("filename", file or None), ("strerror", said)):
                setattr(self, name, value)

    @property
    def hint(self) -> str:
        """What to try, or ""."""
        texts = []
        for before, option, value, after in self.advice:
            words = self._own_words.get(option, _setting(option, value))
            if words is not None:
                texts.append(before + words + after)
        return "; ".join(texts)

    def word_options(self, words: Mapping[str, str | None]) -> None:
        """Makes hints name options in another library's words; None leaves such a hint out."""
        self._own_words = words

    def add_key(self, key: str) -> None:
        """Sets the key if it is not set yet (called by the binding)."""
        self.key = self.key or key

    def add_rank(self, rank: int) -> None:
        """Sets the rank that failed if it is not set yet (called by the binding)."""
        self.rank = self.rank if self.rank >= 0 else rank

    def add_hint(self, hint: str) -> None:
        """Adds one more thing to try."""
        self.advice.append((hint, "", "", ""))

    def __str__(self) -> str:
        text = self.message
        if self._system not in text:
            text += f": {self._system}"
        text += f" (key {self.key})" if self.key else ""
        text += f" (file {self.file})" if self.file not in self.message else ""
        text += f" (rank {self.rank})" if self.rank >= 0 else ""
        text += f"; {self.hint}" if self.hint else ""
        return _printable(text)

    def __reduce__(self) -> tuple[object, ...]:
        # Launchers pass errors between processes; the keyword arguments are pickled as state.
        state = dict(self.__dict__, errno=self.errno)
        if isinstance(self, OSError):
            state |= {"filename": self.filename, "strerror": self.strerror}
        return (type(self), (self.message,), state)

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


def make_error(
    code: str,
    reason: str,
    message: str,
    key: str,
    file: str,
    rank: int,
    advice: list[Advice],
    errno: int,
) -> CheckpointError:
    """The exception for an error of the engine (called by the binding)."""
    kind = _CLASSES.get(code, InternalError)
    error = kind(message, reason=reason, key=key, file=file, rank=rank, errno=errno or None)
    error.advice = advice
    return error


def hint_for_unpicklable(item: object) -> str:
    """What to try with an object that can't be pickled."""
    kind = type(item)
    if kind.__module__ == "builtins":
        return "leave it out of the state, or keep what it stands for as plain values"
    return (
        "leave it out of the state, or say with "
        f"`tilestone.register_converter({kind.__qualname__}, ...)` what is saved in its place"
    )
