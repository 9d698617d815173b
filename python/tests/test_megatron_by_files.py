"""Megatron-Core's states are saved without a communicator, and stock Megatron-Core loads them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import megatron_by_files as job
import pytest
import test_megatron_files as files
import torch

import tilestone
from messages import mentions
from ranks import Worlds
from tilestone import megatron


def _files(rank: int = 0, world_size: int = 1, **given: Any) -> dict[str, Any]:
    token = given.pop("token", "a run of it")
    return {"by_files": tilestone.ByFiles(rank, world_size, token, **given)}


FILES = _files()



def scenario(name: str, path: str) -> Any:
    """Runs a scenario of megatron_by_files. Returns its result."""
    command = [sys.executable, job.__file__, name, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _load_stock(rank: int, world: int, ckpt: str, sizes: tuple[int, int]) -> None:
    stock = files._megatron()
    template = job.state(rank, *sizes, stock.mapping, False)
    del template["rng"]  # its grid is of another layout
    job.check(stock.load(template, ckpt), rank, *sizes)
    assert stock.load_content_metadata(ckpt) == {"format": 2}


def _load_ours(rank: int, world: int, ckpt: str, sizes: tuple[int, int]) -> None:
    template = job.state(rank, *sizes, megatron.mapping, False)
    del template["rng"]
    job.check(megatron.load(template, ckpt), rank, *sizes)


def test_saves_without_a_process_group_load_in_stock_and_in_other_layouts(
    worlds: Worlds, ckpt: str
) -> None:
    assert scenario("together", ckpt) == [["done", None]] * 4
    names = {file.name for file in pathlib.Path(ckpt).iterdir() if file.suffix != ".distcp"}
    assert names == {".metadata", ".tilestone", "common.pt", "metadata.json"}
    assert tilestone.unpublished(ckpt) == [] and tilestone.gc(ckpt) == []
    with tilestone.open(ckpt) as opened:
        assert opened.verify().ok and opened.dialect == "megatron"
        # Each one exists once, and none lacks a main replica.
        assert len([key for key in opened.keys() if key.startswith("layers.extra")]) == 4
    worlds[4].run(_load_stock, ckpt, (2, 2))
    worlds[2].run(_load_stock, ckpt, (1, 2))
    worlds[4].run(_load_ours, ckpt, (4, 1))
    worlds[1].run(_load_ours, ckpt, (1, 1))


def test_every_kind_of_entity_goes_to_stock(worlds: Worlds, ckpt: str) -> None:
    for rank in (1, 0):  # an existing process group is not used
        state = files._state(rank, 2, True)
        result = megatron.save(state, ckpt, **_files(rank, 2, wait=False))
        assert result is not None and result.published == (rank == 0)
    worlds[3].run(files._load_stock, ckpt)


def test_one_of_two_runs_is_published_and_the_files_of_the_other_are_leftovers(
    worlds: Worlds, ckpt: str
) -> None:
    said, left, after = scenario("race", ckpt)  # by rank; the two runs alternate
    lost = [number for number, each in enumerate(said) if each != ["done", None]]
    # Of one run the rank that would publish it, and whoever began after the other was published.
    assert lost and len({number % 2 for number in lost}) == 1, said
    assert {said[number][0] for number in lost} == {"AlreadyExistsError"}, said
    assert left <= 1 and after == 0
    worlds[1].run(_load_ours, ckpt, (1, 1))


def test_a_save_whose_publisher_died_is_published_by_the_program(
    worlds: Worlds, ckpt: str
) -> None:
    save_id, opening, second = scenario("dead_publisher", ckpt)
    assert "not published yet" in opening and "tilestone publish" in opening
    assert second[0] == "AlreadyExistsError" and "is being published" in second[1]
    assert not files._megatron().check_is_distributed_checkpoint(ckpt)
    done = subprocess.run(
        [sys.executable, "-m", "tilestone", "publish", ckpt], capture_output=True, text=True
    )
    assert done.returncode == 0 and save_id in done.stdout, done.stderr
    assert tilestone.unpublished(ckpt) == []
    worlds[2].run(_load_stock, ckpt, (2, 1))


def _of_one(**options: Any) -> None:
    megatron.save({"x": megatron.ShardedTensor.from_rank_offsets("x", torch.zeros(3))}, **options)


class _OwnStrategy:
    backend, version = "torch_dist", 1

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        raise AssertionError("not called")


# (options, part of the message)
MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"by_files": "files"}, "by_files must be a tilestone.ByFiles"),
    ({"by_files": tilestone.ByFiles(0, None, "a run of it")}, "needs by_files.world_size"),
    (_files(torch_rank_local=True), "does not support the dialect megatron"),
    (FILES | {"process_group": object()}, "process_group and by_files exclude each other"),
    (FILES | {"sharded_strategy": ("zarr", 1)}, "data files have fixed names"),
    (FILES | {"sharded_strategy": _OwnStrategy()}, "_OwnStrategy needs a communicator"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text"), MISUSE, ids=[case[1] for case in MISUSE])
def test_options_that_need_a_communicator_are_named_and_nothing_is_made(
    options: dict[str, Any], text: str, ckpt: str
) -> None:
    with pytest.raises(megatron.CheckpointingException, match=re.escape(text)):
        _of_one(checkpoint_dir=ckpt, **options)
    assert not os.path.exists(ckpt)


def test_an_existing_checkpoint_is_not_replaced_and_common_state_is_compared(ckpt: str) -> None:
    _of_one(checkpoint_dir=ckpt, **FILES)
    with pytest.raises(megatron.CheckpointingException, match="can't replace a checkpoint"):
        _of_one(checkpoint_dir=ckpt, **_files(token="another run"))
    first, second = (_files(rank, 2, wait=False)["by_files"] for rank in (0, 1))
    for preprocess, differs in ((lambda common: {**common, "own": 0}, False), (None, True)):
        at = f"{ckpt}-{differs}"
        given: dict[str, Any] = {
            "preprocess_common_before_consistancy_check": preprocess, "common_differs": "error",
        }  # fmt: skip
        megatron.save({"own": 1}, at, by_files=second, **given)
        if differs:
            with pytest.raises(megatron.CheckpointingException, match="common state of rank 1"):
                megatron.save({"own": 0}, at, by_files=first, **given)
        else:
            megatron.save({"own": 0}, at, by_files=first, **given)
            assert megatron.load_common_state_dict(at) == {"own": 0}
