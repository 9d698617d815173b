"""Checks the types of options. The engine checks most ranges of numbers."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard, cast

from tilestone import _core
from tilestone._errors import InvalidArgumentError, UnsupportedError


def directory(path: Any, name: str = "path") -> bytes:
    """A path in the file system's encoding."""
    try:
        return os.fsencode(path)
    except TypeError:
        # A state that was given first by mistake is not printed.
        plain = path is None or isinstance(path, (int, float))
        shown = repr(path) if plain else type(path).__name__
        raise InvalidArgumentError(
            f"{name} must be a string or an os.PathLike, not {shown}"
        ) from None
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} {path!r} can't be a file name: {error}") from None


def is_url(path: Any) -> bool:
    """Whether this is a URL, also as pathlib shortens it, and not a path of a directory."""
    return _core.is_url(directory(path))


def refuse_any_url(path: Any, what: str) -> None:
    """Refuses URLs of all stores. `what`: who works only in directories."""
    if is_url(path):
        raise UnsupportedError(
            f"{what} needs a directory of a file system; this is a URL", file=os.fspath(path)
        )


def absolute(path: str) -> str:
    """The same path, also after the working directory has changed; "~" is the home directory."""
    path = os.path.expanduser(path)
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def location(path: Any) -> bytes:
    """As directory(); empty for an invalid path, which the call's first round reports."""
    try:
        return directory(path)
    except InvalidArgumentError:
        return b""


def flag(name: str, value: Any) -> bool:
    """True or False; any other value is more likely a mistake than meant as a truth value."""
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")


def whole(name: str, value: Any, bits: int = 32) -> int:
    """A whole number that fits into a signed integer of `bits` bits; if 64, an unsigned one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be a whole number, not {value!r}")
    low, high = (0, 1 << 64) if bits == 64 else (-(1 << (bits - 1)), 1 << (bits - 1))
    if not low <= number < high:
        raise InvalidArgumentError(f"{name} is {number}, which is out of range")
    return number


def seconds(name: str, value: Any) -> float:
    """A time in seconds; None (and no other value) means no limit."""
    if value is None:
        return math.inf
    if isinstance(value, (bool, str, bytes)) or not hasattr(type(value), "__float__"):
        raise InvalidArgumentError(f"{name} must be a number of seconds or None, not {value!r}")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} can't be a number of seconds: {error}") from None
    if number == math.inf:
        raise InvalidArgumentError(f"{name} is {number}; use None for no limit")
    return number


def time_limit(timeout: Any) -> float:
    """The time limit of a call with this timeout, in seconds: more than 0."""
    limit = seconds("timeout", timeout)
    if not limit > 0:
        raise InvalidArgumentError(
            f"timeout is {timeout}; expected seconds, more than 0, or None for no limit"
        )
    return limit


def limit_of(timeout: Any) -> float:
    """The same; the default if the timeout is invalid.

    A call with an invalid option still takes part in the first round, which tells all ranks.
    """
    try:
        return time_limit(timeout)
    except Exception:
        return _core.DEFAULT_TIMEOUT


def is_text(value: Any) -> TypeGuard[str]:
    """Whether this is a string that UTF-8 can encode: one without lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def word(name: str, value: Any, key: str = "") -> str:
    """A string; `key`: for the error."""
    if is_text(value):
        return str(value)
    kind = "a valid Unicode string" if isinstance(value, str) else "a string"
    raise InvalidArgumentError(f"{name} must be {kind}, not {value!r}", key=key)


def entity_key(value: Any) -> str:
    """The key of an entity."""
    return str(value) if is_text(value) else word("an entity's key", value, ascii(value))


def replica(value: Any, key: str) -> tuple[int, ...]:
    """The replica id of the entity with a key: one whole number or several."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    return entries("replica_id", value if several else (value,), key)


def entries(name: str, values: Iterable[Any], key: str) -> tuple[int, ...]:
    """Whole numbers of 64 bits, one for each axis, of the entity with a key."""
    try:
        found = tuple(values)
        if not any(isinstance(value, bool) for value in found):
            numbers = tuple(map(operator.index, found))
            if all(-(1 << 63) <= number < 1 << 63 for number in numbers):
                return numbers
    except TypeError:
        pass
    raise InvalidArgumentError(
        f"{name} must hold whole numbers of 64 bits, not {values!r}", key=key
    )


def entry(name: str, value: Any, key: str) -> int:
    """One such number."""
    return entries(name, (value,), key)[0]


def rank_offsets(values: Iterable[Any], key: str) -> list[tuple[int, int, int]]:
    """(axis, place, fragments) for each sharded axis of the entity with a key."""
    found = []
    for value in values:
        numbers = entries("a rank offset (axis, rank, fragments)", value, key)
        if len(numbers) != 3:
            raise InvalidArgumentError(
                f"a rank offset must be (axis, rank, fragments), not {value!r}", key=key
            )
        found.append((numbers[0], numbers[1], numbers[2]))
    return found


def names(name: str, value: Any) -> frozenset[str]:
    """A collection of strings. A single string is refused, though it is a collection too."""
    is_one = isinstance(value, (str, bytes))
    if not is_one and isinstance(value, Collection) and all(isinstance(v, str) for v in value):
        return frozenset(value)
    hint = f"; for one name: {name}=[{value!r}]" if is_one else ""
    raise InvalidArgumentError(f"{name} must be a collection of names, not {value!r}{hint}")


def texts(name: str, value: object) -> dict[str, str]:
    """A dict with strings as keys and values; None means an empty one."""
    if value is None:
        return {}
    found = dict(value) if isinstance(value, Mapping) else None
    if found is None or not all(isinstance(t, str) for pair in found.items() for t in pair):
        raise InvalidArgumentError(
            f"{name} must be a dict with strings as keys and values, not {value!r}"
        )
    try:
        for text in (*found, *found.values()):
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} can't be encoded as UTF-8: {error}") from None
    return found


def by_key(name: str, value: object) -> dict[str, dict[str, Any]]:
    """A dict of dicts, both with strings as keys; None means an empty one."""
    if value is None:
        return {}
    found = {
        key: dict(named) if isinstance(named, Mapping) else None
        for key, named in (value.items() if isinstance(value, Mapping) else [(None, None)])
    }
    for key, named in found.items():
        if named is None or not all(isinstance(text, str) for text in (key, *named)):
            raise InvalidArgumentError(
                f"{name} must be a dict of dicts, both with strings as keys, not {value!r}"
            )
    return cast("dict[str, dict[str, Any]]", found)


def sink(name: str, value: Any) -> Any:
    """True, False, or a function."""
    if isinstance(value, bool) or callable(value):
        return value
    raise InvalidArgumentError(f"{name} must be True, False or a function, not {value!r}")
