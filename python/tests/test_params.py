"""Parameters whose own placements differ from those in the checkpoint, and rules by name."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy
import pytest
from thread_ranks import run_ranks

import tilestone
from tilestone import InvalidArgumentError, PlacementRules, ShardedTensor
from tilestone.geometry import Mesh, Partial, Replicate, Shard, StridedShard, merge_shardings

NAMES = ["edp", "ep"]


class Wrapped:
    """Like a DTensor: this rank's part of a tensor that is sharded over a mesh."""

    def __init__(self, whole: numpy.ndarray, mesh: Mesh, placements: list, rank: int) -> None:
        self.shape, self.device_mesh, self.placements = whole.shape, mesh, placements
        held = tilestone.geometry.local_boxes(whole.shape, mesh, mesh.coordinate(rank), placements)
        self.local = whole[held.boxes[0].slices].copy()

    def to_local(self) -> numpy.ndarray:
        return self.local

    def full_tensor(self) -> numpy.ndarray:
        raise AssertionError("a checkpoint gathers nothing")


def experts_of(rank: int, edp: int, ep: int, whole: numpy.ndarray) -> tuple[Mesh, Wrapped]:
    """The mesh of the checkpoint, and a rank's experts, sharded over its expert-data ranks."""
    mesh = Mesh((edp, ep), names=NAMES)
    peers = [mesh.rank_at((i, mesh.coordinate(rank)[1])) for i in range(edp)]
    own = numpy.split(whole, ep)[mesh.coordinate(rank)[1]]
    return mesh, Wrapped(own, Mesh((edp,), peers), [Shard(0)], rank)


WHOLE = numpy.random.default_rng(5).normal(size=(12, 3, 2))
RULES = PlacementRules({"experts": {"ep": Shard(0)}})


def test_experts_move_between_layouts_with_uneven_and_empty_local_shards(
    ckpt: str,
) -> None:
    def state(rank: int, layout: tuple[int, int], whole: numpy.ndarray) -> dict:
        mesh, wrapped = experts_of(rank, *layout, whole)
        router = ShardedTensor.from_param(whole[0] + 1, mesh, RULES, rank=rank)
        return {
            "layer": {
                "experts": {"w1": ShardedTensor.from_param(wrapped, mesh, RULES, rank=rank)},
                "router": router,
            }
        }

    def save(comm: tilestone.Communicator) -> None:
        given = state(comm.rank, (3, 2), WHOLE)
        tilestone.save(given, ckpt, group=comm, checks=tilestone.Checks(access=True))

    def load(comm: tilestone.Communicator, layout: tuple[int, int]) -> None:
        wanted = state(comm.rank, layout, numpy.zeros_like(WHOLE))
        checks = tilestone.Checks(access=True)
        loaded = tilestone.load(wanted, ckpt, group=comm, checks=checks)["layer"]
        expected = experts_of(comm.rank, *layout, WHOLE)[1]
        assert isinstance(loaded["experts"]["w1"], Wrapped)
        numpy.testing.assert_array_equal(loaded["experts"]["w1"].local, expected.local)
        numpy.testing.assert_array_equal(loaded["router"], WHOLE[0] + 1)

    run_ranks(6, save)
    with tilestone.open(ckpt) as opened:
        assert opened.keys() == ["layer.experts.w1", "layer.router"]
        numpy.testing.assert_array_equal(opened.read("layer.experts.w1"), WHOLE)
    # 12 experts over 5 ranks: 3, 3, 3, 3, 0. Over 4 expert-parallel ranks and 2 others: 2 and 1.
    for layout in ((3, 2), (5, 1), (1, 4), (2, 4), (1, 1)):
        run_ranks(layout[0] * layout[1], lambda comm, at=layout: load(comm, at))


