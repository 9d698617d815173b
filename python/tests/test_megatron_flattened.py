"""Slices of flattened tensors (a distributed optimizer's shards) are saved and loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from thread_ranks import run_ranks
import tilestone
import torch
from tilestone.megatron import ShardedTensor, ShardedTensorFactory

WHOLE = torch.arange(12.0).reshape(2, 6)
TP2_DP3 = [[0, 1], [3, 4], [2, 6], [5, 9], [7, 8], [10, 11]]
TP6_DP1 = [[rank, rank + 6] for rank in range(6)]


def _on_ranks(count: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """Runs work(rank, comm) on `count` ranks that are threads. Returns the results."""
    found: list[Any] = [None] * count

    def run(comm: Any) -> None:
        found[comm.rank] = work(comm.rank, comm)

    run_ranks(count, run)
    return found


def _guide(rank: int, tp: int, dp: int, data: torch.Tensor | None = None) -> ShardedTensor:
    """This rank's slice of the guide's tensor. Ranks of a TP group have consecutive numbers."""
    size = 12 // tp // dp
    begin = rank // tp * size
    flat = slice(begin, begin + size)
    if data is None:
        data = WHOLE.chunk(tp, 1)[rank % tp].flatten()[flat].clone()
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, (2, 6 // tp), (1, rank % tp, tp), flattened_range=flat
    )


@pytest.mark.parametrize("dialect", ["pytorch", "megatron"])
@pytest.mark.parametrize(
    ("saved", "saved_as", "loaded", "loaded_as"),
    [((2, 3), TP2_DP3, (6, 1), TP6_DP1), ((6, 1), TP6_DP1, (2, 3), TP2_DP3)],
    ids=["TP2xDP3 to TP6xDP1", "and back"],
)
def test_the_guides_example_number_by_number(
    ckpt: str, dialect: str, saved: Any, saved_as: Any, loaded: Any, loaded_as: Any
) -> None:
    def save(rank: int, comm: Any) -> list[float]:
        part = _guide(rank, *saved)
        tilestone.save({"x": [part]}, ckpt, group=comm, dialect=dialect)
        return part.data.tolist()  # type: ignore[union-attr]

    def load(rank: int, comm: Any) -> list[float]:
        memory = torch.full((2,), -1.0)
        found = tilestone.load({"x": [_guide(rank, *loaded, memory)]}, ckpt, group=comm)["x"][0]
        assert found is memory
        return found.tolist()

    assert _on_ranks(6, save) == saved_as
    assert _on_ranks(6, load) == loaded_as
    assert torch.equal(tilestone.open(ckpt, framework="torch").read("w"), WHOLE)


class _OldKind:
    """Makes an entity like that of Megatron-Core 0.13, whose class is recognised by its name."""

    def __new__(cls, part: ShardedTensor) -> Any:
        kind = type("ShardedTensor", (), {"__init__": lambda self, kw: self.__dict__.update(kw)})
        kind.__module__ = "megatron.core.dist_checkpointing.mapping"
        return kind(dict(vars(part)))


def _cuts(total: int, parts: int, rng: random.Random) -> list[slice]:
    """Divides `total` elements into `parts` slices, some of which are often empty."""
    ends = sorted(rng.choice((0, total, rng.randint(0, total))) for _ in range(parts - 1))
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, total], strict=True)]


class _Layout:
    """Random TP x PP x DP: each stage has some of the layers, each TP rank a part of every layer.

    The slices over DP differ from layer to layer, like those of an optimizer's buffer.
    """

    def __init__(self, layers: int, shape: tuple[int, ...], rng: random.Random) -> None:
        self.layers = layers
        self.axis = rng.randrange(len(shape))
        self.tp = rng.choice([n for n in (1, 2, 3, 4) if shape[self.axis] % n == 0])
        self.pp = rng.choice([n for n in (1, 2) if layers % n == 0])
        self.dp = rng.choice((1, 2, 3))
        self.local = tuple(n // self.tp if a == self.axis else n for a, n in enumerate(shape))
        count = torch.Size(self.local).numel()
        self.cuts = {
            (layer, tp): _cuts(count, self.dp, rng)
            for layer in range(layers)
            for tp in range(self.tp)
        }
        self.ranks = self.tp * self.pp * self.dp

    def parts(self, rank: int, whole: torch.Tensor, with_data: bool) -> Iterator[ShardedTensor]:
        """A rank's parts, with the values of `whole` if `with_data`, else zeros."""
        tp, rest = rank % self.tp, rank // self.tp
        pp, dp = rest % self.pp, rest // self.pp
        each = self.layers // self.pp
        for layer in range(pp * each, pp * each + each):
            flat = self.cuts[layer, tp][dp]
            values = whole[layer].chunk(self.tp, self.axis)[tp].flatten()[flat].clone()
            yield ShardedTensor.from_rank_offsets_flat(
                "w", values if with_data else torch.zeros_like(values), self.local,
                (0, layer, self.layers), (self.axis + 1, tp, self.tp),
                prepend_axis_num=1, flattened_range=flat,
            )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_of_tp_pp_dp_are_loaded_into_one_another(ckpt: str, seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 3)))
    layers = rng.choice((1, 2, 4))
    saved, loaded = (_Layout(layers, shape, rng) for _ in range(2))
    whole = torch.arange(layers * torch.Size(shape).numel(), dtype=torch.float32)
    whole = whole.reshape(layers, *shape)

    def save(rank: int, comm: Any) -> None:
        parts = list(saved.parts(rank, whole, True))
        state = [_OldKind(part) if seed % 2 else part for part in parts]
        tilestone.save({"layers": state}, ckpt, group=comm)

    def load(rank: int, comm: Any) -> None:
        expected = [part.data for part in loaded.parts(rank, whole, True)]
        templates = list(loaded.parts(rank, whole, False))
        state: list[Any] = templates
        if seed % 3 == 0:
            state = [part.without_data() for part in templates]
        found = tilestone.load({"layers": state}, ckpt, group=comm)["layers"]
        for one, part, values in zip(found, state, expected, strict=True):
            assert torch.equal(one, values), (seed, rank, one, values)
            assert part.data is None or one is part.data

    _on_ranks(saved.ranks, save)
    assert torch.equal(tilestone.open(ckpt, framework="torch").read("w"), whole)
    _on_ranks(loaded.ranks, load)


