"""One rank of a job over two network namespaces: see test_lost_host.py.

It says when it reaches a point (hosts.say), and waits for files that tell it to continue.
"""

from __future__ import annotations

import datetime
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import hosts
import numpy
from save_steps import begin_save

import tilestone

# Points at which ranks wait until the link is cut: the work, and its point.
# meet, report, publish: the first host is inside this call and waits for the second host.
# requests, tiles: likewise, inside the first or a later transfer of the exchange.
# orders, reports, outcome, open: rank 0 has what all ranks have sent, and the others wait for it.
# Elsewhere every rank is in its own work: it builds its state (plan), is about to stage, writes,
# has written, has read (read), or takes what was loaded (merge). Before a rank has read everything,
# others may need what it reads, so they could not all wait.
CASES = (
    ("save: meet", "save: plan", "save: orders", "save: stage", "save: write"),
    (
        "save: written", "save: report", "save: reports", "save: publish", "save: outcome",
        "load: tiles",
    ),
    ("load: meet", "load: plan", "load: open", "load: requests", "load: read", "load: merge"),
)  # fmt: skip
#: Which transfer of a load these points are. The second one answers the requests.
TRANSFERS = {1: "requests", 3: "tiles"}
TIMEOUT = 14.0  # seconds, for calls during which the link is cut; enough for a busy machine
PLENTY = 60.0  # seconds, for calls that must succeed
SIDE = 512  # rows, and columns, of the tensor


def truth(version: int) -> Any:
    """All elements. No two versions have an element in common."""
    first = version * SIDE * SIDE
    return numpy.arange(first, first + SIDE * SIDE, dtype=numpy.int64).reshape(SIDE, SIDE)


def versions(found: Any, expected: Any) -> list[int]:
    """The versions of elements whose places are those of `expected`, which is of version 0."""
    return sorted({int(each) for each in numpy.unique((found - expected) / (SIDE * SIDE))})


