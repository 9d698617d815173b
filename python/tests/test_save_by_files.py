"""Saves without a communicator: ranks that communicate only by files."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import numpy
import plain_ranks
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import mentions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tilestone


def scenario(name: str, path: str) -> Any:
    """Runs a scenario of plain_ranks in a process without torch. Returns its result."""
    command = [sys.executable, plain_ranks.__file__, name, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def data_files(path: str) -> dict[str, bytes]:
    """The content of data files by rank and number."""
    found = pathlib.Path(path).glob("*.distcp")
    return {re.sub(r"^.{36}", "", file.name): file.read_bytes() for file in found}


def test_processes_without_torch_or_a_group_save_and_always_write_the_same(
    ckpt: str,
) -> None:
    said = scenario("together", ckpt)
    assert [each[0] for each in said] == ["done"] * 4, said
    assert len({save_id for _, (save_id, _, _) in said}) == 1
    assert data_files(ckpt) == data_files(ckpt + "-again")
    # Each rank's rows, one of 4 plain arrays each, "all" once, and the two values once.
    assert sum(items for _, (_, _, items) in said) == 4 + 4 + 1 + 2
    loaded: dict[str, Any] = {"w": torch.zeros(8, 4), "all": torch.zeros(500, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=ckpt, no_dist=True)
    assert torch.equal(loaded["w"], torch.arange(32.0).reshape(8, 4))
    assert torch.equal(loaded["all"], torch.arange(500))


def test_without_waiting_the_last_rank_publishes_and_until_then_the_missing_ones_are_named(
    ckpt: str,
) -> None:
    steps = scenario("one_by_one", ckpt)
    assert [done for done, _ in steps] == [["done", False]] * 3 + [["done", True]]
    assert [[each[0] for each in found] for _, found in steps] == [
        [[0, 1, 3]], [[1, 3]], [[1]], [],
    ]  # fmt: skip
    missing, complete, alive, failure, text = steps[1][1][0]
    assert (complete, alive, failure) == (False, None, "")
    assert mentions(text, "2 of its 4 ranks", "ranks 1 and 3")


def test_a_killed_rank_that_is_started_again_completes_the_checkpoint_of_those_who_wait(
    ckpt: str,
) -> None:
    first, *others = scenario("killed", ckpt)
    assert first == ["killed", signal.SIGKILL]
    assert others == [["done", True]] * 4


def test_duplicate_ranks_change_nothing(ckpt: str) -> None:
    assert scenario("twins", ckpt) == [["done", True]] * 7


def test_contradicting_states_are_refused_on_every_rank_that_waits(ckpt: str) -> None:
    told = scenario("refused", ckpt)
    expected = {
        "differing replicas": ("MismatchError", "key p"),
        "an object of one rank": ("MismatchError", "rank 1: the keys of the objects"),
        "a state that can't be pickled": ("InvalidArgumentError", "key f"),
        "an unknown holder": ("InvalidArgumentError", "rank 9 is declared to hold"),
        "an array of one rank": ("CoverageError", "(key b)"),
        "another world": ("MismatchError", "world_size"),
    }
    assert told.keys() == expected.keys()
    for name, (kind, text) in expected.items():
        for raised, said in told[name]:
            assert raised == kind and text in said, f"{name}: {told[name]}"


def test_any_process_can_publish_once_all_ranks_have_written(ckpt: str) -> None:
    complete, same, opening, abandoning = scenario("completed", ckpt)
    assert complete and same
    assert mentions(opening, "all of its 2 ranks", "`tilestone publish`")
    assert "all ranks of the save" in abandoning
    with pytest.raises(tilestone.NotFoundError, match="no unpublished save"):
        tilestone.publish(ckpt)


def test_an_abandoned_save_has_ended_and_gc_removes_it(ckpt: str, caplog) -> None:
    assert tilestone.unpublished(ckpt) == []  # no directory yet
    plain_ranks.save(ckpt, 0, 2, wait=False)
    assert tilestone.gc(ckpt) == []
    assert "unpublished save" in caplog.text and "rank 1" in caplog.text
    with pytest.raises(tilestone.RankFailedError, match=r"1 of its 2 ranks has not .*rank 1"):
        tilestone.publish(ckpt)
    with pytest.raises(tilestone.NotFoundError, match=r"no checkpoint .*its 2 ranks has not"):
        tilestone.open(ckpt)
    with pytest.raises(tilestone.NotFoundError, match="no unpublished save 123"):
        tilestone.abandon(ckpt, "123", period=0)
    (found,) = tilestone.unpublished(ckpt, watch=0.01)
    assert (found.world_size, found.format, found.dialect) == (2, "torch_dist", "pytorch")
    assert tilestone.abandon(ckpt, found.save_id, period=0) == found.save_id
    assert tilestone.unpublished(ckpt)[0].abandoned
    with pytest.raises(tilestone.RankFailedError, match="was abandoned"):
        plain_ranks.save(ckpt, 1, 2)
    assert tilestone.gc(ckpt, delete=True) != []
    assert tilestone.unpublished(ckpt) == []


def _files(rank: Any = 0, world_size: Any = 1, token: Any = "a run of it", **given: Any) -> Any:
    return {"by_files": tilestone.ByFiles(rank, world_size, token, **given)}


FILES = _files()
# (options, error, part of the message)
MISUSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"by_files": "files"}, tilestone.InvalidArgumentError, "by_files must be a tilestone.ByFiles"),
    (_files(None), tilestone.InvalidArgumentError, "needs by_files.rank"),
    (_files(world_size=None), tilestone.InvalidArgumentError, "needs by_files.world_size"),
    (_files(token=None), tilestone.InvalidArgumentError, "needs by_files.token"),
    (_files(token="short"), tilestone.InvalidArgumentError, "token has 5 bytes"),
    (
        _files(1), tilestone.InvalidArgumentError,
        "by_files.rank is 1, by_files.world_size is 1",
    ),
    (FILES | {"group": object()}, tilestone.InvalidArgumentError, "group and by_files exclude"),
    (
        FILES | {"group": tilestone.solo()}, tilestone.InvalidArgumentError,
        "group and by_files exclude each other",
    ),
    (FILES | {"overwrite": True}, tilestone.InvalidArgumentError, "overwrite must be false"),
    (FILES | {"timeout": -1}, tilestone.InvalidArgumentError, "timeout is -1"),
    (
        FILES | {"checks": tilestone.Checks(access=True)}, tilestone.UnsupportedError,
        "checks.access needs a communicator",
    ),
    (FILES | {"format": "zarr"}, tilestone.UnsupportedError, "format torch_dist"),
    (
        _files(torch_rank_local=True) | {"dialect": "megatron"},
        tilestone.UnsupportedError,
        "does not support the dialect megatron",
    ),
    (
        FILES | {"dialect": "megatron_shards"},
        tilestone.UnsupportedError,
        "another program writes a part",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), MISUSE, ids=[case[2] for case in MISUSE])
def test_invalid_arguments_are_named_and_no_files_are_made(
    options: dict[str, Any], kind: type[Exception], text: str, ckpt: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        tilestone.save({"x": numpy.arange(3)}, ckpt, **options)
    assert not pathlib.Path(ckpt).exists()


def test_a_signal_ends_a_rank_that_waits_for_others(ckpt: str) -> None:
    code = f"""
        import sys, threading, os, signal
        sys.path.insert(0, {str(pathlib.Path(plain_ranks.__file__).parent)!r})
        import plain_ranks, tilestone
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def stop():
            while not any(each.missing == [1] for each in tilestone.unpublished(sys.argv[1])):
                threading.Event().wait(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        os.makedirs(sys.argv[1])
        threading.Thread(target=stop).start()
        try:
            plain_ranks.save(sys.argv[1], 0, 2)
        except KeyboardInterrupt:
            print("stopped")
    """
    command = [sys.executable, "-c", "import textwrap\nexec(textwrap.dedent('''" + code + "'''))"]
    done = subprocess.run([*command, ckpt], capture_output=True, text=True, timeout=300)
    assert done.stdout == "stopped\n", done.stderr
    plain_ranks.save(ckpt, 1, 2)  # the files of rank 0 are used
    plain_ranks.expect_state(ckpt, 2)


def save_replicas(rank: int, world: int, path: str) -> list[int]:
    """Bytes that this rank wrote. Each rank loads alone, while the other does something else."""
    mesh = init_device_mesh("cpu", (world,))
    values = [torch.arange(5000.0) + i for i in range(4)]
    state = {f"r{i}": DTensor.from_local(v, mesh, [Replicate()]) for i, v in enumerate(values)}
    own = torch.arange(8.0).reshape(2, 4) + 8 * rank
    state["s"] = DTensor.from_local(own, mesh, [Shard(0)])
    state["plain"] = torch.arange(3)
    files = tilestone.ByFiles(rank, world, "of gloo ranks", wait=False)
    written = 0
    for turn in (1, 0):  # one after another: a collective would wait for the other rank
        if turn == rank:
            result = tilestone.save(state, path, by_files=files)
            assert result.published == (turn == 0)
            written = result.bytes_written
        dist.barrier()
    for turn in (0, 1):
        if turn == rank:
            empty = {key: torch.zeros_like(value) for key, value in state.items()}
            alone = tilestone.load(empty, path, group=tilestone.solo())
            for key, value in state.items():
                found = alone[key]
                assert torch.equal(
                    found.to_local() if isinstance(found, DTensor) else found,
                    value.to_local() if isinstance(value, DTensor) else value,
                ), key
            with tilestone.open(path) as opened:
                assert opened.world_size == world
        dist.barrier()
    stock = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(stock, checkpoint_id=path)
    for i, value in enumerate(values):
        assert torch.equal(stock[f"r{i}"].to_local(), value)
    assert torch.equal(stock["s"].to_local(), own)
    return [written]


def test_replicas_of_dtensors_are_written_once_and_ranks_with_a_group_need_no_collective(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    each = [written for (written,) in worlds[2].run(save_replicas, ckpt)]
    assert min(each) >= 2 * 20000  # two of the four replicas
    assert sum(each) < 5 * 20000


@pytest.mark.parametrize(
    "options",
    [{}, _files(token="a run of this test")],
)
def test_none_as_a_state_is_refused_with_its_type(ckpt: str, options: dict[str, Any]) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="dict, not NoneType"):
        tilestone.save(None, ckpt, **options)  # type: ignore[arg-type]
