"""Wrapped entities: arguments, factories, objects, values that are not saved."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy
import pytest
from thread_ranks import run_ranks

import tilestone
from tilestone import LocalNonpersistent, ShardedObject, ShardedTensor, ShardedTensorFactory


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([(-1, 0, 2)], "-1"),
        ([(0, 2, 2)], "2"),
        ([(0, -1, 2)], "-1"),
        ([(0, 0, 0)], "0"),
        ([(0, 0, 2), (0, 1, 2)], "0"),
        ([(2, 0, 2)], "2"),
    ],
    ids=["axis", "rank", "negative rank", "fragments", "axis twice", "axis out of range"],
)
def test_bad_rank_offsets_are_refused_where_they_are_given(offsets: list, said: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        ShardedTensor.from_rank_offsets("layer.weight", numpy.zeros((2, 3)), *offsets)
    assert raised.value.key == "layer.weight"
    assert said in str(raised.value)


_MESH = tilestone.geometry.Mesh((2,), [0, 1])
_SHARD = tilestone.geometry.Shard(0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda data: ShardedTensor.from_rank_offsets("w", data, 5), "rank offset"),
        (lambda data: ShardedTensor.from_rank_offsets("w", data, (0, 1)), "rank offset"),
        (lambda data: ShardedTensor.from_rank_offsets("w", data, (0, "1", 2)), "rank offset"),
        (
            lambda data: ShardedTensor.from_rank_offsets("w", data, prepend_axis_num=None),
            "prepend_axis_num",
        ),
        (lambda data: ShardedTensor.from_rank_offsets("w", data, holders=3), "holders"),
        (lambda data: ShardedTensor.from_rank_offsets("w", data, holders=[1 << 80]), "holders"),
        (
            lambda data: ShardedTensor.from_rank_offsets_flat("w", data, 4, flattened_range=(0, 4)),
            "local_shape",
        ),
        (lambda data: ShardedTensor.from_box("w", data, 4, [(0, 4)]), "global_shape"),
        (lambda data: ShardedTensor.from_box("w", data, (4.0,), [(0, 4)]), "global_shape"),
        (lambda data: ShardedTensor.from_box("w", data, (4,), 4), "box"),
        (lambda data: ShardedTensor.from_placements("w", data, 8, _MESH, [_SHARD], 0), "global_"),
        (lambda data: ShardedTensor.from_placements("w", data, (8,), 2, [_SHARD], 0), "mesh"),
        (lambda data: ShardedTensor.from_placements("w", data, (8,), _MESH, 5, 0), "placement"),
        (lambda data: ShardedTensor.from_placements("w", data, (8,), _MESH, [_SHARD], "0"), "rank"),
        (lambda data: ShardedObject("w", data, 2, (0,)), "global_shape"),
        (lambda data: ShardedObject("w", data, (2,), None), "global_offset"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_with_the_key(make: Any, said: str) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match=said) as raised:
        make(numpy.zeros(4))
    assert raised.value.key == "w"


def test_data_that_is_not_an_array_is_refused() -> None:
    with pytest.raises(ValueError, match="not list"):
        ShardedTensor.from_rank_offsets("w", [1, 2])
    with pytest.raises(ValueError, match="object"):
        ShardedTensor.from_rank_offsets("w", numpy.array([None]))


def test_a_box_and_its_data_must_agree() -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        ShardedTensor.from_box("w", numpy.zeros((2, 3)), (8, 8), ((0, 2), (0, 4)))
    assert raised.value.key == "w"
    with pytest.raises(tilestone.InvalidArgumentError):
        ShardedTensor.from_box("w", numpy.zeros((2, 4)), (8, 8), ((7, 9), (0, 4)))


def test_sharded_tensors_have_their_boxes() -> None:
    grid = ShardedTensor.from_rank_offsets(
        "w", numpy.zeros((2, 3)), (0, 1, 4), (2, 1, 2), prepend_axis_num=1, replica_id=(0, 1)
    )
    assert grid.global_shape == (4, 2, 6)
    assert grid.boxes == [tilestone.geometry.Box((1, 0, 3), (1, 2, 3))]
    assert grid.replica_id == (0, 1) and grid.is_regular_grid
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", numpy.zeros(7), (3, 4), (0, 1, 2), flattened_range=slice(2, 9)
    )
    assert flat.global_shape == (6, 4)
    assert [box.numel for box in flat.boxes] == [2, 4, 1]
    empty = ShardedTensor.from_box("w", numpy.zeros((0, 3)), (4, 3), ((4, 4), (0, 3)))
    assert empty.boxes == []


def test_irregular_boxes_flat_ranges_and_prepended_axes_are_resharded(ckpt: str) -> None:
    whole = numpy.random.default_rng(1).normal(size=(5, 6, 7))

    def save(comm: tilestone.Communicator) -> None:
        cuts = [0, 1, 5, 5, 6]
        low, high = cuts[comm.rank], cuts[comm.rank + 1]
        state = {}
        for layer in range(5):
            box = ((layer, layer + 1), (low, high), (0, 7))
            local = whole[layer, low:high]
            state[f"layer{layer}"] = ShardedTensor.from_box(
                "w", local, whole.shape, box, prepend_axis_num=1
            )
        tilestone.save(state, ckpt, group=comm)

    def load(comm: tilestone.Communicator) -> None:
        begin, end = comm.rank * 42 // comm.size, (comm.rank + 1) * 42 // comm.size
        local = numpy.zeros(end - begin)
        flat = ShardedTensor.from_rank_offsets_flat(
            "w", local, (6, 7), (0, 3, 5), flattened_range=(begin, end), prepend_axis_num=1
        )
        loaded = tilestone.load({"opt": {"flat": flat}}, ckpt, group=comm)
        assert loaded["opt"]["flat"] is local
        numpy.testing.assert_array_equal(local, whole[3].reshape(-1)[begin:end])

    run_ranks(4, save)
    run_ranks(3, load)
    with tilestone.open(ckpt) as opened:
        numpy.testing.assert_array_equal(opened.read("w"), whole)


def test_a_factory_is_built_before_a_save_and_merged_after_a_load(ckpt: str) -> None:
    gate_and_up = numpy.arange(12.0).reshape(4, 3)
    calls = []

    def build(key: str, data: numpy.ndarray, replica_id: tuple, flat: object) -> dict:
        calls.append((key, replica_id, flat))
        halves = numpy.split(data, 2)
        return {
            "gate": ShardedTensor.from_rank_offsets(key, halves[0], (0, 0, 2)),
            "up": ShardedTensor.from_rank_offsets(key, halves[1], (0, 1, 2)),
        }

    def merge(loaded: dict) -> numpy.ndarray:
        return numpy.concatenate([loaded["gate"], loaded["up"]])

    def state(data: numpy.ndarray) -> dict:
        return {"mlp": {"fc1": ShardedTensorFactory("fc1", data, build, merge, replica_id=0)}}

    tilestone.save(state(gate_and_up), ckpt)
    assert calls == [("fc1", (0,), None)]
    loaded = tilestone.load(state(numpy.zeros((4, 3))), ckpt)
    numpy.testing.assert_array_equal(loaded["mlp"]["fc1"], gate_and_up)
    with tilestone.open(ckpt) as opened:
        assert opened.keys() == ["fc1"]
        numpy.testing.assert_array_equal(opened.read("fc1"), gate_and_up)


@pytest.mark.parametrize("step", ["build", "merge"])
def test_an_exception_of_a_factory_names_the_factory_and_the_exception(
    step: str, ckpt: str
) -> None:
    def fail(*_: object) -> object:
        raise RuntimeError("boom")

    def build(key: str, data: numpy.ndarray, *_: object) -> object:
        return ShardedTensor.from_rank_offsets(key, data)

    tilestone.save({"w": ShardedTensor.from_rank_offsets("w", numpy.zeros(2))}, ckpt)
    functions = (fail, fail) if step == "build" else (build, fail)
    factory = ShardedTensorFactory("w", numpy.zeros(2), *functions)
    with pytest.raises(RuntimeError, match="boom") as raised:
        tilestone.load({"w": factory}, ckpt)
    note = f'in the {step} function of factory "w"'
    assert getattr(raised.value, "__notes__", [note]) == [note]  # Python 3.11 has notes


def test_sharded_objects_keep_their_places(ckpt: str) -> None:
    def obj(comm: tilestone.Communicator, data: object) -> ShardedObject:
        return ShardedObject("rng", data, (comm.size,), (comm.rank,))

    def save(comm: tilestone.Communicator) -> None:
        tilestone.save({"a": {"b": obj(comm, ["rank", comm.rank])}}, ckpt, group=comm)

    def load(comm: tilestone.Communicator) -> None:
        assert tilestone.load({"x": obj(comm, None)}, ckpt, group=comm) == {"x": ["rank", comm.rank]}

    run_ranks(3, save)
    run_ranks(3, load)
    with tilestone.open(ckpt) as opened:
        assert opened.keys() == [f"rng/shard_{i}_3" for i in range(3)]


def test_an_object_outside_its_grid_is_refused() -> None:
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        ShardedObject("rng", 1, (2, 2), (0, 2))
    assert raised.value.key == "rng"


def test_nonpersistent_values_are_not_saved_and_given_back(ckpt: str) -> None:
    secret = object()
    tilestone.save({"a": 1, "b": {"c": LocalNonpersistent(secret), "d": 2}}, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened.keys() == ["a", "b.d"]
    loaded = tilestone.load({"a": 0, "b": {"c": LocalNonpersistent(secret), "d": 0}}, ckpt)
    assert loaded == {"a": 1, "b": {"c": secret, "d": 2}}


def test_an_entity_inside_a_tuple_is_refused(ckpt: str) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", numpy.zeros(2))
    with pytest.raises(tilestone.InvalidArgumentError, match="inside a tuple"):
        tilestone.save({"a": (tensor,)}, ckpt)


def test_a_shape_that_differs_is_an_error_unless_the_tensor_allows_it(ckpt: str) -> None:
    tilestone.save({"e": ShardedTensor.from_rank_offsets("e", numpy.ones((5, 2)))}, ckpt)

    def wanted(allow: bool) -> dict:
        tensor = ShardedTensor.from_rank_offsets(
            "e", numpy.full((7, 2), 9.0), allow_shape_mismatch=allow
        )
        return {"e": tensor}

    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.load(wanted(False), ckpt)
    assert raised.value.key == "e"
    assert "[5, 2]" in str(raised.value) and "[7, 2]" in str(raised.value)
    loaded = tilestone.load(wanted(True), ckpt)["e"]
    assert (loaded[:5] == 1).all() and (loaded[5:] == 0).all()


def test_a_dtype_that_differs_is_an_error_unless_a_cast_is_asked_for(ckpt: str) -> None:
    tilestone.save({"x": numpy.array([1.5, 2.5], numpy.float32)}, ckpt)
    target = numpy.zeros(2, numpy.float64)
    with pytest.raises(tilestone.MismatchError, match="float32"):
        tilestone.load({"x": target}, ckpt)
    assert tilestone.load({"x": target}, ckpt, cast=True)["x"].tolist() == [1.5, 2.5]


def test_saving_over_a_checkpoint_needs_overwrite(ckpt: str) -> None:
    tilestone.save({"x": 1}, ckpt)
    with pytest.raises(FileExistsError) as raised:
        tilestone.save({"x": 2}, ckpt)
    assert isinstance(raised.value, tilestone.AlreadyExistsError)
    assert tilestone.load({"x": None}, ckpt) == {"x": 1}
    tilestone.save({"x": 2}, ckpt, overwrite=True)
    assert tilestone.load({"x": None}, ckpt) == {"x": 2}


@pytest.mark.parametrize(
    "wrong", [slice(0, 4, 2), slice(4, 0, -1), slice(None, 4), 5, (0, 4, 2), "04"]
)
def test_a_flattened_range_that_is_no_range_is_refused_with_the_key(wrong: Any) -> None:
    part = numpy.zeros(4)
    for make in (
        lambda: ShardedTensor.from_rank_offsets_flat("w", part, (8,), flattened_range=wrong),
        lambda: ShardedTensor.from_box_flat("w", part, (8,), [(0, 8)], flattened_range=wrong),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match="flattened_range must") as caught:
            make()
        assert caught.value.key == "w"


_PARAM_RULES = tilestone.PlacementRules({"w": _SHARD})


@pytest.mark.parametrize(
    "made",
    [
        ShardedTensor.from_rank_offsets("w", numpy.ones((2, 3)), (0, 0, 2), replica_id=(0, 1)),
        ShardedTensor.from_box("w", numpy.ones((2, 3)), (4, 3), [(0, 2), (0, 3)], holders=[0, 1]),
        ShardedTensor.from_box_flat(
            "w", numpy.ones(4), (4, 3), [(0, 2), (0, 3)], flattened_range=(1, 5)
        ),
        ShardedTensor.from_placements("w", numpy.ones((2, 3)), (4, 3), _MESH, [_SHARD], 1),
        ShardedTensor.from_param(numpy.ones((2, 3)), _MESH, _PARAM_RULES, key="w", rank=1),
    ],
    ids=["rank offsets", "box", "flat", "placements", "param"],
)
def test_a_sharded_tensor_can_be_copied_and_pickled(made: ShardedTensor) -> None:
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert repr(same) == repr(made) and same.boxes == made.boxes
        assert (same.replica_id, same.holders) == (made.replica_id, made.holders)
        assert numpy.array_equal(same.data, made.data) and same.data is not made.data


def test_entities_show_what_they_hold() -> None:
    cell = ShardedObject("rng", {"a": 1}, (2,), (1,))
    assert repr(cell) == "ShardedObject('rng', dict, global_shape=(2,), global_offset=(1,))"
    assert repr(LocalNonpersistent(3)) == "LocalNonpersistent(3)"
