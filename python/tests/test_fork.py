"""Processes that are forked while the library is in use."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from children import in_child

import tilestone

ROWS = 64
COLUMNS = 1 << 16


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    data = numpy.arange(ROWS * COLUMNS, dtype=numpy.float32).reshape(ROWS, COLUMNS)
    tilestone.save({"w": data, "step": 7}, tmp_path / "c")
    return tmp_path / "c"


def check(opened: tilestone.Checkpoint) -> None:
    whole = opened.read("w")
    assert whole[3, 5] == 3 * COLUMNS + 5
    assert (opened.read("w", [(0, ROWS), (1, 2)])[:, 0] == whole[:, 1]).all()
    assert opened["step"] == 7
    assert opened.verify().ok


def test_an_open_checkpoint_can_be_read_in_children_and_in_the_parent(path: pathlib.Path) -> None:
    opened = tilestone.open(path)
    check(opened)  # so that threads and queues exist
    children = [in_child(lambda: check(opened)) for _ in range(2)]
    assert children == [0, 0]
    assert in_child(lambda: [check(opened), in_child(lambda: check(opened)) and 1 / 0]) == 0
    check(opened)


def test_children_that_are_made_while_other_threads_read_and_save(path: pathlib.Path) -> None:
    opened = tilestone.open(path)
    stop = threading.Event()
    failed: list[BaseException] = []

    def keep_on(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    state = {"w": numpy.zeros(1 << 20)}
    other = path.parent / "other"
    works: list[Callable[[], object]] = [
        lambda: opened.read("w"),
        lambda: tilestone.save(state, other, overwrite=True),
    ]
    threads = [threading.Thread(target=keep_on, args=(work,)) for work in works]
    for thread in threads:
        thread.start()

    def work(number: int) -> None:
        check(opened)
        tilestone.save(state, path.parent / f"child{number}")
        tilestone.load({"w": numpy.zeros((ROWS, COLUMNS), numpy.float32)}, path)

    try:
        for i in range(5):
            assert in_child(lambda number=i: work(number)) == 0  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_a_child_keeps_no_lock_of_a_save_alive(tmp_path: pathlib.Path) -> None:
    children: list[int] = []

    def fork(_: object) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)

    state = {"w": numpy.zeros(1 << 10)}
    try:
        tilestone.save(state, tmp_path, progress=fork)
        tilestone.save(state, tmp_path, overwrite=True)
        # If the parent dies during its save, the child does not keep the lock either.
        if (parent := os.fork()) == 0:
            read, write = os.pipe()

            def fork_and_die(_: object) -> None:
                if os.fork() == 0:
                    os.close(read)
                    os.write(write, b"x")
                    time.sleep(2)
                    os._exit(0)
                os.read(read, 1)  # the child runs
                os._exit(0)

            tilestone.save(state, tmp_path, overwrite=True, progress=fork_and_die)
        os.waitpid(parent, 0)
        tilestone.save(state, tmp_path, overwrite=True)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_callback_that_forks_and_returns_in_the_child_gets_an_error_there(
    tmp_path: pathlib.Path,
) -> None:
    parent = os.getpid()
    children: list[int] = []
    try:
        tilestone.save(
            {"w": numpy.zeros(8)}, tmp_path, progress=lambda _: children.append(os.fork())
        )
    except tilestone.UnsupportedError as error:
        os._exit(0 if os.getpid() != parent and "forked" in str(error) else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0]
    assert tilestone.open(tmp_path).read("w").tolist() == [0] * 8


class Rows:
    """A typical torch data set over an open checkpoint."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.opened = tilestone.open(path, framework="torch")

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.opened.read("w", [(row, row + 1), (0, 8)])

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]


MPI = """
import os, sys
import numpy, tilestone

def refused(work):
    try:
        work()
    except tilestone.UnsupportedError as error:
        assert "forked" in str(error) and "solo" in str(error), error
    else:
        raise AssertionError("not refused")

path, state = sys.argv[1], {"w": numpy.ones(4)}
world = tilestone.mpi_world(60)
tilestone.save(state, path, group=world)
child = os.fork()
if child == 0:
    refused(lambda: tilestone.save(state, path, group=world, overwrite=True))
    refused(lambda: tilestone.load({"w": numpy.zeros(4)}, path, group=world))
    refused(tilestone.mpi_world)
    assert tilestone.load({"w": numpy.zeros(4)}, path, group=tilestone.solo())["w"].sum() == 4
    sys.exit(0)  # an ordinary exit must not finalise the parent's MPI
_, status = os.waitpid(child, 0)
assert status == 0, status
tilestone.save(state, path, group=world, overwrite=True)
"""


def test_a_forked_child_is_refused_its_parents_working_mpi(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, "-c", MPI, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("context", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_torchs_data_loader_reads_an_open_checkpoint(
    context: str, persistent: bool, path: pathlib.Path
) -> None:
    import torch

    rows = Rows(path)
    assert rows[0][0, 1] == 1  # the parent reads before it forks
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=8,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=persistent,
        timeout=60,
    )
    for _ in range(2):
        seen = torch.cat(list(loader))
        assert seen.shape == (ROWS, 1, 8)
        assert (seen[:, 0, 0] == torch.arange(ROWS) * COLUMNS).all()
        assert rows[1][0, 0] == COLUMNS
