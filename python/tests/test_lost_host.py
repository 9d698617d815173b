"""A host is lost at each step of a save and of a load, or has a slow link.

Jobs of four ranks, over gloo (lost_host_rank.py) and over MPI (tests/lost_host_rank.cc), run on two
network namespaces with a link that is cut, restored and made slow (hosts.py). The jobs run at the
same time, because they mostly wait for deadlines.

The ranks over gloo join a new group after each cut, because a cut in a transfer breaks a group. The
ranks over MPI keep one communicator. They connect all pairs of ranks before the first cut, because
Open MPI ends a process that opens a connection while its own interface is down. Connections that
exist outlast a cut, and what was sent meanwhile comes late.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import re
import tempfile
from collections.abc import Iterator

import pytest
from conftest import ROOT
from hosts import Hosts, Job, gloo_job, mpi_job
from lost_host_rank import CASES, PLENTY, TIMEOUT, run_rank

MPI_RANK = ROOT / "build" / "test" / "bin" / "lost_host_rank"

# Seconds after the deadline by which every rank must have its error. A busy machine needs some; a rank
# that waits for the lost host itself would take minutes.
LATER = 20.0
ERRORS = {"TimeoutError", "RankFailedError", "timeout", "rank_failed"}  # in Python, in C++
# An error names a rank. A rank that does not know which one is missing names what it was doing.
CLEAR = re.compile(r"ranks? \d|is a host cut off|while staging")
# In these cases ranks may succeed. Merging: a rank has finished its part. Outcome: the checkpoint is
# published, and a rank that gets no answer from rank 0 finds it.
MAY_SUCCEED = ("load: merge", "save: outcome")
# In these cases the next version exists: the group saves it once more, or it is published.
NEW = ("save: plan", "save: outcome")
# A slow link. Each host loads 1 MiB, and gets half of it from the other host.
RATE, DELAY = "4mbit", 0.02  # seconds from one host to the other
LEAST_SLOW = 0.5  # seconds; at this rate half a MiB takes one second


def start_gloo(part: int, hosts: Hosts, folder: pathlib.Path) -> Job:
    return gloo_job(hosts, folder, run_rank, part, folder, hosts.at(0), 29517)


def start_mpi(part: int, hosts: Hosts, folder: pathlib.Path) -> Job:
    assert MPI_RANK.exists(), "run: cmake --preset test; cmake --build --preset test"
    words = [MPI_RANK, folder, TIMEOUT, PLENTY, *CASES[part]]
    return mpi_job(hosts, folder, *map(str, words))


START = {"gloo": start_gloo, "mpi": start_mpi}


def check_ended(job: Job, case: str, stands: int) -> None:
    """Checks that every rank ends by its deadline, with an error or with what was saved."""
    for number, rank in enumerate(job.ranks):
        end = rank.next("ended", TIMEOUT + LATER + 10)
        assert end["seconds"] < TIMEOUT + LATER, (case, number, end)
        if case in MAY_SUCCEED and end["kind"] == "":
            assert end["versions"] == ([stands] if case.startswith("load") else []), (case, end)
        else:
            assert end["kind"] in ERRORS, (case, number, end)
            assert CLEAR.search(end["text"]), (case, number, end)


def check_going_on(job: Job, case: str, standing: int, saved: int) -> None:
    """Checks that all ranks load this version, save the next one, load it, and leave nothing."""
    for rank in job.ranks:
        line = rank.next("whole")
        assert line["versions"] == [standing], (case, line)
    for rank in job.ranks:
        line = rank.next("saved")
        assert (line["versions"], line["left"]) == ([saved], []), (case, line)


def check_slow(job: Job, hosts: Hosts, folder: pathlib.Path) -> None:
    """Checks that a save and a load over a slow link succeed and give the right elements."""
    hosts.make_slow(RATE, DELAY)
    (folder / "slow").touch()
    for rank in job.ranks:
        line = rank.next("slow")
        assert line["versions"] == [100], line
        assert line["seconds"] > LEAST_SLOW, line


def lose_hosts(kind: str, part: int, folder: pathlib.Path) -> None:
    hosts = Hosts()
    folder.mkdir()
    try:
        hosts.make()
        with START[kind](part, hosts, folder) as job:
            for number, case in enumerate(CASES[part], 1):
                for rank in job.ranks:
                    rank.next("inside")
                hosts.cut()
                (folder / f"cut {case}").touch()
                check_ended(job, case, 2 * number - 2)
                hosts.restore()
                (folder / f"restored {case}").touch()
                standing = 2 * number - 1 if case in NEW else 2 * number - 2
                check_going_on(job, case, standing, 2 * number)
            if part == 0:
                check_slow(job, hosts, folder)
            (folder / "end").touch()
            job.wait()
    finally:
        hosts.remove()


@pytest.fixture
def memory_path() -> Iterator[pathlib.Path]:
    """A directory in memory: where other tests write gigabytes, a sync to disk takes seconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield pathlib.Path(path)


def test_every_rank_ends_at_its_deadline_wherever_a_host_is_lost_and_the_checkpoint_stays_whole(
    memory_path: pathlib.Path,
) -> None:
    parts = [(kind, part) for kind in START for part in range(len(CASES))]
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
        jobs = {
            (kind, part): threads.submit(lose_hosts, kind, part, memory_path / f"{kind}-{part}")
            for kind, part in parts
        }
    failed = {part: job.exception() for part, job in jobs.items() if job.exception() is not None}
    if failed:  # with all that the ranks have printed
        pytest.fail("\n".join(f"{part}: {error}" for part, error in failed.items()))
