"""Objects of plain types come back unchanged through Tilestone, stock PyTorch and both.

Every type is tested alone, in containers, and inside an object of an allowed class. Random trees of
all types are saved, loaded, saved again and loaded by stock.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import logging
import pathlib
import struct
import uuid
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilestone

HOUR = datetime.timedelta(hours=1)
RECORD = numpy.dtype([("a", ">f4"), ("b", "i1", (2,)), ("c", "U3")], align=True)


def module_state() -> collections.OrderedDict:
    return torch.nn.Linear(2, 2).state_dict()  # an OrderedDict with the attribute _metadata


def with_attributes(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    parameter.tensor_model_parallel, parameter.dims = True, {"split": [0]}
    return parameter


VALUES: dict[str, Any] = {
    "bool": True, "int": -7, "big": -(2**200), "float": -0.0, "text": "lone \ud800 surrogate",
    "nan": struct.unpack("<d", b"\x07\0\0\0\0\0\xf8\xff")[0], "bytes": b"\x00\xff",
    "complex": complex(-0.0, float("inf")), "range": range(5, -7, -3), "slice": slice(None, 2, "x"),
    "bytearray": bytearray(b"\x00\xff"), "no bytearray": bytearray(),
    "set": {1, "a", (2, None)}, "no set": set(), "frozenset": frozenset({b"x", 2.5}),
    "ellipsis": ..., "class": float, "keys": ({1: "int", "1": "str", None: 0, (1, 2): 1.5},),
    "date": datetime.date(2024, 2, 29), "time": datetime.time(1, 2, 3, 4),
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, tzinfo=datetime.timezone(HOUR, "x")),
    "utc": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
    "timedelta": datetime.timedelta(-1, 5, 7), "timezone": datetime.timezone(-HOUR),
    "decimal": decimal.Decimal("-1.50E+7"), "decimal nan": decimal.Decimal("sNaN12"),
    "fraction": fractions.Fraction(-22, 7), "uuid": uuid.UUID(int=2**127 + 5),
    "path": pathlib.Path("a/../b"), "pure": pathlib.PureWindowsPath("c:\\x", "y"),
    "ordered": (collections.OrderedDict([("b", 1), ("a", [2])]),),
    "module": (module_state(),), "counter": (collections.Counter("aab"),),
    "defaultdict": (collections.defaultdict(list, {1: [2], "x": []}),),
    "defaultdict none": (collections.defaultdict(None, {}),),
    "deque": collections.deque([1, [2]], 5), "deque of no end": collections.deque("ab"),
    "size": torch.Size([2, 0, 3]), "device": torch.device("cuda", 1), "cpu": torch.device("cpu"),
    "dtype": torch.bfloat16, "other dtype": torch.quint8, "layout": torch.strided,
    "float64": numpy.float64(-0.0), "str_": numpy.str_("ü"), "no str_": numpy.str_(""),
    "bytes_": numpy.bytes_(b"ab"), "bool_": numpy.bool_(True), "int8": numpy.int8(-3),
    "complex64": numpy.complex64(1 - 2j), "datetime64": numpy.datetime64("2024-02-29", "ns"),
    "timedelta64": numpy.timedelta64(5, "h"), "bfloat16": ml_dtypes.bfloat16(1.5),
    "longdouble": numpy.longdouble("1.25"), "void": numpy.void(b"ab"),
    "numpy dtype": numpy.dtype(">f4"), "record dtype": RECORD, "unit": numpy.dtype("m8[25us]"),
    "bfloat16 dtype": numpy.dtype(ml_dtypes.bfloat16), "sub dtype": numpy.dtype(("i2", (3,))),
    "array": (numpy.arange(6, dtype="i2").reshape(2, 3),), "0-d": (numpy.array(2.5),),
    "fortran": (numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),),
    "text array": (numpy.array([["a", "bcd"]]),), "no array": (numpy.zeros((0, 3), "f2"),),
    "records": (numpy.zeros(2, RECORD),), "times": (numpy.array(["2024-02-29"], "M8[D]"),),
    "bits": (numpy.array([1, 2], ml_dtypes.float8_e4m3fn),),
    "tensor": (torch.arange(3), torch.randn(2, dtype=torch.complex64).conj()),
    "parameter": (torch.nn.Parameter(torch.ones(2)), {"x": torch.nn.Parameter(torch.zeros(0))}),
    "frozen parameter": (torch.nn.Parameter(torch.arange(3), requires_grad=False),),
    "parameter with attributes": (with_attributes(torch.nn.Parameter(torch.ones(2))),),
    "requires grad": (torch.ones(2, dtype=torch.bfloat16, requires_grad=True), {1}),
    "part of a graph": (torch.ones(3, requires_grad=True) * 2,),
}  # fmt: skip

PLACES = {
    "alone": lambda value: value,
    "in a dict": lambda value: {"a": value},
    "in a list": lambda value: [value, 1],
    "in a tuple": lambda value: ({"b": [value]}, value),
    "in an object": lambda value: argparse.Namespace(inner=[value]),
}
ALLOW = ("argparse.Namespace",)


def same(a: Any, b: Any) -> bool:
    """Whether both have the same type and content, bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, argparse.Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, (list, tuple, collections.deque)):
        limits = not isinstance(a, collections.deque) or a.maxlen == b.maxlen
        return limits and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        extra = same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        factory = getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
        return extra and factory and same(list(a), list(b)) and same([*a.values()], [*b.values()])
    if isinstance(a, torch.Tensor):
        grad = a.requires_grad == b.requires_grad and same(vars(a), vars(b))
        return grad and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        orders = a.flags.c_contiguous == b.flags.c_contiguous
        return a.dtype == b.dtype and a.shape == b.shape and orders and a.tobytes() == b.tobytes()
    if isinstance(a, numpy.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b)


