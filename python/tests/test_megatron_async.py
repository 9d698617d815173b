"""Saves of tilestone.megatron whose writing is in the background, and the queues that wait for it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import tilestone
from ranks import Worlds
from test_megatron_stock import (
    _check,
    _make_directory,
    _make_groups,
    _megatron,
    _state,
    _stock_on_cpu,
    _strategies,
)
from tilestone import megatron
from tilestone._calls import async_save
from tilestone.megatron import training
from tilestone.megatron._calls import background
from tilestone.megatron.mapping import ShardedTensor
from tilestone.megatron.strategies import base, torch as torch_strategies
from tilestone.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from training_runs import Optimizer, Scheduler, arguments, load_run, make_model, tracker_of

ELEMENTS = 1 << 16


def _halves(rank: int, value: float, elements: int = ELEMENTS) -> dict[str, Any]:
    data = torch.full((elements,), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, 2)), "step": value}


def _loaded(rank: int, ckpt: str) -> float:
    """The value that a checkpoint holds everywhere."""
    found = megatron.load(_halves(rank, 0), ckpt, verify_integrity=True)
    assert found["w"].eq(found["step"]).all()
    return found["step"]  # type: ignore[no-any-return]


def _saves(rank: int, world: int, folder: str) -> None:
    ckpt, other, queue = f"{folder}/ckpt", f"{folder}/other", AsyncCallsQueue()
    megatron.save(_halves(rank, 1), ckpt)
    for value in (2, 3):
        state = _halves(rank, value)
        request = megatron.save(state, ckpt, async_sharded_save=True, verify_integrity=True)
        assert isinstance(request, AsyncRequest)
        state["w"].data.fill_(-1)  # the training goes on
        assert queue.schedule_async_request(request) == value - 2
        megatron.save(_halves(rank, 9), other)  # on the same group
        assert _loaded(rank, other) == 9 and _loaded(rank, ckpt) == value - 1
        dist.barrier()
        assert queue.maybe_finalize_async_calls(blocking=True) == [value - 2]
        assert _loaded(rank, ckpt) == value
        hashed = json.loads(pathlib.Path(ckpt, "integrity.json").read_text())["files"]
        assert len([name for name in hashed if name.endswith(".distcp")]) == 2
    assert async_save._of_held.of_group(dist.group.WORLD).stats.plans_from_cache == 1
    # Several saves in flight are finalized in their order.
    requests = [megatron.save(_halves(rank, v), f"{folder}/{v}", async_sharded_save=True)
                for v in (4, 5)]  # fmt: skip
    for request in requests:
        queue.schedule_async_request(request)
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls()
    assert _loaded(rank, f"{folder}/4") == 4 and _loaded(rank, f"{folder}/5") == 5
    request = megatron.save(_halves(rank, 6), ckpt, async_sharded_save=True)
    request.execute_sync()
    assert _loaded(rank, ckpt) == 6


def test_a_program_that_ends_leaves_the_checkpoint_before_the_one_it_has_not_finalized(
    tmp_path: pathlib.Path,
) -> None:
    program = """
import sys, torch
from tilestone import megatron
from tilestone.megatron.mapping import ShardedTensor
for value in (1.0, 2.0):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}
    request = megatron.save(state, sys.argv[1], async_sharded_save=value == 2)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "ckpt")]
    for _ in range(2):  # what the first one has left is not in the second one's way
        subprocess.run(command, check=True, timeout=100)
        assert tilestone.load(tmp_path / "ckpt")["w"].eq(1).all()


def test_the_state_may_change_and_the_group_may_be_used_until_a_save_is_finalized(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_saves, str(tmp_path), timeout=120)


