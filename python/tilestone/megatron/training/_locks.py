"""Locks in a run's directory, which keep jobs that share it from disturbing each other.

They are files in the hidden directory `.tilestone` of the run's directory:

* `lock` is held while a job moves the tracker and removes older checkpoints;
* `saving-iter_0000100` is held from before this checkpoint is written until the tracker names it.
  Only the holder of `lock` creates or removes it, so no job locks a file that has been removed.

A lock ends with the process that holds it. Stock Megatron takes no locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from tilestone import _core
from tilestone._errors import (
    AlreadyExistsError,
    CheckpointError,
    TimeoutError,
    UnsupportedError,
)
from tilestone._options import valid
from tilestone.megatron._stored import literal
from tilestone.megatron._ranks import Deadline

logger = logging.getLogger("tilestone.megatron")

_FOLDER = ".tilestone"
_LOCK = f"{_FOLDER}/lock"  # in a checkpoint's own directory: held while the checkpoint is saved
_SAVING = "saving-"
_PAUSE = 0.02  # seconds between attempts
_SHARE = 0.8  # part of a call's time for waiting; the rest is for the following steps
_LAST = 5.0  # seconds for removing a mark


class RunLocks:
    """The locks of one save in its run's directory, and a view of other jobs' locks. On one rank.

    Args:
        run_directory: the run's directory.
        name: name of the folder of the checkpoint that is saved.
    """

    def __init__(self, run_directory: str, name: str) -> None:
        self._run_directory = run_directory
        self._place = valid.directory(literal(run_directory))
        self._name = name
        self._mark: _core.NameLock | None = None

    def begin(self, deadline: Deadline) -> None:
        """Marks the checkpoint as being saved, until end().

        Raises:
            AlreadyExistsError: another save to it is running.
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
                f"another save to {path} is running",
                file=path,
                hint="wait for it to end, or save to another directory",
            )

    def end(self) -> None:
        """Removes the mark of begin(), if there is one."""
        if self._mark is None:
            return
        try:
            with self.exclusive(Deadline(_LAST)):
                os.unlink(os.path.join(self._folder(), f"{_SAVING}{self._name}"))
        except (CheckpointError, OSError) as problem:
            logger.warning("Can't remove the mark of a save in %s: %s", self._folder(), problem)
        self._mark.release()
        self._mark = None

    @contextlib.contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[bool]:
        """Keeps other jobs from moving the tracker or removing a checkpoint meanwhile.

        Yields:
            False if files can't be locked there; then a warning is logged.

        Raises:
            TimeoutError, StorageError: as begin().
        """
        held = None
        try:
            held = self._wait(deadline)
        except UnsupportedError as problem:
            logger.warning("Jobs that share a run's directory can't lock it: %s", problem)
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
        """Whether a job is saving the checkpoint of a folder in the run's directory."""
        try:
            if _core.is_locked(self._place, f"{_FOLDER}/{_SAVING}{name}"):
                return True
            folder = os.path.join(self._run_directory, name)
            return _core.is_locked(valid.directory(literal(folder)), _LOCK)
        except UnsupportedError:
            return False

    def remove_dead_marks(self) -> None:
        """Removes marks of killed saves, and logs failures. The caller must hold `lock`."""
        try:
            for found in os.listdir(self._folder()):
                name = found.removeprefix(_SAVING)
                if name != found and not _core.is_locked(self._place, f"{_FOLDER}/{found}"):
                    os.unlink(os.path.join(self._folder(), found))
        except (CheckpointError, OSError) as problem:
            logger.warning("Can't remove marks of ended saves in %s: %s", self._folder(), problem)

    def _folder(self) -> str:
        return os.path.join(self._run_directory, _FOLDER)
