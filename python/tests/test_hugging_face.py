"""tilestone.dcp's Hugging Face writer and reader, beside torch's, safetensors and transformers."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import shutil
import signal
import time
import uuid
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from ranks import Worlds
from safetensors.torch import load_file, safe_open
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tilestone
import tilestone.dcp as dcp
from tilestone._calls.collective import communicator
from tilestone._calls.model_folder import NewFolder

warnings.simplefilter("ignore")

PIECES = {"save_distributed": True}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "pieces": PIECES,
    "joined": {"save_distributed": True, "enable_consolidation": True},
    "two files": {"fqn_to_index_mapping": {"m.rows": 1, "m.ids": 2, "m.half": 2, "scalar": 1}},
}


def whole(scale: int) -> dict[str, Any]:
    """What the ranks of `sharded` hold together."""
    grid = torch.arange(30).reshape(6, 5) * scale
    m = {"rows": grid.float(), "ids": grid, "half": grid.T.contiguous().bfloat16()}
    return {"m": m, "scalar": torch.tensor(2.5 * scale)}


def sharded(world: int, scale: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    state = whole(scale)
    for name, placement in (("rows", Shard(0)), ("ids", Shard(1)), ("half", Replicate())):
        state["m"][name] = distribute_tensor(state["m"][name], mesh, [placement])
    return state


def flat(state: dict[str, Any]) -> dict[str, Any]:
    tensors = {f"m.{key}": item for key, item in state["m"].items()} | {"scalar": state["scalar"]}
    return {
        key: item.full_tensor() if hasattr(item, "full_tensor") else item
        for key, item in tensors.items()
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], item) and found[key].dtype == item.dtype
        for key, item in wanted.items()
    )


def check_loads(path: str, make: Any, **how: Any) -> None:
    """Our reader in our load and in torch's, and torch's reader, give the same state."""
    wanted = flat(make(1))
    for reader, load in (
        (dcp.HuggingFaceStorageReader, dcp.load),
        (dcp.HuggingFaceStorageReader, stock.load),
        (stock.HuggingFaceStorageReader, stock.load),
    ):
        state = make(0)
        planner = dcp.DefaultLoadPlanner()
        load(state, storage_reader=reader(path), planner=planner, **how)
        assert same(flat(state), wanted), (reader, load)
        assert set(planner.metadata.state_dict_metadata) == set(wanted)
        assert planner.metadata.storage_meta.load_id is not None


def check_folder(folder: pathlib.Path, kind: str) -> None:
    """What is in a folder that was written over an older one."""
    names = {entry.name for entry in folder.iterdir()}
    assert (folder / "config.json").read_text() == "{}" and (folder / "sub" / "a").exists()
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert ("DCP_SHARDING_INFO" in opened.metadata()) == (kind == "pieces")
    assert "old.safetensors" not in names and "sharded" not in names
    assert ("model.safetensors.index.json" in names) == (kind != "pieces")
    if kind != "pieces":
        assert same(found, flat(whole(1)))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
    last = "00002" if kind == "two files" else "00001"
    assert any(name.endswith(f"model-{last}-of-{last}.safetensors") for name in names)
    with tilestone.open(folder) as opened:
        report = opened.verify()
        assert report.ok and (report.items_without_checksum > 0) == (kind == "pieces")
    assert [each.name for each in folder.parent.iterdir() if each.name.startswith(".")] == []


def old_folder(path: str) -> None:
    os.makedirs(path + "/sub")
    os.makedirs(path + "/sharded")
    for name, text in {"config.json": "{}", "sub/a": "", "old.safetensors": "x"}.items():
        pathlib.Path(path, name).write_text(text)
    # What a killed save has left.
    hidden = pathlib.Path(path).parent / f".{os.path.basename(path)}.tilestone-{uuid.uuid4()}" / "model"
    hidden.mkdir(parents=True)
    (hidden / "left.safetensors").write_text("x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("save", [dcp.save, stock.save], ids=["ours", "torch's"])
def test_one_rank_replaces_a_model_by_one_that_all_readers_read(
    tmp_path: pathlib.Path, kind: str, save: Any
) -> None:
    path = str(tmp_path / "hf")
    old_folder(path)
    for scale in (3, 1):
        save(whole(scale), storage_writer=dcp.HuggingFaceStorageWriter(path, **KINDS[kind]), no_dist=True)
    check_folder(tmp_path / "hf", kind)
    check_loads(path, whole, no_dist=True)


def all_kinds(rank: int, world: int, folder: str) -> None:
    for kind, options in KINDS.items():
        for name, save in (("ours", dcp.save), ("torch", stock.save)):
            path = f"{folder}/{kind}-{name}"
            if rank == 0:
                old_folder(path)
            dist.barrier()
            save(sharded(world, 1), storage_writer=dcp.HuggingFaceStorageWriter(path, **options))
            dist.barrier()
            if rank == 0:
                check_folder(pathlib.Path(path), kind)
            check_loads(path, lambda scale: sharded(world, scale))
            dist.barrier()
    writer = stock.HuggingFaceStorageWriter(f"{folder}/torchs", save_distributed=True)
    stock.save(sharded(world, 1), storage_writer=writer)
    check_loads(f"{folder}/torchs", lambda scale: sharded(world, scale))


def test_ranks_write_pieces_and_whole_models_that_all_readers_read(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(all_kinds, str(tmp_path))
    pieces, joined = str(tmp_path / "pieces-ours"), tmp_path / "by torch"
    check_loads(pieces, whole, no_dist=True)
    joined.mkdir()
    # torch's consolidation refuses integers, and leaves zeros of tensors without dims.
    floats = {key: flat(whole(1))[key] for key in ("m.rows", "m.half")}
    consolidate_safetensors_files(pieces, str(joined), dict.fromkeys(floats, 1))
    assert same(load_file(joined / "model-00001-of-00001.safetensors"), floats)


def test_pieces_say_how_large_a_tensor_is_so_that_a_missing_file_shows(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(save_pieces, str(tmp_path / "hf"))
    first, second = sorted((tmp_path / "hf").iterdir())
    kept = second.read_bytes()
    second.unlink()
    for path in (tmp_path / "hf", first):
        with pytest.raises(tilestone.CoverageError, match="files of other ranks are missing") as error:
            tilestone.open(path)
        assert error.value.key and error.value.file == first.name
    for shape, text in (("[2,5]", "contradict the shape"), ("[6]", "other numbers of dims")):
        second.write_bytes(with_header(kept, rb'whole_shape\":[6,5]', rb'whole_shape\":' + shape.encode()))
        with pytest.raises(tilestone.CorruptError, match=text):
            tilestone.open(tmp_path / "hf")
    first.write_bytes(with_header(first.read_bytes(), rb',\"whole_shape\":[6,5]', b""))
    second.write_bytes(kept)  # only one of the two says it
    with pytest.raises(tilestone.CorruptError, match="contradict the shape"):
        tilestone.open(tmp_path / "hf")


def with_header(file: bytes, old: bytes, new: bytes) -> bytes:
    """A safetensors file whose header has other text."""
    length = int.from_bytes(file[:8], "little")
    header = file[8 : 8 + length]
    assert old in header
    header = header.replace(old, new)
    return len(header).to_bytes(8, "little") + header + file[8 + length :]


def save_pieces(rank: int, world: int, path: str) -> None:
    dcp.save(sharded(world, 1), storage_writer=dcp.HuggingFaceStorageWriter(path, **PIECES))


def in_the_background(rank: int, world: int, folder: str) -> None:
    for kind, save in (("joined", dcp.async_save), ("pieces", stock.async_save)):
        state = sharded(world, 1)
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/{kind}", **KINDS[kind])
        saving: Any = save(state, storage_writer=writer)
        state["scalar"].zero_()
        saving.result()
        dist.barrier()
        check_loads(f"{folder}/{kind}", lambda scale: sharded(world, scale))
    # A rank that can't begin the second pass fails all.
    new = NewFolder(f"{folder}/other", "an attempt")
    if rank == 1:
        new.pieces = f"{folder}/nowhere"
    else:
        shutil.copytree(f"{folder}/joined", new.pieces)
    dist.barrier()
    with pytest.raises(tilestone.NotFoundError, match="nowhere.*rank 1"):
        new.join({}, "x.safetensors", communicator(None))
    dist.barrier()
    assert rank == 1 or sorted(os.listdir(new.place)) == ["pieces"]


def test_a_save_in_the_background_and_a_rank_that_fails_between_the_passes(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(in_the_background, str(tmp_path))


def of_rank_0(rank: int, world: int, folder: str) -> None:
    joined = {"save_distributed": True, "enable_consolidation": True}
    for name, save in (("ours", dcp.save), ("torch", stock.save)):
        path = f"{folder}/{name}"
        options = KINDS["two files"] if rank == 0 else joined
        if rank == 0:
            old_folder(path)
        dist.barrier()
        writer = dcp.HuggingFaceStorageWriter(path, **options)
        saved = save(sharded(world, 1), storage_writer=writer)
        if rank == 0 or name == "ours":
            assert set(saved.state_dict_metadata) == set(flat(whole(1)))
        dist.barrier()
        if rank == 0:
            check_folder(pathlib.Path(path), "two files")
    with pytest.raises(dcp.CheckpointException, match="rank 1 does not see the directory"):
        os.makedirs(f"{folder}/host-{rank}")
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/host-{rank}/hf", **PIECES)
        stock.save(sharded(world, 1), storage_writer=writer)
    del writer
    gc.collect()  # the exception refers to it
    assert os.listdir(f"{folder}/host-{rank}") == []
    for kind in ("pieces", "joined"):
        path = f"{folder}/cached {kind}"
        for scale in (1, 2, 3, 1):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            writer = dcp.HuggingFaceStorageWriter(path, **KINDS[kind])
            stock.save(sharded(world, scale), storage_writer=writer, planner=planner)
            check_loads(path, lambda factor: sharded(world, factor * scale))
            dist.barrier()


def test_rank_0s_mapping_counts_all_see_its_directory_and_cached_plans_have_the_newest_order(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(of_rank_0, str(tmp_path))


def model_in(folder: NewFolder, scale: int) -> NewFolder:
    folder.begin()
    tilestone.save({"w": torch.ones(2) * scale}, folder.pieces)
    folder.join({}, "model.safetensors")
    return folder


def test_of_two_saves_to_one_folder_the_later_one_counts_and_what_dead_ones_have_left_goes(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "hf"
    child = os.fork()
    if child == 0:
        _kept = model_in(NewFolder(path), 1)
        signal.pause()
    while not list(tmp_path.glob(".hf.*/model/model.safetensors")):
        time.sleep(0.01)
    with pytest.raises(tilestone.AlreadyExistsError, match="under way"):
        NewFolder(path).begin()
    (left,) = os.listdir(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    first, second = model_in(NewFolder(path), 2), model_in(NewFolder(path), 3)
    assert os.listdir(tmp_path) == [os.path.basename(second.place)] != [left]
    first.abandon()
    second.publish()
    assert torch.equal(tilestone.load(path)["w"], torch.ones(2) * 3)
    model_in(NewFolder(path), 4)  # is dropped
    assert os.listdir(tmp_path) == ["hf"]

    # Over a folder with files of Tilestone's, which has a lock of its own.
    (path / ".tilestone").mkdir(exist_ok=True)
    (path / ".tilestone" / "x").touch()
    first, second = model_in(NewFolder(path), 5), model_in(NewFolder(path), 6)
    with pytest.raises(tilestone.AlreadyExistsError, match="a later save to .*hf has ended this"):
        first.publish()
    second.publish()
    assert torch.equal(tilestone.load(path)["w"], torch.ones(2) * 6)
    assert os.listdir(tmp_path) == ["hf"]

    new = model_in(NewFolder(tmp_path / "new"), 7)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").touch()  # by another program, meanwhile
    new.publish()
    assert {"model.safetensors", "tokenizer.json"} <= set(os.listdir(tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["hf", "new"]


def test_folders_that_can_not_be_replaced_are_refused_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(path: pathlib.Path, kind: type[Exception], text: str) -> None:
        before = sorted(os.listdir(path.parent))
        with pytest.raises(kind, match=text):
            NewFolder(path).begin()
        assert sorted(os.listdir(path.parent)) == before

    (tmp_path / "file").touch()
    check(tmp_path / "file", tilestone.InvalidArgumentError, "is a file")
    check(pathlib.Path("/dev/shm"), tilestone.UnsupportedError, "is mounted there")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for each in ("a", "a/b"):
        check(tmp_path / each, tilestone.UnsupportedError, "working directory")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "__0.metadata").touch()
    by_files = tilestone.ByFiles(0, 2, "of one job", wait=False)
    tilestone.save({"w": torch.ones(2)}, tmp_path / "unpublished", by_files=by_files)
    with tilestone.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.ones(2)})
    versions = tmp_path / "versions"
    base = tilestone.save_delta({"w": torch.ones(2)}, versions, anchor_every=9)
    tilestone.save_delta({"w": torch.zeros(2)}, versions, base=base, anchor_every=9)
    fast = tilestone.Fast(tmp_path / "host")
    with tilestone.CheckpointManager(tmp_path / "drained", fast=fast) as manager:
        manager.save(1, {"w": torch.ones(2)})
    (tmp_path / "metas").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "metas" / "net_0.pt")
    for each, what in (
        ("a", "torch_dist"), ("unpublished", "not published"), ("run", "a run"),
        ("versions/version-00000001", "a delta"), ("host", "steps of a run"),
        ("metas", "torch_checkpointing"),
    ):  # fmt: skip
        text = f"no Hugging Face folder: it holds.*{what}"
        check(tmp_path / each, tilestone.AlreadyExistsError, text)


def refusals(rank: int, world: int, folder: str) -> None:
    path = f"{folder}/hf"
    dcp.save(sharded(world, 1), storage_writer=dcp.HuggingFaceStorageWriter(path))
    places = [f"rank:{each}/cpu" for each in range(world)]
    twice = sharded_tensor.zeros(ChunkShardingSpec(0, places + places), 8, 2)
    object_of_one = {"w": torch.ones(2)} | ({"n": object} if rank == 1 else {})
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (object_of_one, {}, "safetensors holds only tensors.*key n"),
        (object_of_one, PIECES, "safetensors holds only tensors.*key n"),
        ({"w": torch.ones(2)}, {"fqn_to_index_mapping": {"v": 1}}, "does not have this key.*key w"),
        ({"twice": twice}, PIECES, "two pieces of this tensor.*enable_consolidation"),
    ]
    for state, options, text in cases:
        for save in (dcp.save, stock.save):
            with pytest.raises(dcp.CheckpointException, match=f"(?s){text}"):
                save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, **options))
            dist.barrier()
            if rank == 0:
                gc.collect()
                assert same(tilestone.load(path, group=tilestone.solo()), flat(whole(1)))
                assert os.listdir(folder) == ["hf"]
            dist.barrier()
    if rank == 1:
        os.chdir(path)  # of one rank alone
    for save in (dcp.save, stock.save):
        with pytest.raises(dcp.CheckpointException, match="can't be replaced: the working directory"):
            save(sharded(world, 2), storage_writer=dcp.HuggingFaceStorageWriter(path))
    os.chdir("/")
    dist.barrier()
    dcp.save({"twice": twice}, storage_writer=dcp.HuggingFaceStorageWriter(path))
    dist.barrier()
    assert os.listdir(folder) == ["hf"]


def test_what_no_folder_can_hold_is_refused_by_key_on_all_ranks_and_changes_nothing(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(refusals, str(tmp_path))


@pytest.mark.parametrize("kind", ["two files", "pieces"])
def test_a_kill_at_any_time_leaves_the_old_or_the_new_model(tmp_path: pathlib.Path, kind: str) -> None:
    folder = tmp_path / "hf"

    def save(scale: int) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(folder), **KINDS[kind])
        dcp.save(whole(scale), storage_writer=writer, no_dist=True)

    save(1)
    (folder / "config.json").write_text("{}")
    old = 1
    for new in range(2, 8):
        child = os.fork()
        if child == 0:
            try:
                save(new)
            finally:
                os._exit(0)
        time.sleep(0.02 * new)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = tilestone.load(folder)
        scale = int(found["scalar"] / 2.5)
        assert scale in (old, new) and same(found, flat(whole(scale)))
        old = scale
        assert (folder / "config.json").exists()
    save(9)
    assert os.listdir(tmp_path) == ["hf"]


def test_a_writer_refuses_urls_other_checkpoints_and_unknown_parameters(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(tilestone.UnsupportedError, match="needs a directory"):
        dcp.HuggingFaceStorageWriter("s3://bucket/hf")
    with pytest.raises(TypeError, match="token"):
        dcp.HuggingFaceStorageWriter("hf", token="x")  # type: ignore[call-arg]
    for number in (0, -1, "9", True):
        with pytest.raises(tilestone.InvalidArgumentError, match="fqn_to_index_mapping"):
            dcp.HuggingFaceStorageWriter("hf", {"w": number})  # type: ignore[dict-item]
    tilestone.save({"w": torch.ones(2)}, tmp_path / "step")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "step"))
    with pytest.raises(dcp.CheckpointException, match="no Hugging Face folder"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(tilestone.UnsupportedError, match="use_collectives"):
        stock.save({}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert tilestone.open(tmp_path / "step").verify().ok


def tiny_llama(tied: bool) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_steps_of_torchs_interface_that_a_program_calls_itself_do_what_torchs_do(
    tmp_path: pathlib.Path,
) -> None:
    numbers, tensors = {"a": 1, "b": 2}, {"a": torch.rand(4), "b": torch.rand(2, 3)}
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(tensors)
    results = []
    for kind, folder in ((stock, tmp_path / "torchs"), (dcp, tmp_path / "ours")):
        folder.mkdir()
        plan = dataclasses.replace(
            planner.create_local_plan(), storage_data={"fqn_to_index_mapping": numbers}
        )
        writer = kind.HuggingFaceStorageWriter(str(folder), numbers)
        results.append(writer.write_data(plan, planner).wait())
        writer.finish(stock.Metadata({}), [results[-1]])
    assert results[0] == results[1]
    begun = dcp.HuggingFaceStorageWriter(str(tmp_path / "begun"), numbers)
    begun.set_up_storage_writer(True)
    begun.prepare_global_plan([planner.create_local_plan()])
    with pytest.raises(tilestone.UnsupportedError, match="another writer"):
        begun.write_data(plan, planner)  # as a planner may have cached it
    names = [sorted(os.listdir(tmp_path / folder)) for folder in ("torchs", "ours")]
    assert names[0] == names[1] and names[0][-1] == "model.safetensors.index.json"
    ours = str(tmp_path / "ours")
    assert all(torch.equal(tilestone.load(ours)[key], tensor) for key, tensor in tensors.items())
    both = [kind.HuggingFaceStorageReader(ours).read_metadata() for kind in (stock, dcp)]
    assert both[0].storage_data == both[1].storage_data


def slow_to_describe(rank: int, world: int, folder: str) -> None:
    """Rank 0 removes the folder as soon as its load has returned; others then still load."""
    state = sharded(world, 2)
    planner = dcp.DefaultLoadPlanner()
    with pytest.MonkeyPatch.context() as patch:
        if rank != 0:
            load = dcp.state_dict_loader._fill
            patch.setattr(
                dcp.state_dict_loader, "_fill", lambda *a, **k: (load(*a, **k), time.sleep(0.5))
            )
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), planner=planner)
    if rank == 0:
        shutil.rmtree(folder)
    assert torch.equal(state["m"]["rows"].full_tensor(), whole(3)["m"]["rows"])


def test_a_folder_may_go_as_soon_as_one_ranks_load_has_returned(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "model"))
    dcp.save(whole(3), storage_writer=writer, no_dist=True)
    worlds[2].run(slow_to_describe, str(tmp_path / "model"))


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_transformers_opens_what_is_written_and_the_reader_what_it_saves(
    tmp_path: pathlib.Path, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = tiny_llama(tied), str(tmp_path / "hf")
    model.config.save_pretrained(folder)
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    assert same(AutoModelForCausalLM.from_pretrained(folder).state_dict(), model.state_dict())

    export = tilestone.Export(dtype=torch.bfloat16, config_dir=folder)
    with tilestone.CheckpointManager(tmp_path / "run", export=export) as manager:
        manager.save(1, {"model": model, "optim": {"step": 3}})
    (exported,) = manager.exports
    wanted = {key: item.bfloat16() for key, item in model.state_dict().items()}
    assert same(AutoModelForCausalLM.from_pretrained(exported.path).state_dict(), wanted)

    model.save_pretrained(tmp_path / "theirs")
    again = tiny_llama(tied)
    state = again.state_dict()
    if tied:
        del state["lm_head.weight"]  # they write one of two tied weights
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "theirs")), no_dist=True)
    assert same(again.state_dict(), model.state_dict())
