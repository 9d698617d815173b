"""CheckpointManager: a run's directory, alone and over ranks."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from children import in_child
import ranks
import torch

import tilestone


def state_of(step: int) -> dict[str, Any]:
    return {"w": numpy.full(40, step, numpy.float32), "step": step}


def train(run: pathlib.Path, steps: range, **options: Any) -> None:
    with tilestone.CheckpointManager(run, **options) as manager:
        for step in steps:
            manager.save(step, state_of(step), metrics={"loss": 1 / step})


def steps_in(run: pathlib.Path) -> list[int]:
    with tilestone.CheckpointManager(run) as manager:
        return [step.step for step in manager.steps()]


def folders_in(run: pathlib.Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name != ".tilestone")


def cut(folder: pathlib.Path) -> None:
    """Cuts the first data file, as a disk that ran full does."""
    file = sorted(folder.glob("*.distcp"))[0]
    os.truncate(file, 20)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "x"},
        {"dialect": "x"},
        {"resources": tilestone.Resources(threads=-1)},
        {"attributes": {"a": "x" * (2 << 20)}},
    ],
)
def test_what_a_save_refuses_of_its_options_the_constructor_refuses(
    tmp_path: pathlib.Path, options: dict[str, Any]
) -> None:
    with pytest.raises(tilestone.CheckpointError) as of_save:
        tilestone.save(state_of(1), tmp_path / "step", **options)
    with pytest.raises(type(of_save.value)) as raised:
        tilestone.CheckpointManager(tmp_path / "run", **options)
    assert str(raised.value) == str(of_save.value).removesuffix(" (rank 0)")


def test_a_run_saves_when_due_and_continues_from_its_newest_step(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    with tilestone.CheckpointManager(run, every=10, keep=tilestone.Keep(last=2)) as manager:
        template = state_of(0)
        state, step = manager.restore(template)
        assert state is template and step is None
        assert manager.latest() is None and manager.steps() == []
        for step in range(1, 36):
            assert manager.should_save(step) == (step % 10 == 0)
            assert manager.save(step, state_of(step)) == (step % 10 == 0)
        assert not manager.should_save(30)
        assert manager.save(35, state_of(35), force=True)
        assert manager.save(35, state_of(35), force=True)  # it is there already
        manager.wait()
        assert [each.step for each in manager.steps()] == [30, 35]
    assert folders_in(run) == ["step-00000030", "step-00000035"]
    with tilestone.CheckpointManager(str(run), every=10) as manager:
        wanted = state_of(0)
        loaded, step = manager.restore(wanted)
        assert step == 35 and loaded["step"] == 35
        assert loaded["w"] is wanted["w"] and (wanted["w"] == 35).all()
        assert manager.restore(state_of(0), step=30)[0]["step"] == 30
        with pytest.raises(tilestone.NotFoundError, match="step 20.* 30 35"):
            manager.restore(state_of(0), step=20)


def test_what_the_rules_keep_stays(tmp_path: pathlib.Path) -> None:
    keep = tilestone.Keep(last=2, every=4, best=("loss", "max", 1))
    train(tmp_path, range(1, 11), keep=keep)
    with tilestone.CheckpointManager(tmp_path, keep=keep) as manager:
        assert [each.step for each in manager.steps()] == [1, 4, 8, 9, 10]
        assert manager.best() == 1 and manager.latest() == 10
        first = manager.steps()[0]
        assert first.metrics == {"loss": 1.0}
        assert (first.state, first.problem, first.format) == ("durable", "", "torch_dist")
        assert manager.path(4) == str(tmp_path / "step-00000004")
        with tilestone.open(manager.path(4)) as opened:
            assert opened["step"] == 4
    train(tmp_path, range(11, 12), keep=tilestone.Keep(newer_than=3600))
    assert len(steps_in(tmp_path)) == 6


def test_without_keep_nothing_is_removed_also_in_a_folder_that_is_not_utf_8(
    tmp_path: pathlib.Path,
) -> None:
    run = tmp_path / os.fsdecode(b"run-\xff")
    train(run, range(1, 6), name="ckpt_{step}")
    assert folders_in(run) == [f"ckpt_{step}" for step in range(1, 6)]
    with tilestone.CheckpointManager(run, name="ckpt_{step}") as manager:
        assert manager.restore(state_of(0))[1] == 5


def test_folders_of_megatron_and_torchtitan_are_steps(tmp_path: pathlib.Path) -> None:
    tilestone.save(state_of(90), tmp_path / "step-90")
    tilestone.save(state_of(100), tmp_path / "iter_0000100", dialect="megatron")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("90")
    with tilestone.CheckpointManager(tmp_path, keep=tilestone.Keep(last=2)) as manager:
        assert manager.latest() == 100
        state, step = manager.restore(state_of(0))
        assert step == 100
        manager.save(110, state_of(110))
    assert steps_in(tmp_path) == [100, 110]


def test_unfinished_steps_are_skipped_and_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, range(1, 3))
    os.remove(tmp_path / "step-00000002/.metadata")
    for manifest in (tmp_path / "step-00000002/.tilestone").glob("*.manifest"):
        manifest.rename(manifest.with_suffix(".begun"))
    with tilestone.CheckpointManager(tmp_path) as manager, caplog.at_level(logging.WARNING):
        assert manager.restore(state_of(0))[1] == 1
        assert "step-00000002" in caplog.text and "unfinished" in caplog.text
        assert [each.state for each in manager.steps()] == ["durable", "unfinished"]
        assert manager.save(2, state_of(2))
        manager.wait()
        assert manager.latest() == 2


def test_entries_named_like_a_step_that_are_no_folders_are_not_steps(
    tmp_path: pathlib.Path,
) -> None:
    run = tmp_path / "run"
    train(run, range(1, 2))
    os.mkfifo(run / "step-00000002")
    (run / "step-00000003").symlink_to(__file__)
    (run / "step-00000004").symlink_to("step-00000004")
    (run / "step-00000005").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere").mkdir()
    tilestone.save(state_of(6), tmp_path / "elsewhere" / "x")
    (run / "step-00000006").symlink_to(tmp_path / "elsewhere" / "x")
    assert steps_in(run) == [1, 6]


_SAVES_AND_PRUNES = """
import sys, numpy, tilestone
run, first = sys.argv[1], int(sys.argv[2])
with tilestone.CheckpointManager(run, keep=tilestone.Keep(last=2), async_save=False) as manager:
    for step in range(first, 240, 2):
        manager.save(step, {"w": numpy.full(4, step)})
        assert step in [each.step for each in manager.steps()] or step < manager.latest() - 2
