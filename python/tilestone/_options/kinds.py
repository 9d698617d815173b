"""Options that belong together, and the checks of their values."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, TypeVar

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.load_report import LoadReport

#: Takes an option's name and a value; returns what the engine gets, or raises InvalidArgumentError.
Check = Callable[[str, Any], Any]
Made = TypeVar("Made", bound="Options")


def option(default: Any, check: Check, text: str) -> Any:
    """A field of a class of options, with its explanation."""
    about = {"check": check, "text": " ".join(text.split())}
    return dataclasses.field(default=default, metadata=about)


def optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> str:
        word = valid.word(name, value)
        if word in words:
            return word
        *most, last = (f'"{each}"' for each in words)
        raise InvalidArgumentError(f'{name} must be {", ".join(most)} or {last}, not "{word}"')

    return check


def number_of_bytes(name: str, value: Any) -> int:
    return valid.whole(name, value, 64)


def count(name: str, value: Any) -> int:
    number = valid.whole(name, value, 64)
    if number == 0:
        raise InvalidArgumentError(f"{name} is 0; expected at least 1")
    return number


def made(kind: type[Made]) -> Check:
    def check(name: str, value: Any) -> Made:
        if isinstance(value, kind):
            return value
        raise InvalidArgumentError(f"{name} must be a tilestone.{kind.__name__}, not {value!r}")

    return check


def report(name: str, value: Any) -> LoadReport:
    if isinstance(value, LoadReport):
        return value
    raise InvalidArgumentError(f"{name} must be a LoadReport or None, not {value!r}")


def ranks_or_group(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        raise InvalidArgumentError(
            f"{name} must be a torch process group or a list of ranks, not {value!r}"
        )
    if isinstance(value, Collection):
        try:
            ranks = list(value)
        except TypeError as error:  # an array without dims
            raise InvalidArgumentError(f"{name} can't be {value!r}: {error}") from None
        return tuple(valid.whole(name, rank) for rank in ranks)
    return value  # torch's sign for a group without this rank is an int, which a save refuses


def best(name: str, value: Any) -> tuple[str, str, int]:
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise InvalidArgumentError(
            f'{name} must be a tuple like ("loss", "min", 2), not {value!r}'
        )
    metric, mode, *most = value
    return (
        valid.word(f"{name}[0]", metric),
        one_of("min", "max")(f"{name}[1]", mode),
        count(f"{name}[2]", most[0]) if most else 1,
    )


def checked_framework(name: str, value: Any) -> str:
    """"numpy" or "torch"."""
    if isinstance(value, str) and value in ("numpy", "torch"):
        return value
    raise InvalidArgumentError(f'{name} must be "numpy" or "torch", not {value!r}')


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that belong together. The types of the fields are checked when one is made."""

    #: What an error calls a field, with the field's name in place of {}.
    _called: ClassVar[str] = "{}"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = self._called.format(field.name)
            value = field.metadata["check"](name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def table(cls) -> Iterator[tuple[str, str, str]]:
        """(name, type, explanation) of each option, its own before inherited ones."""
        for field in subclass_fields_first(cls):
            yield field.name, str(field.type), field.metadata["text"]

    def fill(self, engine: Any) -> Any:
        """Sets those fields of the engine's struct that are options here; returns it."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and hasattr(engine, field.name):
                setattr(engine, field.name, value.made() if isinstance(value, Value) else value)
        return engine


def subclass_fields_first(cls: type[Options]) -> list[dataclasses.Field[Any]]:
    """The fields of a class: its own first, then those of its bases."""
    own = [field for field in dataclasses.fields(cls) if field.name in cls.__annotations__]
    return own + [field for field in dataclasses.fields(cls) if field not in own]


class Value(Options):
    """Options that a user makes as one value. The engine has a struct of the same name."""

    def __init_subclass__(cls) -> None:
        cls._called = f"{cls.__name__}.{{}}"
        about = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        lines = [*("\n\n".join(textwrap.fill(part, 96) for part in about)).split("\n"), "", "Args:"]
        for name, field in list(vars(cls).items()):
            if isinstance(field, dataclasses.Field):
                text = f"{name}: {field.metadata['text']}"
                lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent=" " * 8)
        cls.__doc__ = "\n".join(lines)

    def made(self) -> Any:
        """The engine's struct."""
        return self.fill(getattr(_core, type(self).__name__)())

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"
