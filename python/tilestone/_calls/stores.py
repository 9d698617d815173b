"""Object stores that a program brings along."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from tilestone import _core


class StoreWriter(Protocol):
    """A new file, which exists once it is closed."""

    def write(self, data: bytes, /) -> object: ...

    def close(self) -> object: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """What Tilestone does with one prefix of an object store: one function for each thing.

    Names are relative to the prefix, with "/" between components. The functions are called from
    several threads at once. What they raise ends the call with a StorageError, a FileNotFoundError
    with a NotFoundError. They must end by themselves: their client's timeouts count.

    A put must have ended, and have no effect later, within 10 seconds from its call, retries
    included: one that goes on longer may publish a checkpoint whose files another job has removed.

    A write must be whole or not there, and seen by every reader from then on. `tag` is the store's
    word for the content of a file (an ETag).

    Raises TypeError for a field that is of another type.
    """

    stat: Callable[[str], tuple[int, float | None, str] | None]
    """stat(name): bytes, when it was changed (seconds since 1970) and tag; None: there is no file."""
    listing: Callable[[str, bool], tuple[list[tuple[str, int, float | None]], list[str]]]
    """listing(prefix, deep): all files whose names begin with the text, with their bytes and time; not
    deep: those without a further "/", and, second, what stands before that "/" in the others."""
    get: Callable[[str, int, int, str], Any]
    """get(name, offset, size, tag): these bytes, as an object with a buffer. FileNotFoundError if
    the file has gone or has another tag ("": any)."""
    put: Callable[[str, bytes, str | None], bool]
    """put(name, data, tag): writes a whole file; "": only if there is none, another tag: only if the
    file has it. False: the condition does not hold."""
    create: Callable[[str], StoreWriter]
    """create(name): begins a large file, which gets its bytes in parts of 8 MiB."""
    remove: Callable[[list[str]], None]
    """remove(names): those that do not exist are no failure."""
    has_tags: bool
    """Whether put() can ask for a tag. Without, nothing keeps two saves apart that replace one."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) != (field.name == "has_tags") or (
                field.name != "has_tags" and not callable(value)
            ):
                raise TypeError(f"Store: {field.name} can't be {value!r}")


def register_store(scheme: str, open: Callable[[str], Store]) -> None:
    """From now on, in this process, the URLs "SCHEME://..." are places wherever a path is taken.

    `open` makes the store of the prefix that a URL names. It is called once for a URL, as long as not
    many others are used meanwhile. See docs/object_stores.md, and examples/obstore_store.py.

    Raises InvalidArgumentError for "s3", "file", or what is no scheme.
    """

    @functools.lru_cache(maxsize=256)
    def opened(url: str) -> Store:
        store = open(url)
        if not isinstance(store, Store):
            raise TypeError(f"the store of {url} is a {type(store).__name__}, not a tilestone.Store")
        return store

    _core.register_store(scheme, opened)
