"""Megatron-Core's own GPT models and optimizers, saved and loaded in other layouts, also by stock.

The expected values are known without a checkpoint: a whole tensor's values depend on its key, and
Megatron-Core's own sharded state dict determines its part in a layout.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import megatron_models as mm
import pytest
import torch
from gpt import (
    Shape,
    differences,
    entities,
    fill,
    known,
    load_models,
    make_chunks,
    make_optimizer,
    model_state,
    wrapped,
)
from on_cpu import Layout, laid_over

from ranks import Worlds

# (saved by, loaded by): all ways from the first layout to the second one, two ways for later ones.
WAYS = [("ours", "stock"), ("stock", "ours"), ("plugin", "stock"), ("stock", "plugin")]
BOTH_WAYS = WAYS[:2]

Steps = list[tuple[Shape, Layout]]


def _each(shape: Shape, *layouts: Layout) -> Steps:
    return [(shape, layout) for layout in layouts]


# Two layers suffice where no case needs several layers in a pipeline stage.
_EXPERTS = Shape(layers=2, experts=4, gated=True, half=True)
_GROUPED = Shape(layers=2, experts=4, gated=True, half=True, grouped=True)
_EXPERTS_4, _GROUPED_4 = (dataclasses.replace(shape, layers=4) for shape in (_EXPERTS, _GROUPED))

# Each is loaded from the one before it.
CASES: dict[str, Steps] = {
    "dense": _each(Shape(), Layout(tp=2, pp=2), Layout(pp=4), Layout(tp=2, cp=2)),
    "tied, gated, rotary": _each(
        Shape(tied=True, gated=True, rotary=True, half=True),
        Layout(tp=2, pp=2), Layout(pp=2, vpp=2), Layout(tp=4), Layout(),
    ),
    "experts": _each(
        Shape(layers=2, experts=4, gated=True),
        Layout(pp=2, ep=2), Layout(tp=2, ep=2), Layout(ep=4), Layout(tp=2, pp=2),
    ),
    "grouped experts": [
        (_GROUPED_4, Layout(tp=2, ep=2)), (_GROUPED_4, Layout(ep=4)),
        (_EXPERTS_4, Layout(pp=2, ep=2)), (_GROUPED_4, Layout(pp=2, vpp=2)),
        (_EXPERTS_4, Layout(tp=2, ep=2, etp=1)),
    ],
}  # fmt: skip


def _zero(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape)


def _ways(all_ways: list[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    """The ways in which layout `number` loads the previous layout's checkpoints."""
    return [[], all_ways, BOTH_WAYS][min(number, 2)]


def _savers(all_ways: list[tuple[str, str]], number: int, steps: Steps) -> list[str]:
    """The ways in which layout `number` saves for the next layout."""
    ways = _ways(all_ways, number + 1) if number + 1 < len(steps) else []
    return sorted({saved for saved, _ in ways})


def _reshards(rank: int, world: int, root: str, steps: Steps, metadata: dict[str, Any]) -> int:
    """Saves in each layout and loads in the next one. Returns the number of compared parameters."""
    folder, compared = pathlib.Path(root), 0
    with mm.stock_on_cpu():
        for number, (shape, layout) in enumerate(steps):
            with laid_over(layout):
                models = make_chunks(shape, layout)
                for saved, loaded in _ways([*WAYS, ("plain", "plain")], number):
                    fill(models, _zero)
                    wanted = model_state(models, metadata)
                    state = mm.load_by(loaded, wanted, folder / f"{number - 1} {saved}")
                    load_models(models, state)
                    wrong = differences(model_state(models), known)
                    assert not wrong, (layout, saved, loaded, wrong)
                    compared += len(list(entities(model_state(models))))
                fill(models, known)
                for way in _savers([*WAYS, ("plain", "plain")], number, steps):
                    mm.save_by(way, model_state(models, metadata), folder / f"{number} {way}")
    return compared


@pytest.mark.parametrize("name", CASES)
def test_a_models_parameters_are_equal_bit_for_bit_at_every_layout_whoever_saves_and_loads(
    worlds: Worlds, tmp_path: pathlib.Path, name: str
) -> None:
    assert min(worlds[4].run(_reshards, str(tmp_path), CASES[name], {}, timeout=300)) > 100


