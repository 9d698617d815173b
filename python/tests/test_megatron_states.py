"""States that tilestone.megatron saves completely or refuses; nothing is lost silently."""

from __future__ import annotations

import collections
import pathlib
import shutil
from typing import Any

import pytest
import torch

import tilestone
from ranks import Worlds
from test_megatron_stock import _megatron as _stock, _stock_on_cpu
from tilestone import megatron
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)


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
        assert "content_metadata must be a dict or None, not str" in texts[0] and "rank 1" in texts[0]
        assert "content_metadata holds sharded entities" in texts[1]
        assert "would replace sharded entities" in texts[2]


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
        with pytest.raises(tilestone.InvalidArgumentError, match="would come back as a string") as found:
            megatron.save(state, tmp_path)
        assert found.value.key == key
    # A load takes the dict keys of sharded entities from the template.
    megatron.save({(1, 2): whole}, tmp_path)
    assert list(megatron.load({(1, 2): whole}, tmp_path)) == [(1, 2)]


def test_odd_keys_of_a_stock_common_state_come_back_at_the_top_and_beside_entities(
    tmp_path: pathlib.Path,
) -> None:
    whole = ShardedTensor.from_rank_offsets("t", torch.ones(2))
    other = ShardedTensor.from_rank_offsets("u", torch.ones(2))
    megatron.save({"t": whole, "beside": {"t": other}, "iteration": 3}, tmp_path)
    odd: dict[Any, Any] = {"None": 1, None: 2, (1, 2): {1.5: "a"}, torch.int8: 4, 1 << 70: 5}
    stored = {**odd, "iteration": 3, "beside": dict(odd)}
    torch.save(stored, tmp_path / "common.pt")  # like stock's file
    shutil.rmtree(tmp_path / ".tilestone")
    own = LocalNonpersistentObject(7)
    loaded = megatron.load({"beside": {"t": other}, "t": whole, "own": own}, tmp_path)
    assert loaded.pop("t") is whole.data and loaded["beside"].pop("t") is other.data
    assert loaded.pop("own") == 7
    assert loaded == stored and megatron.load_common_state_dict(tmp_path) == stored
    everything = tilestone.load(tmp_path)
    del everything["t"], everything["u"]
    assert everything == stored


# ---- Tensors of common state ----


def test_parameters_of_common_state_come_back_as_what_they_are(tmp_path: pathlib.Path) -> None:
    def state() -> dict[str, Any]:
        marked = torch.nn.Parameter(torch.arange(3.0))
        marked.mark = 1  # type: ignore[attr-defined]
        return {
            "trained": torch.nn.Parameter(torch.ones(2, 3).t()),
            "frozen": [torch.nn.Parameter(torch.ones(1), requires_grad=False), {"marked": marked}],
            "leaf": torch.ones(4).requires_grad_(),
            "made": torch.ones(2).requires_grad_() * 2,
            "plain": torch.arange(3),
            "complex": torch.ones(2, dtype=torch.complex64).requires_grad_().conj(),
        }

    def kinds(found: dict[str, Any]) -> list[Any]:
        tensors = [found["trained"], found["frozen"][0], found["frozen"][1]["marked"]]
        tensors += [found[name] for name in ("leaf", "made", "plain", "complex")]
        assert all(tensor.is_leaf for tensor in tensors)
        return [(type(t), t.requires_grad, t.tolist()) for t in tensors]

    given = {**state(), "t": ShardedTensor.from_rank_offsets("t", torch.ones(2))}
    megatron.save(given, tmp_path)
    expected = state()
    expected["made"], expected["complex"] = (
        expected[name].detach().resolve_conj().requires_grad_() for name in ("made", "complex")
    )
    stored = torch.load(tmp_path / "common.pt", weights_only=False)
    for found in (
        megatron.load({}, tmp_path), megatron.load_common_state_dict(tmp_path), stored,
    ):  # fmt: skip
        assert kinds(found) == kinds(expected)
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    loaded = tilestone.load({"trained": weight}, tmp_path)["trained"]
    assert loaded is weight and weight.tolist() == torch.ones(3, 2).tolist()


