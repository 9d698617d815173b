"""Compares the boxes of placements with the local tensors of torch's own DTensor on each rank.

Only this process runs. With torch's "fake" process group it can be any rank of any world. DTensors
are cut from a tensor that every rank has (`src_data_rank=None`), so nothing is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
import random
from collections.abc import Iterator

import pytest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tilestone
from tilestone._calls.binding import Bridge
from tilestone._torch import tensors


@contextlib.contextmanager
def being_rank(rank: int, world: int) -> Iterator[None]:
    """Makes this process `rank` of a world in which no other rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ours(placement: object) -> object:
    """A torch placement as Tilestone's."""
    if isinstance(placement, _StridedShard):
        return tilestone.geometry.StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, Shard):
        return tilestone.geometry.Shard(placement.dim)
    assert isinstance(placement, Replicate)
    return tilestone.geometry.Replicate()


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with a different number in each element, which shows a local tensor's elements."""
    return torch.arange(math.prod(shape)).reshape(shape)


def assembled(whole: torch.Tensor, held: tilestone.geometry.LocalBoxes) -> torch.Tensor:
    """The local tensor that Tilestone's boxes describe."""
    local = torch.full(held.local_shape, -1, dtype=whole.dtype)
    for box, place in zip(held.boxes, held.locals, strict=True):
        local[place.slices] = whole[box.slices]
    return local


def split_by_torch(
    whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list
) -> torch.Tensor:
    """The local tensor of the rank at a coordinate, by torch's own splits for each mesh dim."""
    local = whole
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        pieces, _ = placement._split_tensor(local, size, with_padding=False)
        local = pieces[index]
    return local


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 2, 3, 4, 5, 7, 8, 12, 13)) for _ in range(rng.randint(0, 3)))


def random_placements(rng: random.Random, dims: int, rank: int) -> list:
    placements = []
    for _ in range(dims):
        kind = rng.choice(("replicate", "shard", "shard", "strided")) if rank else "replicate"
        if kind == "replicate":
            placements.append(Replicate())
        elif kind == "shard":
            placements.append(Shard(rng.randrange(rank)))
        else:
            placements.append(_StridedShard(rng.randrange(rank), split_factor=rng.randint(1, 6)))
    return placements


def check(
    whole: torch.Tensor,
    held: tilestone.geometry.LocalBoxes,
    local: torch.Tensor,
    described: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Checks that `held` describes the local tensor, and has the offset that torch computes."""
    assert tuple(held.local_shape) == tuple(local.shape) == tuple(described[0])
    assert torch.equal(assembled(whole, held), local)
    assert tuple(held.boxes[0].offset) == tuple(described[1])
    if len(held.boxes) == 1:
        assert tuple(held.boxes[0].shape) == tuple(local.shape)


@pytest.mark.parametrize("seed", range(10))
def test_boxes_equal_torchs_splits_on_every_rank_of_random_meshes(seed: int) -> None:
    rng = random.Random(seed)
    several = empty = 0
    for case in range(200):
        shape = random_shape(rng)
        mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        placements = random_placements(rng, len(mesh), len(shape))
        whole = numbered(shape)
        grid = tilestone.geometry.Mesh(mesh)
        for at in itertools.product(*map(range, mesh)):
            held = tilestone.geometry.local_boxes(shape, grid, at, [ours(p) for p in placements])
            try:
                check(
                    whole,
                    held,
                    split_by_torch(whole, mesh, at, placements),
                    _compute_local_shape_and_global_offset(shape, mesh, at, placements),
                )
            except AssertionError as error:
                case_text = f"{seed=} {case=} {shape=} {mesh=} {at=} {placements=}"
                raise AssertionError(case_text) from error
            several += len(held.boxes) > 1
            empty += 0 in held.local_shape
    assert several >= 10 and empty >= 10  # both kinds occur in the cases


@pytest.mark.parametrize("seed", range(50))
def test_boxes_equal_real_dtensors_over_meshes_of_any_rank_order(seed: int) -> None:
    rng = random.Random(seed)
    mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    world = math.prod(mesh)
    ranks = rng.sample(range(world), world)
    names = ["pp", "dp", "tp"][: len(mesh)]
    rank = rng.randrange(world)
    with being_rank(rank, world):
        theirs = DeviceMesh("cpu", torch.tensor(ranks).reshape(mesh), mesh_dim_names=tuple(names))
        grid = tilestone.geometry.Mesh(mesh, ranks, names)
        assert tuple(grid.coordinate(rank)) == tuple(theirs.get_coordinate())
        for _ in range(10):
            shape = random_shape(rng)
            placements = random_placements(rng, len(mesh), len(shape))
            whole = numbered(shape)
            local = distribute_tensor(whole, theirs, placements, src_data_rank=None).to_local()
            held = tilestone.geometry.local_boxes(
                shape, grid, grid.coordinate(rank), [ours(p) for p in placements]
            )
            described = compute_local_shape_and_global_offset(shape, theirs, placements)
            check(whole, held, local, described)


def check_real(whole: torch.Tensor, held: tilestone.geometry.LocalBoxes, weight: DTensor) -> None:
    """Checks that `held` describes an FSDP2 parameter. An empty one has lost its other dims."""
    local = weight.to_local().detach().long()
    if local.numel() == 0:
        assert 0 in held.local_shape
    else:
        assert torch.equal(assembled(whole, held), local)


def fsdp_over_tp(
    whole: torch.Tensor, names: tuple[str, ...], mesh: DeviceMesh, tp: object
) -> DTensor:
    """A tensor-parallel parameter after fully_shard over the mesh's other dims."""
    module = torch.nn.Module()
    sharded = distribute_tensor(whole.float(), mesh["tp"], [tp], src_data_rank=None)
    module.weight = torch.nn.Parameter(sharded)
    fully_shard(module, mesh=mesh[names[:-1]])
    return module.weight


@pytest.mark.parametrize("names", [("dp", "tp"), ("replicate", "dp", "tp")], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("seed", range(30))
def test_boxes_equal_what_fsdp2_over_tensor_parallelism_holds(
    seed: int, names: tuple[str, ...]
) -> None:
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1 if name == "replicate" else 2, 4) for name in names)
    world = math.prod(sizes)
    # Rows divide evenly. Otherwise torch's placements don't describe FSDP2's result; see below.
    shape = (rng.randint(1, 4) * world, rng.randint(1, 12))
    whole = numbered(shape)
    rank = rng.randrange(world)
    with being_rank(rank, world):
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(sizes), mesh_dim_names=names)
        for tp in (Shard(0), Shard(1), Replicate()):
            weight = fsdp_over_tp(whole, names, mesh, tp)
            if tp == Shard(0):
                assert any(isinstance(p, _StridedShard) for p in weight.placements)
            grid = tilestone.geometry.Mesh(sizes, list(range(world)), list(names))
            held = tilestone.geometry.local_boxes(
                shape, grid, grid.coordinate(rank), [ours(p) for p in weight.placements]
            )
            check_real(whole, held, weight)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_a_real_local_shape_equal_what_uneven_fsdp2_holds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = (rng.randint(2, 4), rng.randint(2, 4))
    world = math.prod(sizes)
    shape = (rng.randint(1, 26), 2)  # below the first size at which a local shape fits twice
    whole = numbered(shape)
    rank = rng.randrange(world)
    with being_rank(rank, world):
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(sizes), mesh_dim_names=("dp", "tp"))
        weight = fsdp_over_tp(whole, ("dp", "tp"), mesh, Shard(0))
        local_shape = tuple(weight.to_local().shape)
        placements = [ours(p) for p in weight.placements]
        grid = tilestone.geometry.Mesh(sizes)
        held = tilestone.geometry.held_boxes(shape, grid, grid.coordinate(rank), placements, local_shape)
        check_real(whole, held, weight)


