"""CheckpointManager with a fast tier: steps on the hosts, draining, and what a restart continues."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy
import pytest
import ranks
from children import in_child

import tilestone

ROWS = 60


def state_of(step: int) -> dict[str, Any]:
    return {"w": numpy.full(4000, step, numpy.float32), "step": step}


def shard_of(rank: int, world: int, axis: int, data: Any) -> tilestone.ShardedTensor:
    """This rank's part of a matrix that is cut along an axis."""
    return tilestone.ShardedTensor.from_rank_offsets("w", data, (axis, rank, world))


def sharded_state(rank: int, world: int, step: int, axis: int = 0) -> dict[str, Any]:
    whole = numpy.arange(ROWS * ROWS, dtype=numpy.float64).reshape(ROWS, ROWS) + step
    part = numpy.ascontiguousarray(numpy.split(whole, world, axis)[rank])
    return {"w": shard_of(rank, world, axis, part), "step": step, "mean": numpy.full(9, step)}


def steps_in(run: pathlib.Path) -> list[int]:
    return [int(each.name[5:]) for each in sorted(run.glob("step-*"))]


def on_host(fast: pathlib.Path) -> list[int]:
    return sorted(int(each.name[5:13]) for each in fast.glob("step-*/.kept") for each in [each.parent])


def manager_of(run: Any, fast: Any, **options: Any) -> tilestone.CheckpointManager:
    if not isinstance(fast, tilestone.Fast):
        fast = tilestone.Fast(fast)
    return tilestone.CheckpointManager(run, fast=fast, **options)


@pytest.mark.parametrize("in_background", [True, False])
def test_steps_stay_on_the_host_and_some_are_copied_to_the_run(
    tmp_path: pathlib.Path, in_background: bool
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast, drain_every=4, async_save=in_background) as manager:
        for step in range(1, 7):
            assert manager.save(step, state_of(step))
            saving = manager.last_save
            saving.local.result()
        manager.wait()
        assert steps_in(run) == [4] and on_host(fast) == [5, 6]
        assert manager.latest() == 4
    tilestone.open(run / "step-00000004").verify()
    numpy.testing.assert_array_equal(tilestone.load(run / "step-00000004")["w"], state_of(4)["w"])
    with manager_of(run, fast) as manager:
        state, step = manager.restore(state_of(0))
        assert step == 6 and state["step"] == 6 and state["w"][0] == 6
        assert manager.save(7, state_of(7))
    assert steps_in(run) == [4, 7]


def test_what_is_copied_is_what_an_ordinary_save_writes(tmp_path: pathlib.Path) -> None:
    with manager_of(tmp_path / "run", tmp_path / "fast") as manager:
        manager.save(1, state_of(1), {"loss": 0.5})
        saving = manager.last_save
        assert saving is not None and saving.durable.result() is not None
        assert saving.durable.exception() is None
    with tilestone.CheckpointManager(tmp_path / "plain") as manager:
        manager.save(1, state_of(1), {"loss": 0.5})
    sizes = [
        sorted((file.suffix, file.stat().st_size) for file in folder.rglob("*") if file.is_file())
        for folder in (tmp_path / "run/step-00000001", tmp_path / "plain/step-00000001")
    ]
    assert [suffix for suffix, _ in sizes[0]] == [suffix for suffix, _ in sizes[1]]
    assert manager.steps()[0].metrics == {"loss": 0.5}


def test_the_same_step_once_more_with_the_same_state_writes_nothing(
    tmp_path: pathlib.Path,
) -> None:
    with manager_of(tmp_path / "run", tmp_path / "fast", drain_every=100) as manager:
        manager.save(3, state_of(3))
        assert not manager.should_save(3)
        before = os.listdir(tmp_path / "fast")
        manager.save(3, state_of(3), force=True)
        assert os.listdir(tmp_path / "fast") == before
        with pytest.raises(tilestone.AlreadyExistsError):
            manager.save(3, state_of(4), force=True)


def test_wrong_arguments_are_refused(tmp_path: pathlib.Path) -> None:
    for fast in (tilestone.Fast("x", keep=0), tilestone.Fast(""), "x"):
        with pytest.raises(tilestone.InvalidArgumentError):
            tilestone.CheckpointManager(tmp_path, fast=fast)  # type: ignore[arg-type]
    with pytest.raises(tilestone.UnsupportedError):
        manager_of(tmp_path, tilestone.Fast("x", copies=2))
    with pytest.raises(tilestone.InvalidArgumentError, match="another host"):
        manager_of(tmp_path, tilestone.Fast(tmp_path / "x", copies=1))
    with pytest.raises(tilestone.InvalidArgumentError, match="drain_every"):
        tilestone.CheckpointManager(tmp_path, drain_every=10)


