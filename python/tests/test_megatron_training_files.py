"""A training run's directory: torn trackers, removal of older checkpoints, crashes."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import uuid
from typing import Any

import pytest

from tilestone import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    megatron,
)
from tilestone.megatron import training
from tilestone.megatron.training import _saving
from training_runs import (
    Optimizer,
    arguments,
    iterations_of,
    load_run,
    make_model,
    save_run,
    tracker_of,
)

LOG = "tilestone.megatron"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that was saved at the iterations 100 and 200."""
    save_run(tmp_path, 100)
    save_run(tmp_path, 200)
    return tmp_path


def test_names_and_tracker_are_megatrons(tmp_path: pathlib.Path) -> None:
    name = training.get_checkpoint_name
    assert name("d", 100, return_base_dir=True) == "d/iter_0000100"
    assert name("d", 123456789, return_base_dir=True) == "d/iter_123456789"
    assert name("d", 0, True, return_base_dir=True) == "d/release"
    legacy = {"pipeline_parallel": True, "tensor_rank": 1, "pipeline_rank": 2}
    expected = "d/iter_0000007/mp_rank_01_002/model_optim_rng.pt"
    assert name("d", 7, expert_parallel=False, **legacy) == expected
    expected = "d/iter_0000007/mp_rank_01_002_003/x.pt"
    assert name("d", 7, expert_parallel=True, expert_rank=3, basename="x.pt", **legacy) == expected
    with pytest.raises(InvalidArgumentError, match="expert_parallel .* file of the legacy"):
        name("d", 7, **legacy)
    with pytest.raises(InvalidArgumentError, match="0 or more, not -1"):
        name("d", -1, return_base_dir=True)
    save_run(tmp_path / "new" / "run")
    tracker = training.get_checkpoint_tracker_filename(tmp_path / "new" / "run")
    assert pathlib.Path(tracker).read_text() == "100"
    assert training.read_metadata(tracker) == (100, False)
    assert os.stat(tracker).st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    assert sorted(os.listdir(tmp_path / "new" / "run")) == [
        "iter_0000100", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_common_state_has_megatrons_keys_and_the_group_stays_out(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path, use_distributed_optimizer=True, exit_signal=signal.SIGTERM)
    common = megatron.load_common_state_dict(tmp_path / "iter_0000100")
    assert set(common) == {
        "args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler",
        "num_floating_point_operations_so_far", "content_metadata",
    }  # fmt: skip
    assert common["checkpoint_version"] == 3.0 and common["iteration"] == 100
    assert type(common["args"]) is argparse.Namespace
    assert common["args"].exit_signal is signal.SIGTERM
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"   \n", b"2\x00\x00", b"20", b"rele", b"9" * 80])
def test_a_torn_tracker_falls_back_to_the_newest_valid_iteration(
    run: pathlib.Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    tracker_of(run).write_bytes(content)
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(run) == 200
    assert "looking for the newest valid checkpoint" in caplog.text
    assert f"The newest valid checkpoint is {run}/iter_0000200" in caplog.text


def test_without_a_tracker_crashed_and_torn_checkpoints_are_skipped(
    run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration, damage in ((300, "unended"), (400, "torn"), (500, "empty")):
        shutil.copytree(run / "iter_0000200", run / f"iter_0000{iteration}")
        folder = run / f"iter_0000{iteration}"
        if damage == "unended":
            (folder / "metadata.json").unlink()
        if damage == "torn":
            os.truncate(folder / ".metadata", 20)
        if damage == "empty":
            shutil.rmtree(folder)
            folder.mkdir()
    (run / "iter_700").mkdir()  # not one of Megatron's names
    (run / "iter_0000800").symlink_to("iter_0000800")  # no folder, so not named
    tracker_of(run).unlink()
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(run) == 200
    passed = [line for line in caplog.messages if line.startswith("Skipping a checkpoint")]
    numbers = (5, 4, 3)
    assert all(f"0000{n}00" in line for n, line in zip(numbers, passed, strict=True))
    assert re.search("/iter_700 is not .* iter_0000700", caplog.text)


def test_a_tracker_is_an_error_if_there_is_no_valid_checkpoint(
    tmp_path: pathlib.Path, run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run / "iter_0000200")
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(run) == 100
    assert "names a checkpoint that can't be loaded" in caplog.text
    shutil.rmtree(run / "iter_0000100")
    with pytest.raises(CorruptError, match="does not hold a valid checkpoint"):
        load_run(run)
    (run / "iter_0000300" / "mp_rank_00").mkdir(parents=True)
    (run / "iter_0000300" / "mp_rank_00" / "model_optim_rng.pt").touch()
    with pytest.raises(UnsupportedError, match="iter_0000300 .*a checkpoint in .* legacy format"):
        load_run(run)
    tracker_of(run).unlink()
    tracker_of(run).mkdir()
    with pytest.raises(StorageError, match="can't read the tracker"):
        load_run(run)


def test_no_checkpoint_starts_anew_or_ends_with_an_error(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(tmp_path) == 0 and load_run(tmp_path / "none") == 0
        assert load_run(tmp_path, load=None) == 0
    assert f"there is no checkpoint in {tmp_path}: the run starts" in caplog.text
    assert "no directory is given: the run starts" in caplog.text
    with pytest.raises(NotFoundError, match="there is no checkpoint in"):
        load_run(tmp_path, exit_on_missing_checkpoint=True)


def test_a_checkpoint_in_place_of_a_run_is_refused_and_not_a_new_start(run: pathlib.Path) -> None:
    for given in (run / "iter_0000200", f"{run}/iter_0000200/"):
        with pytest.raises(InvalidArgumentError, match="where the directory of a run") as raised:
            load_run(given)
        assert raised.value.hint == f"give {run}, and ckpt_step=200"
        with pytest.raises(InvalidArgumentError, match="where the directory of a run") as raised:
            save_run(given, 300)
        assert raised.value.file == str(run / "iter_0000200")
    assert iterations_of(run) == ["iter_0000100", "iter_0000200"]
    shutil.copytree(run / "iter_0000200", run, dirs_exist_ok=True)  # a run that holds a checkpoint, too
    save_run(run, 300)
    assert load_run(run) == 300


def test_an_iteration_is_chosen_by_ckpt_step(run: pathlib.Path) -> None:
    tracker_of(run).write_text("torn")
    assert load_run(run, ckpt_step=100) == 100
    with pytest.raises(NotFoundError, match=r"iteration 150 \(ckpt_step\)"):
        load_run(run, ckpt_step=150)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_checkpoint_is_never_taken_for_none(run: pathlib.Path, damage: str) -> None:
    newest = run / "iter_0000200"
    if damage == "truncated":
        os.truncate(newest / ".metadata", 20)
    else:  # as a copy without hidden files
        (newest / ".metadata").unlink()
    with pytest.raises(CorruptError, match="iteration 200 .*ckpt_step"):
        load_run(run, ckpt_step=200)
    shutil.rmtree(run / "iter_0000100")
    tracker_of(run).unlink()
    with pytest.raises(CorruptError, match="a damaged one: .*iter_0000200") as raised:
        load_run(run)
    assert "remove" in raised.value.hint
    shutil.rmtree(newest)
    assert load_run(run) == 0


def test_an_empty_last_file_of_a_save_is_an_unfinished_save(run: pathlib.Path) -> None:
    os.truncate(run / "iter_0000200" / "metadata.json", 0)
    tracker_of(run).unlink()
    assert load_run(run) == 100
    shutil.rmtree(run / "iter_0000100")
    assert load_run(run) == 0


def test_a_missing_data_file_ends_the_load_as_damage(run: pathlib.Path) -> None:
    for data in (run / "iter_0000200").glob("*.distcp"):
        data.unlink()
    for more in ({}, {"ckpt_step": 200}):
        with pytest.raises(CorruptError, match="data file .*missing"):
            load_run(run, **more)
    assert load_run(run, ckpt_step=100) == 100


def _killed(step: Any, *args: Any, **keywords: Any) -> None:
    """Runs a step in a process that must be killed during the step."""
    process = multiprocessing.get_context("fork").Process(target=step, args=args, kwargs=keywords)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(folder: Any, iteration: int, place: tuple[Any, str], **more: Any) -> None:
    setattr(*place, _die)
    save_run(folder, iteration, **more)


def test_a_kill_between_publishing_and_the_tracker_leaves_the_tracker_at_a_whole_checkpoint(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = (_saving._core, "move_megatron_tracker")
    _killed(_save_and_die, tmp_path, 100, place)
    assert iterations_of(tmp_path) == ["iter_0000100"] and not tracker_of(tmp_path).exists()
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(tmp_path) == 100  # the tracker is missing, but the checkpoint is whole
    save_run(tmp_path, 100)
    _killed(_save_and_die, tmp_path, 200, place)
    (tmp_path / ".latest_checkpointed_iteration.txt.tilestone").write_text("2")  # half a tracker
    assert tracker_of(tmp_path).read_text() == "100" and load_run(tmp_path) == 100
    save_run(tmp_path, 200)
    assert tracker_of(tmp_path).read_text() == "200" and load_run(tmp_path) == 200
    assert not any(name.startswith(".latest") for name in os.listdir(tmp_path))


def test_removal_keeps_what_the_tracker_names_multiples_links_and_the_unpublished(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (100, 150, 200, 250):
        save_run(tmp_path, iteration, save_retain_interval=100)
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000200", "iter_0000250"]
    shutil.copytree(tmp_path / "iter_0000250", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "iter_0000250")
    (tmp_path / "iter_0000250").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO, LOG):
        save_run(tmp_path, 260, save_retain_interval=100)
        (tmp_path / "iter_0000260" / "metadata.json").unlink()  # as if it were being written
        save_run(tmp_path, 270, save_retain_interval=100)
    assert (tmp_path / "iter_0000250").is_symlink() and (tmp_path / "iter_0000260").exists()
    assert re.search("iter_0000250 in .* is not removed: it is a symbolic link", caplog.text)
    assert "iter_0000260 is not removed: its save has not ended" in caplog.text
    # The same iteration again, a torn tracker, a release: no checkpoint is known to be superseded.
    save_run(tmp_path, 270, save_retain_interval=100)
    tracker_of(tmp_path).write_text("")
    save_run(tmp_path, 280, save_retain_interval=100)
    save_run(tmp_path, 280, save_retain_interval=100, release=True)
    save_run(tmp_path, 290, save_retain_interval=100)
    kept = {"iter_0000270", "iter_0000280", "iter_0000290", "release"}
    assert kept < set(iterations_of(tmp_path)) and load_run(tmp_path) == 290
    with pytest.raises(InvalidArgumentError, match="save_retain_interval .*1"):
        save_run(tmp_path, 300, save_retain_interval=0)


def test_a_kill_while_an_older_checkpoint_is_removed_leaves_none_that_is_half(
    tmp_path: pathlib.Path,
) -> None:
    more = {"save_retain_interval": 1000}
    save_run(tmp_path, 100, **more)
    _killed(_save_and_die, tmp_path, 200, (_saving._core, "remove_megatron_steps"), **more)
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000200"] and load_run(tmp_path) == 200
    # A kill of an older build leaves a hidden folder (see step_removal.cc).
    hidden = f".iter_0000200.tilestone-{uuid.uuid4()}"
    save_run(tmp_path, 300)
    (tmp_path / "iter_0000200").rename(tmp_path / hidden)
    assert load_run(tmp_path) == 300
    tracker_of(tmp_path).unlink()
    assert load_run(tmp_path) == 300
    save_run(tmp_path, 300, **more)
    assert iterations_of(tmp_path) == ["iter_0000100", "iter_0000300"]


def test_the_newer_of_persistent_and_non_persistent_checkpoints_is_loaded(
    tmp_path: pathlib.Path,
) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    save_run(tmp_path, 100, **kind)
    for iteration in (110, 120):
        save_run(tmp_path, iteration, non_persistent_ckpt=True, **kind)
    fleeting = tmp_path / "non_persistent"
    assert iterations_of(fleeting) == ["iter_0000120"] and tracker_of(fleeting).read_text() == "120"
    assert tracker_of(tmp_path).read_text() == "100"
    assert load_run(tmp_path, **kind) == 120 and load_run(tmp_path) == 100
    assert load_run(tmp_path, ckpt_step=120, **kind) == 120
    assert load_run(tmp_path, ckpt_step=100, **kind) == 100
    save_run(tmp_path, 200, save_retain_interval=1000, **kind)
    assert load_run(tmp_path, **kind) == 200 and iterations_of(fleeting) == ["iter_0000120"]
    # A run that went back to an older iteration: the checkpoint saved last is kept.
    save_run(tmp_path, 115, non_persistent_ckpt=True, **kind)
    assert iterations_of(fleeting) == ["iter_0000115"]
    other = {**kind, "non_persistent_global_ckpt_dir": str(tmp_path / "fast")}
    save_run(tmp_path, 300, non_persistent_ckpt=True, **other)
    assert iterations_of(tmp_path / "fast") == ["iter_0000300"] and load_run(tmp_path, **other) == 300


def test_non_persistent_checkpoints_never_lie_among_those_that_stay(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    save_run(tmp_path / "run", 100)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match="would remove all others"):
        same = {**kind, "non_persistent_global_ckpt_dir": str(tmp_path / "link")}
        save_run(tmp_path / "run", 200, non_persistent_ckpt=True, **same)
    assert iterations_of(tmp_path / "run") == ["iter_0000100"]
    # A directory without a valid checkpoint does not hide the other directory's checkpoint.
    fleeting = tmp_path / "run" / "non_persistent"
    fleeting.mkdir()
    tracker_of(fleeting).write_text("150")
    with caplog.at_level(logging.WARNING, LOG):
        assert load_run(tmp_path / "run", **kind) == 100
    assert "Skipping a directory: the tracker" in caplog.text
    save_run(tmp_path / "run", 150, non_persistent_ckpt=True, **kind)
    shutil.rmtree(tmp_path / "run" / "iter_0000100")
    assert load_run(tmp_path / "run", **kind) == 150


def test_a_run_that_goes_back_removes_nothing_newer_and_no_file_of_others(
    tmp_path: pathlib.Path,
) -> None:
    save_run(tmp_path, 300)
    swap = tmp_path / f".{tracker_of(tmp_path).name}.swp"
    swap.write_text("an editor's")
    save_run(tmp_path, 150, save_retain_interval=1000)
    assert iterations_of(tmp_path) == ["iter_0000150", "iter_0000300"]
    assert swap.exists() and load_run(tmp_path) == 150


def test_a_file_in_place_of_a_run_is_refused_and_not_a_new_start(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    for call in (load_run, save_run):
        with pytest.raises(InvalidArgumentError, match="is a file, not the directory of a run"):
            call(tmp_path / "file")


def test_values_that_are_nearly_bools_and_integers_that_are_too_large(tmp_path: pathlib.Path) -> None:
    one: Any = 1
    save_run(tmp_path, 100, release=one)
    assert tracker_of(tmp_path).read_text() == "release"
    for name in ("save_retain_interval", "ckpt_step"):
        with pytest.raises(InvalidArgumentError, match=name):
            (load_run if name == "ckpt_step" else save_run)(tmp_path, **{name: 10**30})


def test_a_release_and_a_pretrained_checkpoint_start_at_iteration_0(
    tmp_path: pathlib.Path,
) -> None:
    start = tmp_path / "start"
    save_run(start, 100, release=True)
    assert iterations_of(start) == ["release"] and tracker_of(start).read_text() == "release"
    model = make_model(None, filled=False)
    args = arguments(start)
    assert training.load_checkpoint(model, Optimizer(model), None, args=args) == (0, 7.0)
    model.check()
    args = arguments(tmp_path / "run", pretrained_checkpoint=str(start))
    model = make_model(None, filled=False)
    assert training.load_checkpoint(model, None, None, args=args) == (0, 7.0)
    model.check()
    assert args.finetune is True
    save_run(tmp_path / "run", 10)
    assert load_run(tmp_path / "run", pretrained_checkpoint=str(start)) == 10
    with pytest.raises(NotFoundError, match="/neither"):
        load_run(tmp_path / "other", pretrained_checkpoint=str(tmp_path / "neither"))
