"""A small training run that the tests of tilestone.megatron.training save and resume.

Each pipeline rank has a linear layer. Its rows are sharded over the tensor-parallel ranks, and its
bias is replicated. The optimizer has one state tensor for each parameter.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import sys
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tilestone import megatron
from tilestone.megatron import training
from tilestone.megatron.groups import get_pg_rank, get_pg_size

LAYERS, ROWS, COLUMNS = 4, 8, 3
NAMES = ("tp", "pp", "dp_cp", "dp", "expt_dp")
FUNCTIONS = {
    "tp": "get_tensor_model_parallel_group",
    "pp": "get_pipeline_model_parallel_group",
    "expt_dp": "get_expert_data_parallel_group",
}


def arguments(folder: Any, **more: Any) -> argparse.Namespace:
    """A program's arguments to save to and load from a folder."""
    return argparse.Namespace(**{"save": str(folder), "load": str(folder), "bf16": False, **more})


def weight(layer: int) -> torch.Tensor:
    """The whole weight of a layer."""
    return torch.arange(ROWS * COLUMNS * 1.0).reshape(ROWS, COLUMNS) + 100 * layer


@dataclasses.dataclass
class Layout:
    """Real process groups of this rank, by name."""

    tp: Any
    pp: Any
    dp_cp: Any
    dp: Any
    expt_dp: Any

    @staticmethod
    def make(tp: int, pp: int, world: int) -> Layout:
        """Megatron's rank order: tensor-parallel ranks vary fastest, pipeline ranks slowest.

        Every rank of torch's default group must call this. Ranks from `world` on get no groups.
        """
        dp = world // (tp * pp)
        ranks = torch.arange(world).reshape(pp, dp, tp)
        made = {}
        for name, axis in (("tp", 2), ("pp", 0), ("dp_cp", 1), ("dp", 1), ("expt_dp", 1)):
            rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
            made[name], _ = dist.new_subgroups_by_enumeration(rows)
        return Layout(**made)

    def arguments(self, names: Any = NAMES) -> dict[str, Any]:
        """The groups as keywords of save_checkpoint and load_checkpoint."""
        return {f"{name}_group": getattr(self, name) for name in names}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """(rank, size) by name."""
        return {n: (getattr(self, n).rank(), getattr(self, n).size()) for n in NAMES}


def install_parallel_state(layout: Layout | None, names: Any = NAMES) -> None:
    """Installs a parallel_state like Megatron's with some groups of a layout; None removes it."""
    sys.modules.pop("megatron.core.parallel_state", None)
    if layout is None:
        return
    module: Any = types.ModuleType("megatron.core.parallel_state")

    def group(name: str) -> Any:
        assert name in names, "not initialized"
        return getattr(layout, name)

    for name, function in FUNCTIONS.items():
        setattr(module, function, lambda check_initialized=True, name=name: group(name))
    module.get_data_parallel_group = lambda with_context_parallel=False: group(
        "dp_cp" if with_context_parallel else "dp"
    )
    sys.modules["megatron.core.parallel_state"] = module


class Model(torch.nn.Module):
    """This rank's part of the layers of its stage.

    Attributes:
        metadata: what sharded_state_dict got last.
    """

    def __init__(self, layers: list[int], tp: tuple[int, int], filled: bool = True) -> None:
        super().__init__()
        self.layers = layers
        self.tp = tp
        self.metadata: Any = None
        for layer in layers:
            part = weight(layer).chunk(tp[1])[tp[0]].clone() * filled
            self.register_parameter(f"weight{layer}", torch.nn.Parameter(part))
            bias = torch.full((COLUMNS,), float(layer + 1)) * filled
            self.register_parameter(f"bias{layer}", torch.nn.Parameter(bias))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        self.metadata = metadata
        copies = get_pg_rank(metadata["dp_cp_group"])
        made: dict[str, Any] = {}
        for layer in self.layers:
            made[f"weight{layer}"] = megatron.ShardedTensor.from_rank_offsets(
                f"weight{layer}", getattr(self, f"weight{layer}"), (0, *self.tp),
                replica_id=(0, 0, copies),
            )  # fmt: skip
            made[f"bias{layer}"] = megatron.ShardedTensor.from_rank_offsets(
                f"bias{layer}", getattr(self, f"bias{layer}"), replica_id=(0, self.tp[0], copies)
            )
        return made

    def check(self) -> None:
        """Checks that the parameters are those of a filled run."""
        for layer in self.layers:
            found = getattr(self, f"weight{layer}")
            assert torch.equal(found, weight(layer).chunk(self.tp[1])[self.tp[0]])
            assert torch.equal(getattr(self, f"bias{layer}"), torch.full((COLUMNS,), layer + 1.0))


