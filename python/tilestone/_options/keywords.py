"""How calls take the options of the table: their checks, and what `help` shows."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tilestone._errors import InvalidArgumentError
from tilestone._options.kinds import Options, subclass_fields_first
from tilestone._options.values import VALUES, AsyncSaveOptions, SaveOptions

Made = TypeVar("Made", bound=Options)
Function = TypeVar("Function", bound=Callable[..., Any])


def checked(call: str, kind: type[Made], given: Mapping[str, Any]) -> Made:
    """The options of a call, checked.

    Raises:
        InvalidArgumentError: the call has no such option, or a value has the wrong type.
    """
    unknown = given.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        name = min(unknown)
        raise InvalidArgumentError(f"a {call} has no option {name}", hint=_instead(name, kind))
    return kind(**given)


def _instead(name: str, kind: type[Options]) -> str:
    """What may be meant by an option that a call does not have; "" if nothing is like it."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    near = difflib.get_close_matches(name, types, 1, 0.75)
    if near:
        return f"did you mean {near[0]}?"
    for value in VALUES:
        for option, declared in types.items():
            if value.__name__ in declared and name in value.__dataclass_fields__:
                return f"{name} is a field: {option}=tilestone.{value.__name__}({name}=...)"
    verbs = {"save": SaveOptions, "async_save": AsyncSaveOptions}
    return next(
        (f"{verb} has it" for verb, has in verbs.items() if name in has.__dataclass_fields__), ""
    )


def keywords(kind: type[Options]) -> Callable[[Function], Function]:
    """Makes `help` and `inspect` show the options that a function takes as **options."""

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for field in subclass_fields_first(kind):
            own.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                    annotation=field.type,
                )  # fmt: skip
            )
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return function

    return shown
