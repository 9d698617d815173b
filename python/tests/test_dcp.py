"""tilestone.dcp in one process: its functions, and its writer and reader in torch's own."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import runpy
import sys
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import filesystem, format_utils
from test_stock import assert_same, blank, tree

import tilestone
import tilestone.dcp as dcp
import tilestone.megatron

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SAVES = {
    "drop-in": lambda state, path: dcp.save(state, checkpoint_id=path),
    "plug-in": lambda state, path: stock.save(state, storage_writer=dcp.FileSystemWriter(path)),
    "torch": lambda state, path: stock.save(state, checkpoint_id=path),
}
LOADS = {
    "drop-in": lambda state, path: dcp.load(state, checkpoint_id=path),
    "plug-in": lambda state, path: stock.load(state, storage_reader=dcp.FileSystemReader(path)),
    "torch": lambda state, path: stock.load(state, checkpoint_id=path),
}


@pytest.mark.parametrize("load", LOADS)
def test_megatrons_objects_come_as_they_are_stored_in_a_list(load: str, ckpt: str) -> None:
    tilestone.megatron.save(
        {"iteration": 5, "o": tilestone.megatron.ShardedObject("o", {1: 2}, (1,), (0,))}, ckpt
    )
    wanted: dict[str, Any] = {"o/shard_0_1": None}
    if load != "drop-in":  # Megatron-Core's own load of its common state, by torch's functions
        wanted["common_state/shard_0_1"] = io.BytesIO()
    LOADS[load](wanted, ckpt)
    assert wanted.pop("o/shard_0_1") == [{1: 2}]
    assert all(common == [{"iteration": 5}] for common in wanted.values())


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_what_one_saves_another_loads(save: str, load: str, ckpt: str) -> None:
    state = tree() | {"list": [1, [2]], "rng": numpy.random.get_state()[1:]}
    SAVES[save](state, ckpt)
    loaded = blank(state)
    nested = loaded["nested"]
    LOADS[load](loaded, ckpt)
    for key in state:
        if key != "rng":
            assert_same(loaded[key], state[key], key)
    assert numpy.array_equal(loaded["rng"][0], state["rng"][0])
    assert loaded["nested"] is nested, "filled in place"


@pytest.mark.parametrize("save", ["drop-in", "plug-in"])
def test_a_checkpoint_has_checksums_and_replaces_another_in_one_step(save: str, ckpt: str) -> None:
    for step in (1, 2):
        SAVES[save]({"w": torch.full((300,), float(step)), "step": step}, ckpt)
        with tilestone.open(ckpt) as opened:
            found = opened.verify()
            assert found.ok and found.items_without_checksum == 0
            assert opened["step"] == step and opened.writer.startswith("Tilestone")
            assert opened.path_of("step") == ("step",)
    assert len([name for name in os.listdir(ckpt) if name.endswith(".distcp")]) == 1
    assert tilestone.gc(ckpt) == []


def test_a_flipped_bit_is_found_by_both_loads(ckpt: str) -> None:
    stock.save({"w": torch.ones(50)}, storage_writer=dcp.FileSystemWriter(ckpt))
    (name,) = (name for name in os.listdir(ckpt) if name.endswith(".distcp"))
    data = bytearray(pathlib.Path(ckpt, name).read_bytes())
    at = data.index(numpy.ones(50, numpy.float32).tobytes())
    data[at] ^= 1
    pathlib.Path(ckpt, name).write_bytes(data)
    for load in ("drop-in", "plug-in"):
        with pytest.raises(dcp.CheckpointException) as raised:
            LOADS[load]({"w": torch.zeros(50)}, ckpt)
        assert isinstance(raised.value.failures[0][0], tilestone.CorruptError)


def test_default_planners_have_the_metadata_as_after_torchs_calls(ckpt: str) -> None:
    # torch's own test reads planner.metadata.version after a load.
    for module in (stock, dcp):
        saving, loading = dcp.DefaultSavePlanner(), dcp.DefaultLoadPlanner()
        module.save({"w": torch.ones(2)}, checkpoint_id=ckpt, planner=saving)
        module.load({"w": torch.ones(2)}, checkpoint_id=ckpt, planner=loading)
        for planner in (saving, loading):
            assert isinstance(planner.metadata, dcp.Metadata)
            assert planner.metadata.state_dict_metadata["w"].size == (2,)
            assert planner.metadata.version == "1.0.0"
        assert saving.metadata.storage_meta.load_id is None
        assert loading.metadata.storage_meta.load_id is not None
    saving = dcp.DefaultSavePlanner()
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=ckpt, planner=saving).result()
    assert saving.metadata.state_dict_metadata["w"].size == (3,)


def test_save_returns_torchs_metadata(ckpt: str) -> None:
    saved = dcp.save({"a": {"w": torch.ones(2, 3)}, "n": 5}, checkpoint_id=ckpt)
    assert isinstance(saved, dcp.Metadata)
    copied = pickle.loads(pickle.dumps(saved))
    assert type(copied) is stock.Metadata
    assert copied.state_dict_metadata["a.w"].size == torch.Size([2, 3])
    assert copied.planner_data["a.w"] == ("a", "w")
    assert copied.storage_meta.save_id == saved.storage_meta.save_id
    late = dcp.save({"n": 6}, checkpoint_id=ckpt)
    dcp.save({"n": 7}, checkpoint_id=ckpt)
    with pytest.raises(RuntimeError, match="was replaced"):
        late.storage_data
    plugged = stock.save({"n": 8}, storage_writer=dcp.FileSystemWriter(ckpt))
    (info,) = plugged.storage_data.values()
    assert type(info) is stock.filesystem._StorageInfo
    assert plugged.storage_meta.save_id and plugged.storage_meta.checkpoint_id == ckpt


class Counter:
    """A Stateful object."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"n": self.n, "t": torch.tensor([self.n])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.n = state["n"]
        assert state["t"].item() == self.n


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_stateful_objects_at_the_top_level(save: str, load: str, ckpt: str) -> None:
    saved, loaded = Counter(3), Counter(0)
    SAVES[save]({"counter": saved}, ckpt)
    state = {"counter": loaded}
    LOADS[load](state, ckpt)
    assert state["counter"] is loaded and loaded.n == 3
    assert saved.calls == ["state_dict"] and loaded.calls == ["state_dict", "load_state_dict"]


