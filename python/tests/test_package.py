"""The package itself: stubs, types, log, progress, the GIL, the command line, Python's errors."""

from __future__ import annotations

import builtins
import copy
import errno
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from thread_ranks import run_ranks

import tilestone
from tilestone import _core, _errors
from tilestone._options.progress import reporting

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_mypy_passes_on_the_package() -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "python/tilestone"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_has_a_docstring() -> None:
    for name in tilestone.__all__:
        value = getattr(tilestone, name)
        if callable(value):
            assert value.__doc__, name


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (tilestone.InvalidArgumentError, ValueError),
        (tilestone.NotFoundError, FileNotFoundError),
        (tilestone.NotFoundError, KeyError),
        (tilestone.AlreadyExistsError, FileExistsError),
        (tilestone.MismatchError, ValueError),
        (tilestone.CoverageError, ValueError),
        (tilestone.UnsupportedError, NotImplementedError),
        (tilestone.StorageError, OSError),
        (tilestone.TimeoutError, builtins.TimeoutError),
        (tilestone.RankFailedError, ConnectionError),
        (tilestone.InternalError, RuntimeError),
    ],
)
def test_an_error_is_also_the_builtin_exception(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin) and issubclass(kind, tilestone.CheckpointError)


def test_errors_carry_their_context_and_survive_pickling() -> None:
    advice = [("h; ", "differences.not_requested", "report", " helps"), ("", "cast", "true", "")]
    error = _errors.make_error("io", "under_way", "write failed", "k", "f.bin", 3, advice, 28)
    hint = 'h; differences=Differences(not_requested="report") helps; cast=True'
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(same, tilestone.StorageError)
        assert (same.code, same.reason, same.message) == ("io", "under_way", "write failed")
        assert (same.key, same.file, same.rank) == ("k", "f.bin", 3)
        assert (same.hint, same.errno) == (hint, 28)
        where = "(key k) (file f.bin) (rank 3)"
        assert str(same) == f"write failed: {os.strerror(28)} {where}; {hint}"


def test_an_error_of_the_python_code_names_reason_key_file_and_rank_once() -> None:
    error = tilestone.StorageError(
        message="can't read", key="k", file="/a/b", errno=errno.EACCES, rank=3, hint="h"
    )
    whole = "can't read: Permission denied (key k) (file /a/b) (rank 3); h"
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert str(same) == whole
    named = tilestone.StorageError("can't read /a/b: Permission denied", file="/a/b", errno=13)
    assert str(named) == "can't read /a/b: Permission denied"
    assert str(tilestone.NotFoundError("no such key", key="k")) == "no such key (key k)"


def test_gc_lists_the_leftovers_of_a_failed_save_and_removes_them_when_logged(ckpt: str) -> None:
    tilestone.save({"x": numpy.arange(5)}, ckpt)
    name = "01234567-89ab-4cde-8f01-23456789abcd__0_0.distcp"
    pathlib.Path(ckpt, name).write_bytes(b"half")
    pathlib.Path(ckpt, "notes.txt").write_text("mine")
    assert tilestone.gc(ckpt) == []  # no note shows that a save made it here
    pathlib.Path(ckpt, ".tilestone", f"{name[:36]}.begun").touch()
    for delete in (False, True):
        note, left = tilestone.gc(ckpt, delete=delete)
        assert note.what == f"note of the save {name[:36]}"
        assert (left.name, left.size) == (name, 4)
        assert left.what == f"data file of the save {name[:36]}"
        assert "is of the save " in left.why
        assert pathlib.Path(ckpt, name).exists() != delete
    assert tilestone.gc(ckpt) == []
    assert pathlib.Path(ckpt, "notes.txt").exists() and tilestone.open(ckpt).verify().ok
    with pytest.raises(tilestone.NotFoundError):
        tilestone.gc(ckpt + "-not-here")


