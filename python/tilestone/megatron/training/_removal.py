"""Removal of a run's older checkpoints once newer ones exist.

A checkpoint is removed in two steps. First its directory is renamed to a hidden name, so that it
disappears as a whole; then the files below that name are removed. After a crash between the two,
the hidden files remain; the next removal in the directory removes them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from typing import List

from tilestone._errors import CheckpointError
from tilestone.megatron._files import sync_folder
from tilestone.megatron.training import _look, names

logger = logging.getLogger("tilestone.megatron")

_HIDDEN = re.compile(r"\.iter_[0-9]{7,}\.removed-[0-9a-f]{32}")

# Files that replace_file() has staged (tempfile's names); files of editors do not match.
_STAGED = re.compile(rf"\.{re.escape(names.TRACKER)}\.[a-z0-9_]{{8}}")

_STALE = 3600  # seconds; a younger file may be one that another job is about to rename


def hide(run_directory: str, iteration: int) -> None:
    """Makes the checkpoint of an iteration disappear; remove_hidden() then removes its files.

    A symbolic link is kept, and so is an unpublished checkpoint, which may be one that is being
    written. Both are logged, and so are failures.
    """
    path = names.get_checkpoint_name(run_directory, iteration, return_base_dir=True)
    if os.path.islink(path):
        logger.warning("Not removing %s: it is a symbolic link", path)
        return
    try:
        _look.check_is_published(path)
    except CheckpointError as problem:
        logger.warning("Not removing a checkpoint: %s", problem)
        return
    hidden = os.path.join(
        run_directory, f".{os.path.basename(path)}.removed-{uuid.uuid4().hex}"
    )
    try:
        os.rename(path, hidden)
        sync_folder(run_directory)
    except OSError as problem:
        logger.warning("Can't remove %s: %s", path, problem)
        return
    logger.info("Removed the checkpoint of iteration %d in %s", iteration, run_directory)


def remove_hidden(run_directory: str) -> None:
    """Removes the files of hidden checkpoints, and logs failures."""

    def log(function: object, path: str, problem: object) -> None:
        error = problem[1] if isinstance(problem, tuple) else problem
        if not isinstance(error, FileNotFoundError):
            logger.warning("Can't remove %s of a removed checkpoint: %s", path, error)

    try:
        found = sorted(os.listdir(run_directory))
    except OSError as problem:
        logger.warning("Can't remove hidden checkpoints in %s: %s", run_directory, problem)
        return
    for name in found:
        if _HIDDEN.fullmatch(name):
            shutil.rmtree(os.path.join(run_directory, name), onerror=log)


def remove_staged_trackers(run_directory: str) -> None:
    """Removes the tracker's staged files that killed saves have left, and logs failures.

    Raises:
        OSError: the directory can't be read.
    """
    for name in os.listdir(run_directory):
        if not _STAGED.fullmatch(name):
            continue
        path = os.path.join(run_directory, name)
        try:
            if time.time() - os.lstat(path).st_mtime > _STALE:
                os.unlink(path)
        except FileNotFoundError:
            continue  # another job has renamed it
        except OSError as problem:
            logger.warning("Can't remove %s, a leftover of a save: %s", path, problem)


def superseded(previous: tuple[int, bool] | None, iteration: int, interval: int) -> List[int]:
    """The iterations that need not be kept once a new checkpoint exists.

    Args:
        previous: what the tracker named before: (iteration, whether it is the release checkpoint);
            None: nothing readable.
        iteration: the new one. A newer one than that is kept: the run has gone back, and what it
            left there is not superseded.
        interval: multiples of it are never removed.
    """
    if previous is None or previous[1]:
        return []
    before = previous[0]
    return [before] if 0 < before < iteration and before % interval != 0 else []
