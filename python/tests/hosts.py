"""Simulates two hosts that share their disks by two network namespaces with one link.

Each namespace has its own host name. Needs root and `ip` (iproute2). All traffic stays inside the
namespaces.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import pathlib
import queue
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ranks

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
            # Where the kernel has this limit (Linux 6.15), a connection goes on soon after a cut:
            # it tries again every second. It gives up after 15 tries unless told otherwise.
            limit, tries = "/proc/sys/net/ipv4/tcp_rto_max_ms", "/proc/sys/net/ipv4/tcp_retries2"
            go_on = f"[ ! -e {limit} ] || {{ echo 1000 > {limit}; echo 200 > {tries}; }}"
            run("ip", "netns", "exec", name, "sh", "-c", go_on)

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
        """A command line that runs a shell command on a host. See also enter()."""
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


def enter(name: str) -> None:
    """Moves this process, which must have only one thread, to a host."""
    new_network, new_names = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as network:
        if libc.setns(network.fileno(), new_network) or libc.unshare(new_names):
            raise OSError(ctypes.get_errno(), f"can't move to the host {name}")
    socket.sethostname(name)


class Job:
    """Processes on the hosts that are killed when the block ends. Their ranks say() lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.ranks = [Rank(rank, folder, folder / "stderr") for rank in range(WORLD)]
        self._errors = (folder / "stderr").open("w")
        self._kills: list[Callable[[], None]] = []
        self._ends: list[Callable[[], int | None]] = []  # each waits and returns the exit code

    def start(self, command: list[str]) -> None:
        """Starts a program."""
        process = subprocess.Popen(command, stdout=self._errors, stderr=self._errors)
        self._kills.append(process.kill)
        self._ends.append(lambda: process.wait(30))

    def fork(self, host: str, rank: Callable[..., None], *args: Any) -> None:
        """Runs rank(*args) on a host, in a process that has already imported torch."""
        process = ranks.context().Process(
            target=_on_host, args=(host, self._errors.name, rank, args), daemon=True
        )
        process.start()

        def end() -> int | None:
            process.join(30)
            code: int | None = process.exitcode
            return code

        self._kills.append(process.kill)
        self._ends.append(end)

    def wait(self) -> None:
        """Checks that every process ends with success."""
        codes = [end() for end in self._ends]
        assert codes == [0] * len(codes), (codes, pathlib.Path(self._errors.name).read_text())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for kill, end in zip(self._kills, self._ends, strict=True):
            kill()
            end()
        self._errors.close()


def _on_host(host: str, errors: str, rank: Callable[..., None], args: tuple[Any, ...]) -> None:
    ranks.die_with_the_parent()
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    enter(host)
    os.environ.update(GLOO_SOCKET_IFNAME=host, USE_LIBUV="0", OMP_NUM_THREADS="1")
    rank(*args)


def gloo_job(hosts: Hosts, folder: pathlib.Path, rank: Callable[..., None], *args: Any) -> Job:
    """Starts one process per rank. Each gets its rank as the last argument."""
    job = Job(folder)
    for number in range(WORLD):
        job.fork(hosts.names[number // RANKS_OF_HOST], rank, *args, number)
    return job


def mpi_job(hosts: Hosts, folder: pathlib.Path, *command: str) -> Job:
    """Starts one job of mpirun."""
    job = Job(folder)
    job.start(hosts.mpirun(folder, *command))
    return job
