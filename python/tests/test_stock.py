"""One process each of stock PyTorch and Tilestone: each reads the checkpoints of the other."""

from __future__ import annotations

import argparse
import io
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_torch_tensors import DTYPES, random_tensor, same_bits
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import tilestone


def tree() -> dict:
    """A tree of everything that both sides support."""
    return {
        "dtypes": {name: random_tensor(name, (3, 5)) for name in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "view": torch.randn(10, 10)[2:5, 3:9:2],
        "ключ/слой ✓": torch.randn(2, 2),
        "nested": {"list": [torch.randn(3), {"x": 1, "7": "seven"}], "deep": {"a": {"b": 2.5}}},
        "objects": {
            "none": None, "text": "текст", "big": 2**80, "bytes": b"\x00\xff",
            "tuple": (1, (2, None), torch.arange(3)), "list": [1, [2, "three"]], "empty": [],
            "dtype": torch.bfloat16, "namespace": argparse.Namespace(lr=0.5),
        },
    }  # fmt: skip


def blank(item: object) -> object:
    """The same tree without its contents."""
    if isinstance(item, torch.Tensor):
        bits = torch.zeros(item.numel() * item.element_size(), dtype=torch.uint8)
        return bits.view(item.dtype).reshape(item.shape)
    if isinstance(item, dict):
        return {key: blank(value) for key, value in item.items()}
    if isinstance(item, list) and any(isinstance(v, (torch.Tensor, dict)) for v in item):
        return [blank(value) for value in item]
    return None


def assert_same(a: object, b: object, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert same_bits(a, b), path  # type: ignore[arg-type]
    elif isinstance(a, dict):
        assert set(a) == set(b), path  # type: ignore[call-overload]
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")  # type: ignore[index]
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path  # type: ignore[arg-type]
        for i, (x, y) in enumerate(zip(a, b, strict=True)):  # type: ignore[call-overload]
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def test_stock_dcp_loads_the_same_nested_tree(ckpt: str) -> None:
    state = tree()
    tilestone.save(state, ckpt)
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=ckpt, no_dist=True)
    assert_same(loaded, state)


def test_tilestone_loads_the_same_nested_tree_from_stock(ckpt: str) -> None:
    state = tree()
    dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    loaded = tilestone.load(blank(state), ckpt, allow_classes=["argparse.Namespace"])
    assert_same(loaded, state)
    with tilestone.open(ckpt) as opened:
        assert opened.writer.startswith("PyTorch")
        assert opened.verify().ok


def test_stock_file_system_reader_reads_the_metadata(ckpt: str) -> None:
    state = tree()
    tilestone.save(state, ckpt)
    metadata = dcp.FileSystemReader(ckpt).read_metadata()
    stored = metadata.state_dict_metadata["dtypes.bfloat16"]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.size == torch.Size([3, 5]) and stored.properties.dtype is torch.bfloat16
    assert metadata.planner_data["nested.list.1.7"] == ("nested", "list", 1, "7")


ODD_KEYS = [
    "", " ", ".", "..", "/", "/etc/passwd", "../../up", "a/../b", ".metadata", "a..b", "A", "a",
    "caf\u00e9", "cafe\u0301", "\U0001f642", "line\nfeed", "\x1b[31mred\x07", "nul\0inside",
    "nul\0other", "k" * 65536, "k" * 65536 + "2",
]  # fmt: skip


@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_keys_of_any_characters_pass_both_ways(writer: str, ckpt: str) -> None:
    state = {key: torch.full((2,), float(i)) for i, key in enumerate(ODD_KEYS)}
    targets = {key: torch.zeros(2) for key in ODD_KEYS}
    if writer == "stock":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
        tilestone.load(targets, ckpt)
    else:
        tilestone.save(state, ckpt)
        dcp.load(targets, checkpoint_id=ckpt, no_dist=True)
    assert_same(targets, state)
    with tilestone.open(ckpt) as opened:
        assert sorted(opened.keys()) == sorted(ODD_KEYS)
        assert opened.verify().ok


def items_of(ckpt: str) -> dict[str, bytes]:
    metadata = dcp.FileSystemReader(ckpt).read_metadata()
    out = {}
    for index, info in metadata.storage_data.items():
        data = pathlib.Path(ckpt, info.relative_path).read_bytes()
        out[index.fqn] = data[info.offset : info.offset + info.length]
        assert len(out[index.fqn]) == info.length
    return out


def test_torch_load_reads_single_items_weights_only(ckpt: str) -> None:
    state = tree()
    del state["objects"]["namespace"]
    tilestone.save(state, ckpt)
    for key, data in items_of(ckpt).items():
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        if key.startswith("dtypes."):
            assert same_bits(loaded, state["dtypes"][key.removeprefix("dtypes.")])
        if key.startswith("objects."):
            assert_same(loaded, state["objects"][key.removeprefix("objects.")])


def test_stock_dcp_to_torch_save_makes_the_same_tree(ckpt: str, tmp_path: pathlib.Path) -> None:
    state = tree()
    tilestone.save(state, ckpt)
    target = tmp_path / "all.pt"
    dcp_to_torch_save(ckpt, target)
    loaded = torch.load(target, weights_only=False)
    for name in DTYPES:
        assert same_bits(loaded["dtypes"][name], state["dtypes"][name])
    assert_same(loaded["nested"]["list"][0], state["nested"]["list"][0])
    assert loaded["nested"]["list"][1] == {"x": 1, "7": "seven"}
    assert_same(loaded["objects"], state["objects"])


@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_the_same_module_and_optimizer_state_through_either_side(writer: str, ckpt: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = {"model": blank(dict(state["model"])), "optimizer": blank(state["optimizer"])}
    if writer == "stock":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
        loaded = tilestone.load(wanted, ckpt)
    else:
        tilestone.save(state, ckpt)
        dcp.load(wanted, checkpoint_id=ckpt, no_dist=True)
        loaded = wanted
    optimizer.load_state_dict(loaded["optimizer"])
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded["model"][key], tensor)
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"]
    )
