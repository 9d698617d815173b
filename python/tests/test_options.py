"""Invalid options and paths, and ranks whose options differ."""

from __future__ import annotations

import inspect
import math
import os
import pathlib
import socket
import time
from typing import Any

import numpy
import pytest
import ranks
from messages import mentions

import tilestone

FAILING = 1

# (keyword, value, what the message mentions in this order). The error is an InvalidArgumentError,
# for a URL an UnsupportedError.
SAVE = [
    ("resources", tilestone.Resources(threads=-1), ["resources.threads", "-1", "1 to 1024"]),
    ("resources", tilestone.Resources(files_per_rank=0), ["files_per_rank", "0", "1 to 1024"]),
    ("resources", tilestone.Resources(buffer_bytes=1), ["buffer_bytes", "1", "131072"]),
    ("resources", 4, ["resources", "tilestone.Resources", "4"]),
    ("timeout", -1, ["timeout", "-1", "0"]),
    ("timeout", 0, ["timeout", "0", "0"]),
    ("timeout", math.inf, ["timeout", "inf", "None"]),
    ("timeout", math.nan, ["timeout", "nan"]),
    ("timeout", 10**400, ["timeout", "seconds"]),
    ("timeout", "60", ["timeout", "seconds", "None", "'60'"]),
    ("overwrite", "no", ["overwrite", "True or False", "'no'"]),
    ("attributes", {"iteration": 100}, ["attributes", "strings", "{'iteration'"]),
    ("attributes", ["a"], ["attributes", "strings", "['a']"]),
    ("attributes", {"a": "\udc80"}, ["attributes", "UTF-8"]),
    ("attributes", {"a": "x" * (1 << 20)}, ["attributes", "1048577 bytes"]),
    ("tensor_attributes", {"w": 1}, ["tensor_attributes", "dict of dicts"]),
    ("tensor_attributes", ["w"], ["tensor_attributes", "dict of dicts"]),
    ("tensor_attributes", {"w": {1: 2}}, ["tensor_attributes", "dict of dicts"]),
    ("tensor_attributes", {"not there": {"a": 1}}, ["tensor", "not save"]),
    ("checks", "access", ["checks", "tilestone.Checks", "'access'"]),
    ("checks", None, ["checks", "tilestone.Checks", "None"]),
    ("copies", [0, 1], ["copies", "tilestone.LocalCopies", "[0, 1]"]),
    ("progress", "x", ["progress", "function", "'x'"]),
    ("path", 3, ["path", "os.PathLike", "3"]),
    ("path", "", ["path", "empty"]),
    ("path", "a\0b", ["NUL"]),
    ("path", "gs://bucket/x", ["URL", '"gs"']),
    ("path", pathlib.Path("s3://bucket/x"), ["URL", '"s3"']),
    ("path", "~no-such-user/x", ["home directory", '"~no-such-user"']),
    ("state", [1], ["state", "dict", "list"]),
]
LOAD = [
    *[case for case in SAVE if case[0] in ("resources", "checks", "timeout", "path", "state")],
    ("cast", 1, ["cast", "True or False", "1"]),
    ("differences", "report", ["differences", "tilestone.Differences", "'report'"]),
    ("reading", "keep", ["reading", "tilestone.Reading", "'keep'"]),
    ("format", 5, ["format", "string", "5"]),
    ("allow_classes", "a.b", ["'a.b'", "allow_classes=['a.b']"]),
    ("allow_classes", [b"a.b"], ["allow_classes", "names"]),
    ("allow_classes", None, ["allow_classes", "names", "None"]),
]
# (class, field, value, what the message mentions in this order)
FIELDS: list[tuple[type, str, Any, list[str]]] = [
    (tilestone.Resources, "threads", 1 << 70, [str(1 << 70)]),
    (tilestone.Resources, "threads", 1.5, ["1.5"]),
    (tilestone.Resources, "threads", "4", ["'4'"]),
    (tilestone.Resources, "buffer_bytes", -1, ["-1"]),
    (tilestone.Checks, "access", 1, ["True or False", "1"]),
    (tilestone.Checks, "checksums", 0, ["True or False", "0"]),
    (tilestone.Checks, "common_differs", "log", ['"ignore", "warn" or "error"', '"log"']),
    (tilestone.Reading, "two_phase", "perhaps", ['"auto", "always" or "never"', '"perhaps"']),
    (tilestone.Reading, "cache", "hold", ['"bypass" or "keep"', '"hold"']),
    (tilestone.Reading, "follow_links", None, ["True or False", "None"]),
    (tilestone.Differences, "other_shape", "warn", ['"error", "report" or "ignore"', '"warn"']),
    (tilestone.Differences, "not_requested", 3, ["string", "3"]),
    (tilestone.Differences, "report", [], ["LoadReport or None", "[]"]),
    (tilestone.LocalCopies, "group", "tp", ["group or a list of ranks", "'tp'"]),
    (tilestone.LocalCopies, "group", [0, "1"], ["whole number", "'1'"]),
    (tilestone.LocalCopies, "group", numpy.array(3), ["array(3)"]),
    (tilestone.LocalCopies, "max_bytes", "1 GB", ["whole number", "'1 GB'"]),
    (tilestone.ByFiles, "rank", "0", ["whole number", "'0'"]),
    (tilestone.ByFiles, "token", b"bytes of it", ["string"]),
    (tilestone.ByFiles, "number", -1, ["-1"]),
    (tilestone.ByFiles, "wait", 0, ["True or False", "0"]),
]


