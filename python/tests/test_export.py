"""Export: a run's steps as Hugging Face folders."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilestone
from tilestone._calls.model_folder import NewFolder


def state_of(step: int) -> dict[str, Any]:
    model = {"module.w": torch.full((4, 3), step * 1.0), "module.ids": torch.arange(3)}
    return {"model": model, "optim": {"step": step}}


def config_in(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    text = {"model_type": "mine", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({"torch_dtype": None, "text_config": text} | text))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights that stay")
    return folder


def exports_in(run: pathlib.Path) -> list[str]:
    return sorted(os.listdir(run / "export" / "hf"))


def test_a_run_exports_its_steps_keeps_the_newest_and_takes_none_for_a_step(
    tmp_path: pathlib.Path,
) -> None:
    run = tmp_path / "run"
    export = tilestone.Export(
        "hf", every=2, rename=tilestone.strip_prefix("module."), dtype=torch.bfloat16,
        config_dir=config_in(tmp_path / "config"), keep=2,
    )  # fmt: skip
    keep = tilestone.Keep(last=1)
    with tilestone.CheckpointManager(run, keep=keep, export=export) as manager:
        for step in range(1, 9):
            manager.save(step, state_of(step))
            manager.wait()
        assert [each.step for each in manager.exports] == [2, 4, 6, 8]
        assert all(each.error is None for each in manager.exports)
        assert [step.step for step in manager.steps()] == [8]
    assert exports_in(run) == ["step-00000006", "step-00000008"]
    folder = run / "export" / "hf" / "step-00000008"
    assert manager.exports[-1].path == str(folder)
    text = {"model_type": "mine", "dtype": "bfloat16"}
    config = {"torch_dtype": "bfloat16", "text_config": text} | text
    assert json.loads((folder / "config.json").read_text()) == config
    assert (folder / "tokenizer.json").read_text() == "{}"
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["w"], torch.full((4, 3), 8.0, dtype=torch.bfloat16))
    assert torch.equal(found["ids"], torch.arange(3)) and len(found) == 2
    assert tilestone.open(folder).verify().items_without_checksum == 0

    command = [sys.executable, "-m", "tilestone", "ls", str(run)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "export" not in listed and "step-00000008" in listed
    assert tilestone.gc(run / "step-00000008") == [] and tilestone.gc(folder) == []
    with tilestone.CheckpointManager(run, keep=keep, export=export) as manager:
        assert manager.restore(state_of(0))[1] == 8 and manager.latest() == 8
        manager.save(9, state_of(9))
    assert manager.exports == [] and exports_in(run)[-1] == "step-00000008"


def test_an_export_that_fails_is_tried_again_logged_and_made_when_the_run_continues(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with tilestone.CheckpointManager(run, export=tilestone.Export(only="")) as manager:
        manager.save(1, state_of(1))  # with an object
        manager.wait()
        (ended,) = manager.exports
        assert isinstance(ended.error, tilestone.InvalidArgumentError)
        assert ended.error.key == "optim.step"
        text = r"(?s)export of step 1 has failed, and is tried again.*Step 1 was not exported.*optim\.step"
        assert re.search(text, caplog.text)
        assert manager.save(2, state_of(2))
    assert not (run / "export").exists()
    live = NewFolder(run / "export" / "hf" / "step-00000003")  # as of another process
    live.begin()
    pathlib.Path(live.place).with_name(f".step-00000001.tilestone-{live.attempt}").mkdir()  # a dead one's
    with tilestone.CheckpointManager(run, export=tilestone.Export()) as manager:
        assert manager.restore(state_of(0))[1] == 2
        manager.wait()
        assert [(each.step, each.error) for each in manager.exports] == [(2, None)]
    assert exports_in(run) == [os.path.basename(live.place), "step-00000002"]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_no_save_waits_for_an_export_and_no_step_that_is_read_is_removed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = {0: threading.Event(), 1: threading.Event()}

    def rename(key: str) -> str:
        assert goes_on[len(manager.exports)].wait(60)
        return key

    run, keep = tmp_path / "run", tilestone.Keep(last=1)
    export = tilestone.Export(rename=rename)
    how: Any = {"strict": True, "on_error": "warn"}
    with tilestone.CheckpointManager(run, keep=keep, export=export, **how) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step))
        wait_until(lambda: manager.latest() == 4)
        assert len(manager.steps()) == 4 and manager.exports == []
        manager.save(5, {"model": {}})  # fails, because it lacks something
        manager.save(6, state_of(6))
        wait_until(lambda: manager.latest() == 6)
        manager.save(7, {"model": {}})
        assert manager._in_flight is not None
        manager._in_flight.wait()
        goes_on[0].set()
        # While the second export is made, the steps before it go.
        wait_until(lambda: [step.step for step in manager.steps() if step.state == "durable"] == [6])
        assert [(each.step, each.error) for each in manager.exports] == [(1, None)]
        assert manager._exporter._unpruned in ([], [7])
        goes_on[1].set()
        manager._exporter.wait()
        assert [(each.step, each.error) for each in manager.exports] == [(1, None), (6, None)]
    for step in (2, 3, 4):
        assert f"Step {step} is not exported" in caplog.text


def test_exports_of_a_branch_that_was_left_are_older_and_those_of_other_saves_are_made_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_in(pathlib.Path("config"))
    (tmp_path / "elsewhere").mkdir()

    def manager(**options: Any) -> Any:
        return tilestone.CheckpointManager("run", async_save=False, **options)

    def exported(step: int) -> Any:
        return load_file(run / "export" / "hf" / f"step-{step:08}" / "model.safetensors")

    run, export = tmp_path / "run", tilestone.Export(keep=2, config_dir="config")
    with manager(export=export) as first:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for step in range(1, 5):
            first.save(step, state_of(step))
            first.wait()
        assert [each.error for each in first.exports] == [None] * 4
        assert exports_in(run) == ["step-00000003", "step-00000004"]
        mine = run / "export" / "hf" / "mine.removed"
        mine.mkdir()
        first.restore(state_of(0), step=2)
        first.wait()
        assert first.exports[-1].error is None
        assert exports_in(run) == ["mine.removed", "step-00000002", "step-00000004"]
    monkeypatch.chdir(tmp_path)
    with manager(overwrite=True) as second:
        second.restore(state_of(0), step=2)
        second.save(3, state_of(30))
        second.save(4, state_of(40))
    with manager(export=export) as third:
        assert third.restore(state_of(0))[1] == 4
        third.wait()
        assert torch.equal(exported(4)["module.w"], torch.full((4, 3), 40.0))
        third.restore(state_of(0))
        third.wait()
        assert len(third.exports) == 1


def test_steps_of_a_fast_tier_are_exported_once_the_run_has_them_also_from_another_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export, fast = tilestone.Export(), tilestone.Fast("host")
    with tilestone.CheckpointManager("run", fast=fast, drain_every=2, export=export) as manager:
        manager.save(1, state_of(1))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(2, state_of(2))
    assert [(each.step, each.error) for each in manager.exports] == [(2, None)]
    assert exports_in(tmp_path / "run") == ["step-00000002"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_step_restored_from_the_hosts_is_not_exported_of_the_runs_other_one_of_that_number(
    tmp_path: pathlib.Path,
) -> None:
    def manager(**options: Any) -> Any:
        fast = tilestone.Fast(tmp_path / "host")
        return tilestone.CheckpointManager(tmp_path / "run", fast=fast, **options)

    with manager() as first:
        first.save(1, state_of(1))
        first.save(2, state_of(2))
    with manager(overwrite=True, drain_every=10) as second:
        second.restore(state_of(0), step=1)
        second.save(2, state_of(20))  # stays on the hosts
    with manager(drain_every=10, export=tilestone.Export()) as third:
        state, step = third.restore(state_of(0))
        third.wait()
        assert step == 2 and torch.equal(state["model"]["module.w"], torch.full((4, 3), 20.0))
        assert third.exports == []
        assert third.restore(state_of(0), step=1)[1] == 1
        third.wait()
        assert [(each.step, each.error) for each in third.exports] == [(1, None)]


def test_nobody_waits_for_an_export_that_could_not_begin_or_exits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("can't start new thread")

    export = tilestone.Export(rename=lambda _: sys.exit(3))
    with tilestone.CheckpointManager(tmp_path / "run", export=export) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            manager.save(1, state_of(1))
            manager.wait()
        manager.save(2, state_of(2))
        manager.wait()
        assert [type(each.error) for each in manager.exports] == [RuntimeError, SystemExit]
    assert "Step 1 was not exported: can't start new thread" in caplog.text


def test_no_export_begins_after_the_program_has_waited_for_them(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tilestone.CheckpointManager(tmp_path / "run", export=tilestone.Export()) as manager:
        manager._exporter.finish()
        manager.save(1, state_of(1))
    assert manager.exports == [] and "not exported, because the program ends" in caplog.text


def test_a_forked_child_ends_though_a_thread_of_the_parent_held_the_exports(
    tmp_path: pathlib.Path,
) -> None:
    held, over = threading.Event(), threading.Event()
    with tilestone.CheckpointManager(tmp_path, export=tilestone.Export()) as manager:
        exporter = manager._exporter

        def hold() -> None:
            with exporter._changed:
                held.set()
                over.wait()

        holds = threading.Thread(target=hold)
        holds.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # kills it
            exporter.finish()
            os._exit(0)
        over.set()
        holds.join()
        assert os.waitpid(child, 0)[1] == 0


ENDS = """
import sys, time
import numpy, tilestone

