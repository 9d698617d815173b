"""integrity.json, the hashes of files: written when asked for, and compared."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import re

import pytest
import torch

import tilestone
from ranks import Worlds
from test_megatron_api import _tensor
from tilestone import megatron


def test_files_are_compared_with_the_hashes_that_megatron_core_wrote(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    megatron.save(_tensor(1), ckpt)
    folder = pathlib.Path(ckpt)
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir() if path.is_file()
    }  # fmt: skip
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))
    assert megatron.load(_tensor(0), ckpt, verify_integrity=True)["w"].tolist() == [1, 1]
    hashes["common.pt"] = "0" * 64
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))
    with pytest.raises(tilestone.CorruptError, match="common.pt"):
        megatron.load(_tensor(0), ckpt, verify_integrity=True)
    with tilestone.open(ckpt) as checkpoint:
        assert [damage.file for damage in checkpoint.verify().damages] == ["common.pt"]
    megatron.save(_tensor(2), ckpt)  # such a checkpoint can be replaced, and its hashes go
    assert not (folder / "integrity.json").exists()


def test_hashes_of_files_are_written_when_asked_for_and_name_each_damaged_file(
    ckpt: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pathlib.Path(ckpt)
    for backend in ("zarr", "torch_dist"):
        megatron.save({**_tensor(1), "step": 1}, ckpt, (backend, 1), verify_integrity=True)
        stored = json.loads((folder / "integrity.json").read_text())
        assert stored["algorithm"] == "sha256"
        assert stored["files"] == {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.iterdir() if path.is_file() and path.name != "integrity.json"
        }  # fmt: skip
        assert megatron.load(_tensor(0), ckpt, verify_integrity=True)["step"] == 1

    def damaged() -> list[str]:
        """Found by verify, by a load, and by the command line's exit status."""
        with tilestone.open(ckpt) as checkpoint:
            found = {damage.file for damage in checkpoint.verify().damages}
        try:
            megatron.load(_tensor(0), ckpt, verify_integrity=True)
        except tilestone.CorruptError as error:
            assert os.path.basename(error.file) in found, error
        else:
            assert not found
        return sorted(found)

    assert damaged() == []
    (folder / "extra").write_text("")
    assert damaged() == ["extra"]
    (folder / "extra").unlink()
    stored["files"]["lost.pt"] = "0" * 64
    (folder / "integrity.json").write_text(json.dumps(stored))
    assert damaged() == ["lost.pt"]
    stored["save_id"] = "of another save"  # killed before it removed these hashes
    (folder / "integrity.json").write_text(json.dumps(stored))
    assert damaged() == [] and "of an earlier save" in caplog.text
    stored["files"]["../common.pt"] = "0" * 64
    del stored["save_id"]
    (folder / "integrity.json").write_text(json.dumps(stored))
    with pytest.raises(tilestone.CorruptError, match="does not hold sha256 hashes of files"):
        megatron.load(_tensor(0), ckpt, verify_integrity=True)
    with tilestone.open(ckpt) as checkpoint:
        assert [damage.file for damage in checkpoint.verify().damages] == ["integrity.json"]
    tilestone.save({"w": torch.ones(2)}, f"{ckpt}-torch")
    pathlib.Path(f"{ckpt}-torch", "integrity.json").write_text("another program's")
    with tilestone.open(f"{ckpt}-torch") as checkpoint:
        assert checkpoint.verify().ok
    with pytest.raises(tilestone.UnsupportedError, match="verify_integrity needs a communicator"):
        by_files = tilestone.ByFiles(0, 1, "a job of today")
        megatron.save(_tensor(1), f"{ckpt}2", by_files=by_files, verify_integrity=True)


def _save_with_hashes(rank: int, world: int, ckpt: str, who: tuple[int, ...]) -> None:
    megatron.save(_tensor(1), ckpt, verify_integrity=rank in who, validate_access_integrity=False)


def test_hashes_that_only_some_ranks_want_are_an_error_that_names_them(
    worlds: Worlds, ckpt: str
) -> None:
    """Those that want them would wait for the others after the save."""
    text = r"don't agree on verify_integrity \(rank 0: False; rank 1: True\)"
    for result in worlds[2].collect(_save_with_hashes, ckpt, (1,)):
        assert re.search(text, result.trace)
    assert not os.path.exists(ckpt)