def test_dict_classes_of_common_state_come_back_as_dicts_as_from_stock(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    """Only in tuples, which stock does not search, they keep their class."""
    worlds[1].run(_dict_classes, str(tmp_path))


def _dict_classes(rank: int, world: int, folder: str) -> None:
    ordered = collections.OrderedDict(b=1, a=torch.ones(1))
    default = collections.defaultdict(list, {"x": [1]})
    found = []
    for api in (_stock(), megatron):
        path = pathlib.Path(folder, api.__name__)
        path.mkdir()
        state = {"o": ordered, "l": [default, {"d": default}], "t": (ordered, default)}
        with _stock_on_cpu():
            api.save({**state, "w": api.ShardedTensor.from_rank_offsets("w", torch.ones(1))}, path)
        common = megatron.load({}, path)
        kinds = [type(common["o"]), type(common["l"][0]), type(common["l"][1]["d"])]
        found.append([kinds, [type(each) for each in common["t"]]])
        assert common["l"] == [{"x": [1]}, {"d": {"x": [1]}}]
        assert common["t"][1].default_factory is list and list(common["t"][0]) == ["b", "a"]
    assert found[0] == found[1] == [[dict] * 3, [collections.OrderedDict, collections.defaultdict]]


# ---- Warnings, and remaining files ----


def _whole(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.ones(2))


def test_each_warning_is_logged_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    megatron.save({"a": _whole("a"), "b": _whole("b"), "c": _whole("c")}, tmp_path / "x")
    for mode in ("log_all", "return_all", "raise_all", "log_unexpected"):
        caplog.clear()
        try:
            megatron.load({"a": _whole("a"), "n": _whole("new")}, tmp_path / "x", strict=mode)
        except tilestone.MismatchError:
            assert mode == "raise_all"
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == mode.startswith("log"), said
    assert said == [
        "the checkpoint does not hold all requested keys. Unexpected keys (for this rank): "
        "{'new'}"
    ]


def test_a_refused_save_keeps_existing_files_and_logs_no_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(tilestone.UnsupportedError, match="mine.txt"):
        megatron.save({"a": _whole("a")}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.txt", ".tilestone"}  # the lock
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []
    assert caplog.records == []


# ---- Factories ----


def test_a_load_does_not_ask_for_common_values_that_a_factory_builds(
    tmp_path: pathlib.Path,
) -> None:
    merged: list[Any] = []

    def factory(extra: dict[str, Any], slices: bool = False) -> ShardedTensorFactory:
        def build(key: str, data: Any, replica_id: Any, flat: Any) -> Any:
            if not slices:
                return {"s": ShardedTensor.from_rank_offsets(key, data), **extra}
            cuts = (0, 0, 2)  # the first slice is empty
            return {
                str(i): ShardedTensor.from_rank_offsets_flat(
                    key, data[a:b], (2,), flattened_range=slice(a, b)
                )
                for i, (a, b) in enumerate(zip(cuts, cuts[1:]))
            }

        def merge(parts: Any) -> Any:
            merged.append(sorted(parts))
            return torch.cat([part for part in parts.values() if isinstance(part, torch.Tensor)])

        return ShardedTensorFactory("f", torch.ones(2), build, merge)

    megatron.save({"f": factory({})}, tmp_path)
    for extra in ({"n": [], "deep": {"e": {}}, "x": 1}, {}):
        assert megatron.load({"f": factory(extra)}, tmp_path)["f"].tolist() == [1, 1]
    megatron.save({"f": factory({"n": [], "x": 5})}, tmp_path)
    assert megatron.load({"f": factory({})}, tmp_path)["f"].tolist() == [1, 1]
    assert megatron.load({"f": factory({}, True)}, tmp_path)["f"].tolist() == [1, 1]
    assert merged == [["s"], ["s"], ["n", "s", "x"], ["0", "1", "n", "x"]]
def test_tilestones_own_entities_are_sharded_and_checked_by_strictness(ckpt: str) -> None:
    def placed(value: float) -> tilestone.ShardedTensor:
        mesh = tilestone.geometry.Mesh((1,), names=["ep"])
        shard = tilestone.geometry.Shard(0)
        return tilestone.ShardedTensor.from_param(torch.full((2,), value), mesh, shard, rank=0)

    megatron.save({"a": {"w": placed(3.0)}, "rng": tilestone.ShardedObject("rng", 7, (1,), (0,))}, ckpt)
    wanted = {
        "a": {"w": placed(0.0), "b": placed(0.0)},
        "rng": tilestone.ShardedObject("rng", None, (1,), (0,)),
        "other": tilestone.ShardedObject("other", None, (1,), (0,)),
    }
    loaded, missing, unexpected = megatron.load(wanted, ckpt, strict="return_all")
    assert loaded["a"]["w"].tolist() == [3.0, 3.0] and loaded["rng"] == 7
    assert (missing, unexpected) == (set(), {"a.b", "other"})
    assert "b" not in loaded["a"] and "other" not in loaded
