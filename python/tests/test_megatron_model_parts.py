"""Factories of fused weights, and the holders of entities, tested in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilestone
from tilestone._objects import megatron_entities
from tilestone.megatron import models
from tilestone.megatron.dict_utils import nested_values
from tilestone.megatron.mapping import ShardedTensor, ShardedTensorFactory
from tilestone.megatron.utils import replace_prefix_for_sharding

LAYER = ((0, 1, 3),)


def _parts(whole: torch.Tensor, ranks: int, offsets: Any = ()) -> list[ShardedTensor]:
    """The parts of a tensor that is sharded by rows."""
    return [
        ShardedTensor.from_rank_offsets(
            "w", part.contiguous(), *offsets, (len(offsets), rank, ranks),
            prepend_axis_num=len(offsets), replica_id=(0, 0, 1), holders=(rank, 9),
        )  # fmt: skip
        for rank, part in enumerate(torch.chunk(whole, ranks))
    ]


def _assembled(factories: list[Any]) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of these entities has; elements without a value are NaN."""
    found: dict[str, torch.Tensor] = {}
    for entity in (e for f in factories for e in nested_values({"": f.build()})):
        empty = torch.full(entity.global_shape, float("nan"))
        whole = found.setdefault(entity.key, empty)
        if entity.flattened_range is not None:
            whole[tuple(map(torch.from_numpy, entity.global_coordinates()))] = entity.data
            continue
        index = entity.global_slice()
        assert whole[index].isnan().all()
        whole[index] = entity.data
    return found