def test_progress_callbacks_see_all_bytes(ckpt: str) -> None:
    array = numpy.zeros(1 << 20)
    for run in (
        lambda seen: tilestone.save({"x": array}, ckpt, progress=seen.append),
        lambda seen: tilestone.load({"x": array}, ckpt, progress=seen.append),
        lambda seen: tilestone.open(ckpt).verify(progress=seen.append),
    ):
        seen: list[tilestone.Progress] = []
        run(seen)
        assert isinstance(seen[-1], tilestone.Progress)
        assert seen[-1].bytes_done == seen[-1].bytes_total >= array.nbytes
        assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)


def test_an_exception_of_a_progress_callback_ends_the_save(ckpt: str) -> None:
    def stop(_: tilestone.Progress) -> None:
        raise KeyError("stop here")

    with pytest.raises(Exception, match="stop here"):
        tilestone.save({"x": numpy.zeros(1 << 20)}, ckpt, progress=stop)
    assert not pathlib.Path(ckpt, ".metadata").exists()


def test_a_bar_is_shown_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ckpt: str
) -> None:
    tilestone.save({"x": numpy.zeros(9)}, ckpt, progress=True)
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with reporting(True, "save") as sink:
        assert sink is not None
        sink("write", 5, 10, 0.1)
        sink("write", 10, 10, 0.2)
    assert "save: write" in capsys.readouterr().err
    with reporting(True, "save", rank=1) as sink:
        assert sink is None


def test_messages_of_the_engine_reach_pythons_logging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tilestone")

    def fall_silent(comm: tilestone.Communicator) -> None:
        _core.log(logging.WARNING, f"rank {comm.rank} speaks")

    run_ranks(4, fall_silent)
    said = {record.message for record in caplog.records if record.name == "tilestone"}
    assert {f"rank {rank} speaks" for rank in range(4)} <= said
    assert caplog.records[0].levelno == logging.WARNING


