"""load(cast=True) gives the same elements as torch's own conversion."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import tilestone

FP8 = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"]


def _patterns(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a type of 8 or 16 bits."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def _floats() -> torch.Tensor:
    """Random bit patterns of float32, and values near the limits of 8-bit types."""
    torch.manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    near = torch.randn(200_000) * torch.exp2(torch.randint(-20, 20, (200_000,)).float())
    limits = [0.0, 240, 248, 448, 464, 480, 57344, 61440, 65504, 65520, 2.0**-127, 1.5 * 2.0**-127]
    steps = [numpy.nextafter(numpy.float32(x), numpy.float32(y)) for x in limits for y in (0, 1e9)]
    edges = torch.tensor([*limits, *steps, float("inf"), float("nan"), 3e38])
    return torch.cat([bits.view(torch.float32), near, edges, -edges])


def _sources() -> dict[str, torch.Tensor]:
    sources = {str(t): _patterns(t) for t in (torch.bfloat16, torch.float16, torch.int16)}
    sources |= {name: _patterns(getattr(torch, f"float8_{name}")) for name in FP8}
    return sources | {"float32": _floats(), "int64": torch.arange(-70_000, 70_000)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cast") / "c"
    tilestone.save(_sources(), path)
    return path


@pytest.mark.parametrize("name", FP8)
def test_conversions_to_eight_bits_equal_torchs_bit_for_bit(name: str, stored: Any) -> None:
    dtype = getattr(torch, f"float8_{name}")
    sources = _sources()
    got = tilestone.load(
        {key: torch.zeros(value.shape, dtype=dtype) for key, value in sources.items()},
        stored,
        cast=True,
    )
    for key, source in sources.items():
        want = source.to(dtype).view(torch.uint8)
        wrong = got[key].view(torch.uint8) != want
        if name == "e5m2" and key in ("torch.bfloat16", "torch.float16", "e4m3fn"):
            wrong &= ~source.float().isnan()  # torch's conversion of NaN depends on the CPU
        assert not wrong.any(), (key, source.float()[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "bool"])
def test_conversions_to_other_types_equal_torchs_except_nan_bits(name: str, stored: Any) -> None:
    dtype = getattr(torch, name)
    sources = _sources()
    got = tilestone.load(
        {key: torch.zeros(value.shape, dtype=dtype) for key, value in sources.items()},
        stored,
        cast=True,
    )
    for key, source in sources.items():
        assert torch.equal(got[key].double().nan_to_num(7.5), source.to(dtype).double().nan_to_num(7.5)), key


@pytest.mark.parametrize(("have", "want"), [("complex64", "float32"), ("complex128", "int64")])
def test_a_cast_without_conversion_names_the_key_and_fills_nothing(
    have: str, want: str, ckpt: str
) -> None:
    tilestone.save({"a": torch.ones(3), "m": {"z": torch.ones(3, dtype=getattr(torch, have))}}, ckpt)
    first, second = torch.zeros(3), torch.zeros(3, dtype=getattr(torch, want))
    with pytest.raises(tilestone.UnsupportedError, match="no conversion") as raised:
        tilestone.load({"a": first, "m": {"z": second}}, ckpt, cast=True)
    assert raised.value.key == "m.z"
    assert not first.any() and not second.any()
    with pytest.raises(tilestone.MismatchError) as raised_too:
        tilestone.load({"m": {"z": second}}, ckpt)
    assert "cast" not in raised_too.value.hint
