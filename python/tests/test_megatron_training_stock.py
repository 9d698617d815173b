"""Training runs of stock Megatron are resumed here and vice versa; ranks see different files.

Megatron's `training/checkpointing.py` is not in the megatron-core package, so these tests make its
calls of `dist_checkpointing` themselves.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranks import Worlds
from tilestone import MismatchError, megatron
from test_megatron_stock import _stock_on_cpu
from tilestone.megatron import training
from tilestone.megatron.groups import alone
from training_runs import Layout, Optimizer, Scheduler, arguments, draw, make_model, seed_all


def _megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing, rerun_state_machine
        from megatron.core.transformer import enums
    return dist_checkpointing, rerun_state_machine, enums


def _machine(state: str) -> Any:
    """The rerun state machine during a step."""
    _, module, _ = _megatron()
    machine = module.RerunStateMachine(mode=module.RerunMode.VALIDATE_RESULTS)
    machine.state = module.RerunState[state]
    machine.current_iteration = 99
    machine.failed_validation_call = module.Call(module.Caller("loss", dist.get_rank()), 3)
    return machine


def _stock_rng() -> list[dict[str, Any]]:
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
            "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
        }
    ]


def _stock_resumes(rank: int, folder: str) -> None:
    """Saves with Tilestone, and loads like stock's load_checkpoint."""
    checkpointing, rerun, enums = _megatron()
    layout = Layout.make(2, 1, 2)
    model = make_model(layout)
    args = arguments(
        folder, exit_signal=signal.SIGTERM, attention_backend=enums.AttnBackend.flash,
        params_dtype=torch.bfloat16, tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
    )  # fmt: skip
    seed_all(rank)
    training.save_checkpoint(
        100, model, Optimizer(model), Scheduler(3), 5, args=args, **layout.arguments(),
        rerun_state_machine=_machine("WILL_RERUN_FROM_CHECKPOINT"),
    )  # fmt: skip
    drawn = draw()
    assert pathlib.Path(folder, "latest_checkpointed_iteration.txt").read_text() == "100"
    path = f"{folder}/iter_0000100"
    assert checkpointing.check_is_distributed_checkpoint(path)
    common = checkpointing.load_common_state_dict(path)
    assert common["args"].attention_backend is enums.AttnBackend.flash
    assert common["args"].exit_signal is signal.SIGTERM
    assert common["rerun_state_machine"]["mode"] is rerun.RerunMode.VALIDATE_RESULTS
    metadata = checkpointing.load_content_metadata(preloaded_state_dict=common)
    assert "dp_cp_group" not in metadata
    empty = make_model(layout, filled=False)
    wanted = {
        "model": empty.sharded_state_dict(metadata={"dp_cp_group": layout.dp_cp}),
        "rng_state": checkpointing.ShardedObject(
            "rng_state", _stock_rng(), (1, 2), (0, rank), replica_id=0
        ),
    }
    wanted["model"] = {  # like those of a stock model
        name: checkpointing.ShardedTensor.from_rank_offsets(
            part.key, part.data, *([(0, rank, 2)] if "weight" in name else []),
            replica_id=part.replica_id,
        )
        for name, part in wanted["model"].items()
    }  # fmt: skip
    loaded = checkpointing.load(wanted, path)
    empty.load_state_dict(loaded["model"])
    empty.check()
    assert loaded["checkpoint_version"] == 3.0 and loaded["iteration"] == 100
    own = loaded["rng_state"][0]
    random.setstate(own["random_rng_state"])
    np.random.set_state(own["np_rng_state"])
    torch.set_rng_state(own["torch_rng_state"])
    assert draw() == drawn


