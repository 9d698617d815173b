"""Buckets of Megatron-Core's distributed optimizer become fully_reshardable without their job."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import megatron_models as mm
import pytest
import tilestone
import torch
from gpt import Shape, entities, load_models, make_chunks, make_optimizer, train_step, wrapped
from on_cpu import Layout, laid_over, on_cpu
from tilestone import megatron
from tilestone.megatron import distributed_optimizer as do
from tilestone.megatron import training

import ranks
from ranks import Worlds

DP_ZERO = {**mm.FULLY_RESHARDABLE, "distrib_optim_sharding_type": "dp_zero_gather_scatter"}


def _optimizer(shape: Shape, layout: Layout, bucket: int | None) -> tuple[list[Any], Any]:
    options = {"use_distributed_optimizer": True}
    models = wrapped(make_chunks(shape, layout), bucket, **options)
    return models, make_optimizer(models)


def _trains_and_saves(
    rank: int, world: int, root: str, shape: Shape, layout: Layout, bucket: int | None
) -> None:
    """Trains two steps, and saves the same state in every format."""
    folder = pathlib.Path(root)
    with mm.stock_on_cpu(), laid_over(layout):
        models, optimizer = _optimizer(shape, layout, bucket)
        for step in range(2):
            train_step(models, optimizer, shape, step)
        for name, kind in (("buckets", mm.DP_RESHARDABLE), ("object", DP_ZERO)):
            state = mm.whole_state(models, optimizer, kind)
            mm.save_by("stock", state, folder / name, content_metadata=kind)
        # Stock stores wrong values if a buffer has several buckets, but each rank's slices are known.
        ways = {"ours": mm.DP_RESHARDABLE, "whole": mm.FULLY_RESHARDABLE}
        for name, kind in ways.items():
            state = mm.whole_state(models, optimizer, kind)
            by_stock = name == "whole" and bucket is None
            if not by_stock:
                shards = do.shards_of(optimizer, state["model"])
                form = kind["distrib_optim_sharding_type"]
                state["optimizer"] = do.optimizer_state(shards, form)
            way = "stock" if by_stock else "ours"
            mm.save_by(way, state, folder / name, content_metadata=kind)
        args = argparse.Namespace(
            save=root, load=root, bf16=shape.half, use_distributed_optimizer=True,
            no_save_rng=True, no_load_rng=True, dist_ckpt_strictness="raise_all",
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        )  # fmt: skip
        training.save_checkpoint(2, models, optimizer, None, 0, args=args)
        with torch.no_grad():  # which stock forgets for parameters in float32
            training.load_checkpoint(models, optimizer, None, args=args)  # asks for no layouts


def _makes_layouts(
    path: str, shape: Shape, layout: Layout, world: int, bucket: int | None
) -> None:
    """The layouts of a job, made by one process that has only the model's definition."""
    with on_cpu():
        from megatron.core.distributed import DistributedDataParallelConfig

        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=shape.half, overlap_grad_reduce=bucket is not None,
            bucket_size=bucket, use_distributed_optimizer=True,
        )  # fmt: skip
        layouts = do.model_layouts(
            lambda: make_chunks(shape, layout), config, world,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp or layout.tp,
        )  # fmt: skip
    do.write_layouts(path, layouts)


def _write_layouts(path: pathlib.Path, *args: Any) -> pathlib.Path:
    process = ranks.context().Process(target=_makes_layouts, args=(str(path), *args))
    process.start()
    process.join(200)
    assert process.exitcode == 0
    return path


def _check_equal(path: pathlib.Path, whole: pathlib.Path) -> None:
    """Compares tensors bit for bit, and everything else."""
    found, expected = tilestone.open(path), tilestone.open(whole)
    assert found.tensor_keys() == expected.tensor_keys()
    assert found.object_keys() == expected.object_keys()
    for key in expected.tensor_keys():
        mine, theirs = found[key].torch(), expected[key].torch()
        assert mine.dtype == theirs.dtype, key
        assert torch.equal(mine, theirs), key
    common, other = megatron.load_common_state_dict(path), megatron.load_common_state_dict(whole)
    assert common["optimizer"] == other["optimizer"]
    assert common["content_metadata"] == other["content_metadata"]


def _loads(
    rank: int, world: int, root: str, names: list[str], shape: Shape, layout: Layout
) -> int:
    """Loads checkpoints into stock's optimizers. All must give the same states as the first."""
    seen: list[list[torch.Tensor]] = []
    for name in names:
        with mm.stock_on_cpu(), laid_over(layout):
            models, optimizer = _optimizer(shape, layout, None)
            wanted = mm.whole_state(models, optimizer, mm.FULLY_RESHARDABLE, loading=True)
            state = mm.load_by("stock", wanted, pathlib.Path(root, name))
            load_models(models, state)
            optimizer.load_state_dict(state["optimizer"])
            found = mm.whole_state(models, optimizer, mm.FULLY_RESHARDABLE)
            seen.append([entity.data.clone() for entity in entities(found)])
            assert {g["step"] for g in optimizer.param_groups if g["params"]} == {2}
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))
    return len(seen[0])


_GATED = Shape(layers=2, gated=True, half=True)
_TIED = Shape(layers=2, tied=True)
_EXPERTS = Shape(layers=2, experts=4, gated=True, half=True)
_GROUPED = Shape(layers=2, experts=4, gated=True, half=True, grouped=True)

# (shape, layout that saves on 4 ranks, bucket size, layout that loads on 4 ranks)
CASES: dict[str, tuple[Shape, Layout, int | None, Layout]] = {
    "gated": (_GATED, Layout(tp=2), None, Layout(pp=2)),
    "several buckets": (_GATED, Layout(tp=2), 3000, Layout(tp=4)),
    "tied, two stages": (_TIED, Layout(pp=2), 2000, Layout(tp=2)),
    "experts": (_EXPERTS, Layout(tp=2, ep=2), 3000, Layout(ep=4)),
    "grouped experts": (_GROUPED, Layout(ep=2), None, Layout(pp=2, ep=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_buckets_are_converted_on_one_process_and_load_in_stock_at_another_layout(
    worlds: Worlds, tmp_path: pathlib.Path, name: str
) -> None:
    shape, saved, bucket, loaded = CASES[name]
    worlds[4].run(_trains_and_saves, str(tmp_path), shape, saved, bucket, timeout=300)
    keys = tilestone.open(tmp_path / "buckets").tensor_keys()
    assert any("bucket_idx_1." in key for key in keys) == (bucket is not None)
    file = _write_layouts(tmp_path / "layout.json", shape, saved, 4, bucket)
    for source in ("buckets", "object"):
        tilestone.convert(
            tmp_path / source, tmp_path / f"new {source}", format="torch_dist", layout=file
        )
        _check_equal(tmp_path / f"new {source}", tmp_path / "whole")
    # New saves of ours have the layout.
    for source in ("ours", "iter_0000002"):
        tilestone.convert(
            tmp_path / source, tmp_path / f"new {source}", format="torch_dist",
            optimizer="fully_reshardable",
        )  # fmt: skip
        _check_equal(tmp_path / f"new {source}", tmp_path / "whole")
    names = ["whole", "new buckets", "new object", "new ours"]
    compared = worlds[4].run(_loads, str(tmp_path), names, shape, loaded, timeout=300)
    assert min(compared) > 10
