"""Jobs share a run's directory: one removes a checkpoint that another one loads, saves or names."""

from __future__ import annotations

import fcntl
import os
import pathlib
import struct
from typing import Any

import pytest

from tilestone import AlreadyExistsError, NotFoundError, _core
from tilestone.megatron import training
from training_runs import (
    arguments,
    iterations_of,
    load_run,
    make_model,
    save_run,
    tracker_of,
)

def test_a_load_of_what_another_job_removes_meanwhile_fails_and_the_next_one_chooses_again(
    tmp_path: pathlib.Path,
) -> None:
    save_run(tmp_path, 200)
    save_run(tmp_path, 100)
    tracker_of(tmp_path).write_text("200")
    model: Any = make_model(None, filled=False)
    whole = model.sharded_state_dict

    def sharded_state_dict(**more: Any) -> Any:
        (tmp_path / "iter_0000200").rename(tmp_path / "gone")
        return whole(**more)

    model.sharded_state_dict = sharded_state_dict
    with pytest.raises(NotFoundError, match="iter_0000200"):
        training.load_checkpoint(model, None, None, args=arguments(tmp_path))
    assert load_run(tmp_path) == 100


def test_retention_keeps_what_another_job_saves_or_the_tracker_names(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"save_retain_interval": 1000}
    save_run(tmp_path, 100, **more)
    with open(tmp_path / "iter_0000100" / ".tilestone" / "lock", "w") as lock:
        # What the engine takes while it saves; such a lock ends with the process that holds it.
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        with pytest.raises(AlreadyExistsError, match="another save .*iter_0000100"):
            save_run(tmp_path, 100, **more)
        save_run(tmp_path, 200, **more)
    assert "iter_0000100 in " in caplog.text and "is not removed: it is in use" in caplog.text
    save_run(tmp_path, 300, **more)
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000300"]

    move = _core.move_megatron_tracker

    def back(*given: Any) -> Any:  # meanwhile another job goes back
        replaced = move(*given)
        tracker_of(tmp_path).write_text("300")
        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(_core, "move_megatron_tracker", back)
        save_run(tmp_path, 400, **more)
    assert "iter_0000300 is not removed: the tracker names it again" in caplog.text
    assert load_run(tmp_path) == 300


def _whole_file(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
