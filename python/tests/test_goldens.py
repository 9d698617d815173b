"""Checkpoints written by stock PyTorch and Megatron-Core are read without torch."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

import tilestone

HERE = pathlib.Path(__file__).resolve().parent
GOLDEN = HERE.parent.parent / "tests" / "golden"


def goldens() -> list[str]:
    paths = [path for path in sorted(GOLDEN.glob("*/*")) if path.is_dir()]
    return [str(path.relative_to(GOLDEN)) for path in paths]


@pytest.fixture(scope="module")
def read() -> dict[str, dict[str, object]]:
    paths = [str(GOLDEN / name) for name in goldens()]
    command = [sys.executable, str(HERE / "golden_reader.py"), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return {str(pathlib.Path(path).relative_to(GOLDEN)): what for path, what in found.items()}


def test_every_torch_version_and_megatron_version_is_there() -> None:
    names = {name.split("/")[0] for name in goldens()}
    assert {"torch-1.13.1", "torch-2.3.1", "torch-2.6.0", "torch-2.14.1"} <= names
    assert len([name for name in names if name.startswith("megatron-core-")]) == 5


@pytest.mark.parametrize("name", goldens())
def test_every_tensor_and_object_equals_its_expected_value_without_torch(
    name: str, read: dict[str, dict[str, object]]
) -> None:
    assert read[name]["problems"] == []
    assert int(str(read[name]["tensors"])) > 5


def test_inspect_counts_an_item_of_a_flattened_tensor_once() -> None:
    path = GOLDEN / "megatron-core-0.13.1" / "flat-w2"
    command = [sys.executable, "-m", "tilestone", "inspect", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    files = json.loads(done.stdout)["files"]
    with tilestone.open(path) as ckpt:
        assert sum(file["items"] for file in files) == ckpt.verify().items
        assert ckpt["flat.three_dims"].shape == (4, 3, 8)
        assert len(ckpt["flat.three_dims"].boxes) == 5
    assert sum(file["item_bytes"] for file in files) <= sum(
        file.stat().st_size for file in path.glob("*.distcp")
    )
