"""What marks a directory as a checkpoint of Megatron-Core: the file `metadata.json`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from tilestone._errors import CheckpointError, CorruptError, StorageError
from tilestone.megatron._files import replace_file

CONFIG_FNAME = "metadata.json"

# The same class, so that `except CheckpointingException` catches every error of the engine.
CheckpointingException = CheckpointError


@dataclass
class CheckpointingConfig:
    """How a checkpoint is stored; its content has versions of its own (`content_metadata`).

    Attributes:
        sharded_backend: name of the format of tensors and sharded objects: "torch_dist" or "zarr".
        sharded_backend_version: of that format.
        common_backend: name of the format of the common state.
        common_backend_version: of that format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a `metadata.json` that names a format.

    Raises:
        CheckpointingException: the file is there and can't be read, or is no JSON.
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """The content of a directory's `metadata.json`.

    Fields that this version does not know are left out: later versions of Megatron-Core may add
    some. Megatron-Core 0.16 ends with a TypeError there.

    Returns:
        None: there is no such directory or file, or the file holds other JSON (it is a user's own).

    Raises:
        CheckpointingException: the file can't be read, is no JSON, or its fields have wrong types.
    """
    if not checkpoint_dir:
        return None
    path = os.path.join(checkpoint_dir, CONFIG_FNAME)
    try:
        with open(path, encoding="utf-8") as file:
            found: Any = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        message = "the checkpoint's format can't be read"
        raise StorageError(message=message, file=path, errno=error.errno) from error
    except ValueError as error:
        raise CorruptError(f"{path} is no JSON: {error}", file=path) from error
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
    """Writes `metadata.json` in one step: a reader finds the old file, the new one, or none.

    The bytes are on disk before the name is, and the name is when the call returns. Exactly the
    fields of `CheckpointingConfig` are written: Megatron-Core 0.16 fails on any other.

    Args:
        config: what the file says.
        checkpoint_dir: an existing directory.

    Raises:
        CheckpointingException: the file can't be written; nothing of it is left.
    """
    path = os.path.join(checkpoint_dir, CONFIG_FNAME)
    try:
        replace_file(path, json.dumps(asdict(config)))
    except OSError as error:
        message = "the checkpoint's format can't be written"
        raise StorageError(message=message, file=path, errno=error.errno) from error
