"""A fast tier whose disks fill, whose run's directory fails, and whose process is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import ranks
from children import in_child
from fast_tiers import damage, manager_of, on_host, sharded_state, state_of, steps_in, train

import tilestone

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

# ---- A full disk, and a run's directory that can't be written.


def full_disk(monkeypatch_path: pathlib.Path, size: str) -> Any:
    """A small tmpfs there."""
    monkeypatch_path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", monkeypatch_path], check=True
    )


@pytest.mark.parametrize("drain_every", [1, 100])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_of_a_host_is_passed_by(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    in_background: bool,
    drain_every: int,
) -> None:
    fast = tmp_path / "fast"
    full_disk(fast, "1m")
    try:
        with manager_of(
            tmp_path / "run", fast, drain_every=drain_every, async_save=in_background
        ) as manager:
            began = time.monotonic()
            for step, length in ((1, 4000), (2, 1 << 20), (3, 4000)):
                manager.save(step, {**state_of(step), "w": numpy.full(length, float(step))})
            manager.wait()
            assert time.monotonic() - began < 100  # its time limit is 1800 s
            assert steps_in(tmp_path / "run") == ([1, 2, 3] if drain_every == 1 else [2])
            assert on_host(fast) == [1, 3]
            assert len(list(fast.glob("step-*"))) == 2
        assert caplog.text.count("the fast tier is full") == 1
        with manager_of(tmp_path / "run", fast) as manager:
            assert manager.restore({"w": numpy.zeros(4000), "step": 0})[1] == 3
    finally:
        subprocess.run(["umount", fast], check=True)


def save_too_much(
    rank: int,
    world: int,
    folder: str,
    options: dict[str, Any],
    sizes: Sequence[int] = (600_000, 600_000, 600_000, 10, 10),
) -> list[str]:
    """Rank 1 writes its tensors in the call; then its objects do not fit. Returns the outcomes."""
    outcomes = []
    with manager_of(
        f"{folder}/run", f"{folder}/host{rank}", **{"drain_every": 100, "timeout": 60, **options}
    ) as manager:
        for step, size in enumerate(sizes, start=1):
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
@pytest.mark.parametrize("drain_every", [100, 1])
def test_ranks_go_past_a_full_disk_together_or_fail_together(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, in_background: bool, drain_every: int
) -> None:
    full_disk(tmp_path / "host1", "1m")
    try:
        options: dict[str, Any] = (
            {"max_staged_bytes": 0} if in_background else {"async_save": False}
        )
        options["drain_every"] = drain_every
        outcomes = worlds[2].run(save_too_much, str(tmp_path), options)
        assert outcomes[0] == outcomes[1]
        # What was written in the call of the first step is not there any more.
        second = "earlier" if in_background else "saved"
        assert outcomes[0] == ["saved", second, "saved", "saved", "saved"]
        straight = [3] if in_background else [1, 2, 3]
        drained = [4, 5] if drain_every == 1 else []
        assert steps_in(tmp_path / "run") == straight + drained
        assert on_host(tmp_path / "host0") == on_host(tmp_path / "host1") == [4, 5]
    finally:
        subprocess.run(["umount", tmp_path / "host1"], check=True)


@pytest.mark.parametrize("staged", [True, False])
def test_a_full_run_directory_is_not_taken_for_a_full_host(
    tmp_path: pathlib.Path, staged: bool
) -> None:
    disks = [tmp_path / "host1", tmp_path / "run"]
    for disk in disks:
        full_disk(disk, "1m")
    try:
        if staged:  # the save that finds the host full goes on to the run's directory
            outcomes = save_too_much(1, 1, str(tmp_path), {}, [600_000, 600_000, 10])
            assert outcomes == ["saved", "earlier", "saved"]
            assert on_host(tmp_path / "host1") == [3]
        else:  # the save after it
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

        def save() -> None:
            with pytest.raises(tilestone.UnsupportedError, match="forked"):
                manager.save(2, state_of(2))

        assert in_child(save) == 0
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


@contextlib.contextmanager
def step_2_waits(
    manager: tilestone.CheckpointManager, run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Step 1 is in the run's directory; step 2 can't be copied there until the block ends."""
    manager.save(1, state_of(1))
    manager.wait()
    with Broken(run):
        manager.save(2, state_of(2))
        until_said(caplog, "wait on the hosts")
        yield


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


