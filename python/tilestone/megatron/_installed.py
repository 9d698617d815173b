"""Access to the installed Megatron-Core: only this module imports it, and only on demand."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tilestone._errors import UnsupportedError

_PACKAGE = "megatron.core.dist_checkpointing"
_OLDEST, _NEWEST = (0, 13), (0, 19)


def find_module(module: str) -> Any:
    """Imports a module of Megatron-Core, whose version must be a supported one."""
    try:
        core = importlib.import_module("megatron.core")
        found = importlib.import_module(f"{_PACKAGE}.{module}")
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Core can't be imported: {error}",
            hint="install megatron-core, or use tilestone.megatron, which does not need it",
        ) from error
    _check_version(str(getattr(core, "__version__", "")))
    return found


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return
    oldest, newest = (".".join(map(str, ends)) for ends in (_OLDEST, _NEWEST))
    raise UnsupportedError(
        f"Megatron-Core {version or 'of an unknown version'} is not supported; versions {oldest} "
        f"to {newest} are",
        hint="use tilestone.megatron in place of megatron.core.dist_checkpointing",
    )


def find_base() -> Any:
    """Imports strategies.base; None for versions from 0.19 on, which do not have it."""
    find_module("mapping")
    try:
        return importlib.import_module(f"{_PACKAGE}.strategies.base")
    except ModuleNotFoundError:
        return None
