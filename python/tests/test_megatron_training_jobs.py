"""Jobs share a run's directory: one removes a checkpoint that another one loads, saves or names."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

import pytest

from tilestone import (
    AlreadyExistsError,
    NotFoundError,
    TimeoutError,
    UnsupportedError,
    _core,
)
from tilestone.megatron import training
from tilestone.megatron._ranks import Deadline
from tilestone.megatron.training import _look, _saving
from tilestone.megatron.training._locks import RunLocks
from training_runs import (
    Model,
    arguments,
    iterations_of,
    load_run,
    make_model,
    save_run,
    tracker_of,
)

LOG = "tilestone.megatron"


def _remove(run: pathlib.Path, iteration: int, tracker: str | None) -> None:
    """Removes a checkpoint like another job. Only the first call has an effect."""
    folder = run / f"iter_{iteration:07d}"
    if folder.exists():
        folder.rename(run / "gone")
        if tracker is None:
            tracker_of(run).unlink()
        else:
            tracker_of(run).write_text(tracker)


def _model_while(run: pathlib.Path, tracker: str | None) -> Model:
    """A model whose sharded_state_dict() removes the checkpoint that was chosen for the load."""
    model: Any = make_model(None, filled=False)
    whole = model.sharded_state_dict

    def sharded_state_dict(**more: Any) -> Any:
        _remove(run, 200, tracker)
        return whole(**more)

    model.sharded_state_dict = sharded_state_dict
    return model  # type: ignore[no-any-return]


def test_a_checkpoint_that_another_job_removes_before_it_is_opened_is_chosen_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("latest", "step", "only"):
        save_run(tmp_path / name, 200)
    save_run(tmp_path / "latest", 100)
    tracker_of(tmp_path / "latest").write_text("200")
    model = _model_while(tmp_path / "latest", "100")
    with caplog.at_level(logging.WARNING, LOG):
        args = arguments(tmp_path / "latest")
        assert training.load_checkpoint(model, None, None, args=args)[0] == 100
    model.check()
    assert "Choosing another checkpoint: there is no directory" in caplog.text
    # A checkpoint named by the caller is not replaced, and a run does not start anew without it.
    save_run(tmp_path / "step", 100)
    for name, tracker, step in (("step", "100", 200), ("only", None, None)):
        model = _model_while(tmp_path / name, tracker)
        args = arguments(tmp_path / name, ckpt_step=step)
        with pytest.raises(NotFoundError, match="iter_0000200"):
            training.load_checkpoint(model, None, None, args=args)
    # The tracker is read again if it has changed.
    (tmp_path / "latest" / "gone").rename(tmp_path / "latest" / "iter_0000200")
    tracker_of(tmp_path / "latest").write_text("200")
    examine = _look.examine

    def removed(*given: Any) -> Any:
        _remove(tmp_path / "latest", 200, "100")
        return examine(*given)

    monkeypatch.setattr(_look, "examine", removed)
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(tmp_path / "latest") == 100
    assert "newest valid" not in caplog.text


def test_retention_keeps_what_another_job_saves_or_the_tracker_names(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"save_retain_interval": 1000}
    save_run(tmp_path, 100, **more)
    other = RunLocks(str(tmp_path), "iter_0000100")
    other.begin(Deadline())
    with pytest.raises(AlreadyExistsError, match="another save to .*iter_0000100"):
        save_run(tmp_path, 100, **more)
    save_run(tmp_path, 200, **more)
    assert "iter_0000100: another job is saving it" in caplog.text
    other.end()
    assert os.listdir(tmp_path / ".tilestone") == ["lock"]
    # A save that is not save_checkpoint() holds only the lock of the checkpoint's directory.
    lock = _core.try_lock(os.fsencode(tmp_path / "iter_0000200"), ".tilestone/lock")
    assert lock is not None
    save_run(tmp_path, 300, **more)
    lock.release()
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000200", "iter_0000300"]
    (tmp_path / ".tilestone" / "saving-iter_0000007").touch()  # from a killed save
    save_run(tmp_path, 400, **more)
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000200", "iter_0000400"]
    assert os.listdir(tmp_path / ".tilestone") == ["lock"]

    replace = _saving._files.replace_file

    def back(path: str, text: str) -> None:  # meanwhile a job without locks goes back
        replace(path, text)
        replace(path, "400")

    with monkeypatch.context() as patch:
        patch.setattr(_saving._files, "replace_file", back)
        save_run(tmp_path, 500, **more)
    assert "iter_0000400: the tracker names it again" in caplog.text
    assert load_run(tmp_path) == 400


def test_a_job_waits_for_the_runs_lock_and_works_on_file_systems_without_locks(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, 100)
    model = make_model(None)
    with RunLocks(str(tmp_path), "other").exclusive(Deadline()) as can_lock:
        assert can_lock
        with pytest.raises(TimeoutError, match="another job keeps .*lock locked"):
            training.save_checkpoint(
                200, model, None, None, 0, args=arguments(tmp_path), timeout=0.5
            )
    assert iterations_of(tmp_path) == ["iter_0000100"] and load_run(tmp_path) == 100

    def unsupported(*_: Any) -> Any:
        raise UnsupportedError("files can't be locked on this file system")

    monkeypatch.setattr(_core, "try_lock", unsupported)
    monkeypatch.setattr(_core, "is_locked", unsupported)
    save_run(tmp_path, 200, save_retain_interval=1000)
    assert "Jobs that share a run's directory can't lock it" in caplog.text
    assert iterations_of(tmp_path) == ["iter_0000200"] and load_run(tmp_path) == 200
