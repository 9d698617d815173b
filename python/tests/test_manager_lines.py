"""CheckpointManager in a directory with steps of several runs, and in a run that went back."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy
import pytest

import tilestone


def state_of(value: float) -> dict[str, Any]:
    return {"w": numpy.full(4, value, numpy.float32), "value": value}


def durable(run: pathlib.Path) -> list[int]:
    with tilestone.CheckpointManager(run) as manager:
        return [each.step for each in manager.steps() if each.state == "durable"]


def restored(run: pathlib.Path) -> tuple[int | None, float]:
    with tilestone.CheckpointManager(run) as manager:
        state, step = manager.restore(state_of(-1))
        assert manager.latest() == step
        return step, state["value"]


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_new_run_beside_an_earlier_runs_steps(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    keep = tilestone.Keep(last=2, best=("loss", "min", 1))
    with tilestone.CheckpointManager(tmp_path, keep=keep) as manager:
        manager.save(1000, state_of(1000), metrics={"loss": 0.1})
    with tilestone.CheckpointManager(tmp_path, keep=keep, async_save=in_background) as manager:
        for step, loss in ((10, 0.3), (20, 0.5), (30, 0.4), (40, 0.6)):
            assert manager.save(step, state_of(step), metrics={"loss": loss})
            manager.wait()
        assert manager.best() == 10
        lines = {each.step: each.line for each in manager.steps()}
        assert lines[10] == lines[40] != lines[1000]
        assert [each.parent for each in manager.steps()] == [None, 20, 30, None]
        assert [each.ordinal for each in manager.steps()] == [2, 4, 5, 1]
    assert said(caplog, "has a higher step beside it, 1000, which is of another run") == 1
    assert durable(tmp_path) == [10, 30, 40, 1000]
    assert restored(tmp_path) == (40, 40.0)
    with tilestone.CheckpointManager(tmp_path, keep=keep) as manager:
        assert manager.restore(state_of(-1))[1] == 40
        manager.save(50, state_of(50))
        manager.wait()
        with pytest.raises(tilestone.AlreadyExistsError):  # another run's step
            manager.save(1000, state_of(0))
            manager.wait()
    assert durable(tmp_path) == [10, 40, 50, 1000]


def test_a_run_that_went_back_does_not_go_on_from_the_branch_that_it_left(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = tilestone.Keep(last=2, every=10)
    with tilestone.CheckpointManager(tmp_path, keep=keep) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.save(step, state_of(step))
    with tilestone.CheckpointManager(tmp_path, keep=keep) as manager:
        assert manager.restore(state_of(-1), 20)[1] == 20
        manager.save(30, state_of(-30))
        manager.wait()
        assert said(caplog, "step-00000030 in") == said(caplog, "it is replaced") == 1
        assert [each.step for each in manager.steps()] == [10, 20, 30, 40, 50]
        manager.save(40, state_of(-40))
        manager.wait()
    assert said(caplog, "it is replaced") == 1
    assert durable(tmp_path) == [10, 20, 30, 40]
    assert restored(tmp_path) == (40, -40.0)


def test_an_earlier_versions_steps_are_continued(tmp_path: pathlib.Path) -> None:
    for step in (10, 20):
        tilestone.save(state_of(step), tmp_path / f"step-{step}", attributes={"step": str(step)})
    with tilestone.CheckpointManager(tmp_path, keep=tilestone.Keep(last=2)) as manager:
        assert manager.restore(state_of(-1))[1] == 20
        manager.save(30, state_of(30))
        manager.wait()
        assert [(each.step, each.parent) for each in manager.steps()] == [(20, None), (30, 20)]
        assert manager.steps()[0].line == "older"

