"""A host that is cut off during a save: two network namespaces with two gloo ranks in each, and a
link that is taken down and brought back (see hosts.py).
"""

from __future__ import annotations

import pathlib
import time

from hosts import WORLD, Hosts, Rank, program

TIMEOUT = 5.0  # seconds: of the save during which the link is cut
LATER = 4.0  # seconds after it by which every rank must have its error


def start(hosts: Hosts, rank: int, folder: pathlib.Path) -> Rank:
    arguments = [hosts.address, "29517", str(rank), str(WORLD), str(TIMEOUT), str(folder)]
    return Rank(hosts, rank, folder, program("cut_off_rank.py"), *arguments)


def test_every_rank_of_a_group_that_is_cut_in_two_ends_at_its_deadline(
    two_hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    group = [start(two_hosts, rank, tmp_path) for rank in range(WORLD)]
    try:
        for rank in group:
            rank.either("saved")
        for rank in group:
            rank.next("inside")
        two_hosts.set_link("down")
        cut = time.monotonic()
        (tmp_path / "cut").touch()
        for rank in group:
            result = rank.next("error", TIMEOUT + LATER + 10)
            assert result["kind"] in ("TimeoutError", "RankFailedError"), result
            assert result["seconds"] < TIMEOUT + LATER, result
        assert time.monotonic() - cut < TIMEOUT + LATER
        two_hosts.set_link("up")
        (tmp_path / "restored").touch()
        same = [rank.either("saved", "error") for rank in group]
        # No transfer was under way when the link went: the group is whole.
        assert all(result["what"] == "saved" for result in same), same
        fresh = [rank.either("saved", "error") for rank in group]
        assert all(result["what"] == "saved" for result in fresh), fresh
        for rank in group:
            rank.next("end")
            assert rank.wait() == 0
    finally:
        for rank in group:
            rank.kill()