def _resumes_stock(rank: int, folder: str) -> None:
    """Saves like stock's save_checkpoint, and loads with Tilestone."""
    checkpointing, rerun, enums = _megatron()
    layout = Layout.make(2, 1, 2)
    model = make_model(layout)
    optimizer = Optimizer(model)
    metadata = {"singleton_local_shards": False, "dp_cp_group": layout.dp_cp}
    seed_all(rank)
    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=1, world_size=2,
        data_parallel_size=1, consumed_train_samples=640, exit_signal=signal.SIGTERM,
        attention_backend=enums.AttnBackend.flash, num_layers=4,
    )  # fmt: skip
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": model.sharded_state_dict(metadata=metadata),
        "opt_param_scheduler": Scheduler(3).state_dict(),
        "rerun_state_machine": _machine("WILL_RERUN_FROM_CHECKPOINT").state_dict(
            None, "torch_dist"
        ),
        "rng_state": checkpointing.ShardedObject(
            "rng_state", _stock_rng(), (1, 2), (0, rank), replica_id=0
        ),
        "num_floating_point_operations_so_far": 5,
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    drawn = draw()
    _stock_save(checkpointing, state, f"{folder}/iter_0000100", metadata)
    if rank == 0:
        pathlib.Path(folder, "latest_checkpointed_iteration.txt").write_text("100")
    dist.barrier()

    empty = make_model(layout, filled=False)
    optimizer, scheduler = Optimizer(empty), Scheduler()
    machine = _machine("NOT_RUNNING_YET")
    again = arguments(folder, num_layers=4, data_parallel_size=1)
    found = training.load_checkpoint(
        empty, optimizer, scheduler, args=again, rerun_state_machine=machine, **layout.arguments()
    )
    stored = megatron.load_common_state_dict(f"{folder}/iter_0000100")["args"]
    assert stored.attention_backend is enums.AttnBackend.flash
    assert stored.exit_signal is signal.SIGTERM
    assert found == (100, 5) and again.consumed_train_samples == 640
    empty.check()
    optimizer.check()
    assert scheduler.steps == 3 and draw() == drawn
    assert machine.state is rerun.RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert machine.failed_validation_call == rerun.Call(rerun.Caller("loss", rank), 3)


def _stock_save(checkpointing: Any, state: Any, path: str, metadata: Any) -> None:
    """Saves with stock. Converts our entities to those that stock's models make."""

    def stock(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: stock(value) for key, value in item.items()}
        if type(item).__name__ == "ShardedTensor":
            axes = [(0, dist.get_rank(), 2)] if "weight" in item.key else []
            return checkpointing.ShardedTensor.from_rank_offsets(
                item.key, item.data, *axes, replica_id=item.replica_id
            )
        return item

    os.makedirs(path, exist_ok=True)
    clean = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    with _stock_on_cpu():
        checkpointing.save(stock(state), path, content_metadata=clean)


def _other_files(rank: int, folder: str) -> None:
    """Ranks see other files than rank 0, because of a relative path in another directory."""
    layout = Layout.make(2, 1, 2)
    model = make_model(layout)
    here = os.getcwd()
    for number in range(2):
        os.makedirs(f"{folder}/{number}", exist_ok=True)
    dist.barrier()
    try:
        os.chdir(f"{folder}/{rank}")
        args = arguments("run")
        keywords = {"args": args, **layout.arguments()}
        assert training.load_checkpoint(model, None, None, **keywords) == (0, 0)
        if rank == 1:
            training.save_checkpoint(
                7, make_model(None), None, None, 0, args=args, process_group=_alone(), **_solo()
            )
        else:
            _alone()
        with pytest.raises(MismatchError, match="/0/run .*rank 1: iter_0000007; rank 0: no step"):
            training.load_checkpoint(model, None, None, **keywords)
        os.chdir(f"{folder}/{1 - rank}")
        with pytest.raises(MismatchError, match="rank 0: iter_0000007; rank 1: no step"):
            training.load_checkpoint(model, None, None, **keywords)
    finally:
        os.chdir(here)


def _alone() -> Any:
    """A process group of rank 1 only. Both ranks must call this."""
    return dist.new_group([1])


def _solo() -> dict[str, Any]:
    return {f"{name}_group": alone() for name in ("tp", "pp", "dp_cp", "dp", "expt_dp")}


def _everything(rank: int, world: int, folder: str) -> None:
    _stock_resumes(rank, f"{folder}/ours")
    _resumes_stock(rank, f"{folder}/stock")
    _other_files(rank, f"{folder}/views")


def test_either_side_resumes_the_others_run_and_differing_views_are_named(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_everything, str(tmp_path), timeout=300)
