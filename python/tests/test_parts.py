"""Objects that say themselves where they stand: torch's _Checkpointable methods on a DTensor, its
local tensor, a tensor or any other object; torch 2.14's attributes; and an order of shards."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from messages import mentions
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

import tilestone
import tilestone.megatron

WHOLE = torch.arange(24.0).reshape(8, 3)
Boxes = list[tuple[int, int]]  # rows [begin, end) of WHOLE


def chunk(rows: tuple[int, int]) -> ChunkStorageMetadata:
    begin, end = rows
    return ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([end - begin, 3]))


def item(name: str, rows: tuple[int, int], dtype: torch.dtype = torch.float32) -> WriteItem:
    held = chunk(rows)
    data = TensorWriteData(held, TensorProperties(dtype=dtype), torch.Size([8, 3]))
    return WriteItem(MetadataIndex(name, held.offsets), WriteItemType.SHARD, tensor_data=data)


class Protocol:
    """torch's methods over tensors of rows of WHOLE."""

    def __init__(self, boxes: Boxes, tensors: list[torch.Tensor]) -> None:
        self.boxes, self.tensors = boxes, tensors

    def __create_write_items__(self, name: str, of: Any) -> list[WriteItem]:
        return [item(name, box) for box in self.boxes]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begins = [begin for begin, _ in self.boxes]
        return self.tensors[begins.index(index.offset[0])]


class Subclass(torch.Tensor):
    """A tensor with the methods, over a local tensor with all rows of this rank."""

    described: Protocol

    @staticmethod
    def over(described: Protocol) -> Subclass:
        rows = torch.cat(described.tensors) if described.tensors else torch.empty(0, 3)
        made = torch.Tensor._make_subclass(Subclass, rows)
        parts = made.as_subclass(torch.Tensor).split([end - begin for begin, end in described.boxes])
        made.described = Protocol(described.boxes, list(parts))
        return made

    def __create_write_items__(self, name: str, of: Any) -> list[WriteItem]:
        return self.described.__create_write_items__(name, of)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.described.__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.described.__get_tensor_shard__(index)


def with_hooks(local: torch.Tensor, boxes: Boxes, tensors: list[torch.Tensor]) -> torch.Tensor:
    told = Protocol(boxes, tensors)
    local.__create_write_items__ = told.__create_write_items__
    local.__create_chunk_list__ = told.__create_chunk_list__
    if len(boxes) != 1:
        local.__get_tensor_shard__ = told.__get_tensor_shard__
    return local


def with_attributes(boxes: Boxes, tensors: list[torch.Tensor]) -> torch.Tensor:
    """A tensor with a row of padding before each of its parts."""
    padding = torch.full((1, 3), -1.0)
    made = torch.cat([padding, *(row for each in tensors for row in (each, padding))])
    starts, at = [], 1
    for each in tensors:
        starts.append((at, 0))
        at += each.shape[0] + 1
    made.global_shape = (8, 3)
    made.global_offsets = tuple((begin, 0) for begin, _ in boxes)
    made.local_offsets = tuple(starts)
    made.local_sizes = tuple((end - begin, 3) for begin, end in boxes)
    return made


def values_of(made: Any) -> torch.Tensor:
    """The rows of a state's object, one after the other."""
    if isinstance(made, Protocol):
        return torch.cat(made.tensors) if made.tensors else torch.empty(0, 3)
    if isinstance(made, Subclass):
        return values_of(made.described)
    if isinstance(made, DTensor):
        return made.to_local()
    spans = zip(made.local_offsets, made.local_sizes, strict=True)
    return torch.cat([made[:0], *(made[at : at + n] for (at, _), (n, _) in spans)])


