"""A rank is missing in saves and loads of a training run: each step ends at the deadline."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import Worlds
from tilestone import CheckpointError, InvalidArgumentError
from tilestone.megatron import training
from tilestone.megatron.training import _saving, checkpointing
from tilestone.megatron.training._resume import Resume
from training_runs import Layout, Optimizer, Scheduler, arguments, make_model

AWAY = 2  # the missing rank


class _LeftError(Exception):
    """Makes a rank leave a call without telling the others."""


class _Run:
    """The program of one rank."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.layout = Layout.make(1, 1, world)
        self.first_two = dist.new_group([0, 1])
        self.short = 0.0

    def measure(self) -> None:
        """Measures a timeout (seconds) that is enough for the steps before the one that times out.
        """
        began = time.monotonic()
        self.save(100)
        took = torch.tensor(time.monotonic() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.short = max(6.0, 10 * float(took))  # a busy disk may take seconds for one sync

    def save(self, iteration: int, timeout: Any = 300.0, group: Any = None, **more: Any) -> None:
        model = make_model(self.layout)
        training.save_checkpoint(
            iteration, model, Optimizer(model), Scheduler(), 0, process_group=group,
            timeout=timeout, args=arguments(self.folder, **more), **self.layout.arguments(),
        )  # fmt: skip

    def load(self, timeout: Any = 300.0, group: Any = None) -> int:
        model = make_model(self.layout, filled=False)
        iteration, _ = training.load_checkpoint(
            model, Optimizer(model), Scheduler(), process_group=group, timeout=timeout,
            args=arguments(self.folder), **self.layout.arguments(),
        )  # fmt: skip
        model.check()
        return iteration

    def expect(self, step: str, call: Callable[[], Any], leave: tuple[Any, str, bool]) -> None:
        """One rank leaves at `leave`; the others get an error that names the step and this rank.

        `leave` is (object, name of its function, whether the function does its work first).
        """
        *place, works = leave
        real = getattr(*place)

        def left(*given: Any, **more: Any) -> None:
            if works:
                real(*given, **more)
            raise _LeftError

        try:
            if self.rank != AWAY:
                self.ends(step, call, AWAY)
                return
            with mock.patch.object(*place, left), pytest.raises(_LeftError):
                call()
        finally:
            dist.barrier()

    def ends(self, step: str, call: Callable[[], Any], missing: int) -> None:
        """Checks that a call ends at its deadline."""
        began = time.monotonic()
        with pytest.raises(CheckpointError) as raised:
            call()
        assert time.monotonic() - began < 20 * self.short  # by default it would be half an hour
        text = str(raised.value)
        assert raised.value.code in ("timeout", "rank_failed"), text
        assert text.startswith(step), text
        # If rank 0 leaves at the same moment, a rank gets no message and can only name rank 0.
        assert f"rank {missing}" in text or (self.rank > 0 and "rank 0" in text), text


def _a_rank_stays_away(rank: int, world: int, folder: str) -> None:
    run = _Run(rank, world, folder)
    run.save(50)
    run.measure()
    tracker = pathlib.Path(folder, "latest_checkpointed_iteration.txt")
    full = {"ckpt_fully_parallel_save": True, "save_retain_interval": 1000}
    random = {"data_parallel_random_init": True}
    saving = _saving.Saving
    for step, leave, more in (
        ("preparation of a save", (checkpointing, "prepared", False), {}),
        ("random states of data parallel ranks", (checkpointing, "together", False), random),
        ("tracker of a training run", (saving, "write", True), full),
    ):
        run.expect(step, lambda more=more: run.save(200, run.short, **more), leave)
        assert tracker.read_text() == "100"
    for step, leave in (
        ("comparison of a run's directory", (checkpointing, "find", False)),
        ("resumption of a training run", (Resume, "load", True)),
    ):
        run.expect(step, lambda: run.load(run.short), leave)
    # Ranks pass different groups. One rank passes a group to which it does not belong.
    group = run.first_two if rank == 0 else None
    run.ends("preparation of a save", lambda: run.save(300, run.short, group), 0 if rank else 1)
    dist.barrier()
    if rank == AWAY:
        with pytest.raises(InvalidArgumentError, match="not in the process_group"):
            run.load(group=run.first_two)
    for timeout in (0, -1.0, "1", float("nan")):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            run.save(300, timeout)
        with pytest.raises(InvalidArgumentError, match="timeout"):
            run.load(timeout)
    # The next calls work after all these errors.
    run.save(300, None, **full, **random)
    assert tracker.read_text() == "300" and run.load(None) == 300


def test_every_step_ends_at_the_calls_deadline_and_names_the_rank_that_is_missing(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[3].run(_a_rank_stays_away, str(tmp_path / "away"))
