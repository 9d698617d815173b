"""CheckpointManager with a fast tier: steps on the hosts, draining, and what a restart continues."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import numpy
import pytest
import ranks
from fast_tiers import damage, manager_of, on_host, sharded_state, state_of, steps_in, train

import tilestone


@pytest.mark.parametrize("in_background", [True, False])
def test_steps_stay_on_the_host_and_some_are_copied_to_the_run(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, in_background: bool
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
    caplog.set_level("INFO", "tilestone")
    with manager_of(run, fast) as manager:
        state, step = manager.restore(state_of(0))
        assert step == 6 and state["step"] == 6 and state["w"][0] == 6
        assert "has step 4; with the other one 2 steps would be lost" in caplog.text
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
        manager.save(3, state_of(3))
        assert os.listdir(tmp_path / "fast") == before
        with pytest.raises(tilestone.AlreadyExistsError):
            manager.save(3, state_of(4), force=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_step_of_the_hosts_that_is_saved_once_more_by_force_is_copied_to_the_run(
    tmp_path: pathlib.Path, restarted: bool
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    first = manager_of(run, fast, drain_every=100)
    first.save(3, state_of(3), {"loss": 1.0})
    if restarted:
        first.close()
    with manager_of(run, fast, drain_every=100) if restarted else first as manager:
        if restarted:
            assert manager.restore(state_of(0))[1] == 3
        manager.save(3, state_of(3), {"accuracy": 0.5}, force=True)
        manager.wait()
        assert manager.steps()[0].metrics == {"loss": 1, "accuracy": 0.5}
        before = os.listdir(fast)
        manager.save(3, state_of(3), {"accuracy": 0.7}, force=True)  # it is there
        manager.wait()
        assert os.listdir(fast) == before
        assert manager.steps()[0].metrics == {"loss": 1, "accuracy": 0.7}
    shutil.rmtree(fast)
    with manager_of(run, fast) as manager:
        assert manager.restore(state_of(0))[1] == 3


def test_metrics_of_further_saves_count_while_the_step_is_copied(tmp_path: pathlib.Path) -> None:
    fast = tilestone.Fast(tmp_path / "fast", drain_bytes_per_second=60_000)
    with manager_of(tmp_path / "run", fast) as manager:
        manager.save(2, state_of(2))
        manager.wait()
        for metrics in ({"loss": 1.0}, {"accuracy": 0.5}, {"f1": 0.25}):
            manager.save(3, state_of(3), metrics)
        manager.wait()
        assert manager.steps()[1].metrics == {"loss": 1, "accuracy": 0.5, "f1": 0.25}


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
    for url in ("s3://bucket/x", "file:///x", "other://x"):
        with pytest.raises(tilestone.UnsupportedError, match="URL"):
            manager_of(tmp_path, url)
    (tmp_path / "file").touch()
    with pytest.raises(tilestone.CheckpointError, match=f"{tmp_path}/file can't be used"):
        manager_of(tmp_path, tmp_path / "file")


def test_a_host_s_directory_is_for_one_run_at_a_time(tmp_path: pathlib.Path) -> None:
    with manager_of(tmp_path / "a", tmp_path / "fast"):
        code = f"""
            import tilestone
            try:
                tilestone.CheckpointManager({str(tmp_path / 'b')!r}, timeout=1,
                                            fast=tilestone.Fast({str(tmp_path / 'fast')!r}))
            except tilestone.AlreadyExistsError as error:
                assert "another process or manager uses" in str(error), error
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