KINDS = ["local", "dtensor", "object", "subclass", "attributes", "meta"]
# Rows of each of 4 ranks: the second mesh dim is the outer one; uneven; several and no chunks; and
# what ranks 0 and 1 hold is also on ranks 2 and 3.
PLACES: dict[str, list[Boxes]] = {
    "turned": [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]],
    "uneven": [[(0, 3)], [(7, 8)], [(3, 4)], [(4, 7)]],
    "several": [[(6, 8), (0, 1)], [], [(1, 2), (4, 6)], [(2, 4)]],
    "replicas": [[(0, 5)], [(5, 8)], [(0, 5)], [(5, 8)]],
}  # fmt: skip


def made_of(kind: str, boxes: Boxes, tensors: list[torch.Tensor], mesh: Any) -> Any:
    if kind == "object":
        return Protocol(boxes, tensors)
    if kind == "subclass":
        return Subclass.over(Protocol(boxes, tensors))
    if kind == "attributes":
        return with_attributes(boxes, tensors)
    rows = torch.cat(tensors) if tensors else torch.empty(0, 3)
    if kind == "meta":
        rows = rows.to("meta")
    parts = list(rows.split([end - begin for begin, end in boxes]))
    made = DTensor.from_local(
        rows, mesh, [Shard(0), Shard(0)], run_check=False, shape=WHOLE.shape, stride=(3, 1)
    )
    with_hooks(made if kind == "dtensor" else made._local_tensor, boxes, parts)
    return made


def round_trip(rank: int, world: int, kind: str, where: str, root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    boxes = PLACES[where][rank]
    full = made_of(kind, boxes, [WHOLE[slice(*b)].clone() for b in boxes], mesh)
    wrong = []

    def check(what: str, loaded: Any) -> None:
        if not torch.equal(loaded, WHOLE if "whole" in what else values_of(full)):
            wrong.append(f"{what}: {loaded.tolist()}")

    def saved(what: str, path: str) -> None:
        ours = tilestone.load({"w": torch.zeros(8, 3)}, path, timeout=60)["w"]
        check(what + ", whole", ours)
        check(what + " without a template, whole", tilestone.load(path)["w"])
        stock = {"w": torch.zeros(8, 3)}
        dcp.load(stock, checkpoint_id=path)
        check(what + " to stock, whole", stock["w"])

    if kind != "meta":
        tilestone.save({"w": full}, f"{root}/ours", timeout=60)
        saved("save", f"{root}/ours")
        stored = dcp.FileSystemReader(f"{root}/ours").read_metadata().state_dict_metadata["w"]
        assert sum(each.sizes.numel() for each in stored.chunks) == WHOLE.numel(), stored
    else:
        tilestone.save({"w": WHOLE.clone()}, f"{root}/ours", timeout=60)
    blank = made_of(kind, boxes, [torch.zeros(end - begin, 3) for begin, end in boxes], mesh)
    loaded = tilestone.load({"w": blank}, f"{root}/ours", timeout=60)["w"]
    if kind == "meta":
        assert isinstance(loaded, DTensor) and loaded is not blank
        full = made_of("local", boxes, [WHOLE[slice(*b)] for b in boxes], mesh)
        tilestone.save({"w": loaded}, f"{root}/again", timeout=60)  # the hooks are kept
        saved("again", f"{root}/again")
    else:
        assert loaded is blank
    check("load", values_of(loaded))
    if kind in ("local", "dtensor") and where in ("turned", "uneven"):
        dcp.save({"w": full}, checkpoint_id=f"{root}/stock")
        again = made_of(kind, boxes, [torch.zeros(end - begin, 3) for begin, end in boxes], mesh)
        tilestone.load({"w": again}, f"{root}/stock", timeout=60)
        check("load from stock", values_of(again))
    return wrong


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_stands_where_it_says(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, kind: str, where: str
) -> None:
    for wrong in worlds[4].run(round_trip, kind, where, str(tmp_path)):
        assert wrong == []


def with_order(
    local: torch.Tensor, mesh: Any, order: tuple[int, ...], shape: tuple[int, ...]
) -> DTensor:
    """A DTensor whose rows are divided by the mesh dims in this order."""
    stride = torch.empty(shape, device="meta").stride()
    placements = tuple(Shard(0) if d in order else Replicate() for d in range(mesh.ndim))
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    entries = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=entries)
    return DTensor(local, spec, requires_grad=False)


