"""cache="keep", "bypass" and None: data that a load and an open checkpoint leave in the page cache."""

from __future__ import annotations

import os
import pathlib

import numpy
import pytest
import tilestone

SIZE = 32 << 20  # bytes


def from_disk() -> int:
    """Bytes that this process has read from the disk so far."""
    for line in pathlib.Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes")


def forget(folder: str) -> None:
    """Drops the files from the page cache."""
    for file in pathlib.Path(folder).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@pytest.mark.parametrize("kept", ["keep", None])
@pytest.mark.parametrize("way", ["load", "open"])
def test_data_read_with_keep_or_by_default_is_read_again_without_the_disk(
    way: str, kept: str | None, ckpt: str
) -> None:
    state = {"w": numpy.arange(SIZE // 8)}
    tilestone.save(state, ckpt)

    def read(cache: str | None) -> int:
        before = from_disk()
        given = {} if cache is None else {"cache": cache}
        if way == "load":
            wanted = {"w": numpy.zeros(SIZE // 8, int)}
            loaded = tilestone.load(wanted, ckpt, reading=tilestone.Reading(**given))["w"]
        else:
            loaded = tilestone.open(ckpt, reading=tilestone.Reading(**given)).read("w")
        assert (loaded == state["w"]).all()
        return from_disk() - before

    for last in (False, False, True):  # the kernel drops cached pages if memory is short
        forget(ckpt)
        bypassing = [read("bypass"), read("bypass")]
        keeping = [read(kept), read(kept)]
        if bypassing[0] > 0:  # reads come from a disk
            assert keeping[0] > SIZE // 2
            assert keeping[0] < SIZE * 9 // 8
        if last or keeping[1] < SIZE // 16:
            break
    assert keeping[1] < SIZE // 16


def test_a_cache_policy_has_two_names(ckpt: str) -> None:
    tilestone.save({"w": numpy.arange(4)}, ckpt)
    for call in (lambda: tilestone.open(ckpt, reading=tilestone.Reading(cache="hold")),
                 lambda: tilestone.Reading(cache="hold")):  # fmt: skip
        with pytest.raises(tilestone.InvalidArgumentError, match='cache must be "bypass" or "keep"'):
            call()