class Optimizer:
    """One state tensor for each parameter, whose value is the parameter plus 1.

    Attributes:
        metadata: what sharded_state_dict got last.
        loaded: the state that load_state_dict got.
    """

    def __init__(self, model: Any) -> None:
        self.stages = model if isinstance(model, list) else [model]
        self.metadata: Any = None
        self.loaded: Any = None
        self.reloaded: Any = None

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        self.metadata = metadata
        made: dict[str, Any] = {"param_groups": [{"lr": 0.5, "step": 7}]}
        for key, part in model_sharded_state_dict.items():
            for name, entity in part.items() if key.startswith("model") else ():
                data = torch.zeros_like(entity.data) if is_loading else entity.data.detach() + 1
                made[f"exp_avg.{name}"] = dataclasses.replace(
                    entity, key=f"optimizer.state.exp_avg.{entity.key}", data=data
                )
        return made

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state

    def reload_model_params(self, state_dict: Any = None) -> None:
        self.reloaded = True if state_dict is None else state_dict

    def check(self) -> None:
        """Checks that the state belongs to the parameters."""
        assert self.loaded["param_groups"] == [{"lr": 0.5, "step": 7}]
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                assert torch.equal(self.loaded[f"exp_avg.{name}"], parameter.detach() + 1), name


class Scheduler:
    """A learning rate scheduler."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        return {"max_lr": 0.1, "num_steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["num_steps"]


def make_model(layout: Layout | None, filled: bool = True) -> Model:
    """This rank's model."""
    tp = (0, 1) if layout is None else (get_pg_rank(layout.tp), get_pg_size(layout.tp))
    pp = (0, 1) if layout is None else (get_pg_rank(layout.pp), get_pg_size(layout.pp))
    return Model(list(range(LAYERS))[pp[0] * LAYERS // pp[1] :][: LAYERS // pp[1]], tp, filled)


class Tracker:
    """The named generators of a program."""

    def __init__(self, seed: int) -> None:
        self.states = {"model-parallel-rng": torch.tensor([seed], dtype=torch.uint8)}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple[float, float, float]:
    """The next number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def save_run(folder: Any, iteration: int = 100, model: Any = None, **more: Any) -> Model:
    """Saves a run. `more` are the run's arguments."""
    keywords = {name: more.pop(name) for name in ("non_persistent_ckpt", "release") if name in more}
    model = make_model(None) if model is None else model
    result = training.save_checkpoint(
        iteration, model, Optimizer(model), Scheduler(iteration), 7.0,
        args=arguments(folder, **more), **keywords,
    )  # fmt: skip
    assert result is not None and result.published and result.items_written > 0
    return model  # type: ignore[no-any-return]


def load_run(folder: Any, **more: Any) -> int:
    """Resumes a run. Returns the iteration."""
    model = make_model(None, filled=False)
    optimizer, scheduler = Optimizer(model), Scheduler()
    iteration, operations = training.load_checkpoint(
        model, optimizer, scheduler, args=arguments(folder, **more)
    )
    if iteration:
        model.check()
        assert scheduler.steps == iteration and operations == 7.0
    return iteration


def tracker_of(folder: pathlib.Path) -> pathlib.Path:
    """A run's tracker."""
    return folder / "latest_checkpointed_iteration.txt"


def iterations_of(folder: pathlib.Path) -> list[str]:
    """The folders in a run's directory, except the folder of locks."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name != ".tilestone")
