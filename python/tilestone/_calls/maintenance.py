"""What is done with checkpoints beside saves and loads: conversion, repair, cleaning, publication."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.progress import ProgressCallback, reporting
from tilestone._options.rename import Rename, renaming
from tilestone._options.values import OpenOptions, Reading, Resources


def _texts(option: str, given: Iterable[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise InvalidArgumentError(f"{option} must be strings, not {text!r}")
    return texts


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str = "",
    dialect: str = "",
    keys: Iterable[str] = (),
    only: str = "",
    rename: Rename | None = None,
    cast: Any = None,
    optimizer: str = "",
    layout: str | os.PathLike[str] | None = None,
    shard_size: int = 0,
    dry_run: bool = False,
    reading: Reading = Reading(),
    resources: Resources = Resources(),
    progress: bool | ProgressCallback = False,
) -> _core.ConvertResult:
    """Copies a checkpoint into another format or dialect, or a part of it, under other keys.

    `tilestone convert` does the same. The tensors are read once and streamed: memory is
    `resources.buffer_bytes` and 64 MiB, whatever the size of the checkpoint. Everything is checked
    before anything is written. Until the new checkpoint is complete, the target does not exist.

    Args:
        source: a checkpoint, a folder of safetensors files (Hugging Face's too), one such file, a
            folder of torch_checkpointing, or a file of `torch.save`.
        target: the directory of the new checkpoint, or a file: NAME.safetensors, NAME.pt, NAME.pth. It
            must not exist.
        format: "torch_dist", "zarr", "safetensors" (one file if the target's name ends with
            .safetensors, otherwise a folder), "torch_checkpointing" (the folder that this package
            loads), or "torch_save" (one file). By default "torch_save" if
            the target's name ends with .pt or .pth, "safetensors" if it ends with .safetensors or for
            a source in torch_dist or zarr, otherwise "torch_dist".
        dialect: "pytorch" or "megatron"; by default the source's.
        keys: shell-style patterns: only matching keys of the source are copied.
        only: the part of the tree to copy, which becomes the whole: with "model", "model.w" becomes
            "w". In Megatron-Core's dialect, "model" selects all tensors but the optimizer's.
        rename: a function from key to new key, such as `tilestone.strip_prefix("module.")`; or pairs
            (regular expression, replacement), of which the first one that is found in a key replaces
            what it finds ("\\1" is a group). An empty new key leaves the tensor out.
        cast: the dtype, by its name or torch's own, to which tensors of float16, bfloat16, float32 and float64 are converted.
        optimizer: "fully_reshardable": the states of Megatron-Core's distributed optimizer that are
            stored in buckets (dp_reshardable, dp_zero_gather_scatter) become a tensor for each
            parameter, which loads into any layout, with the same values.
        layout: a file of `tilestone.megatron.distributed_optimizer.write_layouts`, which says where
            each parameter is in the buckets; implies `optimizer`. None: the checkpoint's own.
        shard_size: the bytes of tensors in one safetensors file; 0: one file.
        dry_run: check and list everything, but write nothing.
        reading, resources: as for `open` and `save`.
        progress: True shows a bar on a terminal; a function is called with `Progress`.

    Returns:
        The new keys with their keys in the source, dtypes and files; the number of keys left out.

    Raises:
        InvalidArgumentError: the new format can't hold a tensor or object, which `key` names; two
            keys get the same name; nothing is selected, or a pattern matches no key; or the layout
            of an optimizer's buckets is not known.
        MismatchError: the layout is that of another model; `key` is the first parameter that does
            not fit.
        UnsupportedError: a dtype can't be converted to another.
        AlreadyExistsError: something is at the target.
        NotFoundError, CorruptError, UnsafeError: as for `open`.
    """
    with reporting(valid.sink("progress", progress), "write") as sink:
        given = checked("convert", OpenOptions, {"reading": reading, "resources": resources})
        filled = given.fill(_core.OpenOptions())
        options = _core.ConvertOptions()
        options.reading = filled.reading
        options.resources = filled.resources
        options.format = valid.word("format", format) if format else ""
        options.dialect = valid.word("dialect", dialect) if dialect else ""
        options.keys = _texts("keys", keys)
        options.only = valid.word("only", only) if only else ""
        if cast is not None:
            options.cast = str(cast).removeprefix("torch.")
        options.optimizer = valid.word("optimizer", optimizer) if optimizer else ""
        options.layout_file = "" if layout is None else os.fsdecode(layout)
        options.shard_bytes = valid.whole("shard_size", shard_size, 64)
        options.dry_run = valid.flag("dry_run", dry_run)
        options.rename_by = renaming("rename", rename)
        return _core.convert(valid.directory(source), valid.directory(target), options, sink)


def gc(
    path: str | os.PathLike[str],
    *,
    delete: bool = False,
    force: bool = False,
    follow_links: bool = False,
) -> list[_core.Leftover]:
    """Lists the leftovers of failed or interrupted saves at a location, and can delete them.

    A leftover is a file whose name only Tilestone gives (it contains the id of its save). A note in
    `.tilestone` says that a save created it there, and the checkpoint at the location, if there is
    one, does not need it. The next save to the location removes leftovers too. Files without a note
    may have been copied there: they are kept, and the log names their save.

    A save that replaces a checkpoint as a whole (`format="zarr"`, or over a checkpoint in
    Megatron-Core's dialect) works in a directory next to the location, `.NAME.tilestone-SAVE_ID`.
    If that save is dead, the directory is listed as `../.NAME.tilestone-SAVE_ID`.

    Args:
        path: the directory of the saves.
        delete: remove the leftovers. Nothing else is touched, and no save can begin there
            meanwhile. Without it nothing is changed or locked, and saves can go on.
        force: also treat as leftovers files without a note, and the files of a checkpoint that has
            only lost its hidden files (`cp dir/*` does not copy them).
        follow_links: read the files that describe the checkpoint through links, as for `open`. If
            a leftover is a link, the link itself is removed, never its target.

    Returns:
        The leftovers, each with its name, its size in bytes, what it is and why it is not needed.

    Raises:
        NotFoundError: the location has no files.
        AlreadyExistsError: a save is running there.
        CorruptError, UnsafeError: there is a checkpoint that can't be read, so it is not known
            which files it needs; or it has only lost its hidden files, and force is False.
        StorageError: a file could not be removed; the other leftovers are removed.
    """
    return _core.leftovers(
        valid.directory(path),
        valid.flag("delete", delete),
        valid.flag("force", force),
        valid.flag("follow_links", follow_links),
    )


def repair(
    path: str | os.PathLike[str],
    *,
    reading: Reading = Reading(),
    resources: Resources = Resources(),
    progress: bool | ProgressCallback = False,
) -> _core.RepairReport:
    """Repairs damaged items of a checkpoint from other files that hold them intact.

    `tilestone verify --repair` does the same. The other files are those with local copies (`save`
    with LocalCopies); a damaged copy is repaired from the shard's own item. A damaged file is
    replaced as a whole, in one step, by a file with the checksums that the save recorded. So at any
    moment the file is either as before or repaired. In the new file the bytes between items are
    zeros, and there are no bytes after its end. A file that is missing or too short is rewritten if
    everything that it should hold is intact, in the file itself or elsewhere. Otherwise it is not
    changed, and its damage in `now` names the keys that are intact nowhere. If nothing is damaged,
    nothing is written.

    Args:
        path: the checkpoint's directory. One process repairs it; loads may run meanwhile.
        reading, resources: as for `open`.
        progress: for the two verifications, before and after the repair (phase "verify"), and for
            the writing of new files between them ("repair"). True shows a bar on a terminal; a
            function is called with `Progress`.

    Returns:
        `mended`: the damages that were repaired, as `Checkpoint.verify` found them. `now`: what it
        finds afterwards; `now.ok` is True if no damage is left.

    Raises:
        NotFoundError, CorruptError, UnsafeError: as for `open`.
        AlreadyExistsError: something is damaged, and a save or another repair is running there.
        StorageError: a file could not be written, or the bytes for it differed when they were read
            a second time; files that were replaced before stay repaired.
    """
    with reporting(valid.sink("progress", progress), "verify") as sink:
        given = checked("repair", OpenOptions, {"reading": reading, "resources": resources})
        return _core.repair(valid.directory(path), given.fill(_core.OpenOptions()), sink)


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
    files are removed. It gets a new save id. If torch saved it, its data is read once; nothing
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
