"""Lists, publishes and abandons unpublished saves, which are made without a communicator."""

from __future__ import annotations

import os

from tilestone import _core
from tilestone._options import valid


def unpublished(path: str | os.PathLike[str], *, watch: float = 0) -> list[_core.UnpublishedSave]:
    """The unpublished saves by files at a location.

    Nothing is changed. str() of each says what is missing and what can be done.

    Args:
        path: the directory of the saves.
        watch: for how many seconds, 0 or more, to watch whether their ranks are still working. A
            working rank changes a file every five seconds; if nothing changes for a minute, no rank
            is working. With 0, `UnpublishedSave.alive` is None.

    Returns:
        The saves in the order of their save_id, each with save_id, world_size, format, dialect,
        missing_count and missing (ranks that have not written; the lowest 16), failure (an error
        that a rank recorded, that of reports that contradict each other, or ""), complete,
        abandoned and alive. A save with damaged files is listed too. Its str() says what is damaged
        and what can be done. Empty if there is no directory.

    Raises:
        InvalidArgumentError: `watch` is not a number of seconds.
        StorageError: a file could not be read.
    """
    return _core.unpublished(valid.directory(path), valid.seconds("watch", watch))


def publish(
    path: str | os.PathLike[str],
    save_id: str | None = None,
    *,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    threads: int = 0,
) -> str:
    """Publishes a save by files to which all ranks have written.

    Normally the last rank to write does this. Use this function if the publisher has died. Any
    program may call it, also several at the same time: the checkpoint is the same, byte for byte.

    A rank-local checkpoint (torch_rank_local, or torch's use_collectives=False) becomes an ordinary
    one: `.metadata` names each replica once, the data files do not change, and the ranks' metadata
    files are removed. If torch saved it, its data is read once and it gets a new save id; nothing
    may save to the directory meanwhile. Replicas that differ raise MismatchError with their key,
    and a missing or damaged rank or file raises CorruptError; the directory is then not changed.

    Args:
        path: the directory of the save.
        save_id: which save to publish; needed if several are unpublished there.
        timeout: seconds, more than 0; None for no limit.
        threads: number of threads; 0: as many as the machine has, at most 8.

    Returns:
        The save id.

    Raises:
        NotFoundError: there is no unpublished save, or not this one.
        InvalidArgumentError: there are several and save_id is None, or a number is out of range.
        RankFailedError: the ranks named in the error have not written, or the save was abandoned.
        AlreadyExistsError: there is another checkpoint.
        MismatchError, CoverageError: the ranks' states contradict each other.
        CorruptError, UnsupportedError: for a rank-local checkpoint: it is damaged, or has
            compressed items.
        StorageError, TimeoutError: it could not be written.
    """
    chosen = "" if save_id is None else valid.word("save_id", save_id)
    return _core.publish(
        valid.directory(path),
        chosen,
        valid.seconds("timeout", timeout),
        valid.whole("threads", threads),
    )


def abandon(
    path: str | os.PathLike[str], save_id: str | None = None, *, period: float = 60
) -> str:
    """Ends a save by files that no rank will complete, so that `gc` can remove it.

    The save is first watched for a period, and nothing is done if any of its files changes. After
    this returns, the save can never be published, and a rank of it that is still running fails.

    Args:
        path: the directory of the save.
        save_id: which save to end; needed if several are unpublished there.
        period: seconds during which none of its files may change. Less than the default of one
            minute is only safe if all its ranks are known to be dead.

    Returns:
        The save id.

    Raises:
        NotFoundError: there is no unpublished save, or not this one.
        InvalidArgumentError: there are several and save_id is None, or `period` is not a number of
            seconds.
        AlreadyExistsError: one of its ranks is working, or it is being published.
        UnsupportedError: all its ranks have written and it can be published: use `publish`.
    """
    chosen = "" if save_id is None else valid.word("save_id", save_id)
    return _core.abandon(valid.directory(path), chosen, valid.seconds("period", period))
