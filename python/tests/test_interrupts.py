"""Interruptions from outside: Ctrl-C, and exceptions of the caller's code and of its loggers."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from thread_ranks import run_ranks

import tilestone

# Large enough that a save does not end before it is interrupted.
LARGE = 1 << 30  # bytes
# Seconds within which an interrupt must end the work; a busy machine may need them.
SOON = 5.0


class OwnError(Exception):
    """An exception type that the library does not know."""


class Thrower:
    """Caller's code that raises a given exception object, with a cause."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.raised = kind("from the caller's code")

    def __call__(self, *_: object) -> Any:
        try:
            {}["missing"]  # noqa: B018
        except KeyError as error:
            raise self.raised from error

    def expect(self, error: BaseException) -> None:
        assert error is self.raised and isinstance(error.__cause__, KeyError)
        assert "__call__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Throwing:
    """A Stateful with the given methods."""

    def __init__(self, save: Any, load: Any) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> dict[str, Any]:
        return self._save() if self._save else {"w": numpy.zeros(4)}

    def load_state_dict(self, _: Any) -> None:
        self._load()


@contextlib.contextmanager
def interrupted_after(wait: float) -> Iterator[None]:
    """Sends SIGINT after this time. The interrupted work must end within seconds of it."""
    sent: list[float] = []
    begun, over = threading.Event(), threading.Event()

    def send() -> None:
        begun.wait()
        if over.wait(wait):
            return
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.set()
            yield
            pytest.fail("the work ended before it was interrupted")
        assert time.monotonic() - sent[0] < SOON
    finally:
        over.set()
        begun.set()
        sender.join()


def again_and_again(work: Callable[[], object]) -> None:
    """Works until it is interrupted. A busy machine may send a signal late."""
    while True:
        work()


def files_in(path: pathlib.Path) -> list[str]:
    """All files except locks, which are kept."""
    found = [p.relative_to(path) for p in path.rglob("*") if p.is_file()]
    return sorted(str(p) for p in found if p.parts[-2:] != (".tilestone", "lock"))


