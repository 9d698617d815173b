"""Checkpoints whose files are symbolic links."""

from __future__ import annotations

import os
import pathlib

import numpy
import pytest

import tilestone

W = numpy.arange(100_000)


def linked(folder: pathlib.Path, blobs: str) -> pathlib.Path:
    """A checkpoint like in a model hub's cache: files in `blobs`, and links in a snapshot."""
    tilestone.save({"w": W, "step": 3}, folder / "saved", group=tilestone.solo())
    snapshot = folder / "models--x--y" / "snapshots" / "0123"
    (folder / "models--x--y" / blobs).mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in (folder / "saved").rglob("*") if p.is_file())):
        link = snapshot / path.relative_to(folder / "saved")
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = folder / "models--x--y" / blobs / f"{number}"
        path.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_the_hubs_cache_opens_loads_and_verifies(tmp_path: pathlib.Path) -> None:
    snapshot = linked(tmp_path, "blobs")
    with tilestone.open(snapshot) as opened:
        assert (opened.read("w") == W).all() and opened.verify().ok
    assert tilestone.load({"w": W * 0, "step": None}, snapshot)["step"] == 3
    (tmp_path / "link").symlink_to(snapshot)
    assert tilestone.load({"step": None}, tmp_path / "link") == {"step": 3}


def test_stock_opens_the_same(tmp_path: pathlib.Path) -> None:
    import torch
    from torch.distributed.checkpoint import load

    snapshot = linked(tmp_path, "blobs")
    state = {"w": torch.zeros(len(W), dtype=torch.int64)}
    load(state, checkpoint_id=str(snapshot), no_dist=True)
    assert (state["w"].numpy() == W).all()


def test_other_links_are_refused_by_name_unless_asked_for(tmp_path: pathlib.Path) -> None:
    snapshot = linked(tmp_path, "elsewhere")
    for call in (tilestone.open, lambda path: tilestone.load({"step": None}, path)):
        with pytest.raises(tilestone.UnsafeError, match="reading.follow_links"):
            call(snapshot)
    with tilestone.open(snapshot, reading=tilestone.Reading(follow_links=True)) as opened:
        assert (opened.read("w") == W).all()
    reading = tilestone.Reading(follow_links=True)
    assert tilestone.load({"step": None}, snapshot, reading=reading) == {"step": 3}
    (snapshot / ".tilestone" / "lock").unlink()
    with pytest.raises(tilestone.UnsafeError, match="reading.follow_links"):
        tilestone.gc(snapshot)
    assert tilestone.gc(snapshot, follow_links=True) == []


def test_a_link_to_a_file_of_the_system_is_refused(tmp_path: pathlib.Path) -> None:
    tilestone.save({"w": W}, tmp_path / "x", group=tilestone.solo())
    (data,) = (tmp_path / "x").glob("*.distcp")
    data.unlink()
    data.symlink_to("/etc/passwd")
    with tilestone.open(tmp_path / "x") as opened, pytest.raises(tilestone.UnsafeError):
        opened.read("w")


def test_saving_over_a_snapshot_replaces_links_and_keeps_their_targets(
    tmp_path: pathlib.Path,
) -> None:
    snapshot = linked(tmp_path, "blobs")
    blobs = {p.name: p.read_bytes() for p in (tmp_path / "models--x--y" / "blobs").iterdir()}
    (snapshot / ".tilestone" / "lock").unlink()
    tilestone.save({"w": W + 1}, snapshot, group=tilestone.solo(), overwrite=True)
    assert (tilestone.load({"w": W * 0}, snapshot)["w"] == W + 1).all()
    left = {p.name: p.read_bytes() for p in (tmp_path / "models--x--y" / "blobs").iterdir()}
    assert left == blobs
    assert not [p for p in snapshot.rglob("*") if p.is_symlink()]
