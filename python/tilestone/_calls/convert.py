"""Copies a checkpoint into another format, or parts of it, under other keys."""

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
        source: a checkpoint, a folder of safetensors files (Hugging Face's too), one such file, or a
            file of `torch.save`.
        target: the directory of the new checkpoint, or a file: NAME.safetensors, NAME.pt, NAME.pth. It
            must not exist.
        format: "torch_dist", "zarr", "safetensors" (one file if the target's name ends with
            .safetensors, otherwise a folder), or "torch_save" (one file). By default "torch_save" if
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
            keys get the same name; nothing is selected; or the layout of an optimizer's buckets is
            not known.
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
        function = renaming("rename", rename)
        return _core.convert(
            valid.directory(source), valid.directory(target), options, function, sink
        )