def test_steps_that_a_restart_does_not_find_are_said(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    worlds[2].run(train, str(tmp_path), [1, 2], 10)
    with manager_of(run, tmp_path / "host0") as manager:  # the other host is late
        assert manager.restore(state_of(0))[1] is None
    assert "step 2 of the run is on hosts, but does not count" in caplog.text
    assert "has 1 of its 2 files, of rank 1" in caplog.text
    with tilestone.CheckpointManager(run) as manager:
        assert manager.restore(state_of(0))[1] is None
    assert "by a manager with fast=" in caplog.text


def test_a_wiped_host_takes_the_newest_drained_step(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train, str(tmp_path), [1, 2, 3], 2)
    shutil.rmtree(tmp_path / "host1")
    # Host 0 reads its own part; what nobody reads may be damaged in the run's directory.
    (own,) = tmp_path.glob("host0/step-00000002-*/*.distcp")
    damage(tmp_path / "run/step-00000002" / own.name)
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
    for lost in range(3):  # each restart fills the disk of the new host
        shutil.rmtree(tmp_path / f"host{lost}")
        assert world.run(train_with_copies, str(tmp_path), []) == [2] * 3
        assert len(list(tmp_path.glob(f"host{lost}/step-00000002-*/*.distcp"))) == 2
    assert world.run(train_with_copies, str(tmp_path), [3]) == [2] * 3


def fails_to_restore(rank: int, world: int, folder: str) -> None:
    with pytest.raises(tilestone.CorruptError):
        train_with_copies(rank, world, folder, [])


def test_a_step_with_a_damaged_file_of_a_host_counts_as_damaged(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train_with_copies, str(tmp_path), [1, 2])
    step = next(tmp_path.glob("host0/step-00000002-*"))
    damage(min(step.glob("*.distcp")))
    world.run(fails_to_restore, str(tmp_path))


def restore_and_save_again(rank: int, world: int, folder: str, copies: int = 1) -> Any:
    fast = tilestone.Fast(f"{folder}/host{rank}", copies=copies)
    with manager_of(f"{folder}/run", fast, drain_every=100) as manager:
        found = manager.restore(sharded_state(rank, world, 0))[1]
        for step in (1, 2):  # each of them once with the same state, and once with another one
            try:
                manager.save(2, sharded_state(rank, world, step), force=True)
            except tilestone.AlreadyExistsError:
                assert step == 1
    return found


def test_a_replaced_host_knows_the_step_that_it_has_restored(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train_with_copies, str(tmp_path), [1, 2])
    shutil.rmtree(tmp_path / "host0")
    assert world.run(restore_and_save_again, str(tmp_path)) == [2, 2]
    # The save by force of what was restored is one of its own, which the run's directory has.
    assert on_host(tmp_path / "host0") == [2] and on_host(tmp_path / "host1") == [1, 2]
    assert steps_in(tmp_path / "run") == [2]


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_restore_from_the_directory_a_replaced_host_compares_with_that(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, lost: int
) -> None:
    world = worlds[2]
    world.run(train, str(tmp_path), [1, 2], 1)
    shutil.rmtree(tmp_path / f"host{lost}")
    assert world.run(restore_and_save_again, str(tmp_path), 0) == [2, 2]


def refused_on_rank_1(rank: int, world: int, folder: str, in_background: bool) -> None:
    with manager_of(
        f"{folder}/run", f"{folder}/host{rank}", async_save=in_background, timeout=60
    ) as manager:
        with pytest.raises(tilestone.InvalidArgumentError, match="must be a number"):
            manager.save(1, sharded_state(rank, world, 1), {"loss": "x" if rank else 1.0})
        manager.save(2, sharded_state(rank, world, 2))
        assert manager.last_save is not None
        manager.last_save.local.result()


@pytest.mark.parametrize("in_background", [True, False])
def test_an_argument_that_one_rank_refuses_is_refused_on_all(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, in_background: bool
) -> None:
    worlds[2].run(refused_on_rank_1, str(tmp_path), in_background)
    assert on_host(tmp_path / "host0") == on_host(tmp_path / "host1") == [2]


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


# ---- Nothing twice.


def frozen_state(rank: int, step: int) -> dict[str, Any]:
    return {f"base{rank}": numpy.arange(500_000) + rank, f"step{rank}": numpy.full(10, step)}


def large_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)


def shared(folder: pathlib.Path) -> int:
    """The names that the large file of the folder has."""
    return large_file(folder).stat().st_nlink


def test_what_a_step_shares_is_linked_on_the_host_and_in_the_run_s_directory(
    tmp_path: pathlib.Path,
) -> None:
    run, host = tmp_path / "run", tmp_path / "fast"
    for steps in (range(1, 5), range(5, 9)):
        with manager_of(run, tilestone.Fast(host, keep=3), reuse=True, drain_every=2) as manager:
            template = {name: 0 * array for name, array in frozen_state(0, 0).items()}
            found = manager.restore(template)[1]
            assert found is None or (template["base0"] == frozen_state(0, 0)["base0"]).all()
            for step in steps:
                manager.save(step, frozen_state(0, step))
                manager.wait()
        if 5 not in steps:  # bytes that nobody reads: the host has them
            with open(large_file(run / "step-00000004"), "r+b") as file:
                file.seek(2_000_000)
                file.write(b"damaged")
    # Step 2 has written it for the others.
    assert [shared(next(host.glob(f"step-{step:08}-*"))) for step in (6, 7, 8)] == [3] * 3
    # After a restore from the hosts the first step is copied, so damage does not go on.
    assert [shared(run / f"step-{step:08}") for step in (2, 4, 6, 8)] == [2, 2, 2, 2]
    assert not tilestone.open(run / "step-00000004").verify().ok
    for step in (6, 8):
        assert tilestone.open(run / f"step-{step:08}").verify().ok
        numpy.testing.assert_array_equal(
            tilestone.load(run / f"step-{step:08}")["base0"], frozen_state(0, step)["base0"]
        )


