"""Checks between ranks: which ranks hold main replicas, and whether the common states agree."""

from __future__ import annotations

import os
from typing import Any

import numpy
import pytest

import tilestone
from messages import mentions
from ranks import Worlds
from tilestone import _core


def _state(rank: int, replica: int = 0) -> dict[str, Any]:
    rows = numpy.full((1, 4), rank, numpy.float32)
    tensor = tilestone.ShardedTensor.from_rank_offsets
    return {
        "w": tensor("w", rows, (0, rank, 2), replica_id=replica),
        "rng": tilestone.ShardedObject("rng", rank, (2,), (rank,)),
        "args": {"lr": 0.5},
    }


def _raised(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except tilestone.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _checks(rank: int, world: int, ckpt: str) -> list[str]:
    checks = tilestone.Checks(access=True, common_differs="error")
    megatron = {"dialect": "megatron", "checks": checks}
    lacking = _state(rank, replica=rank)
    halves = {**_state(rank), "rng": tilestone.ShardedObject("rng", rank, (3,), (rank,))}
    other = {**_state(rank), "args": {"lr": 0.5 + rank}}
    texts = [_raised(tilestone.save, s, ckpt, **megatron) for s in (lacking, halves, other)]
    assert not os.path.exists(ckpt) or os.listdir(ckpt) == []
    tilestone.save(_state(rank), ckpt, **megatron)
    assert tilestone.load(_state(rank), ckpt, checks=tilestone.Checks(access=True))["rng"] == rank
    texts.append(_raised(tilestone.load, lacking, ckpt, checks=tilestone.Checks(access=True)))
    return texts


def test_every_rank_raises_what_is_wrong_between_ranks(worlds: Worlds, ckpt: str) -> None:
    for texts in worlds[2].run(_checks, ckpt):
        assert mentions(texts[0], "CoverageError", "no main replica", "rank 1")
        assert mentions(texts[1], "CoverageError", "[2]", "object")
        assert mentions(texts[2], "MismatchError", '"args.lr"', "rank 0: 0.5", "rank 1: 1.5")
        assert mentions(texts[3], "CoverageError", "no main replica", "rank 1")


def test_gathered_descriptions_are_checked() -> None:
    def rank(begin: int, main: bool, objects: list[tuple[str, bool]]) -> bytes:
        return _core.encode_access([("w", "bfloat16", (4, 2), (begin, 0), (2, 2), main)], objects)

    first = rank(0, True, [("rng/shard_0_2", True)])
    second = rank(2, True, [("rng/shard_1_2", True)])
    _core.check_access([first, second, rank(2, False, [("rng/shard_1_2", False)])])
    with pytest.raises(tilestone.CoverageError, match="main replicas of ranks 1 and 2"):
        _core.check_access([first, second, second])
    with pytest.raises(tilestone.CoverageError, match="the cell .1. of an object"):
        _core.check_access([first, rank(2, True, [])])
    with pytest.raises(tilestone.InvalidArgumentError, match="w"):
        rank(3, True, [])
    with pytest.raises(tilestone.InvalidArgumentError):
        _core.encode_access([("w", "float17", (1,), (0,), (1,), True)], [])
    with pytest.raises(tilestone.CorruptError):
        _core.check_access([b"abc"])
