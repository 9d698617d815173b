"""Checks of entities between ranks, compared with those of the installed Megatron-Core."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import tilestone
import torch
from flat_slices import flat_slice
from messages import mentions
from ranks import Raised, Worlds
from tilestone import megatron
from tilestone.megatron import core, mapping, state_dict_utils, validation
from tilestone.megatron.core import CheckpointingException
from tilestone.megatron.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from tilestone.megatron.strategies.base import StrategyAction
from tilestone.megatron.validation import StrictHandling

ONES = torch.ones(2, 3)


def _split(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Random boxes that cover a tensor exactly, sometimes changed so that they don't."""
    boxes: list[tuple[Any, Any]] = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 6)):
        index, axis = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offset, size = (list(each) for each in boxes[index])
        if size[axis] > 1:
            cut = rng.randint(1, size[axis] - 1)
            behind = (offset[:axis] + [offset[axis] + cut] + offset[axis + 1 :], size[:])
            behind[1][axis] -= cut
            size[axis] = cut
            boxes[index] = (tuple(offset), tuple(size))
            boxes.append((tuple(behind[0]), tuple(behind[1])))
    index, change = rng.randrange(len(boxes)), rng.random()
    if change < 0.2:
        boxes.append(boxes[index])
    elif change < 0.4 and len(boxes) > 1:
        boxes.pop(index)
    elif change < 0.6:
        offset, size = boxes[index]
        boxes[index] = (offset, (max(1, size[0] - 1), *size[1:]))
    return boxes


def test_random_boxes_pass_exactly_if_each_element_has_one_main_replica() -> None:
    outcomes = set()
    for seed in range(1500):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        counts = np.zeros(shape, dtype=int)
        ranks: list[list[Any]] = [[], [], []]
        for offset, size in _split(rng, shape):
            part = ShardedTensor("w", None, torch.float32, size, shape, offset, None)
            ranks[rng.randrange(3)].append(part)
            counts[part.global_slice()] += 1
            ranks[rng.randrange(3)].append(dataclasses.replace(part, replica_id=(0, 1)))
        outcomes.add(bool((counts == 1).all()))
        if (counts == 1).all():
            validation.validate_sharding_integrity(ranks)
        else:
            with pytest.raises(tilestone.CoverageError, match="Invalid access pattern"):
                validation.validate_sharding_integrity(ranks)
    assert outcomes == {True, False}


def _grid(sizes: tuple[int, int], *places: int, **rest: Any) -> list[list[Any]]:
    return [
        [ShardedTensor.from_rank_offsets("w", torch.ones(sizes), (0, place, 4), **rest)]
        for place in places
    ]


def _objects(*places: int) -> list[list[Any]]:
    return [[ShardedObject("o", rank, (3,), (place,))] for rank, place in enumerate(places)]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (_grid((2, 3), 0, 1, 2, 3), None),
        (_grid((0, 3), 0, 1, 2, 3), None),
        (_grid((2, 3), 0, 1, 3), "box [4:6, 0:3] of a tensor of shape [8, 3] is held by no rank"),
        (_grid((2, 3), 0, 1, 2, 3, 1), "box [2:4, 0:3] is held by the main replicas of ranks 1 and 4"),
        (_grid((2, 3), 0, 1) + _grid((1, 6), 2, 3), "rank 0 has float32 [8, 3], rank 2 has float32 [4, 6]"),
        ([[flat_slice(0, 4, (2, 3))], [flat_slice(4, 4, (2, 3)), flat_slice(4, 6, (2, 3))]], None),
        ([[flat_slice(0, 4, (2, 3))], [flat_slice(3, 6, (2, 3))]], "box [1:2, 0:1] is held by the main replicas of ranks 0 and 1"),
        ([[flat_slice(0, 4, (2, 3))], [flat_slice(5, 6, (2, 3))]], "box [1:2, 1:2] of a tensor of shape [2, 3] is held by no rank"),
        (_objects(0, 1, 2), None),
        (_objects(0, 2), "the cell [1] of an object whose grid is [3] is held by no rank"),
        (_objects(0, 1, 2, 1), "Duplicate ShardedObject keys: o/shard_1_3"),
        (_objects(0, 1, 3), "rank 2 holds the cell [3]"),
        (
            [[ShardedTensor("w", None, torch.int8, (2,), (3,), (2,), None)]],
            "Invalid access pattern: the entities of rank 0: ",
        ),
        ([[ShardedObject("w", 0, (1,), (0,))], *_grid((2, 3), 0, 1, 2, 3)], "a tensor and for an object"),
    ],
)
def test_errors_between_ranks_are_named(ranks: Any, text: str | None) -> None:
    if text is None:
        validation.validate_sharding_integrity(ranks)
        return
    with pytest.raises(CheckpointingException) as raised:
        validation.validate_sharding_integrity(ranks)
    assert text in str(raised.value) and raised.value.key in ("w", "o", "o/shard_1_3")


