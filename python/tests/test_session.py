"""Sessions: what is kept from one save to the next."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy
import pytest
import ranks
import torch
from thread_ranks import run_ranks

import tilestone

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


def test_results_have_timings_and_the_log_one_line_for_each_save_and_load(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[tuple[dict[str, float], dict[str, float], int]] = []

    def run(comm: tilestone.Communicator) -> None:
        with tilestone.Session(group=comm) as session:
            saved = session.save(rows(comm.rank, 2), tmp_path / "a")
            again = session.async_save(rows(comm.rank, 2), tmp_path / "b").result()
            assert list(again.timings) == [
                "preparing", "planning", "staging", "writing", "reporting", "publishing",
            ]  # fmt: skip
            report = tilestone.LoadReport()
            session.load(
                rows(comm.rank, 2), tmp_path / "b", differences=tilestone.Differences(report=report)
            )
            assert report == tilestone.LoadReport()  # timings are not compared
            assert "timings={" in repr(saved)
            results.append((saved.timings, report.timings, report.bytes_loaded))

    with caplog.at_level("INFO", logger="tilestone"):
        run_ranks(2, run)
    assert len(results) == 2
    for saved, loaded, loaded_bytes in results:
        assert list(saved) == ["preparing", "planning", "writing", "reporting", "publishing"]
        assert list(loaded) == [
            "preparing", "describing", "choosing", "exchanging", "reading", "handing over",
        ]  # fmt: skip
        assert all(seconds >= 0 for seconds in [*saved.values(), *loaded.values()])
        assert loaded_bytes == 2 * 4 * 4 + 5 * 8
    lines = [record.message for record in caplog.records if record.levelname == "INFO"]
    assert [line.split(":")[0] for line in lines] == [
        f"saved {tmp_path / 'a'}", f"saved {tmp_path / 'b'}", f"loaded {tmp_path / 'b'}",
    ]  # fmt: skip
    assert "on 2 ranks in" in lines[0] and "writing 0." in lines[0] and "/s (" in lines[2]


def test_saves_of_one_structure_send_no_plan_again_and_any_rank_s_change_is_noticed(
    tmp_path: pathlib.Path,
) -> None:
    def run(comm: tilestone.Communicator) -> None:
        with tilestone.Session(group=comm) as session:
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

    run_ranks(2, run)
    for first in range(4):
        expect_rows(tmp_path / str(first), 2, first)
    assert tilestone.load(tmp_path / "3")["more"] == "on this rank"


def test_an_error_in_one_ranks_state_fails_all_ranks_and_the_session_continues(
    tmp_path: pathlib.Path,
) -> None:
    def run(comm: tilestone.Communicator) -> None:
        session = tilestone.Session(group=comm)
        state = rows(comm.rank, 2)
        if comm.rank == 1:
            state["w"] = tilestone.ShardedTensor.from_rank_offsets(
                "w", numpy.zeros((2, 5), numpy.float32), (0, comm.rank, 2)
            )
        with pytest.raises(tilestone.MismatchError, match="key w"):
            session.save(state, tmp_path / "a")
        session.save(rows(comm.rank, 2, 4), tmp_path / "a")

    run_ranks(2, run)
    expect_rows(tmp_path / "a", 2, 4)


def test_by_files_the_group_is_needed_for_the_token_alone_and_saves_are_counted_by_path(
    tmp_path: pathlib.Path,
) -> None:
    tokens = []

    def run(comm: tilestone.Communicator) -> None:
        session = tilestone.Session(group=comm, by_files=tilestone.ByFiles())
        tokens.append(session.token)
        if comm.rank == 0:  # rank 1 skips this save
            with pytest.raises(tilestone.TimeoutError):
                session.save(rows(0, 2), tmp_path / "skipped", timeout=0.2)
        for first in (1, 2):
            result = session.save(rows(comm.rank, 2, first), tmp_path / str(first), timeout=60)
            assert result.published
        # A second save to a path is another save, and replaces nothing.
        with pytest.raises(tilestone.AlreadyExistsError):
            session.save(rows(comm.rank, 2, 5), tmp_path / "1", timeout=60)
        assert session.stats.saves >= 2

    run_ranks(2, run)
    assert len(tokens) == 2 and len(set(tokens)) == 1
    for first in (1, 2):
        expect_rows(tmp_path / str(first), 2, first)


def test_without_any_communicator_ranks_have_a_token_in_common(tmp_path: pathlib.Path) -> None:
    for rank in (1, 0):
        session = tilestone.Session(by_files=tilestone.ByFiles(rank, 2, TOKEN, wait=False))
        done = session.save(rows(rank, 2, 6), tmp_path / "a")
        assert done.published == (rank == 0)
    expect_rows(tmp_path / "a", 2, 6)
    assert session.load({"step": None}, tmp_path / "a")["step"] == 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"by_files": "pigeons"}, "by_files must be a tilestone.ByFiles"),
        ({"by_files": tilestone.ByFiles(0, 1)}, "needs by_files.token"),
        ({"by_files": tilestone.ByFiles(token=TOKEN)}, "needs by_files.rank"),
        ({"by_files": tilestone.ByFiles(0, 1, "short")}, "token has 5 bytes"),
        ({"by_files": tilestone.ByFiles(number=1)}, "a session counts its saves itself"),
        (
            {"group": tilestone.solo(), "by_files": tilestone.ByFiles(0, 1, TOKEN)},
            "come from the group",
        ),
    ],
)  # fmt: skip
def test_arguments_that_contradict_each_other_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match=says):
        tilestone.Session(**given)


@pytest.mark.parametrize(
    "arguments",
    [
        {"group": tilestone.solo()},
        {"by_files": tilestone.ByFiles(0, 1, TOKEN)},
    ],
)
def test_prepared_memory_is_enough_for_staging(
    tmp_path: pathlib.Path, arguments: dict[str, Any]
) -> None:
    with tilestone.Session(**arguments) as session:
        state = rows(0, 1)
        size = session.prepare(state)
        assert state["w"].data.nbytes + state["all"].nbytes <= size
        session.async_save(state, tmp_path / "a").result()
        expect_rows(tmp_path / "a", 1, 0.0)
        # Preparing is not a save, and does not count as one by files.
        assert session.stats.saves == 1
        assert session.prepare({"all": numpy.zeros(3 << 17)}) >= 3 << 20
        nothing: Any = None
        with pytest.raises(tilestone.InvalidArgumentError, match="a state must be a dict"):
            session.prepare(nothing)
        with pytest.raises(tilestone.InvalidArgumentError, match="group is fixed by the session"):
            session.prepare(state, group=tilestone.solo())
        with pytest.raises(tilestone.InvalidArgumentError, match="has no option pigeons"):
            session.prepare(state, pigeons=1)
    with pytest.raises(tilestone.InvalidArgumentError, match="the session is closed"):
        session.prepare(state)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True])
def test_an_invalid_timeout_is_refused_on_every_rank(timeout: Any) -> None:
    for given in (
        {"group": tilestone.solo()},
        {"by_files": tilestone.ByFiles(0, 1, TOKEN)},
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match="timeout"):
            tilestone.Session(**given, timeout=timeout)

    def run(comm: tilestone.Communicator) -> None:
        with pytest.raises(tilestone.InvalidArgumentError, match="timeout.*rank 1"):
            tilestone.Session(group=comm, timeout=timeout if comm.rank == 1 else 60)

    run_ranks(2, run)


def test_options_of_the_session_are_not_options_of_a_save(tmp_path: pathlib.Path) -> None:
    session = tilestone.Session(group=tilestone.solo())
    with pytest.raises(tilestone.InvalidArgumentError, match="group is fixed by the session"):
        session.save({}, tmp_path, group=tilestone.solo())
    with pytest.raises(tilestone.InvalidArgumentError, match="group is fixed by the session"):
        session.load({}, tmp_path, group=None)


def test_by_files_a_save_that_is_refused_counts(tmp_path: pathlib.Path) -> None:
    with tilestone.Session(by_files=tilestone.ByFiles(0, 1, TOKEN)) as session:
        with pytest.raises(tilestone.InvalidArgumentError, match="by_files is fixed by the session"):
            session.save({}, tmp_path / "a", by_files=tilestone.ByFiles())
        session.save({"step": 1}, tmp_path / "a")
    save_id = session_id(tmp_path / "a")
    tilestone.save({"step": 1}, tmp_path / "b", by_files=tilestone.ByFiles(0, 1, TOKEN, number=1))
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
