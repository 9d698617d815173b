"""Training runs with TP 2 x PP 2 x DP 2: the groups of saves and loads, and other layouts."""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Worlds
from tilestone import (
    CheckpointError,
    InvalidArgumentError,
    MismatchError,
    UnsupportedError,
    megatron,
)
from tilestone.megatron import training
from tilestone.megatron.training._program import Groups
from training_runs import (
    NAMES,
    Layout,
    Model,
    Optimizer,
    Scheduler,
    Tracker,
    arguments,
    draw,
    install_parallel_state,
    make_model,
    seed_all,
)

SUBSETS = [s for n in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]


class _Log(logging.Handler):
    """Collects log messages while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger = logging.getLogger("tilestone.megatron")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tilestone.megatron").removeHandler(self)


def _check_lookup(layout: Layout, subset: tuple[str, ...], module: Any) -> None:
    """Checks that every group is the real one, whichever of them are given."""
    given = Groups({name: getattr(layout, name) if name in subset else None for name in NAMES})
    found = given.of_module(module)
    sizes = {name: (found.find(name).rank(), found.find(name).size()) for name in NAMES}
    assert sizes == layout.sizes(), subset
    # Only in these cases the ranks of dp communicate with one another.
    lists = len(subset) in (0, len(NAMES)) or subset == ("dp",)
    args = arguments("", data_parallel_random_init=lists)
    keywords = layout.arguments([name for name in subset if name != "expt_dp"])
    rng = training.get_rng_state("torch_dist", **keywords, args=args, module=module)
    assert (rng.global_shape, rng.global_offset) == ((2, 2), (layout.pp.rank(), layout.tp.rank()))
    assert rng.replica_id == layout.dp_cp.rank() and len(rng.data) == (2 if lists else 1)
    given_dp_cp = layout.dp_cp if "dp_cp" in subset else None
    metadata = training.build_sharded_state_dict_metadata(args, given_dp_cp, module=module)
    assert metadata["dp_cp_group"] is layout.dp_cp


def _lookups(rank: int, world: int) -> None:
    layout = Layout.make(2, 2, world)
    module = torch.nn.Module()
    for name in NAMES:
        setattr(module, f"{name}_group", getattr(layout, name))
    for subset in SUBSETS:
        _check_lookup(layout, subset, module)
    install_parallel_state(layout)
    for subset in SUBSETS:
        _check_lookup(layout, subset, None)
    install_parallel_state(None)
    for subset in SUBSETS:
        given = Groups({name: getattr(layout, name) if name in subset else None for name in NAMES})
        for name in NAMES:
            if name in subset:
                assert given.find(name).process_group is getattr(layout, name)
                continue
            with pytest.raises(InvalidArgumentError, match=rf"\b{name}_group was not given"):
                given.find(name)


def test_each_subset_of_the_groups_leaves_the_others_what_they_are(worlds: Worlds) -> None:
    worlds[8].run(_lookups, timeout=300)


def _parts(layout: Layout, filled: bool) -> tuple[Model, Optimizer, Scheduler]:
    model = make_model(layout, filled)
    return model, Optimizer(model), Scheduler(42 if filled else 0)


def _save(layout: Layout, args: Any, iteration: int = 100, **keywords: Any) -> None:
    training.save_checkpoint(
        iteration, *_parts(layout, True), 1e20, args=args, **(layout.arguments() | keywords)
    )


def _missing_groups(rank: int, world: int, folder: str) -> None:
    """An unknown group is named on every rank before anything is written."""
    layout = Layout.make(2, 2, world)
    args = arguments(
        f"{folder}/none", data_parallel_random_init=True
    )
    for name in ("tp", "pp", "dp_cp", "dp"):
        with pytest.raises(InvalidArgumentError, match=f"{name}_group was not given"):
            _save(layout, args, **{f"{name}_group": None})
        with pytest.raises(InvalidArgumentError, match=f"{name}_group was not given"):
            keywords = layout.arguments() | {f"{name}_group": None}
            training.load_checkpoint(*_parts(layout, False), args=args, **keywords)
    # If one rank does not know its group, every rank raises.
    with pytest.raises(CheckpointError, match="pp_group was not given"):
        _save(layout, args, pp_group=None if rank == 3 else layout.pp)
    # The same happens if one rank can't make its state.
    model = make_model(layout)
    if rank == 5:
        model.sharded_state_dict = None  # type: ignore[method-assign, assignment]
    keywords = layout.arguments() | {"args": arguments(f"{folder}/none")}
    with pytest.raises(CheckpointError, match="Model has no method sharded_state_dict"):
        training.save_checkpoint(1, model, None, None, 0, **keywords)
    assert not os.path.exists(f"{folder}/none")


def _round_trip(rank: int, world: int, folder: str) -> None:
    """Checks random states by (PP, TP) with lists of data-parallel ranks, metadata and the rest."""
    layout = Layout.make(2, 2, world)
    args = arguments(
        folder, data_parallel_random_init=True, use_distributed_optimizer=True, rank=rank,
        consumed_train_samples=4096, ckpt_fully_parallel_save=True,
    )  # fmt: skip
    seed_all(rank)
    with _Log() as lines:
        _save(layout, args, rng_state_key_prefix="a.", rng_tracker=Tracker(rank))
    assert not any("differ" in line for line in lines)
    drawn = draw()

    model, optimizer, scheduler = _parts(layout, False)
    tracker = Tracker(99)
    again = arguments(
        folder, data_parallel_random_init=True, use_distributed_optimizer=True,
        dist_ckpt_optim_fully_reshardable=True, ckpt_fully_parallel_load=True,
    )  # fmt: skip
    result = training.load_checkpoint(
        model, optimizer, scheduler, args=again, rng_state_key_prefix="a.", rng_tracker=tracker,
        **layout.arguments(),
    )  # fmt: skip
    assert result == (100, 1e20) and again.consumed_train_samples == 4096
    model.check()
    optimizer.check()
    assert scheduler.steps == 42
    assert draw() == drawn
    assert tracker.states["model-parallel-rng"].tolist() == [rank]
    # The metadata are the checkpoint's, with the group added again; the arguments' are not used.
    for metadata in (model.metadata, optimizer.metadata):
        assert metadata["distrib_optim_sharding_type"] == "dp_reshardable"
        assert metadata["dp_cp_group"] is layout.dp_cp
    stored = megatron.load_content_metadata(f"{folder}/iter_0000100")
    assert stored == {
        "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    keys = megatron.load_sharded_metadata(f"{folder}/iter_0000100")
    assert {key for key in keys if "rng" in key} == {
        f"a.rng_state/shard_{pp}.{tp}_2.2" for pp in range(2) for tp in range(2)
    }


def _groups_of_the_module(rank: int, world: int, folder: str) -> None:
    """Saves and loads with some groups from the arguments and the others from the model."""
    layout = Layout.make(2, 2, world)
    for number, subset in enumerate([("tp",), ("dp_cp", "dp"), ()]):
        model, optimizer, scheduler = _parts(layout, True)
        empty, again, _ = _parts(layout, False)
        for module in (model, empty):
            for name in NAMES:
                setattr(module, f"{name}_group", getattr(layout, name))
        args = arguments(f"{folder}/{number}")
        keywords = {"args": args, **layout.arguments(subset)}
        training.save_checkpoint(1, model, optimizer, scheduler, 0, **keywords)
        assert model.metadata["dp_cp_group"] is layout.dp_cp
        assert training.load_checkpoint(empty, again, None, **keywords) == (1, 0)
        assert empty.metadata["dp_cp_group"] is layout.dp_cp
        empty.check()
        again.check()
        keys = megatron.load_sharded_metadata(f"{folder}/{number}/iter_0000001")
        assert f"rng_state/shard_{layout.pp.rank()}.{layout.tp.rank()}_2.2" in keys


def _other_layouts(rank: int, world: int, folder: str) -> None:
    """Loads weights and optimizer in other layouts. Random states are refused with a message."""
    saved = Layout.make(2, 2, world)
    _save(saved, arguments(folder, data_parallel_random_init=True))
    for tp, pp in ((4, 1), (1, 4), (1, 1)):
        layout = Layout.make(tp, pp, world)
        model, optimizer, scheduler = _parts(layout, False)
        seed_all(rank)
        drawn = draw()
        seed_all(rank)
        with _Log() as lines:
            result = training.load_checkpoint(
                model, optimizer, scheduler, args=arguments(folder), **layout.arguments()
            )
        assert result[0] == 100
        model.check()
        optimizer.check()
        assert draw() == drawn
        said = f"saved with TP 2 x PP 2, but this run has TP {tp} x PP {pp}"
        assert any(said in line for line in lines) == (rank == 0)
    # dp_reshardable optimizers load at the same TP and PP only.
    distributed = arguments(f"{folder}/dp", use_distributed_optimizer=True)
    _save(saved, distributed)
    with pytest.raises(UnsupportedError, match="'dp_reshardable'.*saved with TP 2 x PP 2"):
        training.load_checkpoint(*_parts(layout, False), args=distributed, **layout.arguments())
    # Fewer data-parallel ranks: only the first four ranks, with the same TP and PP.
    half = dist.new_group(range(4))
    layout = Layout.make(2, 2, 4)
    if rank >= 4:
        return
    model, optimizer, scheduler = _parts(layout, False)
    with _Log() as lines:
        training.load_checkpoint(
            model, optimizer, scheduler, process_group=half, **layout.arguments(),
            args=arguments(folder, data_parallel_random_init=True),
        )  # fmt: skip
    model.check()
    said = "has those of 2 data parallel ranks, but this run has 1"
    assert any(said in line for line in lines)


def _different_arguments(rank: int, world: int, folder: str) -> None:
    """Arguments that would make ranks behave differently are refused on all, before any waits."""
    layout = Layout.make(2, 2, world)
    model, optimizer, scheduler = _parts(layout, True)
    keywords = layout.arguments()
    for name in ("data_parallel_random_init", "no_save_optim"):
        said = f"args.{name} is False on rank 0 but True on rank 5"
        with pytest.raises(MismatchError, match=said):
            _save(layout, arguments(folder, **{name: rank == 5}))
    for name, value in (("no_load_rng", True), ("ckpt_step", 7)):
        args = arguments(folder, **{name: value if rank == 5 else None})
        with pytest.raises(MismatchError, match=f"args.{name} is .* {value} on rank 5"):
            training.load_checkpoint(model, optimizer, scheduler, args=args, **keywords)

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    if rank == 5:
        model.sharded_state_dict = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt if rank == 5 else CheckpointError):
        training.save_checkpoint(1, model, None, None, 0, args=arguments(folder), **keywords)
    assert not os.path.exists(folder)


def _everything(rank: int, world: int, folder: str) -> None:
    _missing_groups(rank, world, folder)
    _different_arguments(rank, world, f"{folder}/different")
    _round_trip(rank, world, f"{folder}/round")
    _groups_of_the_module(rank, world, f"{folder}/module")
    _other_layouts(rank, world, f"{folder}/other")


def test_runs_resume_at_the_same_and_at_other_layouts(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[8].run(_everything, str(tmp_path), timeout=300)