def test_an_empty_slice_saves_nothing_and_loads_as_the_empty_tensor_it_was(ckpt: str) -> None:
    def part(rank: int, key: str = "w") -> ShardedTensor:
        flat = (slice(0, 0), slice(0, 6), slice(6, 6))[rank]
        return ShardedTensor.from_rank_offsets_flat(
            key, torch.arange(6.0)[flat].clone(), (2, 3), flattened_range=flat
        )

    def work(rank: int, comm: Any) -> None:
        tilestone.save({"a": part(rank), "b": part(2 - rank, "v")}, ckpt, group=comm)
        template = part(rank)
        assert template.data is not None
        template.data.zero_()
        found = tilestone.load({"a": template, "b": part(rank, "v")}, ckpt, group=comm)
        assert found["a"] is template.data
        assert found["a"].tolist() == found["b"].tolist() == ([], [0, 1, 2, 3, 4, 5], [])[rank]

    _on_ranks(3, work)
    assert tilestone.open(ckpt).keys() == ["v", "w"]


def test_a_slice_of_a_padded_tensor_is_filled_with_zeros_behind_the_stored_one(ckpt: str) -> None:
    tilestone.save({"w": torch.arange(10.0).reshape(5, 2)}, ckpt)

    def load(rank: int, comm: Any) -> list[float]:
        flat = (slice(0, 5), slice(5, 6), slice(6, 14))[rank]
        part = ShardedTensor.from_rank_offsets_flat(
            "w", torch.ones(flat.stop - flat.start), (7, 2), flattened_range=flat,
            allow_shape_mismatch=True,
        )  # fmt: skip
        found: list[float] = tilestone.load({"w": part}, ckpt, group=comm)["w"].tolist()
        return found

    assert sum(_on_ranks(3, load), []) == [*range(10), 0, 0, 0, 0]


