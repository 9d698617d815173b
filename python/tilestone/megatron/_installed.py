"""The Megatron-Core that is installed. It is imported here, when asked for, and nowhere else."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tilestone._errors import UnsupportedError

_PACKAGE = "megatron.core.dist_checkpointing"
_OLDEST, _NEWEST = (0, 13), (0, 19)


def find_module(module: str) -> Any:
    """A module of Megatron-Core's, of a version that is known."""
    try:
        core = importlib.import_module("megatron.core")
        found = importlib.import_module(f"{_PACKAGE}.{module}")
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Core can't be imported: {error}",
            hint="install megatron-core, or use tilestone.megatron, which needs none",
        ) from error
    _check_version(str(getattr(core, "__version__", "")))
    return found


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return
    oldest, newest = (".".join(map(str, ends)) for ends in (_OLDEST, _NEWEST))
    raise UnsupportedError(
        f"Megatron-Core {version or 'of an unknown version'}: known are {oldest} to {newest}",
        hint="use tilestone.megatron in place of megatron.core.dist_checkpointing",
    )


def find_base() -> Any:
    """strategies.base, which versions from 0.19 on lack: None."""
    find_module("mapping")
    try:
        return importlib.import_module(f"{_PACKAGE}.strategies.base")
    except ModuleNotFoundError:
        return None
