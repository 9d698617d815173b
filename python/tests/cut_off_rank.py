"""One rank of a group over several network namespaces: see test_cut_off_host.py.

Prints a line of JSON for each thing that happens, and waits for files that say when to go on.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

import tilestone


def tell(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


def wait_for(file: pathlib.Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def join(address: str, port: int, rank: int, world: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )


def save(folder: pathlib.Path, rank: int, world: int, timeout: float, slow: bool) -> None:
    def build(key, data, replica_id, flattened_range):  # type: ignore[no-untyped-def]
        tell("inside")
        if slow:
            wait_for(folder / "cut")
        return tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))

    factory = tilestone.ShardedTensorFactory("w", torch.ones(4), build, lambda tree: tree)
    started = time.monotonic()
    try:
        tilestone.save({"w": factory}, folder / "checkpoint", overwrite=True, timeout=timeout)
    except tilestone.CheckpointError as error:
        tell(
            "error",
            kind=type(error).__name__,
            text=str(error),
            seconds=time.monotonic() - started,
        )
    else:
        tell("saved", seconds=time.monotonic() - started)


def main() -> None:
    address, port, rank, world, timeout, shared = sys.argv[1:]
    me, size, folder = int(rank), int(world), pathlib.Path(shared)
    join(address, int(port), me, size)
    save(folder, me, size, 60, slow=False)
    save(folder, me, size, float(timeout), slow=True)
    wait_for(folder / "restored")
    save(folder, me, size, 60, slow=False)  # the same process group
    dist.destroy_process_group()
    join(address, int(port) + 1, me, size)
    save(folder, me, size, 60, slow=False)
    tell("end")


if __name__ == "__main__":
    os.environ.update(USE_LIBUV="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    main()
