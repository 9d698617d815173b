"""An error on one rank is raised on all ranks."""

from __future__ import annotations

import logging
import os
import pathlib
import time
from typing import Any

import numpy
import pytest
import ranks
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import tilestone

FAILING = 1


def entity(rank: int, world: int, **options) -> tilestone.ShardedTensor:
    return tilestone.ShardedTensor.from_rank_offsets(
        "w", torch.ones(2, 3), (0, rank, world), **options
    )


def save_other_dtype(rank: int, world: int, path: str) -> None:
    dtype = torch.float64 if rank == FAILING else torch.float32
    data = torch.ones(2, 3, dtype=dtype)
    tensor = tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))
    tilestone.save({"w": tensor}, path, timeout=60)


def save_other_shape(rank: int, world: int, path: str) -> None:
    fragments = world + 1 if rank == FAILING else world
    tensor = tilestone.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, fragments))
    tilestone.save({"w": tensor}, path, timeout=60)


def save_with_a_hole(rank: int, world: int, path: str) -> None:
    tilestone.save({} if rank == FAILING else {"w": entity(rank, world)}, path, timeout=60)


def save_overlapping(rank: int, world: int, path: str) -> None:
    low = 2 * rank - (1 if rank == FAILING else 0)
    tensor = tilestone.ShardedTensor.from_box("w", torch.ones(2), (2 * world,), ((low, low + 2),))
    tilestone.save({"w": tensor}, path, timeout=60)


def save_partial(rank: int, world: int, path: str) -> None:
    mesh = DeviceMesh("cpu", list(range(world)))
    placement = Partial() if rank == FAILING else Shard(0)
    tensor = DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False)
    tilestone.save({"layer": {"w": tensor}}, path, timeout=60)


def save_raising(rank: int, world: int, path: str) -> None:
    def build(key, data, replica_id, flattened_range):
        if rank == FAILING:
            raise RuntimeError("boom")
        return entity(rank, world)

    factory = tilestone.ShardedTensorFactory("f", torch.ones(2, 3), build, lambda tree: tree)
    tilestone.save({"w": factory}, path, timeout=60)


def save_raising_stateful(rank: int, world: int, path: str) -> None:
    class Module:
        def state_dict(self):
            if rank == FAILING:
                raise RuntimeError("boom")
            return {"w": entity(rank, world)}

        def load_state_dict(self, state):
            pass

    tilestone.save({"module": Module()}, path, timeout=60)


FAILURES = [
    (save_other_dtype, "MismatchError", "w", ["float64", "float32", "rank"]),
    (save_other_shape, "MismatchError", "w", ["[8]", "[6]", "rank"]),
    (save_with_a_hole, "CoverageError", "w", ["[2:4, 0:3]"]),
    (save_overlapping, "CoverageError", "w", ["[0:2]", "[1:3]", "rank"]),
    (save_partial, "InvalidArgumentError", "layer.w", ["Partial"]),
    (save_raising, "InterruptedError", "f", ["RuntimeError: boom", "rank 1"]),
    (save_raising_stateful, "InterruptedError", "", ["RuntimeError: boom", "rank 1"]),
]


@pytest.mark.parametrize(
    ("function", "kind", "key", "said"), FAILURES, ids=[case[0].__name__ for case in FAILURES]
)
def test_every_rank_raises_the_same_error(
    function, kind: str, key: str, said: list[str], worlds: ranks.Worlds, ckpt: str
) -> None:
    results = worlds[3].collect(function, ckpt)
    if kind == "InterruptedError":  # the rank whose own code raised gets the original error
        own = results.pop(FAILING)
        assert isinstance(own, ranks.Raised) and (own.kind, own.text) == ("RuntimeError", "boom")
    for result in results:
        assert isinstance(result, ranks.Raised), "a rank did not raise"
        assert result.kind == kind, result.text
        assert result.text == results[0].text
        for word in said:
            assert word in result.text
        if key:
            assert result.attributes["key"] == key
    assert not pathlib.Path(ckpt, ".metadata").exists()
    worlds[3].run(save_well, ckpt)


OTHER_STATES = {
    "an array more": {"t": torch.ones(3), "u": torch.ones(3)},
    "eight arrays more": {"t": torch.ones(3), **{f"u{i}": torch.ones(3) for i in range(8)}},
    "another array": {"u": torch.ones(3)},
    "another shape": {"t": torch.ones(4)},
    "another dtype": {"t": torch.ones(3, dtype=torch.float64)},
    "an object more": {"t": torch.ones(3), "o": {"a": 1}},
}


def save_as_only_rank_2_has_it(rank: int, world: int, other: str, path: str) -> None:
    state = OTHER_STATES[other] if rank == 2 else {"t": torch.ones(3)}
    by_files = tilestone.ByFiles(rank, world, "the token")
    tilestone.save(state, path, by_files=by_files, timeout=20)


@pytest.mark.parametrize("other", OTHER_STATES)
def test_what_only_one_rank_has_is_refused_also_by_files(
    worlds: ranks.Worlds, ckpt: str, other: str
) -> None:
    for found in worlds[4].collect(save_as_only_rank_2_has_it, other, ckpt):
        assert found.kind in ("MismatchError", "CoverageError"), found
        assert found.kind == "CoverageError" or found.attributes["rank"] == 2, found
    with pytest.raises(tilestone.NotFoundError):
        tilestone.open(ckpt)


def save_well(rank: int, world: int, path: str) -> None:
    tilestone.save({"w": entity(rank, world), "step": 1}, path, overwrite=True, timeout=60)