@contextlib.contextmanager
def _full_disk(only: bool) -> Iterator[None]:
    """Files of this process can't grow beyond 8 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 23 if only else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _slow_writing(only: bool) -> Iterator[threading.Event]:
    """Writing ends when the event is set."""
    go, start = threading.Event(), async_save.start

    def gated(*given: Any, **options: Any) -> Any:
        return start(*given, **options, progress=lambda _: go.wait(60) and None)

    with unittest.mock.patch.object(background, "start", gated if only else start):
        yield go


def _fails(rank: int, world: int, folder: str) -> None:
    ckpt, queue = f"{folder}/ckpt", AsyncCallsQueue()
    megatron.save(_halves(rank, 1), ckpt)
    for failing in (1, 0):  # whose disk is full
        with _full_disk(rank == failing):
            state = _halves(rank, 2, 1 << 22)
            request = megatron.save(state, ckpt, async_sharded_save=True)
            request.async_fn()
        time.sleep(1.5 * (failing == 0))  # then its messages are gone
        with pytest.raises(tilestone.StorageError) as raised:
            request.finalize_fns[0]()
        assert raised.value.rank == failing and _loaded(rank, ckpt) == 1

    two = [megatron.save(_halves(rank, v), f"{ckpt}-{v}", async_sharded_save=True) for v in (1, 2)]
    with pytest.raises(tilestone.MismatchError, match="finalize different saves"):
        two[rank].finalize_fns[0]()
    del two

    # What waits on rank 1 is killed while the thread writes.
    with _slow_writing(rank == 1) as go:
        request = megatron.save(_halves(rank, 3), ckpt, async_sharded_save=True)
        child = os.fork()
        if child == 0:
            try:  # as the worker of a queue gets it
                pickle.loads(pickle.dumps(request._replace(finalize_fns=[]))).async_fn()
            finally:
                os._exit(0)
        if rank == 1:
            time.sleep(0.2)
            os.kill(child, signal.SIGKILL)
        go.set()
        os.waitpid(child, 0)
        dist.barrier()
        request.finalize_fns[0]()
    assert _loaded(rank, ckpt) == 3

    # Requests that are dropped, or that a queue abandons, leave nothing.
    del request
    megatron.save(_halves(rank, 4), ckpt, async_sharded_save=True)
    gc.collect()
    queue.schedule_async_request(megatron.save(_halves(rank, 5), f"{ckpt}5", async_sharded_save=True))
    queue.close(abort=True)
    dist.barrier()
    for value in (6, 7):
        queue.schedule_async_request(
            megatron.save(_halves(rank, value), f"{ckpt}{value - 1}", async_sharded_save=True)
        )
        queue.close()
    assert _loaded(rank, ckpt) == 3 and _loaded(rank, f"{ckpt}5") == 6
    # A rank that can't plan fails the call on all.
    with pytest.raises(tilestone.InvalidArgumentError):
        megatron.save(None if rank else _halves(0, 8), ckpt, async_sharded_save=True)  # type: ignore[arg-type]
    megatron.save(_halves(rank, 8), ckpt)
    assert _loaded(rank, ckpt) == 8


def test_a_save_that_fails_or_is_abandoned_leaves_the_old_checkpoint(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_fails, str(tmp_path), timeout=120)
    assert not list((tmp_path / "ckpt").glob(".tilestone*/*staging*"))


class _Around(base.AsyncSaveShardedStrategy):
    """A strategy of the user around one of Tilestone."""

    can_handle_sharded_objects = True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        inner = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
        return inner.async_save(sharded_state_dict, checkpoint_dir)


def test_a_users_strategy_by_files_and_one_without_async_save(ckpt: str) -> None:
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4)), "step": 1}
    request = megatron.save(whole, ckpt, _Around("torch_dist", 1), async_sharded_save=True)
    assert not os.path.exists(f"{ckpt}/metadata.json") and os.path.exists(f"{ckpt}/common.pt")
    request.execute_sync()
    assert megatron.load(dict(whole), ckpt)["step"] == 1
    by_files = tilestone.ByFiles(0, 1, "a job of today")
    request = megatron.save(whole, f"{ckpt}2", by_files=by_files, async_sharded_save=True)
    request.execute_sync()
    with pytest.raises(tilestone.InvalidArgumentError, match="the save is over"):
        request.execute_sync()
    assert megatron.load(dict(whole), f"{ckpt}2")["step"] == 1

    class Blocking(base.SaveShardedStrategy):
        can_handle_sharded_objects = True

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None: ...

    with pytest.raises(tilestone.UnsupportedError, match="Blocking has no async_save"):
        megatron.save(whole, ckpt, Blocking("own", 1), async_sharded_save=True)
    assert megatron.load(dict(whole), ckpt)["step"] == 1  # refused before anything was written
    queue = AsyncCallsQueue()
    request = megatron.save(whole, ckpt, async_sharded_save=True)
    request.finalize_fns[0]()  # waits for the thread itself

    def fail() -> None:
        raise OSError("no space")

    queue.schedule_async_request(AsyncRequest(fail, (), []))
    with pytest.raises(OSError, match="no space"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0


class _OtherQueues(NamedTuple):
    """The request of nvidia-resiliency-ext, whose queue calls what the class calls more."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None
    is_frozen: bool = False
    call_idx: int = 0


