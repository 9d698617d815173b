"""An MPI job on two hosts (see hosts.py)."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from hosts import WORLD, Hosts, program

RANK = program("two_hosts_rank.py")
# In a load of 4 MiB as columns, half of each host's data comes from the other host.
LEAST_RECEIVED = 900_000  # bytes per host


def check_exchanged(lines: list[dict[str, object]], names: list[str]) -> None:
    """Checks that all ranks loaded the right elements, and that these were sent as messages."""
    assert sorted(line["rank"] for line in lines) == list(range(WORLD)), lines
    assert {line["host"] for line in lines} == set(names), lines
    for line in lines:
        assert line["received"] > LEAST_RECEIVED, lines  # type: ignore[operator]


def test_mpi_ranks_of_two_hosts_exchange_what_they_read_by_messages(
    two_hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    command = two_hosts.mpirun(tmp_path, sys.executable, RANK, str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    check_exchanged([json.loads(line) for line in ended.stdout.splitlines()], two_hosts.names)
