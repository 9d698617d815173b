"""The types of the options that are passed on as keywords. Made by `tools/options --fix`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from tilestone._options.progress import ProgressCallback
    from tilestone._options.rename import Rename
    from tilestone._options.values import (
        Checks,
        Differences,
        LocalCopies,
        Reading,
        Resources,
    )


class SaveKeywords(TypedDict, total=False):
    """The options of `save`, except who takes part."""

    format: str
    dialect: str
    overwrite: bool
    copies: LocalCopies | None
    attributes: Mapping[str, str] | None
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None
    checks: Checks
    resources: Resources
    timeout: float | None
    progress: bool | ProgressCallback


class AsyncSaveKeywords(TypedDict, total=False):
    """The options of `async_save`, except who takes part."""

    stage: str
    on_error: str
    in_flight: str
    max_staged_bytes: int | None
    checks: Checks
    resources: Resources
    timeout: float | None
    progress: bool | ProgressCallback
    format: str
    dialect: str
    overwrite: bool
    copies: LocalCopies | None
    attributes: Mapping[str, str] | None
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None


class LoadKeywords(TypedDict, total=False):
    """The options of `load`, except who takes part."""

    cast: bool
    differences: Differences
    rename: Rename | None
    own_rank: int | None
    allow_classes: Collection[str]
    checks: Checks
    resources: Resources
    timeout: float | None
    progress: bool | ProgressCallback
    format: str | None
    reading: Reading


class OpenKeywords(TypedDict, total=False):
    """The options of `open`."""

    framework: str
    checks: Checks
    resources: Resources
    format: str | None
    reading: Reading
