"""Functions that rename keys, for `load` and `convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tilestone._errors import InvalidArgumentError

Rename = Callable[[str], str] | Iterable[tuple[str, str]]


def strip_prefix(prefix: str) -> Callable[[str], str]:
    """A function that removes a prefix from keys: `load(..., rename=strip_prefix("module."))`.

    It removes the first place in a key where the prefix begins a part of it: "_orig_mod." in
    "_orig_mod.w" and in "model._orig_mod.w". Other keys stay.
    """

    def rename(key: str) -> str:
        at = key.find(prefix) if prefix else -1
        while at > 0 and key[at - 1] != ".":
            at = key.find(prefix, at + 1)
        return key if at < 0 else key[:at] + key[at + len(prefix) :]

    return rename


def add_prefix(prefix: str) -> Callable[[str], str]:
    """A function that puts a prefix before each key."""
    return lambda key: prefix + key


def renaming(name: str, value: Any) -> Callable[[str], str] | list[tuple[str, str]] | None:
    """The option as the engine takes it: a function from key to key, or rules."""
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    try:
        return [(str(pattern), str(replacement)) for pattern, replacement in value]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} must be a function of a key, or pairs (regular expression, replacement): {error}"
        ) from None