def slow(key):
    time.sleep(0.4)
    return key

manager = tilestone.CheckpointManager(sys.argv[1], export=tilestone.Export(rename=slow))
manager.save(1, {"model": {"w": numpy.ones(3)}})
if sys.argv[2] == "durable":
    manager._in_flight.wait()
"""


@pytest.mark.parametrize("state", ["durable", "in flight"])
def test_a_program_that_ends_without_close_ends_its_exports_first(
    tmp_path: pathlib.Path, state: str
) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path), state]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert exports_in(tmp_path) == ["step-00000001"]
    assert "model.safetensors" in os.listdir(tmp_path / "export" / "hf" / "step-00000001")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "gguf"}, 'must be "hf"'),
        ({"every": 0}, "at least 1"),
        ({"keep": 0}, "at least 1"),
        ({"dtype": "float31"}, "float31"),
        ({"rename": 5}, "rename must be"),
    ],
)
def test_what_can_not_be_exported_is_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(tilestone.CheckpointError, match=text):
        tilestone.Export(**arguments)


def of_ranks(rank: int, world: int, run: str) -> int:
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(tilestone.InvalidArgumentError, match="no config.json"):
        tilestone.CheckpointManager(run, export=tilestone.Export(config_dir="/nowhere"))
    config = f"{os.path.dirname(run)}/config" if rank == 0 else "/nowhere"  # rank 0's counts
    export = tilestone.Export(every=2, config_dir=config)
    with tilestone.CheckpointManager(run, export=export) as manager:
        for step in (1, 2):
            w = distribute_tensor(torch.full((5, 3), step * 1.0), mesh, [Shard(0)])
            manager.save(step, {"model": {"w": w}})
    return len(manager.exports)


def test_rank_0_exports_what_all_ranks_have_saved(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    config_in(tmp_path / "config")
    assert worlds[2].run(of_ranks, str(tmp_path / "run")) == [1, 0]
    found = load_file(tmp_path / "run" / "export" / "hf" / "step-00000002" / "model.safetensors")
    assert torch.equal(found["w"], torch.full((5, 3), 2.0))
