"""The interpreter exits while threads are inside the library."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

# Daemon threads call the library in an endless loop, and the main thread exits meanwhile. Each
# entry point is called with large and small data, with and without callbacks.
PROGRAM = """
import logging, sys, threading, time
import numpy, tilestone

path, what = sys.argv[1], sys.argv[2]
state = {"w": numpy.zeros(1 << 21), "s": {"step": 1, "lr": numpy.ones(8)}}
logging.getLogger("tilestone").setLevel(logging.DEBUG)
logging.getLogger("tilestone").addHandler(logging.NullHandler())
opened = tilestone.open(path)
began = threading.Event()


def note(_):
    began.set()


def save(name):
    tilestone.save(state, f"{path}/{name}", overwrite=True, progress=note)


def load(_):
    tilestone.load({"w": numpy.zeros(1 << 21)}, path, progress=note)


def read(_):
    opened.read("w")
    for _ in range(50):
        opened.read("w", [(0, 64)])
    began.set()


def verify(_):
    opened.verify(note)


def ranks(name):
    def body(comm):
        tilestone.save({"w": state["w"]}, f"{path}/{name}", group=comm, overwrite=True)
        began.set()

    tilestone._core._run_ranks(2, body)


def for_ever(name):
    while True:
        globals()[what](name)


for i in range(3):
    threading.Thread(target=for_ever, args=(f"d{i}",), daemon=True).start()
began.wait()
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("what", ["save", "load", "read", "verify", "ranks"])
def test_daemon_threads_inside_the_library_do_not_break_the_exit(
    what: str, tmp_path: pathlib.Path
) -> None:
    import numpy

    import tilestone

    tilestone.save({"w": numpy.zeros(1 << 21)}, tmp_path)
    for wait in ("0", "0.01", "0.05"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), what, wait]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), wait


def test_a_save_that_the_exit_ends_is_not_published_and_an_atexit_handler_still_saves(
    tmp_path: pathlib.Path,
) -> None:
    program = """
import atexit, sys, threading, time
import numpy

def last():
    import tilestone
    tilestone.save({"w": numpy.arange(3)}, sys.argv[1] + "/last")

atexit.register(last)  # before the library is imported: runs after its own handler
import tilestone

began = threading.Event()
def slow(_):
    began.set()
    time.sleep(0.3)
def save():
    tilestone.save({"w": numpy.zeros(1 << 25)}, sys.argv[1] + "/daemon", progress=slow)
threading.Thread(target=save, daemon=True).start()
began.wait()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "last" / ".metadata").exists()
    assert not (tmp_path / "daemon").exists()  # the save has removed the directory that it made


STUCK = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from tilestone._torch.helper_thread import Helper, StuckError

minute = timedelta(seconds=60)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=minute)
other = dist.TCPStore("localhost", store.port, wait_for_workers=False, timeout=minute)

class Last:  # goes while the interpreter does, and lets the request end then
    def __del__(self, stores=(store, other), sleep=time.sleep):
        print("ending", flush=True)
        stores[1].set("key", "value")
        sleep(1)

helper = Helper()
try:
    helper.do(lambda task: store.get("key"), time.monotonic())
except StuckError:
    sys.modules["last"] = Last()
"""


def test_a_request_to_the_store_that_ends_while_the_interpreter_does_leaves_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ending\n"), done.stderr
    assert "terminate" not in done.stderr
