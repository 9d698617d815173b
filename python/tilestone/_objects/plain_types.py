"""Creates objects of plain, harmless types from their description in a pickle.

This is a closed table. It maps exact names of classes and functions to functions that check the
arguments strictly and create the object. Nothing that a file names is imported or called. Memory is
only allocated in proportion to the file's own bytes. If a description differs from what the type's
own pickler writes, the object stays Opaque.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import fractions
import io
import math
import pathlib
import re
import sys
import uuid
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy


@dataclasses.dataclass
class Description:
    """What a pickle says about an object; see `tilestone.Opaque` for the attributes."""

    kind: str
    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    has_state: bool = False
    appended: list[Any] = dataclasses.field(default_factory=list)
    entries: dict[Any, Any] = dataclasses.field(default_factory=dict)
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """ "module.name", as `allow_classes` expects it."""
        return f"{self.module}.{self.name}"


Maker = Callable[[Description], Any]

_MAKERS: dict[str, Maker] = {}
_GLOBALS: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind
    for kind in (
        bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set,
        slice, str, tuple,
    )
} | {
    "builtins.Ellipsis": ...,
    "builtins.NotImplemented": NotImplemented,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "numpy.ndarray": numpy.ndarray,
}  # fmt: skip

# The factories that a defaultdict may have.
_FACTORIES = (
    None, bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple,
    collections.OrderedDict, collections.Counter,
)  # fmt: skip


class _UnexpectedPickleError(Exception):
    """The description differs from what the type's own pickler writes."""


def _check(condition: bool) -> None:
    if not condition:
        raise _UnexpectedPickleError


def _all_are(kind: type, values: Any) -> bool:
    return all(type(value) is kind for value in values)


def _check_call(opaque: Description, *others: str) -> None:
    """Checks for a call with positional arguments, after which only `others` are set."""
    _check(opaque.kind == "call")
    _check_bare(opaque, *others)


def _check_bare(opaque: Description, *others: str) -> None:
    parts = ("keywords", "appended", "entries", "has_state")
    _check(not any(getattr(opaque, part) for part in parts if part not in others))


def _bare(opaque: Description, kinds: tuple[str, ...] = ("call",)) -> tuple[Any, ...]:
    """The arguments of an object that is created from positional arguments only."""
    _check(opaque.kind in kinds)
    _check_bare(opaque, "has_state")
    _check(not opaque.has_state or opaque.state is None)
    return opaque.args


def _maker(*names: str) -> Callable[[Maker], Maker]:
    def register(function: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(names, function))
        return function

    return register


# ---- From positional arguments alone ----


def _positional(
    name: str, make: Any, *signatures: tuple[Any, ...], kinds: tuple[str, ...] = ("call",)
) -> None:
    """Registers a type with what its arguments are: of a type, `object` for any, or as a function of
    the argument says."""

    @_maker(name)
    def made(opaque: Description) -> Any:
        args = _bare(opaque, kinds)
        _check(any(_is_like(args, signature) for signature in signatures))
        return make(*args)


def _is_like(args: tuple[Any, ...], signature: tuple[Any, ...]) -> bool:
    return len(args) == len(signature) and all(
        kind in (type(one), object) if isinstance(kind, type) else kind(one)
        for one, kind in zip(args, signature)
    )


