"""Random trees of containers, Stateful objects, arrays and values come back as they were saved."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tilestone

TREES = 250  # per test


class Items(list):
    """A subclass of list."""


class Keeper:
    """A Stateful around any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


MAPPINGS = [
    dict,
    collections.OrderedDict,
    collections.UserDict,
    types.MappingProxyType,
    lambda items: collections.defaultdict(list, items),
]
LEAVES = [
    lambda r: r.randrange(-9, 2**70),
    lambda r: r.random(),
    lambda r: "text",
    lambda r: None,
    lambda r: b"\x00",
    lambda r: (1, ("x", [torch.arange(r.randrange(3))])),
    lambda r: [],
    lambda r: [1, ["two", ()]],
    lambda r: {1, 2},
    lambda r: collections.deque([1, "x"], 3),
    lambda r: numpy.float32(r.random()),
]


def array(r: random.Random, with_numpy: bool) -> Any:
    shape = tuple(r.randrange(4) for _ in range(r.randrange(3)))
    values = numpy.random.default_rng(r.randrange(2**32)).integers(0, 100, shape)
    values = values.astype(r.choice(["f4", "f8", "i8", "u1", "c8"]))
    if with_numpy and r.random() < 0.3:
        return values.astype(values.dtype.newbyteorder(">")) if r.random() < 0.3 else values
    tensor = torch.from_numpy(values)
    kind = r.randrange(4)
    if kind == 0 and tensor.ndim == 2:
        return tensor.t()
    if kind == 1 and tensor.is_complex() and with_numpy:
        return tensor.conj()
    return torch.nn.Parameter(tensor) if kind == 2 and tensor.is_floating_point() else tensor


def tree(r: random.Random, depth: int, ours: bool) -> Any:
    """A random node. With `ours`, also nodes that stock does not flatten or stores differently."""
    kind = r.random() if depth > 0 else 1.0
    if kind < 0.4:
        keys = r.sample(["a", "b", "c", 1, 7] if ours else ["a", "b", "c"], r.randrange(4))
        return r.choice(MAPPINGS)({key: tree(r, depth - 1, ours) for key in keys})
    if kind < 0.55:
        items = [tree(r, depth - 1, ours) for _ in range(r.randrange(3))]
        # Stock flattens a list with a tensor in it, and so does any template.
        return r.choice([list, Items])([torch.ones(1), *items])
    if kind < 0.65 and ours:
        return Keeper({"in": tree(r, depth - 1, ours)})
    if kind < 0.85:
        return array(r, ours)
    return r.choice(LEAVES)(r)


def top(r: random.Random, ours: bool) -> dict[str, Any]:
    return {key: tree(r, 4, ours) for key in "xyz"}


def blank(item: Any) -> Any:
    """A template of the same structure."""
    if isinstance(item, Keeper):
        inner = blank(item.state)
        return Keeper(inner)
    if isinstance(item, torch.Tensor):
        return torch.zeros_like(item.detach())
    if isinstance(item, numpy.ndarray):
        return numpy.zeros(item.shape, item.dtype)
    if isinstance(item, collections.defaultdict):
        return collections.defaultdict(list, {k: blank(v) for k, v in item.items()})
    if isinstance(item, Mapping):
        return type(item)({key: blank(value) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, list) and any(isinstance(value, torch.Tensor) for value in item):
        return type(item)(blank(value) for value in item)
    return None


def check(got: Any, want: Any, path: str, seed: int) -> None:
    where = f"tree {seed}, {path}"
    if isinstance(want, Keeper):
        assert isinstance(got, Keeper), where
        return check(got.state, want.state, path, seed)
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want) and got.dtype == want.dtype, where
        return None
    assert type(got) is type(want), where
    if isinstance(want, numpy.ndarray):
        assert got.dtype == want.dtype and numpy.array_equal(got, want), where
    elif isinstance(want, Mapping):
        assert list(got) == list(want), where
        for key in want:
            check(got[key], want[key], f"{path}.{key}", seed)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            check(a, b, f"{path}.{i}", seed)
    else:
        assert got == want, where
    return None


def test_a_load_returns_everything_that_a_save_accepts(ckpt: str) -> None:
    for seed in range(TREES):
        state = top(random.Random(seed), True)
        tilestone.save(state, ckpt, overwrite=True)
        wanted = blank(state)
        loaded = tilestone.load(wanted, ckpt)
        check(loaded, state, "", seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_stock_and_tilestone_have_the_same_keys_and_content(writer: str, ckpt: str) -> None:
    for seed in range(TREES):
        state = top(random.Random(1000 + seed), False)
        folder = f"{ckpt}-{seed}"
        if writer == "stock":
            dcp.save(state, checkpoint_id=folder, no_dist=True)
            check(tilestone.load(blank(state), folder), state, "", seed)
            continue
        tilestone.save(state, folder)
        flat, _ = dcp._nested_dict.flatten_state_dict(state)  # type: ignore[attr-defined]
        assert set(tilestone.open(folder).keys()) == set(flat), seed
        wanted, _ = dcp._nested_dict.flatten_state_dict(blank(state))  # type: ignore[attr-defined]
        if set(wanted) == set(flat):
            dcp.load(wanted, checkpoint_id=folder, no_dist=True)
            for key, value in flat.items():
                check(wanted[key], value, key, seed)
