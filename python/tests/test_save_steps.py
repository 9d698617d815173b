"""Saves by single steps."""

from __future__ import annotations

import gc
import pathlib
import re
import weakref
from typing import Any

import numpy
import pytest
from children import in_child
import ranks
import torch
from thread_ranks import run_ranks

import tilestone
from tilestone._calls.steps import BegunSave, begin_save

TOKEN = "one run of a test"


def rows(rank: int, world: int) -> dict[str, Any]:
    """Two rows of each rank, an array that all ranks have, one inside an object, and a value."""
    own = numpy.arange(8, dtype=numpy.float32).reshape(2, 4) + 8 * rank
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, rank, world)),
        "all": numpy.arange(5.0),
        "inner": (1, numpy.arange(3)),
        "step": 3,
    }


def change(state: dict[str, Any]) -> None:
    state["w"].data[:] = -1
    state["all"][:] = -1
    state["inner"][1][:] = -1
    state["step"] = 4


def contents(path: pathlib.Path) -> dict[str, bytes]:
    """The content of data files by rank and number. File names begin with the save id."""
    return {re.sub(r"^.{36}", "", f.name): f.read_bytes() for f in path.glob("*.distcp")}


def names(path: pathlib.Path) -> list[str]:
    """All files at the path except the lock."""
    found = [entry.name for entry in path.rglob("*") if entry.is_file()] if path.exists() else []
    return [name for name in found if name != "lock"]  # is kept


def take_steps(saving: BegunSave, state: dict[str, Any], stage: bool) -> Any:
    """Makes all steps, and changes the state as soon as this is allowed."""
    with saving:
        if stage:
            saving.stage()
            change(state)
        saving.write()
        change(state)
        saving.report()
        result = saving.publish()
    assert result.save_id == saving.save_id
    return result


def test_steps_are_a_save_byte_for_byte_and_the_state_may_change_once_it_is_staged_or_written(
    tmp_path: pathlib.Path,
) -> None:
    def run(comm: tilestone.Communicator) -> None:
        with tilestone.Session(group=comm) as session:
            tilestone.save(rows(comm.rank, 2), tmp_path / "row", group=comm)
            for stage in (False, True):
                state = rows(comm.rank, 2)
                saving = begin_save(state, tmp_path / str(stage), group=comm)
                take_steps(saving, state, stage)
                state = rows(comm.rank, 2)
                saving = begin_save(state, tmp_path / f"session {stage}", session=session)
                take_steps(saving, state, stage)
            assert (session.stats.plans_exchanged, session.stats.plans_from_cache) == (1, 1)

    run_ranks(2, run)
    wanted = contents(tmp_path / "row")
    assert len(wanted) == 2
    for name in ("False", "True", "session False", "session True"):
        assert contents(tmp_path / name) == wanted, name
        loaded = tilestone.load(tmp_path / name)
        assert (loaded["all"] == numpy.arange(5.0)).all() and loaded["step"] == 3


def test_the_common_state_may_change_once_the_save_is_written(tmp_path: pathlib.Path) -> None:
    common = torch.arange(5.0)
    state = {**rows(0, 1), "common": common}
    with begin_save(state, tmp_path / "c", dialect="megatron") as saving:
        saving.write()
        common.fill_(-1)
        saving.report()
        saving.publish()
    assert torch.equal(torch.as_tensor(tilestone.load(tmp_path / "c")["common"]), torch.arange(5.0))


def test_by_files_steps_are_a_save_too_and_a_rank_that_gives_up_ends_it(
    tmp_path: pathlib.Path,
) -> None:
    def files(rank: int) -> dict[str, Any]:
        return {"by_files": tilestone.ByFiles(rank, 2, TOKEN, wait=False)}

    for rank in (0, 1):
        tilestone.save(rows(rank, 2), tmp_path / "row", **files(rank))
    with begin_save(rows(0, 2), tmp_path / "given up", **files(0)) as saving:
        saving.write()
    assert len(contents(tmp_path / "given up")) == 0
    with pytest.raises(tilestone.InvalidArgumentError, match="the save is over"):
        saving.report()
    with pytest.raises(tilestone.InterruptedError, match="gave up the save .*another number"):
        begin_save(rows(1, 2), tmp_path / "given up", **files(1))
    for rank in (0, 1):
        state = rows(rank, 2)
        saving = begin_save(state, tmp_path / "steps", **files(rank))
        assert take_steps(saving, state, True).published == (rank == 1)
    for name in (".metadata", *(f.name for f in (tmp_path / "row").glob("*.distcp"))):
        assert (tmp_path / "row" / name).read_bytes() == (tmp_path / "steps" / name).read_bytes()
    session = tilestone.Session(by_files=tilestone.ByFiles(0, 1, TOKEN))
    state = rows(0, 1)
    take_steps(begin_save(state, tmp_path / "alone", session=session), state, True)
    assert tilestone.load(tmp_path / "alone")["step"] == 3


