"""Streams, events, pinned memory and current devices of CUDA, and those of other kinds of devices.

On a simulated CUDA, so that `_CudaLane` itself is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import simulated_cuda
import torch
from save_steps import begin_save, finish_in_a_thread
from simulated_cuda import Cuda, Lane, compute, put, simulated
from children import in_child

import tilestone
from tilestone._torch import devices, transfer

MIB = 1 << 20
D0, D1, D2 = (torch.device("cuda", index) for index in range(3))

How = Callable[[dict[str, Any], pathlib.Path], None]


def by_save(state: dict[str, Any], path: pathlib.Path) -> None:
    tilestone.save(state, path)


def by_steps_of_a_thread(state: dict[str, Any], path: pathlib.Path) -> None:
    finish_in_a_thread(begin_save(state, path))


def by_unstaged_steps(state: dict[str, Any], path: pathlib.Path) -> None:
    with begin_save(state, path) as begun:
        begun.write()
        begun.report()
        begun.publish()


def in_the_background(state: dict[str, Any], path: pathlib.Path) -> None:
    with tilestone.Session() as session:
        session.async_save(state, path).durable.result()


WAYS = [by_save, by_steps_of_a_thread, by_unstaged_steps, in_the_background]


@pytest.mark.parametrize("save", WAYS)
def test_copies_come_after_what_the_callers_stream_was_given(
    save: How, simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    large, small, transposed = torch.zeros(3 * MIB), torch.zeros(100), torch.zeros(1000, 2100)
    state = {"large": put(large), "small": put(small), "transposed": put(transposed).t()}
    side = simulated.Stream(D0)
    with simulated.device(D0), simulated.stream(side):
        for each in state.values():
            compute(each, lambda tensor: tensor.add_(3))
        save(state, tmp_path / "c")
    with tilestone.open(tmp_path / "c", framework="torch") as opened:
        assert all((opened.read(key) == 3).all() for key in state)
    gc.collect()
    assert not simulated.pinned
    assert not simulated.pinned


def test_a_load_comes_after_what_the_callers_stream_was_given(
    simulated: Cuda, ckpt: str
) -> None:
    tensors = {"large": torch.rand(3 * MIB), "small": torch.rand(9), "wide": torch.rand(900, 2100)}
    tilestone.save(tensors, ckpt)
    memory = {key: torch.zeros_like(each) for key, each in tensors.items()}
    memory["wide"] = torch.zeros(2100, 900)
    targets = {key: put(each) for key, each in memory.items()}
    targets["wide"] = targets["wide"].t()
    side = simulated.Stream(D0)
    with simulated.device(D0), simulated.stream(side):
        for each in targets.values():
            compute(each, lambda tensor: tensor.fill_(7))
        tilestone.load(targets, ckpt)
    side.synchronize()
    memory["wide"] = memory["wide"].t()
    assert all(torch.equal(memory[key], tensors[key]) for key in tensors)
    assert not simulated.pinned
    assert not simulated.pinned


def test_later_work_of_the_caller_does_not_delay_the_copies(
    simulated: Cuda, ckpt: str
) -> None:
    state = {"x": put(torch.ones(100))}
    begun = begin_save(state, ckpt)
    other = put(torch.zeros(1))
    compute(other, lambda tensor: tensor.fill_(1))
    begun.stage()
    assert simulated.current_stream(D0).done == 0
    begun.write()
    begun.report()
    begun.publish()


def test_threads_with_streams_of_their_own_save_what_each_has_computed(
    simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    tensors = [torch.zeros(2 * MIB) for _ in range(3)]
    state = [{"x": put(each)} for each in tensors]

    def work(number: int) -> None:
        with simulated.device(D0), simulated.stream(simulated.Stream(D0)):
            compute(state[number]["x"], lambda tensor: tensor.fill_(number + 1))
            tilestone.save(state[number], tmp_path / str(number), group=tilestone.solo())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(3):
        assert (tilestone.load(tmp_path / str(number))["x"] == number + 1).all()


def test_no_device_without_tensors_of_the_state_gets_a_context(
    simulated: Cuda, ckpt: str
) -> None:
    a, b = torch.rand(2 * MIB), torch.rand(800, 700)
    with tilestone.Session() as session:
        session.save({"a": put(a, 1), "b": put(b, 2).t()}, ckpt)
    to_a, to_b = torch.zeros(2 * MIB), torch.zeros(700, 800)
    tilestone.load({"a": put(to_a, 2), "b": put(to_b, 1)}, ckpt)
    assert torch.equal(to_a, a) and torch.equal(to_b, b.t())
    del session
    gc.collect()
    assert not simulated.pinned
    assert simulated.contexts == {1, 2}
    assert simulated.index == 0


def test_memory_that_cant_be_pinned_is_used_and_one_warning_says_so(
    simulated: Cuda, ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    Cuda.pin_error = 304
    tensor = torch.rand(4 * MIB)
    tilestone.save({"x": put(tensor)}, ckpt)
    target = torch.zeros(4 * MIB)
    tilestone.load({"x": put(target)}, ckpt)
    assert torch.equal(target, tensor)
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "could not pin 8388608 bytes of host memory (CUDA error 304)" in warning.message


def test_an_error_of_unpinning_does_not_reach_the_programs_next_kernel(
    simulated: Cuda, ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = tilestone.Session()
    session.save({"x": put(torch.rand(4 * MIB))}, ckpt)
    assert simulated.pinned
    simulated.pinned.clear()
    del session
    gc.collect()
    assert "could not unpin host memory: CUDA error 713" in caplog.text


def test_a_capture_of_a_cuda_graph_is_refused_and_nothing_is_written(
    simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    Cuda.capturing = True
    state = {"x": put(torch.ones(3))}
    for call in (tilestone.save, begin_save, tilestone.async_save):
        with pytest.raises(tilestone.InvalidArgumentError, match=r"CUDA graph .*\(key x\)"):
            call(state, tmp_path / "c")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_held", [False, True])
def test_a_forked_child_uses_no_stream_and_no_lock_of_its_parent(
    is_held: bool, simulated: Cuda, tmp_path: pathlib.Path
) -> None:
    there = put(torch.ones(3))
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.save({"a": there, "b": torch.ones(2, device="meta")}, tmp_path / "refused")
    lane = devices.lane_of(D0)
    assert lane._callers  # noted, and not followed
    child = {"x": numpy.arange(5)}
    with lane._callers_lock if is_held else contextlib.nullcontext():
        assert in_child(lambda: tilestone.save(child, tmp_path / "c", group=tilestone.solo())) == 0
    assert (tilestone.load(child, tmp_path / "c")["x"] == numpy.arange(5)).all()


class AtOnce(devices.Lane):
    """Another kind of device, with streams: xpu, for example."""

    _empty = Lane._empty


@pytest.mark.parametrize("wide", [False, True])
def test_a_thread_copies_on_a_device_of_another_kind_after_and_before_the_callers_stream(
    wide: bool, simulated: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_kinds", {"cuda": AtOnce})
    monkeypatch.setattr(torch.cuda, "current_stream", simulated.current_stream)
    memory = torch.zeros(60, 70)
    there = put(memory).t() if wide else put(memory)
    host = bytearray(memory.numel() * 4)
    side = simulated.Stream(D0)

    def copy(to_host: bool) -> None:
        with simulated.device(D0), simulated.stream(side):
            described = devices.DeviceTensor(there)
            devices.follow_callers()
        copies = [(described, None, None, 0, memoryview(host))]
        thread = threading.Thread(target=lambda: described.lane.submit(to_host, copies).wait())
        thread.start()
        thread.join()

    with simulated.device(D0), simulated.stream(side):
        compute(there, lambda tensor: tensor.fill_(3))
    copy(True)
    assert (torch.frombuffer(host, dtype=torch.float32) == 3).all()
    with simulated.device(D0), simulated.stream(side):
        compute(there, lambda tensor: tensor.fill_(7))
    copy(False)
    assert (memory == 3).all()
    side.synchronize()
    assert (memory == 3).all()


def test_who_finds_no_stream_to_follow_waits_until_another_thread_has_followed_it() -> None:
    begun, goes_on, done = threading.Event(), threading.Event(), threading.Event()

    class Stream:
        def synchronize(self) -> None:
            begun.set()
            assert goes_on.wait(20)

    lane = devices.Lane(torch.device("cpu"))
    lane._callers.append(Stream())
    first = threading.Thread(target=lane.follow_callers)
    second = threading.Thread(target=lambda: (lane.follow_callers(), done.set()))
    first.start()
    assert begun.wait(20)
    second.start()
    assert not done.wait(0.2)
    goes_on.set()
    first.join()
    second.join()
    assert done.is_set()


def test_a_group_of_nccl_moves_bytes_on_the_device_that_it_is_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Group:
        bound_device_id: torch.device | None = D2

    monkeypatch.setattr(transfer.dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    group: Any = Group()
    assert transfer.transfer_device(group) == D2
    group.bound_device_id = None
    assert transfer.transfer_device(group) == D1