def test_a_stateful_object_below_the_top_level_is_an_object_as_in_torch(ckpt: str) -> None:
    state = {"a": {"counter": Counter(4)}, "array": numpy.arange(3)}
    dcp.save(state, checkpoint_id=ckpt)
    found = dcp.FileSystemReader(ckpt).read_metadata().state_dict_metadata
    assert {key: type(each) for key, each in found.items()} == {
        "a.counter": stock.BytesStorageMetadata,
        "array": stock.BytesStorageMetadata,
    }
    for load in LOADS:
        other: dict[str, Any] = {"a": {"counter": None}, "array": None}
        LOADS[load](other, ckpt)
        assert other["a"]["counter"].n == 4 and numpy.array_equal(other["array"], numpy.arange(3))


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": ({"w": torch.zeros(4), "v": 0}, RuntimeError, "Missing key in checkpoint.*: v"),
    "size": ({"w": torch.zeros(5)}, ValueError, "Size mismatch.*w"),
    "kind": ({"w": 0}, ValueError, "Invalid checkpoint metadata for w"),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("what", FAILURES)
def test_a_load_fails_with_torchs_exceptions(what: str, load: str, ckpt: str) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=ckpt)
    wanted, kind, text = FAILURES[what]
    with pytest.raises(dcp.CheckpointException) as raised:
        LOADS[load](wanted, ckpt)
    ((rank, (error, _)),) = raised.value.failures.items()
    assert rank == 0 and isinstance(error, kind)
    with pytest.raises(kind, match=text):
        raise error
    if load == "drop-in":  # it has the option that it names
        assert "Differences" not in str(error)
        assert ("allow_partial_load=True" in str(error)) == (what == "missing")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("partial", [False, True])
