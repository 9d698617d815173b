"""Sessions: what is kept from one save to the next."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import numpy
import pytest
import ranks
import torch

import tilestone
from tilestone import _calls, _option_types

TOKEN = "one run of a test"


def rows(rank: int, world: int, first: float = 0.0) -> dict[str, Any]:
    """Two rows of each rank, an array that all ranks have, and a value."""
    own = numpy.arange(8, dtype=numpy.float32).reshape(2, 4) + 8 * rank + first
    return {
        "w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, rank, world)),
        "all": numpy.full(5, first),
        "step": int(first),
    }


def expect_rows(path: pathlib.Path, world: int, first: float) -> None:
    loaded = tilestone.load(path)
    assert (loaded["w"] == numpy.arange(8.0 * world).reshape(2 * world, 4) + first).all()
    assert (loaded["all"] == first).all() and loaded["step"] == first


def test_saves_of_one_structure_send_no_plan_again_and_any_rank_s_change_is_noticed(
    tmp_path: pathlib.Path,
) -> None:
    def run(comm: tilestone.Communicator) -> None:
        with tilestone.Session(comm=comm) as session:
            assert (session.rank, session.world_size) == (comm.rank, 2)
            for first in range(3):
                session.save(rows(comm.rank, 2, first), tmp_path / str(first))
            stats = session.stats
            counts = (stats.saves, stats.plans_exchanged, stats.plans_from_cache)
            assert counts == (3, 1, 2), stats
            state = rows(comm.rank, 2, 3)
            if comm.rank == 1:
                state["more"] = "on this rank"
            session.save(state, tmp_path / "3")
            assert session.stats.plans_exchanged == 2
            assert session.stats.plan_bytes_sent > stats.plan_bytes_sent
            loaded = session.load({"step": None}, tmp_path / "3")
            assert loaded["step"] == 3
        with pytest.raises(tilestone.InvalidArgumentError, match="the session is closed"):
            session.save({}, tmp_path)

    tilestone.run_ranks(2, run)
    for first in range(4):
        expect_rows(tmp_path / str(first), 2, first)
    assert tilestone.load(tmp_path / "3")["more"] == "on this rank"


def test_an_error_in_one_ranks_state_fails_all_ranks_and_the_session_continues(
    tmp_path: pathlib.Path,
) -> None:
    def run(comm: tilestone.Communicator) -> None:
        session = tilestone.Session(comm=comm)
        state = rows(comm.rank, 2)
        if comm.rank == 1:
            state["w"] = tilestone.ShardedTensor.from_rank_offsets(
                "w", numpy.zeros((2, 5), numpy.float32), (0, comm.rank, 2)
            )
        with pytest.raises(tilestone.MismatchError, match="key w"):
            session.save(state, tmp_path / "a")
        session.save(rows(comm.rank, 2, 4), tmp_path / "a")

    tilestone.run_ranks(2, run)
    expect_rows(tmp_path / "a", 2, 4)


def test_by_files_the_group_is_needed_for_the_token_alone_and_saves_are_counted_by_path(
    tmp_path: pathlib.Path,
) -> None:
    tokens = []

    def run(comm: tilestone.Communicator) -> None:
        session = tilestone.Session(comm=comm, coordination="files")
        tokens.append(session.token)
        if comm.rank == 0:  # rank 1 skips this save
            assert not session.save(rows(0, 2), tmp_path / "skipped", wait=False).published
        for first in (1, 2):
            result = session.save(rows(comm.rank, 2, first), tmp_path / str(first), timeout=60)
            assert result.published
        # A second save to a path is another save, and replaces nothing.
        with pytest.raises(tilestone.AlreadyExistsError):
            session.save(rows(comm.rank, 2, 5), tmp_path / "1", timeout=60)
        assert session.stats.saves >= 2

    tilestone.run_ranks(2, run)
    assert len(tokens) == 2 and len(set(tokens)) == 1
    for first in (1, 2):
        expect_rows(tmp_path / str(first), 2, first)


def test_without_any_communicator_ranks_have_a_token_in_common(tmp_path: pathlib.Path) -> None:
    for rank in (1, 0):
        session = tilestone.Session(coordination="files", rank=rank, world_size=2, token=TOKEN)
        done = session.save(rows(rank, 2, 6), tmp_path / "a", wait=False)
        assert done.published == (rank == 0)
    expect_rows(tmp_path / "a", 2, 6)
    assert session.load({"step": None}, tmp_path / "a")["step"] == 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"coordination": "pigeons"}, '"communicator" or "files", not "pigeons"'),
        ({"rank": 0, "world_size": 1, "token": TOKEN}, 'only allowed with coordination="files"'),
        ({"coordination": "files", "rank": 0, "world_size": 1}, "needs token"),
        (
            {"coordination": "files", "rank": 0, "world_size": 1, "token": "short"},
            "token has 5 bytes",
        ),
        (
            {"coordination": "files", "rank": 0, "world_size": 1, "token": TOKEN,
             "comm": tilestone.solo()},
            "without a group or comm",
        ),
    ],
)  # fmt: skip
def test_arguments_that_contradict_each_other_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match=says):
        tilestone.Session(**given)


def test_by_rule_an_unchanged_state_is_planned_once(tmp_path: pathlib.Path) -> None:
    session = tilestone.Session(coordination="files", rank=0, world_size=1, token=TOKEN)
    for first in range(3):
        session.save(rows(0, 1, first), tmp_path / str(first))
        expect_rows(tmp_path / str(first), 1, first)
    stats = session.stats
    assert (stats.saves, stats.plans_exchanged, stats.plans_from_cache) == (3, 0, 2), stats
    state = rows(0, 1, 3) | {"more": numpy.zeros(2)}
    session.save(state, tmp_path / "3")
    assert session.stats.plans_from_cache == 2
    assert (tilestone.load(tmp_path / "3")["more"] == 0).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"comm": tilestone.solo()},
        {"coordination": "files", "rank": 0, "world_size": 1, "token": TOKEN},
    ],
)
def test_prepared_memory_is_enough_for_staging(
    tmp_path: pathlib.Path, arguments: dict[str, Any]
) -> None:
    with tilestone.Session(**arguments) as session:
        state = rows(0, 1)
        size = session.prepare(state)
        with session.begin_save(state, tmp_path / "a") as saving:
            assert 0 < saving.bytes <= size
            saving.stage()
            saving.write()
            saving.report()
            saving.publish()
        expect_rows(tmp_path / "a", 1, 0.0)
        # Preparing is not a save, and does not count as one by files.
        assert session.stats.saves == 1
        assert session.prepare({"all": numpy.zeros(3 << 17)}) >= 3 << 20
        nothing: Any = None
        with pytest.raises(tilestone.InvalidArgumentError, match="a state must be a dict"):
            session.prepare(nothing)
        with pytest.raises(tilestone.InvalidArgumentError, match="comm is fixed by the session"):
            session.prepare(state, comm=tilestone.solo())
        with pytest.raises(tilestone.InvalidArgumentError, match="has no option pigeons"):
            session.prepare(state, pigeons=1)
    with pytest.raises(tilestone.InvalidArgumentError, match="the session is closed"):
        session.prepare(state)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True])
def test_an_invalid_timeout_is_refused_on_every_rank(timeout: Any) -> None:
    for given in (
        {"comm": tilestone.solo()},
        {"coordination": "files", "rank": 0, "world_size": 1, "token": TOKEN},
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match="timeout"):
            tilestone.Session(**given, timeout=timeout)

    def run(comm: tilestone.Communicator) -> None:
        with pytest.raises(tilestone.InvalidArgumentError, match="timeout.*rank 1"):
            tilestone.Session(comm=comm, timeout=timeout if comm.rank == 1 else 60)

    tilestone.run_ranks(2, run)


def test_options_of_the_session_are_not_options_of_a_save(tmp_path: pathlib.Path) -> None:
    session = tilestone.Session(comm=tilestone.solo())
    with pytest.raises(tilestone.InvalidArgumentError, match="comm is fixed by the session"):
        session.save({}, tmp_path, comm=tilestone.solo())
    with pytest.raises(tilestone.InvalidArgumentError, match="group is fixed by the session"):
        session.load({}, tmp_path, group=None)


def test_by_files_a_save_that_is_refused_counts(tmp_path: pathlib.Path) -> None:
    with tilestone.Session(coordination="files", rank=0, world_size=1, token=TOKEN) as session:
        with pytest.raises(tilestone.InvalidArgumentError, match="rank is fixed by the session"):
            session.save({}, tmp_path / "a", rank=0)
        session.save({"step": 1}, tmp_path / "a")
    save_id = session_id(tmp_path / "a")
    tilestone.save({"step": 1}, tmp_path / "b", coordination="files", rank=0, world_size=1,
                   token=TOKEN, number=1)
    assert save_id == session_id(tmp_path / "b")


def session_id(path: pathlib.Path) -> str:
    with tilestone.open(path) as checkpoint:
        return checkpoint.save_id


def on_ranks(rank: int, world: int, path: str) -> tuple[int, int]:
    """Real processes with torch's default group."""
    state = {"w": torch.full((4,), 2.0), "own": tilestone.ShardedTensor.from_rank_offsets(
        "own", torch.full((2,), float(rank)), (0, rank, world)
    )}  # fmt: skip
    session = tilestone.Session()
    for number in range(3):
        session.save(state, f"{path}-{number}")
        state["w"].add_(1.0)
    wanted = {"own": tilestone.ShardedTensor.from_rank_offsets(
        "own", torch.zeros(2), (0, rank, world)
    ), "w": torch.zeros(4)}  # fmt: skip
    loaded = session.load(wanted, f"{path}-2")
    assert torch.equal(loaded["w"], torch.full((4,), 4.0))
    assert torch.equal(loaded["own"], torch.full((2,), float(rank)))
    return session.stats.plans_exchanged, session.stats.plans_from_cache