def test_a_run_directory_that_hangs_stops_no_save(tmp_path: pathlib.Path) -> None:
    from obstore.store import MemoryStore
    from obstore_store import store_at

    objects, answers = MemoryStore(), threading.Event()

    def held(call: Any) -> Any:
        return lambda *given: answers.wait() and call(*given)

    def held_at(url: str) -> tilestone.Store:
        store = store_at(objects, url.partition("://")[2])
        calls = {field.name: getattr(store, field.name) for field in dataclasses.fields(store)}
        return tilestone.Store(
            **{name: held(call) if callable(call) else call for name, call in calls.items()}
        )

    scheme = f"held-{uuid.uuid4().hex}"
    tilestone.register_store(scheme, held_at)
    answers.set()
    with manager_of(f"{scheme}://x/run", tmp_path / "fast") as manager:
        manager.save(1, state_of(1))
        manager.wait()
        answers.clear()
        for step in (2, 3, 4):
            manager.save(step, state_of(step))
            manager.last_save.local.result()
        assert not manager.last_save.durable.done()
        answers.set()
        manager.last_save.durable.result()
        assert manager.latest() == 4


def test_what_waits_at_the_end_is_copied_after_the_next_start(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        with step_2_waits(manager, run, caplog):
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
        with step_2_waits(manager, run, caplog):
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


def test_a_program_that_ends_waits_for_its_save(tmp_path: pathlib.Path) -> None:
    code = f"""
        import numpy, tilestone
        fast = tilestone.Fast({str(tmp_path / "fast")!r}, drain_bytes_per_second=1 << 20)
        manager = tilestone.CheckpointManager({str(tmp_path / "run")!r}, fast=fast)
        for step in (1, 2):
            manager.save(step, {{"w": numpy.ones(1 << 20)}})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert on_host(tmp_path / "fast") == [1, 2]


def killed_while_it_copies(run: str, fast: str) -> None:
    tier = tilestone.Fast(fast, drain_bytes_per_second=1 << 20)
    with manager_of(run, tier) as manager:
        manager.save(1, {"w": numpy.ones(1 << 22)})
        manager.last_save.local.result()
        while not list(pathlib.Path(run).glob("step-*/*.distcp")):
            time.sleep(0.005)
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize("others", [False, True])
def test_a_copy_that_was_killed_begins_anew(tmp_path: pathlib.Path, others: bool) -> None:
    """Also if another run has saved to the directory since."""
    run, fast = tmp_path / "run", tmp_path / "fast"
    process = ranks.context().Process(target=killed_while_it_copies, args=(str(run), str(fast)))
    process.start()
    process.join()
    assert process.exitcode == -9
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(run / "step-00000001")
    if others:
        with tilestone.CheckpointManager(run) as manager:
            for step in (2, 3):
                manager.save(step, state_of(step))
    with manager_of(run, fast) as manager:
        loaded, found = manager.restore({"w": numpy.zeros(1 << 22)}, 1 if others else None)
        assert found == 1 and loaded["w"].all()
    assert steps_in(run) == ([1, 2, 3] if others else [1])
    tilestone.open(run / "step-00000001").verify()


def damage_step(fast: pathlib.Path, step: int) -> None:
    (file,) = fast.glob(f"step-{step:08}-*/*.distcp")
    damage(file)


def test_a_damaged_file_on_a_host_is_never_copied(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        with step_2_waits(manager, run, caplog):
            damage_step(fast, 2)
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
    damage_step(fast, 3)
    with manager_of(run, fast) as manager:
        with pytest.raises(tilestone.CorruptError):
            manager.restore(state_of(0))
        state, found = manager.restore(state_of(0), fallback=True)
        assert found == 2 and state["w"][0] == 2
    damage_step(fast, 2)  # the run's directory has it, too
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
        damage(data)
    with manager_of(run, fast) as manager:
        if what != "unfinished":
            with pytest.raises(tilestone.CorruptError):
                manager.restore(state_of(0))
        state, found = manager.restore(state_of(0), fallback=what != "unfinished")
        assert found == 3 and state["w"][0] == 3
        manager.save(5, state_of(50))
    assert tilestone.load(there)["w"][0] == 50


def saved_while_host_1_fails(rank: int, world: int, folder: str) -> None:
    from torch.distributed import barrier

    fast = f"{folder}/host{rank}"
    with pytest.raises(tilestone.StorageError):  # on both, and no TimeoutError
        with manager_of(f"{folder}/run", fast, reuse=True, drain_every=9, timeout=20) as manager:
            manager.save(1, sharded_state(rank, world, 1))
            manager.wait()
            barrier()
            if rank == 1:
                os.rename(fast, f"{folder}/away")
                pathlib.Path(fast).touch()
            barrier()
            manager.save(2, sharded_state(rank, world, 2))


def test_a_host_whose_directory_can_t_be_listed_fails_the_save_on_all_ranks(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(saved_while_host_1_fails, str(tmp_path))


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
        damage(data)
    assert world.run(restored_of_both, str(tmp_path)) == [3, 3]
