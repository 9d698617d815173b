"""tilestone.megatron's functions behave like those of stock Megatron-Core, for saves and loads."""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import pathlib
import re
import signal
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import test_megatron_files as files
import torch

import tilestone
from tilestone import megatron
from tilestone._objects import pickling
from ranks import Raised, Worlds
from test_goldens import GOLDEN, goldens
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone.megatron.strategies import torch as torch_strategies

MODES = [mode.value for mode in megatron.StrictHandling]


def _state(rank: int, world: int, filled: bool, entities: str) -> dict[str, Any]:
    if entities == "stock":
        return files._state(rank, world, filled)
    with mock.patch.object(files, "_megatron", lambda: megatron):
        return files._state(rank, world, filled)


def _save(rank: int, world: int, ckpt: str, entities: str) -> None:
    state = _state(rank, world, True, entities)
    if entities == "saved by stock":
        os.makedirs(ckpt, exist_ok=True)
        # Stock starts child processes, which a daemon process like a rank may not, and needs a GPU.
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        device = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
        synchronize = mock.patch("torch.cuda.synchronize")
        with mock.patch.dict(config, {"daemon": False}), synchronize, device:
            files._megatron().save(
                _state(rank, world, True, "stock"), ckpt, validate_access_integrity=False
            )
        return
    before = list(state), list(state["model"]), state["model"]["glu"]
    assert megatron.save(state, ckpt) is None
    assert before == (list(state), list(state["model"]), state["model"]["glu"])


def _load_with_ours(rank: int, world: int, ckpt: str, entities: str) -> None:
    template = _state(rank, world, False, entities)
    columns = template["model"]["columns"].data
    loaded, missing, unexpected = megatron.load(template, ckpt, strict="return_all")
    assert (missing, unexpected) == (set(), set())
    files._check(loaded, rank, world)
    assert loaded["model"]["columns"].data_ptr() == columns.data_ptr()
    assert template["iteration"] == "the caller's"
    assert type(template["model"]["glu"]).__name__ == "ShardedTensorFactory"


@pytest.mark.parametrize(
    ("saving", "entities", "others"),
    [
        (4, "ours", (1, 6)), (2, "stock", (3, 4)), (1, "ours", (2, 6)),
        (1, "saved by stock", (3, 6)), (2, "saved by stock", (1, 3)),
        (4, "saved by stock", (1, 6)),
    ],
)  # fmt: skip
def test_every_kind_of_entity_goes_to_stock_and_comes_from_stock_under_other_worlds(
    worlds: Worlds, ckpt: str, saving: int, entities: str, others: tuple[int, ...]
) -> None:
    worlds[saving].run(_save, ckpt, entities)
    for loading in others:
        worlds[loading].run(_load_with_ours, ckpt, "ours" if loading % 2 else "stock")
        if entities != "saved by stock":
            worlds[loading].run(files._load_stock, ckpt)


def _whole(mapping: Any, key: str, rank: int) -> Any:
    return mapping.ShardedTensor.from_rank_offsets(key, torch.zeros(4), replica_id=rank)


def _objects(mapping: Any, key: str, shape: tuple[int, ...], rank: int) -> Any:
    return mapping.ShardedObject(key, None, shape, (0,) * len(shape), replica_id=rank)


def _save_for_modes(rank: int, world: int, ckpt: str) -> None:
    mapping = megatron.mapping
    state = {name: _whole(mapping, name, rank) for name in ("a", "b", "missing")}
    for entity in state.values():
        entity.data += 7
    grid = [ShardedObject("grid", i, (2,), (i,), replica_id=rank) for i in range(2)]
    gone = [ShardedObject("gone", i, (2,), (i,), replica_id=rank) for i in range(2)]
    megatron.save({**state, "objects": grid + gone, "step": 3}, ckpt)


def _by_mode(rank: int, world: int, ckpt: str, mode: str, own_keys: bool) -> tuple[Any, Any]:
    """The results of stock and of Tilestone for the same template."""
    found = []
    for api in (files._megatron(), megatron):
        mapping = api.mapping
        template = {
            "a": _whole(mapping, "a", rank),
            "list": [_whole(mapping, "new", rank), _whole(mapping, "b", rank)],
            "deep": {"only": {"new": _whole(mapping, "newer", rank)}},
            "object": _objects(mapping, "new object", (1,), rank),
            "part": mapping.ShardedObject("grid", None, (2,), (0,), replica_id=rank),
            "other part": mapping.ShardedObject("grid", None, (2,), (1,), replica_id=rank),
            "step": "the caller's",
            "common": "the caller's",
        }
        if own_keys:
            template["own"] = _whole(mapping, f"own{rank}", 0)
        try:
            found.append(_plain(api.load(template, ckpt, strict=mode)))
        except BaseException as error:  # torch's own error is not an Exception
            assert api is not megatron or isinstance(error, tilestone.CheckpointError)
            text = str(error)
            found.append([words in text for words in ("Unexpected keys", "Missing keys")])
    return found[0], found[1]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value - {"common_state"} if isinstance(value, set) else value