class Gloo:
    """Joins one process group after another. A cut in a transfer breaks a group."""

    def __init__(self, rank: int, address: str, port: int) -> None:
        self._rank, self._address, self._port = rank, address, port

    def join(self, member: Member) -> Any:
        import torch
        import torch.distributed as dist

        from tilestone._torch.comm import TorchCommunicator

        class Held(TorchCommunicator):
            """Lets rank 0 wait where it has received what all ranks have sent."""

            def gather(self, mine: bytes, *more: Any, **named: Any) -> list[bytes]:
                parts = super().gather(mine, *more, **named)
                if self.rank == 0:
                    member.hold(member.gathers)
                return parts

            def all_to_all(self, to: list[bytes], *more: Any, **named: Any) -> list[bytes]:
                member.enter_transfer()
                return super().all_to_all(to, *more, **named)

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._address}:{self._port}",
            rank=self._rank,
            world_size=hosts.WORLD,
            timeout=datetime.timedelta(seconds=PLENTY),
        )
        self._port += 1
        return Held()

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Member:
    """This rank."""

    def __init__(self, rank: int, folder: pathlib.Path, group: Gloo) -> None:
        self.rank, self.folder, self.group = rank, folder, group
        self.path = folder / "checkpoint"
        self.case = ""
        self.gathers = ""  # the point that rank 0 reaches when it has gathered
        self.transfers = 0  # of this call so far
        self.comm = group.join(self)

    def say(self, what: str, **more: object) -> None:
        hosts.say(self.rank, self.folder, what, **more)

    def wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.02)

    def is_at(self, point: str) -> bool:
        return self.case.endswith(f": {point}")

    def hold(self, point: str) -> None:
        """Waits once for the cut, if it is to happen at this point."""
        if point and self.is_at(point):
            case, self.case = self.case, ""
            self.say("inside")
            self.wait_for(f"cut {case}")

    def enter(self, call: str, gathers: str) -> None:
        """Called before a call in which the ranks wait for one another: see CASES."""
        self.gathers = gathers
        waits_for_host = self.is_at(call) and self.rank < hosts.RANKS_OF_HOST
        waits_for_coordinator = self.is_at(gathers) and self.rank != 0
        if waits_for_host or waits_for_coordinator:
            self.case = ""
            self.say("inside")
        self.hold(call)

    def enter_transfer(self) -> None:
        """Called before each transfer in which every rank sends to every other."""
        self.transfers += 1
        if self.transfers in TRANSFERS:
            self.enter(TRANSFERS[self.transfers], "")

    def progress(self, how_far: tilestone.Progress) -> None:
        writes = how_far.phase == "write"
        if writes:
            self.hold("write")
        if how_far.bytes_done == how_far.bytes_total:
            self.hold("written" if writes else "read")

    def factory(self, data: Any, axis: int) -> tilestone.ShardedTensorFactory:
        import torch

        def build(key: str, part: Any, replica_id: Any, flattened_range: Any) -> Any:
            self.hold("plan")
            return tilestone.ShardedTensor.from_rank_offsets(
                key, part, (axis, self.rank, hosts.WORLD)
            )

        def merge(tree: Any) -> Any:
            self.hold("merge")
            return tree

        return tilestone.ShardedTensorFactory("w", torch.from_numpy(data), build, merge)

    def part(self, version: int, axis: int) -> Any:
        return numpy.split(truth(version), hosts.WORLD, axis)[self.rank].copy()

    def save(self, version: int, timeout: float) -> None:
        state = {"w": self.factory(self.part(version, 0), 0)}
        self.enter("meet", "orders")
        with begin_save(
            state,
            self.path,
            group=self.comm,
            overwrite=True,
            timeout=timeout,
            progress=self.progress,
        ) as saving:
            self.hold("stage")
            saving.stage()
            saving.write()
            self.enter("report", "reports")
            saving.report()
            self.enter("publish", "outcome")
            saving.publish()

    def load(self, timeout: float) -> list[int]:
        """Loads columns of what was saved as rows. Returns the versions of the elements."""
        columns = numpy.zeros((SIDE, SIDE // hosts.WORLD), numpy.int64)
        self.enter("meet", "open")
        loaded = tilestone.load(
            {"w": self.factory(columns, 1)},
            self.path,
            group=self.comm,
            timeout=timeout,
            progress=self.progress,
        )
        return versions(numpy.asarray(loaded["w"]), self.part(0, 1))

    def cut_in(self, case: str, version: int) -> None:
        """Does the work of a case, during which the link is cut."""
        self.case, self.transfers = case, 0
        found: list[int] = []
        kind, text = "", ""
        started = time.monotonic()
        try:
            if case.startswith("save"):
                self.save(version, TIMEOUT)
            else:
                found = self.load(TIMEOUT)
        except tilestone.CheckpointError as error:
            kind, text = type(error).__name__, str(error)
        seconds = time.monotonic() - started
        self.say("ended", kind=kind, text=text, seconds=seconds, versions=found)

    def go_on(self, version: int) -> None:
        """Says what the checkpoint is now, saves the next one, and says what remains of it all."""
        self.group.leave()
        self.comm = self.group.join(self)
        self.say("whole", versions=self.load(PLENTY))
        self.save(version, PLENTY)
        left = [file.name for file in tilestone.gc(self.path)] if self.rank == 0 else []
        self.say("saved", versions=self.load(PLENTY), left=left)


def main(cases: Sequence[str], slow: bool, member: Member) -> None:
    """Version 2n - 1 is saved in the n-th case and version 2n after it.

    Args:
        slow: at the end version 100 is saved and loaded over a slow link.
    """
    member.save(0, PLENTY)
    for number, case in enumerate(cases, 1):
        member.cut_in(case, 2 * number - 1)
        member.wait_for(f"restored {case}")
        if case == "save: plan":  # no transfer was in progress, so the group still works
            member.save(2 * number - 1, PLENTY)
        member.go_on(2 * number)
    if slow:
        member.wait_for("slow")
        started = time.monotonic()
        member.save(100, PLENTY)
        found = member.load(PLENTY)
        member.say("slow", versions=found, seconds=time.monotonic() - started)
    member.wait_for("end")
    member.group.leave()


def run_rank(part: int, folder: pathlib.Path, address: str, port: int, rank: int) -> None:
    """A rank's process: the cases of a part, on the host that it was started on."""
    main(CASES[part], part == 0, Member(rank, folder, Gloo(rank, address, port)))