def test_a_name_that_no_rule_fits_is_said_once_where_other_ranks_count_as_copies(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    def save(comm: tilestone.Communicator, rules: PlacementRules) -> None:
        mesh, wrapped = experts_of(comm.rank, 1, 2, WHOLE)
        state = {
            name: ShardedTensor.from_param(wrapped, mesh, rules, rank=comm.rank)
            for name in ("expertz.w1", "expertz.w2")
        }
        tilestone.save(state, ckpt, group=comm, overwrite=True)

    run_ranks(2, lambda comm: save(comm, PlacementRules({"experts": {"ep": Shard(0)}})))
    said = [record.getMessage() for record in caplog.records]
    assert said and all("expertz.w1: no rule fits this name" in each for each in said)
    caplog.clear()
    run_ranks(2, lambda comm: save(comm, PlacementRules({"**": Replicate})))
    assert not caplog.records


def test_a_given_key_replaces_the_path_and_selects_the_rule(ckpt: str) -> None:
    def save(comm: tilestone.Communicator) -> None:
        mesh = Mesh((2,), names=["ep"])
        rows = numpy.full((2, 2), float(comm.rank))
        tensors = {
            "a": ShardedTensor.from_param(rows, mesh, RULES, key="x.experts.w", rank=comm.rank),
            "b": ShardedTensor.from_param(rows * 0, mesh, RULES, rank=comm.rank),
        }
        assert tensors["a"].key == "x.experts.w" and tensors["a"].global_shape == (4, 2)
        with pytest.raises(InvalidArgumentError, match="only known within a state"):
            _ = tensors["b"].global_shape
        tilestone.save({"tree": [tensors]}, ckpt, group=comm)

    run_ranks(2, save)
    with tilestone.open(ckpt) as opened:
        assert opened.keys() == ["tree.0.b", "x.experts.w"]
        assert opened.read("x.experts.w").tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_placements_are_given_for_each_mesh_dim_or_by_name_or_for_all() -> None:
    mesh = Mesh((2, 3), names=NAMES)
    for given in ([Replicate(), Shard(0)], {"ep": Shard(0)}, (Replicate, Shard(-2))):
        tensor = ShardedTensor.from_param(numpy.zeros((2, 4)), mesh, given, key="w", rank=4)
        assert tensor.global_shape == (6, 4) and tensor.boxes[0].offset == (2, 0)
        assert tensor.replica_id == (1,)
    whole = ShardedTensor.from_param(numpy.zeros((2, 4)), mesh, Replicate, key="w", rank=0)
    assert whole.global_shape == (2, 4) and whole.replica_id == (0,)


@pytest.mark.parametrize(
    ("mesh", "placements", "rank", "said"),
    [
        (Mesh((2, 3), names=NAMES), Shard(0), 0, "which of the 2 dims"),
        (Mesh((2, 3), names=NAMES), [Shard(0)], 0, "1 placements for the 2 dims"),
        (Mesh((2, 3), names=NAMES), {"tp": Shard(0)}, 0, "not 'tp'"),
        (Mesh((2, 3)), {"ep": Shard(0)}, 0, "not 'ep'"),
        (Mesh((2,)), Shard(2), 0, "does not have"),
        (Mesh((2,)), Partial(), 0, "must be Shard or Replicate"),
        (Mesh((2,)), StridedShard(0, 2), 0, "must be Shard or Replicate"),
        (Mesh((2,)), Shard, 0, "a placement must be"),
        (Mesh((2,)), "Shard(0)", 0, "a placement must be"),
        (Mesh((2,)), Shard(0), 7, "rank 7 is not in the checkpoint's mesh"),
        (Mesh((2,)), Shard(0), None, "pass rank="),
        ("cpu", Shard(0), 0, "a mesh must be"),
    ],
)
def test_bad_arguments_are_refused_where_they_are_given(
    mesh: Any, placements: Any, rank: int | None, said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said.replace("(", r"\(")) as raised:
        ShardedTensor.from_param(numpy.zeros((2, 2)), mesh, placements, key="w", rank=rank)
    assert raised.value.key == "w"


def test_a_rule_that_does_not_fit_is_named_with_the_key_at_the_save(ckpt: str) -> None:
    rules = PlacementRules({"experts.*": {"tp": Shard(0)}})
    tensor = ShardedTensor.from_param(numpy.zeros(2), Mesh((1,), names=["ep"]), rules, rank=0)
    with pytest.raises(InvalidArgumentError, match=r"rule 'experts\.\*': .* not 'tp'") as raised:
        tilestone.save({"experts": {"w": tensor}}, ckpt)
    assert raised.value.key == "experts.w"


def test_an_object_without_a_local_tensor_is_refused() -> None:
    class Half:
        device_mesh, placements, shape = Mesh((1,)), [Replicate()], (2,)

    with pytest.raises(InvalidArgumentError, match=r"no to_local\(\)"):
        ShardedTensor.from_param(Half(), Mesh((1,)), Replicate(), key="w", rank=0)


def test_the_most_specific_rule_counts_whatever_the_order() -> None:
    patterns = ["hc_head.*", "head", "experts", "experts.*.w1", "layers.0", "**.bias", "mlp.w2"]
    names = {
        "hc_head.scale": "hc_head.*",
        "model.hc_head.head": "hc_head.*",
        "model.head.weight": "head",
        "heads.weight": None,
        "layers.1.experts.3.w1": "experts.*.w1",
        "layers.1.experts.w1": "experts",
        "norm.bias": "**.bias",
        "layers.0.mlp.w2": None,
    }
    for order in itertools.islice(itertools.permutations(patterns), 0, None, 997):
        rules = PlacementRules(dict.fromkeys(order, Replicate))
        for name, pattern in names.items():
            if name != "layers.0.mlp.w2":
                assert rules.find(name) == pattern
        with pytest.raises(InvalidArgumentError) as raised:
            rules.find("layers.0.mlp.w2")
        for quoted in ("'mlp.w2'", "'layers.0'", "'layers.0.mlp.w2'"):
            assert quoted in str(raised.value)


@pytest.mark.parametrize("pattern", ["", "a..b", "a.", 3])
def test_patterns_that_are_not_paths_are_refused(pattern: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="dotted path"):
        PlacementRules({pattern: Replicate})


def test_a_rule_without_a_placement_is_refused_by_its_pattern() -> None:
    with pytest.raises(InvalidArgumentError, match="rule 'head': a placement must be"):
        PlacementRules({"head": Shard})


def test_merged_shardings_know_the_holders() -> None:
    mesh = Mesh((2, 2), names=NAMES)
    merged = merge_shardings((4,), (4,), Mesh((), [3]), [], mesh, [Replicate(), Shard(0)], 3)
    assert merged.global_shape == (8,) and merged.strides == (1,)
    assert merged.held.boxes[0].offset == (4,)
    assert merged.replica_id == (1,) and merged.holders == [1, 3]


@pytest.mark.parametrize("shape", [(3, 0), (0,)])
def test_a_tensor_without_elements_is_saved(shape: tuple[int, ...], ckpt: str) -> None:
    def go(comm: tilestone.Communicator) -> None:
        mesh = Mesh((2,))
        tensor = ShardedTensor.from_param(numpy.zeros(shape), mesh, Shard(0), rank=comm.rank)
        tilestone.save({"w": tensor}, ckpt, group=comm, checks=tilestone.Checks(access=True))
        assert tilestone.load({"w": tensor}, ckpt, group=comm)["w"].shape == shape

    run_ranks(2, go)
    with tilestone.open(ckpt) as opened:
        assert opened["w"].shape == (2 * shape[0], *shape[1:])


@pytest.mark.parametrize("made", [Shard(1), StridedShard(0, 2), Replicate(), Partial()], ids=repr)
def test_a_placement_can_be_copied_and_pickled(made: Any) -> None:
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


def test_a_mesh_can_be_copied_and_pickled() -> None:
    made = Mesh((2, 2), [4, 5, 6, 7], names=["dp", "tp"])
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (same.shape, same.ranks, same.names) == ((2, 2), [4, 5, 6, 7], ["dp", "tp"])
