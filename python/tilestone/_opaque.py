"""Objects of a checkpoint that are no plain data.

A checkpoint's pickles are never run. An object of a class that Tilestone doesn't know comes back
as `Opaque`: what the pickle says of it, told and not made. `make` turns it into the object when
the caller has allowed its class by name, and then calls nothing but that class.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from typing import Any

from tilestone._errors import UnsafeError


@dataclasses.dataclass
class Opaque:
    """An object as its pickle describes it.

    Attributes:
        kind: "global" (the class or function itself), "call" (module.name(*args)) or "new"
            (module.name.__new__(module.name, *args)).
        module, name: where the class or function is.
        args: the arguments; further Opaque objects may be among them.
        state: what __setstate__ would get, if has_state.
        appended: list items that would be appended to the object.
        entries: dict items that would be set on it.
    """

    kind: str
    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    has_state: bool = False
    appended: list[Any] = dataclasses.field(default_factory=list)
    entries: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """ "module.name", as `allow` takes it."""
        return f"{self.module}.{self.name}"

    def make(self, allow: Collection[str]) -> Any:
        """The object itself.

        Args:
            allow: names ("argparse.Namespace") of the classes that may be made. Allowing a
                function or class means that it is called with what the checkpoint says.

        Raises:
            UnsafeError: a class that is not in `allow` is needed.
        """
        return make(self, frozenset(allow), strict=True)


def _find(opaque: Opaque) -> Any:
    found: Any = importlib.import_module(opaque.module)
    for part in opaque.name.split("."):
        found = getattr(found, part)
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


def _build(opaque: Opaque, allow: frozenset[str], strict: bool) -> Any:
    found = _find(opaque)
    if opaque.kind == "global":
        return found
    args = tuple(make(value, allow, strict) for value in opaque.args)
    made = found(*args) if opaque.kind == "call" else found.__new__(found, *args)
    if opaque.has_state:
        _set_state(made, make(opaque.state, allow, strict))
    if opaque.appended:
        made.extend(make(value, allow, strict) for value in opaque.appended)
    for key, value in opaque.entries.items():
        made[make(key, allow, strict)] = make(value, allow, strict)
    return made


def make(value: Any, allow: frozenset[str], strict: bool = False) -> Any:
    """`value` with every Opaque of an allowed class in it made; others stay, or raise if strict."""
    if isinstance(value, Opaque):
        if value.full_name in allow:
            return _build(value, allow, strict)
        if strict:
            raise UnsafeError(
                f"an object of {value.full_name} is made only when allow names that class",
                hint=f'pass allow=("{value.full_name}",) if you trust it',
            )
        return value
    if type(value) in (list, tuple):
        return type(value)(make(item, allow, strict) for item in value)
    if type(value) is dict:
        return {make(k, allow, strict): make(v, allow, strict) for k, v in value.items()}
    return value
