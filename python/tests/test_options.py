"""Invalid options and paths, and ranks whose options differ."""

from __future__ import annotations

import math
import os
import pathlib
import socket
import time

import numpy
import pytest
import ranks

import tilestone

FAILING = 1

# (keyword, value, part of the message)
SAVE = [
    ("threads", -1, "threads is -1; expected 1 to 1024, or 0"),
    ("threads", 1 << 70, f"threads is {1 << 70}, which is out of range"),
    ("threads", 1.5, "threads must be a whole number, not 1.5"),
    ("threads", "4", "threads must be a whole number, not '4'"),
    ("files_per_rank", 0, "files_per_rank is 0; expected 1 to 1024"),
    ("buffer_bytes", 1, "buffer_bytes is 1; expected 131072"),
    ("buffer_bytes", -1, "buffer_bytes is -1, which is out of range"),
    ("timeout", -1, "timeout is -1; expected seconds, more than 0"),
    ("timeout", 0, "timeout is 0; expected seconds, more than 0"),
    ("timeout", math.inf, "timeout is inf; use None"),
    ("timeout", math.nan, "timeout is nan"),
    ("timeout", 10**400, "timeout can't be a number of seconds"),
    ("timeout", "60", "timeout must be a number of seconds or None, not '60'"),
    ("overwrite", "no", "overwrite must be True or False, not 'no'"),
    ("attributes", {"iteration": 100}, "attributes must be a dict with strings as keys and values, not {'iteration'"),
    ("attributes", ["a"], "attributes must be a dict with strings as keys and values, not ['a']"),
    ("attributes", {"a": "\udc80"}, "attributes can't be encoded as UTF-8"),
    ("attributes", {"a": "x" * (1 << 20)}, "attributes have 1048577 bytes"),
    ("tensor_attributes", {"w": 1}, "tensor_attributes must be a dict of dicts"),
    ("tensor_attributes", ["w"], "tensor_attributes must be a dict of dicts"),
    ("tensor_attributes", {"w": {1: 2}}, "tensor_attributes must be a dict of dicts"),
    ("tensor_attributes", {"not there": {"a": 1}}, "a tensor that this rank does not save"),
    ("agreement", "ruled", 'agreement must be "exchange" or "rule", not "ruled"'),
    ("agreement", None, "agreement must be a string, not None"),
    ("validate_access", 1, "validate_access must be True or False, not 1"),
    ("common_differs", "log", 'common_differs must be "ignore", "warn" or "error", not "log"'),
    ("progress", "x", "progress must be True, False or a function, not 'x'"),
    ("path", 3, "path must be a string or an os.PathLike, not 3"),
    ("path", "", "the path of a checkpoint is empty"),
    ("path", "a\0b", "NUL"),
    ("path", "s3://bucket/x", 'a URL of the scheme "s3"'),
    ("path", pathlib.Path("s3://bucket/x"), 'a URL of the scheme "s3"'),
    ("path", "~no-such-user/x", 'home directory of "~no-such-user" is not known'),
    ("state", [1], "a state must be a dict, not list"),
]
LOAD = [
    *[case for case in SAVE if case[0] in ("threads", "buffer_bytes", "timeout", "path", "state")],
    ("cast", 1, "cast must be True or False, not 1"),
    ("sharded_only", 1, "sharded_only must be True or False, not 1"),
    ("allow_classes", "a.b", "a collection of names, not 'a.b'; for one name: allow_classes=['a.b']"),
    ("allow_classes", [b"a.b"], "allow_classes must be a collection of names"),
    ("allow_classes", None, "allow_classes must be a collection of names, not None"),
    ("two_phase", "perhaps", 'two_phase must be "auto", "always" or "never", not "perhaps"'),
]


def call_badly(rank: int, world: int, folder: str, which: str) -> list[tuple[str, float]]:
    """The error and duration of each bad call. A correct call follows each of them."""
    cases, good = (SAVE, {"w": numpy.arange(4)}) if which == "save" else (LOAD, {"w": None})
    function = tilestone.save if which == "save" else tilestone.load
    told = []
    for keyword, value, _ in cases:
        keywords = {"state" if which == "save" else "wanted": good, "path": folder}
        if rank == FAILING:
            keywords["wanted" if (keyword, which) == ("state", "load") else keyword] = value
        started = time.monotonic()
        try:
            function(**keywords)
            told.append(("nothing was raised", 0.0))
        except tilestone.CheckpointError as error:
            told.append((str(error), time.monotonic() - started))
    return told