def stock_loaded(ckpt: str, state: dict) -> dict:
    wanted = blank(state)
    dcp.load(wanted, checkpoint_id=ckpt, no_dist=True)
    return wanted


def blank(value: Any) -> Any:
    if type(value) is dict:
        return {key: blank(item) for key, item in value.items()}
    return None


@pytest.mark.parametrize("name", VALUES)
def test_a_plain_object_comes_back_from_either_side_and_after_two_generations(
    name: str, tmp_path: pathlib.Path
) -> None:
    state = {place: put(VALUES[name]) for place, put in PLACES.items()}
    ours, theirs, again = (str(tmp_path / part) for part in ("ours", "theirs", "again"))
    tilestone.save(state, ours)
    dcp.save(state, checkpoint_id=theirs, no_dist=True)
    loaded = tilestone.load(blank(state), ours, allow_classes=ALLOW)
    assert same(loaded, state)
    assert same(tilestone.load(blank(state), theirs, allow_classes=ALLOW), state)
    assert same(stock_loaded(ours, state), state)
    with tilestone.open(ours, framework="torch") as opened:
        for key, leaf in zip(opened.keys(), leaves(state), strict=True):
            assert same(opened.object(key, allow_classes=ALLOW), leaf)
    # Objects that are not allowed stay Opaque, and are saved as the original objects.
    tilestone.save(tilestone.load(blank(state), theirs), again)
    assert same(tilestone.load(blank(state), again, allow_classes=ALLOW), state)
    assert same(stock_loaded(again, state), state)


def test_the_second_of_two_equal_hours_stays_the_second(ckpt: str) -> None:
    state = {"x": (datetime.time(1, 2, fold=1), datetime.datetime(2024, 10, 27, 2, fold=1))}
    tilestone.save(state, ckpt)  # protocol 2, which stock uses, would lose it
    assert same(tilestone.load({"x": None}, ckpt), state) and same(stock_loaded(ckpt, state), state)


def test_an_array_of_foreign_byte_order_keeps_it(ckpt: str) -> None:
    state = {"x": (numpy.arange(6, dtype=">i2").reshape(2, 3),)}
    tilestone.save(state, ckpt)
    assert same(tilestone.load({"x": None}, ckpt), state)
    # Python's own unpickling gives the same numbers in the machine's byte order.
    assert stock_loaded(ckpt, state)["x"][0].tolist() == [[0, 1, 2], [3, 4, 5]]


def leaves(state: dict) -> Any:
    for value in state.values():
        yield from leaves(value) if type(value) is dict else (value,)


class Flag(int):
    pass


class Numbers(list):
    pass


Point = collections.namedtuple("Point", "x y")


class Many:
    """Appends items, but has no extend()."""

    def __init__(self) -> None:
        self.items: list = []

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __reduce__(self) -> tuple:
        return Many, (), None, iter(self.items)


class Keyed:
    """A class that is created with keyword arguments."""

    def __new__(cls, a: int, *, b: int) -> Keyed:
        made = super().__new__(cls)
        made.a, made.b = a, b
        return made

    def __getnewargs_ex__(self) -> tuple:
        return (self.a,), {"b": self.b}


class Outer:
    class Inner:
        def __init__(self, x: Any = 1) -> None:
            self.x = x

    @classmethod
    def made(cls, x: Any) -> Any:
        return cls.Inner(x)


class ByMethod:
    def __reduce__(self) -> tuple:
        return Outer.made, (7,)


def shared() -> argparse.Namespace:
    part = [argparse.Namespace(text="x" * 2000, numbers=list(range(200)))]
    return argparse.Namespace(parts=[part] * 3000, last=part)


def tupled_deep() -> Any:
    value: Any = (1,)
    for _ in range(60):
        value = [value, value]
    return (value,)