@pytest.mark.parametrize(("kind", "field", "value", "facts"), FIELDS)
def test_a_value_with_a_field_of_a_wrong_type_can_not_be_made(
    kind: type, field: str, value: Any, facts: list[str]
) -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        kind(**{field: value})
    assert mentions(str(raised.value), f"{kind.__name__}.{field}", *facts)


def test_values_are_frozen_comparable_and_show_what_is_not_the_default() -> None:
    copies = tilestone.LocalCopies([0, numpy.int64(1)], max_bytes=5)
    assert copies == tilestone.LocalCopies((0, 1), 5) != tilestone.LocalCopies([0, 1])
    assert repr(copies) == "LocalCopies(group=(0, 1), max_bytes=5)"
    assert repr(tilestone.Checks()) == "Checks()" and hash(copies) == hash(copies)
    with pytest.raises(AttributeError):
        copies.max_bytes = 3  # type: ignore[misc]
    for kind in (tilestone.ByFiles, tilestone.LocalCopies, tilestone.Checks, tilestone.Reading,
                 tilestone.Differences, tilestone.Resources):  # fmt: skip
        assert kind() == kind()
        for name in inspect.signature(kind).parameters:
            assert f"    {name}: " in (kind.__doc__ or "")


def test_the_calls_have_few_parameters_and_show_them() -> None:
    counts = {
        name: len(inspect.signature(function).parameters)
        for name, function in {
            "save": tilestone.save, "load": tilestone.load,
            "open": tilestone.open, "Session": tilestone.Session,
        }.items()
    }  # fmt: skip
    assert counts == {"save": 15, "load": 14, "open": 7, "Session": 3}
    shown = inspect.signature(tilestone.save).parameters
    assert shown["checks"].default == tilestone.Checks()
    assert shown["timeout"].default == 1800


def kind_of(facts: list[str]) -> str:
    return "UnsupportedError" if "URL" in facts else "InvalidArgumentError"


def call_badly(rank: int, world: int, folder: str, which: str) -> list[tuple[str, str, float]]:
    """The type, text and duration of the error of each bad call. A correct call follows each."""
    cases, good = (SAVE, {"w": numpy.arange(4)}) if which == "save" else (LOAD, {"w": None})
    function = tilestone.save if which == "save" else tilestone.load
    errors = []
    for keyword, value, _ in cases:
        keywords = {"state" if which == "save" else "wanted": good, "path": folder}
        if rank == FAILING:
            keywords["wanted" if (keyword, which) == ("state", "load") else keyword] = value
        started = time.monotonic()
        try:
            function(**keywords)
            errors.append(("", "nothing was raised", 0.0))
        except tilestone.CheckpointError as error:
            errors.append((type(error).__name__, str(error), time.monotonic() - started))
    return errors


