"""Stores other than S3's: those that a program brings along (examples/obstore_store.py over a disk,
memory and a server), and a server without conditions."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import sys
import threading
import time
import uuid
from typing import Any

import pytest
import ranks
import torch
from object_server import BUCKET, KEY, SECRET, Server, without_conditions

import tilestone
from tilestone import _core

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))


def memory() -> tilestone.Store:
    from obstore.store import MemoryStore
    from obstore_store import store_at

    return store_at(MemoryStore())


@pytest.fixture
def place() -> str:
    """In a store in memory."""
    scheme = f"memory-{uuid.uuid4().hex}"
    from obstore.store import MemoryStore
    from obstore_store import store_at

    store = MemoryStore()
    tilestone.register_store(scheme, lambda url: store_at(store, url.partition("://")[2]))
    return f"{scheme}://x/run"


def register_all(folder: str, endpoint: str) -> None:
    import obstore_store
    from obstore.store import LocalStore

    local = LocalStore(folder, mkdir=True)
    tilestone.register_store(
        "disk", lambda url: obstore_store.store_at(local, url.partition("://")[2])
    )
    obstore_store.register(
        "s3a", endpoint=endpoint, access_key_id=KEY, secret_access_key=SECRET, region="us-east-1",
        client_options={"allow_http": True},
    )  # fmt: skip


HEIGHT = 1 << 20  # of a rank's rows of 3 floats: more than one part


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(HEIGHT * 3.0).reshape(HEIGHT, 3) + rank


def save_on_each(rank: int, world: int, place: str, *stores: str) -> None:
    register_all(*stores)
    w = tilestone.ShardedTensor.from_rank_offsets("w", rows_of(rank), (0, rank, world))
    tilestone.save({"w": w, "step": 3}, place)


def load_on_each(rank: int, world: int, place: str, *stores: str) -> None:
    register_all(*stores)
    part = torch.zeros(2 * HEIGHT // world, 3)
    w = tilestone.ShardedTensor.from_rank_offsets("w", part, (0, rank, world))
    assert tilestone.load({"w": w, "step": 0}, place)["step"] == 3
    wanted = torch.cat([rows_of(0), rows_of(1)]).chunk(world)[rank]
    assert torch.equal(part, wanted)


@pytest.mark.parametrize("scheme", ["disk", "s3a"])
def test_what_two_ranks_save_one_loads_opens_and_verifies(
    worlds: ranks.Worlds, object_server: Server, tmp_path: pathlib.Path, scheme: str
) -> None:
    place = f"{scheme}://{BUCKET}/{uuid.uuid4().hex}"
    stores = str(tmp_path / "store"), object_server.url
    worlds[2].run(save_on_each, place, *stores)
    worlds[2].run(load_on_each, place, *stores)
    load_on_each(0, 1, place, *stores)
    with tilestone.open(place) as opened:
        assert opened.verify().ok and opened.world_size == 2
        part = opened.read("w", box=((HEIGHT - 1, HEIGHT + 1), (0, 3)))
        assert torch.equal(torch.as_tensor(part), torch.stack([rows_of(0)[-1], rows_of(1)[0]]))


def test_a_store_without_tags_replaces_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    register_all(str(tmp_path / "store"), "http://127.0.0.1:1")
    for number in (1, 2):
        tilestone.save({"n": number}, "disk://x/c", overwrite=True)
        assert "nothing keeps two saves apart" in caplog.text
        assert tilestone.load("disk://x/c") == {"n": number}


def test_a_run_goes_on_in_a_store_of_the_program(place: str) -> None:
    for first in (1, 4):
        with tilestone.CheckpointManager(place, keep=tilestone.Keep(last=2)) as manager:
            assert manager.restore({"n": 0})[1] == (first - 1 or None)
            for step in range(first, first + 3):
                manager.save(step, {"n": step})
            manager.wait()
            assert manager.restore({"n": 0}) == ({"n": first + 2}, first + 2)
    with tilestone.CheckpointManager(place) as manager:
        assert [each.step for each in manager.steps()] == [5, 6]


def test_a_checkpoint_is_replaced_and_its_readers_get_an_error(place: str) -> None:
    tilestone.save({"w": torch.ones(1 << 16)}, place)
    with tilestone.open(place) as opened:
        tilestone.save({"w": torch.zeros(1 << 16)}, place, overwrite=True)
        with pytest.raises(tilestone.NotFoundError):
            opened.read("w")
    assert tilestone.load(place)["w"].sum() == 0


def test_a_tag_of_the_example_has_all_that_a_store_may_ask_for() -> None:
    import obstore
    from obstore.store import MemoryStore
    from obstore_store import store_at

    objects = MemoryStore()
    store = store_at(objects, "p")
    assert store.put("f", b"1", "")
    found, head = store.stat("f"), obstore.head(objects, "p/f")
    assert found is not None
    assert json.loads(found[2]) == [head["e_tag"], head["version"]]
    assert bytes(store.get("f", 0, 1, found[2])) == b"1"
    assert [store.put("f", b"2", found[2]) for _ in range(2)] == [True, False]


@pytest.mark.usefixtures("short_leases")
def test_a_save_that_torch_plans_is_dropped_while_its_claim_is_renewed(place: str) -> None:
    store, renewing = memory(), threading.Event()

    def put(name: str, data: bytes, tag: str | None) -> bool:
        if tag:
            renewing.set()
            time.sleep(0.5)
        return store.put(name, data, tag)

    slow = dataclasses.replace(store, put=put)
    tilestone.register_store(place.partition("://")[0], lambda url: slow)
    begun = _core.ForeignSave(place.encode(), str(uuid.uuid4()), False, 60)
    assert renewing.wait(60)
    del begun
    tilestone.save({"n": 1}, place)


def test_a_put_whose_answer_was_lost_is_recognised(place: str) -> None:
    store = memory()

    def put(name: str, data: bytes, tag: str | None) -> bool:
        return store.put(name, data, tag) and (not tag or store.put(name, data, tag))

    forgetful = dataclasses.replace(store, put=put)
    tilestone.register_store(place.partition("://")[0], lambda url: forgetful)
    for number in (1, 2):
        tilestone.save({"n": number, "w": torch.ones(1000)}, place, overwrite=True)
        assert tilestone.load(place)["n"] == number


def test_what_a_store_raises_is_said(place: str) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such account")

    scheme = place.partition("://")[0]
    for field in ("stat", "listing", "put"):
        store = dataclasses.replace(memory(), **{field: fail})
        tilestone.register_store(scheme, functools.partial(lambda store, url: store, store))
        with pytest.raises(tilestone.StorageError, match=f"{field} raised .*no such account"):
            tilestone.save({"n": 1}, place)
    tilestone.register_store(scheme, lambda url: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(tilestone.StorageError, match="NoneType, not a tilestone.Store"):
        tilestone.save({"n": 1}, place)


def test_without_conditions_a_save_goes_into_an_empty_place_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with without_conditions(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/c"
        tilestone.save({"w": torch.arange(1 << 16), "n": 1}, place)
        assert "no conditional writes" in caplog.text
        tilestone.async_save({"n": 2}, f"{place}2").result()
        with pytest.raises(tilestone.UnsupportedError, match="no conditional writes"):
            tilestone.save({"n": 3}, place, overwrite=True)
        with pytest.raises(tilestone.UnsupportedError, match="conditional"):
            tilestone.save({"n": 3}, f"{place}3", by_files=tilestone.ByFiles(0, 1, "one token"))
        loaded = tilestone.load(place)
        assert loaded["n"] == 1 and torch.equal(torch.as_tensor(loaded["w"]), torch.arange(1 << 16))
        assert tilestone.load(f"{place}2") == {"n": 2}


def test_fields_and_schemes_are_checked() -> None:
    for wrong in ({"put": None}, {"has_tags": 1}, {"get": True}):
        with pytest.raises(TypeError, match=f"Store: {next(iter(wrong))} "):
            dataclasses.replace(memory(), **wrong)  # type: ignore[arg-type]
    for scheme in ("s3", "file", "", "a/b", "A"):
        with pytest.raises(tilestone.InvalidArgumentError):
            tilestone.register_store(scheme, lambda url: memory())
    tilestone.register_store("own", lambda url: memory())
    for url in ("own://", "own:///x", "own://a/../b", "own://a/./b", "own://a//b"):
        for call in (tilestone.open, lambda place: tilestone.save({"n": 1}, place)):
            with pytest.raises(tilestone.InvalidArgumentError, match="own://bucket/prefix"):
                call(url)
    with pytest.raises(tilestone.UnsupportedError, match="URL"):
        tilestone.save({"n": 1}, "nobodys://x/y")
    assert not os.path.exists("nobodys:")
