"""Tilestone writes files in Megatron-Core's format; stock Megatron-Core and PyTorch load them."""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tilestone
from tilestone._calls import collective
from ranks import Raised, Worlds

# Divisible among 1, 2, 3, 4 and 6 ranks.
WHOLE = torch.arange(2 * 12 * 5.0).reshape(2, 12, 5)  # layers, rows, columns
COLUMNS = torch.arange(6 * 12).reshape(6, 12).to(torch.bfloat16)
GLU = torch.arange(24.0)
COMMON = {
    "iteration": 1200,
    "args": argparse.Namespace(lr=0.5, dtype=torch.bfloat16, betas=(0.9, 0.95), none=None),
    "scheduler": {"steps": [1, 2, {"deep": (1, "a")}], "empty": {}, 3: "an int key"},
    "tensor": torch.arange(12.0).reshape(3, 4).t(),
    "big": 2**80,
    "blob": b"\x00\xff",
    "text": "ключ ✓",
}


def _megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
    return dist_checkpointing


def _state(rank: int, world: int, filled: bool) -> dict[str, Any]:
    """Entities of every kind, sharded over all ranks, without values for a load."""
    mapping = _megatron().mapping
    scale = 1 if filled else 0

    def rows(index: int) -> Any:
        return mapping.ShardedTensor.from_rank_offsets(
            "layers.weight", WHOLE[index].chunk(world)[rank].clone() * scale,
            (0, index, 2), (1, rank, world), prepend_axis_num=1,
        )  # fmt: skip

    def halves(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        return [
            mapping.ShardedTensor.from_rank_offsets(
                key, half.contiguous(), (0, rank + world * i, 2 * world), replica_id=replica_id
            )
            for i, half in enumerate(tensor.chunk(2))
        ]

    glu = torch.cat([half.chunk(world)[rank] for half in GLU.chunk(2)]) * scale
    state = {
        "model": {
            "layers": [rows(0), rows(1)],
            "columns": mapping.ShardedTensor.from_rank_offsets(
                "columns", COLUMNS.chunk(world, 1)[rank].clone() * scale, (1, rank, world)
            ),
            "glu": mapping.ShardedTensorFactory("glu", glu, halves, torch.cat),
            "replicated": mapping.ShardedTensor.from_rank_offsets(
                "replicated", torch.tensor(3.5 * scale), replica_id=rank
            ),
            "extra": mapping.ShardedObject(
                "extra", io.BytesIO(b"state") if filled else None, (1,), (0,), replica_id=rank
            ),
        },
        "rng": mapping.ShardedObject(
            "rng", [1, {"a": torch.arange(3)}] if filled else None, (2, 1), (1, 0), replica_id=rank
        ),
        "other_rng": mapping.ShardedObject(
            "rng", None, (2, 1), (0, 0), replica_id=rank
        ),
        "own": mapping.LocalNonpersistentObject([rank]),
    }  # fmt: skip
    return {**COMMON, **state} if filled else {"iteration": "the caller's", **state}


def _assert_same(found: Any, wanted: Any, where: str) -> None:
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            _assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            _assert_same(a, b, f"{where}.{index}")
    elif isinstance(wanted, argparse.Namespace):
        _assert_same(vars(found), vars(wanted), where)
    else:
        assert found == wanted, where


def _check(loaded: dict[str, Any], rank: int, world: int) -> None:
    model = loaded["model"]
    for index in range(2):
        assert torch.equal(model["layers"][index], WHOLE[index].chunk(world)[rank])
    assert torch.equal(model["columns"], COLUMNS.chunk(world, 1)[rank])
    assert torch.equal(model["glu"], torch.cat([h.chunk(world)[rank] for h in GLU.chunk(2)]))
    assert torch.equal(model["replicated"], torch.tensor(3.5))
    assert model["extra"].getvalue() == b"state"
    _assert_same(loaded["rng"], [1, {"a": torch.arange(3)}], "rng")
    assert loaded["other_rng"] is None and loaded["own"] == [rank]
    for key, wanted in COMMON.items():
        _assert_same(loaded[key], wanted, key)
    assert set(loaded) == {*COMMON, "model", "rng", "other_rng", "own"}


def _save(rank: int, world: int, ckpt: str) -> None:
    tilestone.save(_state(rank, world, True), ckpt, dialect="megatron")


def _load(rank: int, world: int, ckpt: str, **options: Any) -> dict[str, Any]:
    allow = ["argparse.Namespace", "_io.BytesIO"]
    return tilestone.load(_state(rank, world, False), ckpt, allow_classes=allow, **options)


def _load_and_check(rank: int, world: int, ckpt: str) -> None:
    _check(_load(rank, world, ckpt), rank, world)


def _load_stock(rank: int, world: int, ckpt: str) -> None:
    loaded, missing, unexpected = _megatron().load(
        _state(rank, world, False), ckpt, strict="return_all"
    )
    # The common state in the form of 0.19, which 0.16 treats as an ordinary object.
    assert (missing, unexpected) == ({"common_state"}, set())
    _check(loaded, rank, world)


@pytest.mark.parametrize(
    ("saving", "others"), [(1, (2, 6)), (2, (4, 3)), (3, (1, 4)), (4, (1, 2)), (6, (3, 4))]
)
def test_stock_megatron_loads_every_kind_of_entity_under_other_worlds(
    worlds: Worlds, ckpt: str, saving: int, others: tuple[int, ...]
) -> None:
    worlds[saving].run(_save, ckpt)
    for loading in others:
        worlds[loading].run(_load_stock, ckpt)
        worlds[loading].run(_load_and_check, ckpt)


def test_stock_reads_config_common_state_and_content_metadata(
    worlds: Worlds, ckpt: str
) -> None:
    state = {"content_metadata": {"version": [1, 2]}, **_state(0, 1, True)}
    tilestone.save(state, ckpt, dialect="megatron")
    config = json.loads(pathlib.Path(ckpt, "metadata.json").read_text())
    assert config == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    stock = _megatron()
    assert stock.check_is_distributed_checkpoint(ckpt)
    common = stock.load_common_state_dict(ckpt)
    for key, wanted in COMMON.items():
        _assert_same(common[key], wanted, key)
    assert stock.load_content_metadata(ckpt) == {"version": [1, 2]}
    names = worlds[1].run(_metadata_of_stock, ckpt)[0]
    assert names == ["columns", "extra/shard_0_1", "glu", "layers.weight", "replicated",
                     "rng/shard_0.0_2.1", "rng/shard_1.0_2.1"]  # fmt: skip


def _metadata_of_stock(rank: int, world: int, ckpt: str) -> list[str]:
    serialization = _megatron().serialization
    return sorted(set(serialization.load_sharded_metadata(ckpt)) - {"common_state/shard_0_1"})


def test_stock_dcp_opens_it(ckpt: str) -> None:
    tilestone.save(_state(0, 1, True), ckpt, dialect="megatron")
    state = {"columns": torch.zeros_like(COLUMNS), "glu": torch.zeros_like(GLU)}
    dcp.load(state, checkpoint_id=ckpt)
    assert torch.equal(state["columns"], COLUMNS)
    assert torch.equal(state["glu"], GLU)
    # The request of Megatron-Core 0.19.
    wanted: dict[str, Any] = {"common_state/shard_0_1": None}
    dcp.load(wanted, checkpoint_id=ckpt)
    _assert_same(wanted["common_state/shard_0_1"][0]["scheduler"], COMMON["scheduler"], "")


def test_an_open_checkpoint_has_dialect_keys_and_common_state(ckpt: str) -> None:
    tilestone.save(_state(0, 1, True), ckpt, dialect="megatron")
    with tilestone.open(ckpt, framework="torch") as checkpoint:
        assert checkpoint.dialect == "megatron"
        assert checkpoint.object_keys() == ["extra/shard_0_1", "rng/shard_0.0_2.1", "rng/shard_1.0_2.1"]
        _assert_same(checkpoint.object("rng/shard_1.0_2.1"), [1, {"a": torch.arange(3)}], "rng")
        common = checkpoint.common(allow_classes=["argparse.Namespace"])
        _assert_same(common, COMMON, "")
        assert isinstance(checkpoint.common()["args"], tilestone.Opaque)
        assert checkpoint.verify().ok
    tilestone.save({"a": 1}, f"{ckpt}.plain")
    with tilestone.open(f"{ckpt}.plain") as checkpoint:
        assert checkpoint.dialect == "pytorch"
        assert checkpoint.common() is None


def test_plain_arrays_are_common_and_fill_the_templates_arrays(ckpt: str) -> None:
    model = torch.nn.Linear(3, 2)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    tilestone.save({"model": model, "step": 3}, ckpt, dialect="megatron")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weight = model.weight
    loaded = tilestone.load({"model": model, "step": None}, ckpt)
    assert loaded["step"] == 3 and loaded["model"] is model and model.weight is weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])