def _ramp(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


# ---- SwiGLU ----


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_w_of_all_ranks_comes_before_v_of_all_ranks(ranks: int, apart: bool) -> None:
    w, v = _ramp(8, 3), -_ramp(8, 3) - 1
    local = [torch.cat(pair) for pair in zip(w.chunk(ranks), v.chunk(ranks), strict=True)]
    entities = _parts(torch.cat(local), ranks, LAYER)
    factories = [models.apply_swiglu_sharded_factory(e, LAYER, apart) for e in entities]
    stored = _assembled(factories)
    expected = {"w_w": w, "w_v": v} if apart else {"w": torch.cat((w, v))}
    assert {key: whole[1].tolist() for key, whole in stored.items()} == {
        key: whole.tolist() for key, whole in expected.items()
    }
    for factory, part in zip(factories, local, strict=True):
        assert torch.equal(factory.merge_fn([e.data for e in factory.build()]), part)


@pytest.mark.parametrize("apart", [False, True])
def test_slices_of_a_flattened_gated_weight_become_slices_of_both_halves(apart: bool) -> None:
    entity = _parts(_ramp(8, 3), 2, LAYER)[1]
    whole = models.apply_swiglu_sharded_factory(entity, LAYER, apart)
    flat = entity.data.flatten()
    expected = _assembled([whole])
    for cuts in ([0, 12], [0, 6, 12], [0, 4, 4, 9, 12], [0, 1, 11, 12]):
        slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        parts = [replace(whole, data=flat[each], flattened_range=each) for each in slices]
        found = _assembled(parts)
        for key, tensor in expected.items():
            assert torch.equal(found[key].nan_to_num(-1), tensor.nan_to_num(-1)), (key, cuts)
        merged = [each.merge_fn([e.data for e in each.build()]) for each in parts]
        assert torch.equal(torch.cat(merged), flat)


def test_a_gated_weight_that_can_not_be_halved_is_refused_by_its_key() -> None:
    odd, irregular = _parts(_ramp(3, 2), 1)[0], _parts(_ramp(4, 2), 1)[0]
    irregular.axis_fragmentations = None
    for entity, message in ((odd, "3 rows .* W and V"), (irregular, "irregular grid")):
        with pytest.raises(tilestone.InvalidArgumentError, match=message) as caught:
            models.apply_swiglu_sharded_factory(entity, ())
        assert caught.value.key == "w"


def test_parts_are_joined_on_the_cpu_where_the_device_has_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = models.apply_swiglu_sharded_factory(_parts(_ramp(4, 2), 1)[0], ())
    parts = [entity.data for entity in factory.build()]
    calls = []
    cat = torch.cat

    def full_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return cat(*args, **kwargs)

    monkeypatch.setattr(torch, "cat", full_once)
    assert torch.equal(factory.merge_fn(parts), _ramp(4, 2))
    assert "on the CPU: no room" in caplog.text


# ---- Queries, keys and values ----

HEADS, GROUPS, SIZE = 8, 4, 2  # two heads per group, two rows per head


def _qkv(rest: tuple[int, ...] = (3,)) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of all groups, each (groups, rows of a group, ...)."""
    queries = _ramp(GROUPS, HEADS // GROUPS * SIZE, *rest)
    keys, values = 1000 + _ramp(GROUPS, SIZE, *rest), 2000 + _ramp(GROUPS, SIZE, *rest)
    return queries, keys, values


def _interleaved(parts: Any) -> torch.Tensor:
    return torch.cat(list(parts), 1).flatten(0, 1)


def _blocks(parts: Any) -> torch.Tensor:
    return torch.cat([part.flatten(0, 1) for part in parts])


def _local(ranks: int, in_memory: str, rest: tuple[int, ...] = (3,)) -> list[torch.Tensor]:
    """Each rank's fused tensor, which has the rank's query groups."""
    lay = _interleaved if in_memory == "interleaved" else _blocks
    return [lay(parts) for parts in zip(*(p.chunk(ranks) for p in _qkv(rest)), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("in_memory", ["interleaved", "blocks"])
@pytest.mark.parametrize("rest", [(3,), ()])
def test_queries_keys_and_values_are_stored_whole_under_any_tensor_parallelism(
    ranks: int, in_memory: str, rest: tuple[int, ...]
) -> None:
    local = _local(ranks, in_memory, rest)
    entities = _parts(torch.cat(local), ranks, LAYER)
    factories: list[Any] = [
        models.apply_qkv_sharded_factory(
            e, LAYER, HEADS, GROUPS, stored="split", in_memory=in_memory
        )
        for e in entities
    ]
    stored = _assembled(factories)
    assert list(stored) == ["w.query", "w.key", "w.value"]
    for whole, part in zip(stored.values(), _qkv(rest), strict=True):
        assert torch.equal(whole[1], part.flatten(0, 1))
    for factory, part in zip(factories, local, strict=True):
        loaded = {name: entity.data for name, entity in factory.build().items()}
        assert torch.equal(factory.merge_fn(loaded), part)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_of_queries_keys_and_values_are_stored_as_megatrons_fused_tensor(ranks: int) -> None:
    local = _local(ranks, "blocks")
    entities = _parts(torch.cat(local), ranks, LAYER)
    factories: list[Any] = [
        models.apply_qkv_sharded_factory(e, LAYER, HEADS, GROUPS, in_memory="blocks")
        for e in entities
    ]
    stored = _assembled(factories)
    assert list(stored) == ["w"]
    assert torch.equal(stored["w"][1], _interleaved(_qkv()))
    for factory, part in zip(factories, local, strict=True):
        assert torch.equal(factory.merge_fn(factory.build().data), part)


def test_megatrons_fused_tensor_is_stored_unchanged_for_any_parallelism() -> None:
    for entity in _parts(_interleaved(_qkv()), 8):  # each has half a group
        assert models.apply_qkv_sharded_factory(entity, (), HEADS, GROUPS) is entity


def test_an_invalid_fused_projection_is_refused_by_its_key() -> None:
    entity, eighth = _parts(_interleaved(_qkv()), 1)[0], _parts(_interleaved(_qkv()), 8)[0]
    cases: list[tuple[Any, ...]] = [
        (entity, 7, 4, {"stored": "split"}, "32 rows .* 7 heads in 4 query groups"),
        (eighth, HEADS, GROUPS, {"stored": "split"}, "4 query groups can't be divided among 8"),
        (entity, HEADS, GROUPS, {"stored": "apart"}, "stored must be one of"),
        (entity, HEADS, GROUPS, {"in_memory": "rows"}, "in_memory must be one of"),
    ]
    for given, heads, count, options, message in cases:
        with pytest.raises(tilestone.InvalidArgumentError, match=message):
            models.apply_qkv_sharded_factory(given, (), heads, count, **options)
    factory: Any = models.apply_qkv_sharded_factory(entity, (), HEADS, GROUPS, stored="split")
    factory = replace(factory, data=entity.data.flatten()[:5], flattened_range=slice(0, 5))
    with pytest.raises(tilestone.UnsupportedError, match="stored in another order") as caught:
        factory.build()
    assert caught.value.key == "w"


def test_offsets_and_divisions_that_are_not_the_fused_tensors_are_refused() -> None:
    third, columns = _parts(_ramp(4, 2), 1, LAYER)[0], ShardedTensor.from_rank_offsets(
        "w", _ramp(4, 2), (1, 0, 2)
    )  # fmt: skip
    no_axes: Any = ShardedTensor.from_rank_offsets("w", torch.tensor(1.0))
    factory: Any = models.apply_swiglu_sharded_factory(third, LAYER)
    for entity, message in (
        (third, "1 prepended ones"), (columns, "an axis other than"), (no_axes, "0 axes"),
        (factory, "not a ShardedTensorFactory"),
    ):  # fmt: skip
        with pytest.raises(tilestone.InvalidArgumentError, match=message):
            models.apply_swiglu_sharded_factory(entity, ())
    with pytest.raises(tilestone.InvalidArgumentError, match="1 prepended ones"):
        models.apply_qkv_sharded_factory(third, (), 2, 1, stored="split")
    with pytest.raises(tilestone.InvalidArgumentError, match="8 rows .* -2 heads"):
        models.apply_qkv_sharded_factory(_parts(_ramp(8), 1)[0], (), -2, 1, stored="split")


def test_arguments_that_make_no_entity_are_refused_by_their_key() -> None:
    make: Any = models.make_sharded_tensor_for_checkpoint
    for prepended in (((1, 0, 2),), ((0, 0),), ((0, 0, 2), (0, 1, 2))):
        with pytest.raises(tilestone.InvalidArgumentError, match="prepended offsets") as caught:
            make(_ramp(2), "w", prepended)
        assert caught.value.key == "w"
    for no_tensor in ([1.0], None, _ramp(2).numpy()):
        with pytest.raises(tilestone.InvalidArgumentError, match="expected a tensor") as caught:
            make(no_tensor, "w")
        assert caught.value.key == "w"
    for place in (-1, 2):
        with pytest.raises(tilestone.InvalidArgumentError, match="not a cell of a grid"):
            models.make_sharded_object_for_checkpoint(1, "o", ((0, place, 2),))
    made: Any = {"w": models.apply_swiglu_sharded_factory(make(_ramp(4), "w"), ())}
    with pytest.raises(tilestone.InvalidArgumentError, match="before a factory is made"):
        models.allow_vocab_padding(made, ["w"])
    with pytest.raises(tilestone.InvalidArgumentError, match="not the str 'w'"):
        models.allow_vocab_padding(made, "w")


# ---- Experts ----


@pytest.mark.parametrize("gated", [False, True])
def test_experts_with_keys_of_their_own_keep_their_numbers_under_another_prefix(
    gated: bool,
) -> None:
    state = {"weight1": _ramp(3, 2 * (8 if gated else 4)), "weight2": _ramp(2 * 4, 3)}
    made = models.grouped_experts_state_dict(
        state, "layers.0.mlp.", metadata={"singleton_local_shards": True},
        num_local_experts=2, hidden_size=3, gated=gated,
    )  # fmt: skip
    replace_prefix_for_sharding(made, "layers.0.", "layers.4.")
    optimizer = replace(made["layers.0.mlp.weight1"], key="exp_avg.layers.4.mlp.experts.linear_fc1.weight")
    suffixes = ["_w", "_v"] if gated else [""]
    for factory, before in ((made["layers.0.mlp.weight1"], ""), (optimizer, "exp_avg.")):
        keys = [entity.key for part in factory.build() for entity in part]
        assert keys == [
            f"{before}layers.4.mlp.experts.{n}.linear_fc1.weight{s}" for s in suffixes for n in (0, 1)
        ]


def test_weights_of_experts_that_do_not_fit_are_refused_by_key() -> None:
    fits = {"weight1": _ramp(3, 8), "weight2": _ramp(8, 3)}
    for state, message in (
        ({**fits, "weight1": _ramp(3, 6)}, "2 experts of 3 x 4"),
        ({"weight1": _ramp(8, 3), "weight2": _ramp(3, 8)}, r"shape \(8, 3\).*2 experts of 3 x 4"),
        ({**fits, "bias1": _ramp(3)}, r"not \['bias1', 'weight1', 'weight2'\]"),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match=message):
            models.grouped_experts_state_dict(state, num_local_experts=2, hidden_size=3)
    with pytest.raises(tilestone.InvalidArgumentError, match="no weight1; it has") as caught:
        models.grouped_linear_state_dict(
            {"weight0": _ramp(2, 2)}, "mlp.", "linear_fc1", {"weight": 0}, num_local_experts=2
        )
    assert caught.value.key == "mlp.experts.linear_fc1.weight"
    linear: dict[str, Any] = {f"weight{n}": _ramp(2, 2) for n in range(2)}
    for more, options, message in (
        ({"weight2": 1}, {}, r"\['weight2'\] .* its 2 experts"),
        ({"_extra_state": 1}, {}, "extra states as extra_states"),
        ({}, {"extra_states": [1]}, "1 extra states were given for 2"),
        ({}, {"num_local_experts": -1}, ">= 0, not -1"),
    ):
        keywords: Any = {"num_local_experts": 2, **options}
        with pytest.raises(tilestone.InvalidArgumentError, match=message):
            models.grouped_linear_state_dict(linear | more, "", "fc", {"weight": 0}, **keywords)
    with pytest.raises(tilestone.InvalidArgumentError, match="0 experts of hidden size 3"):
        models.grouped_experts_state_dict(fits, num_local_experts=0, hidden_size=3)
    made: Any = models.grouped_experts_state_dict(fits, num_local_experts=2, hidden_size=3)
    flat = replace(made["weight1"], data=_ramp(4), flattened_range=slice(0, 4))
    with pytest.raises(tilestone.UnsupportedError, match="weight of grouped experts"):
        flat.build()


# ---- Holders ----


def _held() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        "w", _ramp(4, 2), (0, 1, 2), replica_id=(0, 0, 1), holders=(0, 2)
    )


def test_an_entity_keeps_its_holders_while_it_is_the_same_shard() -> None:
    entity = _held()
    assert replace(entity, key="x", data=None).holders == (0, 2)
    assert entity.narrow(0, 1, 2)[0].holders == (0, 2)
    assert entity.without_data().holders == copy.copy(entity).holders == (0, 2)
    entity.replica_id = (0, 0, 1)
    entity.key = "y"
    assert entity.holders == (0, 2)
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", _ramp(3), (4, 2), (0, 1, 2), flattened_range=slice(1, 4), holders=(1,)
    )
    assert flat.holders == (1,)


def test_an_entity_with_another_replica_id_does_not_know_its_holders() -> None:
    entity = _held()
    entity.replica_id = (0, 0, 0)
    assert entity.holders is None
    factory = models.apply_swiglu_sharded_factory(_held(), ())
    factory.replica_id = 0
    assert factory.holders is None
    assert [part.holders for part in factory.build()] == [None, None]


def test_entities_built_by_factories_have_their_holders() -> None:
    factory = models.apply_swiglu_sharded_factory(_held(), ())
    assert [part.holders for part in factory.build()] == [(0, 2), (0, 2)]

    def build(key: str, data: Any, replica_id: Any, flat: Any) -> Any:
        inner = ShardedTensorFactory(key, data, lambda k, d, r, f: [_held()], list, replica_id)
        own = replace(_held(), holders=(2,))
        return {"a": [replace(_held(), holders=None)], "own": own, "inner": inner,
                "other": replace(_held(), holders=None, replica_id=(0, 0, 0)), "plain": 1}  # fmt: skip

    outer = ShardedTensorFactory("w", _ramp(4, 2), build, dict, (0, 0, 1), holders=(0, 2, 4))
    built = outer.build()
    assert built["a"][0].holders == (0, 2, 4)
    assert built["own"].holders == (2,)
    assert built["other"].holders is None
    assert built["inner"].holders == (0, 2, 4)


def test_holders_are_not_part_of_an_entitys_equality_and_repr() -> None:
    assert replace(_held(), data=None) == replace(_held(), data=None, holders=None)
    assert "holders" not in repr(_held())


def test_the_engine_gets_the_holders_and_megatrons_own_entities_have_none() -> None:
    entity: Any = megatron_entities.entity(_held(), for_load=False)
    assert entity.holders == (0, 2)

    class Stock:
        __slots__ = tuple(vars(_held()).keys() - {"holders"})

    stock: Any = Stock()
    Stock.__name__ = "ShardedTensor"
    Stock.__module__ = "megatron.core.dist_checkpointing.mapping"
    for name in Stock.__slots__:
        setattr(stock, name, getattr(_held(), name))
    unknown: Any = megatron_entities.entity(stock, for_load=False)
    assert unknown.holders is None
