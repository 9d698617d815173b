"""Saves without a communicator that are no checkpoint yet: looking at them, and ending them."""

from __future__ import annotations

import os

from tilestone import _core, _options


def unpublished(path: str | os.PathLike[str], *, watch: float = 0) -> list[_core.UnpublishedSave]:
    """The saves with coordination="files" that have written to a location and are no checkpoint.

    Nothing is changed. As text, each says what is missing and what can be done.

    Args:
        path: the directory that was saved to.
        watch: seconds, 0 or more: for how long it is looked whether their ranks still work. A rank
            that works shows it every five seconds; a minute in which nothing changes says that none
            does. Without it `UnpublishedSave.alive` is None.

    Returns:
        Each with its save_id, world_size, format, dialect, missing_count and missing (ranks that
        have not written; the lowest 16), failure (an error that a rank has left, or ""), complete,
        abandoned, and alive; by save_id. None where there is no directory.

    Raises:
        CorruptError: a file of such a save is damaged.
        InvalidArgumentError: `watch` is no number of seconds.
    """
    return _core.unpublished(_options.directory(path), _options.seconds("watch", watch))


def publish(
    path: str | os.PathLike[str],
    save_id: str | None = None,
    *,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    threads: int = 0,
) -> str:
    """Publishes a save with coordination="files" of which all ranks have written.

    The last rank to write does this; here is the same for a save whose publisher has died. Any
    program may, and several at a time: the checkpoint is the same, byte for byte.

    A rank-local checkpoint (torch_rank_local, or torch's use_collectives=False) becomes an ordinary
    one: `.metadata` names each replica once, data files stay as they are, and the ranks' metadata
    files go. What torch has saved so is read once for that, must not be saved to meanwhile, and
    gets a new save id. Replicas that differ are a MismatchError with their key, and a rank or file
    that is missing or damaged is a CorruptError: the directory then stays as it was.

    Args:
        path: the directory that was saved to.
        save_id: which save, where several are unpublished there.
        timeout: seconds, more than 0; None for no limit.
        threads: that work; 0: as many as the machine has, at most 8.

    Returns:
        The save id.

    Raises:
        NotFoundError: no save is unpublished there, or not this one.
        InvalidArgumentError: there are several, and save_id is None; a number out of range.
        RankFailedError: ranks have not written, whom the error names; or it was abandoned.
        AlreadyExistsError: another checkpoint stands there.
        MismatchError, CoverageError: the ranks' states contradict each other.
        CorruptError, UnsupportedError: of a rank-local checkpoint: it is damaged, or has compressed
            items.
        StorageError, TimeoutError: it could not be written.
    """
    chosen = "" if save_id is None else _options.word("save_id", save_id)
    return _core.publish(
        _options.directory(path),
        chosen,
        _options.seconds("timeout", timeout),
        _options.whole("threads", threads),
    )


def abandon(
    path: str | os.PathLike[str], save_id: str | None = None, *, period: float = 60
) -> str:
    """Ends a save with coordination="files" that nobody will complete, so that `gc` can remove it.

    It is watched for a period first, and left alone if anything of it changes. Once this returns
    the save can never be published; a rank of it that still lives fails.

    Args:
        path: the directory that was saved to.
        save_id: which save, where several are unpublished there.
        period: seconds for which nothing of it must change. Less than the minute that is the
            default is safe only where all its ranks are known to be dead.

    Returns:
        The save id.

    Raises:
        NotFoundError: no save is unpublished there, or not this one.
        InvalidArgumentError: there are several, and save_id is None; `period` is no such number.
        AlreadyExistsError: a rank of it works, or it is being published.
        UnsupportedError: all its ranks have written: `publish` it.
    """
    chosen = "" if save_id is None else _options.word("save_id", save_id)
    return _core.abandon(_options.directory(path), chosen, _options.seconds("period", period))