def test_eight_modes_of_strictness_give_what_stock_gives(worlds: Worlds, ckpt: str) -> None:
    worlds[2].run(_save_for_modes, ckpt)
    for mode in MODES:
        raises = mode.startswith(("raise", "assume"))
        for stock, ours in worlds[2].run(_by_mode, ckpt, mode, not raises):
            if mode == "assume_ok_unexpected":
                assert isinstance(stock, list) and isinstance(ours, list)
            else:
                assert ours == stock, mode
            if mode == "return_all":
                assert ours[1] == {"missing", "gone"} and "new object" in ours[2]


def _load_part_of_another_grid(rank: int, world: int, ckpt: str) -> None:
    megatron.load({"x": _objects(megatron.mapping, "grid", (3,), rank)}, ckpt, strict="ignore_all",
                  validate_access_integrity=False)  # fmt: skip


def test_an_object_of_which_the_grid_is_stored_in_other_parts_is_an_error(
    worlds: Worlds, ckpt: str
) -> None:
    worlds[2].run(_save_for_modes, ckpt)
    for result in worlds[2].collect(_load_part_of_another_grid, ckpt):
        assert isinstance(result, Raised) and result.attributes["key"] == "grid/shard_0_3"


def test_logged_keys_have_stocks_wording(ckpt: str, caplog: pytest.LogCaptureFixture) -> None:
    _save_for_modes(0, 1, ckpt)
    template = {"a": _whole(megatron.mapping, "a", 0), "n": _whole(megatron.mapping, "new", 0)}
    megatron.load(dict(template), ckpt, strict="log_all")
    assert "Unexpected keys (for this rank): {'new'}" in caplog.text
    assert "Missing keys (for all ranks)" in caplog.text and "gone" in caplog.text


def test_a_factory_of_which_a_part_is_unexpected_is_left_out(ckpt: str) -> None:
    _save_for_modes(0, 1, ckpt)

    def build(key: str, data: Any, replica_id: Any, flat: Any) -> Any:
        return [ShardedTensor.from_rank_offsets(name, data) for name in ("a", key)]

    factories = {
        name: ShardedTensorFactory(name, torch.zeros(4), build, torch.cat) for name in ("b", "new")
    }
    factories["kept"] = LocalNonpersistentObject("mine")
    state, missing, unexpected = megatron.load(
        factories, ckpt, strict="return_unexpected", validate_access_integrity=False
    )
    assert (missing, unexpected) == (set(), {"new"})
    assert state["b"].tolist() == [7] * 8 and state["kept"] == "mine" and "new" not in state


def test_entities_without_data_are_allocated_and_lists_of_both_kinds_come_back(ckpt: str) -> None:
    weight = ShardedTensor.from_rank_offsets("w", torch.arange(3.0))
    rows = ShardedTensor.from_rank_offsets("rows", torch.ones(2), (0, 0, 1))
    other = ShardedTensor.from_rank_offsets("other", torch.zeros(1))
    mixed = [1, weight, {"x": rows, "lr": 0.5}, "end", [], {}]
    megatron.save({"mixed": mixed, 7: {"deep": [other]}}, ckpt)
    asked = [0, weight.without_data(), {"x": rows.without_data(), "lr": 0}, "", [], {}]
    loaded = megatron.load({"mixed": asked, 7: {"deep": [other.without_data()]}}, ckpt)
    values = loaded["mixed"]
    assert values[1].tolist() == [0, 1, 2] and values[2]["x"].tolist() == [1, 1]
    assert [values[0], values[2]["lr"], *values[3:]] == [1, 0.5, "end", [], {}]
    assert loaded[7]["deep"][0].device == torch.device("cpu")


GOLDENS = [name for name in goldens() if name.startswith("megatron-core-")]


