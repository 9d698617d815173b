"""Locks in a run's directory, by which jobs that share it keep out of each other's way.

They are files in the hidden directory `.tilestone` of the run's directory:

* `lock` is held while a job moves the tracker and takes older checkpoints away;
* `saving-iter_0000100` is held from before this checkpoint is written until the tracker names it.
  It is made and removed by who holds `lock`, so that nobody locks a file that is gone.

A lock goes with the process that holds it. Stock Megatron takes none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from tilestone import _core, _options
from tilestone._errors import (
    AlreadyExistsError,
    CheckpointError,
    TimeoutError,
    UnsupportedError,
)
from tilestone.megatron._stored import literal
from tilestone.megatron.strategies._together import Deadline

logger = logging.getLogger("tilestone.megatron")

_FOLDER = ".tilestone"
_LOCK = f"{_FOLDER}/lock"  # in a checkpoint's own directory: held while it is saved
_SAVING = "saving-"
_PAUSE = 0.02  # seconds
_SHARE = 0.8  # of a call's time; the rest is for what follows
_LAST = 5.0  # seconds to take a mark away


class RunLocks:
    """What one save holds in its run's directory, and what it sees of others. On one rank.

    Args:
        run_directory: of the run.
        name: the folder of the checkpoint that is saved.
    """

    def __init__(self, run_directory: str, name: str) -> None:
        self._run_directory = run_directory
        self._place = _options.directory(literal(run_directory))
        self._name = name
        self._mark: _core.NameLock | None = None

    def begin(self, deadline: Deadline) -> None:
        """Says to other jobs that the checkpoint is being saved, until end().

        Raises:
            AlreadyExistsError: another save of it is under way.
            TimeoutError: another job keeps the directory locked.
            StorageError: the directory can't be written.
        """
        with self.exclusive(deadline) as can_lock:
            if not can_lock:
                return
            self._mark = _core.try_lock(self._place, f"{_FOLDER}/{_SAVING}{self._name}")
        if self._mark is None:
            path = os.path.join(self._run_directory, self._name)
            raise AlreadyExistsError(
                f"another save to {path} is under way",
                file=path,
                hint="wait for it, or save elsewhere",
            )

    def end(self) -> None:
        """The checkpoint is not being saved any more; begin() need not have been called."""
        if self._mark is None:
            return
        try:
            with self.exclusive(Deadline(_LAST)):
                os.unlink(os.path.join(self._folder(), f"{_SAVING}{self._name}"))
        except (CheckpointError, OSError) as problem:
            logger.warning("The mark of a save stays in %s: %s", self._folder(), problem)
        self._mark.release()
        self._mark = None

    @contextlib.contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[bool]:
        """No other job moves the tracker or removes a checkpoint meanwhile.

        Returns:
            False: files can't be locked there; a warning says so.

        Raises:
            TimeoutError, StorageError: as begin().
        """
        held = None
        try:
            held = self._wait(deadline)
        except UnsupportedError as problem:
            logger.warning("Nothing keeps two jobs in a run's directory apart: %s", problem)
        try:
            yield held is not None
        finally:
            if held is not None:
                held.release()

    def _wait(self, deadline: Deadline) -> _core.NameLock:
        end = time.monotonic() + _SHARE * deadline.seconds()
        while (held := _core.try_lock(self._place, _LOCK)) is None:
            if time.monotonic() > end:
                path = os.path.join(self._run_directory, _LOCK)
                raise TimeoutError(f"another job keeps {path} locked", file=path)
            time.sleep(_PAUSE)
        return held

    def is_being_saved(self, name: str) -> bool:
        """Whether a job saves the checkpoint of a folder in the run's directory."""
        try:
            if _core.is_locked(self._place, f"{_FOLDER}/{_SAVING}{name}"):
                return True
            folder = os.path.join(self._run_directory, name)
            return _core.is_locked(_options.directory(literal(folder)), _LOCK)
        except UnsupportedError:
            return False

    def remove_dead_marks(self) -> None:
        """Removes marks of saves that were killed. For who is exclusive; what stays is logged."""
        try:
            for found in os.listdir(self._folder()):
                name = found.removeprefix(_SAVING)
                if name != found and not _core.is_locked(self._place, f"{_FOLDER}/{found}"):
                    os.unlink(os.path.join(self._folder(), found))
        except (CheckpointError, OSError) as problem:
            logger.warning("Marks of ended saves stay in %s: %s", self._folder(), problem)

    def _folder(self) -> str:
        return os.path.join(self._run_directory, _FOLDER)
