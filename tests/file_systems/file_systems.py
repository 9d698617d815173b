#!/usr/bin/env python3
"""file_systems.py STORAGE_TEST KILLS KILL_SAVER POWER_LOSS OVERWRITES IN_BACKGROUND IN_ORDER
    [NAME...]

Mounts real file systems (ext4, XFS and Btrfs in small image files in memory, tmpfs, overlayfs,
FUSE by bindfs, and bindfs with IN_ORDER, whose files accept bytes only in order) below a temporary
directory, and on each of them, or those named:

- runs the storage conformance suite (STORAGE_TEST uses TEST_TMPDIR as its directory), and checks
  that the storage finds out whether two directories can be exchanged;
- saves checkpoints of three kinds, overwrites them on other numbers of ranks, and loads them in
  other layouts (OVERWRITES). Where directories can't be exchanged, overwriting two of the kinds
  must be refused;
- saves, overwrites, kills and checks the result, also of saves that exchange directories (KILLS
  with KILL_SAVER);
- if the file system can be shut down as by a power loss (ext4, XFS): saves, replaces directories,
  shuts down without flushing the journal, mounts again and checks the result (POWER_LOSS).

Also saves in the background on a full tmpfs, and on bindfs that is stopped meanwhile
(IN_BACKGROUND).

Prints what was mounted, what was not, and why. It is a failure if a file system that the kernel
supports can't be mounted, but not if the kernel lacks it. If nothing can be mounted at all, because
that needs root, the exit code is 77, which means not run.
"""

import array
import contextlib
import ctypes
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

CASES = ("posix", "child_of_posix")
DIRECT_CASE = "posix_uring_direct"  # writes in any order, because it asks for direct I/O
KILL_ROUNDS = {"torch": "6", "megatron": "3", "zarr": "3"}
SHUT_DOWN = 0x8004587D  # _IOR('X', 125, __u32): XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
WITHOUT_FLUSHING = 2
IMAGE_BYTES = 400 << 20  # sparse; mkfs.xfs wants 300 MiB
NOT_RUN = 77
IN_BACKGROUND = "in_background"  # beside the names of file systems


class NotHere(Exception):
    """The machine lacks something that a file system needs. The text names it."""


class Failed(Exception):
    """A command that must work has failed. The text is its output."""


