"""A host that is cut off during a save: two network namespaces with two gloo ranks in each, and a
link that is taken down and brought back. Needs root and `ip` (iproute2).

All traffic stays inside of the two namespaces.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

TIMEOUT = 5.0  # seconds: of the save during which the link is cut
LATER = 4.0  # seconds after it by which every rank must have its error
WORLD = 4
PROGRAM = str(pathlib.Path(__file__).with_name("cut_off_rank.py"))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, "a" and "b", joined by one link."""

    def __init__(self) -> None:
        name = f"ts{os.getpid() % 100000}"
        self.names = [f"{name}a", f"{name}b"]

    def make(self) -> None:
        a, b = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for number, name in enumerate(self.names):
            inside = ("ip", "-n", name)
            run(*inside, "address", "add", f"10.213.77.{number + 1}/24", "dev", name)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", name, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def set_link(self, state: str) -> None:
        run("ip", "-n", self.names[1], "link", "set", self.names[1], state)

    def command(self, rank: int, *arguments: str) -> list[str]:
        name = self.names[rank * 2 // WORLD]
        host = f"hostname {name} && exec {sys.executable} {PROGRAM} {' '.join(arguments)}"
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", host]


class Rank:
    """A process and what it tells."""

    def __init__(self, hosts: Hosts, rank: int, folder: pathlib.Path) -> None:
        interface = hosts.names[rank * 2 // WORLD]
        self._process = subprocess.Popen(
            hosts.command(
                rank, "10.213.77.1", "29517", str(rank), str(WORLD), str(TIMEOUT), str(folder)
            ),
            env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "USE_LIBUV": "0"},
            stdout=subprocess.PIPE,
            stderr=open(folder / f"stderr-{rank}", "w"),
            text=True,
        )
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.put(json.loads(line))

    def next(self, what: str, timeout: float = 60) -> dict[str, Any]:
        """The next thing told, which must be `what`."""
        told = self._told.get(timeout=timeout)
        assert told["what"] == what, told
        return told

    def either(self, *what: str, timeout: float = 90) -> dict[str, Any]:
        """The next of these; others are passed over."""
        while (told := self._told.get(timeout=timeout))["what"] not in what:
            pass
        return told

    def wait(self) -> int:
        return self._process.wait(30)

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def test_every_rank_of_a_group_that_is_cut_in_two_ends_at_its_deadline(
    hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    group = [Rank(hosts, rank, tmp_path) for rank in range(WORLD)]
    try:
        for rank in group:
            rank.either("saved")
        for rank in group:
            rank.next("inside")
        hosts.set_link("down")
        cut = time.monotonic()
        (tmp_path / "cut").touch()
        for rank in group:
            told = rank.next("error", TIMEOUT + LATER + 10)
            assert told["kind"] in ("TimeoutError", "RankFailedError"), told
            assert told["seconds"] < TIMEOUT + LATER, told
        assert time.monotonic() - cut < TIMEOUT + LATER
        hosts.set_link("up")
        (tmp_path / "restored").touch()
        same = [rank.either("saved", "error") for rank in group]
        # No transfer was under way when the link went: the group is whole.
        assert all(told["what"] == "saved" for told in same), same
        fresh = [rank.either("saved", "error") for rank in group]
        assert all(told["what"] == "saved" for told in fresh), fresh
        for rank in group:
            rank.next("end")
            assert rank.wait() == 0
    finally:
        for rank in group:
            rank.kill()