FOREIGN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "subclass of int": (Flag(3), ("test_object_types.Flag",)),
    "subclass of list": (Numbers([1, 2]), ("test_object_types.Numbers",)),
    "namedtuple": (Point(1, [2]), ("test_object_types.Point",)),
    "append without extend": (Many(), ("test_object_types.Many",)),
    "keyword arguments": (Keyed(1, b=2), ("test_object_types.Keyed",)),
    "inner class": (Outer.Inner({1, 2}), ("test_object_types.Outer.Inner",)),
    "class method": (ByMethod(), ("test_object_types.Outer.made",)),
    "error": (ValueError("x"), ("builtins.ValueError",)),
    "user dict": (collections.UserList([1]), ("collections.UserList",)),
    "widely shared": (shared(), ALLOW),
}
FOREIGN["append without extend"][0].append((1, {2}))


def told(value: Any) -> Any:
    """A description of an object for comparisons."""
    if isinstance(value, Outer.Inner):
        return "Inner", value.x
    if isinstance(value, (Many, Keyed, collections.UserList)):
        return type(value), vars(value)
    if isinstance(value, argparse.Namespace):
        return value.parts[2999][0].numbers, value.parts[0] is value.last
    return type(value), repr(value)


@pytest.mark.parametrize("place", ["alone", "in a tuple"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_loaded_opaque_is_saved_as_the_object_that_it_was(
    name: str, place: str, tmp_path: pathlib.Path
) -> None:
    value, allow = FOREIGN[name]
    whole = (value, [value]) if place == "in a tuple" else value
    want = value if name != "class method" else Outer.Inner(7)
    first, second, third = (str(tmp_path / part) for part in ("first", "second", "third"))
    tilestone.save({"x": whole}, first)

    def part(loaded: Any) -> Any:
        return loaded[1][0] if place == "in a tuple" else loaded

    for source, target in ((first, second), (second, third)):
        loaded = tilestone.load({"x": None}, source)
        assert isinstance(part(loaded["x"]), tilestone.Opaque)
        # Inside an object that is not an Opaque, and therefore is pickled.
        tilestone.save({"x": loaded["x"], "y": argparse.Namespace(o={1: loaded["x"]})}, target)
    for source in (first, third):
        assert told(part(tilestone.load({"x": None}, source, allow_classes=allow)["x"])) == told(want)
        assert told(part(stock_loaded(source, {"x": 0})["x"])) == told(want)
    assert told(part(stock_loaded(third, {"y": 0})["y"].o[1])) == told(want)


def test_a_value_shared_beyond_all_memory_is_one_value(ckpt: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="unfold to more than") as raised:
        tilestone.save({"x": tupled_deep()}, ckpt)
    assert raised.value.key == "x"
    part = [1, "text"]
    tilestone.save({"x": (part, [part] * 1000)}, ckpt)
    loaded = tilestone.load({"x": None}, ckpt)["x"]
    assert loaded[0] is loaded[1][999]
    theirs = stock_loaded(ckpt, {"x": 0})["x"]
    assert theirs == loaded and theirs[0] is theirs[1][999]


class Unpicklable:
    def __reduce__(self) -> tuple:
        raise RuntimeError("no way")


def cyclic() -> list:
    cycle: list = [1]
    cycle.append(cycle)
    return cycle


def deep() -> Any:
    value: Any = ()
    for _ in range(1200):
        value = (value,)
    return value


REFUSED = {
    "cycle": lambda: (cyclic(),),
    "cycle of objects": lambda: (lambda n: (vars(n).update(n=n), n)[1])(argparse.Namespace()),
    "sub-byte": lambda: argparse.Namespace(t=torch.empty(2, dtype=torch.int4)),
    "sub-byte in a tuple": lambda: (torch.empty(2, dtype=torch.uint4),),
    "storage": lambda: argparse.Namespace(s=torch.arange(3).untyped_storage()),
    "depth": deep,
    "lambda": lambda: (lambda: 1),
    "local class": lambda: type("Local", (), {})(),
    "error": lambda: (Unpicklable(),),
    "generator": lambda: (x for x in ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_read_back_is_refused_by_its_key(name: str, ckpt: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"fine": 1, "a": {"b": REFUSED[name]()}}, ckpt)
    assert raised.value.key == "a.b"
    assert not pathlib.Path(ckpt, ".metadata").exists()


HOSTILE = {
    "bytearray of a size": ("call", "builtins", "bytearray", (10**15,)),
    "set of an iterator": ("call", "builtins", "set", (range(10**15),)),
    "power of ten": ("call", "fractions", "Fraction", ("1e1000000000",)),
    "factory": ("call", "collections", "defaultdict", (print,)),
    "eval": ("call", "builtins", "eval", ("1",)),
    "getattr": ("call", "builtins", "getattr", ((), "__class__")),
    "tzinfo": ("call", "datetime", "datetime", (bytes(10), "x")),
    "huge deque": ("call", "collections", "deque", (range(10**15),)),
    "object array": ("call", "numpy", "dtype", ("O8", False, True)),
    "numpy fields": ("call", "numpy", "dtype", ("f8,O", False, True)),
    "scalar of too little": (
        "call", "numpy._core.multiarray", "scalar", (numpy.dtype("f8"), b"123"),
    ),
    "device": ("call", "torch", "device", ("no such device",)),
    "layout": ("call", "torch.serialization", "_get_layout", ("torch.load",)),
    "torch's function": ("global", "torch", "load"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_a_plain_type_would_not_write_stay_opaque(name: str, ckpt: str) -> None:
    hostile = tilestone.Opaque(*HOSTILE[name])
    tilestone.save({"x": (hostile,)}, ckpt)
    (loaded,) = tilestone.load({"x": None}, ckpt)["x"]
    assert isinstance(loaded, tilestone.Opaque) and loaded.full_name == hostile.full_name


def test_a_class_that_comes_back_opaque_is_logged_once_with_its_key(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    class_name = "test_object_types.Flag"
    from tilestone._objects import pickling

    pickling._logged.clear()
    with caplog.at_level(logging.WARNING, "tilestone"):
        state = {"a": {"b": Flag(1)}, "c": (Flag(2), {3}), "d": {1, 2}}
        tilestone.save(state, ckpt)
        tilestone.save(state, ckpt, overwrite=True)
    told_lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told_lines) == 1 and told_lines[0].startswith("a.b: ")
    assert f" {class_name};" in told_lines[0]


TEXT = st.text(st.characters(codec=None, categories=None), max_size=4)
LEAVES = st.one_of(
    st.sampled_from(list(VALUES.values())),
    st.integers(), st.floats(), TEXT, st.binary(max_size=9), st.complex_numbers(), st.booleans(),
    st.decimals(), st.fractions(), st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.timedeltas(), st.uuids(), st.dates(), st.times(),
)  # fmt: skip
KEYS = st.one_of(TEXT, st.integers(-3, 3), st.none(), st.tuples(st.integers(), st.booleans()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(collections.deque),
        inner.map(lambda value: argparse.Namespace(inner=value)),
        st.sets(KEYS, max_size=3), inner.map(lambda value: [value] * 2),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(tree=TREES)
def test_random_trees_come_back_or_are_refused(tree: Any, tmp_path: pathlib.Path) -> None:
    state = {"x": (tree,)}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    try:
        tilestone.save(state, one, overwrite=True)
    except tilestone.InvalidArgumentError as error:
        assert error.key == "x"
        return
    assert same(tilestone.load({"x": None}, one, allow_classes=ALLOW), state)
    tilestone.save(tilestone.load({"x": None}, one), two, overwrite=True)
    assert same(tilestone.load({"x": None}, two, allow_classes=ALLOW), state)
    assert same(stock_loaded(one, {"x": 0}), state) and same(stock_loaded(two, {"x": 0}), state)


def test_a_bytes_io_comes_back_as_stock_gives_it_back(ckpt: str, tmp_path: pathlib.Path) -> None:
    made = io.BytesIO(b"extra state")
    made.seek(5)
    made.name = "scales"  # type: ignore[attr-defined]

    state = {"x": made, "list": [io.BytesIO(), torch.ones(1)], "inside": (made,)}
    tilestone.save(state, ckpt)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    for path in (ckpt, str(tmp_path / "stock")):
        template: dict[str, Any] = {"x": io.BytesIO(), "inside": None}
        for loaded in (tilestone.load(path), tilestone.load(template, path)):
            for found in (loaded["x"], loaded["inside"][0]):
                assert type(found) is io.BytesIO and found.getvalue() == b"extra state"
                assert found.tell() == 5 and found.name == "scales"
    stock: dict[str, Any] = {"x": None}
    dcp.load(stock, checkpoint_id=ckpt)
    assert stock["x"].getvalue() == b"extra state" and stock["x"].tell() == 5
    odd = tilestone.Opaque("new", "_io", "BytesIO", has_state=True, state=(b"x", -1, None))
    assert tilestone._objects.plain_types.made(odd) is odd


class Failing:
    """An array of another library that can't be exported at the moment."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), KeyboardInterrupt()])
def test_an_array_whose_export_fails_is_not_saved_as_an_object(
    tmp_path: pathlib.Path, error: BaseException
) -> None:
    kind = tilestone.InvalidArgumentError if isinstance(error, RuntimeError) else type(error)
    for save in (tilestone.save, tilestone.async_save):
        with pytest.raises(kind):
            save({"x": Failing(error)}, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