def by_order(rank: int, world: int, rows: int, root: str) -> list[str]:
    """Rows by mesh dim 1 first and mesh dim 0 second, over a mesh with a replicated dim."""
    mesh = init_device_mesh("cpu", (2, 2, 1))
    whole = torch.arange(float(rows))
    inner, outer, _ = mesh.get_coordinate()
    parts = whole.chunk(2)[outer].chunk(2) if outer < len(whole.chunk(2)) else ()
    mine = parts[inner].clone() if inner < len(parts) else torch.empty(0)
    wrong = []
    saved = with_order(mine, mesh, (1, 0), (rows,))
    files = tilestone.ByFiles(rank, world, "orders of a test")
    for number, options in enumerate(
        [{"checks": tilestone.Checks(access=True)}, {"by_files": files}]
    ):
        path = f"{root}/{number}"
        tilestone.save({"w": saved}, path, timeout=60, **options)
        loaded = tilestone.load({"w": torch.zeros(rows)}, path, timeout=60)["w"]
        if not torch.equal(loaded, whole):
            wrong.append(f"{options}: {loaded.tolist()}")
    for device in ("cpu", "meta"):
        blank = with_order(torch.zeros(len(mine), device=device), mesh, (1, 0), (rows,))
        loaded = tilestone.load({"w": blank}, f"{root}/0", timeout=60)["w"]
        if not torch.equal(loaded.to_local(), mine) or loaded._spec != saved._spec:
            wrong.append(f"{device}: {loaded}")
    usual = with_order(whole[2 * rank : 2 * rank + 2], mesh, (0, 1), (8,))
    if rows == 8:
        tilestone.save({"w": usual}, f"{root}/usual", timeout=60)
        if not torch.equal(tilestone.load(f"{root}/usual")["w"], whole):
            wrong.append("the usual order")
    broken = with_order(whole[:2].clone(), mesh, (1, 0), (8,))
    broken._spec.placements = (Shard(0), Replicate(), Replicate())
    try:
        tilestone.save({"w": broken}, f"{root}/broken", timeout=60)
        wrong.append("an order of other dims")
    except tilestone.InvalidArgumentError as error:
        if not mentions(str(error), "shard_order", "w"):
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_an_order_of_shards_is_followed(
    worlds: ranks.Worlds, tmp_path: pathlib.Path, rows: int
) -> None:
    for wrong in worlds[4].run(by_order, rows, str(tmp_path)):
        assert wrong == []


def other_ways(rank: int, world: int, root: str) -> list[str]:
    """The same objects by exchange, by files, in steps, with a session, and in Megatron's dialect."""
    box = [(0, 5), (5, 8)][rank]
    wrong = []

    def state(filled: bool = True) -> dict[str, Any]:
        rows = WHOLE[slice(*box)]
        made = {}
        for kind in ("object", "subclass", "attributes"):
            made[kind] = made_of(kind, [box], [rows.clone() if filled else 0 * rows], None)
        # Both ranks have this one; and one of them has nothing of the other.
        both = WHOLE.clone() if filled else 0 * WHOLE
        made["both"] = Protocol([(0, 8)], [both])
        made["one"] = Protocol([(0, 8)], [both.clone()]) if rank else Protocol([], [])
        return made

    def check(name: str, path: str, load: Any = tilestone.load) -> None:
        blank = state(filled=False)
        load(blank, path)
        whole = {key: torch.zeros(8, 3) for key in blank}
        whole = tilestone.load(whole, path, timeout=60)
        for key, made in state().items():
            if not torch.equal(values_of(blank[key]), values_of(made)):
                wrong.append(f"{name}: {key} in place")
            if not torch.equal(whole[key], WHOLE):
                wrong.append(f"{name}: {key} as a whole")

    tilestone.save(state(), f"{root}/exchange", timeout=60, checks=tilestone.Checks(access=True))
    check("exchange", f"{root}/exchange")
    by_files = tilestone.ByFiles(rank, 2, "parts of a test")
    tilestone.save(state(), f"{root}/files", timeout=60, by_files=by_files)
    check("files", f"{root}/files")
    tilestone.async_save(state(), f"{root}/background", timeout=60).result()
    check("in the background", f"{root}/background")
    with tilestone.Session() as session:
        for number in range(2):
            session.save(state(), f"{root}/session{number}", timeout=60)
            check("session", f"{root}/session{number}")
    tilestone.megatron.save(state() | {"n": 1}, f"{root}/megatron")
    check("megatron", f"{root}/megatron", tilestone.megatron.load)
    tree = {"in": {"list": [state()["object"], torch.ones(1)]}}
    tilestone.save(tree, f"{root}/tree", timeout=60)
    loaded = tilestone.load(f"{root}/tree")["in"]["list"]
    if not torch.equal(loaded[0], WHOLE) or not torch.equal(loaded[1], torch.ones(1)):
        wrong.append(f"in a list: {loaded}")
    return wrong


