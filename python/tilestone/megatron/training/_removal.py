"""Older checkpoints of a run, removed once newer ones stand.

A checkpoint is removed in two steps: its directory is renamed to a hidden name, which makes it
vanish as a whole, and the files below that name are removed. A crash between the two leaves hidden
files, which the next removal in the directory takes away.
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


# As tempfile names the files that replace_file() writes; not those of an editor.
_STAGED = re.compile(rf"\.{re.escape(names.TRACKER)}\.[a-z0-9_]{{8}}")

_STALE = 3600  # seconds; a younger one may be that of another job, about to take its place


def hide(run_directory: str, iteration: int) -> None:
    """Makes the checkpoint of an iteration vanish; remove_hidden() removes its files.

    A symbolic link stays, and so does what is no published checkpoint: it may be one that is being
    written. Both are logged, and so is what can't be removed.
    """
    path = names.get_checkpoint_name(run_directory, iteration, return_base_dir=True)
    if os.path.islink(path):
        logger.warning("%s stays: it is a symbolic link", path)
        return
    try:
        _look.check_is_published(path)
    except CheckpointError as problem:
        logger.warning("Not removed: %s", problem)
        return
    hidden = os.path.join(
        run_directory, f".{os.path.basename(path)}.removed-{uuid.uuid4().hex}"
    )
    try:
        os.rename(path, hidden)
        sync_folder(run_directory)
    except OSError as problem:
        logger.warning("%s stays, it can't be removed: %s", path, problem)
        return
    logger.info("The checkpoint of iteration %d in %s is removed", iteration, run_directory)


def remove_hidden(run_directory: str) -> None:
    """Removes the files of checkpoints that vanished; what can't be removed is logged."""

    def log(function: object, path: str, problem: object) -> None:
        error = problem[1] if isinstance(problem, tuple) else problem
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s, of a removed checkpoint, stays: %s", path, error)

    try:
        found = sorted(os.listdir(run_directory))
    except OSError as problem:
        logger.warning("Removed checkpoints in %s keep their files: %s", run_directory, problem)
        return
    for name in found:
        if _HIDDEN.fullmatch(name):
            shutil.rmtree(os.path.join(run_directory, name), onerror=log)


def remove_staged_trackers(run_directory: str) -> None:
    """Removes what saves that were killed have left beside the tracker; what stays is logged.

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
            continue  # another's, which has taken its place
        except OSError as problem:
            logger.warning("%s, which a save has left, stays: %s", path, problem)


def superseded(previous: tuple[int, bool] | None, iteration: int, interval: int) -> List[int]:
    """The iterations that need not be kept once a new one stands.

    Args:
        previous: what the tracker said before: (iteration, whether it is the release checkpoint);
            None: nothing that could be read.
        iteration: the new one. A newer one than that stays: the run has gone back, and nothing of
            what it left behind is superseded.
        interval: multiples of it are kept for good.
    """
    if previous is None or previous[1]:
        return []
    before = previous[0]
    return [before] if 0 < before < iteration and before % interval != 0 else []
