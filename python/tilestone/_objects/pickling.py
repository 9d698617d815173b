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


def _reduced(self: Any, item: Any) -> Any:
    """The reducer_override() of both picklers, which pickle calls for what is no plain builtin.

    One rank writes an object for all, so it must be complete on every rank and in host memory: a
    shard, a process group or a tensor on a device would be lost or meaningless.
    """
    if isinstance(item, type):
        return NotImplemented
    if is_stateful(item) and not self.as_torch:
        raise InvalidArgumentError(
            f"an object holds a {type(item).__name__}; its state_dict() and load_state_dict() "
            "are only called if it is in a dict or a list",
            hint="put it into a dict or a list, not into a tuple or another object",
        )
    converter = converters.find(item)
    problem = None if converter is None else converter.why_not_in_object(item)
    if problem is not None:
        raise InvalidArgumentError(
            f"an object holds {problem}; sharded and device data is only allowed in dicts, in "
            "lists and in the result of state_dict(), not inside tuples and other objects"
        )
    if type(item) is Opaque or type(item) is DType:
        raise _NeedsNamesError
    if isinstance(item, (datetime.time, datetime.datetime)) and item.fold:
        return item.__reduce_ex__(4)  # protocol 2 loses `fold`
    return NotImplemented


class _Ordinary(pickle.Pickler):
    reducer_override = _reduced


# The standard library's pickler written in Python, whose methods can be overridden.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _ByName(_PythonPickler):  # type: ignore[misc]
    """Writes classes by name, so that they need not be importable."""

    reducer_override = _reduced

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


def _dumped(item: Any, kind: Any, protocol: int, as_torch: bool) -> bytes:
    buffer = io.BytesIO()
    pickler = type(kind.__name__, (kind,), {"as_torch": as_torch})
    if "torch" in sys.modules:
        import torch

        module: Any = types.SimpleNamespace(__name__="pickle", Pickler=pickler)
        torch.save(item, buffer, pickle_module=module, pickle_protocol=protocol)
    else:
        pickler(buffer, protocol).dump(item)
    return buffer.getvalue()


def dumps(item: Any, key: str, as_torch: bool = False) -> tuple[bytes, bool]:
    """Pickles an object.

    Args:
        as_torch: objects with state_dict() are pickled like others.

    Returns:
        The pickle, and whether it is a torch.save archive (which it is if torch is loaded).

    Raises:
        InvalidArgumentError: the object can't be pickled, or its pickle would not be complete; the
            error names the key and says what the object holds.
    """
    try:
        try:
            pickled = _dumped(item, _Ordinary, 2, as_torch)
        except _NeedsNamesError:
            pickled = _dumped(item, _ByName, 4, as_torch)
    except CheckpointError as error:
        error.add_key(key)
        raise
    except MemoryError:
        raise
    except Exception as error:
        name = f"{type(item).__module__}.{type(item).__qualname__}"
        raise InvalidArgumentError(
            f"an object of {name} can't be pickled: {type(error).__name__}: {error}",
            key=key,
            hint=hint_for_unpicklable(item),
        ) from error
    return pickled, "torch" in sys.modules


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
