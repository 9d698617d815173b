"""States that tilestone.megatron keeps whole, or refuses: nothing of them is lost in silence."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import tilestone
from ranks import Worlds
from tilestone import megatron
from tilestone.megatron.mapping import LocalNonpersistentObject, ShardedTensor


def _half(rank: int, world: int, value: float, key: str = "t") -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value), (0, rank, world))


def _refused(call: Any) -> str:
    try:
        call()
    except tilestone.InvalidArgumentError as error:
        return str(error)
    return ""


# ---- DTensors ----


def _dtensors(rank: int, world: int, ckpt: str) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))

    def make(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2,), value), mesh, [Shard(0)])

    state = {"d": make(1.0 + rank), "list": [make(5.0 + rank), 3], "common": 4}
    megatron.save(state, ckpt, common_differs="error")
    wanted: Any = {"d": make(0), "list": [make(0), None], "mine": LocalNonpersistentObject(6)}
    loaded = megatron.load(wanted, ckpt, strict="raise_all")
    assert list(loaded) == ["d", "list", "mine", "common"]
    assert loaded["d"] is wanted["d"]
    assert loaded["d"].to_local().tolist() == [1.0 + rank] * 2
    assert loaded["list"][0].to_local().tolist() == [5.0 + rank] * 2
    assert (loaded["list"][1], loaded["common"], loaded["mine"]) == (3, 4, 6)
    wanted = {"d": make(0), "new": make(0)}
    loaded, missing, unexpected = megatron.load(wanted, ckpt, strict="return_all")
    assert (missing, unexpected) == ({"list.0"}, {"new"})
    assert "new" not in loaded and loaded["d"].to_local().tolist() == [1.0 + rank] * 2


def test_dtensors_of_a_state_come_back_in_what_load_returns(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_dtensors, str(tmp_path / "ckpt"))


# ---- content_metadata ----


def _content_metadata(rank: int, world: int, ckpt: str) -> list[str]:
    half = _half(rank, world, 1.0)
    other = _half(rank, world, 2.0, "other")
    wrong: Any = "1.0" if rank == 1 else {"a": 1}
    found = [
        _refused(lambda: megatron.save({"t": half}, ckpt, content_metadata=wrong)),
        _refused(lambda: megatron.save({"t": half}, ckpt, content_metadata={"a": [other]})),
        _refused(
            lambda: megatron.save(
                {"t": half, "content_metadata": {"t": other}}, ckpt, content_metadata={"a": 1}
            )
        ),
    ]
    megatron.save({"t": half, "content_metadata": {"old": 1}}, ckpt, content_metadata={"new": 2})
    assert megatron.load_content_metadata(ckpt) == {"new": 2}
    return found


def test_content_metadata_that_would_lose_something_is_refused_on_every_rank(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    for texts in worlds[2].run(_content_metadata, str(tmp_path / "ckpt")):
        assert "content_metadata is a dict or None, not str" in texts[0] and "rank 1" in texts[0]
        assert "content_metadata holds sharded entities" in texts[1]
        assert "would take the place of sharded entities" in texts[2]


# ---- Keys of common state ----

KEYS: dict[str, Any] = {
    "scalars": {(1, 2): "a", None: [1, {"b": None}], 1.5: {}, b"x": 1, True: 2, 1 << 70: 3},
    "dtypes": {(torch.bfloat16, torch.float32): [1, 2], torch.int8: 4},
    "in a list": [{None: 1}, {"below": {(): 2}}],
    "text and ints": {"a": 1, 2: {-3: 4}},
}


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_common_dicts_come_back_with_the_keys_that_they_had(
    tmp_path: pathlib.Path, backend: str
) -> None:
    whole = ShardedTensor.from_rank_offsets("t", torch.ones(2))
    megatron.save({"t": whole, **KEYS, "tensors": {(1,): torch.arange(3)}}, tmp_path, (backend, 1))
    loaded = megatron.load({"t": whole}, tmp_path)
    stored = torch.load(tmp_path / "common.pt", weights_only=False)
    for found in (loaded, megatron.load_common_state_dict(tmp_path), stored):
        assert {name: found[name] for name in KEYS} == KEYS
        assert torch.equal(found["tensors"][(1,)], torch.arange(3))


def test_a_common_key_that_can_not_come_back_is_refused(tmp_path: pathlib.Path) -> None:
    whole = ShardedTensor.from_rank_offsets("t", torch.ones(2))
    for state, key in (
        ({"t": whole, None: 1}, "None"),
        ({"x": {None: whole, (2,): 5}}, "x.(2,)"),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match="would come back as text") as found:
            megatron.save(state, tmp_path)
        assert found.value.key == key
    # The keys of what is sharded are the template's.
    megatron.save({(1, 2): whole}, tmp_path)
    assert list(megatron.load({(1, 2): whole}, tmp_path)) == [(1, 2)]
