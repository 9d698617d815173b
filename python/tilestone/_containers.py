"""Containers of classes of their own: made again with what was loaded.

A state dict is taken apart where torch's own checkpoints take it apart: every Mapping, and every
list (of any class) that holds a tensor or a Mapping. A load gives back a container of the
template's class, so a save refuses a class of which no further container can be made.
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
_logged: set[type] = set()  # classes that were logged


def _copied(original: Container, contents: Contents) -> Container:
    """A shallow copy, with its attributes, of a container whose items can be set."""
    made = copy.copy(original)
    if isinstance(made, list) and isinstance(contents, list):
        made[:] = contents
    elif isinstance(made, MutableMapping) and isinstance(contents, dict):
        for key, value in contents.items():
            made[key] = value
    return made


def _constructed(original: Container, contents: Contents) -> Container:
    """A Mapping whose items can't be set, by its class's constructor."""
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
        contents: a dict or a list of the same keys or length.

    Raises:
        InvalidArgumentError: the class can't be copied or made from a dict.
    """
    if type(original) is collections.OrderedDict and isinstance(contents, dict):
        ordered = collections.OrderedDict(contents)
        vars(ordered).update(vars(original))  # a module's state dict has its versions there
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
        f"a {kind} can't be made again with what a load would give it",
        hint="use a dict or a list in its place",
    ) from cause


def check(container: Container) -> None:
    """Refuses, with InvalidArgumentError, a container of which no further one can be made."""
    rebuilt(
        container,
        dict(container.items()) if isinstance(container, Mapping) else list(container),
    )


def _attributes(container: Container) -> list[str]:
    """What a dict or list has beside its items; not a module's versions in its state dict."""
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
    """Logs, once for each class, what a container has that is in no item and so is not saved."""
    lost = [f"attribute {name}" for name in _attributes(container)]
    if isinstance(container, collections.defaultdict) and container.default_factory is not None:
        lost.append("default_factory")
    if not lost or type(container) in _logged:
        return
    _logged.add(type(container))
    _log.warning(
        "%s: of a %s.%s the items are saved, not its %s; a load gives it those of the container "
        "that it is given (this is said once for each class)",
        key,
        type(container).__module__,
        type(container).__qualname__,
        ", ".join(lost),
    )
