"""A host is lost at each step of a save and of a load, or has a slow link.

There are two network namespaces with two gloo ranks in each, and a link that is cut, restored and
slowed down (hosts.py).
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from hosts import WORLD, Hosts, Rank, program
from lost_host_rank import CASES, TIMEOUT

LATER = 5.0  # seconds after the deadline by which every rank must have its error
# In these cases a rank that has finished its part may succeed.
MAY_SUCCEED = ("load: merge",)


def start(hosts: Hosts, rank: int, folder: pathlib.Path) -> Rank:
    arguments = [hosts.address, "29517", str(rank), str(WORLD), str(folder)]
    return Rank(hosts, rank, folder, program("lost_host_rank.py"), *arguments)


@pytest.fixture
def group(two_hosts: Hosts, tmp_path: pathlib.Path) -> Iterator[list[Rank]]:
    ranks = [start(two_hosts, rank, tmp_path) for rank in range(WORLD)]
    yield ranks
    for rank in ranks:
        rank.kill()


def check_ended(group: list[Rank], case: str) -> bool:
    """Checks that every rank ends by its deadline. Returns whether all succeeded."""
    ends = [rank.next("ended", TIMEOUT + LATER + 10) for rank in group]
    assert all(end["seconds"] < TIMEOUT + LATER for end in ends), (case, ends)
    kinds = {end["kind"] for end in ends}
    if case in MAY_SUCCEED:
        kinds.discard("")
    assert kinds <= {"TimeoutError", "RankFailedError"}, (case, ends)
    return not kinds


def check_versions(group: list[Rank], case: str, allowed: set[float]) -> float:
    """Checks that all ranks of a new group load the same version, and returns it."""
    found = [rank.next("whole")["versions"] for rank in group]
    assert found == [found[0]] * WORLD, (case, found)
    assert len(found[0]) == 1, (case, found)
    assert found[0][0] in allowed, (case, found)
    return float(found[0][0])


def test_every_rank_ends_at_its_deadline_wherever_a_host_is_lost_and_the_checkpoint_stays_whole(
    group: list[Rank], two_hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    stands = 0.0
    for number, case in enumerate(CASES, 1):
        for rank in group:
            rank.next("inside")
        two_hosts.set_link("down")
        (tmp_path / f"cut {case}").touch()
        check_ended(group, case)
        two_hosts.set_link("up")
        (tmp_path / f"restored {case}").touch()
        allowed = {stands}
        if case == "save: plan":
            for rank in group:
                rank.next("saved")
            allowed = {float(number)}
        elif case == "save: written":
            allowed.add(float(number))
        stands = check_versions(group, case, allowed)
    two_hosts.narrow("4mbit")
    (tmp_path / "slow").touch()
    for rank in group:
        rank.next("slow")
        rank.next("end")
        assert rank.wait() == 0
