"""Saves in the background with stage="lazy" of tensors on devices."""

from __future__ import annotations

import gc
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import forced_device
import pytest
import simulated_cuda
import torch
from simulated_cuda import Cuda, compute, operate, put, simulated
from test_lazy_save import (
    LARGE,
    apply_around_the_seal,
    changes,
    expect_changed,
    expect_no_part_of_a_forked_child,
    interrupt_at_the_end_of_the_call,
    saved,
)

import tilestone
from tilestone._torch import devices

D0 = torch.device("cuda", 0)


class WaitsAfterTheCall:
    """Lets the waits for copies begin when the call has returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.returned = threading.Event()
        wait = devices.Transfer.wait

        def late(transfer: devices.Transfer) -> None:
            assert self.returned.wait(20), "the call waits for a copy"
            wait(transfer)

        monkeypatch.setattr(devices.Transfer, "wait", late)


def optimizer_of(tensor: torch.Tensor) -> torch.optim.Optimizer:
    """Its step changes the tensor at once, as a device does that has nothing else to do."""
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = put(torch.ones(LARGE))
    return torch.optim.SGD([parameter], lr=1.0, foreach=False)


def adding(tensor: torch.Tensor) -> Callable[[], object]:
    """An operation that changes the tensor later than it is called."""
    return lambda: operate(tensor, lambda memory: memory.add_(1))


@pytest.mark.parametrize("by_files", [False, True])
def test_the_call_waits_for_no_device_and_a_step_right_after_it_leaves_the_bytes_of_the_call(
    by_files: bool, simulated: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Nor do later changes of small tensors, and of those without counters, that nobody counts."""
    waits = WaitsAfterTheCall(monkeypatch)
    with torch.inference_mode():
        inference = torch.zeros(LARGE)
    state = {
        "large": put(torch.zeros(LARGE)), "statistics": put(torch.zeros(10)),
        "inference": put(inference), "transposed": put(torch.zeros(LARGE)).t(),
        "host": torch.full(LARGE, 3.0), "on another": put(torch.zeros(LARGE), 1),
    }  # fmt: skip
    far = {key: each for key, each in state.items() if key != "host"}
    optimizer = optimizer_of(state["large"])
    files: dict[str, Any] = {}
    if by_files:
        files["by_files"] = tilestone.ByFiles(0, 1, "a run of a test", number=1)
    side = simulated.Stream(D0)
    with simulated.device(D0), simulated.stream(side):
        for each in far.values():
            compute(each, lambda memory: memory.fill_(3))
        saving = tilestone.async_save(state, tmp_path / "x", stage="lazy", **files)
        assert side.done == 0 and not saving.staged.done()
        for key in ("statistics", "inference"):
            compute(far[key], lambda memory: memory.add_(1))
        waits.returned.set()
        optimizer.step()
        assert saving.staged.done()
        for each in far.values():
            operate(each, lambda memory: memory.add_(1))
        side.synchronize()
    assert saving.result(60).published
    for key in state:
        assert (saved(tmp_path / "x", key) == 3).all(), key