def test_torch_ranks_keep_a_session_over_their_default_group(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    assert worlds[2].run(on_ranks, ckpt) == [(1, 2)] * 2


def test_the_types_of_the_passed_on_options_are_those_of_save_and_load() -> None:
    def named(function: Any) -> set[str]:
        parameters = inspect.signature(function).parameters.values()
        return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}

    fixed = {"group", "comm", "coordination", "rank", "world_size", "token", "number"}
    assert set(_option_types.AllSaveOptions.__annotations__) >= fixed
    assert all_names(_option_types.AllSaveOptions) == named(tilestone.save)
    assert all_names(_option_types.SessionSaveOptions) == named(tilestone.save) - fixed
    copies = {"replicate", "replicate_group", "max_copy_bytes"}
    assert all_names(_option_types.PlainSaveOptions) == set(_calls.SAVE_OPTIONS) - copies
    assert all_names(_option_types.PlanCopiesOptions) == named(tilestone.save) - copies
    alone = {"own_rank", "report"}
    assert all_names(_option_types.SessionLoadOptions) == named(tilestone.load) - {"group", "comm"}
    assert all_names(_option_types.SessionLoadOptions) == set(_calls.LOAD_OPTIONS) | alone


def test_the_defaults_of_the_passed_on_options_are_those_of_save_and_load() -> None:
    for function, defaults in (
        (tilestone.save, _calls.SAVE_OPTIONS),
        (tilestone.load, _calls.LOAD_OPTIONS),
    ):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in defaults} == defaults


def misspell(rank: int, world: int, path: str) -> list[str]:
    session = tilestone.Session()
    wrong: dict[str, Any] = {"overwrit": True} if rank == 1 else {}
    said = []
    for call in (session.save, session.load):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            call({"x": 1}, path, **wrong)
        assert raised.value.rank == 1
        said.append(raised.value.message)
    return said


def test_every_rank_learns_of_an_unknown_option_of_a_session(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    said = ["a save has no option overwrit", "a load has no option overwrit"]
    assert worlds[2].run(misspell, ckpt) == [said] * 2


def all_names(options: Any) -> set[str]:
    return set(options.__required_keys__ | options.__optional_keys__)
