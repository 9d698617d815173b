"""Containers of special classes: recreated with the loaded contents.

A state dict is split into entries where torch's own checkpoints split it: at every Mapping, and at
every list (of any class) that holds a tensor or a Mapping. A load returns a container of the
template's class, so a save refuses classes of which it can't create another container.
"""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeAlias

from tilestone._errors import InvalidArgumentError

Container: TypeAlias = Mapping[object, object] | list[object]
Contents: TypeAlias = dict[object, object] | list[object]

_log = logging.getLogger("tilestone")
_logged: set[type] = set()  # classes for which the warning was logged


def _copied(original: Container, contents: Contents) -> Container:
    """A shallow copy of a container whose items can be set, with its attributes."""
    made = copy.copy(original)
    if isinstance(made, list) and isinstance(contents, list):
        made[:] = contents
    elif isinstance(made, MutableMapping) and isinstance(contents, dict):
        for key, value in contents.items():
            made[key] = value
    return made


def _constructed(original: Container, contents: Contents) -> Container:
    """A Mapping whose items can't be set, made by the constructor of its class."""
    of_contents: Callable[[Contents], Container] = type(original)
    return of_contents(contents)


def _holds(made: Container, contents: Contents) -> bool:
    if len(made) != len(contents):
        return False
    if isinstance(contents, list):
        return all(a is b for a, b in zip(made, contents, strict=True))
    return isinstance(made, Mapping) and all(
        key in made and made[key] is value for key, value in contents.items()
    )


def rebuilt(original: Container, contents: Contents) -> Container:
    """A container of the class of `original` with other contents.

    Args:
        original: a Mapping or a list.
        contents: for a Mapping, a dict with the same keys; for a list, one of the same length.

    Raises:
        InvalidArgumentError: the class can't be copied or made from a dict.
    """
    if type(original) is collections.OrderedDict and isinstance(contents, dict):
        ordered = collections.OrderedDict(contents)
        vars(ordered).update(vars(original))  # a module's state dict keeps its versions there
        return ordered
    settable = isinstance(original, (list, MutableMapping))
    cause: Exception | None = None
    try:
        made = _copied(original, contents) if settable else _constructed(original, contents)
        if type(made) is type(original) and _holds(made, contents):
            return made
    except Exception as error:
        cause = error
    kind = f"{type(original).__module__}.{type(original).__qualname__}"
    raise InvalidArgumentError(
        f"a load could not create a {kind} with the loaded contents",
        hint="use a dict or a list instead",
    ) from cause


def check(container: Container) -> None:
    """Raises InvalidArgumentError if another container of the same class can't be created."""
    rebuilt(
        container,
        dict(container.items()) if isinstance(container, Mapping) else list(container),
    )


def _attributes(container: Container) -> list[str]:
    """Attributes that a dict or list has beside its items, except a state dict's "_metadata"."""
    own = getattr(container, "__dict__", None)
    if not own or own is container or not isinstance(container, (dict, list)):
        return []
    items: Mapping[object, object] = container if isinstance(container, dict) else {}
    return [
        name
        for name, value in own.items()
        if not (name in items and items[name] is value)
        and not (name == "_metadata" and isinstance(container, collections.OrderedDict))
    ]


def warn(container: Container, key: str) -> None:
    """Logs, once for each class, what a container has beside its items, as that is not saved."""
    lost = [f"attribute {name}" for name in _attributes(container)]
    if isinstance(container, collections.defaultdict) and container.default_factory is not None:
        lost.append("default_factory")
    if not lost or type(container) in _logged:
        return
    _logged.add(type(container))
    _log.warning(
        "%s: the items of a %s.%s are saved, but not its %s; a load takes these from the template "
        "(logged once for each class)",
        key,
        type(container).__module__,
        type(container).__qualname__,
        ", ".join(lost),
    )