@pytest.mark.parametrize("which", ["save", "load"])
def test_what_can_not_be_meant_on_one_rank_is_named_on_all_at_once(
    which: str, worlds: ranks.Worlds, ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilestone.save({"w": numpy.arange(4)}, ckpt, comm=tilestone.solo())
    before = sorted(os.listdir(ckpt))
    results = worlds[2].run(call_badly, ckpt, which)
    for i, (keyword, _, said) in enumerate(SAVE if which == "save" else LOAD):
        for told, took in (result[i] for result in results):
            assert said in told, f"{keyword}: {told}"
            assert f"rank {FAILING}" in told
            assert took < 60
    assert sorted(os.listdir(ckpt)) == before


def test_a_url_or_tilde_makes_no_folder_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url in ("s3://bucket/x", pathlib.Path("gs://bucket/x"), "file:///x"):
        for call in (
            lambda: tilestone.save({"a": 1}, url),  # noqa: B023
            lambda: tilestone.load({"a": 1}, url),  # noqa: B023
            lambda: tilestone.open(url),  # noqa: B023
            lambda: tilestone.gc(url),  # noqa: B023
        ):
            with pytest.raises(tilestone.UnsupportedError, match="a URL of the scheme"):
                call()
    tilestone.save({"a": 1}, "~/x")
    assert os.listdir(tmp_path) == ["home"]
    assert tilestone.load({"a": None}, pathlib.Path("~/x")) == {"a": 1}


def test_numbers_and_names_of_open_and_read_are_checked(ckpt: str) -> None:
    tilestone.save({"a": 1}, ckpt)
    for keyword, value, said in [
        *[case for case in SAVE if case[0] in ("threads", "buffer_bytes", "path")],
        ("verify_checksums", 0, "verify_checksums must be True or False, not 0"),
    ]:
        keywords = {"path": ckpt, keyword: value}
        with pytest.raises(tilestone.CheckpointError) as raised:
            tilestone.open(**keywords)
        assert said in str(raised.value)
    with tilestone.open(ckpt) as opened, pytest.raises(tilestone.InvalidArgumentError) as raised:
        opened.object("a", allow_classes="a.b")
    assert "allow_classes must be a collection of names" in str(raised.value)
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.gc(ckpt, delete="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_attributes_and_hosts_are_kept_with_the_checkpoint(format: str, ckpt: str) -> None:
    attributes = {"iteration": "100", "job": "é\n", "": ""}
    tilestone.save({"w": numpy.ones(2)}, ckpt, format=format, attributes=attributes)
    with tilestone.open(ckpt) as opened:
        assert opened.attributes == attributes
        assert opened.hosts == [socket.gethostname()]
    tilestone.save({"w": numpy.ones(2)}, ckpt, format=format, overwrite=True)
    with tilestone.open(ckpt) as opened:
        assert opened.attributes == {}


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_attributes_of_tensors_come_back_by_key(format: str, ckpt: str) -> None:
    told = {"kind": "glu", "order": [0, (1, None)], "by": {"a": 1.5, 3: b"x"}, "on": True}
    state = {"w": numpy.ones(2), "v": {"u": numpy.ones(3)}}
    tilestone.save(state, ckpt, format=format, tensor_attributes={"w": told, "v.u": {"n": -7}})
    with tilestone.open(ckpt) as opened:
        assert opened.tensor_attributes("w") == told
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
    for keywords in ({"group": 5}, {"comm": object()}, {"comm": 3}):
        with pytest.raises(tilestone.InvalidArgumentError):
            tilestone.save({"a": 1}, "nowhere", **keywords)  # type: ignore[arg-type]
    assert not os.path.exists("nowhere")


def save_elsewhere(rank: int, world: int, folder: str) -> None:
    tilestone.save({"w": numpy.arange(4)}, f"{folder}{rank // 2}", overwrite=True, timeout=60)


def save_otherwise(rank: int, world: int, folder: str) -> None:
    tilestone.save({"w": numpy.arange(4)}, folder, overwrite=rank == 1, timeout=60)


def load_otherwise(rank: int, world: int, folder: str) -> None:
    tilestone.load({"w": None}, folder, two_phase="never" if rank == 2 else "auto", timeout=60)


def test_options_that_differ_between_torch_ranks_are_named(worlds: ranks.Worlds, ckpt: str) -> None:
    tilestone.save({"w": numpy.ones(2)}, ckpt + "0", comm=tilestone.solo())
    for function, said in (
        (save_elsewhere, f"ranks 0 and 1: save at {ckpt}0; rank 2: save at {ckpt}1"),
        (save_otherwise, "the ranks don't agree on overwrite (ranks 0 and 2: False; rank 1: True)"),
        (load_otherwise, 'the ranks don\'t agree on two_phase (ranks 0 and 1: "auto"; rank 2: "never")'),
    ):
        for result in worlds[3].collect(function, ckpt):
            assert result.kind == "MismatchError", result.text
            assert said in result.text
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


def test_a_rank_that_can_not_take_what_was_loaded_is_heard_of_by_all(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    for rank, result in enumerate(worlds[3].collect(load_refusing, ckpt)):
        assert isinstance(result, ranks.Raised), f"rank {rank} did not raise"
        assert "RuntimeError: no room" in result.text or rank == FAILING, result.text
