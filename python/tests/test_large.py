"""Beyond all 32-bit limits: an item and a file of more than 4 GiB."""

from __future__ import annotations

import pathlib
import shutil

import numpy
import torch
import torch.distributed.checkpoint as dcp

import tilestone


def test_an_item_of_more_than_4_gib_and_one_that_begins_behind_it(tmp_path: pathlib.Path) -> None:
    # numpy.zeros() takes no pages for what is never written. Only the file has its full size.
    edge = 1 << 32
    size = edge + 12345
    big = torch.from_numpy(numpy.zeros(size, numpy.uint8))
    big[0], big[edge + 1], big[size - 1] = 1, 5, 7
    path = tmp_path / "large"
    try:
        tilestone.save({"big": big, "behind": torch.arange(5)}, path)
        with tilestone.open(path) as checkpoint:
            across = checkpoint.read("big", box=((edge - 2, edge + 3),))
            assert across.tolist() == [0, 0, 0, 5, 0]
            assert checkpoint.read("big", box=((size - 2, size),)).tolist() == [0, 7]
            assert checkpoint.verify().ok
        stock = {"behind": torch.zeros(5, dtype=torch.int64)}
        dcp.load(stock, checkpoint_id=path, no_dist=True)
        assert stock["behind"].tolist() == [0, 1, 2, 3, 4]
    finally:
        shutil.rmtree(path, ignore_errors=True)
