"""A fast tier on two hosts with networks and disks of their own: one is cut off, killed, wiped, filled.

The hosts are network namespaces (hosts.py), and each of their ranks has a mount namespace in which the
same path is its host's disk, a small file system in memory. A test runs three jobs of four ranks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import pathlib
import subprocess
import tempfile
import time
from typing import Any

import hosts
import numpy
from fast_tiers import manager_of, sharded_state, steps_in

import tilestone

TIMEOUT = 14.0  # seconds, for calls while the other host is lost; enough for a busy machine
LATER = 20.0  # seconds after it by which a call must have ended


def mount(*arguments: Any) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Rank:
    """One rank's process."""

    def __init__(self, folder: pathlib.Path, address: str, port: int, copies: int, rank: int) -> None:
        import torch.distributed as dist

        self.folder, self.rank, self.copies = folder, rank, copies
        self.disk = folder / "nvme"
        new_mounts = 0x00020000  # CLONE_NEWNS
        assert ctypes.CDLL(None).unshare(new_mounts) == 0
        mount("--make-rprivate", "/")
        mount("--bind", folder / f"disk{rank // hosts.RANKS_OF_HOST}", self.disk)
        dist.init_process_group(
            "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=hosts.WORLD
        )

    def say(self, what: str, **more: object) -> None:
        hosts.say(self.rank, self.folder, what, **more)

    def wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.02)

    def manager(self, **fast: Any) -> tilestone.CheckpointManager:
        tier = tilestone.Fast(self.disk, copies=self.copies, **fast)
        return manager_of(self.folder / "run", tier, drain_every=3, timeout=TIMEOUT)

    def restore(self, manager: tilestone.CheckpointManager) -> Any:
        template = sharded_state(self.rank, hosts.WORLD, 0)
        found = manager.restore(template)[1]
        expected = sharded_state(self.rank, hosts.WORLD, found or 0)["w"].data
        numpy.testing.assert_array_equal(template["w"].data, expected)
        return found

    def save(self, manager: tilestone.CheckpointManager, step: int, force: bool = False) -> None:
        """Until the step is local, and its files are on the other host."""
        manager.save(step, sharded_state(self.rank, hosts.WORLD, step), force=force)
        assert manager.last_save is not None
        manager.last_save.local.result()
        ranks_here = hosts.WORLD if self.copies else hosts.RANKS_OF_HOST
        while len(list(self.disk.glob(f"step-{step:08}-*/*.distcp"))) < ranks_here:
            time.sleep(0.02)

    def lose_the_other(self, manager: tilestone.CheckpointManager) -> None:
        self.say("saved")
        self.wait_for("lost")
        began = time.monotonic()
        with contextlib.suppress(tilestone.CheckpointError):  # not all ranks hear of it
            manager.close()
        self.say("ended", seconds=time.monotonic() - began)


def cut_off(*place: Any) -> None:
    """Steps 1 to 4 are whole, 3 is in the run's directory. The link is cut while 5 is copied there."""
    rank = Rank(*place)
    with rank.manager() as manager:
        for step in range(1, 5):
            rank.save(manager, step)
    manager = rank.manager(drain_bytes_per_second=10)
    assert rank.restore(manager) == 4
    rank.save(manager, 5, force=True)
    rank.lose_the_other(manager)


def killed(*place: Any) -> None:
    rank = Rank(*place)
    manager = rank.manager()
    rank.say("restored", step=rank.restore(manager))
    rank.save(manager, 7)
    rank.lose_the_other(manager)


def filled(*place: Any) -> None:
    rank = Rank(*place)
    with rank.manager() as manager:
        rank.say("restored", step=rank.restore(manager))
        rank.wait_for("full")
        manager.save(8, sharded_state(rank.rank, hosts.WORLD, 8))
    rank.say("saved")
    rank.wait_for("end")


class Cluster:
    """The hosts, and what stands on their disks."""

    def __init__(self, folder: pathlib.Path, copies: int) -> None:
        self._folder, self._copies, self._jobs = folder, copies, 0
        self.hosts = hosts.Hosts()

    def __enter__(self) -> Cluster:
        (self._folder / "nvme").mkdir(parents=True)
        for host in range(2):
            (self._folder / f"disk{host}").mkdir()
            self._new_disk(host)
        self.hosts.make()
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.remove()
        for host in range(2):
            subprocess.run(["umount", self._folder / f"disk{host}"], check=False)

    def _new_disk(self, host: int) -> None:
        mount("-t", "tmpfs", "-o", "size=4m", "none", self._folder / f"disk{host}")

    def job(self, rank: Any) -> hosts.Job:
        self._jobs += 1
        for left in (*self._folder.glob("said-*"), self._folder / "lost"):
            left.unlink(missing_ok=True)
        place = (self._folder, self.hosts.at(0), 29520 + self._jobs, self._copies)
        return hosts.gloo_job(self.hosts, self._folder, rank, *place)

    def lose_host_1(self, job: hosts.Job, *, cut: bool) -> None:
        """The ranks that are left end, and the next job has a new host in its place."""
        for rank in job.ranks:
            rank.next("saved")
        if cut:
            self.hosts.cut()
        else:
            self.hosts.kill_all(1)
        (self._folder / "lost").touch()
        for rank in job.ranks if cut else job.ranks[: hosts.RANKS_OF_HOST]:
            assert rank.next("ended")["seconds"] < TIMEOUT + LATER
        self.hosts.kill_all(0)
        self.hosts.kill_all(1)
        if cut:
            self.hosts.restore()
        subprocess.run(["umount", self._folder / "disk1"], check=True)
        self._new_disk(1)

    def fill_host_1(self) -> None:
        with (self._folder / "disk1" / "filler").open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
        (self._folder / "full").touch()


def lose_hosts(folder: pathlib.Path, copies: int) -> None:
    with Cluster(folder, copies) as cluster:
        with cluster.job(cut_off) as job:
            cluster.lose_host_1(job, cut=True)
        assert steps_in(folder / "run")[:1] == [3]
        with cluster.job(killed) as job:
            for rank in job.ranks:
                assert rank.next("restored")["step"] == (5 if copies else 3)
            cluster.lose_host_1(job, cut=False)
        with cluster.job(filled) as job:
            for rank in job.ranks:
                assert rank.next("restored")["step"] == (7 if copies else 3)
            cluster.fill_host_1()
            for rank in job.ranks:
                rank.next("saved")
            loaded = tilestone.load(folder / "run/step-00000008")
            numpy.testing.assert_array_equal(loaded["w"], sharded_state(0, 1, 8)["w"].data)
            (folder / "end").touch()
            job.wait()


def test_the_newest_step_comes_back_with_copies_and_without_them_the_newest_drained_one() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        jobs = [
            threads.submit(lose_hosts, pathlib.Path(folder, str(copies)), copies)
            for copies in (0, 1)
        ]
        for job in jobs:
            job.result()
