"""A training run's directory: trackers that are torn, removal of older checkpoints, crashes."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import sys
import types
from typing import Any

import pytest
import torch

from tilestone import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    megatron,
)
from tilestone.megatron import training
from tilestone.megatron.training import _removal, _saving
from training_runs import (
    Model,
    Optimizer,
    Scheduler,
    Tracker,
    arguments,
    draw,
    make_model,
    seed_all,
    weight,
)

LOG = "tilestone.megatron"


def _save(folder: Any, iteration: int = 100, model: Any = None, **more: Any) -> Model:
    keywords = {name: more.pop(name) for name in ("non_persistent_ckpt", "release") if name in more}
    model = make_model(None) if model is None else model
    training.save_checkpoint(
        iteration, model, Optimizer(model), Scheduler(iteration), 7.0,
        args=arguments(folder, **more), **keywords,
    )  # fmt: skip
    return model  # type: ignore[no-any-return]


def _load(folder: Any, **more: Any) -> int:
    """Resumes; gives the iteration."""
    model = make_model(None, filled=False)
    optimizer, scheduler = Optimizer(model), Scheduler()
    iteration, operations = training.load_checkpoint(
        model, optimizer, scheduler, args=arguments(folder, **more)
    )
    if iteration:
        model.check()
        assert scheduler.steps == iteration and operations == 7.0
    return iteration


def _tracker(folder: pathlib.Path) -> pathlib.Path:
    return folder / "latest_checkpointed_iteration.txt"


def _iterations(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that was saved at the iterations 100 and 200."""
    _save(tmp_path, 100)
    _save(tmp_path, 200)
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
    with pytest.raises(InvalidArgumentError, match="expert_parallel names a file of the legacy"):
        name("d", 7, **legacy)
    with pytest.raises(InvalidArgumentError, match="0 or more, not -1"):
        name("d", -1, return_base_dir=True)
    _save(tmp_path / "new" / "run")
    tracker = training.get_checkpoint_tracker_filename(tmp_path / "new" / "run")
    assert pathlib.Path(tracker).read_text() == "100"
    assert training.read_metadata(tracker) == (100, False)
    assert os.stat(tracker).st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    assert sorted(os.listdir(tmp_path / "new" / "run")) == [
        "iter_0000100", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_common_state_has_megatrons_keys_and_the_group_stays_out(tmp_path: pathlib.Path) -> None:
    _save(tmp_path, use_distributed_optimizer=True, exit_signal=signal.SIGTERM)
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
    _tracker(run).write_bytes(content)
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(run) == 200
    assert "newest valid checkpoint is looked for" in caplog.text
    assert f"The newest valid checkpoint is {run}/iter_0000200" in caplog.text


def test_without_a_tracker_crashed_and_torn_checkpoints_are_passed_over(
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
    (run / "iter_700").mkdir()  # no name of Megatron's
    _tracker(run).unlink()
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(run) == 200
    passed = [line for line in caplog.messages if line.startswith("Passed over")]
    assert [f"0000{n}00" in line for n, line in zip((5, 4, 3), passed, strict=True)] == [True] * 3


def test_a_tracker_that_names_nothing_valid_is_an_error_where_nothing_else_is(
    tmp_path: pathlib.Path, run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run / "iter_0000200")
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(run) == 100
    assert "names a checkpoint that can't be loaded" in caplog.text
    shutil.rmtree(run / "iter_0000100")
    with pytest.raises(CorruptError, match="holds no valid checkpoint"):
        _load(run)
    (run / "iter_0000300" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="iter_0000300 is a checkpoint of .* legacy format"):
        _load(run)
    _tracker(run).unlink()
    _tracker(run).mkdir()
    with pytest.raises(StorageError, match="can't be read"):
        _load(run)


def test_no_checkpoint_starts_anew_or_ends_with_an_error(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(tmp_path) == 0 and _load(None) == 0 and _load(tmp_path / "none") == 0
    assert f"there is no checkpoint in {tmp_path}: the run starts" in caplog.text
    with pytest.raises(NotFoundError, match="there is no checkpoint in"):
        _load(tmp_path, exit_on_missing_checkpoint=True)


def test_an_iteration_is_chosen_by_ckpt_step(run: pathlib.Path) -> None:
    _tracker(run).write_text("torn")
    assert _load(run, ckpt_step=100) == 100
    with pytest.raises(NotFoundError, match=r"iteration 150 \(ckpt_step\)"):
        _load(run, ckpt_step=150)


def _killed(step: Any, *args: Any, **keywords: Any) -> None:
    """Runs a step in a process that is killed in it, and that may not end otherwise."""
    process = multiprocessing.get_context("fork").Process(target=step, args=args, kwargs=keywords)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(folder: Any, iteration: int, place: tuple[Any, str], **more: Any) -> None:
    setattr(*place, _die)
    _save(folder, iteration, **more)


def test_a_kill_between_publishing_and_the_tracker_leaves_the_tracker_at_a_whole_checkpoint(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = (_saving._files, "replace_file")
    _killed(_save_and_die, tmp_path, 100, place)
    assert _iterations(tmp_path) == ["iter_0000100"] and not _tracker(tmp_path).exists()
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(tmp_path) == 100  # the tracker is missing, and the checkpoint is whole
    _save(tmp_path, 100)
    _killed(_save_and_die, tmp_path, 200, (os, "replace"))
    assert _tracker(tmp_path).read_text() == "100" and _load(tmp_path) == 100
    staged = next(path for path in tmp_path.iterdir() if path.name.startswith(".latest"))
    _save(tmp_path, 200)
    assert staged.exists()  # it might be another job's
    os.utime(staged, (0, 0))
    _save(tmp_path, 200)
    assert _tracker(tmp_path).read_text() == "200" and _load(tmp_path) == 200
    assert not any(name.startswith(".latest") for name in os.listdir(tmp_path))


def test_removal_keeps_what_the_tracker_names_multiples_links_and_the_unpublished(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (100, 150, 200, 250):
        _save(tmp_path, iteration, save_retain_interval=100)
    assert _iterations(tmp_path) == ["iter_0000100", "iter_0000200", "iter_0000250"]
    shutil.copytree(tmp_path / "iter_0000250", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "iter_0000250")
    (tmp_path / "iter_0000250").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO, LOG):
        _save(tmp_path, 260, save_retain_interval=100)
        (tmp_path / "iter_0000260" / "metadata.json").unlink()  # as if it were being written
        _save(tmp_path, 270, save_retain_interval=100)
    assert (tmp_path / "iter_0000250").is_symlink() and (tmp_path / "iter_0000260").exists()
    assert "iter_0000250 stays: it is a symbolic link" in caplog.text
    assert "Not removed: " in caplog.text
    # The same iteration again; a torn tracker; a release: nothing is known to be superseded.
    _save(tmp_path, 270, save_retain_interval=100)
    _tracker(tmp_path).write_text("")
    _save(tmp_path, 280, save_retain_interval=100)
    _save(tmp_path, 280, save_retain_interval=100, release=True)
    _save(tmp_path, 290, save_retain_interval=100)
    kept = {"iter_0000270", "iter_0000280", "iter_0000290", "release"}
    assert kept < set(_iterations(tmp_path)) and _load(tmp_path) == 290
    with pytest.raises(InvalidArgumentError, match="save_retain_interval is 1 or more"):
        _save(tmp_path, 300, save_retain_interval=0)


def test_a_kill_while_an_older_checkpoint_is_removed_leaves_none_that_is_half(
    tmp_path: pathlib.Path,
) -> None:
    more = {"save_retain_interval": 1000}
    _save(tmp_path, 100, **more)
    _killed(_save_and_die, tmp_path, 200, (_removal, "hide"), **more)
    assert _iterations(tmp_path) == ["iter_0000100", "iter_0000200"] and _load(tmp_path) == 200
    _killed(_save_and_die, tmp_path, 300, (shutil, "rmtree"), **more)
    assert [name for name in _iterations(tmp_path) if name[0] != "."] == [
        "iter_0000100", "iter_0000300",
    ]  # fmt: skip
    assert _load(tmp_path) == 300
    _tracker(tmp_path).unlink()
    assert _load(tmp_path) == 300
    _save(tmp_path, 300, **more)
    assert _iterations(tmp_path) == ["iter_0000100", "iter_0000300"]


def test_the_newer_of_persistent_and_non_persistent_checkpoints_is_loaded(
    tmp_path: pathlib.Path,
) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    _save(tmp_path, 100, **kind)
    for iteration in (110, 120):
        _save(tmp_path, iteration, non_persistent_ckpt=True, **kind)
    fleeting = tmp_path / "non_persistent"
    assert _iterations(fleeting) == ["iter_0000120"] and _tracker(fleeting).read_text() == "120"
    assert _tracker(tmp_path).read_text() == "100"
    assert _load(tmp_path, **kind) == 120 and _load(tmp_path) == 100
    assert _load(tmp_path, ckpt_step=120, **kind) == 120
    assert _load(tmp_path, ckpt_step=100, **kind) == 100
    _save(tmp_path, 200, save_retain_interval=1000, **kind)
    assert _load(tmp_path, **kind) == 200 and _iterations(fleeting) == ["iter_0000120"]
    # A run that went back to an older iteration: the newest that was saved is kept.
    _save(tmp_path, 115, non_persistent_ckpt=True, **kind)
    assert _iterations(fleeting) == ["iter_0000115"]
    other = {**kind, "non_persistent_global_ckpt_dir": str(tmp_path / "fast")}
    _save(tmp_path, 300, non_persistent_ckpt=True, **other)
    assert _iterations(tmp_path / "fast") == ["iter_0000300"] and _load(tmp_path, **other) == 300


def test_what_is_not_there_is_refused_by_its_argument(tmp_path: pathlib.Path) -> None:
    refused = (
        ({"async_save": True}, {}, "args.async_save"),
        ({"ckpt_format": "torch"}, {}, "args.ckpt_format='torch'"),
        ({"ckpt_format": "fsdp_dtensor"}, {}, "args.ckpt_format='fsdp_dtensor'"),
        ({"use_dist_ckpt": False}, {}, "args.use_dist_ckpt=False"),
        ({"non_persistent_ckpt_type": "local"}, {"non_persistent_ckpt": True}, "='local'"),
        ({"non_persistent_ckpt_type": "global"},
         {"non_persistent_ckpt": True, "release": True}, "never a non-persistent"),
    )  # fmt: skip
    for more, keywords, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            _save(tmp_path, **more, **keywords)
    with pytest.raises(InvalidArgumentError, match="non_persistent_ckpt_type='global'"):
        _save(tmp_path, non_persistent_ckpt=True)
    with pytest.raises(InvalidArgumentError, match="names no directory"):
        _save(tmp_path, save=None)
    with pytest.raises(InvalidArgumentError, match="an iteration is an int"):
        _save(tmp_path, 1.5)  # type: ignore[arg-type]
    model = make_model(None)
    with pytest.raises(UnsupportedError, match="args.dataloader_save"):
        training.save_checkpoint(
            1, model, None, None, 0, train_data_iterator=object(),
            args=arguments(tmp_path, dataloader_save="d"),
        )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="Adam has no method sharded_state_dict"):
        adam = torch.optim.Adam(model.parameters())
        training.save_checkpoint(1, model, adam, None, 0, args=arguments(tmp_path))
    with pytest.raises(InvalidArgumentError, match="process_group is 'dp' or 'ep_dp', not 'tp'"):
        group = "ckpt_fully_parallel_save_process_group"
        _save(tmp_path, ckpt_fully_parallel_save=True, **{group: "tp"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgumentError, match="no attribute 'lode'"):
        training.load_checkpoint(model, None, None, "lode", args=arguments(tmp_path))
    _save(tmp_path)
    with pytest.raises(UnsupportedError, match="='local'"):
        _load(tmp_path, non_persistent_ckpt_type="local")
    with pytest.raises(InvalidArgumentError, match="dist_ckpt_strictness='return_all'"):
        _load(tmp_path, dist_ckpt_strictness="return_all")


def test_megatrons_global_arguments_are_taken_where_none_are_given(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(None)
    for _ in range(2):  # there is no such module; it is there, and its arguments are not set up
        with pytest.raises(InvalidArgumentError, match="args was not given"):
            training.save_checkpoint(1, model, None, None, 0)
        with pytest.raises(InvalidArgumentError, match="args was not given"):
            training.load_checkpoint(model, None, None)
        module: Any = types.ModuleType("megatron.training.global_vars")
        module.held = None

        def get_args(module: Any = module) -> Any:
            assert module.held is not None, "args is not initialized."
            return module.held

        module.get_args = get_args
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.held = arguments(tmp_path, consumed_train_samples=5)
    training.save_checkpoint(1, model, None, None, 0)
    module.held = arguments(tmp_path)
    again = make_model(None, filled=False)
    assert training.load_checkpoint(again, None, None) == (1, 0)
    again.check()
    assert module.held.consumed_train_samples == 5
    assert training.restore_rng_state(training.get_rng_state("torch_dist").data)
    # Those that are given count.
    with pytest.raises(NotFoundError):
        given = arguments(tmp_path / "no", exit_on_missing_checkpoint=True)
        training.load_checkpoint(again, None, None, args=given)


class _Program:
    """Arguments of which some are the class's."""

    num_layers = 4

    def __init__(self, folder: Any) -> None:
        self.save = self.load = str(folder)

    @property
    def consumed_train_samples(self) -> int:
        return 77


def test_arguments_that_can_not_be_meant_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    for iteration in (True, -1, 10**70):
        with pytest.raises(InvalidArgumentError, match="of 18 digits at most, not"):
            _save(tmp_path, iteration, release=True)
    with pytest.raises(InvalidArgumentError, match="args.save is a path, not int"):
        args: Any = argparse.Namespace(save=5)
        training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    for args in (_Program, types, {"save": str(tmp_path)}):
        with pytest.raises(InvalidArgumentError, match="args is a Namespace or another object"):
            training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    assert list(tmp_path.iterdir()) == []
    args = _Program(tmp_path)
    training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    stored = vars(megatron.load_common_state_dict(tmp_path / "iter_0000001")["args"])
    assert stored["num_layers"] == 4 and stored["consumed_train_samples"] == 77
    with pytest.raises(InvalidArgumentError, match="args.consumed_train_samples can't be set"):
        training.load_checkpoint(make_model(None), None, None, args=args)
    for name, value in (("load", ""), ("pretrained_checkpoint", ""), ("load", 7)):
        with pytest.raises(InvalidArgumentError, match=f"args.{name} is an? .*path"):
            training.load_checkpoint(
                make_model(None), None, None, args=argparse.Namespace(**{name: value})
            )
    for step in ("1", 1.0, True, -1):
        with pytest.raises(InvalidArgumentError, match="args.ckpt_step is 0 or more, or None"):
            _load(tmp_path, ckpt_step=step)
    with pytest.raises(InvalidArgumentError, match="save_retain_interval is 1 or more"):
        _save(tmp_path, 2, save_retain_interval=1.5)


def test_state_that_a_model_does_not_return_sharded_is_refused(tmp_path: pathlib.Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(InvalidArgumentError, match="the model is an empty list"):
        training.save_checkpoint(1, [], None, None, 0, args=args)
    model: Any = make_model(None)
    optimizer: Any = Optimizer(model)
    optimizer.sharded_state_dict = lambda *given, **more: None
    with pytest.raises(InvalidArgumentError, match=r"\(\) of Optimizer returned a NoneType"):
        training.save_checkpoint(1, model, optimizer, None, 0, args=args)
    for returned, message in (({"w": torch.ones(2)}, "plain tensors"), (None, "a NoneType")):
        model.sharded_state_dict = lambda returned=returned, **more: returned
        with pytest.raises(InvalidArgumentError, match=f"of Model returned {message}"):
            training.save_checkpoint(1, model, None, None, 0, args=args)
    assert list(tmp_path.iterdir()) == []


def test_non_persistent_checkpoints_never_lie_among_those_that_stay(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    _save(tmp_path / "run", 100)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match="would remove all the others"):
        same = {**kind, "non_persistent_global_ckpt_dir": str(tmp_path / "link")}
        _save(tmp_path / "run", 200, non_persistent_ckpt=True, **same)
    assert _iterations(tmp_path / "run") == ["iter_0000100"]
    # One directory without a valid checkpoint hides that of the other in neither direction.
    fleeting = tmp_path / "run" / "non_persistent"
    fleeting.mkdir()
    _tracker(fleeting).write_text("150")
    with caplog.at_level(logging.WARNING, LOG):
        assert _load(tmp_path / "run", **kind) == 100
    assert "Passed over: the tracker" in caplog.text
    _save(tmp_path / "run", 150, non_persistent_ckpt=True, **kind)
    shutil.rmtree(tmp_path / "run" / "iter_0000100")
    assert _load(tmp_path / "run", **kind) == 150


def test_a_run_that_goes_back_removes_nothing_newer_and_no_file_of_others(
    tmp_path: pathlib.Path,
) -> None:
    _save(tmp_path, 300)
    swap, staged = (tmp_path / f".{_tracker(tmp_path).name}.{end}" for end in ("swp", "ab12_cd3"))
    swap.write_text("an editor's")
    staged.mkdir()  # can't be unlinked
    os.utime(staged, (0, 0))
    _save(tmp_path, 150, save_retain_interval=1000)
    assert {"iter_0000150", "iter_0000300"} < set(_iterations(tmp_path))
    assert swap.exists() and _load(tmp_path) == 150


class _Wrapper:
    """As a data parallel wrapper of Megatron's."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.module.load_state_dict(state, strict=strict)


class Float16Module(_Wrapper):
    """Recognised by its name."""


class DistributedDataParallel(_Wrapper):
    """Recognised by its name."""


def test_virtual_pipeline_stages_in_wrappers_come_back_as_model0_and_model1(
    tmp_path: pathlib.Path,
) -> None:
    stages = [Model([0, 2], (0, 1)), Model([1, 3], (0, 1))]
    wrapped = [DistributedDataParallel(Float16Module(stage)) for stage in stages]
    args = types.SimpleNamespace(**vars(arguments(tmp_path)))  # not a Namespace
    training.save_checkpoint(5, wrapped, Optimizer(stages), Scheduler(5), 0, args=args)
    stored = megatron.load_tensors_metadata(tmp_path / "iter_0000005")
    assert sorted(key for key in stored if key.startswith("weight")) == [
        f"weight{layer}" for layer in range(4)
    ]
    common = megatron.load_common_state_dict(tmp_path / "iter_0000005")
    assert type(common["args"]) is argparse.Namespace
    empty = [Model([0, 2], (0, 1), False), Model([1, 3], (0, 1), False)]
    optimizer = Optimizer(empty)
    wrapped = [DistributedDataParallel(Float16Module(stage)) for stage in empty]
    training.load_checkpoint(wrapped, optimizer, None, args=args)
    for stage in empty:
        stage.check()
    optimizer.check()


def test_parts_of_the_state_are_left_out_as_the_arguments_say(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path / "bare", no_save_optim=True, no_save_rng=True)
    assert set(megatron.load_sharded_metadata(tmp_path / "bare" / "iter_0000100")) == {
        f"{kind}{layer}" for kind in ("weight", "bias") for layer in range(4)
    }
    with pytest.raises(NotFoundError, match="saved without the optimizer"):
        _load(tmp_path / "bare")
    model = make_model(None, filled=False)
    optimizer = Optimizer(model)
    with caplog.at_level(logging.WARNING, LOG):
        args = arguments(tmp_path / "bare", no_load_optim=True, bf16=True)
        assert training.load_checkpoint(model, optimizer, Scheduler(), args=args)[0] == 100
    assert "has none (no_save_rng)" in caplog.text
    assert optimizer.loaded is None and optimizer.reloaded is True

    _save(tmp_path, consumed_train_samples=5)
    seed_all(1)
    drawn = draw()
    for more in ({"no_load_rng": True}, {"finetune": True}):
        seed_all(1)
        assert _load(tmp_path, **more) == (100 if "no_load_rng" in more else 0)
        assert draw() == drawn
    args = arguments(tmp_path, finetune=True, bf16=True, load_main_params_from_ckpt=True)
    model = make_model(None, filled=False)
    optimizer, scheduler = Optimizer(model), Scheduler(3)
    assert training.load_checkpoint(model, optimizer, scheduler, args=args) == (0, 7.0)
    assert scheduler.steps == 3 and not hasattr(args, "consumed_train_samples")
    assert torch.equal(optimizer.reloaded["model"]["weight0"], weight(0))


def test_a_release_and_a_pretrained_checkpoint_start_at_iteration_0(
    tmp_path: pathlib.Path,
) -> None:
    start = tmp_path / "start"
    _save(start, 100, release=True)
    assert _iterations(start) == ["release"] and _tracker(start).read_text() == "release"
    model = make_model(None, filled=False)
    args = arguments(start)
    assert training.load_checkpoint(model, Optimizer(model), None, args=args) == (0, 7.0)
    model.check()
    args = arguments(tmp_path / "run", pretrained_checkpoint=str(start))
    model = make_model(None, filled=False)
    assert training.load_checkpoint(model, None, None, args=args) == (0, 7.0)
    model.check()
    assert args.finetune is True
    _save(tmp_path / "run", 10)
    assert _load(tmp_path / "run", pretrained_checkpoint=str(start)) == 10
    with pytest.raises(NotFoundError, match="and none in"):
        _load(tmp_path / "other", pretrained_checkpoint=str(tmp_path / "neither"))


def test_arguments_that_must_be_equal_are_compared(tmp_path: pathlib.Path) -> None:
    _save(tmp_path, num_layers=4, tokenizer_type="A")
    assert _load(tmp_path, num_layers=4, tokenizer_type="B") == 100
    with pytest.raises(InvalidArgumentError, match="args.num_layers is 8, and .* is 4"):
        _load(tmp_path, num_layers=8)
    with pytest.raises(InvalidArgumentError, match="args.tokenizer_type"):
        _load(tmp_path, tokenizer_type="B", vocab_file="v")
    assert _load(tmp_path, num_layers=8, finetune=True) == 0


def test_strictness_and_skipping_and_strategies_of_the_context(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    context: dict[str, Any] = {}
    model = make_model(None)
    args = arguments(tmp_path, ckpt_fully_parallel_save=True)
    training.save_checkpoint(1, model, None, None, 0, context, args=args)
    strategy = context["save_strategy"]
    training.save_checkpoint(2, model, None, None, 0, context, args=args)
    assert context["save_strategy"] is strategy
    more = Model([0, 1, 2, 3], (0, 1), filled=False)
    more.layers.append(4)
    more.register_parameter("weight4", torch.nn.Parameter(torch.zeros(8, 3)))
    more.register_parameter("bias4", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(NotFoundError, match="4"):
        training.load_checkpoint(more, None, None, args=args)
    args.dist_ckpt_strictness = "log_all"
    with caplog.at_level(logging.WARNING):
        training.load_checkpoint(more, None, None, args=args)
    assert "weight4" in caplog.text and torch.equal(more.weight0.detach(), weight(0))

    model = make_model(None, filled=False)
    model.load_state_dict = None  # type: ignore[assignment]
    args.dist_ckpt_strictness = "assume_ok_unexpected"
    result = training.load_checkpoint(
        model, None, None, skip_load_to_model_and_opt=True, args=args,
        checkpointing_context={"load_strategy": ("torch_dist", 1)},
    )  # fmt: skip
    assert result == (2, 0)
    model.check()


def test_zarr_checkpoints_are_saved_and_resumed(tmp_path: pathlib.Path) -> None:
    _save(tmp_path, ckpt_format="zarr")
    assert (tmp_path / "iter_0000100" / "weight0" / ".zarray").exists()
    assert _load(tmp_path) == 100


def test_megatrons_and_our_random_states_lack_no_part(tmp_path: pathlib.Path) -> None:
    args = arguments(tmp_path)
    entity = training.get_rng_state("torch_dist", args=args, key_prefix="p_")
    assert entity.unique_key == "p_rng_state/shard_0.0_1.1" and entity.replica_id == 0
    assert list(entity.data[0]) == [
        "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state",
        "rng_tracker_states",
    ]  # fmt: skip
    del entity.data[0]["np_rng_state"]
    with pytest.raises(NotFoundError, match="no 'np_rng_state'.*no_load_rng"):
        training.restore_rng_state(entity.data, args=args)
    with pytest.raises(UnsupportedError, match="in the format 'torch_dcp'"):
        training.get_rng_state("torch_dcp", args=args)


def test_states_of_cuda_and_of_megatrons_tracker_come_back_or_it_is_said_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments("")
    on_cpu = training.get_rng_state("torch_dist", args=args).data
    assert on_cpu[0]["cuda_rng_state"].numel() == 0 and on_cpu[0]["rng_tracker_states"] == {}

    class Patched:  # a GPU, and Megatron-Core as a program has set it up
        state = torch.full((16,), 3, dtype=torch.uint8)

    module: Any = types.ModuleType("megatron.core.tensor_parallel.random")
    module._CUDA_RNG_STATE_TRACKER = Tracker(5)
    module.is_graph_safe_cuda_rng_tracker = lambda tracker: True
    module.convert_cuda_rng_state = lambda state, to_graphable: (state.tolist(), to_graphable)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda: Patched.state)
        patch.setattr(torch.cuda, "set_rng_state", lambda state: setattr(Patched, "state", state))
        patch.setitem(sys.modules, module.__name__, module)
        on_gpu = training.get_rng_state("torch_dist", args=args).data
        Patched.state = torch.zeros(16, dtype=torch.uint8)
        module._CUDA_RNG_STATE_TRACKER.states = {}
        assert training.restore_rng_state(on_gpu, args=args)
        assert Patched.state.tolist() == [3] * 16
        assert module._CUDA_RNG_STATE_TRACKER.states == {"model-parallel-rng": ([5], True)}
        training.restore_rng_state(on_cpu, args=args)
        assert Patched.state.tolist() == [3] * 16
        assert "CUDA generator keeps its state: the checkpoint is from a CPU run" in caplog.text
    training.restore_rng_state(on_gpu, args=args)
    assert "this rank has no CUDA" in caplog.text
    assert "'model-parallel-rng' of the CUDA generators' tracker are not restored" in caplog.text


def test_the_page_on_training_lists_every_argument_with_its_default() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "training.md"
    table = page.read_text().split("## Arguments that are read")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    listed = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert {name: f" `{value!r}` " for name, value in training.ARGUMENTS.items()} == listed
