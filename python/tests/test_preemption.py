"""SIGTERM in a CheckpointManager's run: handlers, and what the ranks agree on."""

from __future__ import annotations

import gc
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ranks

import tilestone
from tilestone._training_run import preemption

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def _handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_noticed_and_the_handler_before_is_called(tmp_path: pathlib.Path) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with tilestone.CheckpointManager(tmp_path) as manager:
            assert not manager.preempted(1)
            terminate()
            assert manager.preempted(2) and manager.preempted(3)
            assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_managers_are_closed_in_any_order(tmp_path: pathlib.Path) -> None:
    for first in (0, 1):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            managers = [tilestone.CheckpointManager(tmp_path / name) for name in "ab"]
            assert not any(manager.preempted(1) for manager in managers)
            managers[first].close()
            terminate()
            assert managers[1 - first].preempted(2)
            managers[1 - first].close()
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_program_installs_later_is_called_too_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption._listener, "_has_warned", False)
    called = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with tilestone.CheckpointManager(tmp_path) as manager:
            manager.preempted(1)
            chained: Any = signal.getsignal(signal.SIGTERM)

            def own(number: int, frame: Any) -> None:
                called.append(number)
                chained(number, frame)

            signal.signal(signal.SIGTERM, own)
            assert not manager.preempted(2) and not manager.preempted(3)
            assert caplog.text.count("Another handler of SIGTERM was installed") == 1
            terminate()
            assert manager.preempted(4) and called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_managers_that_were_never_closed_sigterm_does_what_it_did(
    tmp_path: pathlib.Path,
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        tilestone.CheckpointManager(tmp_path).preempted(1)
        gc.collect()
        terminate()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_agree_after_each_step_unless_steps_are_short() -> None:
    cost = 0.002
    assert preemption._steps(math.inf, cost) == 1  # the first one
    assert preemption._steps(0.2, cost) == 1
    assert preemption._steps(0.1, cost) == 2
    assert preemption._steps(0.001, cost) == 5
    assert preemption._steps(2.0, 1.0) == 2  # within five seconds
    assert preemption._steps(10.0, math.inf) == 1


def steps_until_noticed(rank: int, world: int, run: str) -> tuple[int, bool]:
    """Many short steps, then the program goes back, and rank 1 gets SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = {"w": [1.0]}
    try:
        with tilestone.CheckpointManager(run, timeout=60) as manager:
            manager.save(10, state)
            for step in range(3000, 3030):
                manager.preempted(step)
            manager.restore(state, 10)
            if rank == 1:
                terminate()
            step = 11
            while not manager.preempted(step):
                step += 1
            return step - 10, manager.preempted(step + 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_short_steps_and_after_a_step_back_sigterm_is_noticed_within_a_few_steps(
    tmp_path: pathlib.Path, worlds: ranks.Worlds
) -> None:
    saw = worlds[2].run(steps_until_noticed, str(tmp_path))
    assert saw[0] == saw[1]
    assert saw[0][0] <= 5 and saw[0][1]


def test_the_readmes_loop_ends_well_when_sigterm_comes_with_a_save_that_was_due(
    tmp_path: pathlib.Path,
) -> None:
    blocks = README.read_text().split("```python\n")
    loop = next(block.split("```")[0] for block in blocks if "preempted" in block)
    program = f"""
import os, signal
import torch, tilestone
model, last, trained = torch.nn.Linear(4, 4), 1000, 0
optimizer = torch.optim.AdamW(model.parameters())
def train(state):
    global trained
    trained += 1
    loss = model(torch.ones(4)).sum()
    loss.backward()
    optimizer.step()
    if trained == 100:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss
{loop}
assert step == 100, step
assert torch.equal(tilestone.load("run/step-00000100")["model"]["weight"], model.weight)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "run")) == [".tilestone", "step-00000100"]
