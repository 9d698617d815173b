"""Checkpoints in object stores: kills, races, errors, forks, and other programs."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import plain_ranks
import pytest
import ranks
import torch
from object_server import BUCKET, KEY, SECRET, Server
from children import in_child
from test_object_store import columns_of, expect_state, scenario, state_of, whole
from torch.distributed import checkpoint as stock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilestone
from tilestone.dcp import _enable


def unfinished(server: Server, bucket: str) -> list[str]:
    """The keys of uploads that were begun and neither completed nor aborted."""
    prefix = bucket.removeprefix(f"s3://{BUCKET}/")
    found = server.files().list_multipart_uploads(BUCKET)
    return [each["Key"] for each in found if each["Key"].startswith(prefix)]


LARGE = 24 << 20  # bytes: several parts


TIMEOUT = 5  # seconds that the other ranks wait for a killed one


def die(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def large_state(rank: int = 0, world: int = 1) -> dict[str, Any]:
    rows = numpy.ones(LARGE // 8)
    return {"w": tilestone.ShardedTensor.from_rank_offsets("w", rows, (0, rank, world)), "step": 1}


def save_till_one_dies(
    rank: int, world: int, environment: dict[str, str], path: str, way: str, killed: int
) -> tuple[str, float]:
    """The error of this rank's save, and its seconds."""
    os.environ.update(environment)
    tilestone._core._set_lease_period(0.2)  # type: ignore[attr-defined]
    begin, progress = time.monotonic(), die if rank == killed else False
    with pytest.raises(tilestone.CheckpointError) as raised:
        saved = getattr(tilestone, way)(
            large_state(rank, world), path, overwrite=True, timeout=TIMEOUT, progress=progress
        )
        saved.result()
    return str(raised.value), time.monotonic() - begin


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize(
    ("way", "killed", "next_call"),
    [
        ("one process", 0, "save"),
        ("save", 0, "gc"), ("save", 1, "save"), ("async_save", 0, "save"), ("async_save", 1, "gc"),
    ],
)  # fmt: skip
def test_who_is_killed_leaves_the_old_checkpoint_and_the_next_call_removes_the_files(
    object_server: Server, bucket: str, way: str, killed: int, next_call: str
) -> None:
    path = f"{bucket}/k"
    tilestone.save(state_of(0, 1, 3), path)
    if way == "one process":
        dies = lambda: tilestone.save(large_state(), path, overwrite=True, progress=die)  # noqa: E731
        assert in_child(dies) == -signal.SIGKILL
    else:
        with contextlib.closing(ranks.World(2)) as world:
            heard = world.collect(save_till_one_dies, object_server.environment, path, way, killed)
        assert heard.pop(killed) == "lost"
        text, seconds = heard[0]
        assert f"rank {killed}" in text and seconds < TIMEOUT + 15, heard
    expect_state(tilestone.load(path), 3)
    if next_call == "save":
        tilestone.save(state_of(0, 1, 4), path, overwrite=True)
    else:
        wait_until(lambda: not is_under_way(path))
        left = {pathlib.PurePath(each.name).suffix: each.what for each in tilestone.gc(path)}
        # As far as the killed one had come. The receipt is that of a save in the background.
        assert ".begun" in left and set(left) <= {".begun", ".distcp", ".receipt-ended"}
        assert left.get(".distcp", "data file").startswith(("unfinished upload", "data file"))
        assert len(tilestone.gc(path, delete=True)) == len(left)
    expect_state(tilestone.load(path), 4 if next_call == "save" else 3)
    assert tilestone.open(path).verify().ok
    assert tilestone.gc(path) == [] and unfinished(object_server, bucket) == []
    assert not any("/lock" in name for name in object_server.files().find(path.removeprefix("s3://")))


