"""Deltas: what has changed in weights from one version to the next."""

from __future__ import annotations

import os

from tilestone import _core
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.progress import ProgressCallback, reporting
from tilestone._options.values import OpenOptions, Reading, Resources


def apply_delta(
    target: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str],
    reading: Reading = Reading(),
    resources: Resources = Resources(),
    progress: bool | ProgressCallback = False,
) -> _core.DeltaReport:
    """Makes a new checkpoint of an old one and a delta (`tilestone delta` makes deltas).

    Everything is checked before anything is written: that the tensors of `target` are those of the
    delta's base, bit for bit, and that those of the new version come out. Objects, attributes and the common state are those of
    `target`: a delta has only tensors. The new checkpoint has the format of `target`. Until it is
    complete, `to` does not exist. See docs/deltas.md.

    Args:
        target: a checkpoint of any format, a folder of safetensors files (Hugging Face's too), or one
            such file.
        path: the delta.
        to: the directory of the new checkpoint, or a file: NAME.safetensors. It must not exist.
        reading, resources: as for `open`.
        progress: for the check (phase "verify"), then for writing ("write"). True shows a bar on a terminal; a function is called
            with `Progress`.

    Raises:
        MismatchError: `target` is not the delta's base; `key` is the first tensor that differs.
        CorruptError: the delta is damaged, or `target` is.
        AlreadyExistsError: something is at `to`.
        NotFoundError, UnsafeError, UnsupportedError: as for `open`; also if `path` is no delta.
    """
    with reporting(valid.sink("progress", progress), "write") as sink:
        given = checked("apply_delta", OpenOptions, {"reading": reading, "resources": resources})
        return _core.apply_delta(
            valid.directory(target),
            valid.directory(path),
            valid.directory(to),
            given.fill(_core.OpenOptions()),
            sink,
        )