def test_a_key_that_is_not_in_the_checkpoint_is_named(ckpt: str) -> None:
    tilestone.save({"a": 1}, ckpt, dialect="megatron")
    with pytest.raises(tilestone.NotFoundError, match="b.c"):
        tilestone.load({"b": {"c": None}}, ckpt)


class _Part(collective.Prepared):
    """The template of a load that ignores common state, as tilestone.megatron makes it."""

    def __init__(self, wanted: dict[Any, Any], sharded_only: bool = True) -> None:
        self._wanted = wanted
        self.engine = {"sharded_only": sharded_only}

    def make(self) -> dict[Any, Any]:
        return self._wanted


def _load_sharded_part(rank: int, world: int, ckpt: str) -> None:
    whole = _state(rank, world, False)
    wanted = {("a", (rank,)): [whole["model"], {}], 7: {"rng": whole["rng"]}}
    options: dict[str, Any] = {"allow_classes": ["_io.BytesIO"]}
    loaded = tilestone.load(_Part(wanted), ckpt, **options)  # type: ignore[arg-type]
    assert list(loaded) == [("a", (rank,)), 7] and loaded[("a", (rank,))][1:] == [{}]
    rng = loaded[7]["rng"]
    given = {"model": loaded[("a", (rank,))][0], "rng": rng, "other_rng": None, "own": [rank]}
    _check({**given, **COMMON}, rank, world)
    with pytest.raises(tilestone.MismatchError, match="sharded_only"):
        tilestone.load(_Part(wanted, rank == 0), ckpt, **options)  # type: ignore[arg-type]


