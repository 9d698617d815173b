"""The file `metadata.json`, which marks a directory as a checkpoint of Megatron-Core; its errors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from tilestone import _core
from tilestone._errors import CheckpointError, CorruptError
from tilestone._options import valid
from tilestone.megatron._files import json_value
from tilestone.megatron._stored import literal

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
    place = valid.directory(literal(checkpoint_dir))
    data = _core.bytes_at(place, CONFIG_FNAME)
    if data is None:
        return None
    path = os.path.join(os.fsdecode(place), CONFIG_FNAME)
    found = json_value(data, path)
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
    valid.refuse_any_url(checkpoint_dir, "save_config")
    place = valid.directory(literal(checkpoint_dir))
    _core.put_file(place, CONFIG_FNAME, json.dumps(asdict(config)).encode())


# ---- Errors that programs written for stock Megatron-Core catch as its own ----

_CORE = "megatron.core.dist_checkpointing.core"

# Options of the engine's hints in Megatron-Core's words; None: it has none.
_WORDS = {
    "checks.access": "validate_access_integrity",
    "checks.common_differs": "common_differs",
    "differences.not_in_checkpoint": 'strict="log_unexpected" (in training: dist_ckpt_strictness)',
    "differences.not_requested": "strict (in training: dist_ckpt_strictness)",
    "differences.other_shape": None,
    "rename": None,
}

Function = TypeVar("Function", bound=Callable[..., Any])


def _plain(error: CheckpointError) -> tuple[object, ...]:
    """Reduces such an error for pickling to Tilestone's own error type."""
    kind: type[CheckpointError] = type(error).__mro__[1]
    return (kind, *CheckpointError.__reduce__(error)[1:])


@functools.cache
def _with_bases(kind: Any, *others: Any) -> Any:
    """A class of the same name as an error's that has further bases."""
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__reduce__": _plain,
        "failures": {},  # torch's error has an entry for each rank; ours names the rank itself
    }
    return type(kind.__name__, (kind, *others), members)


def _make_stocks(error: CheckpointError) -> None:
    """Gives an error the classes that a program may catch: torch's, and Megatron-Core's if the
    process has imported it."""
    from torch.distributed.checkpoint.api import CheckpointException

    stock = getattr(sys.modules.get(_CORE), "CheckpointingException", None)
    if not isinstance(error, CheckpointException):
        others = [kind for kind in (stock, CheckpointException) if kind is not None]
        kind: Any = type(error)
        error.__class__ = _with_bases(kind, *others)


def raises_stocks_errors(function: Function) -> Function:
    """Makes a function's errors instances of torch's CheckpointException too, which stock's saves
    and loads of torch_dist raise, and of Megatron-Core's CheckpointingException if that is imported.
    """

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except CheckpointError as error:
            error.word_options(_WORDS)
            _make_stocks(error)
            raise

    return call  # type: ignore[return-value]