def _bytes_of(size: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is bytes and len(value) == size


def _like(pattern: str) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and re.fullmatch(pattern, value) is not None


def _is_zone(value: Any) -> bool:
    return type(value) in (type(None), datetime.timezone)


_positional("builtins.bytearray", bytearray, (), (bytes,), (str, _like("latin-?1")))
_positional("builtins.complex", complex, (float, float), kinds=("call", "new"))
_positional("builtins.range", range, (int, int, int))
_positional("builtins.slice", slice, (object, object, object))
_positional("builtins.set", set, (), (list,))
_positional("builtins.frozenset", frozenset, (), (list,))
_positional("datetime.date", datetime.date, (_bytes_of(4),))
_positional("datetime.time", datetime.time, (_bytes_of(6),), (_bytes_of(6), _is_zone))
_positional("datetime.datetime", datetime.datetime, (_bytes_of(10),), (_bytes_of(10), _is_zone))
_positional("datetime.timedelta", datetime.timedelta, (int, int, int))
_positional(
    "datetime.timezone", datetime.timezone, (datetime.timedelta,), (datetime.timedelta, str)
)
_positional("decimal.Decimal", decimal.Decimal, (str,))
# One argument up to Python 3.11; without an exponent, which could be an enormous power of ten.
_positional(
    "fractions.Fraction", fractions.Fraction, (int, int), (_like("-?[0-9]+(/[0-9]+)?"),)
)
_positional("uuid.SafeUUID", uuid.SafeUUID, (int,), (type(None),))


# ---- builtins ----


@_maker("_io.BytesIO")
def _bytes_io(opaque: Description) -> io.BytesIO:
    """The state is (content, position, attributes or None)."""
    _check(opaque.kind in ("call", "new") and not opaque.args)
    _check_bare(opaque, "has_state")
    _check(type(opaque.state) is tuple and len(opaque.state) == 3)
    content, position, attributes = opaque.state
    _check(type(content) in (bytes, bytearray) and type(position) is int)
    _check(attributes is None or (type(attributes) is dict and _all_are(str, attributes)))
    made = io.BytesIO(content)
    made.seek(position)
    vars(made).update(attributes or {})
    return made


# ---- Names ----


@_maker("uuid.UUID")
def _uuid(opaque: Description) -> uuid.UUID:
    _check(opaque.kind == "new" and not opaque.args and not opaque.keywords and opaque.has_state)
    _check(not opaque.appended and not opaque.entries and type(opaque.state) is dict)
    state = dict(opaque.state)
    number, safe = state.pop("int", None), state.pop("is_safe", uuid.SafeUUID.unknown)
    _check(not state and type(number) is int)
    return uuid.UUID(int=number, is_safe=uuid.SafeUUID(safe))


_PATHS = ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath")


@_maker(*(f"pathlib.{name}" for name in _PATHS))
def _path(opaque: Description) -> pathlib.PurePath:
    args = _bare(opaque)
    _check(_all_are(str, args))
    made: pathlib.PurePath = getattr(pathlib, opaque.name)(*args)
    return made


# ---- collections ----


@_maker("collections.Counter")
def _counter(opaque: Description) -> collections.Counter[Any]:
    args = _bare(opaque)
    _check(not args or (len(args) == 1 and type(args[0]) is dict))
    made: collections.Counter[Any] = collections.Counter()
    dict.update(made, *args)  # Counter.update would add the counts up
    return made


@_maker("collections.defaultdict")
def _defaultdict(opaque: Description) -> collections.defaultdict[Any, Any]:
    _check_call(opaque, "entries")
    _check(len(opaque.args) <= 1 and all(any(f is a for f in _FACTORIES) for a in opaque.args))
    return collections.defaultdict(opaque.args[0] if opaque.args else None, opaque.entries)


@_maker("collections.deque")
def _deque(opaque: Description) -> collections.deque[Any]:
    _check_call(opaque, "appended")
    items, limit = [], None
    if opaque.args:
        _check(len(opaque.args) <= 2 and type(opaque.args[0]) in (list, tuple))
        items = list(opaque.args[0])
        limit = opaque.args[1] if len(opaque.args) == 2 else None
    _check(type(limit) in (int, type(None)))
    return collections.deque(items + opaque.appended, limit)


# ---- numpy ----

_SCALARS = {
    name: kind
    for module in (numpy, ml_dtypes)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, numpy.generic)
    and kind.__module__ == module.__name__
    and kind not in (numpy.object_, getattr(numpy, "record", None))
}
_GLOBALS |= {f"{kind.__module__}.{kind.__name__}": kind for kind in _SCALARS.values()}

_ORDERS = ("<", ">", "|", "=")