def test_a_parameter_on_the_meta_device_comes_back_with_memory(tmp_path: pathlib.Path) -> None:
    with being_rank(0, 1):
        mesh = DeviceMesh("cpu", [0], mesh_dim_names=("edp",))
        checkpoint = tilestone.geometry.Mesh((1,), names=["ep"])
        weight = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
        given = tilestone.ShardedTensor.from_param(weight, checkpoint, Shard(0))
        tilestone.save({"w": given}, tmp_path / "ckpt", group=tilestone.solo())
        meta = torch.nn.Parameter(weight.to("meta"))
        wanted = tilestone.ShardedTensor.from_param(meta, checkpoint, Shard(0))
        loaded = tilestone.load({"w": wanted}, tmp_path / "ckpt", group=tilestone.solo())["w"]
        assert isinstance(loaded, torch.nn.Parameter) and isinstance(loaded.data, DTensor)
        assert torch.equal(loaded.to_local(), torch.ones(3, 2))


def described(tensor: DTensor, bridge: Bridge) -> tuple[object, ...]:
    """What a save or load knows of a DTensor, beside its elements."""
    entity = tensors.distributed_entity(tensor, "w", bridge)
    boxes = [(tuple(box.offset), tuple(box.shape)) for box in entity.boxes]
    place = entity.replica_id, list(entity.holders), entity.is_regular_grid
    return entity.key, tuple(entity.global_shape), boxes, *place


@pytest.mark.parametrize("seed", range(3))
def test_a_dtensor_is_described_as_if_it_were_alone_and_those_that_stand_alike_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    asked: list[object] = []
    sharding = tensors._sharding
    monkeypatch.setattr(tensors, "_sharding", lambda spec: asked.append(spec) or sharding(spec))
    with being_rank(rng.randrange(6), 6):
        meshes = [DeviceMesh("cpu", torch.arange(6).reshape(sizes)) for sizes in ((6,), (2, 3), (3, 2))]
        meshes.append(DeviceMesh("cpu", torch.tensor([[5, 1], [2, 0], [3, 4]])))
        many = []
        for _ in range(100):
            mesh = rng.choice(meshes)
            whole = numbered(rng.choice(((4, 6), (6, 4), (5, 7), (12,), (0, 3), (6, 4, 2))))
            placements = random_placements(rng, mesh.ndim, whole.ndim)
            whole = whole.to(rng.choice((torch.float32, torch.bfloat16)))
            many.append(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        bridge = Bridge(for_load=rng.random() < 0.5, ranks=6)
        together = [described(tensor, bridge) for tensor in many]
        few = len(asked)
        alone = [described(tensor, Bridge(for_load=bridge.for_load, ranks=6)) for tensor in many]
        assert together == alone
        assert few < len(asked) - few == len(many)


def test_a_single_strided_shard_is_several_boxes_unlike_in_torch() -> None:
    """Stock DCP would describe this rank's rows 0, 1, 4, 5 as rows 0 to 3."""
    held = tilestone.geometry.local_boxes((8, 2), tilestone.geometry.Mesh((2,)), (0,), [tilestone.geometry.StridedShard(0, 2)])
    assert [(tuple(b.offset), tuple(b.shape)) for b in held.boxes] == [
        ((0, 0), (2, 2)),
        ((4, 0), (2, 2)),
    ]
    described = _compute_local_shape_and_global_offset(
        (8, 2), (2,), (0,), [_StridedShard(0, split_factor=2)]
    )
    assert tuple(map(tuple, described)) == ((4, 2), (0, 0))