def _crc(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


@pytest.mark.parametrize("version", sorted({name.split("/")[0] for name in GOLDENS}))
def test_goldens_come_whole_with_their_metadata(version: str) -> None:
    for name in GOLDENS:
        if not name.startswith(version + "/"):
            continue
        expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())
        path = str(GOLDEN / name)
        assert megatron.check_is_distributed_checkpoint(path)
        tensors = megatron.load_plain_tensors(path)
        found = megatron.load_sharded_metadata(path)
        assert {key for key in found if isinstance(found[key], ShardedObject)} == set(
            expected["objects"]
        )
        assert set(megatron.load_tensors_metadata(path)) == set(expected["tensors"])
        for key, wanted in expected["tensors"].items():
            assert _crc(tensors[key]) == wanted["crc32"], (name, key)
            assert list(found[key].global_shape) == wanted["shape"], (name, key)
            assert found[key].data is None and found[key].dtype == tensors[key].dtype
        common = megatron.load_common_state_dict(path)
        assert common["iteration"] == 1200 and type(common["args"]) is argparse.Namespace
        metadata = megatron.load_content_metadata(path)
        assert (metadata is None) == (expected.get("content_metadata") is None)
        assert metadata is None or metadata["nested"] == {"v": [1, 2]}


def _load_golden_by_halves(rank: int, world: int, name: str) -> None:
    path = str(GOLDEN / name)
    whole = megatron.load_plain_tensors(path)
    template, wanted = {}, {}
    for key, entity in megatron.load_tensors_metadata(path).items():
        axis = max(range(len(entity.global_shape)), key=lambda d: entity.global_shape[d] % 2 == 0,
                   default=None)  # fmt: skip
        splits = axis is not None and entity.global_shape[axis] % world == 0
        tensor = whole[key].chunk(world, axis)[rank] if splits else whole[key]
        offsets = [(axis, rank, world)] if splits else []
        template[key] = ShardedTensor.from_rank_offsets(
            key, torch.empty_like(tensor), *offsets, replica_id=0 if splits else rank
        )
        wanted[key] = tensor
    loaded = megatron.load(template, path)
    for key, tensor in wanted.items():
        assert _crc(loaded[key]) == _crc(tensor), (name, key)


def test_goldens_are_loaded_into_other_layouts(worlds: Worlds) -> None:
    for name in GOLDENS:
        if name.endswith("-w4"):
            worlds[2].run(_load_golden_by_halves, name)


def test_content_metadata_is_saved_without_its_group_and_read_back(ckpt: str) -> None:
    metadata = {"version": 3, "dp_cp_group": lambda: None}
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    megatron.save(state, ckpt, content_metadata=metadata)
    assert "dp_cp_group" in metadata and "content_metadata" not in state
    assert megatron.load_content_metadata(ckpt) == {"version": 3}
    assert megatron.load(dict(state), ckpt)["content_metadata"] == {"version": 3}
    assert files._megatron().load_content_metadata(ckpt) == {"version": 3}
    preloaded = {"content_metadata": {"x": 1}}
    assert megatron.load_content_metadata(preloaded_state_dict=preloaded) == {"x": 1}
    with pytest.raises(ValueError, match="checkpoint_dir"):
        megatron.load_content_metadata()


def test_plain_objects_of_megatrons_programs_come_back_as_what_they_were(ckpt: str) -> None:
    from megatron.core.transformer.enums import AttnBackend as class_of_megatron

    args = argparse.Namespace(signal=signal.SIGTERM, backend=class_of_megatron.flash, own=_Own())
    state = {"args": args, "o": ShardedObject("o", io.BytesIO(b"state"), (1,), (0,))}
    megatron.save(state, ckpt)
    loaded = megatron.load({"o": ShardedObject("o", None, (1,), (0,))}, ckpt)
    assert loaded["o"].getvalue() == b"state"
    assert loaded["args"].signal is signal.SIGTERM
    assert loaded["args"].backend is class_of_megatron.flash
    assert isinstance(loaded["args"].own, tilestone.Opaque)
    assert megatron.load_common_state_dict(ckpt)["args"].signal is signal.SIGTERM
    allowed = megatron.load({}, ckpt, allow_classes=[f"{__name__}._Own"])
    assert isinstance(allowed["args"].own, _Own)


class _Own:
    """A class that is not allowed in pickles."""