def _numpy_names(place: str, name: str) -> tuple[str, str]:
    return f"numpy._core.{place}.{name}", f"numpy.core.{place}.{name}"  # numpy 2, numpy 1


@_maker("numpy.dtype")
def _dtype(opaque: Description) -> numpy.dtype[Any]:
    """args (code, False, True); state (3 or 4, byte order, (dtype, shape), names, fields, ...)."""
    _check_call(opaque, "has_state")
    _check(len(opaque.args) in (1, 3))
    base: numpy.dtype[Any] = _base_dtype(opaque.args[0])
    if not opaque.has_state:
        return base
    state = opaque.state
    _check(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4))
    order, inner, names, fields, size, _, flags = state[1:8]
    _check(order in _ORDERS)
    if len(state) == 9:
        unit: numpy.dtype[Any] = _unit_dtype(opaque.args[0], state[8]).newbyteorder(order)
        return unit
    if inner is not None:
        _check(type(inner) is tuple and len(inner) == 2 and isinstance(inner[0], numpy.dtype))
        inner_spec: Any = (inner[0], _shape(inner[1]))
        return _sized(numpy.dtype(inner_spec), size)
    if names is not None:
        return _sized(_record_dtype(names, fields, size, flags), size)
    swapped: numpy.dtype[Any] = base if base.isbuiltin == 2 else base.newbyteorder(order)
    return swapped


def _base_dtype(code: Any) -> numpy.dtype[Any]:
    if isinstance(code, type):
        _check(code in _SCALARS.values())
    else:
        _check(type(code) is str and re.fullmatch(r"[biufcSUVmM?][0-9]{0,9}", code) is not None)
    base: numpy.dtype[Any] = numpy.dtype(code)
    return base


def _sized(dtype: numpy.dtype[Any], size: Any) -> numpy.dtype[Any]:
    _check(dtype.itemsize == size)
    return dtype


def _shape(shape: Any) -> tuple[int, ...]:
    _check(type(shape) is tuple and len(shape) <= 64 and _all_are(int, shape))
    _check(all(n >= 0 for n in shape))
    return tuple(shape)


