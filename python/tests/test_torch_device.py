"""Tensors on devices: batches, waits, pinned memory, scratch memory, all dtypes and strides."""

from __future__ import annotations

import gc
import json
import pathlib
import subprocess
import sys
from typing import Any

import forced_device
import pytest
import torch
from forced_device import put
from save_steps import begin_save, finish_in_a_thread
from test_torch_tensors import DTYPES, crc, random_tensor, same_bits

import tilestone
from tilestone._torch import devices

MIB = 1 << 20


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def views_of(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a (6, 8, 5) tensor."""
    views = {
        "plain": whole,
        "row": whole[3],
        "scalar": whole[1, 2, 3],
        "empty": whole[:0],
        "strided": whole[::2].transpose(0, 2),
        "columns": whole[:, 1:3],
        "one of a column": whole[0, 0:1, 0],  # contiguous, with a stride of 5
    }
    if whole.is_complex():
        views["conj"] = whole.conj()
        views["neg"] = whole.conj().imag if whole.dtype != torch.complex32 else whole.conj()
    return views


@pytest.mark.parametrize("name", DTYPES)
def test_views_of_every_dtype_come_back_bit_for_bit_through_every_kind_of_call(
    name: str, tmp_path: pathlib.Path
) -> None:
    lane = forced_device.lane()
    views = views_of(random_tensor(name, (6, 8, 5), seed=3))
    state = {key: put(view) for key, view in views.items()}
    tilestone.save(state, tmp_path / "a")
    with tilestone.Session() as session:
        begun = begin_save(state, tmp_path / "b", session=session)
        begun.stage()
        begun.write()
        begun.report()
        begun.publish()
    for path in (tmp_path / "a", tmp_path / "b"):
        with tilestone.open(path, framework="torch") as opened:
            for key, view in views.items():
                assert same_bits(opened.read(key), view.resolve_conj().resolve_neg()), key
        base = torch.zeros_like(random_tensor(name, (6, 8, 5)).view(torch.uint8))
        targets = views_of(base.view(getattr(torch, name)))
        for key, target in targets.items():  # one by one, because they share memory
            base.zero_()
            wanted = put(target)
            assert tilestone.load({key: wanted}, path)[key] is wanted
            assert crc(target) == crc(views[key]), key
    assert lane.counts["waits"] == lane.counts["batches"]
    assert lane.peak <= 64 * MIB


def test_any_byte_range_of_any_box_is_copied_in_both_directions() -> None:
    for name in ("uint8", "bfloat16", "complex128"):
        tensor = random_tensor(name, (3, 4, 6))[:, ::2]
        memory = devices.DeviceTensor(put(tensor))
        wanted = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        target = torch.zeros(3, 4, 6, dtype=tensor.dtype)[:, ::2]
        back = devices.DeviceTensor(put(target))
        lane = memory.lane
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            ends = torch.randint(0, len(wanted) + 1, (2,), generator=generator).tolist()
            begin, end = sorted(ends)
            out = bytearray(max(1, end - begin))
            host = memoryview(out)[: end - begin]
            if begin == end:
                continue
            lane.submit(True, [(memory, None, None, begin, host)]).wait()
            assert bytes(host) == wanted[begin:end]
            lane.submit(False, [(back, None, None, begin, host)]).wait()
        whole = memoryview(bytearray(wanted))
        lane.submit(False, [(back, None, None, 0, whole)]).wait()
        assert same_bits(target, tensor)
        part = tensor[1:, :1, 2:]
        out = bytearray(part.numel() * part.element_size())
        lane.submit(True, [(memory, (1, 0, 2), tuple(part.shape), 0, memoryview(out))]).wait()
        assert bytes(out) == bytes(part.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_what_is_read_before_the_wait_is_wrong() -> None:
    lane = forced_device.lane()
    tensor = torch.arange(100, dtype=torch.uint8)
    out = memoryview(bytearray(100))
    transfer = lane.submit(True, [(devices.DeviceTensor(put(tensor)), None, None, 0, out)])
    assert bytes(out) != bytes(tensor.numpy())
    transfer.wait()
    assert bytes(out) == bytes(tensor.numpy())


def test_a_save_copies_ahead_of_what_it_writes_and_pins_a_few_buffers(ckpt: str) -> None:
    lane = forced_device.lane()
    tensors = {f"t{i}": torch.rand(4 * MIB) for i in range(4)}  # 16 MiB each
    tilestone.save({key: put(each) for key, each in tensors.items()}, ckpt)
    loaded = tilestone.load(ckpt)
    assert all(torch.equal(loaded[key], each) for key, each in tensors.items())
    # 64 MiB in buffers of 8 MiB.
    assert lane.counts == {
        "batches": 8,
        "copies": 8,
        "moved": 64 * MIB,
        "arranged": 0,
        "waits": 8,
        "idle_waits": lane.counts["idle_waits"],
        "pins": lane.counts["pins"],
    }
    assert lane.counts["pins"] <= 8
    assert lane.unpinned == 0 and lane.peak == 0 and not lane.pinned


def test_staging_copies_into_the_pinned_memory_of_the_session(tmp_path: pathlib.Path) -> None:
    lane = forced_device.lane()
    large = {f"t{i}": torch.rand(4 * MIB) for i in range(4)}
    small = {f"s{i}": torch.rand(10) for i in range(1000)}
    tensors = {**large, **small}
    state = {key: put(each) for key, each in tensors.items()}
    with tilestone.Session() as session:
        session.prepare(state)
        assert (lane.counts["pins"], lane.counts["copies"]) == (1, 0)
        for number in range(2):
            lane.reset()
            begun = begin_save(state, tmp_path / str(number), session=session)
            begun.stage()
            assert lane.counts["copies"] == 1004
            assert lane.counts["batches"] == lane.counts["waits"] == 2
            assert lane.counts["moved"] == 64 * MIB + 40_000
            assert lane.counts["pins"] == 0 and lane.unpinned == 0
            begun.write()
            begun.report()
            begun.publish()
            assert lane.counts["batches"] == 2
        assert lane.pinned
        del begun
    gc.collect()
    assert not lane.pinned
    loaded = tilestone.load(tmp_path / "1")
    assert all(torch.equal(loaded[key], each) for key, each in tensors.items())


def test_a_load_fills_the_template_in_batches_through_pinned_memory(ckpt: str) -> None:
    tensors = {f"t{i}": torch.rand(4 * MIB) for i in range(8)}
    tensors |= {f"s{i}": torch.rand(10) for i in range(1000)}
    tilestone.save(tensors, ckpt)
    lane = forced_device.lane()
    targets = {key: torch.zeros_like(each) for key, each in tensors.items()}
    wanted = {key: put(each) for key, each in targets.items()}
    loaded = tilestone.load(wanted, ckpt)
    for key, each in tensors.items():
        assert loaded[key] is wanted[key]
        assert torch.equal(targets[key], each), key
    assert lane.counts["moved"] == 128 * MIB + 40_000
    assert lane.counts["batches"] <= 26  # of 8 MiB, and one more for each thread that reads
    assert lane.counts["waits"] == lane.counts["batches"]
    assert lane.unpinned == 0 and lane.peak == 0 and not lane.pinned


def test_a_large_transposed_tensor_takes_little_memory_on_the_device(ckpt: str) -> None:
    lane = forced_device.lane()
    base = torch.rand(4096, 8192)  # 128 MiB
    tilestone.save({"x": put(base.t())}, ckpt)
    assert 0 < lane.peak <= 16 * MIB
    lane.reset()
    target = torch.zeros(4096, 8192)
    tilestone.load({"x": put(target.t())}, ckpt)
    assert torch.equal(target, base)
    assert 0 < lane.peak <= 16 * MIB


def test_a_device_with_little_free_memory_gets_smaller_scratch_memory(
    monkeypatch: pytest.MonkeyPatch, ckpt: str
) -> None:
    lane = forced_device.lane()
    empty = forced_device.Lane._empty

    def limited(self: forced_device.Lane, nbytes: int) -> torch.Tensor:
        if nbytes > 2 * MIB:
            raise torch.cuda.OutOfMemoryError("the device is full")
        return empty(self, nbytes)

    monkeypatch.setattr(forced_device.Lane, "_empty", limited)
    base = torch.rand(1024, 4096)
    tilestone.save({"x": put(base.t())}, ckpt)
    assert lane.peak <= 2 * MIB
    assert torch.equal(tilestone.load(ckpt)["x"], base.t())


def test_tensors_are_kept_until_they_are_copied(tmp_path: pathlib.Path) -> None:
    for staged in (True, False):
        tensor = torch.rand(100)
        expected = tensor.clone()
        begun = begin_save({"x": put(tensor)}, tmp_path / str(staged))
        del tensor  # the save holds it
        gc.collect()
        if staged:
            begun.stage()
        begun.write()
        begun.report()
        begun.publish()
        assert torch.equal(tilestone.load(tmp_path / str(staged))["x"], expected)


def test_steps_of_a_save_may_be_taken_by_another_thread(ckpt: str) -> None:
    lane = forced_device.lane()
    finish_in_a_thread(begin_save({"x": put(torch.rand(3 * MIB))}, ckpt))
    assert lane.counts["waits"] == lane.counts["batches"] == 1
    assert tilestone.load(ckpt)["x"].shape == (3 * MIB,)


def test_a_copy_that_fails_is_reported_after_the_others_have_ended(
    monkeypatch: pytest.MonkeyPatch, ckpt: str
) -> None:
    lane = forced_device.lane()
    state = {"a": put(torch.rand(100)), "b": put(torch.rand(100))}

    def broken(self: forced_device.Lane, target: Any, source: Any) -> None:
        if self.counts["copies"] == 1:
            raise RuntimeError("the device is gone")
        move(self, target, source)

    move = forced_device.Lane._move
    monkeypatch.setattr(forced_device.Lane, "_move", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tilestone.save(state, ckpt)
    assert lane.counts["waits"] == lane.counts["batches"] == 1
    assert lane._batches == 0 and not lane._queue
    monkeypatch.undo()
    tilestone.save(state, ckpt)


def test_several_devices_take_part_in_one_save_and_one_load(ckpt: str) -> None:
    lanes = [forced_device.lane(index) for index in range(2)]
    a, b = torch.rand(1000), torch.rand(30, 4)
    tilestone.save({"a": put(a, 0), "b": put(b.t(), 1), "c": b}, ckpt)
    assert [lane.counts["copies"] for lane in lanes] == [1, 1]
    to_a, to_b = torch.zeros(1000), torch.zeros(4, 30)
    tilestone.load({"a": put(to_a, 1), "b": put(to_b, 0)}, ckpt)
    assert torch.equal(to_a, a) and torch.equal(to_b, b.t())
    assert [lane.counts["copies"] for lane in lanes] == [2, 2]


def test_a_device_of_a_kind_without_streams_that_are_used_copies_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ckpt: str
) -> None:
    class AtOnce(devices.Lane):
        def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
            return plain(tensor)

        def _empty(self, nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    monkeypatch.setattr(devices, "_lanes", {})
    monkeypatch.setattr(devices, "_kinds", {})
    monkeypatch.setattr(devices, "Lane", AtOnce)
    tensor = torch.rand(64, 33)
    with caplog.at_level("INFO", logger="tilestone"):
        tilestone.save({"x": put(tensor.t())}, ckpt)
    assert "copies from and to privateuseone:0 wait one by one" in caplog.text
    target = torch.zeros(64, 33)
    tilestone.load({"x": put(target.t())}, ckpt)
    assert torch.equal(target, tensor)


def test_a_default_device_does_not_change_where_copies_are_made(ckpt: str) -> None:
    tensor = torch.rand(64, 33)
    target = torch.zeros(64, 33)
    with torch.device("meta"):
        tilestone.save({"x": put(tensor.t())}, ckpt)
        tilestone.load({"x": put(target.t())}, ckpt)
    assert torch.equal(target, tensor)


def test_parameters_and_inference_tensors_are_filled_in_place(ckpt: str) -> None:
    tensor = torch.rand(4, 6)
    tilestone.save({"x": put(tensor), "y": put(tensor)}, ckpt)
    with torch.inference_mode():
        inference = put(torch.zeros(4, 6))
    parameter = torch.nn.Parameter(put(torch.zeros(4, 6)))
    loaded = tilestone.load({"x": parameter, "y": inference}, ckpt)
    assert loaded["x"] is parameter and torch.equal(plain(parameter.data), tensor)
    assert torch.equal(plain(inference), tensor)


def test_gpu_check_runs_without_a_gpu(tmp_path: pathlib.Path) -> None:
    tool = pathlib.Path(__file__).parents[2] / "tools" / "gpu_check"
    found = tmp_path / "found.json"
    small = ["--device", "forced", "--gib", "0.02", "--repeats", "1"]
    command = [sys.executable, str(tool), *small, "--folder", str(tmp_path), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(found.read_text())
    assert measured["bits"]["differing"] == [] and measured["bits"]["checked"] > 400
    assert measured["groups"]["gloo"] == "ok" and measured["groups"]["2 ranks"] == "ok"
    assert set(measured["uses"].values()) == {"ok"} and len(measured["uses"]) == 4
    assert measured["lazy"] == [] and len(measured["training"]["extra_s"]) == 6
    assert all(isinstance(each, float) for each in measured["training"]["extra_s"].values())
    rows = {row["name"]: row for row in measured["rows"]}
    for name in ("tilestone.save", "Session.async_save", "tilestone.load, cold", "dcp.save"):
        assert rows[name]["best"] > 0 and name in done.stdout, rows[name]
    for name in ("Session.async_save", "Session.async_save, lazy", "tilestone.async_save"):
        row = rows[name]
        assert 0 < row["block_best"] <= row["stage_best"] <= row["durable_best"], row
    assert rows["tilestone.save"]["counts"]["moved"] == measured["state_bytes"]