@pytest.mark.parametrize("which", ["save", "load"])
def test_what_can_not_be_meant_on_one_rank_is_named_on_all_at_once(
    which: str, worlds: ranks.Worlds, ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilestone.save({"w": numpy.arange(4)}, ckpt, group=tilestone.solo())
    before = sorted(os.listdir(ckpt))
    results = worlds[2].run(call_badly, ckpt, which)
    for i, (keyword, _, facts) in enumerate(SAVE if which == "save" else LOAD):
        for kind, text, took in (result[i] for result in results):
            assert mentions(text, *facts), f"{keyword}: {text}"
            assert kind == kind_of(facts), f"{keyword}: {text}"
            assert mentions(text, f"rank {FAILING}")
            assert took < 60
    assert sorted(os.listdir(ckpt)) == before


def test_a_url_or_tilde_makes_no_folder_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url in ("gs://bucket/x", pathlib.Path("s3://bucket/x"), "file:///x"):
        for call in (
            lambda: tilestone.save({"a": 1}, url),  # noqa: B023
            lambda: tilestone.load({"a": 1}, url),  # noqa: B023
            lambda: tilestone.open(url),  # noqa: B023
            lambda: tilestone.gc(url),  # noqa: B023
            lambda: tilestone.CheckpointManager(url),  # noqa: B023
        ):
            with pytest.raises(tilestone.UnsupportedError, match="URL"):
                call()
    tilestone.save({"a": 1}, "~/x")
    assert os.listdir(tmp_path) == ["home"]
    assert tilestone.load({"a": None}, pathlib.Path("~/x")) == {"a": 1}


def test_numbers_and_names_of_open_and_read_are_checked(ckpt: str) -> None:
    tilestone.save({"a": 1}, ckpt)
    for keyword, value, facts in [
        *[case for case in SAVE if case[0] in ("resources", "checks", "path")],
        ("framework", "jax", ["framework", "numpy", "torch", "'jax'"]),
        ("cast", True, ["no option cast"]),
    ]:
        keywords = {"path": ckpt, keyword: value}
        with pytest.raises(tilestone.CheckpointError) as raised:
            tilestone.open(**keywords)
        assert mentions(str(raised.value), *facts)
        assert type(raised.value).__name__ == kind_of(facts)
    with tilestone.open(ckpt) as opened, pytest.raises(tilestone.InvalidArgumentError) as raised:
        opened.object("a", allow_classes="a.b")
    assert mentions(str(raised.value), "allow_classes", "names", "'a.b'")
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.gc(ckpt, delete="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_attributes_and_hosts_are_kept_with_the_checkpoint(format: str, ckpt: str) -> None:
    attributes = {"iteration": "100", "job": "é\n", "": ""}
    tilestone.save({"w": numpy.ones(2)}, ckpt, format=format, attributes=attributes)
    with tilestone.open(ckpt) as opened:
        assert opened.attributes == attributes
        assert opened.hosts == [socket.gethostname()]
        (of_rank,) = opened.save_timings
        assert list(of_rank) == ["planning", "writing"]
        assert all(seconds >= 0 for seconds in of_rank.values())
    tilestone.save({"w": numpy.ones(2)}, ckpt, format=format, overwrite=True)
    with tilestone.open(ckpt) as opened:
        assert opened.attributes == {}


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_attributes_of_tensors_come_back_by_key(format: str, ckpt: str) -> None:
    given = {"kind": "glu", "order": [0, (1, None)], "by": {"a": 1.5, 3: b"x"}, "on": True}
    state = {"w": numpy.ones(2), "v": {"u": numpy.ones(3)}}
    tilestone.save(state, ckpt, format=format, tensor_attributes={"w": given, "v.u": {"n": -7}})
    with tilestone.open(ckpt) as opened:
        assert opened.tensor_attributes("w") == given
        assert opened.tensor_attributes("v.u") == {"n": -7}
        with pytest.raises(tilestone.NotFoundError):
            opened.tensor_attributes("x")
    for value in (2**64, {1, 2}, numpy.ones(2)):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.save(state, ckpt, tensor_attributes={"w": {"mine": value}}, overwrite=True)
        assert raised.value.key == "w" and '"mine"' in str(raised.value)


def test_no_timeout_and_bytes_for_a_path(ckpt: str) -> None:
    tilestone.save({"a": 1}, os.fsencode(ckpt), timeout=None)  # type: ignore[arg-type]
    assert tilestone.load({"a": None}, ckpt, timeout=None) == {"a": 1}


def test_an_invalid_group_is_refused() -> None:
    for keywords in ({"group": 5}, {"group": object()}, {"by_files": 3}):
        with pytest.raises(tilestone.InvalidArgumentError):
            tilestone.save({"a": 1}, "nowhere", **keywords)  # type: ignore[arg-type]
    assert not os.path.exists("nowhere")


def save_elsewhere(rank: int, world: int, folder: str) -> None:
    tilestone.save({"w": numpy.arange(4)}, f"{folder}{rank // 2}", overwrite=True, timeout=60)


def save_otherwise(rank: int, world: int, folder: str) -> None:
    tilestone.save({"w": numpy.arange(4)}, folder, overwrite=rank == 1, timeout=60)


def load_otherwise(rank: int, world: int, folder: str) -> None:
    reading = tilestone.Reading(two_phase="never" if rank == 2 else "auto")
    tilestone.load({"w": None}, folder, reading=reading, timeout=60)


def test_options_that_differ_between_torch_ranks_are_named(worlds: ranks.Worlds, ckpt: str) -> None:
    tilestone.save({"w": numpy.ones(2)}, ckpt + "0", group=tilestone.solo())
    for function, *facts in (
        (save_elsewhere, "ranks 0 and 1", "save", f"{ckpt}0", "rank 2", "save", f"{ckpt}1"),
        (save_otherwise, "overwrite", "ranks 0 and 2", "False", "rank 1", "True"),
        (load_otherwise, "reading.two_phase", "ranks 0 and 1", '"auto"', "rank 2", '"never"'),
    ):
        for result in worlds[3].collect(function, ckpt):
            assert result.kind == "MismatchError", result.text
            assert mentions(result.text, *facts), result.text
    with tilestone.open(ckpt + "0") as opened:
        assert (opened.read("w") == 1).all()
    assert not os.path.exists(ckpt + "1")


class Refusing:
    """A Stateful that refuses the loaded state on one rank."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, object]:
        return {"v": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.refuses:
            raise RuntimeError("no room")


def load_refusing(rank: int, world: int, folder: str) -> None:
    tilestone.save({"s": Refusing(False)}, folder, timeout=60)
    tilestone.load({"s": Refusing(rank == FAILING)}, folder, timeout=60)


def test_an_error_of_a_rank_that_can_not_take_what_was_loaded_reaches_all(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    for rank, result in enumerate(worlds[3].collect(load_refusing, ckpt)):
        assert isinstance(result, ranks.Raised), f"rank {rank} did not raise"
        assert "RuntimeError: no room" in result.text or rank == FAILING, result.text


@pytest.mark.parametrize(
    ("call", "option", "said"),
    [
        (tilestone.save, "overwite", "a save has no option overwite; did you mean overwrite?"),
        (tilestone.save, "threads", "resources=tilestone.Resources(threads=...)"),
        (tilestone.save, "max_bytes", "copies=tilestone.LocalCopies(max_bytes=...)"),
        (tilestone.save, "stage", "async_save has it"),
        (tilestone.load, "cache", "reading=tilestone.Reading(cache=...)"),
        (tilestone.load, "not_requested", "differences=tilestone.Differences(not_requested=...)"),
        (tilestone.open, "two_phase", "a call of open has no option two_phase; two_phase is a field"),
        (tilestone.load, "pigeons", "a load has no option pigeons"),
    ],
)
def test_an_unknown_option_says_what_may_be_meant(call: Any, option: str, said: str) -> None:
    arguments: list[Any] = [{"x": 1}, "nowhere"] if call is tilestone.save else ["nowhere"]
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        call(*arguments, **{option: 3})
    assert said in str(raised.value)
    assert ("; " in str(raised.value)) == (option != "pigeons")


def test_the_explanations_of_values_are_not_indented() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert "    " not in page  # Markdown shows an indented paragraph as code
    for kind in (tilestone.ByFiles, tilestone.Differences, tilestone.Keep):
        about, arguments = (kind.__doc__ or "").split("\nArgs:\n")
        assert "\n " not in about
        assert all(line.startswith("    ") for line in arguments.splitlines())


def test_a_template_and_a_path_in_the_wrong_order_are_named() -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="path must be .* not dict"):
        tilestone.load("nowhere", {"w": 1})  # type: ignore[arg-type]
    with pytest.raises(tilestone.InvalidArgumentError, match="path must be .* not dict"):
        tilestone.load({"w": 1}, {"w": 1})  # type: ignore[arg-type]
    with pytest.raises(tilestone.InvalidArgumentError, match="needs the checkpoint's path"):
        tilestone.load({"w": 1})
