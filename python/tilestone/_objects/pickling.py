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
from tilestone._objects import plain_types
from tilestone._objects.dtypes import DType
from tilestone._objects.opaque import Opaque

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
        raise InvalidArgumentError(
            f"an object of {_name_of(type(item))} can't be pickled: "
            f"{type(error).__name__}: {error}",
            key=key,
            hint=hint_for_unpicklable(item),
        ) from error
    return pickled, "torch" in sys.modules


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
