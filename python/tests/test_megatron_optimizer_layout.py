"""Layouts of flat buffers, and the boxes of parameters in them: only arithmetic, no checkpoints."""

from __future__ import annotations

import pathlib
import random
from dataclasses import replace
from typing import Any

import optimizer_model as om
import pytest
import torch
from optimizer_model import Model, Ranks, layout_of

import tilestone
from tilestone import megatron
from tilestone.megatron import ShardedTensor, ShardedTensorFactory
from tilestone.megatron.distributed_optimizer import (
    Bucket,
    Buffer,
    Layout,
    OptimizerShard,
    Parameter,
    Piece,
    load_optimizer,
    optimizer_state,
    pieces_of,
)


def _random_piece(rng: random.Random) -> Piece:
    """A box with random axes in random order, and with gaps in memory."""
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
    strides, step = [0] * len(shape), rng.randint(1, 2)
    for axis in rng.sample(range(len(shape)), len(shape)):
        strides[axis] = step
        step *= shape[axis]
        step += rng.choice((0, 0, 3))
    offset = tuple(rng.randint(0, 3) for _ in shape)
    whole = tuple(a + b + rng.randint(0, 2) for a, b in zip(offset, shape, strict=True))
    return Piece("w", whole, offset, shape, tuple(strides), rng.randint(0, 5))


def test_random_ranges_of_strided_boxes_are_the_boxes_that_hold_each_element_once() -> None:
    rng = random.Random(1)
    for _ in range(1500):
        piece = _random_piece(rng)
        numbers = torch.arange(piece.start + piece.span)
        box = torch.full(piece.global_shape, -1)
        inside = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))
        box[inside] = piece.of(numbers)  # the memory offset of each element of the global tensor
        begin = rng.randint(0, len(numbers))
        end = rng.randint(begin, len(numbers) + 2)
        parts = list(piece.within(begin, end))
        found = [number for part in parts for number in part.of(numbers).flatten().tolist()]
        expected = [number for number in box.flatten().tolist() if begin <= number < end]
        assert sorted(found) == sorted(expected), (piece, begin, end)
        assert len(parts) <= max(1, 2 * len(piece.shape) - 1), (piece, begin, end)
        for part in parts:
            where = tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape, strict=True))
            assert torch.equal(box[where], part.of(numbers)), (piece, part)
            assert not part.is_contiguous or part.span == part.numel


# ---- What factories build ----


def _factory(build: Any, shape: tuple[int, ...] = (4, 6)) -> ShardedTensorFactory:
    def build_fn(key: str, t: torch.Tensor, replica_id: Any, flat: Any) -> Any:
        parts = build(t)
        return {
            str(i): ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica_id)
            for i, part in enumerate(parts)
        }

    return ShardedTensorFactory("f", torch.empty(shape), build_fn, torch.cat, (0, 0, 3))


BUILDS = {
    "chunks of rows": lambda t: t.chunk(2, 0),
    "chunks of columns": lambda t: t.chunk(3, 1),
    "transposed": lambda t: [t.t()],
    "transposed copies": lambda t: [each.t().contiguous() for each in t.chunk(2, 1)],
    "interleaved rows": lambda t: [t[0::2], t[1::2]],
    "concatenated": lambda t: [torch.cat([t[2:], t[:2]])],
    "another order": lambda t: [t.flatten()[torch.tensor([5, 1, 3, 0, 2, 4])].reshape(3, 2)],
    "nothing": lambda t: [t, t[:0]],
}


@pytest.mark.parametrize("name", BUILDS)
def test_the_result_of_a_factory_is_found_without_its_data(name: str) -> None:
    build: Any = BUILDS[name]
    shape = (2, 3) if name == "another order" else (4, 6)
    pieces = pieces_of(_factory(build, shape))
    numbers = torch.arange(torch.Size(shape).numel())
    wholes = [torch.full(part.shape, -1) for part in build(numbers.reshape(shape))]
    for piece in pieces:
        where = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))
        wholes[int(piece.key[2:])][where] = piece.of(numbers)
        assert piece.replica_id == (0, 0, 3)
    for found, expected in zip(wholes, build(numbers.reshape(shape)), strict=True):
        assert torch.equal(found, expected)


