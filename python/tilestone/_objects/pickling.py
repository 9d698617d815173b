"""Pickles objects that are not plain data, so that stock PyTorch and Tilestone can read them.

An ordinary object is pickled as torch.save does. An object that holds an `Opaque` is pickled by a
pickler that writes the Opaque as the original object.
"""

from __future__ import annotations

import datetime
import io
import logging
import pickle
import sys
import types
from typing import Any

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError, hint_for_unpicklable
from tilestone._objects import converters, plain_types
from tilestone._objects.dtypes import DType
from tilestone._objects.opaque import Opaque
from tilestone._objects.stateful import is_stateful

_log = logging.getLogger("tilestone")
_logged: set[str] = set()  # classes for which the warning was logged


class _NeedsNamesError(Exception):
    """The object holds something that only _ByName can write."""


class _Ordinary(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if type(item) is Opaque or type(item) is DType:
            raise _NeedsNamesError
        if isinstance(item, (datetime.time, datetime.datetime)) and item.fold:
            return item.__reduce_ex__(4)  # protocol 2 loses `fold`
        return NotImplemented


# The standard library's pickler written in Python, whose methods can be overridden.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _ByName(_PythonPickler):  # type: ignore[misc]
    """Writes classes by name, so that they need not be importable."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) is Opaque:
            self._save_opaque(obj)
        elif type(obj) is DType:
            self._save_name("torch", str(obj))
        else:
            super().save(obj, save_persistent_id)

    def _save_name(self, module: str, name: str) -> None:
        self.save(module)
        self.save(name)
        self.write(pickle.STACK_GLOBAL)

    def _save_opaque(self, opaque: Opaque) -> None:
        known = self.memo.get(id(opaque))
        if known is not None:
            self.write(self.get(known[0]))
            return
        if not opaque.module:
            raise InvalidArgumentError("a storage outside a tensor can't be saved")
        self._save_name(opaque.module, opaque.name)
        if opaque.kind != "global":
            self.save(tuple(opaque.args))
            if opaque.keywords:
                self.save(dict(opaque.keywords))
                self.write(pickle.NEWOBJ_EX)
            else:
                self.write(pickle.REDUCE if opaque.kind == "call" else pickle.NEWOBJ)
        self.memoize(opaque)
        for item in opaque.appended:
            self.save(item)
            self.write(pickle.APPEND)
        for key, item in opaque.entries.items():
            self.save(key)
            self.save(item)
            self.write(pickle.SETITEM)
        if opaque.has_state:
            self.save(opaque.state)
            self.write(pickle.BUILD)


def _dumped(item: Any, pickler: Any, protocol: int) -> bytes:
    buffer = io.BytesIO()
    if "torch" in sys.modules:
        import torch

        module: Any = types.SimpleNamespace(__name__="pickle", Pickler=pickler)
        torch.save(item, buffer, pickle_module=module, pickle_protocol=protocol)
    else:
        pickler(buffer, protocol).dump(item)
    return buffer.getvalue()


def dumps(item: Any, key: str) -> tuple[bytes, bool]:
    """Pickles an object.

    Returns:
        The pickle, and whether it is a torch.save archive (which it is if torch is loaded).

    Raises:
        InvalidArgumentError: the object can't be pickled; the error names the key and the cause.
    """
    try:
        try:
            pickled = _dumped(item, _Ordinary, 2)
        except _NeedsNamesError:
            pickled = _dumped(item, _ByName, 4)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise _not_pickled(item, error, key) from error
    return pickled, "torch" in sys.modules


def _not_pickled(item: Any, error: Exception, key: str = "") -> InvalidArgumentError:
    name = f"{type(item).__module__}.{type(item).__qualname__}"
    return InvalidArgumentError(
        f"an object of {name} can't be pickled: {type(error).__name__}: {error}",
        key=key,
        hint=hint_for_unpicklable(item),
    )


def check(
    pickled: bytes, archive: bool, key: str, log: bool, harmless: frozenset[str] = frozenset()
) -> None:
    """Reads the pickle as a load would; logs, once for each class, what comes back as Opaque.

    Args:
        log: whether this rank logs.
        harmless: classes whose objects the corresponding load creates.

    Raises:
        InvalidArgumentError: the pickle could not be read back; the error names the key.
    """
    try:
        names = _core.pickled_classes(pickled, archive)
    except CheckpointError as error:
        raise InvalidArgumentError(error.message, key=key, hint=error.hint) from error
    for name in names:
        if not log or name in _logged | harmless or plain_types.is_plain(name):
            continue
        _logged.add(name)
        _log.warning(
            "%s: saved an object of %s; a load returns it as Opaque unless allow_classes names "
            "that class (logged once for each class)",
            key,
            name,
        )


# ---- What a pickled object may contain ----
#
# One rank writes such an object for all, so it must be complete on every rank and in host memory: a
# shard, a process group or a tensor on a device would be lost or meaningless.


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


class _CheckingPickler(pickle.Pickler):
    """Checks every object while pickling; the output is discarded."""

    def __init__(self, as_torch: bool) -> None:
        self._as_torch = as_torch
        # With out-of-band buffers, arrays are not copied.
        super().__init__(_NullFile(), protocol=5, buffer_callback=lambda _: None)

    def reducer_override(self, item: Any) -> Any:
        """Called by pickle for every object that is not of a plain builtin type."""
        if isinstance(item, type):
            return NotImplemented
        if is_stateful(item) and not self._as_torch:
            raise InvalidArgumentError(
                f"an object holds a {type(item).__name__}; its state_dict() and load_state_dict() "
                "are only called if it is in a dict or a list",
                hint="put it into a dict or a list, not into a tuple or another object",
            )
        converter = converters.find(item)
        if converter is None:
            return NotImplemented
        problem = converter.why_not_in_object(item)
        if problem is not None:
            raise InvalidArgumentError(
                f"an object holds {problem}; sharded and device data is only allowed in dicts, in "
                "lists and in the result of state_dict(), not inside tuples and other objects"
            )
        if converter.is_memory(item):
            return int, (), getattr(item, "__dict__", None) or None
        return NotImplemented


def check_object(item: Any, as_torch: bool = False) -> None:
    """Refuses an object that can't be pickled, or whose pickle would not be complete.

    Args:
        item: the object that is about to be pickled.
        as_torch: objects with state_dict() are pickled like others.

    Raises:
        InvalidArgumentError: says what the object holds, or why pickle refuses it.
    """
    try:
        _CheckingPickler(as_torch).dump(item)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise _not_pickled(item, error) from error
