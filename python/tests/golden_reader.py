"""Reads golden checkpoints and compares them with their expected values; prints JSON.

Run it as a process of its own, because torch must never be imported.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import sys
import zlib

import numpy

import tilestone


def check_tensor(ckpt: tilestone.Checkpoint, key: str, wanted: dict[str, object]) -> str | None:
    entry = ckpt[key]
    shape = wanted["shape"]
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
    # torch 1.13 saved a dict as one object; later versions flatten it.
    found = repr(ckpt["common"][key] if "common" in ckpt else ckpt[f"common.{key}"])
    return None if found == wanted else f"{key}: {found}, expected {wanted}"


def text(value: object) -> str:
    """A value in the form of Megatron-Core's expected texts; an enum member is only its class."""
    if isinstance(value, io.BytesIO):
        return f"BytesIO {value.getvalue()!r}"
    if isinstance(value, tilestone.Opaque):
        if value.kind != "new":
            return f"<{value.name.split('.')[0]}>"
        fields = (f"{name}={plain(field)}" for name, field in value.state.items())
        return f"{value.name}({', '.join(fields)})"
    if isinstance(value, numpy.ndarray):
        name = tilestone.DType(value.dtype.name) if value.dtype.isbuiltin else value.dtype.name
        return f"tensor {name} {list(value.shape)} crc32={zlib.crc32(value.tobytes())}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(text(item) for item in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text(item)}" for key, item in value.items()) + "}"
    return plain(value)


def plain(value: object) -> str:
    if isinstance(value, tilestone.Opaque):
        return text(value)
    return f"torch.{value}" if isinstance(value, tilestone.DType) else repr(value)


def check_text(key: str, found: object, wanted: str) -> str | None:
    wanted = re.sub(r"<(\w+)\.\w+: \d+>", r"<\1>", wanted)
    return None if text(found) == wanted else f"{key}: {text(found)}, expected {wanted}"


def check_megatron(
    ckpt: tilestone.Checkpoint, expected: dict[str, dict[str, str]]
) -> list[str | None]:
    """Checks objects by their unique keys, the common state, and content metadata."""
    wanted = dict(expected["common"])
    if "content_metadata" in expected:
        wanted["content_metadata"] = str(expected["content_metadata"])
    common = ckpt.common()
    problems: list[str | None] = []
    if ckpt.dialect != "megatron" or set(common) != set(wanted):
        problems.append(f"{ckpt.dialect}: common keys {sorted(common)}")
    if set(ckpt.object_keys()) != set(expected["objects"]):
        problems.append(f"objects {ckpt.object_keys()}")
    problems += [check_text(key, common.get(key), value) for key, value in wanted.items()]
    objects = expected["objects"].items()
    return problems + [check_text(key, ckpt.object(key), value) for key, value in objects]


def at(tree: object, key: str) -> object:
    """The value of a key in a tree: under the whole key, or by its parts; None if there is none."""
    if isinstance(tree, list):
        tree = {str(index): item for index, item in enumerate(tree)}
    if not isinstance(tree, dict) or key in tree:
        return tree.get(key) if isinstance(tree, dict) else None
    dots = [index for index, letter in enumerate(key) if letter == "."]
    found = (at(tree.get(key[:dot]), key[dot + 1 :]) for dot in dots)
    return next((item for item in found if item is not None), None)


def check_whole(ckpt: tilestone.Checkpoint) -> list[str | None]:
    """A load without a template must give the same values as single reads, under the same keys."""
    loaded = tilestone.load(ckpt.path)
    single = {key: ckpt.read(key) for key in ckpt.tensor_keys()}
    single |= {key: ckpt.object(key) for key in ckpt.object_keys()}
    single |= ckpt.common() or {}
    return [
        f"{key}: {text(at(loaded, key))} in the whole checkpoint"
        for key, value in single.items()
        if text(at(loaded, key)) != text(value)
    ]


def check(path: pathlib.Path) -> dict[str, object]:
    expected = json.loads(pathlib.Path(f"{path}.expected.json").read_text())
    is_torch = path.parent.name.startswith("torch-")
    objects = expected["objects"] if is_torch else {}
    problems: list[str | None] = []
    with tilestone.open(path) as ckpt:
        for key, wanted in expected["tensors"].items():
            problems.append(check_tensor(ckpt, key, wanted))
        for key, wanted in objects.items():
            problems.append(check_object(ckpt, key, wanted))
        if not is_torch:
            problems += check_megatron(ckpt, expected)
        problems += check_whole(ckpt)
        missing = set(ckpt.tensor_keys()) ^ set(expected["tensors"])
        if missing:
            problems.append(f"keys differ: {sorted(missing)}")
        # Stock writers may leave duplicate items that their metadata doesn't name.
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