def test_a_load_of_the_sharded_part_gives_the_templates_leaves_alone(
    worlds: Worlds, ckpt: str
) -> None:
    worlds[1].run(_save, ckpt)
    worlds[2].run(_load_sharded_part, ckpt)
    with pytest.raises(tilestone.NotFoundError, match="iteration"):
        tilestone.load(_Part({"iteration": None}), ckpt)  # type: ignore[arg-type]
    assert tilestone.load(_Part({}), ckpt) == {}  # type: ignore[arg-type]
    assert tilestone.load({}, ckpt).keys() == COMMON.keys()


def test_unknown_dialects_are_refused(ckpt: str) -> None:
    with pytest.raises(tilestone.UnsupportedError, match="pytorch, megatron"):
        tilestone.save({}, ckpt, dialect="other")
    with pytest.raises(tilestone.InvalidArgumentError, match="dialect"):
        tilestone.save({}, ckpt, dialect=3)  # type: ignore[arg-type]


def _save_in_two_dialects(rank: int, world: int, ckpt: str) -> None:
    tilestone.save({}, ckpt, dialect=("pytorch", "megatron")[rank])


def test_ranks_agree_on_the_dialect(worlds: Worlds, ckpt: str) -> None:
    for result in worlds[2].collect(_save_in_two_dialects, ckpt):
        assert isinstance(result, Raised)
        assert result.kind == "MismatchError" and "dialect" in result.text
