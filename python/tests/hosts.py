"""Simulates two hosts that share their disks by two network namespaces with one link.

Each namespace has its own host name. Needs root and `ip` (iproute2). All traffic stays inside the
namespaces.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import queue
import select
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any

RANKS_OF_HOST = 2
WORLD = 2 * RANKS_OF_HOST
NETWORK = "10.213.77"
HANGS = 120.0  # seconds without a line of a rank; starting takes long on a busy machine


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def program(name: str) -> str:
    """The path of a program for ranks in this folder."""
    return str(pathlib.Path(__file__).with_name(name))


class SlowLink:
    """Two tun devices; each packet that is sent to one of them arrives at the other after a delay.

    Not tc's netem, because many kernels don't have it.
    """

    def __init__(self, names: list[str], delay: float) -> None:
        self._delay = delay  # seconds
        self._devices = [self._open(name) for name in names]
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    @staticmethod
    def _open(name: str) -> int:
        set_interface, tun, no_header = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, its flags
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, set_interface, struct.pack("16sH22x", name.encode(), tun | no_header))
        return device

    def _forward(self) -> None:
        others = dict(zip(self._devices, reversed(self._devices), strict=True))
        waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        while True:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready = select.select([*self._devices, self._stopping], [], [], pause)[0]
            if self._stopping in ready:
                return
            for device in ready:
                packet = os.read(device, 65536)
                waiting.append((time.monotonic() + self._delay, others[device], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, device, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # a full queue loses packets, as a network does
                    os.write(device, packet)

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        for file in (*self._devices, self._stopping, self._stop):
            os.close(file)


_numbers = itertools.count()


class Hosts:
    """Hosts "a" and "b". Each host's network interface has the host's name."""

    def __init__(self) -> None:
        name = f"ts{os.getpid() % 100000}x{next(_numbers)}"
        self.names = [f"{name}a", f"{name}b"]
        self._slow: SlowLink | None = None

    def make(self) -> None:
        a, b = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for number, name in enumerate(self.names):
            inside = ("ip", "-n", name)
            run(*inside, "address", "add", f"{self.at(number)}/24", "dev", name)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", name, "up")
            # Where the kernel has this limit (Linux 6.15), a connection goes on soon after a cut.
            limit = "/proc/sys/net/ipv4/tcp_rto_max_ms"
            run("ip", "netns", "exec", name, "sh", "-c", f"[ ! -e {limit} ] || echo 1000 > {limit}")

    def remove(self) -> None:
        if self._slow is not None:
            self._slow.close()
        for host, name in enumerate(self.names):
            self.kill_all(host)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def kill_all(self, host: int) -> None:
        """Kills all processes of a host."""
        command = ["ip", "netns", "pids", self.names[host]]
        found = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        for process in found.split():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(int(process), signal.SIGKILL)

    def cut(self) -> None:
        """Cuts the link: the second host's interface is down."""
        run("ip", "-n", self.names[1], "link", "set", self.names[1], "down")

    def restore(self) -> None:
        """Undoes cut()."""
        run("ip", "-n", self.names[1], "link", "set", self.names[1], "up")

    def make_slow(self, rate: str, delay: float) -> None:
        """From now on all packets between the hosts take a second, slow link.

        Args:
            rate: of each direction, in tc's notation, for example 4mbit.
            delay: of each packet, in seconds.
        """
        devices = [f"{name}s" for name in self.names]
        self._slow = SlowLink(devices, delay)
        for number, (name, device) in enumerate(zip(self.names, devices, strict=True)):
            other = f"{NETWORK}.{2 - number}"
            shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "link", "set", device, "up")
            limit = ("tc", "qdisc", "add", "dev", device, *shape)
            run("ip", "netns", "exec", name, *limit)
            run("ip", "-n", name, "route", "add", f"{other}/32", "dev", device)

    @staticmethod
    def at(host: int) -> str:
        """The address of a host."""
        return f"{NETWORK}.{host + 1}"

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
        return self.on(0, shlex.join(["exec", *start, *command]))


class Rank:
    """What one rank says: lines of JSON in a named pipe, which say() writes."""

    def __init__(self, rank: int, folder: pathlib.Path, errors: pathlib.Path) -> None:
        self._errors = errors  # the file of its standard error
        self._pipe = folder / f"said-{rank}"
        os.mkfifo(self._pipe)
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._pipe.open() as lines:  # waits until the rank opens it
            for line in lines:
                self._lines.put(json.loads(line))

    def next(self, what: str, timeout: float = HANGS) -> dict[str, Any]:
        """Returns the next line, which must be `what`."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no line {what}; {self._errors.read_text()}") from None
        assert line["what"] == what, line
        return line


def say(rank: int, folder: pathlib.Path, what: str, **more: object) -> None:
    """Called by a rank: writes one line for the Rank object of the test."""
    global _said
    if _said is None:
        _said = os.open(folder / f"said-{rank}", os.O_WRONLY)
    os.write(_said, (json.dumps({"what": what, **more}) + "\n").encode())


_said: int | None = None


class Job:
    """Processes on the hosts that are killed when the block ends. Their ranks say() lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.ranks = [Rank(rank, folder, folder / "stderr") for rank in range(WORLD)]
        self._errors = (folder / "stderr").open("w")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **environment: str) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=self._errors,
                stderr=self._errors,
            )
        )

    def wait(self) -> None:
        """Checks that every process ends with success."""
        codes = [process.wait(30) for process in self._processes]
        assert not any(codes), (codes, pathlib.Path(self._errors.name).read_text())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._errors.close()


def gloo_job(hosts: Hosts, folder: pathlib.Path, *command: str) -> Job:
    """Starts one process per rank. Each gets its rank as its last argument."""
    job = Job(folder)
    for rank in range(WORLD):
        host = rank // RANKS_OF_HOST
        words = ["exec", sys.executable, *command, str(rank)]
        interface = hosts.names[host]
        job.start(hosts.on(host, " ".join(words)), GLOO_SOCKET_IFNAME=interface, USE_LIBUV="0")
    return job


def mpi_job(hosts: Hosts, folder: pathlib.Path, *command: str) -> Job:
    """Starts one job of mpirun."""
    job = Job(folder)
    job.start(hosts.mpirun(folder, *command))
    return job
