"""Simulates two hosts that share their disks by two network namespaces with one link.

Each namespace has its own host name. Needs root and `ip` (iproute2). All traffic stays inside the
namespaces.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from typing import Any

RANKS_OF_HOST = 2
WORLD = 2 * RANKS_OF_HOST
NETWORK = "10.213.77"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def program(name: str) -> str:
    """The path of a program for ranks in this folder."""
    return str(pathlib.Path(__file__).with_name(name))


class Hosts:
    """Hosts "a" and "b". Each host's network interface has the host's name."""

    def __init__(self) -> None:
        name = f"ts{os.getpid() % 100000}"
        self.names = [f"{name}a", f"{name}b"]
        self.address = f"{NETWORK}.1"  # of the first host

    def make(self) -> None:
        a, b = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for number, name in enumerate(self.names):
            inside = ("ip", "-n", name)
            run(*inside, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", name)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", name, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def set_link(self, state: str) -> None:
        """Sets the link "up" or "down"."""
        run("ip", "-n", self.names[1], "link", "set", self.names[1], state)

    def narrow(self, rate: str) -> None:
        """Limits both directions of the link to this rate in tc's notation, for example 4mbit."""
        for name in self.names:
            shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, *shape)

    def on(self, host: int, command: str) -> list[str]:
        """A command line that runs a shell command on a host."""
        name = self.names[host]
        inside = f"hostname {name} && {command}"
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside]

    def mpirun(self, folder: pathlib.Path, *command: str) -> list[str]:
        """A command line of mpirun on the first host that starts ranks on both hosts."""
        agent = folder / "agent"  # replaces ssh: agent [options] host command
        agent.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            'exec ip netns exec "$host" unshare --uts sh -c "hostname $host && $*"\n'
        )
        agent.chmod(0o755)
        network = f"{NETWORK}.0/24"
        where = ",".join(f"{name}:{RANKS_OF_HOST}" for name in self.names)
        options = {
            "plm_rsh_agent": str(agent),
            "plm_rsh_no_tree_spawn": "1",
            "oob_tcp_if_include": network,
            "btl": "tcp,self",
            "btl_tcp_if_include": network,
        }
        mca = [word for item in options.items() for word in ("--mca", *item)]
        start = ["mpirun", "--allow-run-as-root", *mca, "--host", where, "-n", str(WORLD)]
        return self.on(0, " ".join(["exec", *start, *command]))


class Rank:
    """A process on one of the hosts, which prints lines of JSON."""

    def __init__(self, hosts: Hosts, rank: int, folder: pathlib.Path, *command: str) -> None:
        host = rank // RANKS_OF_HOST
        self._errors = folder / f"stderr-{rank}"
        self._process = subprocess.Popen(
            hosts.on(host, " ".join(["exec", sys.executable, *command])),
            env={**os.environ, "GLOO_SOCKET_IFNAME": hosts.names[host], "USE_LIBUV": "0"},
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def next(self, what: str, timeout: float = 60) -> dict[str, Any]:
        """Returns the next line, which must be `what`."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no line {what}; {self._errors.read_text()}") from None
        assert line["what"] == what, line
        return line

    def either(self, *what: str, timeout: float = 90) -> dict[str, Any]:
        """Returns the next line that is one of these, and skips others."""
        while (line := self._lines.get(timeout=timeout))["what"] not in what:
            pass
        return line

    def wait(self) -> int:
        return self._process.wait(30)

    def kill(self) -> None:
        self._process.kill()