def run(*command, **options):
    """Runs a command and returns its output. Raises Failed if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        **options,
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        raise Failed(f"{words}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def hide_mounts():
    """Gives this process mounts of its own.

    A process that takes over all mounts of the machine, as `ip netns exec` does, would otherwise
    keep a file system in use after it was unmounted here. Mounted again, it would still be shut down.
    """
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000  # CLONE_NEWNS, MS_REC, MS_PRIVATE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, recursive | private, None):
        raise Failed(f"mounts can't be hidden: {os.strerror(ctypes.get_errno())}")


def need_tool(name):
    if shutil.which(name) is None and not pathlib.Path("/usr/sbin", name).exists():
        raise Failed(f"{name} is missing: tools/setup installs it")


def need_kernel(name):
    known = pathlib.Path("/proc/filesystems").read_text(encoding="ascii").split()
    if name not in known:
        subprocess.run(["modprobe", "-q", name], check=False, stderr=subprocess.DEVNULL)
        known = pathlib.Path("/proc/filesystems").read_text(encoding="ascii").split()
    if name not in known:
        raise NotHere(f"the kernel has no {name}")


def unmount(directory):
    for _ in range(20):  # a killed process may still be ending
        done = subprocess.run(["umount", directory], check=False, stderr=subprocess.DEVNULL)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    run("umount", "--lazy", directory)


@contextlib.contextmanager
def image(work, kind, *make):
    """Mounts a file system in a file. Yields the function that mounts it again after a shutdown."""
    need_kernel(kind)
    need_tool(make[0])
    if not pathlib.Path("/dev/loop-control").exists():
        raise NotHere("no loop devices")
    file = work / f"{kind}.image"
    directory = work / kind
    directory.mkdir()
    with open(file, "wb") as sparse:
        sparse.truncate(IMAGE_BYTES)
    run(*make, file)

    def mount():
        run("mount", "-t", kind, "-o", "loop", file, directory)

    def again():
        unmount(directory)
        mount()

    mount()
    try:
        yield directory, again
    finally:
        unmount(directory)


@contextlib.contextmanager
def tmpfs(work, size="300m"):
    directory = work / "tmpfs"
    directory.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory)
    try:
        yield directory, None
    finally:
        unmount(directory)


@contextlib.contextmanager
def layers(work):
    """Yields a function that mounts an overlay of two directories below `work`, and its place."""
    need_kernel("overlay")
    with tmpfs(work) as (below, _):
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        directory = work / "overlay"
        directory.mkdir()
        # Without redirect_dir the kernel can't move a directory of the lower layer.
        options = (
            f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work,redirect_dir=off"
        )

        @contextlib.contextmanager
        def mounted():
            run("mount", "-t", "overlay", "-o", options, "overlay", directory)
            try:
                yield directory
            finally:
                unmount(directory)

        yield below / "lower", mounted


@contextlib.contextmanager
def overlay(work):
    with layers(work) as (_, mounted), mounted() as directory:
        yield directory, None


@contextlib.contextmanager
def to_bind(work, name):
    """A directory of a tmpfs, and an empty one on which bindfs can mount it."""
    need_kernel("fuse")
    need_tool("bindfs")
    if not pathlib.Path("/dev/fuse").exists():
        raise NotHere("no /dev/fuse")
    with tmpfs(work) as (below, _):
        (below / "bound").mkdir()
        directory = work / name
        directory.mkdir()
        yield below / "bound", directory


@contextlib.contextmanager
def bindfs(work, preload=None):
    with to_bind(work, "bindfs") as (bound, directory):
        loaded = {} if preload is None else {"LD_PRELOAD": str(preload)}
        run("bindfs", bound, directory, env={**os.environ, **loaded})
        try:
            yield directory, None
        finally:
            unmount(directory)


class Programs(NamedTuple):
    """The paths of the programs, and of the library that makes bindfs accept bytes in order."""

    storage_conformance: pathlib.Path
    kills: pathlib.Path
    kill_saver: pathlib.Path
    power_loss: pathlib.Path
    overwrites: pathlib.Path
    in_background: pathlib.Path
    in_order: pathlib.Path


class FileSystem(NamedTuple):
    """How to mount a file system, and what Linux lets it do."""

    mount: Callable[[pathlib.Path], Any]
    exchanges: bool  # two directories that it has made, by renameat2
    in_order: bool = False  # refuses a write that does not continue at a file's end
    maps: bool = True  # mapped reads map its files


def file_systems(programs):
    return {
        "ext4": FileSystem(lambda work: image(work, "ext4", "mkfs.ext4", "-q", "-F"), True),
        "xfs": FileSystem(lambda work: image(work, "xfs", "mkfs.xfs", "-q", "-f"), True),
        "btrfs": FileSystem(lambda work: image(work, "btrfs", "mkfs.btrfs", "-q", "-f"), True),
        "tmpfs": FileSystem(tmpfs, True),
        "overlay": FileSystem(overlay, True),
        # The library of bindfs, libfuse 2, does not know the flags of renameat2.
        "bindfs": FileSystem(bindfs, False, maps=False),
        "bindfs_in_order": FileSystem(
            lambda work: bindfs(work, programs.in_order), False, in_order=True, maps=False
        ),
    }


def accepts_only_in_order(directory):
    """Whether a file refuses a write that does not begin at its end."""
    name = directory / "in_any_order"
    file = os.open(name, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(file, b"x" * 4096, 4096)
    except OSError:
        return True
    finally:
        os.close(file)
        name.unlink()
    return False


def conformance(programs, file_system, directory):
    cases = CASES if file_system.in_order else (*CASES, DIRECT_CASE)
    names = ":".join(f"Storages/StorageConformance.*/{case}" for case in cases)
    environment = {**os.environ, "TEST_TMPDIR": str(directory)}
    output = run(
        programs.storage_conformance, f"--gtest_filter={names}:Storage.SaysWhatItCan",
        env=environment,
    )
    can = [line for line in output.splitlines() if line.startswith("can: ")]
    passed = [line for line in output.splitlines() if "PASSED" in line]
    if len(can) != 1 or len(passed) != 1:
        raise Failed(f"{programs.storage_conformance} ran no tests:\n{output[-4000:]}")
    expected = f"can: exchange {yes_or_no(file_system.exchanges)}, map {yes_or_no(file_system.maps)}"
    if can[0] != expected:
        raise Failed(f"the storage has found out \"{can[0]}\" instead of \"{expected}\"")
    return f"{passed[0].split(']')[1].strip()} {can[0]}"


def yes_or_no(value):
    return "yes" if value else "no"


def overwrites(program, directory, can):
    run(program, "save", directory)
    return run(program, "overwrite", directory, yes_or_no(can)).strip()


def overwrites_of_lower_layer(program, work):
    """The checkpoints are in the lower layer of an overlay, which can't exchange its directories."""
    with layers(work) as (lower, mounted):
        place = lower / "checkpoints"
        place.mkdir()
        run(program, "save", place)
        with mounted() as directory:
            return run(program, "overwrite", directory / place.name, "no").strip()