def _fail(rank: int, world: int, ckpt: str, what: str) -> None:
    halves = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world))
    if what == "a hole":
        halves = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world + 1))
        megatron.save({"w": halves}, ckpt)
    elif what == "two main replicas":
        megatron.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, ckpt)
    elif what == "a factory":

        def build(*_: Any) -> Any:
            if rank == 1:
                raise RuntimeError("no parts")
            return halves

        megatron.save({"w": ShardedTensorFactory("w", torch.ones(2), build, list)}, ckpt)
    elif what == "a strategy":
        megatron.save({"w": halves}, ckpt, ("torch_dist", 2 if rank == 1 else 1))
    elif what == "no directory":
        megatron.load({"w": halves}, ckpt)
    elif what == "no checkpoint":
        os.makedirs(ckpt, exist_ok=True)
        megatron.load({"w": halves}, ckpt)
    else:
        megatron.load({"w": halves}, ckpt, strict="raise_all" if rank else "log_all")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a hole", "w"),
        ("two main replicas", "w"),
        ("a factory", "no parts"),
        ("a strategy", r"\('save_sharded', 'torch_dist', 2\).*\('zarr', 1\)"),
        ("no directory", "directory .*ckpt does not exist"),
        ("no checkpoint", "is not a distributed checkpoint"),
    ],
)
def test_an_error_on_a_rank_is_raised_on_every_rank(
    worlds: Worlds, ckpt: str, what: str, words: str
) -> None:
    for result in worlds[2].collect(_fail, ckpt, what, timeout=60):
        assert isinstance(result, Raised), what
        assert re.search(words, result.text), result.text
        assert "CheckpointError" in result.bases or what == "a factory", result.bases
    assert not pathlib.Path(ckpt, ".metadata").exists()


def _one_rank_errs(rank: int, world: int, ckpt: str) -> list[str]:
    """The errors of calls in which rank 1 has an invalid argument."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world))}
    megatron.save(state, ckpt)
    odd = rank == 1

    def load(**options: Any) -> Any:
        return megatron.load(dict(state), ckpt, **options)

    calls: dict[str, Callable[[], Any]] = {
        "strict": lambda: load(strict="bogus" if odd else "raise_all"),
        "no dict": lambda: megatron.load(None if odd else state, ckpt),  # type: ignore[arg-type]
        "tuple": lambda: megatron.load({"t": (None, state["w"])} if odd else state, ckpt),
        "save None": lambda: megatron.save(None if odd else state, ckpt),  # type: ignore[arg-type]
        "common": lambda: megatron.save(state, ckpt, common_strategy=("torch", 1) if odd else None),
    }
    found = []
    for name, call in calls.items():
        with pytest.raises(Exception) as raised:
            call()
        found.append(f"{name}: {type(raised.value).__name__}: {raised.value}")
    assert load()["w"].tolist() == [1, 1]
    return found


def test_an_argument_that_one_rank_alone_has_wrong_fails_on_all(worlds: Worlds, ckpt: str) -> None:
    first, second = worlds[2].run(_one_rank_errs, ckpt)
    for own, others in zip(second, first, strict=True):
        assert "TimeoutError" not in own + others, (own, others)
        assert "rank 1" in others, (own, others)


def _differ(rank: int, world: int, ckpt: str) -> list[str]:
    """The log lines of a rank about common state that differs between ranks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilestone").addHandler(handler)
    state = {"rank": {"deep": [rank]}, "same": 1, "own": LocalNonpersistentObject(rank)}

    def without_rank(common: Any) -> Any:
        del common["rank"]["deep"]
        return common

    try:
        megatron.save(state, ckpt)
        first = len(said)
        megatron.save(state, ckpt, preprocess_common_before_consistancy_check=without_rank)
        assert not any("rank.deep" in text for text in said[first:])
        assert state["rank"] == {"deep": [rank]}
        assert megatron.load({}, ckpt) == {"rank": {"deep": [0]}, "same": 1}
        with pytest.raises(tilestone.CheckpointError, match="rank.deep"):
            megatron.save(state, ckpt, common_differs="error")
        # A dtype that pickle alone can't restore on the other rank.
        eight = torch.ones(2).to(torch.float8_e4m3fn)
        megatron.save({"number": rank, "eight": eight}, f"{ckpt}-8")
        assert rank == 0 or "('number',)" in said[-1], said[-1]
    finally:
        logging.getLogger("tilestone").removeHandler(handler)
    return said[:first]


def test_differing_common_state_warns_with_its_path_unless_it_is_preprocessed(
    worlds: Worlds, ckpt: str
) -> None:
    said = worlds[2].run(_differ, ckpt)
    assert any("rank.deep" in text for text in said[0])
    own = "Rank 1 common state dict differs from rank 0 common state dict. "  # stock's wording
    assert any(text.startswith(own) and "('rank', 'deep'" in text for text in said[1]), said[1]
    assert not any(text.startswith("Rank 0 common state") for text in said[0])


