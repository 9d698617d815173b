"""A training program with a CheckpointManager is killed at random moments and started again."""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import time
from typing import Any

import conftest
import numpy
import pytest
import ranks

import tilestone

LAST = 40  # steps of a run
KEEP = tilestone.Keep(last=2, every=10)


def next_state(state: dict[str, Any], step: int) -> None:
    """One step of training, which can't be undone, repeated or left out without being noticed."""
    state["m"][:] = state["m"] * 0.5 + step * numpy.arange(state["m"].size)
    state["w"][:] = numpy.sin(state["w"] * 3 + state["m"])
    state["step"] = step


def new_state() -> dict[str, Any]:
    return {"w": numpy.zeros(3000), "m": numpy.zeros(3000), "step": 0}


def digest(state: dict[str, Any]) -> str:
    content = state["w"].tobytes() + state["m"].tobytes() + str(state["step"]).encode()
    return hashlib.sha256(content).hexdigest()


def train(run: str, log: str, in_background: bool) -> None:
    """The program: continues from the newest step. Logs one line for what it begins and ends.

    A save in the background is known to be durable when the next one returns.
    """
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with tilestone.CheckpointManager(
        run, keep=KEEP, async_save=in_background, resources=tilestone.Resources(threads=1)
    ) as manager:
        loaded, found = manager.restore(new_state())
        state = dict(loaded)
        os.write(out, f"restored {found or 0} {digest(state)}\n".encode())
        for step in range((found or 0) + 1, LAST + 1):
            next_state(state, step)
            os.write(out, f"begin {step} -\n".encode())
            manager.save(step, state)
            os.write(out, f"saved {step - in_background} -\n".encode())
    os.write(out, f"ended {state['step']} {digest(state)}\n".encode())


class Judge:
    """Starts the program, kills it, and checks what it says."""

    def __init__(self, folder: pathlib.Path, random_: random.Random) -> None:
        self._folder = folder
        self._random = random_
        self.kills = 0
        self.runs = 0
        self.resumed = 0  # programs that continued from a step
        self.of_begun = 0  # those that found a step whose save had not returned
        self.expected = []
        state = new_state()
        self.expected.append(digest(state))
        for step in range(1, LAST + 1):
            next_state(state, step)
            self.expected.append(digest(state))

    def run_once(self, kills: int) -> None:
        """One run to its end, or until there were enough kills; a last start then completes it."""
        run = self._folder / f"run{self.runs}"
        saved = begun = restored = 0
        self.runs += 1
        for start in range(1000):
            log = self._folder / f"log{self.runs}.{start}"
            process = ranks.context().Process(target=train, args=(str(run), str(log), start % 2 == 0))
            process.start()
            self._strike(process, log, self.kills < kills)
            lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
            for what, number, content in lines:
                step = int(number)
                if what == "restored":
                    restored = step
                    assert saved <= step <= begun, f"{step} of {saved} to {begun}"
                    assert content == self.expected[step], f"step {step} is not what was saved"
                    self.resumed += step > 0
                    self.of_begun += step > saved
                    saved = begun = step
                elif what == "begin":
                    begun = step
                elif what == "saved":
                    saved = max(saved, step)
                else:
                    assert content == self.expected[LAST]
                    self._check_end(run, restored == LAST)
                    return
        raise AssertionError("the run does not end")

    def _strike(self, process: Any, log: pathlib.Path, may_kill: bool) -> None:
        if may_kill:
            end = time.monotonic() + 60
            while process.is_alive() and not log.exists() and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(self._random.uniform(0, 0.2))
            if process.is_alive():
                process.kill()
                self.kills += 1
        process.join(120)
        assert process.exitcode is not None, "the program hangs"
        assert process.exitcode in (0, -9), process.exitcode

    def _check_end(self, run: pathlib.Path, saved_nothing: bool) -> None:
        kept = [10, 20, 30, LAST - 1, LAST]
        if saved_nothing:  # the program before was killed after its last save: the next save prunes
            with tilestone.CheckpointManager(run, keep=KEEP) as manager:
                manager.restore(new_state())
                manager.save(LAST + 1, new_state())
            kept = [10, 20, 30, LAST, LAST + 1]
        names = [f"step-{step:08}" for step in kept]
        assert sorted(os.listdir(run)) == [".tilestone", *names]
        for name in names:
            with tilestone.open(run / name) as opened:
                assert opened.verify().ok
            assert tilestone.gc(run / name) == []


def test_a_killed_run_continues_from_its_newest_step_and_ends_as_one_never_killed(
    tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    kills = request.config.getoption("--run-kills")
    judge = Judge(tmp_path, random.Random(kills))
    while judge.kills < kills:
        judge.run_once(kills)
    assert judge.resumed > 0
    line = (
        f"{judge.kills} kills of a training program in {judge.runs} runs: {judge.resumed} starts "
        f"continued from a step, {judge.of_begun} of them from one whose save had not returned"
    )
    request.node.user_properties.append((conftest.KILLS, line))
