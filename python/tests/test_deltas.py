"""Deltas: what has changed in weights from one version to the next."""

import subprocess
import sys

import pytest
import safetensors.torch
import torch

import tilestone


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "tilestone", *map(str, words)], capture_output=True, text=True
    )


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def random_like(shape, dtype):
    """Any bits, NaN with payloads among them."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def changed(tensor, share):
    """The tensor with other bits in about a share of its elements."""
    flat = tensor.clone().reshape(-1)
    where = torch.rand(flat.numel()) < share
    flat[where] = random_like((int(where.sum()),), tensor.dtype)
    return flat.reshape(tensor.shape)


def version(share=None, of=None):
    if of is not None:
        return {key: changed(tensor, share) for key, tensor in of.items()}
    state = {f"w.{str(dtype)[6:]}": random_like((37, 51), dtype) for dtype in DTYPES}
    state["scalar"] = torch.tensor(1.5)
    state["empty"] = torch.empty(0, 3)
    state["large"] = torch.randn(1100, 1024).to(torch.bfloat16).repeat(2, 2)  # several pieces
    return state


def assert_same(loaded, expected):
    assert set(loaded) == set(expected)
    for key, tensor in expected.items():
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape, key
        same = loaded[key].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), key


@pytest.mark.parametrize("share", [0.01, 0.4, 1.0])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, share):
    torch.manual_seed(1)
    old = version()
    new = version(share, old)
    tilestone.save(old, tmp_path / "a")
    tilestone.save(new, tmp_path / "b")
    tilestone.save_delta(tmp_path / "b", tmp_path / "d.safetensors", base=tmp_path / "a")
    report = tilestone.apply_delta(tmp_path / "a", tmp_path / "d.safetensors", to=tmp_path / "c")
    assert_same(tilestone.load(tmp_path / "c"), new)
    assert report.bytes == (tmp_path / "d.safetensors").stat().st_size
    assert report.bytes <= 1.05 * report.whole_bytes + 20_000


def test_the_package_reads_the_file_and_others_can_apply_it(tmp_path):
    torch.manual_seed(2)
    old = {"w": torch.randn(600, 500).to(torch.bfloat16), "frozen": torch.ones(3)}
    new = {"w": changed(old["w"], 0.01), "frozen": old["frozen"]}
    safetensors.torch.save_file(old, tmp_path / "a.safetensors")
    safetensors.torch.save_file(new, tmp_path / "b.safetensors")
    path = tmp_path / "d.safetensors"
    made = command("delta", tmp_path / "a.safetensors", tmp_path / "b.safetensors", path)
    assert made.returncode == 0, made.stderr
    assert path.stat().st_size < 0.03 * 600 * 500 * 2
    entries = safetensors.torch.load_file(path)
    assert set(entries) == {"w.positions", "w.values"}
    mine = old["w"].clone().reshape(-1)
    at, values = -1, iter(entries["w.values"])
    for gap in entries["w.positions"].tolist():
        at += gap
        if gap < 255:
            at += 1
            mine[at] = next(values)
    assert_same({"w": mine.reshape(600, 500)}, {"w": new["w"]})


def test_a_missed_base_is_refused_and_nothing_is_made(tmp_path):
    torch.manual_seed(3)
    versions = [version()]
    for i in range(2):
        versions.append(version(0.01, versions[-1]))
    for i, each in enumerate(versions):
        tilestone.save(each, tmp_path / str(i))
    path = tmp_path / "d.safetensors"
    tilestone.save_delta(tmp_path / "2", path, base=tmp_path / "1")
    with pytest.raises(tilestone.MismatchError) as failed:
        tilestone.apply_delta(tmp_path / "0", path, to=tmp_path / "made")
    assert failed.value.key in versions[0]
    assert not (tmp_path / "made").exists()