@pytest.mark.parametrize("stage", [True, False])
def test_arrays_are_held_until_they_are_staged_or_written(
    tmp_path: pathlib.Path, stage: bool
) -> None:
    state = {"numpy": numpy.arange(1000.0), "torch": torch.arange(1000.0)}
    held = [weakref.ref(array) for array in state.values()]
    saving = begin_save(state, tmp_path / "a", group=tilestone.solo())
    del state
    gc.collect()
    assert held[0]() is not None
    if stage:
        saving.stage()
        gc.collect()
        assert held[0]() is None and held[1]() is None
    saving.write()
    gc.collect()
    assert held[0]() is None and held[1]() is None
    saving.report()
    saving.publish()
    assert (numpy.asarray(tilestone.load(tmp_path / "a")["numpy"]) == numpy.arange(1000.0)).all()


def test_a_save_that_is_left_after_any_step_leaves_nothing(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="a save has no option cast"):
        begin_save({}, tmp_path, cast=True)
    steps = ("stage", "write", "report", "publish")
    for last in range(4):
        saving = begin_save(rows(0, 1), tmp_path / "a", group=tilestone.solo())
        for step in steps[:last]:
            getattr(saving, step)()
        if last % 2:
            saving.give_up()
            saving.give_up()
        else:
            del saving
            gc.collect()
        assert names(tmp_path / "a") == []
    with pytest.raises(ZeroDivisionError), begin_save(
        rows(0, 1), tmp_path / "a", group=tilestone.solo()
    ) as saving:
        saving.write()
        1 / 0  # noqa: B018
    assert names(tmp_path / "a") == []


def test_an_exception_of_a_callback_ends_the_save_and_is_raised_unchanged(
    tmp_path: pathlib.Path,
) -> None:
    class StopNowError(Exception):
        pass

    def stop(progress: tilestone.Progress) -> None:
        raise StopNowError

    saving = begin_save(
        rows(0, 1), tmp_path / "a", group=tilestone.solo(), progress=stop
    )
    with pytest.raises(StopNowError):
        saving.write()
        saving.report()
    assert names(tmp_path / "a") == []


def test_a_forked_child_does_not_end_its_parents_save(tmp_path: pathlib.Path) -> None:
    with begin_save(rows(0, 1), tmp_path / "a", group=tilestone.solo()) as saving:
        saving.write()

        def child() -> None:
            with pytest.raises(tilestone.UnsupportedError):
                saving.report()
            saving.give_up()

        assert in_child(child) == 0
        saving.report()
        saving.publish()
    assert tilestone.open(tmp_path / "a").verify().ok


def on_ranks(rank: int, world: int, folder: str) -> None:
    """Real processes save torch tensors; then one of two ranks leaves the save."""
    def state() -> dict[str, Any]:
        own = torch.full((2, 3), float(rank))
        entity = tilestone.ShardedTensor.from_rank_offsets("own", own, (0, rank, world))
        return {"own": entity, "all": torch.arange(4.0)}

    for left_before in ("stage", "report", "publish"):
        path = pathlib.Path(folder, left_before)
        saving = begin_save(state(), path, timeout=60)
        for step in ("stage", "write", "report", "publish"):
            if rank == 1 and step == left_before:
                del saving
                gc.collect()
                break
            if rank == 0 and step == ("publish" if left_before == "publish" else "report"):
                with pytest.raises(tilestone.CheckpointError, match="a rank gave up the save") as e:
                    getattr(saving, step)()
                assert e.value.rank == 1
                break
            getattr(saving, step)()
        torch.distributed.barrier()
        # The note of the save may be kept, because it names the owner of these files.
        left = [name for name in names(path) if name.endswith((".distcp", ".metadata"))]
        assert left == [], left_before
    given = state()
    with begin_save(given, f"{folder}/whole") as saving:
        saving.stage()
        given["own"].data.fill_(-1)
        given["all"].fill_(-1)
        saving.write()
        saving.report()
        saving.publish()
    with pytest.raises(tilestone.CheckpointError, match="rank 1"):
        begin_save(given | {"f": (lambda: 1) if rank else 0}, f"{folder}/no")
    assert not pathlib.Path(folder, "no").exists()


def test_a_rank_that_drops_a_save_ends_it_for_all_and_the_group_still_works(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(on_ranks, str(tmp_path), timeout=100)
    loaded = tilestone.load(tmp_path / "whole")
    assert torch.equal(loaded["own"], torch.tensor([0.0, 0, 1, 1]).reshape(4, 1).expand(4, 3))
    assert torch.equal(loaded["all"], torch.arange(4.0))
