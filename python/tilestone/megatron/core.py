"""The file `metadata.json`, which marks a directory as a checkpoint of Megatron-Core."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilestone._errors import CheckpointError, CorruptError
from tilestone._options import valid
from tilestone.megatron._files import read_json, replace_file, storage_errors

CONFIG_FNAME = "metadata.json"

# This is the engine's class, so that `except CheckpointingException` catches all its errors.
CheckpointingException = CheckpointError


@dataclass
class CheckpointingConfig:
    """The formats of a checkpoint. (`content_metadata` has the versions of its content.)

    Attributes:
        sharded_backend: name of the format of tensors and sharded objects: "torch_dist" or "zarr".
        sharded_backend_version: version of that format.
        common_backend: name of the format of the common state.
        common_backend_version: version of that format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Returns whether a directory holds a `metadata.json` that names a format.

    Raises:
        CheckpointingException: the file exists, but can't be read or is not JSON.
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """Reads a directory's `metadata.json`.

    Unknown fields are ignored, because later versions of Megatron-Core may add some. Megatron-Core
    0.16 raises a TypeError there.

    Returns:
        The content; None if there is no such directory or file, or if the file holds other JSON
        (then it is the user's own file).

    Raises:
        CheckpointingException: the file can't be read, is not JSON, or has a field of a wrong type.
    """
    if not checkpoint_dir:
        return None
    path = os.path.join(os.fsdecode(valid.directory(checkpoint_dir)), CONFIG_FNAME)
    with storage_errors(path, "can't read the checkpoint's format"):
        try:
            found = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    if not isinstance(found, dict) or "sharded_backend" not in found:
        return None
    return _checked_config(found, path)


def _checked_config(found: dict[str, Any], path: str) -> CheckpointingConfig:
    names = [each.name for each in fields(CheckpointingConfig)]
    known = {name: found[name] for name in names if name in found}
    for name, value in known.items():
        kind = int if name.endswith("_version") else str
        if type(value) is not kind:
            text = f"{path}: {name} is {value!r}, expected {kind.__name__}"
            raise CorruptError(text, file=path)
    return CheckpointingConfig(**known)


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Writes `metadata.json` atomically: a reader finds the old file, the new one, or no file.

    The file's bytes are on disk before its name is; when the call returns, the name is on disk too.
    Exactly the fields of `CheckpointingConfig` are written: Megatron-Core 0.16 fails on any other.

    Args:
        config: the content.
        checkpoint_dir: an existing directory.

    Raises:
        CheckpointingException: the file can't be written; no part of it is left.
    """
    path = os.path.join(checkpoint_dir, CONFIG_FNAME)
    with storage_errors(path, "can't write the checkpoint's format"):
        replace_file(path, json.dumps(asdict(config)))