def test_layers_and_experts_under_keys_of_their_own_reshard_too(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    in_list = (_EXPERTS_4, Layout(pp=2, ep=2))
    steps = [(_GROUPED_4, Layout(tp=2, ep=2)), in_list, (_GROUPED_4, Layout(ep=4))]
    metadata = {"singleton_local_shards": True}
    worlds[4].run(_reshards, str(tmp_path), steps, metadata, timeout=300)


def _truth(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The expected value of a key, also for optimizer states; main parameters equal parameters."""
    for name in ("param", "fp32_param"):
        key = key.removeprefix(f"optimizer.state.{name}.")
    values = known(key, shape)
    return values.square() if ".exp_avg_sq." in key else values


def _optimizer_of(shape: Shape, layout: Layout, distributed: bool) -> tuple[list[Any], Any]:
    models = wrapped(make_chunks(shape, layout), use_distributed_optimizer=distributed)
    return models, make_optimizer(models, distributed)


def _check_resumed(models: list[Any], optimizer: Any, state: Any, reads: dict[str, Any]) -> int:
    """Takes over a loaded state, and compares all of it with the expected values.

    Args:
        reads: metadata of a state dict that has whole tensors of the optimizer's states.
    """
    mm.take(models, optimizer, state)
    assert state["iteration"] == 7
    assert {group["step"] for group in optimizer.param_groups if group["params"]} == {7}
    found = mm.whole_state(models, optimizer, reads)
    assert not (wrong := differences(found, _truth)), wrong
    return len(list(entities(found["optimizer"])))


def _resumes(
    rank: int, world: int, root: str, steps: Steps, distributed: bool, metadata: dict[str, Any]
) -> int:
    """Like _reshards(), with an optimizer. Returns the number of its compared states."""
    folder, compared = pathlib.Path(root), 0
    with mm.stock_on_cpu():
        for number, (shape, layout) in enumerate(steps):
            with laid_over(layout):
                models, optimizer = _optimizer_of(shape, layout, distributed)
                for saved, loaded in _ways(WAYS[:3], number):
                    mm.fill_all(models, optimizer, _zero, mm.FULLY_RESHARDABLE)
                    wanted = mm.whole_state(models, optimizer, metadata, loading=True)
                    state = mm.load_by(loaded, wanted, folder / f"{number - 1} {saved}")
                    compared += _check_resumed(models, optimizer, state, mm.FULLY_RESHARDABLE)
                mm.fill_all(models, optimizer, _truth, mm.FULLY_RESHARDABLE)
                for group in optimizer.param_groups:
                    group["step"] = 7
                for way in _savers(WAYS[:3], number, steps):
                    state = mm.whole_state(models, optimizer, metadata)
                    mm.save_by(way, state, folder / f"{number} {way}")
    return compared


_AVOID_PREFIX = {"chained_optim_avoid_prefix": True}
_GATHERED_ON_ONE = {**mm.FULLY_RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": True}

OPTIMIZERS: dict[str, tuple[Steps, bool, dict[str, Any]]] = {
    "FP32Optimizer": (
        _each(Shape(layers=2, gated=True), Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2)),
        False, _AVOID_PREFIX,
    ),
    "Float16Optimizer": (
        _each(_EXPERTS_4, Layout(tp=2, ep=2), Layout(pp=2, ep=2)), False, _AVOID_PREFIX,
    ),
    "DistributedOptimizer": (
        _each(Shape(layers=2), Layout(tp=2, pp=2), Layout(tp=2)), True, mm.FULLY_RESHARDABLE,
    ),
    "DistributedOptimizer, experts": (
        _each(_EXPERTS, Layout(tp=2, ep=2), Layout(pp=2, ep=2), Layout(ep=4)),
        True, mm.FULLY_RESHARDABLE,
    ),
    "DistributedOptimizer, gathered on one rank": (
        _each(Shape(layers=2, gated=True, half=True), Layout(tp=2), Layout(pp=2)),
        True, _GATHERED_ON_ONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_states_are_equal_bit_for_bit_at_every_layout_whoever_saves_and_loads(
    worlds: Worlds, tmp_path: pathlib.Path, name: str
) -> None:
    assert min(worlds[4].run(_resumes, str(tmp_path), *OPTIMIZERS[name], timeout=300)) > 20


def _saves_buckets(rank: int, world: int, root: str, shape: Shape, layout: Layout) -> None:
    with mm.stock_on_cpu(), laid_over(layout):
        models, optimizer = _optimizer_of(shape, layout, True)
        mm.fill_all(models, optimizer, _truth, mm.FULLY_RESHARDABLE)
        for group in optimizer.param_groups:
            group["step"] = 7
        for way in ("ours", "stock", "plugin"):
            state = mm.whole_state(models, optimizer, mm.DP_RESHARDABLE)
            mm.save_by(way, state, pathlib.Path(root, way))


def _loads_buckets(rank: int, world: int, root: str, shape: Shape, layout: Layout) -> int:
    with mm.stock_on_cpu(), laid_over(layout):
        models, optimizer = _optimizer_of(shape, layout, True)
        for saved, loaded in WAYS:
            mm.fill_all(models, optimizer, _zero, mm.FULLY_RESHARDABLE)
            wanted = mm.whole_state(models, optimizer, mm.DP_RESHARDABLE, loading=True)
            state = mm.load_by(loaded, wanted, pathlib.Path(root, saved))
            compared = _check_resumed(models, optimizer, state, mm.FULLY_RESHARDABLE)
    return compared


def test_buckets_of_the_distributed_optimizer_are_equal_on_another_number_of_ranks(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    shape = _EXPERTS  # buckets of dense parameters and of experts
    worlds[4].run(_saves_buckets, str(tmp_path), shape, Layout(tp=2))
    assert worlds[4].run(_loads_buckets, str(tmp_path), shape, Layout(tp=2))[0] > 20
    assert worlds[2].run(_loads_buckets, str(tmp_path), shape, Layout(tp=2))[0] > 20
