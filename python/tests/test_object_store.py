"""Checkpoints in object stores, with a real server."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import ranks
import torch
from torch.distributed import checkpoint as stock

import tilestone
import tilestone.megatron
from tilestone import dcp
from tilestone.megatron import core
from tilestone.megatron.strategies.common import TorchCommonSaveStrategy

# ---- Places that no store takes

NOBODYS = ("gs://bucket/x", "memory://x", "file:///x", "s3:/bucket/x", pathlib.Path("s3://bucket/x"))


def calls_with(place: Any) -> list[Any]:
    state, template = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    common = TorchCommonSaveStrategy("torch", 1)
    config = core.CheckpointingConfig("torch_dist", 1)
    entity = tilestone.megatron.ShardedObject("o", 1, (1,), (0,))
    return [
        lambda: tilestone.save(state, place),
        lambda: tilestone.async_save(state, place),
        lambda: tilestone.save(state, place, by_files=tilestone.ByFiles(0, 1, "a token of it")),
        lambda: tilestone.load(template, place),
        lambda: tilestone.load(place),
        lambda: tilestone.open(place),
        lambda: tilestone.Session().save(state, place),
        lambda: tilestone.CheckpointManager(place),
        lambda: tilestone.gc(place),
        lambda: tilestone.publish(place),
        lambda: tilestone.unpublished(place),
        lambda: tilestone.convert(place, "y"),
        lambda: dcp.save(state, checkpoint_id=place),
        lambda: dcp.async_save(state, checkpoint_id=place),
        lambda: dcp.load(template, checkpoint_id=place),
        lambda: stock.save(state, storage_writer=dcp.FileSystemWriter(place)),
        lambda: tilestone.megatron.save({"a": 1}, place),
        lambda: tilestone.megatron.load({"a": 1}, place),
        lambda: tilestone.megatron.load_common_state_dict(place),
        lambda: tilestone.megatron.load_tensors_metadata(place),
        lambda: tilestone.megatron.check_is_distributed_checkpoint(place),
        lambda: tilestone.megatron.remove_sharded_tensors(place, "a"),
        lambda: core.save_config(config, place),
        lambda: common.save_common({"a": 1}, place),
        lambda: common.save_sharded_objects({"o": entity}, place),
    ]


def refused(rank: int, world: int, folder: str) -> list[tuple[str, str]]:
    os.chdir(folder)
    found = []
    for place in NOBODYS:
        for number, call in enumerate(calls_with(place)):
            try:
                call()
                found.append((f"{place} {number}", "nothing was raised"))
            except tilestone.UnsupportedError as error:
                if "URL" not in str(error):
                    found.append((f"{place} {number}", str(error)))
            except Exception as error:
                # As torch's saves and loads report it.
                if not isinstance(error.__cause__, tilestone.UnsupportedError):
                    found.append((f"{place} {number}", repr(error)))
    return found


def test_a_url_that_no_store_takes_is_refused_by_every_call_and_makes_no_folder(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    assert worlds[2].run(refused, str(tmp_path)) == [[], []]
    assert os.listdir(tmp_path) == []
