"""One MPI rank of a job on two hosts: see test_two_hosts.py.

It saves rows, loads columns and prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import sys
from typing import Any

import numpy

import tilestone

SIDE = 1024  # rows and columns
PLENTY = 60.0  # seconds


def truth(version: int) -> Any:
    return numpy.arange(SIDE * SIDE, dtype=numpy.float32).reshape(SIDE, SIDE) + version


def received() -> int:
    """Bytes received over the link by this host."""
    counter = f"/sys/class/net/{socket.gethostname()}/statistics/rx_bytes"
    return int(pathlib.Path(counter).read_text())


def main() -> None:
    path = pathlib.Path(sys.argv[1]) / "checkpoint"
    comm = tilestone.mpi_world(PLENTY)

    def part(axis: int, data: Any) -> Any:
        return tilestone.ShardedTensor.from_rank_offsets("w", data, (axis, comm.rank, comm.size))

    for version in (1, 2):
        rows = numpy.split(truth(version), comm.size)[comm.rank]
        tilestone.save({"w": part(0, rows)}, path, group=comm, overwrite=True, timeout=PLENTY)
    before = received()
    columns = numpy.empty((SIDE, SIDE // comm.size), numpy.float32)
    loaded = tilestone.load({"w": part(1, columns)}, path, group=comm, timeout=PLENTY)
    came = received() - before
    assert numpy.array_equal(loaded["w"], numpy.split(truth(2), comm.size, axis=1)[comm.rank])
    line = {"rank": comm.rank, "host": socket.gethostname(), "received": came}
    os.write(1, (json.dumps(line) + "\n").encode())  # one write, as mpirun mixes output


if __name__ == "__main__":
    main()
