"""Objects of a checkpoint that are not plain data.

A checkpoint's pickles are never run. Objects of plain, harmless types are created through a closed
table (plain_types.py). An object of any other class comes back as `Opaque`, which holds the
description in the pickle without creating the object. `allow_classes` of a load creates it, and
calls only the classes that it names. When an `Opaque` is saved, it is written as the original
object.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
from typing import Any

from tilestone._errors import UnsupportedError
from tilestone._objects import plain_types


@dataclasses.dataclass
class Opaque(plain_types.Description):
    """The description of an object in its pickle, in place of the object.

    `tilestone.save` (and no other program) writes it as the original object.

    Attributes:
        kind: "global" (the class or function itself), "call" (`module.name(*args)`) or "new"
            (`module.name.__new__(module.name, *args, **keywords)`).
        module, name: the module and the name of the class or function. The name of a class inside
            another class contains dots.
        args: the arguments, which may contain further Opaque objects.
        state: the argument for __setstate__, if has_state is True.
        appended: items that would be appended to the object, as to a list.
        entries: items that would be set on the object, as on a dict.
        keywords: the keyword arguments, for kind "new".
    """

    def __hash__(self) -> int:
        """A hash of its parts, so that it can be a key or an element of a set like its object."""
        try:
            return hash((self.kind, self.module, self.name, self.args))
        except TypeError:
            return hash((self.kind, self.module, self.name, len(self.args)))


def _find(opaque: Opaque) -> Any:
    try:
        found: Any = importlib.import_module(opaque.module)
        for part in opaque.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"{opaque.full_name} is allowed, but can't be imported here: {error}"
        ) from error
    return found


def _set_state(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        made.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _build(opaque: Opaque) -> Any:
    """Creates an object of an allowed class, with the same steps as unpickling."""
    found = _find(opaque)
    if opaque.kind == "global":
        return found
    if opaque.kind == "call":
        made = found(*opaque.args)
    else:
        made = found.__new__(found, *opaque.args, **opaque.keywords)
    if opaque.appended:
        if hasattr(made, "extend"):
            made.extend(opaque.appended)
        else:
            for value in opaque.appended:
                made.append(value)
    for key, value in opaque.entries.items():
        made[key] = value
    if opaque.has_state:
        _set_state(made, opaque.state)
    return made


def _is_allowed(opaque: Opaque, allow: frozenset[str]) -> bool:
    if opaque.full_name in allow:
        return True
    # Some versions of Python pickle an enum's member as an attribute of its class.
    owner, _, member = opaque.name.rpartition(".")
    if opaque.kind != "global" or f"{opaque.module}.{owner}" not in allow:
        return False
    found = _find(Opaque("global", opaque.module, owner))
    return isinstance(found, enum.EnumMeta) and member in found.__members__


def find_in(value: Any) -> Opaque | None:
    """An Opaque in a value (the value itself, or inside its containers), or None."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Opaque):
            return item
        if not isinstance(item, (list, tuple, set, frozenset, dict, collections.deque)):
            continue
        if id(item) not in seen:
            seen.add(id(item))
            waiting += [*item, *item.values()] if isinstance(item, dict) else item
    return None


def _harmless(opaque: Opaque, harmless: frozenset[str]) -> Any:
    """The object if its class is harmless and can be imported here, otherwise `opaque` itself."""
    try:
        return _build(opaque) if _is_allowed(opaque, harmless) else opaque
    except UnsupportedError:
        return opaque


def make(opaque: Opaque, allow: frozenset[str], harmless: frozenset[str] = frozenset()) -> Any:
    """The object if its class is allowed or plain, otherwise `opaque` itself.

    Args:
        opaque: the objects that it contains are created already.
        allow: names of allowed classes; UnsupportedError if one can't be imported.
        harmless: names of more allowed classes; if one can't be imported, its objects stay Opaque.
    """
    if _is_allowed(opaque, allow):
        return _build(opaque)
    if harmless and (made := _harmless(opaque, harmless)) is not opaque:
        return made
    return plain_types.made(opaque)