def _replicas_differ(rank: int, world: int, ckpt: str) -> list[str]:
    """The log lines of a rank about the replicas of a ShardedObject."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilestone").addHandler(handler)

    def state(data: Any) -> dict[str, Any]:
        return {"rng": ShardedObject("rng_state", data, (1,), (0,), replica_id=rank)}

    try:
        megatron.save(state({"s": rank}), ckpt)
        assert megatron.load(state(None), ckpt) == {"rng": {"s": 0}}
        with pytest.raises(tilestone.CheckpointError, match="rng_state"):
            megatron.save(state({"s": rank}), ckpt, common_differs="error")
    finally:
        logging.getLogger("tilestone").removeHandler(handler)
    return said


def test_replicas_that_differ_are_named_on_each_rank_that_loses_its_own(
    worlds: Worlds, ckpt: str
) -> None:
    first, second = worlds[2].run(_replicas_differ, ckpt)
    assert any('"rng_state/shard_0_1" (ranks 0 and 1 differ)' in text for text in first), first
    assert any('"rng_state/shard_0_1" of rank 1 differs' in text for text in second), second


def _tensor(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), value))}


def test_files_of_a_crashed_stock_save_are_replaced_and_foreign_files_are_refused(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pathlib.Path(ckpt)
    folder.mkdir()
    torch.save({"iteration": 1}, folder / "common.pt")
    for name in ("__0_0.distcp", "mlp__1_12.distcp", ".metadata.tmp"):
        (folder / name).write_bytes(b"half a tensor")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(tilestone.UnsupportedError, match="notes.txt"):
        megatron.save(_tensor(1), ckpt)
    assert (folder / "common.pt").exists() and (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    megatron.save(_tensor(1), ckpt)
    assert "Overwriting old incomplete / corrupted checkpoint" in caplog.text
    assert not (folder / "__0_0.distcp").exists()
    assert megatron.load(_tensor(0), ckpt)["w"].tolist() == [1, 1]
    megatron.save(_tensor(2), ckpt)
    assert f"Overwriting the existing checkpoint at {ckpt}" in caplog.text
    assert megatron.load(_tensor(0), ckpt)["w"].tolist() == [2, 2]
    # metadata.json shows that there was a whole checkpoint, so this is not a crashed save's rest.
    (folder / ".metadata").unlink()
    (folder / "__0_0.distcp").write_bytes(b"a part")
    with pytest.raises(tilestone.CheckpointError):
        megatron.save(_tensor(3), ckpt)
    assert (folder / "__0_0.distcp").exists()


def test_dtypes_are_converted_as_stock_converts_them_unless_that_is_refused(ckpt: str) -> None:
    def state(kind: torch.dtype) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6).to(kind), (0, 0, 1))}

    megatron.save(state(torch.bfloat16), ckpt)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6), (0, 0, 1))}
    loaded = megatron.load(wanted, ckpt)["w"]
    assert loaded is wanted["w"].data and loaded.tolist() == list(range(6))
    strategy = torch_strategies.TorchDistLoadShardedStrategy()
    empty = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6).double(), (0, 0, 1))}
    assert strategy.load(empty, ckpt)["w"].tolist() == list(range(6))
    with pytest.raises(tilestone.MismatchError) as raised:
        megatron.load(wanted, ckpt, cast=False)
    assert raised.value.key == "w"


def test_a_second_replica_on_one_rank_is_left_out_as_stock_does(ckpt: str) -> None:
    def tied(value: float) -> dict[str, Any]:
        copy = _tensor(value)["w"]
        copy.replica_id = 1
        return {"head": [copy], "out": {"deep": {"w": copy}}, **_tensor(value), "step": 1}

    megatron.save(tied(6), ckpt)
    assert megatron.load_common_state_dict(ckpt) == {"step": 1}  # no containers that held them
    loaded = megatron.load(tied(0), ckpt)
    assert loaded["w"].tolist() == loaded["head"][0].tolist() == [6, 6] and loaded["step"] == 1


def test_objects_that_a_load_will_make_cause_no_warning(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(pickling, "_logged", set()):
        megatron.save({"o": ShardedObject("o", io.BytesIO(b"1"), (1,), (0,))}, ckpt)
        assert "Opaque" not in caplog.text
        megatron.save({"o": ShardedObject("o", argparse.Action([], "x"), (1,), (0,))}, ckpt)
        assert "argparse.Action;" in caplog.text


def test_a_tilde_is_a_name_as_in_megatron_core(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    megatron.save(_tensor(1), "~/ckpt")
    assert megatron.load(_tensor(0), "~/ckpt")["w"].tolist() == [1, 1]
    assert (tmp_path / "~" / "ckpt" / "metadata.json").exists()
    assert not list((tmp_path / "home").iterdir())


def test_megatrons_optimizer_config_comes_back_without_being_allowed(ckpt: str) -> None:
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(lr=0.5, params_dtype=torch.bfloat16)
    megatron.save({"config": config}, ckpt)
    assert megatron.load({}, ckpt)["config"] == config