@pytest.mark.parametrize("early", [False, True])
def test_a_tensor_that_is_changed_before_the_seal_is_named(
    early: bool, simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    """Whether the device makes the change at once or later than the copies."""
    weight, other = put(torch.zeros(LARGE)), put(torch.zeros(LARGE))
    views = [weight, weight.view(-1)[7:20], weight.detach()]
    for view in views:
        saving = tilestone.async_save(
            {"other": other, "weight": weight}, tmp_path / "x", stage="lazy", on_error="warn"
        )
        if early:
            view.add_(1)
        else:
            operate(view, lambda memory: memory.add_(1))
        expect_changed(saving, "weight")
    assert not (tmp_path / "x" / ".metadata").exists()
    saving = tilestone.async_save({"weight": weight}, tmp_path / "x", stage="lazy")
    moved = torch.nn.Parameter(weight)
    moved.data = put(torch.zeros(LARGE))  # other memory: the saved tensor is not changed
    assert saving.result(60).published


def test_changes_at_random_moments_are_noticed_or_leave_the_bytes_of_the_call(
    simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    choose = random.Random(1)
    state = {key: put(torch.randn(LARGE)) for key in "abcd"}
    found = {True: 0, False: 0}
    with tilestone.Session() as session, torch.no_grad():
        for number in range(60):
            simulated.current_stream(D0).synchronize()
            before = {key: simulated_cuda.plain(each).clone() for key, each in state.items()}
            keys = choose.sample("abcd", 4)
            early = keys[: choose.choice((0, 0, 1, 4))]
            operations = [
                changes(choose, state[key]) if choose.random() < 0.7 else adding(state[key])
                for key in keys
            ]
            saving = session.async_save(
                state, tmp_path / "x", stage="lazy", overwrite=True, on_error="warn"
            )
            apply_around_the_seal(saving, operations, len(early), choose)
            found[bool(early)] += 1
            error = saving.durable.exception(60)
            if early:
                assert isinstance(error, tilestone.InvalidArgumentError), error
                assert error.key in early and "was changed" in str(error)
                state = {key: put(torch.randn(LARGE)) for key in "abcd"}
                continue
            assert error is None
            for name, expected in before.items():
                assert torch.equal(saved(tmp_path / "x", name), expected), (number, name)
    assert min(found.values()) > 20


def test_the_memory_is_the_sessions_and_what_it_has_no_room_for_is_written_in_the_call(
    tmp_path: pathlib.Path,
) -> None:
    """And a tensor that the program drops is kept until it is copied."""
    lane = forced_device.lane()
    with tilestone.Session(group=tilestone.solo()) as session:
        state = {key: forced_device.put(torch.full(LARGE, 5.0)) for key in "abc"}
        nbytes = session.prepare(state)
        for number, most in enumerate((None, nbytes // 2)):
            lane.reset()
            state = {key: forced_device.put(torch.full(LARGE, 5.0)) for key in "abc"}
            saving = session.async_save(
                state, tmp_path / str(number), stage="lazy", max_staged_bytes=most
            )
            assert not saving.staged.done()
            if most is None:
                assert lane.counts["pins"] == 0 and lane.unpinned == 0
            del state
            others = [torch.zeros(LARGE) for _ in range(3)]
            assert saving.result(60).published and len(others) == 3
            assert lane.counts["waits"] == lane.counts["batches"]
            assert all((saved(tmp_path / str(number), key) == 5).all() for key in "abc")
    gc.collect()
    assert not lane.pinned


def test_memory_that_cant_be_pinned_is_filled_too(simulated: Cuda, tmp_path: pathlib.Path) -> None:
    Cuda.pin_error = 304
    weight = put(torch.zeros(LARGE))
    optimizer = optimizer_of(weight)
    saving = tilestone.async_save({"w": weight}, tmp_path / "x", stage="lazy")
    optimizer.step()
    assert saving.result(60).published and not saved(tmp_path / "x", "w").any()


@pytest.mark.parametrize("by_step", [False, True])
def test_an_error_of_a_copy_is_the_saves(
    by_step: bool, simulated: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    weight = put(torch.zeros(LARGE))
    optimizer = optimizer_of(weight)
    tilestone.save({"w": weight}, tmp_path / "x", group=tilestone.solo())
    wait = simulated_cuda.Event.synchronize

    def fails(event: Any) -> None:
        wait(event)
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(simulated_cuda.Event, "synchronize", fails)
        saving = tilestone.async_save({"w": weight}, tmp_path / "x", stage="lazy", overwrite=True)
        if by_step:
            optimizer.step()  # raises nothing
            assert saving.staged.done()
        for step in (saving.durable, saving.staged):
            error = step.exception(60)
            assert isinstance(error, RuntimeError) and "the device is gone" in str(error)
    assert not saved(tmp_path / "x", "w").any()
    assert not devices.lane_of(D0)._batches


def test_devices_without_a_stream_for_copies_are_copied_in_the_call(
    simulated: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    class AtOnce(devices.Lane):
        _empty = simulated_cuda.Lane._empty

    monkeypatch.setattr(devices, "_kinds", {"cuda": AtOnce})
    monkeypatch.setattr(torch.cuda, "current_stream", simulated.current_stream)
    weight = put(torch.zeros(LARGE))
    compute(weight, lambda memory: memory.fill_(3))
    saving = tilestone.async_save({"w": weight}, tmp_path / "x", stage="lazy")
    assert saving.staged.done()
    weight.add_(1)
    assert saving.result(60).published and (saved(tmp_path / "x", "w") == 3).all()


def test_ctrl_c_while_a_step_waits_for_the_copies_ends_the_step_and_not_the_save(
    simulated: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    waits = WaitsAfterTheCall(monkeypatch)
    weight = put(torch.zeros(LARGE))
    optimizer = optimizer_of(weight)
    saving = tilestone.async_save({"w": weight}, tmp_path / "x", stage="lazy")

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        waits.returned.set()

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        optimizer.step()
    thread.join()
    assert not simulated_cuda.plain(weight).any()
    assert saving.result(60).published and not saved(tmp_path / "x", "w").any()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_signal_while_a_step_copies_the_rest_of_many_batches_ends_the_step_and_not_the_save(
    kind: type[BaseException],
    simulated: Cuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    first, rest = threading.Event(), threading.Event()
    started: list[object] = []
    wait = devices.Transfer.wait

    def late(transfer: devices.Transfer) -> None:
        started.append(transfer)
        assert (first if len(started) == 1 else rest).wait(20)
        wait(transfer)

    def raises(*_: object) -> None:
        raise kind

    def interrupt() -> None:
        time.sleep(0.2)
        first.set()  # the save's thread leaves the other batches to the step
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        rest.set()

    monkeypatch.setattr(devices.Transfer, "wait", late)
    big, weight = put(torch.zeros(260 << 20, dtype=torch.uint8)), put(torch.zeros(LARGE))
    optimizer = optimizer_of(weight)
    before = signal.signal(signal.SIGTERM, raises)
    try:
        state = {"big": big, "w": weight}
        saving = tilestone.async_save(state, tmp_path / "x", stage="lazy")
        thread = threading.Thread(target=interrupt)
        with pytest.raises(kind):
            thread.start()
            optimizer.step()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(started) >= 5 and not simulated_cuda.plain(weight).any()
    assert saving.result(60).published and not saved(tmp_path / "x", "w").any()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_signal_in_a_wait_releases_no_memory_that_the_device_still_uses(
    kind: type[BaseException],
) -> None:
    lane = devices.Lane(torch.device("cpu"))
    waited: list[int] = []

    def wait(mark: Any) -> None:
        waited.append(len(transfer._copies))
        if len(waited) < 3:
            raise kind(len(waited))

    lane.wait = wait  # type: ignore[method-assign]
    lane._batches = 1
    copies: Any = [None]
    transfer = devices.Transfer(lane, copies, None)
    with pytest.raises(kind):
        transfer.wait()
    transfer.wait()  # as the engine does, which does not know where the exception came
    assert waited == [1, 1, 1] and lane._batches == 0


def test_a_signal_while_copies_are_submitted_waits_for_those_that_were() -> None:
    lane = devices.Lane(torch.device("cpu"))
    marks: list[int] = []
    waited: list[int] = []

    def mark() -> int:
        marks.append(len(marks))
        if len(marks) == 1:
            raise KeyboardInterrupt
        return marks[-1]

    lane._mark = mark  # type: ignore[method-assign]
    lane.wait = waited.append  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lane.submit(True, [])
    assert waited == [1] and lane._batches == 0


def test_a_state_without_watched_tensors_needs_no_seal(
    simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    state = {"small": put(torch.zeros(10)), "statistics": put(torch.ones(20))}
    saving = tilestone.async_save(state, tmp_path / "x", stage="lazy", timeout=10)
    while not saving.done():
        time.sleep(0.01)
    assert saving.durable.exception(0) is None and saved(tmp_path / "x", "statistics").all()


def test_ctrl_c_at_the_end_of_the_call(
    simulated: Cuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(put(torch.zeros(LARGE)))
    parameter.grad = put(torch.ones(LARGE))
    interrupt_at_the_end_of_the_call(parameter, tmp_path, monkeypatch)


def test_a_forked_child_has_no_part_in_a_lazy_save(simulated: Cuda, tmp_path: pathlib.Path) -> None:
    expect_no_part_of_a_forked_child(put(torch.zeros(LARGE)), tmp_path)


def test_both_counters_of_a_dtensor_count(simulated: Cuda, tmp_path: pathlib.Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = put(torch.zeros(LARGE))
        whole: Any = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        for changed in (whole._local_tensor, whole, None):
            saving = tilestone.async_save(
                {"w": whole}, tmp_path / "x", stage="lazy", on_error="warn"
            )
            assert not saving.staged.done()
            if changed is None:
                saving.staged.result()
                operate(local, lambda memory: memory.add_(1))
                assert saving.result(60).published
            else:
                torch.autograd.graph.increment_version(changed)
                expect_changed(saving, "w")
        assert not saved(tmp_path / "x", "w").any()
    finally:
        dist.destroy_process_group()