def test_boxes_of_many_ranks_are_checked_without_comparing_each_with_each() -> None:
    places = itertools.product(range(60), range(40))
    ranks = [
        [
            ShardedTensor("w", None, torch.int8, (2, 3), (120, 120), (2 * a, 3 * b), (60, 40)),
        ]
        for a, b in places
    ]
    validation.validate_sharding_integrity(ranks)


def test_strict_modes_are_megatron_cores(stock: Any) -> None:
    theirs = stock.validation.StrictHandling
    assert [(m.name, m.value) for m in StrictHandling] == [(m.name, m.value) for m in theirs]
    for mode, other in zip(StrictHandling, theirs, strict=True):
        for name in (
            "requires_explicit_ckpt_mismatch_check",
            "requires_global_app_metadata",
            "requires_returning_mismatch_keys",
        ):
            assert getattr(StrictHandling, name)(mode) == getattr(theirs, name)(other)
        assert validation.parse_strict_flag(mode.value) is mode
        assert validation.parse_strict_flag(mode) is mode
        assert validation.parse_strict_flag(other) is mode
    with pytest.raises(ValueError, match="Invalid strict flag"):
        validation.parse_strict_flag("strictly")


@pytest.mark.parametrize("mode", StrictHandling)
def test_keys_that_differ_from_the_checkpoints_are_handled_as_in_megatron_core(
    stock: Any, mode: StrictHandling, caplog: pytest.LogCaptureFixture
) -> None:
    def call(m: Any, v: Any) -> Any:
        asked: Any = {key: m.ShardedObject(key, 1, (1,), (0,)) for key in "ab"}
        asked["b"] = [asked["b"]]
        stored = {key: m.ShardedObject(key, None, (1,), (0,)) for key in ("a", "c", "d")}
        others = [m.ShardedObject("d", None, (1,), (0,))]
        caplog.clear()
        try:
            by_all = [list(asked.values())[:1], others]
            left, missing, unexpected = v.validate_integrity_and_strict_load(
                asked, v.StrictHandling(mode.value), False, None, by_all, stored
            )
        except Exception as error:
            return sorted(word for word in ("Missing keys", "'c'", "'b'") if word in str(error))
        told = [word for word in ("Missing keys", "'c'", "'b'", "'d'") if word in caplog.text]
        return sorted(left), missing, unexpected, told

    assert call(mapping, validation) == call(stock.mapping, stock.validation)


def test_a_checkpoints_strategies_are_those_that_it_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strategy:
        can_handle_sharded_objects = False

        def __init__(self, *name: Any) -> None:
            self.name = name

        def check_backend_compatibility(self, loaded: str) -> None:
            assert loaded == self.name[1]

        def check_version_compatibility(self, loaded: int) -> None:
            assert loaded == self.name[2]

    monkeypatch.setattr(validation, "get_default_strategy", Strategy)
    verify = validation.verify_checkpoint_and_load_strategy
    with pytest.raises(CheckpointingException, match="does not exist"):
        verify(tmp_path / "none")
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        verify(tmp_path)
    core.save_config(core.CheckpointingConfig("zarr", 3), tmp_path)
    sharded, common = verify(tmp_path, None, ("torch", 1))
    assert sharded.name == (StrategyAction.LOAD_SHARDED, "zarr", 3)
    assert common.name == (StrategyAction.LOAD_COMMON, "torch", 1)
    own = Strategy(0, "zarr", 3)
    assert verify(str(tmp_path), own)[0] is own
    with pytest.raises(CheckpointingException, match="ShardedObjects"):
        validation.validate_sharded_objects_handling(own, own)


