"""FSDP2 over TP on a 2 x 2 mesh, with AdamW, saved and loaded on 2 x 2, 3 and 1 ranks."""

from __future__ import annotations

import pathlib

import ranks
import torch
import torch.distributed.checkpoint as dcp
from test_torch_tensors import crc
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import tilestone


class Block(torch.nn.Module):
    """Two linear layers, whose sizes are not divisible by all numbers of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 3 * width)
        self.down = torch.nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def parallel_model(shape: tuple[int, ...], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Block(10), Block(10))
    if len(shape) == 2:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
        data = mesh["dp"]
    else:
        data = init_device_mesh("cpu", shape, mesh_dim_names=("dp",))
    for block in model:
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def trained(shape: tuple[int, ...], seed: int, steps: int):
    model = parallel_model(shape, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model, optimizer) -> dict:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def checksums(tree: object, path: str = "") -> dict[str, int]:
    """The CRC-32 of each whole tensor by path."""
    if isinstance(tree, DTensor):
        return {path: crc(tree.full_tensor())}
    if isinstance(tree, torch.Tensor):
        return {path: crc(tree)}
    out = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        out.update(checksums(value, f"{path}.{key}"))
    return out


def save(rank: int, world: int, shape: tuple[int, ...], side: str, path: str) -> dict[str, int]:
    state = state_of(*trained(shape, seed=1, steps=2))
    strided = [
        value
        for value in state["model"].values()
        if any(isinstance(placement, _StridedShard) for placement in value.placements)
    ]
    assert bool(strided) == (len(shape) == 2)
    if side == "stock":
        dcp.save(state, checkpoint_id=path)
    else:
        tilestone.save(state, path)
    return checksums(state)


def load(rank: int, world: int, shape: tuple[int, ...], side: str, path: str) -> dict[str, int]:
    model, optimizer = trained(shape, seed=2, steps=1)
    state = state_of(model, optimizer)
    if side == "stock":
        dcp.load(state, checkpoint_id=path)
    else:
        state = tilestone.load(state, path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert checksums(state_of(model, optimizer)) == checksums(state)
    return checksums(state)


SHAPES: list[tuple[int, ...]] = [(2, 2), (3,), (1,)]


def go_round(worlds: ranks.Worlds, path: str, writer: str, reader: str) -> None:
    results = worlds[4].run(save, (2, 2), writer, path)
    saved = results[0]
    assert len(saved) == 12 + 12 * 3
    for shape in SHAPES:
        size = 4 if shape == (2, 2) else shape[0]
        for loaded in worlds[size].run(load, shape, reader, path):
            assert loaded == saved


def test_a_model_and_its_optimizer_move_to_other_meshes(worlds: ranks.Worlds, ckpt: str) -> None:
    go_round(worlds, ckpt, "tilestone", "tilestone")


def test_stock_loads_the_model_on_every_mesh(worlds: ranks.Worlds, ckpt: str) -> None:
    go_round(worlds, ckpt, "tilestone", "stock")


def test_a_stock_checkpoint_of_the_model_is_loaded_on_every_mesh(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    go_round(worlds, ckpt, "stock", "tilestone")
    assert pathlib.Path(ckpt, ".metadata").exists()