def test_drained_steps_share_a_file_no_longer_than_those_on_the_host(
    tmp_path: pathlib.Path,
) -> None:
    run = tmp_path / "run"
    with manager_of(run, tmp_path / "fast", reuse=True, drain_every=10) as manager:
        for step in range(1, 31):
            manager.save(step, frozen_state(0, step))
            if step % 10 == 0:
                manager.wait()
    # The host begins a new file with step 22.
    assert [shared(run / f"step-{step:08}") for step in (10, 20, 30)] == [2, 2, 1]


def test_a_store_copies_what_drained_steps_share(bucket: str, tmp_path: pathlib.Path) -> None:
    run = f"{bucket}/run"
    with manager_of(run, tmp_path / "fast", reuse=True) as manager:
        for step in range(1, 5):
            manager.save(step, frozen_state(0, step))
            manager.wait()
        assert manager.latest() == 4
    with tilestone.open(f"{run}/step-00000004") as checkpoint:
        assert checkpoint.verify().ok
    loaded = tilestone.load(f"{run}/step-00000004")
    numpy.testing.assert_array_equal(loaded["base0"], frozen_state(0, 4)["base0"])


def train_frozen(rank: int, world: int, folder: str, steps: list[int]) -> Any:
    fast = tilestone.Fast(f"{folder}/host{rank}", copies=1)
    with manager_of(f"{folder}/run", fast, drain_every=100, reuse=True) as manager:
        template = {name: 0 * array for name, array in frozen_state(rank, 0).items()}
        found = manager.restore(template)[1]
        for step in steps:
            manager.save(step, frozen_state(rank, step))
            manager.wait()
    if found is not None:
        numpy.testing.assert_array_equal(template[f"step{rank}"], numpy.full(10, found))
        numpy.testing.assert_array_equal(template[f"base{rank}"], numpy.arange(500_000) + rank)
    return found


def test_what_a_step_shares_is_linked_on_the_host_of_its_copy(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    world = worlds[2]
    world.run(train_frozen, str(tmp_path), [1, 2, 3, 4])
    for host in ("host0", "host1"):
        (step,) = (tmp_path / host).glob("step-00000004-*")
        # That of each rank: of steps 3 and 4, whose names are left.
        assert sorted(file.stat().st_nlink for file in step.glob("*.distcp")) == [1, 1, 2, 2]
    shutil.rmtree(tmp_path / "host0")
    assert world.run(train_frozen, str(tmp_path), []) == [4, 4]


def test_the_step_that_a_restore_continues_is_exported_if_the_directory_has_it(
    tmp_path: pathlib.Path,
) -> None:
    run, state = tmp_path / "run", {"model": {"a": numpy.ones(4)}}
    with manager_of(run, tmp_path / "fast", drain_every=2) as manager:
        manager.save(2, state)
    for newest, exported in ((2, [2]), (3, [])):
        export = tilestone.Export(every=1)
        with manager_of(run, tmp_path / "fast", drain_every=2, export=export) as manager:
            assert manager.restore(state)[1] == newest
            manager.wait()
            assert [each.step for each in manager.exports] == exported
            assert not any(each.error for each in manager.exports)
            if newest == 2:
                manager.save(3, state)


# ---- Which steps count.


def test_a_step_stays_on_the_hosts_while_it_is_restored_though_its_drain_ends(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tilestone.Fast(tmp_path / "fast", keep=1, drain_bytes_per_second=1 << 20)
    with manager_of(tmp_path / "run", tier, drain_every=2, async_save=False) as manager:
        load, state = manager._session.load, {"w": numpy.ones(1 << 20, numpy.uint8)}

        def load_late(*arguments: Any, **options: Any) -> Any:
            manager._tier.core.wait()
            assert steps_in(tmp_path / "run") == [2]
            return load(*arguments, **options)

        manager.save(2, state)
        manager.save(3, state)
        assert on_host(tmp_path / "fast") == [2, 3]  # it is drained
        monkeypatch.setattr(manager._session, "load", load_late)
        assert manager.restore(state, step=2)[1] == 2
        manager.wait()
        assert on_host(tmp_path / "fast") == [2]  # the run has left the other one


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


def test_what_keep_has_removed_from_the_run_is_not_copied_there_again(
    tmp_path: pathlib.Path,
) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    with manager_of(run, fast) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    with tilestone.CheckpointManager(run, keep=tilestone.Keep(last=1)) as manager:
        assert manager.restore(state_of(0))[1] == 2
        manager.save(3, state_of(3))
    assert steps_in(run) == [3] and on_host(fast) == [1, 2]
    with manager_of(run, fast) as manager:
        assert manager.restore(state_of(0))[1] == 3
    assert steps_in(run) == [3]


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