def test_a_slice_of_a_box_of_an_irregular_grid_is_kept_and_resharded(ckpt: str) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    rows = (slice(0, 3), slice(3, 5))

    def part(rank: int, data: torch.Tensor | None) -> ShardedTensor:
        box, half = rows[rank // 2], rank % 2
        count = (box.stop - box.start) * 4
        flat = slice(0, count // 2 - 1) if half == 0 else slice(count // 2 - 1, count)
        values = data
        if values is None:
            values = whole[box].flatten()[flat].clone()
        values = values[: flat.stop - flat.start]
        return ShardedTensor(
            "w", values, torch.float32, (box.stop - box.start, 4), (5, 4), (box.start, 0), None,
            flattened_range=flat,
        )  # fmt: skip

    def load(rank: int, comm: Any) -> None:
        found = tilestone.load({"w": part(rank, torch.zeros(20))}, ckpt, group=comm)["w"]
        assert torch.equal(found, part(rank, None).data)  # type: ignore[arg-type]

    _on_ranks(4, lambda r, comm: tilestone.save({"w": part(r, None)}, ckpt, group=comm) and None)
    assert torch.equal(tilestone.open(ckpt, framework="torch").read("w"), whole)
    _on_ranks(4, load)


def _halves(
    tp: int, rank: int, local_rows: int, seen: list[Any]
) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """A gated MLP's weight [W; V] as two cells of one tensor: W at `rank`, V after all W."""

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        seen.append((key, replica_id, flattened_range))
        half = local_rows // 2
        cells = ((0, rank, 2 * tp), (0, rank + tp, 2 * tp))
        if flattened_range is None:
            return [
                ShardedTensor.from_rank_offsets(key, part, cell, replica_id=replica_id)
                for part, cell in zip(data.chunk(2), cells, strict=True)
            ]
        found, count = [], half * 3
        for number, cell in enumerate(cells):
            begin = min(max(flattened_range.start - number * count, 0), count)
            end = min(max(flattened_range.stop - number * count, 0), count)
            first = number * count + begin - flattened_range.start
            found.append(
                ShardedTensor.from_rank_offsets_flat(
                    key, data[first : first + end - begin] if end > begin else data[:0], (half, 3),
                    cell, replica_id=replica_id, flattened_range=slice(begin, end),
                )
            )  # fmt: skip
        return found

    return build, torch.cat


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "Megatron-Core's"])
def test_a_factory_on_a_flattened_tensor_gets_the_slice_and_is_merged(
    ckpt: str, stock: bool
) -> None:
    rows = 8  # of each of W and V
    weights = torch.arange(2 * rows * 3.0).reshape(2 * rows, 3)
    kind: Any = ShardedTensorFactory
    if stock:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.dist_checkpointing import mapping
        kind = mapping.ShardedTensorFactory

    def item(rank: int, tp: int, dp: int, seen: list[Any], fill: bool) -> tuple[Any, torch.Tensor]:
        part, copy = rank % tp, rank // tp
        local = torch.cat([weights[:rows].chunk(tp)[part], weights[rows:].chunk(tp)[part]])
        flat, count = None, local.numel()
        values = local
        if dp > 1:
            ends = [0, count // 3, count // 3 * 2 + 1, count][: dp + 1]
            flat = slice(ends[copy], count if copy == dp - 1 else ends[copy + 1])
            values = local.flatten()[flat]
        data = values.clone() if fill else torch.zeros_like(values)
        build, merge = _halves(tp, part, local.shape[0], seen)
        return kind("glu", data, build, merge, (0, 0), flat), values

    def save(rank: int, comm: Any) -> None:
        seen: list[Any] = []
        factory, _ = item(rank, 2, 3, seen, True)
        tilestone.save({"mlp": factory}, ckpt, group=comm)
        assert seen == [("glu", (0, 0), factory.flattened_range)]
        assert isinstance(factory.flattened_range, slice)

    _on_ranks(6, save)
    assert torch.equal(tilestone.open(ckpt, framework="torch").read("glu"), weights)
    for tp, dp in ((1, 2), (4, 1), (2, 2)):

        def load(rank: int, comm: Any, tp: int = tp, dp: int = dp) -> None:
            factory, values = item(rank, tp, dp, [], False)
            found = tilestone.load({"mlp": factory}, ckpt, group=comm)["mlp"]
            assert torch.equal(found, values)

        _on_ranks(tp * dp, load)
