"""A training run's arguments: refused ones, and those that choose the parts to save and load."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pathlib
import re
import signal
import sys
import types
from typing import Any

import pytest
import torch

from tilestone import InvalidArgumentError, NotFoundError, UnsupportedError, megatron
from tilestone.megatron import training
from training_runs import (
    Model,
    Optimizer,
    Scheduler,
    Tracker,
    arguments,
    draw,
    load_run,
    make_model,
    save_run,
    seed_all,
    weight,
)

LOG = "tilestone.megatron"


def test_unsupported_arguments_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    refused = (
        ({"ckpt_format": "torch"}, {}, "args.ckpt_format='torch'"),
        ({"ckpt_format": "fsdp_dtensor"}, {}, "args.ckpt_format='fsdp_dtensor'"),
        ({"use_dist_ckpt": False}, {}, "args.use_dist_ckpt=False"),
        ({"non_persistent_ckpt_type": "local"}, {"non_persistent_ckpt": True}, "='local'"),
        ({"non_persistent_ckpt_type": "global"},
         {"non_persistent_ckpt": True, "release": True}, "be a non-persistent"),
    )  # fmt: skip
    for more, keywords, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            save_run(tmp_path, **more, **keywords)
    with pytest.raises(InvalidArgumentError, match="non_persistent_ckpt_type='global'"):
        save_run(tmp_path, non_persistent_ckpt=True)
    with pytest.raises(InvalidArgumentError, match="args.save must name"):
        save_run(tmp_path, save=None)
    with pytest.raises(InvalidArgumentError, match="iteration .*int"):
        save_run(tmp_path, 1.5)  # type: ignore[arg-type]
    model = make_model(None)
    with pytest.raises(UnsupportedError, match="args.dataloader_save"):
        training.save_checkpoint(
            1, model, None, None, 0, train_data_iterator=object(),
            args=arguments(tmp_path, dataloader_save="d"),
        )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="Adam has no method sharded_state_dict"):
        adam = torch.optim.Adam(model.parameters())
        training.save_checkpoint(1, model, adam, None, 0, args=arguments(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgumentError, match="no attribute 'lode'"):
        training.load_checkpoint(model, None, None, "lode", args=arguments(tmp_path))
    save_run(tmp_path)
    with pytest.raises(UnsupportedError, match="='local'"):
        load_run(tmp_path, non_persistent_ckpt_type="local")
    with pytest.raises(InvalidArgumentError, match="dist_ckpt_strictness='return_all'"):
        load_run(tmp_path, dist_ckpt_strictness="return_all")


def test_megatrons_global_arguments_are_used_if_none_are_given(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(None)
    for _ in range(2):  # first without the module, then with it and without arguments
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
    # Given arguments have precedence.
    with pytest.raises(NotFoundError):
        given = arguments(tmp_path / "no", exit_on_missing_checkpoint=True)
        training.load_checkpoint(again, None, None, args=given)


class _Program:
    """Arguments, some of which are class attributes."""

    num_layers = 4

    def __init__(self, folder: Any) -> None:
        self.save = self.load = str(folder)

    @property
    def consumed_train_samples(self) -> int:
        return 77


def test_invalid_arguments_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    for iteration in (True, -1, 10**70):
        with pytest.raises(InvalidArgumentError, match="at most 18 digits, not"):
            save_run(tmp_path, iteration, release=True)
    with pytest.raises(InvalidArgumentError, match="args.save .*path.* int"):
        args: Any = argparse.Namespace(save=5)
        training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    for args in (_Program, types, {"save": str(tmp_path)}):
        with pytest.raises(InvalidArgumentError, match="args .*Namespace"):
            training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    assert list(tmp_path.iterdir()) == []
    args = _Program(tmp_path)
    training.save_checkpoint(1, make_model(None), None, None, 0, args=args)
    stored = vars(megatron.load_common_state_dict(tmp_path / "iter_0000001")["args"])
    assert stored["num_layers"] == 4 and stored["consumed_train_samples"] == 77
    with pytest.raises(InvalidArgumentError, match="can't set args.consumed_train_samples"):
        training.load_checkpoint(make_model(None), None, None, args=args)
    for name, value in (("load", ""), ("pretrained_checkpoint", ""), ("load", 7)):
        with pytest.raises(InvalidArgumentError, match=f"args.{name} .* path"):
            training.load_checkpoint(
                make_model(None), None, None, args=argparse.Namespace(**{name: value})
            )
    for step in ("1", 1.0, True, -1):
        with pytest.raises(InvalidArgumentError, match="args.ckpt_step .*0 .*None"):
            load_run(tmp_path, ckpt_step=step)
    with pytest.raises(InvalidArgumentError, match="save_retain_interval .*1"):
        save_run(tmp_path, 2, save_retain_interval=1.5)


def test_arguments_that_can_not_be_saved_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be pickled") as raised:
        save_run(tmp_path, callback=lambda: 0, hooks=[1, None], signal=signal.SIGTERM)
    assert raised.value.key == "args.callback" and list(tmp_path.iterdir()) == []


def test_objects_without_required_methods_are_refused_before_anything_is_filled(
    tmp_path: pathlib.Path,
) -> None:
    none: Any = types.SimpleNamespace(state_dict=lambda: None, load_state_dict=print)
    for scheduler, message in (
        (object(), "object has no method state_dict"),
        (none, r"state_dict\(\) of SimpleNamespace returned None"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            training.save_checkpoint(
                1, make_model(None), None, scheduler, 0, args=arguments(tmp_path)
            )
    assert list(tmp_path.iterdir()) == []
    save_run(tmp_path)
    model = make_model(None, filled=False)
    saves: Any = types.SimpleNamespace(state_dict=dict)
    optimizer: Any = types.SimpleNamespace(sharded_state_dict=Optimizer(model).sharded_state_dict)
    for given, name in (((None, saves), "load"), ((optimizer, None), "load"), ((none, none), "re")):
        args = arguments(tmp_path, no_load_optim=name == "re", bf16=True)
        with pytest.raises(InvalidArgumentError, match=f"SimpleNamespace has no method {name}"):
            training.load_checkpoint(model, *given, args=args)
    assert not any(parameter.any() for parameter in model.parameters())
    frozen = dataclasses.make_dataclass("Frozen", ["save", "load"], frozen=True)
    with pytest.raises(InvalidArgumentError, match="can't set args.consumed_train_samples"):
        training.load_checkpoint(
            model, None, None, args=frozen(str(tmp_path), str(tmp_path))
        )


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


class _Wrapper:
    """Like a data-parallel wrapper of Megatron."""

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
    save_run(tmp_path / "bare", no_save_optim=True, no_save_rng=True)
    assert set(megatron.load_sharded_metadata(tmp_path / "bare" / "iter_0000100")) == {
        f"{kind}{layer}" for kind in ("weight", "bias") for layer in range(4)
    }
    with pytest.raises(NotFoundError, match="saved without the optimizer"):
        load_run(tmp_path / "bare")
    model = make_model(None, filled=False)
    optimizer = Optimizer(model)
    with caplog.at_level(logging.WARNING, LOG):
        args = arguments(tmp_path / "bare", no_load_optim=True, bf16=True)
        assert training.load_checkpoint(model, optimizer, Scheduler(), args=args)[0] == 100
    assert "has none (no_save_rng)" in caplog.text
    assert optimizer.loaded is None and optimizer.reloaded is True

    save_run(tmp_path, consumed_train_samples=5)
    seed_all(1)
    drawn = draw()
    for more in ({"no_load_rng": True}, {"finetune": True}):
        seed_all(1)
        assert load_run(tmp_path, **more) == (100 if "no_load_rng" in more else 0)
        assert draw() == drawn
    args = arguments(tmp_path, finetune=True, bf16=True, load_main_params_from_ckpt=True)
    model = make_model(None, filled=False)
    optimizer, scheduler = Optimizer(model), Scheduler(3)
    assert training.load_checkpoint(model, optimizer, scheduler, args=args) == (0, 7.0)
    assert scheduler.steps == 3 and not hasattr(args, "consumed_train_samples")
    assert torch.equal(optimizer.reloaded["model"]["weight0"], weight(0))


def test_arguments_that_must_be_equal_are_compared(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path, num_layers=4, tokenizer_type="A")
    assert load_run(tmp_path, num_layers=4, tokenizer_type="B") == 100
    with pytest.raises(InvalidArgumentError, match="args.num_layers is 8, .* is 4"):
        load_run(tmp_path, num_layers=8)
    with pytest.raises(InvalidArgumentError, match="args.tokenizer_type"):
        load_run(tmp_path, tokenizer_type="B", vocab_file="v")
    assert load_run(tmp_path, num_layers=8, finetune=True) == 0


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
    save_run(tmp_path, ckpt_format="zarr")
    assert (tmp_path / "iter_0000100" / "weight0" / ".zarray").exists()
    assert load_run(tmp_path) == 100


def test_random_states_of_megatron_and_ours_are_complete(tmp_path: pathlib.Path) -> None:
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


def test_states_of_cuda_and_of_megatrons_tracker_are_restored_or_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments("")
    on_cpu = training.get_rng_state("torch_dist", args=args).data
    assert on_cpu[0]["cuda_rng_state"].numel() == 0 and on_cpu[0]["rng_tracker_states"] == {}

    class Patched:  # simulates a GPU, and Megatron-Core set up by a program
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
