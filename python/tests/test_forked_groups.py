"""Process groups inherited by a forked child: the child refuses them, the parent can use them."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from children import in_child

import tilestone
from tilestone._torch.comm import TorchCommunicator


def _refused(call: Any) -> None:
    start = time.monotonic()
    with pytest.raises(tilestone.UnsupportedError, match="before this process was forked.*solo"):
        call()
    assert time.monotonic() - start < 5


def fork_and_use(rank: int, world: int, folder: str, used: bool) -> None:
    base = pathlib.Path(folder)
    state = {"a": torch.ones(4)}
    tilestone.save(state, base / "stored")
    # A group that the parent has not used yet is inherited too.
    group = dist.new_group(list(range(world))) if not used else dist.group.WORLD
    comm = TorchCommunicator(group) if used else None

    def work() -> None:
        _refused(lambda: tilestone.save(state, base / "never", group=group))
        _refused(lambda: tilestone.load(state, base / "stored", group=group))
        _refused(lambda: tilestone.save(state, base / "never"))
        if comm is not None:
            _refused(lambda: tilestone.save(state, base / "never", group=comm))
        alone: Any = {"group": tilestone.solo()}
        tilestone.save(state, base / f"child{rank}", **alone)
        assert tilestone.load({"a": torch.zeros(4)}, base / f"child{rank}", **alone)["a"].sum() == 4

    assert in_child(work, 30) == 0
    assert not (base / "never").exists()
    tilestone.save(state, base / "after", group=group)
    assert tilestone.load({"a": torch.zeros(4)}, base / "after", group=group)["a"].sum() == 4


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_child_is_refused_its_parents_group_which_still_works(
    worlds: ranks.Worlds, world: int, used: bool, tmp_path: pathlib.Path
) -> None:
    worlds[world].run(fork_and_use, str(tmp_path), used)