def test_objects_that_say_where_they_stand_are_saved_in_every_way(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for wrong in worlds[2].run(other_ways, str(tmp_path)):
        assert wrong == []


class Odd(Protocol):
    """Its methods contradict each other, or fail, as `fault` says."""

    def __init__(self, fault: str) -> None:
        super().__init__([(0, 8)], [WHOLE.clone()])
        self.fault = fault

    def __create_write_items__(self, name: str, of: Any) -> list[WriteItem]:
        if self.fault == "raises":
            raise RuntimeError("no place yet")
        if self.fault == "bytes":
            return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
        if self.fault == "other key":
            return [item(name + ".a", (0, 8))]
        if self.fault == "outside":
            return [item(name, (1, 9))]
        if self.fault == "dtype":
            return [item(name, (0, 8), torch.float64)]
        return [item(name, (0, 4) if self.fault == "not held" else (0, 8))]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk((1, 9) if self.fault == "outside" else (0, 8))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if self.fault == "size":
            return WHOLE[:7]
        return "a tensor" if self.fault == "no tensor" else WHOLE


@pytest.mark.parametrize(
    ("fault", "words"),
    {
        "raises": "no place yet", "bytes": "BYTE_IO", "other key": "m.w.a", "outside": "offset [1, 0]",
        "dtype": "float64", "not held": "(4, 3)", "size": "(7, 3)", "no tensor": "str",
    }.items(),
)  # fmt: skip
def test_what_is_no_part_of_a_tensor_is_refused_with_its_key(
    ckpt: str, fault: str, words: str
) -> None:
    for call in (tilestone.save, tilestone.megatron.save):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            call({"m": {"w": Odd(fault)}}, ckpt)
        assert mentions(str(raised.value), "m.w") and words in str(raised.value)
    assert not pathlib.Path(ckpt).exists() or not list(pathlib.Path(ckpt).rglob("*.distcp"))


def test_an_object_that_says_where_it_stands_is_never_pickled(ckpt: str) -> None:
    made = Protocol([(0, 8)], [WHOLE.clone()])
    hooked = with_hooks(WHOLE.clone(), [(0, 8)], [])
    for hidden in ((made,), {"x": (1, hooked)}, (with_attributes([(0, 8)], [WHOLE]),)):
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.save({"m": {"w": hidden}}, ckpt)
        assert mentions(str(raised.value), "m.w")


def test_an_entity_around_an_object_says_where_it_stands(ckpt: str) -> None:
    hooked = with_hooks(WHOLE[:4].clone(), [(4, 8)], [])
    described = Subclass.over(Protocol([(4, 8)], [WHOLE[4:].clone()]))
    box = [(0, 4), (0, 3)]
    mesh = tilestone.geometry.Mesh((1,), names=["dp"])
    state = {
        "a": tilestone.ShardedTensor.from_box("a", hooked, (4, 3), box),
        "b": tilestone.ShardedTensor.from_box("b", described, (4, 3), box),
    }
    tilestone.save(state, ckpt)
    loaded = tilestone.load(ckpt)
    assert torch.equal(loaded["a"], WHOLE[:4]) and torch.equal(loaded["b"], WHOLE[4:])
    full = with_hooks(WHOLE.clone(), [(0, 8)], [])
    kept = tilestone.ShardedTensor.from_param(full, mesh, tilestone.geometry.Replicate(), rank=0)
    tilestone.save({"w": kept}, ckpt, overwrite=True)
    assert torch.equal(tilestone.load(ckpt)["w"], WHOLE)
    with pytest.raises(tilestone.InvalidArgumentError, match="say where it stands"):
        tilestone.ShardedTensor.from_param(full, mesh, tilestone.geometry.Shard(0), rank=0)


def test_three_of_the_four_attributes_say_nothing(ckpt: str) -> None:
    made = torch.ones(3)
    made.global_shape, made.global_offsets, made.local_offsets = (6,), ((0,),), ((0,),)
    tilestone.save({"w": made}, ckpt)
    assert torch.equal(tilestone.load(ckpt)["w"], torch.ones(3))
    for name, value in {"local_sizes": ((4,),), "global_offsets": ((0,), (1,))}.items():
        setattr(made, name, value)
        with pytest.raises(tilestone.InvalidArgumentError) as raised:
            tilestone.save({"w": made}, ckpt, overwrite=True)
        assert mentions(str(raised.value), "w")


def in_lists(rank: int, world: int, root: str) -> list[str]:
    """An object of which rank 1 holds nothing: in a list, alone or beside others, and in a dict."""
    said = []
    for number, around in enumerate(([], [{"v": 1}], [[{"v": 1}]])):
        x = Protocol([(0, 8)], [WHOLE.clone()]) if rank == 0 else Protocol([], [])
        for call in (tilestone.save, tilestone.megatron.save):
            try:
                call({"l": [*around, x]}, f"{root}/{number}", timeout=60)
                said.append("saved")
            except tilestone.InvalidArgumentError as error:
                said.append(str(error))
    x = Protocol([(0, 8)], [WHOLE.clone()]) if rank == 0 else Protocol([], [])
    tilestone.save({"l": [{"x": x}, {"v": 1}]}, f"{root}/dict", timeout=60)
    loaded = tilestone.load(f"{root}/dict")["l"]
    if not torch.equal(loaded[0]["x"], WHOLE) or loaded[1] != {"v": 1}:
        said.append(f"in a dict: {loaded}")
    return said


def test_an_object_that_can_not_keep_its_place_in_a_list_is_refused(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for said in worlds[2].run(in_lists, str(tmp_path)):
        assert len(said) == 6 and all("list" in text and "key l." in text for text in said), said
    assert [path.name for path in tmp_path.iterdir()] == ["dict"]


def without_parts(rank: int, world: int, root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    said = []
    for name, by_files in (("group", None), ("files", tilestone.ByFiles(rank, 2, "without parts"))):
        made = DTensor.from_local(torch.empty(0, 3), mesh, [Shard(0)], run_check=False,
                                  shape=WHOLE.shape, stride=(3, 1))  # fmt: skip
        with_hooks(made._local_tensor, [], [])
        try:
            tilestone.save({"m": {"w": made}}, f"{root}/{name}", by_files=by_files, timeout=60)
            said.append("saved")
        except tilestone.CoverageError as error:
            said.append(str(error))
    return said


def test_a_tensor_of_which_no_rank_holds_a_part_is_missed(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    for said in worlds[2].run(without_parts, str(tmp_path)):
        assert len(said) == 2 and all(mentions(text, "m.w") for text in said), said