def save_values_of_its_own(rank: int, world: int, path: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tilestone").addHandler(handler)
    state = {"w": entity(rank, world), "same": {"step": 1}, "seed": 7 + rank // 2}
    try:
        tilestone.save(state, path, timeout=60)
    finally:
        logging.getLogger("tilestone").removeHandler(handler)
    return said


def test_values_that_differ_between_ranks_are_logged_by_the_coordinator_with_key_and_ranks(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    said, *others = worlds[3].run(save_values_of_its_own, ckpt)
    (line,) = [text for text in said if "not the same on all ranks" in text]
    assert '"seed" (ranks 0 and 2 differ)' in line and "same/step" not in line
    assert others == [[], []]
    assert tilestone.open(ckpt).object("seed") == 7


def save_a_loader_of_its_own(rank: int, world: int, path: str) -> dict[str, Any]:
    loader = {"n": 100 + rank, "rng": torch.full((16,), rank), "order": numpy.full(3, rank)}
    error = tilestone.Checks(common_differs="error")
    tilestone.save({"loader": loader}, path, timeout=60)  # type: ignore[arg-type]
    try:
        tilestone.save({"rng": loader["rng"]}, path + "-e", checks=error, timeout=60)
    except tilestone.MismatchError as error:
        assert error.key == "rng"
    else:
        raise AssertionError("nothing was raised")
    return tilestone.load(path, timeout=60)["loader"]


def test_a_dict_that_differs_between_ranks_comes_from_one_of_them(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    for loader in worlds[3].run(save_a_loader_of_its_own, ckpt):
        assert loader["n"] == 100 and loader["rng"].sum() == 0 and loader["order"].sum() == 0


def save_experts(rank: int, world: int, path: str) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("edp", "ep"))["edp"]
    local = torch.full((2, 8), float(rank % 2))
    expert = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    tilestone.save({"experts": expert}, path, timeout=60)


def test_dtensors_of_one_key_on_disjoint_meshes_are_refused_with_their_key(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    for found in worlds[4].collect(save_experts, ckpt):
        assert found.kind == "MismatchError" and found.attributes["key"] == "experts", found
        assert "from_param" in found.text and "docs/placements.md" in found.text
    assert not os.path.exists(ckpt)


def load_missing(rank: int, world: int, path: str) -> None:
    wanted = {"w": entity(rank, world)}
    if rank == FAILING:
        wanted["nothing"] = torch.zeros(2)
    tilestone.load(wanted, path, timeout=60)


def load_other_dtype(rank: int, world: int, path: str) -> None:
    data = torch.ones(2, 3, dtype=torch.int32 if rank == FAILING else torch.float32)
    tensor = tilestone.ShardedTensor.from_rank_offsets("w", data, (0, rank, world))
    tilestone.load({"w": tensor}, path, timeout=60)


@pytest.mark.parametrize(
    ("function", "kind", "key"),
    [(load_missing, "NotFoundError", "nothing"), (load_other_dtype, "MismatchError", "w")],
    ids=["missing", "dtype"],
)
def test_every_rank_raises_the_error_of_a_load(
    function, kind: str, key: str, worlds: ranks.Worlds, ckpt: str
) -> None:
    worlds[3].run(save_well, ckpt)
    results = worlds[3].collect(function, ckpt)
    for result in results:
        assert isinstance(result, ranks.Raised), "a rank did not raise"
        assert (result.kind, result.attributes["key"]) == (kind, key), result.text
        assert result.attributes["rank"] == FAILING


def test_an_existing_checkpoint_is_not_touched_by_a_refused_save(
    worlds: ranks.Worlds, ckpt: str
) -> None:
    worlds[3].run(save_well, ckpt)
    for result in worlds[3].collect(save_again, ckpt):
        assert result.kind == "AlreadyExistsError"
        assert "FileExistsError" in result.bases
    for function in (save_raising, save_other_dtype):
        worlds[3].collect(function, ckpt)
        with tilestone.open(ckpt) as opened:
            assert opened["step"] == 1 and opened.verify().ok


def save_again(rank: int, world: int, path: str) -> None:
    tilestone.save({"w": entity(rank, world), "step": 2}, path, timeout=60)


def test_a_location_that_is_not_writable_is_an_error_on_every_rank(
    worlds: ranks.Worlds, tmp_path: pathlib.Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    for result in worlds[3].collect(save_again, str(blocker / "ckpt")):
        assert result.kind == "StorageError", result.text
        assert "OSError" in result.bases and result.attributes["errno"] == 20


def save_dying(rank: int, world: int, path: str) -> float:
    def build(key, data, replica_id, flattened_range):
        if rank == FAILING:
            os._exit(1)
        return entity(rank, world)

    factory = tilestone.ShardedTensorFactory("f", torch.ones(2, 3), build, lambda tree: tree)
    started = time.monotonic()
    try:
        tilestone.save({"w": factory}, path, timeout=20)
    except (tilestone.RankFailedError, tilestone.TimeoutError):
        return time.monotonic() - started
    raise AssertionError("a save without one of its ranks succeeded")


def test_ranks_that_wait_for_a_dead_one_raise_before_their_deadline(ckpt: str) -> None:
    world = ranks.World(3)
    try:
        results = world.collect(save_dying, ckpt)
    finally:
        world.close()
    assert results[FAILING] == "lost"
    for rank in (0, 2):
        assert isinstance(results[rank], float), results[rank]
        assert results[rank] < 40
    assert not pathlib.Path(ckpt, ".metadata").exists()
