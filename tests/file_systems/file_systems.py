#!/usr/bin/env python3
"""file_systems.py STORAGE_TEST KILLS KILL_SAVER POWER_LOSS [NAME...]

Mounts real file systems (ext4, XFS and Btrfs in small image files in memory, tmpfs, overlayfs,
FUSE by bindfs) below a temporary directory, and on each of them, or those named:

- runs the storage conformance suite (STORAGE_TEST uses TEST_TMPDIR as its directory);
- saves, overwrites, kills and checks the result (KILLS with KILL_SAVER);
- if the file system can be shut down as by a power loss (ext4, XFS): saves, replaces a directory,
  shuts down without flushing the journal, mounts again and checks the result (POWER_LOSS).

Prints what was mounted, what was not, and why. It is a failure if a file system that the kernel
supports can't be mounted, but not if the kernel lacks it. If nothing can be mounted at all, because
that needs root, the exit code is 77, which means not run.
"""

import array
import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CASES = ("posix", "posix_uring_direct", "child_of_posix")
KILL_ROUNDS = "6"
SHUT_DOWN = 0x8004587D  # _IOR('X', 125, __u32): XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
WITHOUT_FLUSHING = 2
IMAGE_BYTES = 400 << 20  # sparse; mkfs.xfs wants 300 MiB
NOT_RUN = 77


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
def overlay(work):
    need_kernel("overlay")
    with tmpfs(work) as (below, _):
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        directory = work / "overlay"
        directory.mkdir()
        options = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        run("mount", "-t", "overlay", "-o", options, "overlay", directory)
        try:
            yield directory, None
        finally:
            unmount(directory)


@contextlib.contextmanager
def bindfs(work):
    need_kernel("fuse")
    need_tool("bindfs")
    if not pathlib.Path("/dev/fuse").exists():
        raise NotHere("no /dev/fuse")
    with tmpfs(work) as (below, _):
        (below / "bound").mkdir()
        directory = work / "bindfs"
        directory.mkdir()
        run("bindfs", below / "bound", directory)
        try:
            yield directory, None
        finally:
            unmount(directory)


FILE_SYSTEMS = {
    "ext4": lambda work: image(work, "ext4", "mkfs.ext4", "-q", "-F"),
    "xfs": lambda work: image(work, "xfs", "mkfs.xfs", "-q", "-f"),
    "btrfs": lambda work: image(work, "btrfs", "mkfs.btrfs", "-q", "-f"),
    "tmpfs": tmpfs,
    "overlay": overlay,
    "bindfs": bindfs,
}


def conformance(program, directory):
    cases = ":".join(f"Storages/StorageConformance.*/{case}" for case in CASES)
    environment = {**os.environ, "TEST_TMPDIR": str(directory)}
    output = run(program, f"--gtest_filter={cases}:Storage.SaysWhatItCan", env=environment)
    can = [line for line in output.splitlines() if line.startswith("can: ")]
    passed = [line for line in output.splitlines() if "PASSED" in line]
    if len(can) != 1 or len(passed) != 1:
        raise Failed(f"{program} ran no tests:\n{output[-4000:]}")
    return f"{passed[0].split(']')[1].strip()} {can[0]}"


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


def try_one(name, work, programs):
    storage_test, kills, kill_saver, loss = programs
    with FILE_SYSTEMS[name](work) as (directory, mount_again):
        print(f"{name}: mounted; {conformance(storage_test, directory)}", flush=True)
        output = run(kills, kill_saver, directory / "kills", KILL_ROUNDS, "1").splitlines()
        print(f"{name}: {output[-1]}", flush=True)
        print(f"{name}: {power_loss(loss, directory, mount_again)}", flush=True)


def main(arguments):
    if len(arguments) < 5:
        print(__doc__, file=sys.stderr)
        return 2
    programs = [pathlib.Path(name).resolve() for name in arguments[1:5]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything is unmounted
    failures = 0
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="tilestone-"))
        try:
            # The images are in memory, so that tests don't wait for the machine's disk.
            memory, _ = stack.enter_context(tmpfs(pathlib.Path(temporary), "1500m"))
        except Failed as error:
            print(f"nothing can be mounted here, so nothing was tested: {error}")
            return NOT_RUN
        for name in arguments[5:] or FILE_SYSTEMS:
            begun = time.monotonic()
            work = memory / f"of-{name}"
            work.mkdir()
            try:
                try_one(name, work, programs)
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