def large_state() -> dict[str, Any]:
    return {"w": numpy.zeros(LARGE // 8)}


def test_ctrl_c_ends_a_save_at_once_and_nothing_is_left(tmp_path: pathlib.Path) -> None:
    tilestone.save({"old": numpy.arange(3)}, tmp_path)
    before = files_in(tmp_path)
    state = large_state()
    with interrupted_after(0.1):
        tilestone.save(state, tmp_path, overwrite=True)
    assert files_in(tmp_path) == before
    with tilestone.open(tmp_path) as opened:
        assert opened.read("old").tolist() == [0, 1, 2]


# argv: the path.
SLEEPING = """
import sys, time
import numpy, tilestone

def sleep(_):
    print("inside", flush=True)
    time.sleep(60)

tilestone.save({"w": numpy.zeros(1 << 20)}, sys.argv[1], progress=sleep)
"""


def test_ctrl_c_in_a_callback_that_sleeps_and_again_while_the_save_ends(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, "-c", SLEEPING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"inside\n"
        sent = time.monotonic()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert time.monotonic() - sent < 6 * SOON
    assert process.returncode == -signal.SIGINT
    assert files_in(tmp_path) == []


def test_ctrl_c_ends_loads_reads_and_verify_at_once(tmp_path: pathlib.Path) -> None:
    state = large_state()
    tilestone.save(state, tmp_path)
    with interrupted_after(0.05):
        again_and_again(lambda: tilestone.load({"w": state["w"]}, tmp_path))
    with tilestone.open(tmp_path) as opened:
        with interrupted_after(0.05):
            again_and_again(lambda: opened.read("w", out=state["w"]))
        with interrupted_after(0.05):
            again_and_again(opened.verify)
        assert opened.read("w", [(0, 8)]).tolist() == [0] * 8  # still open and correct


def test_a_signal_handler_that_does_not_raise_runs_during_the_work(tmp_path: pathlib.Path) -> None:
    seen: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR1)

    timer = threading.Timer(0.1, send)
    try:
        timer.start()
        tilestone.save(large_state(), tmp_path)
        ended = time.monotonic()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert seen and seen[0] - sent[0] < SOON and seen[0] < ended
    with tilestone.open(tmp_path) as opened:
        assert opened.verify().ok


KINDS = (OwnError, KeyboardInterrupt, SystemExit, MemoryError, tilestone.TimeoutError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_the_callers_code_comes_out_as_itself(
    kind: type[BaseException], tmp_path: pathlib.Path
) -> None:
    good = tmp_path / "good"
    tilestone.save({"w": numpy.zeros(4), "m": {"w": numpy.zeros(4)}}, good)
    opened = tilestone.open(good)

    def factory(build: Any, merge: Any) -> dict[str, Any]:
        return {"f": tilestone.ShardedTensorFactory("w", numpy.zeros(4), build, merge)}

    def build(key: str, data: Any, replica: Any, _: Any) -> dict[str, Any]:
        return {"built": tilestone.ShardedTensor.from_rank_offsets(key, data, replica_id=replica)}

    new = tmp_path / "new"
    raises: dict[str, Callable[[Thrower], object]] = {
        "progress of save": lambda t: tilestone.save({"w": numpy.zeros(4)}, new, progress=t),
        "progress of load": lambda t: tilestone.load({"w": numpy.zeros(4)}, good, progress=t),
        "progress of verify": lambda t: opened.verify(t),
        "state_dict": lambda t: tilestone.save({"m": Throwing(t, None)}, new),
        "load_state_dict": lambda t: tilestone.load({"m": Throwing(None, t)}, good),
        "build in save": lambda t: tilestone.save(factory(t, t), new),
        "build in load": lambda t: tilestone.load(factory(t, t), good),
        "merge": lambda t: tilestone.load(factory(build, t), good),
    }
    for what, call in raises.items():
        thrower = Thrower(kind)
        with pytest.raises(kind) as raised:
            call(thrower)
        thrower.expect(raised.value)
        assert files_in(new) == [], what


class Ranks:
    """A communicator that raises in its second operation."""

    def __init__(self, comm: tilestone.Communicator, thrower: Thrower) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._thrower, self._calls = comm, thrower, 0

    def describe(self) -> str:
        return "a communicator of the caller"

    def __getattr__(self, name: str) -> Any:
        if name not in ("gather", "scatter", "broadcast", "all_to_all"):
            raise AttributeError(name)

        def operation(*args: Any) -> Any:
            self._calls += 1
            return self._thrower() if self._calls == 2 else getattr(self._comm, name)(*args)

        return operation


@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt])
def test_an_exception_of_a_communicator_comes_out_as_itself(
    kind: type[BaseException], tmp_path: pathlib.Path
) -> None:
    thrower = Thrower(kind)
    with pytest.raises(kind) as raised:
        tilestone.save(
            {"w": numpy.zeros(4)}, tmp_path, group=Ranks(tilestone.solo(), thrower)
        )
    thrower.expect(raised.value)
    assert files_in(tmp_path) == []


class Handler(logging.Handler):
    """A handler that raises for messages that contain a certain word."""

    def __init__(self, thrower: Thrower) -> None:
        super().__init__()
        self.thrower = thrower

    def emit(self, record: logging.LogRecord) -> None:
        self.thrower()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_a_logging_handler_comes_out_and_says_what_was_published(
    kind: type[BaseException], tmp_path: pathlib.Path
) -> None:
    tilestone.save({"w": numpy.zeros(4)}, tmp_path)
    # A directory replaces a file that a save removes. The save logs this after it has published.
    old = next(p for p in tmp_path.glob("*.distcp"))
    old.unlink()
    old.mkdir()
    thrower = Thrower(kind)
    handler = Handler(thrower)
    logging.getLogger("tilestone").addHandler(handler)
    try:
        with pytest.raises(kind) as raised:
            tilestone.save({"w": numpy.ones(4)}, tmp_path, overwrite=True)
    finally:
        logging.getLogger("tilestone").removeHandler(handler)
    thrower.expect(raised.value)
    notes = getattr(raised.value, "__notes__", ["published"])  # Python 3.11 has notes
    assert any("published" in note for note in notes)
    with tilestone.open(tmp_path) as opened:
        assert opened.read("w").tolist() == [1] * 4


def test_other_ranks_get_a_typed_error_that_names_the_rank_and_what_it_raised(
    tmp_path: pathlib.Path,
) -> None:
    thrower = Thrower(OwnError)
    raised: dict[int, BaseException] = {}

    def body(comm: tilestone.Communicator) -> None:
        state = {
            "w": tilestone.ShardedTensor.from_rank_offsets(
                "w", numpy.zeros(4), (0, comm.rank, comm.size)
            )
        }
        try:
            tilestone.save(
                state, tmp_path, group=comm, progress=thrower if comm.rank == 1 else False
            )
        except BaseException as error:
            raised[comm.rank] = error

    run_ranks(3, body)
    thrower.expect(raised[1])
    for rank in (0, 2):
        assert isinstance(raised[rank], tilestone.InterruptedError)
        assert "OwnError: from the caller's code (rank 1)" in str(raised[rank])
    # The note of a failed save is kept, because other ranks may still have files.
    assert all(name.endswith(".begun") for name in files_in(tmp_path))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_end_of_the_program_while_a_state_is_made_ends_the_other_ranks_too(
    kind: type[BaseException], tmp_path: pathlib.Path
) -> None:
    good = tmp_path / "good"
    tilestone.save({"m": {"w": numpy.zeros(4)}}, good)
    calls: list[Callable[[Any, Any], object]] = [
        lambda state, comm: tilestone.save(state, tmp_path / "new", group=comm),
        lambda state, comm: tilestone.async_save(state, tmp_path / "new", group=comm),
        lambda state, comm: tilestone.load(state, good, group=comm),
    ]
    for call in calls:
        thrower = Thrower(kind)
        raised: dict[int, BaseException] = {}

        def body(comm: tilestone.Communicator) -> None:
            own = Throwing(thrower, None) if comm.rank == 1 else {"w": numpy.zeros(4)}
            try:
                call({"m": own}, comm)  # noqa: B023
            except BaseException as error:
                raised[comm.rank] = error  # noqa: B023

        begun = time.monotonic()
        run_ranks(3, body)
        assert time.monotonic() - begun < 6 * SOON
        thrower.expect(raised[1])
        for rank in (0, 2):
            assert isinstance(raised[rank], tilestone.InterruptedError)
            assert f"{kind.__name__}: from the caller's code (rank 1)" in str(raised[rank])
        assert files_in(tmp_path / "new") == []


def test_a_rank_that_is_ended_while_its_state_is_made_does_not_wait_for_ranks_that_never_come(
    tmp_path: pathlib.Path,
) -> None:
    thrower = Thrower(KeyboardInterrupt)
    raised: list[BaseException] = []

    def body(comm: tilestone.Communicator) -> None:
        if comm.rank == 1:
            return
        try:
            tilestone.save({"m": Throwing(thrower, None)}, tmp_path, group=comm)
        except BaseException as error:
            raised.append(error)

    begun = time.monotonic()
    run_ranks(2, body)
    assert time.monotonic() - begun < 6 * SOON
    thrower.expect(raised[0])


def test_callbacks_run_on_the_thread_that_called(tmp_path: pathlib.Path) -> None:
    threads: set[int] = set()

    def note(*_: object) -> None:
        threads.add(threading.get_ident())

    state = {f"t{i}": numpy.zeros(1 << 17) for i in range(40)}
    tilestone.save(state, tmp_path, progress=note, resources=tilestone.Resources(files_per_rank=4))
    tilestone.load(state, tmp_path, progress=note)
    with tilestone.open(tmp_path) as opened:
        opened.verify(note)
    assert threads == {threading.get_ident()}