def test_a_host_s_directory_is_for_one_run_at_a_time(tmp_path: pathlib.Path) -> None:
    with manager_of(tmp_path / "a", tmp_path / "fast"):
        code = f"""
            import tilestone
            try:
                tilestone.CheckpointManager({str(tmp_path / 'b')!r}, timeout=1,
                                            fast=tilestone.Fast({str(tmp_path / 'fast')!r}))
            except tilestone.AlreadyExistsError as error:
                assert "another process" in str(error), error
                raise SystemExit(7)
        """
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
        assert ended.returncode == 7


def test_only_what_the_fast_tier_has_made_is_removed(tmp_path: pathlib.Path) -> None:
    run, leftover = tmp_path / "run", "step-00000007-00000000-1111-4222-8333-444444444444"
    with tilestone.CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    (tmp_path / "link").symlink_to(run)
    for fast in (run, tmp_path / "link"):
        with pytest.raises(tilestone.InvalidArgumentError, match="run's directory itself"):
            manager_of(run, fast)
    others = ["step-7", "step-00000007-old", f"{leftover}.bak", f"my-{leftover}"]
    for name in [leftover, *others]:
        (run / name).mkdir()
        (run / name / "file").touch()
    with manager_of(tmp_path / "other", run):
        pass
    assert not (run / leftover).exists()
    assert all((run / name / "file").exists() for name in others)
    for step in (1, 2):
        tilestone.open(run / f"step-{step:08}").verify()


# ---- Two ranks, each on a host of its own: their directories differ.


def train(
    rank: int, world: int, folder: str, steps: list[int], drain_every: int, axis: int = 0
) -> Any:
    """Restores, saves the steps, and returns what was restored."""
    with manager_of(
        f"{folder}/run", f"{folder}/host{rank}", drain_every=drain_every
    ) as manager:
        template = sharded_state(rank, world, 0, axis)
        restored, found = manager.restore(template)
        for step in steps:
            manager.save(step, sharded_state(rank, world, step, axis))
    expected = sharded_state(rank, world, found or 0, axis)
    assert restored["step"] == (found or 0)
    numpy.testing.assert_array_equal(template["w"].data, expected["w"].data)
    numpy.testing.assert_array_equal(restored["mean"], expected["mean"])
    return found