@pytest.mark.usefixtures("short_leases")
def test_a_conversion_to_zarr_that_is_killed_leaves_what_gc_and_the_next_one_remove(
    object_server: Server, bucket: str
) -> None:
    source, target = f"{bucket}/a", f"{bucket}/z"
    state = {"large": numpy.ones(LARGE // 8), "small": [numpy.arange(3) + i for i in range(5)]}
    tilestone.save(state, source)

    def dies() -> None:
        kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        tilestone.convert(source, target, format="zarr", progress=kill)

    def files() -> list[str]:
        place = target.removeprefix("s3://")  # which this server lists when it is empty
        return [name for name in object_server.files().find(place) if name != place]

    for cleans in (True, False):
        assert in_child(dies) == -signal.SIGKILL
        assert any(name.endswith(".begun") for name in files())
        with pytest.raises(tilestone.NotFoundError):
            tilestone.open(target)
        if cleans:
            wait_until(lambda: not is_under_way(target))
            assert tilestone.gc(target, delete=True)
            assert files() == []
    tilestone.convert(source, target, format="zarr")
    loaded = tilestone.load(target)
    assert numpy.array_equal(loaded["large"], state["large"])
    assert numpy.array_equal(loaded["small"][4], state["small"][4])
    assert tilestone.open(target).verify().ok
    assert tilestone.gc(target) == [] and unfinished(object_server, bucket) == []


def test_a_server_that_is_killed_and_started_again_in_mid_save_leaves_a_whole_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, killed, stands = f"s3://{BUCKET}/k", threading.Event(), [3]
    with Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)

        def kill(_: Any) -> None:
            if not killed.is_set():
                server.kill()
                killed.set()

        def save() -> None:
            large = {"w": numpy.ones(LARGE // 8), "step": 1}
            with contextlib.suppress(tilestone.CheckpointError):
                tilestone.save(large, path, overwrite=True, progress=kill)
                stands[0] = 1

        tilestone.save(state_of(0, 1, 3), path)
        saving = threading.Thread(target=save)
        saving.start()
        assert killed.wait(60)
        server.start()  # on this thread, because a server ends with the one that has started it
        saving.join()
        assert tilestone.load(path)["step"] == stands[0] and tilestone.open(path).verify().ok
        tilestone.save(state_of(0, 1, 4), path, overwrite=True)
        expect_state(tilestone.load(path), 4)
        assert tilestone.gc(path) == [] and unfinished(server, f"s3://{BUCKET}/") == []


def is_under_way(path: str) -> bool:
    try:
        tilestone.gc(path)
    except tilestone.AlreadyExistsError:
        return True
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.1)


def test_a_rank_that_is_killed_and_restarted_completes_its_save_by_files(bucket: str) -> None:
    killed = scenario("killed", f"{bucket}/f")[0]
    assert killed == ["killed", signal.SIGKILL]
    plain_ranks.expect_state(f"{bucket}/f", 4)


def test_of_two_jobs_at_one_place_one_saves_and_the_other_gets_a_clear_error(bucket: str) -> None:
    path = f"{bucket}/two"
    said: list[Any] = [None, None]
    begin = threading.Barrier(2)

    def job(number: int) -> None:
        try:
            begin.wait()
            said[number] = tilestone.save(state_of(0, 1, number), path, group=tilestone.solo())
        except tilestone.CheckpointError as error:
            said[number] = error

    threads = [threading.Thread(target=job, args=(number,)) for number in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    errors = [each for each in said if isinstance(each, tilestone.CheckpointError)]
    assert len(errors) == 1, said
    assert isinstance(errors[0], tilestone.AlreadyExistsError) or "another save" in str(errors[0])
    winner = said.index(next(each for each in said if each not in errors))
    expect_state(tilestone.load(path), winner)
    assert tilestone.open(path).verify().ok


def error_of(call: Any, caplog: pytest.LogCaptureFixture) -> tilestone.CheckpointError:
    """What a call raises; no secret is in it, or in the log."""
    with pytest.raises(tilestone.CheckpointError) as raised, caplog.at_level(logging.DEBUG):
        call()
    error = raised.value
    shown = (str(error), repr(error), repr(vars(error)), caplog.text, *traceback.format_exception(error))
    for text in shown:
        assert SECRET not in text and "WRONGSECRET" not in text
    return error


@pytest.mark.parametrize("call", ["save", "load", "manager"])
def test_wrong_credentials_name_bucket_status_and_code(
    call: str, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONGSECRET")
    error = error_of({
        "save": lambda: tilestone.save({"n": 1}, f"{bucket}/x"),
        "load": lambda: tilestone.load(f"{bucket}/x"),
        "manager": lambda: tilestone.CheckpointManager(f"{bucket}/x").save(0, {"n": 1}),
    }[call], caplog)  # fmt: skip
    text = str(error)
    assert f"s3://{BUCKET}/" in text and "403" in text
    assert "SignatureDoesNotMatch" in text or "HeadObject" in text  # whose answer has no code


def test_a_missing_bucket_is_named(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    for call in (
        lambda: tilestone.save({"n": 1}, "s3://nobody-has-it/x"),
        lambda: tilestone.load("s3://nobody-has-it/x"),
    ):
        text = str(error_of(call, caplog))
        assert "nobody-has-it" in text and "NoSuchBucket" in text and "404" in text


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_a_store_that_does_not_answer_ends_a_call_soon_after_its_timeout(
    call: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, begin = f"{bucket}/x", time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(tilestone.CheckpointError, match="in time"):
            {
                "save": lambda: tilestone.save({"n": 1}, place, timeout=1),
                "async_save": lambda: tilestone.async_save({"n": 1}, place, timeout=1).result(),
                "load": lambda: tilestone.load(place, timeout=1),
            }[call]()
    assert time.monotonic() - begin < 30  # each look at an object would be tried for a minute


def test_malformed_places_are_refused(bucket: str) -> None:
    for place in ("s3://", "s3:///x", f"{bucket}/a/../b", f"{bucket}/./a", f"{bucket}/a//b"):
        with pytest.raises(tilestone.CheckpointError) as raised:
            tilestone.save({"n": 1}, place)
        assert type(raised.value) in (tilestone.InvalidArgumentError, tilestone.UnsafeError), place


def test_a_forked_child_loads_and_saves_beside_its_parent(bucket: str) -> None:
    path = f"{bucket}/p"
    tilestone.save(state_of(0, 1), path)

    def work() -> None:
        expect_state(tilestone.load(path))
        tilestone.save(state_of(0, 1, 1), f"{bucket}/c")

    with tilestone.open(path) as opened:
        assert in_child(work) == 0
        assert opened["step"] == 0 and opened.verify().ok
    expect_state(tilestone.load(f"{bucket}/c"), 1)
    tilestone.save(state_of(0, 1, 2), path, overwrite=True)
    expect_state(tilestone.load(path), 2)


def test_enable_leaves_s3_to_torch_without_credentials_and_says_so_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _enable._why_not_s3.cache_clear()
    try:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        for _ in range(2):
            assert _enable._is_for_torch("s3://b/x") and _enable._is_for_torch("gs://b/x")
            assert not _enable._is_for_torch(pathlib.Path("s3://b/x"))  # which is refused
        assert caplog.text.count("torch itself saves to and loads from s3://") == 1
        assert "credentials" in caplog.text
    finally:
        _enable._why_not_s3.cache_clear()


# ---- Other programs


def options(server: Server) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "endpoint_url": server.url}


def plain(number: float) -> dict[str, Any]:
    return {"w": torch.arange(40_000.0).reshape(100, 400) * number, "n": {"step": number}}


def test_torch_reads_by_s3fs_what_is_saved_and_the_reverse(
    object_server: Server, bucket: str
) -> None:
    tilestone.save(plain(3), f"{bucket}/ours")
    found = plain(0)
    stock.load(found, storage_reader=FsspecReader(f"{bucket}/ours", **options(object_server)))
    assert torch.equal(found["w"], plain(3)["w"]) and found["n"]["step"] == 3
    writer = FsspecWriter(f"{bucket}/torch", **options(object_server))
    stock.save(plain(5), storage_writer=writer)
    found = tilestone.load(plain(0), f"{bucket}/torch")
    assert torch.equal(found["w"], plain(5)["w"]) and found["n"]["step"] == 5
    tilestone.save(plain(6), f"{bucket}/torch", overwrite=True)
    found = tilestone.load(f"{bucket}/torch")
    assert numpy.array_equal(found["w"], plain(6)["w"].numpy())


def connector_on_each(rank: int, world: int, environment: dict[str, str], bucket: str) -> None:
    os.environ.update(environment)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config, mesh = S3ClientConfig(force_path_style=True), init_device_mesh("cpu", (world,))
    url = environment["AWS_ENDPOINT_URL_S3"]

    def at_the_server(made: Any) -> Any:
        made.fs._client = S3Client(region="us-east-1", endpoint=url, s3client_config=config)
        return made

    def state(number: float, dim: int) -> dict[str, Any]:
        whole = torch.arange(40_000.0).reshape(100, 400) * number
        return {"w": distribute_tensor(whole, mesh, [Shard(dim)]), "step": number}

    def expect(found: dict[str, Any], number: float) -> None:
        assert torch.equal(found["w"].full_tensor(), state(number, 0)["w"].full_tensor())
        assert found["step"] == number

    tilestone.save(state(3, 0), f"{bucket}/ours")
    found = state(0, 1)
    stock.load(found, storage_reader=at_the_server(S3StorageReader("us-east-1", f"{bucket}/ours", config)))
    expect(found, 3)
    writer = at_the_server(S3StorageWriter("us-east-1", f"{bucket}/theirs", config))
    stock.save(state(5, 0), storage_writer=writer)
    expect(tilestone.load(state(0, 1), f"{bucket}/theirs"), 5)
    tilestone.save(state(6, 1), f"{bucket}/theirs", overwrite=True)
    expect(tilestone.load(state(0, 0), f"{bucket}/theirs"), 6)


def test_s3torchconnector_reads_what_is_saved_and_the_reverse(
    worlds: ranks.Worlds, object_server: Server, bucket: str
) -> None:
    worlds[2].run(connector_on_each, object_server.environment, bucket)


def rclone(server: Server, *words: str) -> None:
    environment = {
        "RCLONE_CONFIG": "/dev/null", "RCLONE_CONFIG_X_TYPE": "s3",
        "RCLONE_CONFIG_X_PROVIDER": "SeaweedFS", "RCLONE_CONFIG_X_ENDPOINT": server.url,
        "RCLONE_CONFIG_X_ACCESS_KEY_ID": KEY, "RCLONE_CONFIG_X_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    program = os.path.join(sysconfig.get_path("scripts"), "rclone")
    subprocess.run([program, *words], env=os.environ | environment, check=True, timeout=60)


def test_rclone_copies_checkpoints_down_and_up(
    object_server: Server, bucket: str, tmp_path: pathlib.Path
) -> None:
    remote = bucket.replace("s3://", "x:")
    tilestone.save(state_of(0, 1), f"{bucket}/a")
    rclone(object_server, "copy", f"{remote}/a", str(tmp_path / "a"))
    expect_state(tilestone.load(tmp_path / "a"))
    assert tilestone.open(tmp_path / "a").verify().ok
    tilestone.save(state_of(0, 1, 1), tmp_path / "b")
    rclone(object_server, "copy", str(tmp_path / "b"), f"{remote}/b")
    template = columns_of(0, 1, 512)
    expect_state(tilestone.load(template, f"{bucket}/b"), 1)
    assert torch.equal(template["w"].data, whole(1, 1))
    tilestone.save(state_of(0, 1, 2), f"{bucket}/b", overwrite=True)
    expect_state(tilestone.load(f"{bucket}/b"), 2)