def test_run_ranks_raises_the_original_error_and_refuses_what_threads_cannot_be() -> None:
    def second_fails(comm: tilestone.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("the original")
        comm.all_to_all([b""] * 3)

    with pytest.raises(KeyError, match="the original"):
        run_ranks(3, second_fails)
    with pytest.raises(tilestone.InvalidArgumentError, match="1000000"):
        run_ranks(10**6, second_fails)


def test_messages_from_many_threads_do_not_deadlock_with_the_gil() -> None:
    def speak(comm: tilestone.Communicator) -> None:
        for number in range(200):
            _core.log(logging.DEBUG, f"{comm.rank} {number}")
            comm.broadcast(b"x")

    logger = logging.getLogger("tilestone")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        run_ranks(4, speak)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert len(seen) == 800


def test_the_gil_is_free_while_a_save_and_a_load_run(ckpt: str) -> None:
    array = numpy.ones(32 << 20, numpy.uint8)
    inside = threading.Event()
    done = threading.Event()
    ticks = {"save": 0, "load": 0}
    phase = "save"

    def tick() -> None:
        while not done.is_set():
            if inside.is_set():
                ticks[phase] += 1
            time.sleep(0)

    def until_it_ticks(call: Callable[[], object]) -> None:  # a busy machine may let it wait
        end = time.monotonic() + 60
        while ticks[phase] <= 10 and time.monotonic() < end:
            call()

    calls: dict[str, Callable[[], object]] = {
        "save": lambda: tilestone.save({"x": array}, ckpt, overwrite=True),
        "load": lambda: tilestone.load({"x": array}, ckpt),
    }
    thread = threading.Thread(target=tick)
    thread.start()
    for phase, call in calls.items():
        inside.set()
        _call_only_the_engine(lambda call=call: until_it_ticks(call))
        inside.clear()
    done.set()
    thread.join()
    assert min(ticks.values()) > 10, ticks


def _call_only_the_engine(call) -> None:
    """Prevents GIL switches in Python code, so that only a call that releases the GIL frees it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        call()
    finally:
        sys.setswitchinterval(interval)


def test_the_command_is_installed_with_its_exit_codes(ckpt: str) -> None:
    tilestone.save({"weight": numpy.zeros((4, 2), numpy.float32), "step": 3}, ckpt)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tilestone", *words]
        return subprocess.run(command, capture_output=True, text=True)

    listed = run("ls", ckpt)
    assert listed.returncode == 0 and "weight" in listed.stdout and "float32" in listed.stdout
    assert run("verify", ckpt).returncode == 0
    assert run("nonsense").returncode == 2
    assert run("ls", ckpt + "/nothing").returncode == 3
    for file in pathlib.Path(ckpt).glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert run("verify", ckpt).returncode == 1


def test_damage_is_found_and_named(ckpt: str) -> None:
    array = numpy.arange(4096, dtype=numpy.float32)
    tilestone.save({"weight": array}, ckpt)
    (file,) = pathlib.Path(ckpt).glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = bytes(data).index(array.tobytes()) + 777
    data[place] ^= 4
    file.write_bytes(data)
    with tilestone.open(ckpt) as opened:
        report = opened.verify()
        assert not report.ok
        (damage,) = report.damages
        assert (damage.file, damage.key) == (file.name, "weight")
        assert damage.offset <= place < damage.offset + damage.size
        with pytest.raises(tilestone.CorruptError) as raised:
            opened.read("weight")
        assert raised.value.key == "weight" and raised.value.file == file.name
    with pytest.raises(tilestone.CorruptError):
        tilestone.load({"weight": array}, ckpt)
    tilestone.load({"weight": array}, ckpt, checks=tilestone.Checks(checksums=False))


class PythonComm:
    """A communicator of one rank in Python that fails on request."""

    rank, size = 0, 2

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def describe(self) -> str:
        return "a test's communicator"

    def gather(self, *_: object) -> list[bytes]:
        raise self.error

    scatter = broadcast = all_to_all = gather


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (builtins.TimeoutError("too late"), tilestone.TimeoutError),
        (ConnectionError("gone"), tilestone.RankFailedError),
        (ValueError("odd"), ValueError),
    ],
)
def test_what_a_python_communicator_raises_becomes_a_typed_error(
    given: BaseException, kind: type, ckpt: str
) -> None:
    given.ranks = [1]  # type: ignore[attr-defined]
    with pytest.raises(kind, match=str(given)) as raised:
        tilestone.save({"x": 1}, ckpt, group=PythonComm(given), timeout=5)
    assert raised.value is given or raised.value.rank in (1, -1)


@pytest.mark.parametrize("given", [object(), 3, "world", [0, 1], SimpleNamespace(get_group=None)])
def test_an_invalid_communicator_is_refused(given: Any, ckpt: str) -> None:
    import torch.distributed as dist

    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({}, ckpt, group=given)
    assert "a group is a torch process group or a communicator" in str(raised.value)
    assert ("mesh.get_group()" in raised.value.hint) == hasattr(given, "get_group")
    with pytest.raises(tilestone.InvalidArgumentError, match="this rank is not in the process group"):
        tilestone.save({}, ckpt, group=dist.GroupMember.NON_GROUP_MEMBER)
    assert not pathlib.Path(ckpt).exists()


def test_what_a_save_did_can_be_sent_to_other_ranks(ckpt: str) -> None:
    result = tilestone.save({"x": numpy.ones(3)}, ckpt)
    for same in (copy.copy(result), pickle.loads(pickle.dumps(result))):
        for name in (name for name in dir(result) if not name.startswith("_")):
            assert getattr(same, name) == getattr(result, name)
        assert repr(same) == repr(result)


def test_results_show_what_they_say(ckpt: str, tmp_path: pathlib.Path) -> None:
    with tilestone.Session() as session:
        assert repr(session) == "Session(rank 0 of 1)"
        saving = session.async_save({"x": numpy.ones(3)}, ckpt)
        saving.result()
        assert repr(saving.durable) == "AsyncStep(done)"
    assert repr(session) == "Session(closed)"
    with tilestone.open(ckpt) as opened:
        assert "VerifyReport(ok=True, files=1, items=1, " in repr(opened.verify())
    assert repr(tilestone.repair(ckpt)).startswith("RepairReport(mended=0, now=VerifyReport(ok=True")
    copied = tilestone.convert(ckpt, tmp_path / "hf")
    assert "ConvertResult(format='safetensors', " in repr(copied)
    assert "keys=1, left_out=0, bytes=24)" in repr(copied)
