"""Containers of classes of their own: made again with what was loaded.

A state dict is taken apart where torch's own checkpoints take it apart: every Mapping, and every
list (of any class) that holds a tensor or a Mapping. A load gives back a container of the
template's class, so a save refuses a class of which no further container can be made.
"""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from tilestone._errors import InvalidArgumentError

_log = logging.getLogger("tilestone")
_told: set[type] = set()  # classes that were logged


def _copied(original: Any, contents: Any) -> Any:
    """A shallow copy, with its attributes, of a container whose items can be set."""
    made = copy.copy(original)
    if isinstance(original, list):
        made[:] = contents
    else:
        for key, value in contents.items():
            made[key] = value
    return made


def _holds(made: Any, contents: Any) -> bool:
    if len(made) != len(contents):
        return False
    if isinstance(contents, list):
        return all(a is b for a, b in zip(made, contents, strict=True))
    return all(key in made and made[key] is value for key, value in contents.items())


def rebuilt(original: Any, contents: Any) -> Any:
    """A container of the class of `original` with other contents.

    Args:
        original: a Mapping or a list.
        contents: a dict or a list of the same keys or length.

    Raises:
        InvalidArgumentError: the class can't be copied or made from a dict.
    """
    if type(original) is collections.OrderedDict:
        made: Any = collections.OrderedDict(contents)
        made.__dict__.update(original.__dict__)  # a module's state dict has its versions there
        return made
    settable = isinstance(original, (list, MutableMapping))
    cause: Exception | None = None
    for make in (_copied,) if settable else (lambda same, items: type(same)(items),):
        try:
            made = make(original, contents)
            if type(made) is type(original) and _holds(made, contents):
                return made
        except Exception as error:
            cause = error
    kind = f"{type(original).__module__}.{type(original).__qualname__}"
    raise InvalidArgumentError(
        f"a {kind} can't be made again with what a load would give it",
        hint="use a dict or a list in its place",
    ) from cause


def check(container: Any) -> None:
    """Refuses, with InvalidArgumentError, a container of which no further one can be made."""
    rebuilt(
        container,
        dict(container.items()) if isinstance(container, Mapping) else list(container),
    )


def _attributes(container: Any) -> list[str]:
    """What a dict or list has beside its items; not a module's versions in its state dict."""
    own = getattr(container, "__dict__", None)
    if not own or own is container or not isinstance(container, (dict, list)):
        return []
    items = container if isinstance(container, dict) else {}
    return [
        name
        for name, value in own.items()
        if not (name in items and items[name] is value)
        and not (name == "_metadata" and isinstance(container, collections.OrderedDict))
    ]


def tell(container: Any, key: str) -> None:
    """Logs, once for each class, what a container has that is in no item and so is not saved."""
    lost = [f"attribute {name}" for name in _attributes(container)]
    if isinstance(container, collections.defaultdict) and container.default_factory is not None:
        lost.append("default_factory")
    if not lost or type(container) in _told:
        return
    _told.add(type(container))
    _log.warning(
        "%s: of a %s.%s the items are saved, not its %s; a load gives it those of the container "
        "that it is given (this is said once for each class)",
        key,
        type(container).__module__,
        type(container).__qualname__,
        ", ".join(lost),
    )