def test_dicts_that_torch_up_to_2_3_saved_as_one_object(
    partial: bool, load: str, ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        """Of no class that the engine creates."""

    monkeypatch.setitem(globals(), "Kept", Kept)
    Kept.__qualname__ = "Kept"
    scheduler = {"last_epoch": 3, "rates": [{"lr": 0.5}], "more": {1: (2, 3)}, "kept": Kept()}
    state = {"w": torch.ones(2), "scheduler": scheduler, "meta": {"step": 7, "new": 1}}
    with monkeypatch.context() as patched:
        patched.setattr(stock._version, "_derived_version", "2_3")
        saving = dcp.DefaultSavePlanner(flatten_sharded_tensors=False)  # which 2.13 does otherwise
        stock.save(state, checkpoint_id=ckpt, planner=saving)
    assert set(dcp.FileSystemReader(ckpt).read_metadata().state_dict_metadata) == set(state)
    wanted = {
        "w": torch.zeros(2),
        "scheduler": {"last_epoch": 0, "rates": [{"lr": 0.0}], "more": {1: 0}, "kept": None},
        "meta": {"step": 0},
    }
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    if load == "drop-in":
        dcp.load(wanted, checkpoint_id=ckpt, planner=planner)
    else:
        LOADS[load](wanted, ckpt)
    assert wanted["w"].sum() == 2 and wanted["meta"] == {"step": 7, "new": 1}
    found = wanted["scheduler"]
    assert isinstance(found.pop("kept"), Kept)
    assert found == {"last_epoch": 3, "rates": [{"lr": 0.5}], "more": {1: (2, 3)}}
    loaded = tilestone.load({"meta": {"step": 0}}, ckpt)
    assert loaded == {"meta": {"step": 7, "new": 1}}


@pytest.mark.parametrize("load", LOADS)
def test_an_object_takes_the_place_of_a_tensor_as_in_torch(load: str, ckpt: str) -> None:
    state = {"k": 1, "n": {"m": [1, 2], "x": numpy.ones(2)}, "l": [torch.ones(1), 5], "t": torch.ones(2)}
    stock.save(state, checkpoint_id=ckpt)
    zeros = torch.zeros(2)
    wanted: dict[str, Any] = {
        "k": torch.zeros(1),
        "n": {"m": torch.zeros(2), "x": torch.zeros(2).double()},
        "l": [torch.zeros(1), torch.zeros(1)],
        "t": zeros,
    }
    LOADS[load](wanted, ckpt)
    assert wanted["k"] == 1
    assert wanted["n"]["m"] == [1, 2]
    assert isinstance(wanted["n"]["x"], numpy.ndarray)
    assert wanted["l"] == [torch.ones(1), 5]
    assert wanted["t"] is zeros
    assert torch.equal(zeros, torch.ones(2))


def test_a_partial_load_keeps_what_the_checkpoint_lacks(ckpt: str) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=ckpt)
    wanted = {"w": torch.zeros(4), "v": torch.full((2,), 7.0), "n": 5}
    dcp.load(wanted, checkpoint_id=ckpt, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert wanted["w"].sum() == 4 and wanted["v"].sum() == 14 and wanted["n"] == 5


def test_empty_states_files_in_memory_and_dicts_of_other_classes(ckpt: str) -> None:
    class Watched(dict):
        was_set = False

        def __setitem__(self, key, value) -> None:
            self.was_set = True
            super().__setitem__(key, value)

    class Empty(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = 9

    for save, load in ((save, load) for save in SAVES.values() for load in LOADS.values()):
        save({}, ckpt)
        load({}, ckpt)
        state = Watched(empty=Empty(1))
        save(state, ckpt)
        load(state, ckpt)
        assert state["empty"].n == 9 and not state.was_set
        state = Watched(file=io.BytesIO(b"abc"), inside={"l": [1, 2]})
        save(state, ckpt)
        wanted = Watched(file=io.BytesIO(), inside={"l": [3]})
        load(wanted, ckpt)
        assert wanted["file"].getvalue() == b"abc" and wanted["inside"] == {"l": [1, 2]}
        assert wanted.was_set


def test_another_dtype_is_converted_as_in_torch(ckpt: str) -> None:
    dcp.save({"w": torch.arange(4, dtype=torch.float64)}, checkpoint_id=ckpt)
    for load in LOADS:
        wanted = {"w": torch.zeros(4, dtype=torch.bfloat16)}
        LOADS[load](wanted, ckpt)
        assert wanted["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("planner", [None, dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)])
def test_overwriting_can_be_refused(planner: Any, ckpt: str) -> None:
    dcp.save({"n": 1}, checkpoint_id=ckpt)
    writer = dcp.FileSystemWriter(ckpt, overwrite=False)
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        dcp.save({"n": 2}, storage_writer=writer, planner=planner)
    assert tilestone.load(ckpt) == {"n": 1}


def test_a_save_beside_another_one_says_so(ckpt: str) -> None:
    under_way = dcp.FileSystemWriter(ckpt)
    under_way.set_up_storage_writer(True)
    under_way.prepare_global_plan([dcp.SavePlan([])])
    with pytest.raises(dcp.CheckpointException, match="another save is under way") as raised:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=ckpt)
    assert isinstance(raised.value.failures[0][0], tilestone.AlreadyExistsError)
    under_way.reset()
    dcp.save({"w": torch.ones(2)}, checkpoint_id=ckpt)


@pytest.mark.parametrize(
    "call",
    [
        lambda url: dcp.save({"n": 1}, checkpoint_id=url),
        lambda url: dcp.load({"n": 1}, checkpoint_id=url),
        lambda url: dcp.async_save({"n": 1}, checkpoint_id=url),
        dcp.FileSystemWriter,
        dcp.FileSystemReader,
        lambda url: dcp.FileSystemWriter("w").reset(url),
        lambda url: dcp.FileSystemReader("w").reset(url),
    ],
)
def test_a_url_is_refused(call: Any, tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("gs://bucket/x", "gs:/bucket/x", pathlib.Path("gs://bucket/x")):
        with pytest.raises(tilestone.UnsupportedError, match="URL .gs://?bucket/x"):
            call(url)
    assert not dcp.FileSystemWriter.validate_checkpoint_id("gs://bucket/x")
    assert not list(tmp_path.iterdir())


def test_a_call_without_a_place_fails_as_in_torch() -> None:
    for call in (dcp.save, dcp.load, lambda state: dcp.async_save(state).result()):
        with pytest.raises(RuntimeError, match="checkpoint_id.*must be specified"):
            call({"n": 1})


def test_ids_may_be_paths_and_begin_with_a_tilde(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (pathlib.Path("a/b"), "~", pathlib.Path("~c")):
        dcp.save({"n": 1}, checkpoint_id=place)
        writer = dcp.FileSystemWriter("elsewhere")
        stock.save({"n": 2}, storage_writer=writer, checkpoint_id=place)
        assert writer.checkpoint_id == pathlib.Path(place)
        wanted = {"n": 0}
        stock.load(wanted, storage_reader=dcp.FileSystemReader("x"), checkpoint_id=place)
        assert wanted == {"n": 2} and (tmp_path / place / ".metadata").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_format_utils_convert_both_ways(ckpt: str, tmp_path: pathlib.Path) -> None:
    from tilestone.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp

    state = {"w": torch.arange(3), "ns": argparse.Namespace(lr=0.5), "d": {"n": [1, 2]}}
    torch.save(state, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", ckpt)
    dcp_to_torch_save(ckpt, tmp_path / "b.pt")
    assert_same(torch.load(tmp_path / "b.pt", weights_only=False), state)
    with tilestone.open(ckpt) as opened:
        assert opened.verify().items_without_checksum == 0


# ---- in the background, and without editing ----


@pytest.mark.parametrize("own_writer", [True, False])
def test_async_save_in_a_thread(own_writer: bool, ckpt: str) -> None:
    weights = torch.ones(1000)
    dcp.save({"w": weights * 9}, checkpoint_id=ckpt)
    if own_writer:
        future = stock.async_save({"w": weights}, storage_writer=dcp.FileSystemWriter(ckpt))
    else:
        future = dcp.async_save({"w": weights}, checkpoint_id=ckpt)
    weights.zero_()
    saved = future.result()
    assert isinstance(saved, dcp.Metadata) and saved.storage_meta.save_id
    assert tilestone.load(ckpt)["w"].sum() == 1000


def test_a_failure_in_the_background_is_in_the_future(ckpt: str) -> None:
    dcp.save({"n": 1}, checkpoint_id=ckpt)
    refused = dcp.FileSystemWriter(ckpt, overwrite=False)
    for future in (
        dcp.async_save({"f": lambda: None}, checkpoint_id=ckpt),
        dcp.async_save({"n": 2}, storage_writer=refused),
    ):
        with pytest.raises(dcp.CheckpointException, match="can't be pickled|already exists"):
            future.result()
        assert not future.cancel()
    assert dcp.async_save({"n": 3}, checkpoint_id=ckpt).result().planner_data == {"n": ("n",)}


def test_a_stager_that_returns_a_future(ckpt: str) -> None:
    from tilestone.dcp.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, True, False))
    response = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=ckpt, async_stager=stager)
    assert isinstance(response, dcp.state_dict_saver.AsyncSaveResponse)
    response.staging_completion.result()
    assert isinstance(response.upload_completion.result(), dcp.Metadata)
    stager.close()


class Elsewhere(stock.filesystem.FileSystem):
    """A file system of the program's."""

    def init_path(self, path: Any) -> pathlib.Path:
        return pathlib.Path(f"{path}-elsewhere")


def test_a_file_system_of_the_programs_is_refused_or_left_to_torch(ckpt: str) -> None:
    stock.save({"w": torch.ones(3)}, checkpoint_id=f"{ckpt}-elsewhere")
    reader = dcp.FileSystemReader(ckpt)
    reader.fs = Elsewhere()
    reader.path = reader.fs.init_path(ckpt)
    for load in (stock.load, dcp.load):
        wanted = {"w": torch.zeros(3)}
        load(wanted, storage_reader=reader)
        assert wanted["w"].sum() == 3
    for save in (stock.save, dcp.save):
        writer = dcp.FileSystemWriter(ckpt)
        writer.fs = Elsewhere()
        with pytest.raises(dcp.CheckpointException, match="its fs can't be"):
            save({"w": torch.ones(3)}, storage_writer=writer)
    assert not os.path.exists(ckpt)


def test_format_utils_run_as_a_program(
    ckpt: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    monkeypatch.setattr(sys, "argv", ["x", "torch_to_dcp", str(tmp_path / "a.pt"), ckpt])
    try:
        runpy.run_module("tilestone.dcp.format_utils", run_name="__main__")
    finally:
        dcp.disable()
    assert "Tilestone" in tilestone.open(ckpt).writer


def test_enable_makes_torch_itself_use_the_writer_and_the_reader(ckpt: str, caplog) -> None:
    caplog.set_level("INFO", "tilestone")
    file = f"{ckpt}.pt"
    torch.save({"w": torch.ones(2)}, file)
    dcp.enable()
    try:
        dcp.enable()
        stock.save({"w": torch.ones(4)}, checkpoint_id=ckpt)
        assert "Tilestone" in tilestone.open(ckpt).writer
        writer = stock.FileSystemWriter(ckpt)
        for _ in range(2):
            stock.save({"w": torch.ones(5)}, storage_writer=writer)
            assert "Tilestone" in tilestone.open(ckpt).writer
            found = stock.FileSystemReader(ckpt).read_metadata().storage_meta
            assert found is not None and found.save_id == writer.save_id
        stock.save_state_dict({"w": torch.ones(5)}, stock.FileSystemWriter(ckpt), no_dist=True)
        assert "Tilestone" in tilestone.open(ckpt).writer
        format_utils.torch_save_to_dcp(file, f"{ckpt}-converted")
        assert "Tilestone" in tilestone.open(f"{ckpt}-converted").writer
        writer = stock.FileSystemWriter(ckpt)
        writer.fs = Elsewhere()  # a file system of the program's
        writer.path = writer.fs.init_path(ckpt)
        stock.save({"w": torch.ones(5)}, storage_writer=writer)
        assert "PyTorch" in tilestone.open(f"{ckpt}-elsewhere").writer
        stock.async_save({"w": torch.ones(6)}, checkpoint_id=ckpt).result()
        wanted = {"w": torch.zeros(6)}
        stock.load(wanted, checkpoint_id=ckpt)
        assert wanted["w"].sum() == 6 and "Tilestone" in tilestone.open(ckpt).writer
    finally:
        dcp.disable()
    assert caplog.text.count("now writes and reads with Tilestone") == 1
    stock.save({"w": torch.ones(7)}, checkpoint_id=ckpt)
    assert "PyTorch" in tilestone.open(ckpt).writer
    format_utils.torch_save_to_dcp(file, ckpt)
    assert "PyTorch" in tilestone.open(ckpt).writer


def test_enable_leaves_to_torch_what_tilestone_does_not_take(
    tmp_path: pathlib.Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[type] = []

    class Planner(stock.DefaultSavePlanner):
        def create_local_plan(self) -> stock.SavePlan:
            seen.append(type(self))
            return super().create_local_plan()

    dcp.enable()
    try:
        for save in (stock.save, lambda *a, **k: stock.async_save(*a, **k).result()):
            for url in ("memory://enable/x", f"file://{tmp_path}/x"):
                save({"w": torch.ones(3)}, checkpoint_id=url, planner=Planner())
                wanted = {"w": torch.zeros(3)}
                stock.load(wanted, checkpoint_id=url)
                assert wanted["w"].sum() == 3 and seen.pop() is Planner
        for _ in range(2):
            writer = stock.FileSystemWriter(
                tmp_path / "x", serialization_format=filesystem.SerializationFormat.SAFETENSORS
            )
            stock.save({"w": torch.ones(3)}, storage_writer=writer)
        for url in (pathlib.Path("s3://b/x"), "s3:/b/x"):
            for refused in (
                lambda: stock.save({"n": 1}, checkpoint_id=url),  # noqa: B023
                lambda: stock.async_save({"n": 1}, checkpoint_id=url).result(),  # noqa: B023
                lambda: stock.load({"n": 1}, checkpoint_id=url),  # noqa: B023
                lambda: stock.save({}, storage_writer=stock.FileSystemWriter(url)),  # noqa: B023
            ):
                with pytest.raises(tilestone.UnsupportedError, match="URL .s3:/b/x"):
                    refused()
    finally:
        dcp.disable()
    assert not seen and [each.name for each in tmp_path.iterdir()] == ["x"]