def test_ranks_of_two_hosts_restore_the_newest_step_from_their_disks(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    assert world.run(train, str(tmp_path), [1, 2, 3], 2) == [None, None]
    assert steps_in(tmp_path / "run") == [2]
    for host in ("host0", "host1"):
        assert on_host(tmp_path / host) == [2, 3]
        assert len(list(tmp_path.glob(f"{host}/step-00000003-*/*.distcp"))) == 1
    assert world.run(train, str(tmp_path), [4], 2) == [3, 3]
    assert steps_in(tmp_path / "run") == [2, 4]
    for found in steps_in(tmp_path / "run"):
        tilestone.open(tmp_path / f"run/step-{found:08}").verify()


def test_another_layout_reads_from_the_host_that_has_the_bytes(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train, str(tmp_path), [1, 2], 10)
    assert not steps_in(tmp_path / "run")
    assert world.run(train, str(tmp_path), [], 10, 1) == [2, 2]


def test_a_wiped_host_takes_the_newest_drained_step(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train, str(tmp_path), [1, 2, 3], 2)
    shutil.rmtree(tmp_path / "host1")
    assert world.run(train, str(tmp_path), [3, 4], 2) == [2, 2]
    assert steps_in(tmp_path / "run") == [2, 4]


def two_on_one_host(rank: int, world: int, folder: str) -> None:
    with manager_of(f"{folder}/run", f"{folder}/host", drain_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, sharded_state(rank, world, step))
    with manager_of(f"{folder}/run", f"{folder}/host") as manager:
        template = sharded_state(rank, world, 0, 1)
        assert manager.restore(template)[1] == 3
        numpy.testing.assert_array_equal(
            template["w"].data, sharded_state(rank, world, 3, 1)["w"].data
        )


def test_ranks_that_share_a_directory_find_out(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(two_on_one_host, str(tmp_path))
    assert steps_in(tmp_path / "run") == [2] and on_host(tmp_path / "host") == [2, 3]


# ---- Copies on other hosts.


def train_with_copies(
    rank: int, world: int, folder: str, steps: list[int], domains: list[str] | None = None
) -> Any:
    fast = tilestone.Fast(f"{folder}/host{rank}", copies=1, domains=domains)
    with manager_of(f"{folder}/run", fast, drain_every=100) as manager:
        template = sharded_state(rank, world, 0)
        found = manager.restore(template)[1]
        for step in steps:
            manager.save(step, sharded_state(rank, world, step))
    numpy.testing.assert_array_equal(
        template["w"].data, sharded_state(rank, world, found or 0)["w"].data
    )
    return found


def test_with_copies_a_lost_host_loses_no_step(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[3]
    world.run(train_with_copies, str(tmp_path), [1, 2])
    for lost, newest in enumerate([2, 3, 4]):
        shutil.rmtree(tmp_path / f"host{lost}")
        found = world.run(train_with_copies, str(tmp_path), [newest + 1])
        assert found == [newest] * 3


def train_beside_a_group_of_rank_0(rank: int, world: int, folder: str) -> Any:
    import torch.distributed as dist

    dist.new_group([0])  # torch would name further groups differently on rank 0
    return train_with_copies(rank, world, folder, [1])


def test_ranks_that_are_in_different_groups_make_a_tier(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    assert worlds[2].run(train_beside_a_group_of_rank_0, str(tmp_path)) == [None, None]


def test_copies_go_to_another_domain(worlds: ranks.Worlds, tmp_path: pathlib.Path) -> None:
    world = worlds[3]
    world.run(train_with_copies, str(tmp_path), [1], ["a", "a", "b"])
    files = [len(list(tmp_path.glob(f"host{rank}/*/*.distcp"))) for rank in range(3)]
    assert files == [2, 1, 3]  # two hosts send to the third


# ---- A full disk, and a run's directory that can't be written.


def full_disk(monkeypatch_path: pathlib.Path, size: str) -> Any:
    """A small tmpfs there."""
    monkeypatch_path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", monkeypatch_path], check=True
    )


@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_of_a_host_is_passed_by(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    fast = tmp_path / "fast"
    full_disk(fast, "1m")
    try:
        with manager_of(
            tmp_path / "run", fast, drain_every=100, async_save=in_background
        ) as manager:
            manager.save(1, state_of(1))
            manager.save(2, {**state_of(2), "w": numpy.full(1 << 20, 2.0)})
            manager.save(3, state_of(3))
            manager.wait()
            assert steps_in(tmp_path / "run") == [2] and on_host(fast) == [1, 3]
        assert caplog.text.count("the fast tier is full".lower()) + caplog.text.count(
            "The fast tier is full"
        ) == 1
        with manager_of(tmp_path / "run", fast) as manager:
            assert manager.restore(state_of(0))[1] == 3
    finally:
        subprocess.run(["umount", fast], check=True)


def save_too_much(rank: int, world: int, folder: str, options: dict[str, Any]) -> list[str]:
    """Rank 1 writes its tensors in the call; then its objects do not fit. Returns the outcomes."""
    outcomes = []
    with manager_of(
        f"{folder}/run", f"{folder}/host{rank}", drain_every=100, timeout=60, **options
    ) as manager:
        for step, size in enumerate([600_000, 600_000, 600_000, 10, 10], start=1):
            key = f"o{rank}"
            state = {key: tilestone.ShardedObject(key, b"a" * size * rank, (1,), (0,))}
            if rank == 1:
                data = numpy.ones(size, numpy.uint8)
                state["w"] = tilestone.ShardedTensor.from_rank_offsets("w", data)
            try:
                manager.save(step, state)
                outcomes.append("saved")
            except tilestone.StorageError as error:
                assert error.errno == errno.ENOSPC
                outcomes.append("earlier" if "an earlier" in str(error) else "failed")
    return outcomes


@pytest.mark.parametrize("in_background", [True, False])
def test_ranks_go_past_a_full_disk_together_or_fail_together(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, in_background: bool
) -> None:
    full_disk(tmp_path / "host1", "1m")
    try:
        options = {"max_staged_bytes": 0} if in_background else {"async_save": False}
        outcomes = worlds[2].run(save_too_much, str(tmp_path), options)
        assert outcomes[0] == outcomes[1]
        # What was written in the call of the first step is not there any more.
        second = "earlier" if in_background else "saved"
        assert outcomes[0] == ["saved", second, "saved", "saved", "saved"]
        assert steps_in(tmp_path / "run") == ([3] if in_background else [1, 2, 3])
        assert on_host(tmp_path / "host0") == on_host(tmp_path / "host1") == [4, 5]
    finally:
        subprocess.run(["umount", tmp_path / "host1"], check=True)


def test_a_full_run_directory_is_not_taken_for_a_full_host(tmp_path: pathlib.Path) -> None:
    disks = [tmp_path / "host1", tmp_path / "run"]
    for disk in disks:
        full_disk(disk, "1m")
    try:
        outcomes = save_too_much(1, 1, str(tmp_path), {"max_staged_bytes": 0})
        assert outcomes == ["saved", "earlier", "saved", "earlier", "saved"]
        assert on_host(tmp_path / "host1") == [5]
    finally:
        for disk in disks:
            subprocess.run(["umount", disk], check=True)


def test_a_forked_child_does_not_wait_for_steps_that_its_parent_copies(
    tmp_path: pathlib.Path,
) -> None:
    tier = tilestone.Fast(tmp_path / "fast", drain_bytes_per_second=1 << 20)
    with manager_of(tmp_path / "run", tier, async_save=False) as manager:
        manager.save(1, {"w": numpy.ones(1 << 20, numpy.uint8)})
        assert in_child(manager.close) == 0
    assert steps_in(tmp_path / "run") == [1]


# ---- A run's directory that can't be written, and kills.


def until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Messages of threads are passed on by the next call."""
    end = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)
        with contextlib.suppress(tilestone.NotFoundError):
            tilestone.open("/nothing")


class Broken:
    """A run's directory in which nothing can be made while it is broken."""

    def __init__(self, run: pathlib.Path) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.rename(self._run.with_name("away"))
        self._run.write_text("no directory")

    def __exit__(self, *_: object) -> None:
        self._run.unlink()
        self._run.with_name("away").rename(self._run)


def test_a_run_directory_that_fails_stops_no_save(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with Broken(run):
            for step in (2, 3, 4):
                manager.save(step, state_of(step))
                manager.last_save.local.result()
            until_said(caplog, "wait on the hosts")
            assert on_host(fast)[-2:] == [3, 4]
        manager.last_save.durable.result()
    assert steps_in(run)[-2:] == [3, 4]
    removed = "step 2 is removed from the hosts before" in caplog.text
    assert removed or 2 in steps_in(run)


def test_what_waits_at_the_end_is_copied_after_the_next_start(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with Broken(run):
            manager.save(2, state_of(2))
            until_said(caplog, "wait on the hosts")
            manager.close()
        assert "stay on the hosts, and are copied after the next start" in caplog.text
        failure = manager.last_save.durable.exception(0)  # nobody waits for it any more
        assert isinstance(failure, tilestone.InterruptedError), failure
    with manager_of(run, fast) as manager:
        assert manager.restore(state_of(0))[1] == 2
    assert steps_in(run) == [1, 2]
    tilestone.open(run / "step-00000002").verify()


def test_after_restarts_on_different_hosts_the_step_of_the_run_s_directory_counts(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with manager_of(run, tmp_path / "a") as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with Broken(run):
            manager.save(2, state_of(2))
            until_said(caplog, "wait on the hosts")
            manager.close()
    with manager_of(run, tmp_path / "b") as manager:
        assert manager.restore(state_of(0))[1] == 1
        manager.save(2, state_of(20))
    with manager_of(run, tmp_path / "a", overwrite=True) as manager:
        state, found = manager.restore(state_of(0))
        assert found == 2 and state["w"][0] == 20
    assert tilestone.load(run / "step-00000002")["w"][0] == 20


def test_what_waits_replaces_only_an_older_step(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with manager_of(run, tmp_path / "fast", overwrite=True) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        manager.wait()
        with Broken(run):
            manager.save(1, state_of(10), force=True)
            manager.save(3, state_of(3))
            until_said(caplog, "wait on the hosts")
            with tilestone.CheckpointManager(tmp_path / "away") as other:
                assert other.restore(state_of(0))[1] == 2
                for step in (4, 3):  # 3 is its second save, and the second one of the other, too
                    other.save(step, state_of(30), force=True)
        assert isinstance(manager.last_save.durable.exception(), tilestone.AlreadyExistsError)
    found = [tilestone.load(run / f"step-{step:08}")["w"][0] for step in (1, 3)]
    assert found == [10, 30]


def test_a_step_that_another_process_holds_is_copied_later(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = tmp_path / "run/step-00000001/.tilestone"
    hidden.mkdir(parents=True)
    with manager_of(tmp_path / "run", tmp_path / "fast") as manager:
        with open(hidden / "lock", "w") as lock:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            manager.save(1, state_of(1))
            until_said(caplog, "wait on the hosts")
        assert manager.last_save.durable.exception() is None
    tilestone.open(tmp_path / "run/step-00000001").verify()


def test_a_host_that_cannot_note_that_a_step_is_copied_goes_on(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with Broken(run):
            manager.save(2, state_of(2))
            until_said(caplog, "wait on the hosts")
            (folder,) = fast.glob("step-00000002-*")
            (folder / ".kept.tmp").mkdir()  # as a full disk: no file can be made there
        assert manager.last_save.durable.exception() is None
        assert manager.latest() == 2
    with manager_of(run, fast) as manager:
        assert manager.restore(state_of(0))[1] == 2
    assert "can't be noted on this host" in caplog.text


def killed_while_it_copies(run: str, fast: str) -> None:
    tier = tilestone.Fast(fast, drain_bytes_per_second=1 << 20)
    with manager_of(run, tier) as manager:
        manager.save(1, {"w": numpy.ones(1 << 22)})
        manager.last_save.local.result()
        while not list(pathlib.Path(run).glob("step-*/*.distcp")):
            time.sleep(0.005)
        os.kill(os.getpid(), 9)


def test_a_copy_that_was_killed_begins_anew(tmp_path: pathlib.Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    process = ranks.context().Process(target=killed_while_it_copies, args=(str(run), str(fast)))
    process.start()
    process.join()
    assert process.exitcode == -9
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(run / "step-00000001")
    with manager_of(run, fast) as manager:
        loaded, found = manager.restore({"w": numpy.zeros(1 << 22)})
        assert found == 1 and loaded["w"].all()
    assert steps_in(run) == [1]
    tilestone.open(run / "step-00000001").verify()


def damage(fast: pathlib.Path, step: int) -> None:
    (file,) = fast.glob(f"step-{step:08}-*/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_file_on_a_host_is_never_copied(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with Broken(run):
            manager.save(2, state_of(2))
            until_said(caplog, "wait on the hosts")
            damage(fast, 2)
        assert isinstance(manager.last_save.durable.exception(), tilestone.CorruptError)
        manager.save(3, state_of(3))
    assert manager.latest() == 3
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(run / "step-00000002")


def test_a_damaged_step_on_a_host_is_not_restored(tmp_path: pathlib.Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast, drain_every=2) as manager:
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
    damage(fast, 3)
    with manager_of(run, fast) as manager:
        with pytest.raises(tilestone.CorruptError):
            manager.restore(state_of(0))
        state, found = manager.restore(state_of(0), fallback=True)
        assert found == 2 and state["w"][0] == 2
    damage(fast, 2)  # the run's directory has it, too
    with manager_of(run, fast) as manager:
        state, found = manager.restore(state_of(0), 2)
        assert found == 2 and state["w"][0] == 2


@pytest.mark.parametrize("what", ["unfinished", "cut", "damaged"])
def test_a_step_of_the_run_s_directory_counts_if_it_is_whole(
    tmp_path: pathlib.Path, what: str
) -> None:
    """The directory has 1 and 5, the host has 3; and of 5 it has lost a file."""
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, tilestone.Fast(fast, keep=3), drain_every=2) as manager:
        for step, forced in ((1, True), (3, False), (5, True)):
            manager.save(step, state_of(step), force=forced)
    (lost,) = fast.glob("step-00000005-*/*.distcp")
    lost.unlink()
    there = run / "step-00000005"
    (data,) = there.glob("*.distcp")
    if what == "unfinished":  # a copy that was killed after its manifest, before its index
        (manifest,) = there.glob(".tilestone/*.manifest")
        manifest.with_suffix(".begun").touch()
        (there / ".metadata").unlink()
        shutil.rmtree(run / ".tilestone")  # hints
    elif what == "cut":
        os.truncate(data, 100)
    else:
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    with manager_of(run, fast) as manager:
        if what != "unfinished":
            with pytest.raises(tilestone.CorruptError):
                manager.restore(state_of(0))
        state, found = manager.restore(state_of(0), fallback=what != "unfinished")
        assert found == 3 and state["w"][0] == 3
        manager.save(5, state_of(50))
    assert tilestone.load(there)["w"][0] == 50


def saved_while_the_run_s_directory_fails(rank: int, world: int, folder: str) -> None:
    from torch.distributed import barrier

    with manager_of(f"{folder}/run", f"{folder}/host{rank}") as manager:
        manager.save(1, sharded_state(rank, world, 1))
        manager.wait()
        barrier()
        with Broken(pathlib.Path(folder) / "run") if rank == 0 else contextlib.nullcontext():
            barrier()
            manager.save(2, sharded_state(rank, world, 2))
            manager.last_save.local.result()
            barrier()
            time.sleep(0.3)  # a try fails
            assert not manager.last_save.durable.done()
        assert manager.last_save.durable.exception() is None


def test_ranks_try_again_together_once_the_run_s_directory_is_back(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(saved_while_the_run_s_directory_fails, str(tmp_path))
    for step in (1, 2):
        tilestone.open(tmp_path / f"run/step-{step:08}").verify()
    for host in ("host0", "host1"):
        assert len(list(tmp_path.glob(f"{host}/*/.drained"))) == 2


def restored_of_both(rank: int, world: int, folder: str) -> Any:
    with manager_of(f"{folder}/run", f"{folder}/host{rank}") as manager:
        template = sharded_state(rank, world, 0)
        found = manager.restore(template, fallback=True)[1]
    numpy.testing.assert_array_equal(
        template["w"].data, sharded_state(rank, world, found or 0)["w"].data
    )
    return found


def test_ranks_choose_anew_on_the_hosts_after_a_damaged_step_of_the_run_s_directory(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train, str(tmp_path), [2, 3, 4], 2)
    shutil.rmtree(next(tmp_path.glob("host1/step-00000004-*")))
    for data in (tmp_path / "run/step-00000004").glob("*.distcp"):
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    assert world.run(restored_of_both, str(tmp_path)) == [3, 3]


def test_steps_of_an_unknown_run_do_not_count(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path / "a", tmp_path / "fast", drain_every=5) as manager:
        manager.save(1, state_of(1))
    with manager_of(tmp_path / "b", tmp_path / "fast") as manager:
        assert manager.restore(state_of(0))[1] is None
        assert "of runs that" in caplog.text
    with manager_of(tmp_path / "a", tmp_path / "fast") as manager:
        assert manager.restore(state_of(0))[1] == 1


def test_a_run_that_goes_back_leaves_its_later_steps(tmp_path: pathlib.Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, tilestone.Fast(fast, keep=5), drain_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    with manager_of(run, tilestone.Fast(fast, keep=2), drain_every=2) as manager:
        assert manager.restore(state_of(0), 1)[1] == 1
        manager.save(2, state_of(20))
        manager.wait()
        assert on_host(fast) == [1, 2]
    assert tilestone.load(run / "step-00000002")["w"][0] == 20
    with manager_of(run, fast) as manager:
        assert manager.restore(state_of(0))[0]["w"][0] == 20


def test_a_step_of_another_run_in_the_run_s_directory_is_not_replaced(
    tmp_path: pathlib.Path,
) -> None:
    with tilestone.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(1))
    with manager_of(tmp_path / "run", tmp_path / "fast") as manager:
        with pytest.raises(tilestone.AlreadyExistsError):
            manager.save(1, state_of(10))
    with manager_of(tmp_path / "run", tmp_path / "fast", overwrite=True) as manager:
        manager.save(1, state_of(10))
    assert tilestone.load(tmp_path / "run/step-00000001")["w"][0] == 10


def test_a_store_as_the_run_s_directory(bucket: str, tmp_path: pathlib.Path) -> None:
    run, fast = f"{bucket}/run", tmp_path / "fast"
    with manager_of(run, fast, drain_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.latest() == 2
    with manager_of(run, fast, drain_every=2) as manager:
        assert manager.restore(state_of(0))[1] == 3
    shutil.rmtree(fast)
    with manager_of(run, fast) as manager:
        state, found = manager.restore(state_of(0))
        assert found == 2 and state["w"][0] == 2


def test_a_training_that_survives_the_loss_of_a_host(tmp_path: pathlib.Path) -> None:
    example = pathlib.Path(__file__).parents[2] / "examples" / "lost_host.py"
    done = subprocess.run(
        [sys.executable, example, tmp_path], check=True, capture_output=True, text=True
    )
    assert done.stdout.count("begins after step 7") == 2 and "no step is lost" in done.stdout