def _unit_dtype(code: Any, metadata: Any) -> numpy.dtype[Any]:
    """datetime64 and timedelta64: (None, (unit, count, 1, 1))."""
    _check(code in ("M8", "m8") and type(metadata) is tuple and len(metadata) == 2)
    _check(not metadata[0] and type(metadata[1]) is tuple and len(metadata[1]) == 4)
    unit, count, divisor, _ = metadata[1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    _check(type(unit) is str and unit.isalpha() and type(count) is int and divisor == 1)
    return numpy.dtype(code if unit == "generic" else f"{code}[{count}{unit}]")


def _record_dtype(names: Any, fields: Any, size: Any, flags: Any) -> numpy.dtype[Any]:
    _check(type(names) is tuple and _all_are(str, names) and type(fields) is dict)
    _check(type(size) is int and type(flags) is int)
    parts = [fields.get(name) for name in names]
    _check(len(fields) == len(names))  # more where fields have titles
    _check(all(type(part) is tuple and len(part) == 2 for part in parts))
    _check(all(isinstance(part[0], numpy.dtype) and type(part[1]) is int for part in parts))
    spec: Any = {
        "names": list(names),
        "formats": [part[0] for part in parts],
        "offsets": [part[1] for part in parts],
        "itemsize": size,
    }
    made: numpy.dtype[Any] = numpy.dtype(spec, align=bool(flags & 128))
    return made


def _array(
    data: Any, dtype: Any, shape: Any, order: Any, kinds: tuple[type, ...] = (bytes,)
) -> numpy.ndarray[Any, Any]:
    shape = _shape(shape)
    _check(isinstance(dtype, numpy.dtype) and not dtype.hasobject and type(data) in kinds)
    count = math.prod(shape)
    _check(count * dtype.itemsize == len(data) and (dtype.itemsize > 0 or count <= 1))
    if not data:
        return numpy.zeros(shape, dtype, order)
    made = numpy.ndarray(shape, dtype, data, order=order).copy(order)
    if dtype.kind == "U":  # invalid code points would raise at any later use
        codes = numpy.frombuffer(data, numpy.dtype("u4").newbyteorder(dtype.byteorder))
        _check(bool((codes <= sys.maxunicode).all()))
    return made


@_maker(*_numpy_names("multiarray", "scalar"))
def _scalar(opaque: Description) -> Any:
    args = _bare(opaque)
    _check(len(args) == 2)
    return _array(args[1], args[0], (), "C")[()]


@_maker(*_numpy_names("multiarray", "_reconstruct"))
def _reconstructed(opaque: Description) -> numpy.ndarray[Any, Any]:
    """args (numpy.ndarray, (0,), b"b"); state (1, shape, dtype, is Fortran order, bytes)."""
    _check_call(opaque, "has_state")
    _check(len(opaque.args) == 3 and opaque.args[0] is numpy.ndarray)
    state = opaque.state
    _check(type(state) is tuple and len(state) == 5)
    return _array(state[4], state[2], state[1], "F" if state[3] else "C")


@_maker(*_numpy_names("numeric", "_frombuffer"))
def _from_buffer(opaque: Description) -> numpy.ndarray[Any, Any]:
    args = _bare(opaque)
    _check(len(args) == 4 and args[3] in ("C", "F"))
    return _array(args[0], args[1], args[2], args[3], (bytes, bytearray))


# ---- torch ----


def _torch() -> Any:
    torch = sys.modules.get("torch")
    _check(torch is not None)
    return torch


def _are_sizes(value: Any) -> bool:
    return type(value) in (tuple, list) and _all_are(int, value)


def _layout(name: str) -> Any:
    torch = _torch()
    found = getattr(torch, name.removeprefix("torch."), None)
    _check(isinstance(found, torch.layout))
    return found


_positional("torch.Size", lambda sizes: _torch().Size(sizes), (_are_sizes,))
_positional("torch.device", lambda *args: _torch().device(*args), (str,), (str, int))
_positional("torch.serialization._get_layout", _layout, (str,))


@_maker("torch._utils._rebuild_parameter_with_state")
def _parameter(opaque: Description) -> Any:
    """args (tensor, requires_grad, no hooks, attributes); the tensor is created already."""
    args = _bare(opaque)
    torch = _torch()
    _check(len(args) == 4 and type(args[0]) is torch.Tensor and type(args[1]) is bool)
    _check(not args[2] and type(args[3]) is dict and _all_are(str, args[3]))
    _check(not any(hasattr(torch.nn.Parameter, name) for name in args[3]))
    made = torch.nn.Parameter(args[0], args[1])
    vars(made).update(args[3])
    return made


def _torch_constant(name: str) -> Any:
    """A torch dtype that tensors of checkpoints don't have, a memory format or a qscheme."""
    torch = _torch()
    found = vars(torch).get(name.removeprefix("torch."))
    _check(isinstance(found, (torch.dtype, torch.memory_format, torch.qscheme)))
    return found


# ---- Lookup ----


def is_plain(full_name: str) -> bool:
    """Whether objects of the class are loaded as such without permission."""
    if full_name in _MAKERS or full_name in _GLOBALS:
        return True
    return full_name.startswith("torch.") and _is_torch_constant(full_name.removeprefix("torch."))


def _is_torch_constant(name: str) -> bool:
    try:
        _torch_constant(name)
    except _UnexpectedPickleError:
        return False
    return True


def made(opaque: Description) -> Any:
    """The object if it is of a plain type, otherwise `opaque` itself.

    Args:
        opaque: the objects that it contains are created already.
    """
    try:
        if opaque.kind == "global":
            if opaque.module == "torch":
                return _torch_constant(opaque.name)
            return _GLOBALS.get(opaque.full_name, opaque)
        maker = _MAKERS.get(opaque.full_name)
        return opaque if maker is None else maker(opaque)
    except (_UnexpectedPickleError, TypeError, ValueError, ArithmeticError, RuntimeError):
        return opaque  # RuntimeError: a device or dtype that this torch does not know
