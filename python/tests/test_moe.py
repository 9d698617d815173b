"""A mixture-of-experts model with expert parallelism inside FSDP2.

After a load it continues exactly as without interruption, and it can be loaded in other layouts.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import moe
import pytest
import torch
from conftest import TABLES
from ranks import Worlds
from torch.distributed.tensor import DTensor

import tilestone
import tilestone.megatron

EP_2 = moe.Sizes(ep=2)
LAYOUTS = [
    EP_2,
    moe.Sizes(cp=2, ep=4),
    moe.Sizes(pp=2, ep=2),
    moe.Sizes(tp=2, ep=2, etp=2),
    moe.Sizes(),
]


def _refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a checkpoint gathers nothing")


def _no_gathering() -> Any:
    names = ("full_tensor", "redistribute")
    return mock.patch.multiple(DTensor, **{name: _refused for name in names})


def _save(training: moe.Training, path: str) -> None:
    with _no_gathering():
        tilestone.save(training.state(), path, checks=tilestone.Checks(access=True))
        iteration = {"iteration": 2, **training.state()}
        tilestone.megatron.save(iteration, f"{path}-megatron")


def _load(training: moe.Training, path: str) -> tilestone.LoadReport:
    """Fills the training's own tensors from both checkpoints, one after another."""
    report = tilestone.LoadReport()
    reported = tilestone.Differences("report", "report", "report", report)
    with _no_gathering():
        tilestone.load(training.state(), path, differences=reported)
        once = training.local()
        for tensor in training.tensors().values():
            (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().zero_()
        loaded, missing, unexpected = tilestone.megatron.load(
            training.state(), f"{path}-megatron", strict="return_all"
        )
    assert loaded["iteration"] == 2 and not missing and not unexpected
    assert _delta(once, training.local()) == 0.0
    return report


def _delta(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    deltas = [(one[path] - other[path]).abs().max() for path in one if one[path].numel()]
    return float(torch.stack(deltas).max())


def continuation(rank: int, world: int, sizes: moe.Sizes, path: str, other: str) -> Any:
    """A step, a save, another step. Then a loaded model repeats the second step.

    At the end it loads the checkpoint `other`. Returns also the whole tensors after that,
    and in layout EP_2 those of the save.
    """
    meshes = moe.Meshes(sizes)
    whole = moe.Training(meshes, seed=1)
    whole.step(0)
    _save(whole, path)
    saved, empty = whole.local(), sum(not each.numel() for each in whole.local().values())
    reference = whole.gathered() if sizes == EP_2 else {}
    whole.step(1)
    resumed = moe.Training(meshes, seed=2)
    resumed.step(9)  # creates the optimizer's state
    assert _delta(resumed.local(), saved) > 0.01
    report = _load(resumed, path)
    assert _delta(resumed.local(), saved) == 0.0
    resumed.step(1)
    missing = len(report.not_in_checkpoint) + len(report.not_requested)
    delta = _delta(resumed.local(), whole.local())
    after = resumed.local()
    moved = _load(resumed, other)
    assert _delta(resumed.local(), after) > 0.01
    tensors = resumed.gathered()
    return (delta, missing, len(report.other_shape), empty), moved, tensors, reference


def test_a_loaded_model_continues_as_the_uninterrupted_one_and_moves_from_ep_2_to_other_layouts(
    worlds: Worlds, ckpt: str, request: pytest.FixtureRequest
) -> None:
    lines = [f"{'layout (4 ranks)':20} {'max_delta':>9} {'missing':>7} {'mismatched':>10}"]
    source = f"{ckpt}-{EP_2}"
    saved: dict[str, torch.Tensor] = {}
    for sizes in LAYOUTS:
        results = worlds[4].run(continuation, sizes, f"{ckpt}-{sizes}", source)
        found = [result[0] for result in results]
        delta = max(each[0] for each in found)
        missing, mismatched = found[0][1:3]
        lines.append(f"{sizes!s:20} {delta:9} {missing:7} {mismatched:10}")
        assert (delta, missing, mismatched) == (0.0, 0, 0), sizes
        if sizes in (EP_2, moe.Sizes()):
            assert any(each[3] for each in found)  # ranks with empty shards of hc_head.scale
        saved = saved or results[0][3]
        for _, report, tensors, _ in results:
            assert report == tilestone.LoadReport()
            assert _delta(tensors, saved) == 0.0, sizes
    assert saved["model.layers.0.experts.w1"].shape == (moe.EXPERTS, moe.WIDTH, moe.HIDDEN)
    request.node.user_properties += [(TABLES, line) for line in lines]


def naive(rank: int, world: int, path: str) -> Any:
    """Saves the wrapped parameters once as they are, which is refused, and once with placements."""
    training = moe.Training(moe.Meshes(EP_2), seed=1)
    found = {}
    for kind in ("naive", "placed"):
        weights = {
            name: parameter if kind == "naive" else training.placed(name, parameter)
            for name, parameter in training.model.named_parameters()
            if name == "layers.0.experts.w1"
        }
        before = training.local()["model.layers.0.experts.w1"]
        if kind == "naive":
            try:
                tilestone.save(weights, f"{path}-{kind}")
            except tilestone.MismatchError as error:
                found[kind] = str(error)
            continue
        tilestone.save(weights, f"{path}-{kind}")
        tilestone.load(weights, f"{path}-{kind}")
        after = training.local()["model.layers.0.experts.w1"]
        found[kind] = "" if torch.equal(before, after) else "other elements"
    return found


def test_the_wrapped_parameters_own_placements_would_give_a_rank_anothers_experts(
    worlds: Worlds, ckpt: str
) -> None:
    found = worlds[4].run(naive, ckpt)
    assert all(kinds["placed"] == "" for kinds in found)
    for kinds in found:
        assert "layers.0.experts.w1" in kinds["naive"] and "from_param" in kinds["naive"], kinds
