"""torch tensors: every dtype, any strides, parameters, devices, Stateful objects."""

from __future__ import annotations

import argparse
import pathlib
import re
import zlib
from collections.abc import Callable

import forced_device
import numpy
import pytest
import torch

import tilestone
from tilestone._torch import devices, tensors

DTYPES = [name for name in tilestone.dtype_names() if hasattr(torch, name)]


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, which are valid values of every dtype except bool."""
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(seed)
    if name == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = int(numpy.prod(shape)) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def crc(tensor: torch.Tensor) -> int:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # As integers, because torch's copies of small floats may quiet signalling NaNs.
    bits = devices.as_integers(plain).contiguous()
    flat = bits.as_strided((bits.numel(),), (1,))  # of one element the stride may be any
    return zlib.crc32(bytes(flat.view(torch.uint8).numpy()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and crc(a) == crc(b)


def test_every_dtype_of_a_checkpoint_is_one_of_torch() -> None:
    assert DTYPES == tilestone.dtype_names()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (), (0, 3), (2, 3, 2, 3, 2)])
def test_tensors_of_every_dtype_come_back_bit_for_bit(
    name: str, shape: tuple[int, ...], ckpt: str
) -> None:
    tensor = random_tensor(name, shape)
    tilestone.save({"x": tensor}, ckpt)
    wanted = torch.empty(shape, dtype=tensor.dtype)
    loaded = tilestone.load({"x": wanted}, ckpt)["x"]
    assert loaded is wanted
    assert same_bits(loaded, tensor)
    with tilestone.open(ckpt, framework="torch") as opened:
        assert same_bits(opened.read("x"), tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[:1].expand(5, 8),
        lambda t: t[3],
        lambda t: t.flatten()[5:].as_strided((3, 4), (1, 7)),
        lambda t: torch.complex(t, -t).conj(),
        lambda t: torch.complex(t, -t).conj().imag,
        lambda t: torch.nn.Parameter(t),
        lambda t: (t.clone().requires_grad_() * 2)[1:],
    ],
    ids=[
        "transposed", "steps", "expanded", "row", "as_strided", "conj", "neg", "parameter", "graph",
    ],
)  # fmt: skip
def test_views_are_saved_by_their_elements(view, ckpt: str) -> None:
    tensor = view(torch.arange(48, dtype=torch.float32).reshape(6, 8))
    tilestone.save({"x": tensor}, ckpt)
    with tilestone.open(ckpt, framework="torch") as opened:
        assert torch.equal(opened.read("x"), tensor.detach())


def test_views_and_parameters_are_filled_in_place(ckpt: str) -> None:
    tensor = torch.randn(4, 6)
    tilestone.save({"x": tensor}, ckpt)
    base = torch.zeros(12, 4)
    tilestone.load({"x": base[::2].t()}, ckpt)
    assert torch.equal(base[::2].t(), tensor) and not base[1::2].any()
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    assert tilestone.load({"x": parameter}, ckpt)["x"] is parameter
    assert torch.equal(parameter, tensor) and parameter.requires_grad


def test_tied_weights_load_and_values_that_differ_name_both_keys(ckpt: str) -> None:
    stored = torch.randn(4, 3)
    tilestone.save({"embedding": stored, "head": stored, "other": stored + 1}, ckpt)
    tied = torch.nn.Parameter(torch.zeros(4, 3))
    tilestone.load({"embedding": tied, "head": tied.data.view(4, 3)}, ckpt)
    assert torch.equal(tied, stored)
    with pytest.raises(tilestone.MismatchError, match=r'shares memory with "embedding".*key other'):
        tilestone.load({"embedding": tied, "other": tied}, ckpt)


def test_a_template_on_the_meta_device_is_allocated(ckpt: str) -> None:
    tensor = torch.randn(5, 3).bfloat16()
    tilestone.save({"x": tensor}, ckpt)
    loaded = tilestone.load({"x": torch.empty(5, 3, dtype=torch.bfloat16, device="meta")}, ckpt)
    assert loaded["x"].device.type == "cpu" and torch.equal(loaded["x"], tensor)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(3).to_sparse(), "dense"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dense"),
    ],
    ids=["sparse", "meta", "quantised"],
)
def test_tensors_without_plain_memory_are_refused_with_their_key(
    tensor: torch.Tensor, said: str, ckpt: str
) -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match=said) as raised:
        tilestone.save({"a": {"b": tensor}}, ckpt)
    assert raised.value.key == "a.b"


def test_an_expanded_tensor_can_not_be_loaded_into(ckpt: str) -> None:
    tilestone.save({"x": torch.ones(4, 3)}, ckpt)
    with pytest.raises(tilestone.InvalidArgumentError, match="expanded"):
        tilestone.load({"x": torch.zeros(1, 3).expand(4, 3)}, ckpt)


def test_flat_ranges_of_device_tensors_are_saved(ckpt: str) -> None:
    data = torch.arange(17, dtype=torch.int64)
    flat = tilestone.ShardedTensor.from_rank_offsets_flat(
        "w", forced_device.put(data), (4, 5), flattened_range=(2, 19)
    )
    rest = [
        tilestone.ShardedTensor.from_rank_offsets_flat("w", data, (4, 5), flattened_range=where)
        for data, where in ((torch.tensor([-1, -2]), (0, 2)), (torch.tensor([-3]), (19, 20)))
    ]
    tilestone.save({"a": flat, "b": rest[0], "c": rest[1]}, ckpt)
    with tilestone.open(ckpt) as opened:
        assert opened.read("w").reshape(-1).tolist() == [-1, -2, *range(17), -3]


def test_dtypes_tensors_and_objects_inside_leaves(ckpt: str) -> None:
    value = (torch.bfloat16, {"t": torch.arange(3), "n": numpy.arange(2)}, argparse.Namespace(a=1))
    state = {"x": value[:2], "y": [torch.float8_e4m3fn], "z": value[2]}
    tilestone.save(state, ckpt)
    template = {"x": (None, {"t": torch.zeros(1), "n": numpy.zeros(1)}), "y": None, "z": None}
    loaded = tilestone.load(template, ckpt, allow_classes=["argparse.Namespace"])
    dtype, inner = loaded["x"]
    assert dtype is torch.bfloat16 and loaded["y"] == [torch.float8_e4m3fn]
    assert isinstance(inner["t"], torch.Tensor) and inner["t"].tolist() == [0, 1, 2]
    assert isinstance(inner["n"], numpy.ndarray) and inner["n"].tolist() == [0, 1]
    assert loaded["z"] == value[2]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def test_stateful_objects_give_and_take_their_state(ckpt: str) -> None:
    torch.manual_seed(0)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    tilestone.save({"model": trained, "optimizer": optimizer, "step": 1}, ckpt)

    fresh = model()
    other = torch.optim.AdamW(fresh.parameters())
    fresh(torch.randn(8, 4)).sum().backward()
    other.step()
    loaded = tilestone.load({"model": fresh, "optimizer": other, "step": 0}, ckpt)
    assert loaded["model"] is fresh and loaded["optimizer"] is other and loaded["step"] == 1
    for key, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], tensor)
    for index, state in optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert torch.equal(other.state_dict()["state"][index][name], tensor)


def test_plain_tensors_are_described_without_python(
    monkeypatch: pytest.MonkeyPatch, ckpt: str
) -> None:
    state = {name: random_tensor(name, (4, 6)) for name in DTYPES if "complex" not in name}
    state = {name: tensor for name, tensor in state.items() if "float4" not in name}
    state["strided"] = torch.arange(24.0).reshape(4, 6).t()[::2]
    state["parameter"] = torch.nn.Parameter(torch.ones(3))
    state["graph"] = (torch.ones(3, requires_grad=True) * 2)[1:]
    state["empty"] = torch.empty(0, 3)
    state["scalar"] = torch.tensor(7)

    def refuse(*_: object) -> None:
        raise AssertionError("Python was asked for a plain tensor")

    monkeypatch.setattr(tensors, "view", refuse)
    monkeypatch.setattr(tensors._TensorConverter, "node", refuse)
    tilestone.save({"nested": [state]}, ckpt)
    wanted = {name: torch.zeros_like(tensor.detach()) for name, tensor in state.items()}
    loaded = tilestone.load({"nested": [wanted]}, ckpt)["nested"][0]
    for name, tensor in state.items():
        assert loaded[name] is wanted[name]
        assert same_bits(loaded[name], tensor), name


@pytest.mark.parametrize("first", [0, 4])
def test_a_tensor_whose_storage_was_taken_away_is_refused_with_its_key(
    first: int, ckpt: str
) -> None:
    tensor = torch.ones(8)[first:]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.save({"a": {"b": tensor}}, ckpt)
    assert raised.value.key == "a.b"
    saved = torch.ones(8 - first)
    tilestone.save({"a": {"b": saved}}, ckpt)
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.load({"a": {"b": tensor}}, ckpt)


def test_views_of_shrunken_storages_are_refused(ckpt: str) -> None:
    tensor = torch.ones(1024)
    tensor.untyped_storage().resize_(64)
    with pytest.raises(tilestone.InvalidArgumentError, match="allocation has 64 bytes"):
        tilestone.save({"x": tensor}, ckpt)


def peak_bytes(action: Callable[[], object]) -> int:
    """By how much the process grows meanwhile."""

    def status(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) << 10

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def test_a_lazily_conjugated_tensor_is_computed_block_by_block(ckpt: str) -> None:
    tensor = torch.full((1 << 25,), 1 + 2j, dtype=torch.complex64).conj()  # 256 MiB
    resources = tilestone.Resources(buffer_bytes=16 << 20)
    tilestone.save({"x": tensor[:1]}, f"{ckpt}-small")  # imports, threads
    save = lambda: tilestone.save({"x": tensor}, ckpt, resources=resources)  # noqa: E731
    assert peak_bytes(save) < tensor.nbytes / 2
    tensor.fill_(0)
    load = lambda: tilestone.load({"x": tensor}, ckpt, resources=resources)  # noqa: E731
    assert peak_bytes(load) < tensor.nbytes / 2
    assert bool((tensor == 1 - 2j).all())