"""


def test_two_processes_save_to_one_run_and_prune_it(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", _SAVES_AND_PRUNES, str(tmp_path / "run")]
    programs = [subprocess.Popen([*command, str(first)]) for first in (1, 2)]
    assert [program.wait(120) for program in programs] == [0, 0]
    assert 239 in steps_in(tmp_path / "run") or 238 in steps_in(tmp_path / "run")


def test_an_intact_step_that_lacks_a_key_is_not_damaged(tmp_path: pathlib.Path) -> None:
    with tilestone.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": numpy.zeros(3), "old": numpy.zeros(2), "name": "a"})
        manager.save(2, {"w": numpy.ones(3)})
        for key, wanted in (("old", numpy.zeros(2)), ("name", "b")):
            with pytest.raises(tilestone.NotFoundError) as raised:
                manager.restore({"w": numpy.zeros(3), key: wanted}, fallback=True)
            assert raised.value.key == key
        assert manager.latest() == 2


def test_a_damaged_newest_step_is_an_error_or_is_left_behind(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, range(10, 31, 10))
    cut(tmp_path / "step-00000030")
    with tilestone.CheckpointManager(tmp_path) as manager:
        with pytest.raises(tilestone.CorruptError, match="fallback"):
            manager.restore(state_of(0))
        state, step = manager.restore(state_of(0), fallback=True)
        assert (step, state["step"]) == (20, 20)
        assert "step-00000030 is damaged" in caplog.text and "10 steps" in caplog.text
        manager.save(30, state_of(31))
        assert manager.restore(state_of(0))[0]["step"] == 31


def test_a_newest_step_that_has_lost_its_manifest_is_damaged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, range(10, 31, 10))
    shutil.rmtree(tmp_path / "step-00000030" / ".tilestone")
    with tilestone.CheckpointManager(tmp_path, keep=tilestone.Keep(last=2)) as manager:
        assert [info.state for info in manager.steps()] == ["durable", "durable", "damaged"]
        with pytest.raises(tilestone.CorruptError, match="manifest is missing.*fallback"):
            manager.restore(state_of(0))
        assert manager.restore(state_of(0), fallback=True)[1] == 20
        assert "step-00000030 is damaged" in caplog.text
        manager.save(30, state_of(31))
        assert manager.restore(state_of(0))[0]["step"] == 31


def test_damage_that_shows_only_in_a_load_names_the_step_and_the_way_on(
    tmp_path: pathlib.Path,
) -> None:
    train(tmp_path, range(10, 21, 10))
    file = sorted((tmp_path / "step-00000020").glob("*.distcp"))[0]
    file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    with tilestone.CheckpointManager(tmp_path) as manager:
        with pytest.raises(tilestone.CorruptError, match="step 20: .*fallback=True") as raised:
            manager.restore(state_of(0))
        assert "fallback" in raised.value.hint
        with pytest.raises(tilestone.CorruptError, match="step 20") as raised:
            manager.restore(state_of(0), step=20)
        assert "fallback" not in str(raised.value)
        assert manager.restore(state_of(0), fallback=True)[1] == 10


def test_a_save_that_lost_something_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, range(1, 3))
    assert caplog.text == ""
    less = {"w": numpy.zeros(30, numpy.float32)}
    with tilestone.CheckpointManager(tmp_path, strict=True) as manager:
        with pytest.raises(
            tilestone.MismatchError, match="the key step is missing; w has fewer bytes"
        ):
            manager.save(3, less)
            manager.wait()
        assert manager.latest() == 2
    with tilestone.CheckpointManager(tmp_path, strict=True, async_save=False) as manager:
        with pytest.raises(tilestone.MismatchError, match="the key step is missing"):
            manager.save(3, less)
    with tilestone.CheckpointManager(tmp_path) as manager:
        manager.save(3, less)
        manager.wait()
        assert "step 3 lacks something that step 2 has: the key step is missing" in caplog.text


def test_an_empty_dict_that_is_missing_is_a_loss(tmp_path: pathlib.Path) -> None:
    whole = {"step": 1, "optimizer": {"state": {}, "param_groups": {}}}
    with tilestone.CheckpointManager(tmp_path, strict=True, async_save=False) as manager:
        manager.save(1, whole)
        manager.save(2, whole)
        with pytest.raises(tilestone.MismatchError, match="the key optimizer.state is missing"):
            manager.save(3, {"step": 1, "optimizer": {"param_groups": {}}})
        manager.save(3, {"step": 1, "optimizer": {"state": {"0": 1}, "param_groups": {}}})
        manager.save(4, {"only": {}, **whole, "optimizer": {"state": {"0": 1}, "param_groups": {}}})
    with tilestone.CheckpointManager(tmp_path, strict=True, async_save=False) as manager:
        with pytest.raises(tilestone.MismatchError, match="the key only is missing"):
            manager.save(5, {**whole, "optimizer": {"state": {"0": 1}, "param_groups": {}}})
    with tilestone.CheckpointManager(tmp_path / "b", strict=True, async_save=False) as manager:
        manager.save(1, {"only": {}})
        with pytest.raises(tilestone.MismatchError, match="the key only is missing"):
            manager.save(2, {})


def test_arguments_that_cant_be_meant_are_refused(tmp_path: pathlib.Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every"), ({"every": True}, "every"), ({"keep": 3}, "tilestone.Keep"),
        ({"name": "latest"}, "pattern"), ({"strict": 1}, "strict"), ({"format": 1}, "format"),
        ({"nonsense": 1}, "nonsense"), ({"in_flight": "skip"}, "in_flight"),
        ({"async_save": False, "on_error": "warn"}, "on_error"), ({"async_save": 1}, "async_save"),
    ]  # fmt: skip
    for options, text in refused:
        with pytest.raises(tilestone.InvalidArgumentError, match=text):
            tilestone.CheckpointManager(tmp_path, **options)
    for given in (("loss",), "loss", ("loss", "least", 1), ("loss", "min", "2")):
        with pytest.raises(tilestone.InvalidArgumentError, match="best"):
            tilestone.Keep(best=given)  # type: ignore[arg-type]
    for name, value in (("last", 0), ("last", -1), ("every", 0), ("best", ("loss", "min", -1)), ("best", ("loss", "min", 0))):
        with pytest.raises(tilestone.InvalidArgumentError, match=rf"Keep\.{name}.* is (0|-1)"):
            tilestone.Keep(**{name: value})  # type: ignore[arg-type]
    for path in ("", "a\0b"):
        with pytest.raises(tilestone.InvalidArgumentError, match="run_dir"):
            tilestone.CheckpointManager(path)
    assert tilestone.Keep(best=("loss", "min")).best == ("loss", "min", 1)  # type: ignore[arg-type]
    with tilestone.CheckpointManager(tmp_path) as manager:
        with pytest.raises(tilestone.InvalidArgumentError, match="step"):
            manager.save("1", state_of(1))  # type: ignore[arg-type]
        with pytest.raises(tilestone.InvalidArgumentError, match="loss"):
            manager.save(1, state_of(1), metrics={"loss": "3"})  # type: ignore[dict-item]
        with pytest.raises(tilestone.InvalidArgumentError, match="loss"):
            manager.save(1, state_of(1), metrics={"loss": 10**400})
        with pytest.raises(tilestone.InvalidArgumentError, match="force"):
            manager.save(1, state_of(1), force=1)  # type: ignore[arg-type]
        with pytest.raises(tilestone.InvalidArgumentError, match="step is -1"):
            manager.restore(state_of(1), step=-1)
        with pytest.raises(tilestone.InvalidArgumentError, match=r"Keep\.best"):
            manager.best()
    assert os.listdir(tmp_path) == []


def test_a_save_in_the_background_that_fails_is_raised_by_the_next_call_and_can_be_repeated(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, range(1, 3))
    less = {"w": numpy.zeros(30, numpy.float32)}
    with tilestone.CheckpointManager(tmp_path, strict=True) as manager:
        assert manager.save(3, less)
        with pytest.raises(tilestone.MismatchError, match="step 3 lacks"):
            manager.save(4, state_of(4))
        assert manager.save(4, state_of(4))
        manager.wait()
        assert manager.save(5, less)
        with pytest.raises(tilestone.MismatchError):
            manager.wait()
        assert manager.should_save(5) and manager.save(5, state_of(5))
        manager.wait()
        assert [step.step for step in manager.steps() if step.state == "durable"] == [1, 2, 4, 5]
    with pytest.raises(ZeroDivisionError):
        with tilestone.CheckpointManager(tmp_path, strict=True) as manager:
            manager.save(6, less)
            raise ZeroDivisionError
    assert "The last save has failed: step 6 lacks" in caplog.text


def test_a_save_is_not_compared_with_one_that_has_failed(tmp_path: pathlib.Path) -> None:
    train(tmp_path, range(1, 3))
    with tilestone.CheckpointManager(tmp_path, strict=True) as manager:
        assert manager.save(3, {"other": 1})
        with pytest.raises(tilestone.MismatchError, match="step 3 lacks"):
            manager.save(4, state_of(4))
        assert manager.save(4, state_of(4))
        manager.wait()
        assert manager.save(5, {"other": 1})
        with pytest.raises(tilestone.MismatchError, match="step 4 has"):
            manager.wait()
        assert manager.save(6, state_of(6))


def test_arrays_may_change_while_a_save_is_in_flight(tmp_path: pathlib.Path) -> None:
    with tilestone.CheckpointManager(tmp_path, keep=tilestone.Keep()) as manager:
        state = state_of(0)
        for step in range(1, 6):
            state["w"][:] = state["step"] = step
            manager.save(step, state)
            state["w"][:] = -1
        loaded, step = manager.restore(state_of(0))
        assert step == 5 and (loaded["w"] == 5).all()
    assert folders_in(tmp_path) == ["step-00000005"]


def test_a_forked_child_is_refused_the_save_that_its_parent_has_in_flight(
    tmp_path: pathlib.Path,
) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        began.set()
        go.wait(60)

    with tilestone.CheckpointManager(tmp_path / "run", progress=slow) as manager:
        manager.save(1, state_of(1))
        assert began.wait(60)

        def child() -> None:
            calls: list[Callable[[], object]] = [
                lambda: manager.save(2, state_of(2)),
                lambda: manager.save(-1, state_of(2)),
                lambda: manager.restore(state_of(2)),
                manager.wait,
            ]
            for call in calls:
                with pytest.raises(tilestone.UnsupportedError, match="step 1 .* forked"):
                    call()
            manager.close()
            train(tmp_path / "child", range(1, 4), keep=tilestone.Keep())

        assert in_child(child) == 0
        go.set()
    assert steps_in(tmp_path / "run") == [1]
    assert steps_in(tmp_path / "child") == [3]


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except tilestone.CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


def refused_calls_of_ranks(rank: int, world: int, folder: str) -> dict[str, tuple[str, str]]:
    """Calls whose arguments only rank 1 gives wrong. None may cost the calls that follow."""
    saw: dict[str, tuple[str, str]] = {}

    def mine(wrong: Any, right: Any) -> Any:
        return wrong if rank == 1 else right

    for in_background in (True, False):
        options: dict[str, Any] = {"async_save": in_background, "timeout": 60}
        run = os.path.join(folder, f"run{in_background}")
        with tilestone.CheckpointManager(run, **options) as manager:

            def save(step: Any, **given: Any) -> Callable[[], object]:
                return lambda: manager.save(step, state_of(7), **given)  # noqa: B023

            manager.save(1, state_of(1))
            saw["step"] = error_of(save(mine(-1, 2)))
            assert manager.save(3, state_of(3))
            saw["metrics"] = error_of(save(4, metrics=mine({"loss": "low"}, {"loss": 1})))
            assert manager.save(5, state_of(5))
            saw["force"] = error_of(save(6, force=mine(1, True)))
            assert manager.save(7, state_of(7))
            saw["restored"] = error_of(lambda: manager.restore({}, step=mine(-1, 7)))  # noqa: B023
            saw["fallback"] = error_of(lambda: manager.restore({}, fallback=mine(1, True)))  # noqa: B023
            assert manager.restore(state_of(0))[1] == 7
            saw["preempted"] = error_of(lambda: manager.preempted(mine(-1, 7)))  # noqa: B023
            assert not manager.preempted(8)
        with tilestone.CheckpointManager(run, every=10, **options) as manager:
            # Only the forced rank can save now; the others learn of it at the next step that is due.
            saw["forced"] = error_of(save(mine(8, 10), force=mine(True, False)))
            assert manager.save(20, state_of(20))
    wrong: dict[str, Any] = {
        "run_dir": run + "2", "every": 5, "keep": tilestone.Keep(last=2), "name": "ckpt_{step}",
        "strict": True, "async_save": False,
    }  # fmt: skip
    for name, value in wrong.items():
        given = {"run_dir": run, "timeout": 60} | mine({name: value}, {})
        saw[f"other {name}"] = error_of(lambda: tilestone.CheckpointManager(**given))  # noqa: B023
    for name in ("every", "keep", "nonsense"):
        given = {"run_dir": run, "timeout": 60} | mine({name: 0}, {})
        saw[f"no {name}"] = error_of(lambda: tilestone.CheckpointManager(**given))  # noqa: B023
    return saw


def test_arguments_that_one_rank_refuses_are_raised_by_all(
    tmp_path: pathlib.Path, worlds: ranks.Worlds
) -> None:
    texts = {
        "step": "step is -1", "metrics": "'loss'", "force": "force", "restored": "step is -1",
        "fallback": "fallback", "preempted": "step is -1", "no every": "every", "no keep": "keep",
        "no nonsense": "nonsense",
    }  # fmt: skip
    for own, saw in enumerate(worlds[2].run(refused_calls_of_ranks, str(tmp_path))):
        for name, text in texts.items():
            kind, said = saw.pop(name)
            assert kind == "InvalidArgumentError" and text in said, f"{name}: {kind}: {said}"
            assert said.count("rank 1") == 1, f"rank {own}: {name}: {said}"
        kind, said = saw.pop("forced")
        assert kind == "MismatchError" and "step-00000008" in said and "force" in said, said
        assert len(saw) == 6
        for name, (kind, said) in saw.items():
            argument = name.removeprefix("other ")
            assert kind == "MismatchError" and f"don't agree on {argument} (rank 0: " in said, said


def test_metrics_may_be_tensors(tmp_path: pathlib.Path) -> None:
    with tilestone.CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1), metrics={"loss": torch.tensor(0.25)})
        manager.wait()
        assert manager.steps()[0].metrics == {"loss": 0.25}


def run_of_ranks(rank: int, world: int, run: str) -> dict[str, Any]:
    """A run over ranks: metrics, pruning, a loss of keys, a damaged step, and SIGTERM."""
    records: list[logging.LogRecord] = []
    watching = logging.Handler()
    watching.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tilestone").addHandler(watching)

    def state(step: int) -> dict[str, Any]:
        mine = torch.full((2, 3), float(step))
        whole = tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, rank, world))
        return {"w": whole, "step": step, "extra": 1}

    saw: dict[str, Any] = {}
    keep = tilestone.Keep(last=2, best=("loss", "min", 1))
    with tilestone.CheckpointManager(run, keep=keep, timeout=60) as manager:
        saw["fresh"] = manager.restore(state(0))[1]
        for step in range(1, 6):
            manager.save(step, state(step), metrics={"loss": step + 100 * rank})
        less = {key: value for key, value in state(6).items() if key != "extra"}
        manager.save(6, less)
        manager.wait()
        torch.distributed.barrier()
        saw["steps"] = [each.step for each in manager.steps()]
        saw["best"] = manager.best()
    saw["lost"] = [r.getMessage() for r in records if "lacks something" in r.getMessage()]
    torch.distributed.barrier()
    if rank == 0:
        cut(pathlib.Path(run) / "step-00000006")
    torch.distributed.barrier()
    with tilestone.CheckpointManager(run, timeout=60) as manager:
        try:
            manager.restore(state(0))
        except tilestone.CorruptError as error:
            saw["damaged"] = str(error)
        loaded, step = manager.restore(state(0), fallback=True)
        saw["restored"] = (step, loaded["step"], loaded["w"].tolist())
        called: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        for step in range(6, 40):
            if rank == 1 and step == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.preempted(step):
                saw["preempted"] = step
                saw["saved"] = manager.save(step, state(step), force=True)
                break
        manager.wait()
        torch.distributed.barrier()
        saw["called"] = called
        saw["latest"] = manager.latest()
    signal.signal(signal.SIGTERM, before)
    logging.getLogger("tilestone").removeHandler(watching)
    return saw


def test_a_run_over_two_ranks(tmp_path: pathlib.Path, worlds: ranks.Worlds) -> None:
    saw = worlds[2].run(run_of_ranks, str(tmp_path))
    for rank in range(2):
        mine = saw[rank]
        assert mine["fresh"] is None
        assert mine["steps"] == [1, 5, 6]
        assert mine["best"] == 1
        assert "too short" in mine["damaged"]
        assert mine["restored"] == (5, 5, [[5.0] * 3] * 2)
        assert mine["preempted"] == saw[0]["preempted"] >= 8
        assert mine["saved"] and mine["latest"] == mine["preempted"]
    assert saw[0]["lost"] == ["step 6 lacks something that step 5 has: the key extra is missing"]
    assert saw[1]["lost"] == []
    assert saw[0]["called"] == [] and saw[1]["called"] == [signal.SIGTERM]


def test_the_example_of_the_page_runs_unchanged(tmp_path: pathlib.Path) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "run_directories.md"
    example = page.read_text().split("```python\n")[1].split("```")[0].replace(
        '"run"', repr(str(tmp_path))
    )
    before = signal.getsignal(signal.SIGTERM)
    for last in (250, 420):
        made = (state_of(0), {"lr": 0.1})
        names = {"make": lambda: made, "last": last, "train": lambda state: 0.5}
        exec(compile(example, "docs/run_directories.md", "exec"), names)
        assert names["step"] == last
        with tilestone.CheckpointManager(tmp_path) as manager:
            assert manager.latest() == last // 100 * 100
    assert steps_in(tmp_path) == [200, 300, 400]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_manager_says_so(tmp_path: pathlib.Path) -> None:
    with tilestone.CheckpointManager(tmp_path) as manager:
        assert repr(manager) == f"CheckpointManager({str(tmp_path)!r})"
    assert repr(manager) == f"CheckpointManager({str(tmp_path)!r}, closed)"
    for call in (lambda: manager.save(1, state_of(1)), lambda: manager.restore(state_of(0))):
        with pytest.raises(tilestone.InvalidArgumentError, match="the manager is closed"):
            call()
    assert steps_in(tmp_path) == []