def test_a_request_is_of_the_class_of_every_queue_that_its_process_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _megatron()
    from megatron.core.dist_checkpointing.strategies import async_utils

    other = types.ModuleType("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    other.AsyncRequest = _OtherQueues  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, other.__name__, other)
    request = AsyncRequest(len, ((),), [], {}, call_idx=3)
    received = pickle.loads(pickle.dumps(request))
    assert isinstance(received, async_utils.AsyncRequest) and isinstance(received, _OtherQueues)
    assert received == request and received.freeze().is_frozen
    done: list[int] = []
    request.add_finalize_fn(lambda: done.append(1))
    assert request.execute_finalize_fns(validate_matching_call_idx=True) == 3 and done == [1]


@contextlib.contextmanager
def _worker_on_cpu() -> Iterator[None]:
    """The persistent worker is a fork here, so that it has the stand-in for CUDA too."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    fork = async_utils.mp.get_context("fork")
    patch = unittest.mock.patch.object
    with (
        patch(async_utils.mp, "get_context", lambda _: fork),
        patch(torch.cuda, "device_count", lambda: 1),
        patch(torch.cuda, "set_device", lambda _: None),
    ):
        yield


def _in_stock(rank: int, world: int, folder: str) -> None:
    _make_groups(rank)
    stocks = _megatron()
    from megatron.core.dist_checkpointing.strategies import async_utils

    with _stock_on_cpu(), _worker_on_cpu():
        for persistent in (False, True):
            queue = async_utils.AsyncCallsQueue(persistent)
            for names in ("ours ours", "main+ stock", "ours+ ours+"):
                path = pathlib.Path(folder, f"{persistent}-{names}")
                _make_directory(rank, path)
                save, load = _strategies(names)
                state = _state(rank, True)
                queue.schedule_async_request(
                    stocks.save(state, str(path), save, async_sharded_save=True)
                )
                state["big"]["big0"].data.fill_(-1)
                _make_directory(rank, path / "sync")
                stocks.save(_state(rank, True), str(path / "sync"), save)  # on the same group
                assert not (path / "metadata.json").exists()
                dist.barrier()
                queue.maybe_finalize_async_calls(blocking=True)
                _check(stocks.load(_state(rank, False), str(path), load), rank)
            # Tilestone's own save in stock's queue.
            path = pathlib.Path(folder, f"{persistent}-own")
            request = megatron.save(_state(rank, True), str(path), async_sharded_save=True)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            _check(megatron.load(_state(rank, False), str(path)), rank)
            _aborts(rank, queue, pathlib.Path(folder, f"{persistent}-aborted"))


def _aborts(rank: int, queue: Any, path: pathlib.Path) -> None:
    """Stock kills what waits; the save can be finalized all the same."""
    stocks = _megatron()
    _make_directory(rank, path)
    save, load = _strategies("ours ours")
    with _slow_writing(True) as go:
        request = stocks.save(_state(rank, True), str(path), save, async_sharded_save=True)
        queue.schedule_async_request(request)
        time.sleep(0.2)
        for call in queue.async_calls:
            call.async_caller.close(abort=True)
        go.set()
    dist.barrier()
    for finalize in request.finalize_fns:
        finalize()
    dist.barrier()
    _check(stocks.load(_state(rank, False), str(path), load), rank)


def test_stocks_queues_wait_for_our_threads_and_their_death_changes_nothing(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[4].run(_in_stock, str(tmp_path), timeout=120)
    for path in tmp_path.iterdir():
        with tilestone.open(path) as checkpoint:
            assert checkpoint.verify().ok, path


def _save_run(folder: pathlib.Path, iteration: int, context: Any, **more: Any) -> Any:
    model = make_model(None)
    args = arguments(folder, **({"async_save": True} | more))
    return training.save_checkpoint(
        iteration, model, Optimizer(model), Scheduler(iteration), 7.0, context, args=args
    )


def test_saves_in_the_queue_of_megatrons_training_are_finalized_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that passes no `args=` has them there, also with a checkpointing_context."""
    queue = AsyncCallsQueue()
    programs: Any = types.ModuleType("megatron.training.async_utils")
    programs.schedule_async_save = queue.schedule_async_request
    programs.is_empty_async_queue = lambda: queue.get_num_unfinalized_calls() == 0
    programs.maybe_finalize_async_save = lambda blocking=False, terminate=False: (
        queue.maybe_finalize_async_calls(blocking),
        queue.close() if terminate else None,
    )
    held: Any = types.ModuleType("megatron.training.global_vars")
    args = arguments(tmp_path, async_save=True)
    held.get_args = lambda: args
    for module in (programs, held):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    context: dict[str, Any] = {}
    model = make_model(None)
    for iteration, finalizing in ((100, (context, True)), (200, (True,)), (300, (None, True, True))):
        training.save_checkpoint(iteration, model, None, None, 0, context)
        assert not training.is_empty_async_queue(context)
        assert training.maybe_finalize_async_save(*finalizing) == []
        assert training.is_empty_async_queue() and "async_calls" not in context
        assert tracker_of(tmp_path).read_text() == str(iteration)


def test_a_save_in_the_call_finalizes_those_in_flight_first(tmp_path: pathlib.Path) -> None:
    """They would move the tracker back later."""
    context: dict[str, Any] = {}
    _save_run(tmp_path, 100, context)
    _save_run(tmp_path, 200, context, async_save=False)
    assert training.is_empty_async_queue(context)
    assert tracker_of(tmp_path).read_text() == "200" and load_run(tmp_path) == 200


def test_the_tracker_of_a_run_moves_when_a_save_is_finalized(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(tilestone.InvalidArgumentError, match="checkpointing_context"):
        _save_run(run, 100, None)
    context: dict[str, Any] = {}
    assert training.maybe_finalize_async_save(context) == []
    assert training.is_empty_async_queue(context)
    for iteration in (100, 200):
        assert _save_run(run, iteration, context, save_retain_interval=1000) is None
        assert not training.is_empty_async_queue(context)
        assert tracker_of(run).exists() == (iteration == 200)
        assert training.maybe_finalize_async_save(context, blocking=True) == [iteration // 100 - 1]
        assert tracker_of(run).read_text() == str(iteration) and load_run(run) == iteration
    assert not (run / "iter_0000100").exists()  # superseded
    # Two in flight, to the same folder and to another one; then they are abandoned.
    _save_run(run, 300, context)
    with pytest.raises(tilestone.AlreadyExistsError):
        _save_run(run, 300, context)
    training.maybe_finalize_async_save(context, blocking=True, terminate=True)
    with _slow_writing(True) as go:
        _save_run(run, 400, context)
        threading.Timer(0.2, go.set).start()
        training.maybe_finalize_async_save(context, terminate=True)
    assert tracker_of(run).read_text() == "300" and load_run(run) == 300
    scheduled: list[Any] = []
    with unittest.mock.patch.dict(context, async_calls=unittest.mock.Mock(
        schedule_async_request=scheduled.append
    )):  # fmt: skip
        _save_run(run, 500, context)
    scheduled[0].execute_sync()
    assert load_run(run) == 500
