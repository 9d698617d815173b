"""Reads golden checkpoints and compares them with their expected values; prints JSON.

Run as a process of its own: torch must never be imported.
"""

from __future__ import annotations

import json
import pathlib
import sys
import zlib

import numpy

import tilestone


def check_tensor(ckpt: tilestone.Checkpoint, key: str, wanted: dict[str, object]) -> str | None:
    entry = ckpt[key]
    shape = wanted.get("stored_shape", wanted["shape"])
    if list(entry.shape) != shape:
        return f"{key}: shape {entry.shape}, expected {shape}"
    if entry.dtype != wanted["dtype"]:
        return f"{key}: dtype {entry.dtype}, expected {wanted['dtype']}"
    array = ckpt.read(key)
    if not isinstance(array, numpy.ndarray) or list(array.shape) != shape:
        return f"{key}: read gave {type(array).__name__} of {array.shape}"
    crc = zlib.crc32(array.tobytes())
    return None if crc == wanted["crc32"] else f"{key}: crc {crc}, expected {wanted['crc32']}"


def check_object(ckpt: tilestone.Checkpoint, key: str, wanted: str) -> str | None:
    # torch 1.13 kept a dict as one object; later versions take it apart.
    found = repr(ckpt["common"][key] if "common" in ckpt else ckpt[f"common.{key}"])
    return None if found == wanted else f"{key}: {found}, expected {wanted}"


def check(path: pathlib.Path) -> dict[str, object]:
    expected = json.loads(pathlib.Path(f"{path}.expected.json").read_text())
    is_torch = path.parent.name.startswith("torch-")
    objects = expected["objects"] if is_torch else {}
    problems = []
    with tilestone.open(path) as ckpt:
        for key, wanted in expected["tensors"].items():
            problems.append(check_tensor(ckpt, key, wanted))
        for key, wanted in objects.items():
            problems.append(check_object(ckpt, key, wanted))
        missing = set(ckpt.tensor_keys()) ^ set(expected["tensors"])
        if missing:
            problems.append(f"keys differ: {sorted(missing)}")
        # Stock writers may leave copies of items that their metadata doesn't name.
        damages = [repr(damage) for damage in ckpt.verify().damages if damage.key]
    return {
        "tensors": len(expected["tensors"]),
        "objects": len(objects),
        "problems": [problem for problem in problems if problem] + damages,
    }


if __name__ == "__main__":
    out = {path: check(pathlib.Path(path)) for path in sys.argv[1:]}
    assert "torch" not in sys.modules, "torch was imported"
    print(json.dumps(out))