def _rank_state(rank: int, world: int) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world)),
        "o": [ShardedObject("o", rank, (world,), (rank,)), mapping.LocalNonpersistentObject(rank)],
        "step": 5,
        "lr": torch.tensor([0.5, float("nan")]),
    }


def _preprocess(rank: int, world: int) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    validation.logger.addHandler(handler)
    sent = []
    broadcast = torch.distributed.broadcast_object_list

    def counted(objects: Any, **rest: Any) -> None:
        sent.append(objects)
        broadcast(objects, **rest)

    torch.distributed.broadcast_object_list = counted
    try:
        state = _rank_state(rank, world)
        sharded, common = state_dict_utils.save_preprocess(state)
        assert sorted(sharded) == ["o", "w"] and sorted(common) == ["lr", "step"]
        assert isinstance(state["o"][1], mapping.LocalNonpersistentObject)
        assert not sent and not logged  # equal (NaN included), so only hashes are sent
        state |= {"step": rank, "content_metadata": {"dp_cp_group": print, "v": 1}}
        state["f"] = ShardedTensorFactory("f", torch.ones(1), lambda *a: {"in": rank}, torch.cat)
        common = state_dict_utils.save_preprocess(state)[1]
        assert common["content_metadata"] == {"v": 1} and len(sent) == 1
        assert "dp_cp_group" in state["content_metadata"]
        expected = (
            f"Rank {rank} common state dict differs from rank 0 common state dict. "
            f"Keys only on rank 0: [], Keys only on {rank}: [], Mismatched keys: "
        )
        if rank == 0:
            assert logged == []
        else:
            assert len(logged) == 1 and logged[0].startswith(expected)
            assert "(('step',), <class 'int'>, <class 'int'>)" in logged[0]
        logged.clear()
        state_dict_utils.save_preprocess(state, True, lambda common: common.clear() or common)
        assert logged == [] and "step" in state
        unpicklable = _rank_state(rank, world) | {"step": lambda: rank}
        with pytest.raises(CheckpointingException, match="rank 0 can't pickle it"):
            state_dict_utils.save_preprocess(unpicklable)
    finally:
        torch.distributed.broadcast_object_list = broadcast
        validation.logger.removeHandler(handler)


def _invalid(rank: int, world: int, folder: str) -> None:
    _preprocess(rank, world)
    bad = ShardedTensor.from_rank_offsets("b", torch.ones(2), (0, rank, world))
    bad.replica_id = 1.5 if rank == 1 else 0  # type: ignore[assignment]
    with pytest.raises(tilestone.InvalidArgumentError, match="replica_id must hold whole") as raised:
        megatron.save({"b": bad}, folder)
    assert (raised.value.key, raised.value.rank) == ("b", 1)
    with pytest.raises(tilestone.MismatchError, match="the same validate_access_integrity"):
        megatron.save({}, folder, validate_access_integrity=rank == 0)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, min(rank, 1), world))}
    state_dict_utils.save_preprocess(state)


def test_ranks_compare_common_states_by_hash_and_all_raise_what_is_wrong_between_them(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    results = worlds[3].collect(_invalid, str(tmp_path / "none"))
    for result in results:
        assert isinstance(result, Raised), result
        assert result.kind == "CoverageError", result.trace
        assert result.text == results[0].text
        assert mentions(result.text, "[2:4]", "main replicas", "ranks 1 and 2")


def test_a_template_is_flattened_without_empty_slices_and_is_not_changed() -> None:
    factory = ShardedTensorFactory("f", ONES, lambda *a: {"built": flat_slice(0, 1, (1,))}, torch.cat)
    state = {
        "x": [flat_slice(2, 2, (2, 3)), flat_slice(0, 6, (2, 3)), factory],
        "n": mapping.LocalNonpersistentObject([1]),
    }
    template, local, factories = state_dict_utils.load_preprocess(state)
    assert [type(leaf).__name__ for leaf in template["x"]] == ["ShardedTensor", "dict"]
    assert local == {"n": [1]} and list(factories["x"]) == [1]
    assert factories["x"][1].data is None and factories["x"][1].merge_fn is torch.cat
    assert len(state["x"]) == 3 and state["x"][2] is factory and factory.data is ONES
