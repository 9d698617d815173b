"""One rank of a group over several network namespaces: see test_lost_host.py.

Prints a line of JSON for each event, and waits for files that tell it to continue.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tilestone

# Points at which ranks wait until the link is cut: the work, and its step.
CASES = (
    "save: meet",
    "save: plan",
    "save: write",
    "save: written",
    "load: meet",
    "load: plan",
    "load: read",
    "load: merge",
)
TIMEOUT = 7.0  # seconds, for calls during which the link is cut; enough for a busy machine
SIDE = 512  # rows, and columns, of the tensor


def tell(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


class Member:
    """This rank. It joins one group after another."""

    def __init__(self, address: str, port: int, rank: int, world: int, folder: pathlib.Path):
        self.address, self.port, self.rank, self.world = address, port, rank, world
        self.folder = folder
        self.path = folder / "checkpoint"
        self.case = ""

    def join(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.address}:{self.port}",
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=60),
        )
        self.port += 1

    def leave(self) -> None:
        dist.destroy_process_group()

    def wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.02)

    def hold(self, at: str) -> None:
        """Waits once for the cut, if it is to happen at this point."""
        if self.case.endswith(f": {at}"):
            case, self.case = self.case, ""
            tell("inside")
            self.wait_for(f"cut {case}")

    def meet(self) -> None:
        """Makes the second host late, so that the first one waits for it inside its call."""
        if self.rank < self.world // 2 and self.case.endswith(": meet"):
            self.case = ""
            tell("inside")
        self.hold("meet")

    def progress(self, how_far: tilestone.Progress) -> None:
        self.hold(how_far.phase)
        if how_far.phase == "write" and how_far.bytes_done == how_far.bytes_total:
            self.hold("written")

    def factory(self, data: torch.Tensor, axis: int) -> tilestone.ShardedTensorFactory:
        def build(key: str, part: Any, replica_id: Any, flattened_range: Any) -> Any:
            self.hold("plan")
            return tilestone.ShardedTensor.from_rank_offsets(
                key, part, (axis, self.rank, self.world)
            )

        def merge(tree: Any) -> Any:
            self.hold("merge")
            return tree

        return tilestone.ShardedTensorFactory("w", data, build, merge)

    def save(self, version: int, timeout: float) -> None:
        rows = torch.full((SIDE // self.world, SIDE), float(version))
        self.meet()
        tilestone.save(
            {"w": self.factory(rows, 0)},
            self.path,
            overwrite=True,
            timeout=timeout,
            progress=self.progress,
        )

    def load(self, timeout: float) -> None:
        columns = torch.zeros(SIDE, SIDE // self.world)
        self.meet()
        tilestone.load(
            {"w": self.factory(columns, 1)}, self.path, timeout=timeout, progress=self.progress
        )

    def cut_in(self, case: str, version: int) -> None:
        """Does the work of a case, during which the link is cut."""
        self.case = case
        work: dict[str, Callable[[], None]] = {
            "save": lambda: self.save(version, TIMEOUT),
            "load": lambda: self.load(TIMEOUT),
        }
        started = time.monotonic()
        try:
            work[case.split(":")[0]]()
        except tilestone.CheckpointError as error:
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = "", ""
        tell("ended", kind=kind, text=text, seconds=time.monotonic() - started)

    def check_whole(self) -> None:
        """Prints the version of all elements, and checks that the group can save and load."""
        whole = tilestone.load({"w": torch.zeros(SIDE, SIDE)}, self.path)["w"]
        tell("whole", versions=sorted({float(value) for value in whole.unique()}))


def main() -> None:
    address, port, rank, world, shared = sys.argv[1:]
    me = Member(address, int(port), int(rank), int(world), pathlib.Path(shared))
    me.join()
    me.save(0, 60)
    for number, case in enumerate(CASES, 1):
        me.cut_in(case, number)
        me.wait_for(f"restored {case}")
        if case == "save: plan":  # no transfer was in progress, so the group still works
            me.save(number, 60)
            tell("saved")
        me.leave()
        me.join()
        me.check_whole()
    me.wait_for("slow")
    me.save(100, 60)
    me.load(60)
    tell("slow")
    me.leave()
    tell("end")


if __name__ == "__main__":
    os.environ.update(USE_LIBUV="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    main()