def test_factories_that_lose_duplicate_or_scatter_elements_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for build, text in (
        (lambda t: [t[1:]], "each of the tensor's 24 elements exactly"),
        (lambda t: [t[:2], t[1:3]], "each of the tensor's 24 elements exactly"),
        (lambda t: [t[:1].expand(4, 6)], "interleaves"),
        (lambda t: [torch.nn.functional.pad(t, (0, 1))], "24 elements exactly"),
    ):
        with pytest.raises(tilestone.CheckpointError, match=text) as raised:
            pieces_of(_factory(build))
        assert raised.value.key.startswith("f")
    from tilestone.megatron.distributed_optimizer import pieces

    monkeypatch.setattr(pieces, "MAX_RUNS", 4)
    with pytest.raises(tilestone.InvalidArgumentError, match=r"elements, in \d+ runs"):
        pieces_of(_factory(BUILDS["another order"], (2, 3)))
    half = slice(0, 2)
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.ones(2), (4,), flattened_range=half)
    objects = ShardedTensorFactory(
        "f", torch.ones(2), lambda *_: [megatron.ShardedObject("o", 1, (1,), (0,))], torch.cat
    )
    for entity, text in (
        (flat, "not by a flattened range"),
        (objects, "builds a ShardedObject"),
        (_factory(BUILDS["transposed"]).without_data(), "without data"),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match=text):
            Parameter.of(entity, 0)  # type: ignore[arg-type]


# ---- Layouts ----


def test_every_element_of_every_parameter_is_one_ranks() -> None:
    for job in (Ranks(2, 1, 1), Ranks(1, 2, 3), Ranks(4, 1, 7)):
        for group, tp, pp in job.groups():
            layout = layout_of(Model(megatron, job, tp, pp), group, job.dp)
            held: dict[Any, list[tuple[int, int]]] = {}
            for rank in range(job.dp):
                for part in layout.slices(rank, job.dp):
                    held.setdefault(part.place, []).append((part.begin, part.end))
            count = 0
            for (i, j), bucket in layout.buckets():
                for k, parameter in enumerate(bucket.parameters):
                    ends = [0, *(end for _, end in held[i, j, k])]
                    assert [begin for begin, _ in held[i, j, k]] == ends[:-1]
                    assert ends[-1] == parameter.numel
                    count += 1
            assert count == len(held)


def test_padding_of_one_piece_does_not_hide_that_another_one_is_missing(
    tmp_path: pathlib.Path,
) -> None:
    def shard(*pieces: Piece) -> OptimizerShard:
        parameter = Parameter("w", sum(piece.numel for piece in pieces), 0, pieces)
        bucket = Bucket((parameter,), parameter.numel, parameter.numel)
        layout = Layout((Buffer((torch.float32, torch.float32), (bucket,)),))
        return OptimizerShard.allocated(layout, 0, 1, common=om.common())

    padded = Piece("a", (8,), (0,), (8,), (1,), 0, allow_shape_mismatch=True)
    plain = Piece("b", (4,), (0,), (4,), (1,), 8)
    shorter = Piece("a", (6,), (0,), (6,), (1,), 0, allow_shape_mismatch=True)

    def loaded(*pieces: Piece) -> list[float]:
        saved, wanted = shard(*pieces), shard(padded, plain)
        for memory in saved.states[0, 0, 0].values():
            memory.copy_(torch.arange(1, len(memory) + 1))
        megatron.save({"optimizer": optimizer_state([saved], "dp_reshardable")}, tmp_path)
        load_optimizer(tmp_path, [wanted])
        return wanted.states[0, 0, 0]["param"].tolist()

    assert loaded(shorter, replace(plain, start=6)) == [1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10]
    with pytest.raises(tilestone.CoverageError, match=r"does not hold box \[2:4\]"):
        loaded(shorter, replace(plain, start=6, shape=(2,)))
    with pytest.raises(tilestone.NotFoundError, match="not in the checkpoint"):
        loaded(shorter, replace(plain, start=6, key="c"))


def test_impossible_buckets_are_refused() -> None:
    parameter = Parameter.of(ShardedTensor.from_rank_offsets("w", torch.ones(4)), 2)
    for parameters, sizes, text in (
        ([parameter, parameter], (10, 10), "begins at 2 of its bucket, .* ends at 6"),
        ([parameter], (5, 10), "ends at 6 of its bucket, which has 5"),
        ([parameter], (7, 6), "7 elements has only 6"),
    ):
        with pytest.raises(tilestone.InvalidArgumentError, match=text):
            Bucket(tuple(parameters), *sizes)


def test_the_helpers_cut_out_the_ranks_parts() -> None:
    """Checks the reference of other tests: each element of the whole tensors is on some rank."""
    job, whole = Ranks(2, 2, 1), om.whole_states()
    seen = {key: torch.zeros(tensor.shape, dtype=torch.bool) for key, tensor in whole.items()}
    for _, tp, pp in job.groups():
        model = Model(megatron, job, tp, pp)
        for name in model.entities:
            local = model.local_state(name, "param", whole).flatten()
            for key, tensor in whole.items():
                seen[key] |= torch.isin(tensor, local)
    assert all(bool(each.all()) for key, each in seen.items() if key[0] == "param")