def kills(programs, file_system, directory):
    kinds = KILL_ROUNDS if file_system.exchanges else ["torch"]
    for kind in kinds:
        place = directory / f"kills.{kind}"
        output = run(programs.kills, programs.kill_saver, place, kind, KILL_ROUNDS[kind], "1")
        yield output.splitlines()[-1]


def shut_down(directory):
    """Shuts the file system down as a power loss does. False if it does not support that."""
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(root, SHUT_DOWN, array.array("I", [WITHOUT_FLUSHING]))
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def power_loss(program, directory, mount_again):
    if mount_again is None:
        return "no power loss: the file system can't be shut down"
    place = directory / "power_loss"
    run(program, "save", place)
    if not shut_down(directory):
        return "no power loss: the file system can't be shut down"
    mount_again()
    return run(program, "judge", place).strip()


@contextlib.contextmanager
def stoppable(work):
    """Mounts bindfs. Yields its directory and its process."""
    with to_bind(work, "stoppable") as (bound, directory):
        with subprocess.Popen(["bindfs", "-f", bound, directory]) as daemon:
            try:
                while not os.path.ismount(directory):
                    if daemon.poll() is not None:
                        raise Failed("bindfs has ended")
                    time.sleep(0.01)
                yield directory, daemon.pid
            finally:
                daemon.send_signal(signal.SIGCONT)
                unmount(directory)


def in_background(program, work):
    work.mkdir()
    with tmpfs(work, "20m") as (directory, _):
        yield f"full: {run(program, directory, 'full').strip()}"
    with stoppable(work) as (directory, pid):
        yield f"hanging: {run(program, directory, 'hang', pid).strip()}"


def try_one(name, file_system, work, programs):
    with file_system.mount(work) as (directory, mount_again):
        if accepts_only_in_order(directory) != file_system.in_order:
            raise Failed("it accepts writes in another order than expected")
        print(f"{name}: mounted; {conformance(programs, file_system, directory)}", flush=True)
        place = directory / "checkpoints"
        place.mkdir()
        print(f"{name}: {overwrites(programs.overwrites, place, file_system.exchanges)}")
        for line in kills(programs, file_system, directory):
            print(f"{name}: {line}", flush=True)
        print(f"{name}: {power_loss(programs.power_loss, directory, mount_again)}", flush=True)
    if name == "overlay":
        again = work / "again"
        again.mkdir()
        said = overwrites_of_lower_layer(programs.overwrites, again)
        print(f"{name}, lower layer: {said}", flush=True)


def main(arguments):
    count = len(Programs._fields)
    if len(arguments) <= count:
        print(__doc__, file=sys.stderr)
        return 2
    programs = Programs(*(pathlib.Path(name).resolve() for name in arguments[1 : 1 + count]))
    known = file_systems(programs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything is unmounted
    failures = 0
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="tilestone-"))
        try:
            hide_mounts()
            # The images are in memory, so that tests don't wait for the machine's disk.
            memory, _ = stack.enter_context(tmpfs(pathlib.Path(temporary), "1500m"))
        except Failed as error:
            print(f"nothing can be mounted here, so nothing was tested: {error}")
            return NOT_RUN
        for name in arguments[1 + count :] or [*known, IN_BACKGROUND]:
            begun = time.monotonic()
            work = memory / f"of-{name}"
            try:
                if name == IN_BACKGROUND:
                    for line in in_background(programs.in_background, work):
                        print(line, flush=True)
                else:
                    work.mkdir()
                    try_one(name, known[name], work, programs)
            except NotHere as why:
                print(f"{name}: not mounted: {why}")
            except Failed as error:
                failures += 1
                print(f"{name}: FAILED: {error}")
            shutil.rmtree(work, ignore_errors=True)
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
