"""Megatron-Core's entities in a plain save and load: they are treated as entities, not pickled."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
from thread_ranks import run_ranks

import tilestone
from ranks import Raised, Worlds

WHOLE = torch.arange(2 * 6 * 8.0).reshape(2, 6, 8)  # layers, rows, columns


def _mapping() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing import mapping
    return mapping


def _tree(rank: int, world: int, axis: int, value: float, data: bool = True) -> dict[str, Any]:
    """Each rank's part of every layer along `axis`, with two replicas each in pairs of ranks."""
    mapping = _mapping()
    parts, copies = world // 2, 2
    part, copy = rank // copies, rank % copies

    def layer(index: int) -> Any:
        local = WHOLE[index].chunk(parts, axis)[part].clone() * (value if value else 0.0)
        sharded = mapping.ShardedTensor.from_rank_offsets(
            "layers.weight", local, (0, index, 2), (axis + 1, part, parts),
            replica_id=(0, 0, copy), prepend_axis_num=1,
        )  # fmt: skip
        return sharded if data else sharded.without_data()

    def halves(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        assert replica_id == copy and flattened_range is None
        return {
            name: mapping.ShardedTensor.from_rank_offsets(
                f"{key}.{name}", half.contiguous(), (0, part, parts), replica_id=replica_id
            )
            for name, half in zip("wv", tensor.chunk(2), strict=True)
        }

    glu = torch.full((8 // parts,), value) + torch.arange(8 // parts) * (value != 0)
    return {
        "layers": [layer(0), layer(1)],
        "glu": mapping.ShardedTensorFactory(
            "glu", glu, halves, lambda sub: torch.cat([sub["w"], sub["v"]]), replica_id=copy
        ),
        "rng": mapping.ShardedObject(
            "rng", [part, value], (parts,), (part,), replica_id=(0, copy)
        ),
        "own": mapping.LocalNonpersistentObject([rank]),
        "step": value,
    }


def _save(rank: int, world: int, ckpt: str) -> None:
    tilestone.save(_tree(rank, world, 0, 1.0), ckpt)


def _load(rank: int, world: int, ckpt: str, axis: int, data: bool) -> list[Any]:
    tree = _tree(rank, world, axis, 0.0, data)
    if world != 4:
        del tree["rng"]  # objects are not resharded
    loaded = tilestone.load(tree, ckpt)
    parts, part = world // 2, rank // 2
    if data:
        assert loaded["layers"][0] is tree["layers"][0].data
    for index in range(2):
        assert torch.equal(loaded["layers"][index], WHOLE[index].chunk(parts, axis)[part])
    assert world != 4 or loaded["rng"] == [part, 1.0]
    assert loaded["own"] == [rank] and loaded["step"] == 1.0
    return loaded["glu"].tolist()


@pytest.mark.parametrize("data", [True, False], ids=["filled", "allocated"])
def test_entities_are_saved_whole_and_resharded(worlds: Worlds, ckpt: str, data: bool) -> None:
    worlds[4].run(_save, ckpt)
    with tilestone.open(ckpt, framework="torch") as opened:
        assert torch.equal(opened.read("layers.weight"), WHOLE)
        assert opened.object_keys() == ["rng/shard_0_2", "rng/shard_1_2", "step"]
        assert opened.read("glu.w").tolist() == [1, 2, 1, 2]
        assert opened.read("glu.v").tolist() == [3, 4, 3, 4]
    assert worlds[4].run(_load, ckpt, 1, data) == [[1.0, 2.0, 3.0, 4.0]] * 4
    whole = [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]
    assert worlds[2].run(_load, ckpt, 1, data) == [whole] * 2


def _save_objects(rank: int, world: int, ckpt: str) -> None:
    tilestone.save({"deep": (1, {"x": _tree(rank, world, 0, 1.0)["layers"][0]})}, ckpt)


def test_an_entity_inside_a_tuple_is_refused_with_its_key(worlds: Worlds, ckpt: str) -> None:
    for result in worlds[4].collect(_save_objects, ckpt):
        assert isinstance(result, Raised) and result.kind == "InvalidArgumentError"
        assert result.attributes["key"] == "deep"
    assert not pathlib.Path(ckpt, ".metadata").exists()


def test_an_entity_without_data_or_of_an_unknown_kind_is_refused(ckpt: str) -> None:
    mapping = _mapping()

    class Other(mapping.ShardedBase):
        key, data, replica_id = "other", None, 0

        def validate_metadata_integrity(self) -> None:
            pass

        def without_data(self) -> Any:
            return self

    sharded = mapping.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 1))
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"a": sharded.without_data()}, ckpt)
    assert raised.value.key == "w"
    with pytest.raises(tilestone.UnsupportedError) as unsupported:
        tilestone.save({"a": {"b": Other()}}, ckpt)
    assert unsupported.value.key == "a.b"


@pytest.fixture
def old_kind() -> Any:
    """Megatron-Core's ShardedTensor up to 0.15, which supports slices of flattened tensors."""

    class ShardedTensor:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    ShardedTensor.__module__ = "megatron.core.dist_checkpointing.mapping"
    return ShardedTensor


def test_slices_of_flattened_tensors_are_kept_and_resharded(old_kind: Any, ckpt: str) -> None:
    whole = torch.arange(24.0).reshape(4, 6)

    def part(cell: int, begin: int, end: int, data: Any) -> Any:
        return old_kind(
            key="w", data=data, dtype=torch.float32, local_shape=(2, 6), global_shape=(4, 6),
            global_offset=(2 * cell, 0), axis_fragmentations=(2, 1), replica_id=(0, 0),
            prepend_axis_num=0, allow_shape_mismatch=False, flattened_range=slice(begin, end),
        )  # fmt: skip

    flat = [whole[:2].flatten(), whole[2:].flatten()]

    def save(comm: tilestone.Communicator) -> None:
        cell, begin = comm.rank // 2, (0, 5)[comm.rank % 2]
        end = (5, 12)[comm.rank % 2]
        tilestone.save({"w": part(cell, begin, end, flat[cell][begin:end])}, ckpt, group=comm)

    def load(comm: tilestone.Communicator) -> None:
        begin, end = (0, 8) if comm.rank == 0 else (8, 12)
        data = torch.zeros(end - begin) if comm.rank == 0 else None
        loaded = tilestone.load({"w": part(1, begin, end, data)}, ckpt, group=comm)["w"]
        assert loaded.tolist() == flat[1][begin:end].tolist()

    run_ranks(4, save)
    assert tilestone.open(ckpt).read("w").tolist() == whole.tolist()
    run_ranks(2, load)


def test_a_slice_that_does_not_lie_in_its_tensor_is_refused_by_key(
    old_kind: Any, ckpt: str
) -> None:
    outside = old_kind(
        key="w", data=torch.ones(2), dtype=torch.float32, local_shape=(2, 3), global_shape=(3, 3),
        global_offset=(2, 0), axis_fragmentations=None, replica_id=0, prepend_axis_num=0,
        allow_shape_mismatch=False, flattened_range=slice(0, 2),
    )  # fmt: skip
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"x": outside}, ckpt)
    assert raised.value.key == "w"
