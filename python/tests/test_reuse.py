"""reuse: what an earlier checkpoint has is not written again."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tilestone

FROZEN = 4_000_000  # bytes


def state_of(step: int, touched: int = 0) -> dict[str, Any]:
    frozen = torch.arange(FROZEN // 4, dtype=torch.float32)
    frozen[0] += touched
    return {
        "base": {"w": frozen, "turned": frozen.view(1000, -1).T},
        "adapter": torch.full((1000,), float(step)),
        "step": step,
    }


def expect(path: pathlib.Path, step: int, touched: int = 0) -> None:
    wanted = state_of(step, touched)
    found = tilestone.load(path)
    assert found["step"] == step
    assert torch.equal(torch.as_tensor(found["adapter"]), wanted["adapter"])
    for name, tensor in wanted["base"].items():
        assert torch.equal(torch.as_tensor(found["base"][name]), tensor)
    with tilestone.open(path) as checkpoint:
        assert checkpoint.verify().ok


def save_steps(run: pathlib.Path, steps: range) -> list[tilestone.SaveResult]:
    results = []
    for step in steps:
        earlier = run / str(step - 1) if step > steps.start else None
        results.append(tilestone.save(state_of(step), run / str(step), reuse=earlier))
    return results


def most_links(path: pathlib.Path) -> int:
    return max(file.stat().st_nlink for file in path.glob("*.distcp"))


def test_an_unchanged_array_is_written_twice_and_then_linked(tmp_path: pathlib.Path) -> None:
    results = save_steps(tmp_path, range(5))
    assert all(result.bytes_written > 2 * FROZEN for result in results[:2])
    assert all(result.bytes_written < 40_000 for result in results[2:])
    assert all(result.bytes_shared > 2 * FROZEN for result in results[2:])
    assert most_links(tmp_path / "4") == 4
    for step in range(5):
        expect(tmp_path / str(step), step)


def test_a_step_is_whole_alone_for_stock_torch_and_after_a_copy(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, range(4))
    subprocess.run(["cp", "-r", tmp_path / "2", tmp_path / "copied"], check=True)
    for gone in (0, 1, 2):
        shutil.rmtree(tmp_path / str(gone))
    expect(tmp_path / "copied", 2)
    expect(tmp_path / "3", 3)
    template = state_of(0)
    dcp.load(template, checkpoint_id=tmp_path / "3", no_dist=True)
    assert template["step"] == 3
    assert torch.equal(template["base"]["turned"], state_of(3)["base"]["turned"])


def test_repair_leaves_the_file_of_the_other_steps_alone(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, range(4))
    shared = next(file for file in (tmp_path / "3").glob("*.distcp") if file.stat().st_nlink > 1)
    before = (shared.stat().st_ino, shared.read_bytes())
    with open(shared, "r+b") as file:
        file.seek(shared.stat().st_size)
        file.write(b"more than it had")
    report = tilestone.repair(tmp_path / "3")
    assert report.now.ok and report.mended
    assert shared.stat().st_ino != before[0] and shared.read_bytes() == before[1]
    with tilestone.open(tmp_path / "2") as other:
        assert not other.verify().ok  # it still has the file with what was written into it
    assert tilestone.repair(tmp_path / "2").now.ok


def test_a_managers_steps_share_files_with_the_step_before(tmp_path: pathlib.Path) -> None:
    keep = tilestone.Keep(last=2)
    with tilestone.CheckpointManager(tmp_path, keep=keep, reuse=True) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
    assert most_links(tmp_path / "step-00000005") == 2  # the earlier ones are removed
    with tilestone.CheckpointManager(tmp_path, keep=keep, reuse=True) as manager:
        state, newest = manager.restore(state_of(0))
        assert newest == 5 and torch.equal(state["adapter"], state_of(5)["adapter"])
        manager.save(6, state_of(6))
        manager.save(7, state_of(7, touched=1))
    assert most_links(tmp_path / "step-00000006") == 1
    expect(tmp_path / "step-00000006", 6)
    expect(tmp_path / "step-00000007", 7, touched=1)


@pytest.mark.parametrize("on_error", ["raise", "warn", "not in the background"])
def test_a_failed_step_is_not_reused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    options: dict[str, Any] = {"async_save": False}
    if on_error in ("raise", "warn"):
        options = {"on_error": on_error}
    with tilestone.CheckpointManager(tmp_path, reuse=True, **options) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        # Its folder can't be made.
        (tmp_path / "step-00000003").write_text("a file")
        with contextlib.suppress(tilestone.CheckpointError):
            manager.save(3, state_of(3))
        with contextlib.suppress(tilestone.CheckpointError):
            manager.wait()
        os.remove(tmp_path / "step-00000003")
        manager.save(4, state_of(4))
        manager.wait()
    assert most_links(tmp_path / "step-00000004") == 2
    assert "nothing is reused" not in caplog.text


def test_steps_that_fail_in_the_background_are_not_reused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tilestone.CheckpointManager(tmp_path, reuse=True, on_error="warn") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        for step in (3, 4):
            manager.save(step, state_of(step))
            assert manager._in_flight is not None
            manager._in_flight.saving.abandon()
        manager.save(5, state_of(5))
        manager.wait()
    folders = [tmp_path / f"step-{step:08}" for step in (3, 4)]
    saved = sum((folder / ".metadata").exists() for folder in folders)  # before they were abandoned
    assert most_links(tmp_path / "step-00000005") == 2 + saved
    assert "nothing is reused" not in caplog.text


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_a_save_in_the_background_shares_files(tmp_path: pathlib.Path, stage: str) -> None:
    with tilestone.Session() as session:
        for step in range(3):
            earlier = tmp_path / str(step - 1) if step else None
            saving = session.async_save(
                state_of(step), tmp_path / str(step), reuse=earlier, stage=stage,
                max_staged_bytes=FROZEN if stage == "copy" else None,
            )  # fmt: skip
            saving.staged.result()
            result = saving.result()
    assert result.bytes_shared > 2 * FROZEN
    expect(tmp_path / "2", 2)


def test_what_is_no_path_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="reuse must be a string"):
        tilestone.save(state_of(0), tmp_path, reuse=3)  # type: ignore[arg-type]
    with pytest.raises(tilestone.InvalidArgumentError, match="reuse must be True or False"):
        tilestone.CheckpointManager(tmp_path, reuse="yes")  # type: ignore[arg-type]
    with pytest.raises(tilestone.UnsupportedError, match="rank-local"):
        tilestone.save(
            state_of(0), tmp_path / "0", reuse=tmp_path,
            by_files=tilestone.ByFiles(0, 1, "a token of a test", torch_rank_local=True),
        )  # fmt: skip
    assert os.listdir(tmp_path) == []


def test_zarr_writes_everything(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": numpy.ones((1000, 1000), numpy.float32)}
    for step in range(3):
        earlier = tmp_path / str(step - 1) if step else None
        result = tilestone.save(state, tmp_path / str(step), reuse=earlier, format="zarr")
    assert result.bytes_shared == 0 and "reuse is ignored" in caplog.text


def damage_shared(folder: pathlib.Path) -> pathlib.Path:
    """Changes a byte of the file that the step shares."""
    shared = next(file for file in folder.glob("*.distcp") if file.stat().st_nlink > 1)
    with open(shared, "r+b") as file:
        file.seek(shared.stat().st_size // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return shared


def saved_run(run: pathlib.Path) -> list[pathlib.Path]:
    with tilestone.CheckpointManager(run, reuse=True) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
    return [run / f"step-0000000{step}" for step in range(1, 6)]


def test_verify_of_a_run_reads_a_shared_file_once_and_names_its_steps(
    tmp_path: pathlib.Path,
) -> None:
    folders = saved_run(tmp_path)
    command = [sys.executable, "-m", "tilestone", "verify", str(tmp_path)]
    report = json.loads(subprocess.run([*command, "--json"], capture_output=True).stdout)
    assert [step["ok"] for step in report] == [True] * 5
    assert [step["bytes"] > 2 * FROZEN for step in report] == [True, True, False, False, False]
    damage_shared(folders[4])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.count("DAMAGED") == 4
    assert "4 checkpoints share a damaged file" in done.stdout
    for folder in folders[1:]:
        assert f"  {folder}/" in done.stdout


def test_fallback_passes_over_the_steps_that_share_the_damaged_file(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = saved_run(tmp_path)
    damage_shared(folders[4])
    with tilestone.CheckpointManager(tmp_path) as manager:
        with pytest.raises(tilestone.CorruptError):
            manager.restore(state_of(0))
        state, step = manager.restore(state_of(0), fallback=True)
    assert step == 1 and torch.equal(state["adapter"], state_of(1)["adapter"])
    for folder in folders[1:4]:
        assert f"{folder.name} has the same damaged file as step-00000005" in caplog.text
