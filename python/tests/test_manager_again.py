"""CheckpointManager: a step that is saved once more, and saves that fail."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import ranks

import tilestone


def state_of(step: int) -> dict[str, Any]:
    return {"w": numpy.full(40, step, numpy.float32), "step": step, "optim": {"state": {}}}


def large_state() -> dict[str, Any]:
    return {"w": numpy.ones(1 << 20, numpy.float32)}


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Larger files can't be written meanwhile: saves of a large state fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files_in(folder: pathlib.Path) -> dict[str, int]:
    return {str(file): file.stat().st_ino for file in folder.rglob("*.distcp")}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_step_whose_save_has_failed_is_due_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, on_error: Any
) -> None:
    export = tilestone.Export(only="")
    with tilestone.CheckpointManager(
        tmp_path, every=10, on_error=on_error, export=export
    ) as manager:
        with small_files():
            assert manager.save(10, large_state())
            assert manager.should_save(10)  # it has waited for the save in flight
        if on_error == "raise":
            with pytest.raises(tilestone.StorageError, match="an earlier .* has failed"):
                manager.save(10, large_state(), force=True)
        assert manager.save(10, large_state(), force=True)
        manager.wait()
        assert manager.latest() == 10 and not manager.should_save(10)
        assert [each.error for each in manager.exports] == [None]  # the failed save's is not tried
    assert ("an earlier asynchronous save has failed" in caplog.text) == (on_error == "warn")


def test_a_failed_save_is_not_compared_with_what_its_folder_held_before(
    tmp_path: pathlib.Path,
) -> None:
    with tilestone.CheckpointManager(tmp_path, on_error="warn") as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        manager.restore(state_of(0), 1)
        with small_files():
            manager.save(2, large_state())
            assert manager.should_save(2)
        assert manager.save(2, state_of(7))
        assert manager.restore(state_of(0), 2)[0]["step"] == 7


def test_a_refused_argument_does_not_make_the_next_step_forget_the_one_before(
    tmp_path: pathlib.Path,
) -> None:
    with tilestone.CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        with pytest.raises(tilestone.InvalidArgumentError):
            manager.save(-1, state_of(3))
        manager.save(3, state_of(3))
        manager.wait()
        assert [each.parent for each in manager.steps()] == [None, 1, 2]


def test_with_warn_a_failed_last_save_is_logged_when_the_manager_is_closed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tilestone.CheckpointManager(tmp_path, on_error="warn") as manager:
        with small_files():
            manager.save(1, large_state())
            with pytest.raises(tilestone.StorageError):
                manager.wait()
            manager.save(2, large_state())
            manager.close()
    assert "The last save has failed: " in caplog.text
    with pytest.raises(tilestone.StorageError):
        with tilestone.CheckpointManager(tmp_path) as manager, small_files():
            manager.save(1, large_state())
            manager.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_the_same_state_of_a_step_is_not_written_again_and_its_new_metrics_count(
    tmp_path: pathlib.Path, in_background: bool
) -> None:
    keep = tilestone.Keep(last=1, best=("loss", "min", 1))
    options: dict[str, Any] = {"keep": keep, "async_save": in_background}
    with tilestone.CheckpointManager(tmp_path, **options) as manager:
        manager.save(1, state_of(1), metrics={"loss": 1.0, "acc": 0.5})
        manager.wait()
        files = files_in(tmp_path)
        assert manager.save(1, state_of(1), force=True)
        assert manager.steps()[0].metrics == {"loss": 1.0, "acc": 0.5}
        assert files_in(tmp_path) == files
        manager.save(2, state_of(2), metrics={"loss": 2.0})
        assert manager.save(2, state_of(2), metrics={"loss": 0.5})
        assert manager.steps()[-1].metrics == {"loss": 0.5}
        manager.save(3, state_of(3), metrics={"loss": 3.0})
        manager.wait()
        assert [each.step for each in manager.steps()] == [2, 3] and manager.best() == 2
    assert tilestone.open(tmp_path / "step-00000002").verify().ok
    with tilestone.CheckpointManager(tmp_path, **options) as manager:
        state, step = manager.restore(state_of(0))
        assert manager.save(3, state, force=True)
    assert os.listdir(tmp_path / "step-00000003" / ".tilestone") != []


@pytest.mark.parametrize("in_background", [True, False])
def test_another_state_of_a_step_is_an_error_or_with_overwrite_replaces_it(
    tmp_path: pathlib.Path, in_background: bool
) -> None:
    others: list[tuple[dict[str, Any], str]] = [
        (state_of(1) | {"w": numpy.full(40, 7, numpy.float32)}, "w differs"),
        (state_of(1) | {"w": numpy.full(40, 1, numpy.float64)}, "w differs"),
        (state_of(1) | {"w": numpy.full((4, 10), 1, numpy.float32)}, "w differs"),
        (state_of(1) | {"step": 2}, "step differs"),
        (state_of(1) | {"more": 2}, "more is new"),
        ({"w": state_of(1)["w"], "optim": {"state": {}}}, "step is missing"),
        (state_of(1) | {"optim": {}}, "the keys of a dict differ"),
    ]
    with tilestone.CheckpointManager(tmp_path, async_save=in_background) as manager:
        manager.save(1, state_of(1))
        for other, text in others:
            with pytest.raises(tilestone.AlreadyExistsError, match=f"step 1 is saved .*{text}"):
                manager.save(1, other)
        assert manager.save(1, state_of(1)) and manager.save(2, state_of(2))
    with tilestone.CheckpointManager(
        tmp_path, async_save=in_background, overwrite=True
    ) as manager:
        manager.restore(state_of(0))
        for other, _ in others:
            assert manager.save(2, other)
        assert manager.save(2, state_of(3), metrics={"loss": 1.0})
        assert manager.restore(state_of(0))[0]["step"] == 3
        assert manager.steps()[1].metrics == {"loss": 1.0}


def again_over_ranks(rank: int, world: int, run: str) -> list[tuple[str, str]]:
    """Saves step 1 once more: the same state, one that differs on rank 1, and after a failure."""
    saw = []

    def state(step: int) -> dict[str, Any]:
        mine = numpy.full((2, 3), step, numpy.float32)
        return {"w": tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, rank, world))}

    for in_background in (True, False):
        options: dict[str, Any] = {"async_save": in_background, "timeout": 60}
        with tilestone.CheckpointManager(f"{run}/{in_background}", **options) as manager:
            manager.save(1, state(1))
            assert manager.save(1, state(1), metrics={"loss": rank})
            try:
                manager.save(1, state(1 + rank))
            except tilestone.AlreadyExistsError as error:
                saw.append((type(error).__name__, str(error)))
            assert manager.save(1, state(1))
            assert manager.steps()[0].metrics == {"loss": 0.0}
    with tilestone.CheckpointManager(f"{run}/failing", timeout=60) as manager:
        with small_files() if rank == 1 else contextlib.nullcontext():
            manager.save(1, {"w": large_state()["w"]} | {f"own{rank}": large_state()["w"]})
            if rank == 0:  # who asks does so for itself
                with pytest.raises(tilestone.StorageError):
                    manager.wait()
            else:
                assert manager.should_save(1)
        try:
            manager.save(1, state(1))
        except tilestone.StorageError as error:
            saw.append((type(error).__name__, "earlier" if "earlier" in str(error) else ""))
        assert manager.save(1, state(1))
        manager.wait()
    return saw


def test_ranks_find_together_that_one_of_them_has_another_state_or_has_failed(
    tmp_path: pathlib.Path,
) -> None:
    # A world of its own: the ranks' store is a file, too, which grows in those of other tests.
    world = ranks.World(2)
    try:
        saw = world.run(again_over_ranks, str(tmp_path))
    finally:
        world.close()
    assert saw[0] == saw[1]
    assert [kind for kind, _ in saw[0]] == ["AlreadyExistsError"] * 2 + ["StorageError"]
    assert "w differs" in saw[0][0][1] and saw[0][2][1] == "earlier"


def test_the_name_of_a_run_need_not_be_text(tmp_path: pathlib.Path) -> None:
    with tilestone.CheckpointManager(os.fsencode(tmp_path) + b"/\xff") as manager:
        manager.save(1, state_of(1))
        manager.wait()
        assert manager.latest() == 1
