"""A small model, sharded by TP and PP like Megatron-Core's models, and its optimizer states.

The states of all parameters are random whole tensors. A rank's part is cut out of them by the
offsets of the model's entities, so tests compare with whole tensors that no rank ever had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from tilestone.megatron.distributed_optimizer import Layout, OptimizerShard, pack

STATES = ("param", "exp_avg", "exp_avg_sq")
LAYERS = 2
HIDDEN, FFN, VOCAB, NORM = 12, 24, 11, 300
DTYPES = (torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A job: TP x PP model-parallel ranks of DP ranks each."""

    tp: int
    pp: int
    dp: int

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """(group, tensor-parallel rank, pipeline rank) of all model-parallel ranks."""
        for group in range(self.tp * self.pp):
            yield group, group % self.tp, group // self.tp


def _whole_shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    return {
        "embed": (vocab, HIDDEN),
        "layers.column": (LAYERS, FFN, HIDDEN),
        "layers.row": (LAYERS, HIDDEN, FFN),
        "layers.norm": (LAYERS, NORM),
        "layers.glu": (LAYERS, 2 * FFN, HIDDEN),
        "layers.experts": (LAYERS, FFN, HIDDEN),
        "layers.halves.left": (LAYERS, HIDDEN, FFN),
        "layers.halves.right": (LAYERS, HIDDEN, FFN),
    }


def whole_states(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """(state, key) -> the whole tensor; the embedding without padding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (state, key): torch.randn(shape, generator=generator)
        for state in STATES
        for key, shape in _whole_shapes(VOCAB).items()
    }


def padded_vocab(tp: int) -> int:
    return -(-VOCAB // (4 * tp)) * 4 * tp


class Model:
    """The entities of one rank.

    Args:
        m: the module whose entities are made: tilestone.megatron or Megatron-Core's.
        job: the ranks.
        tp, pp: this rank's tensor-parallel and pipeline ranks.
        dp: this rank's number among the replicas of the parameters.
    """

    def __init__(self, m: Any, job: Ranks, tp: int, pp: int, dp: int = 0) -> None:
        self._m, self._job, self._tp, self._dp = m, job, tp, dp
        each = LAYERS // job.pp
        self.entities: dict[str, Any] = {}
        if pp == 0:
            rows = padded_vocab(job.tp) // job.tp
            self._add("embed", (rows, HIDDEN), [], 0, allow_shape_mismatch=True)
        for layer in range(pp * each, pp * each + each):
            before = [(0, layer, LAYERS)]
            self._add("layers.column", (FFN // job.tp, HIDDEN), before, 0)
            self._add("layers.row", (HIDDEN, FFN // job.tp), before, 1)
            self._add("layers.norm", (NORM,), before, None)
            self._factory("layers.glu", (2 * FFN // job.tp, HIDDEN), before, self._glu)
            self._factory("layers.experts", (HIDDEN, FFN // job.tp), before, self._experts)
            self._factory("layers.halves", (HIDDEN, 2 * FFN // job.tp), before, self._halves)

    def _parameter(self, shape: tuple[int, ...]) -> torch.nn.Parameter:
        dtype = torch.float32 if len(shape) == 1 else DTYPES[0]
        return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def _add(
        self, key: str, shape: tuple[int, ...], before: Any, axis: int | None, **more: Any
    ) -> None:
        places = list(before)
        if axis is not None:
            places.append((axis + len(before), self._tp, self._job.tp))
        replica = (0, self._tp if axis is None else 0, self._dp)
        name = f"{key}.{before}"
        self.entities[name] = self._m.ShardedTensor.from_rank_offsets(
            key, self._parameter(shape), *places, replica_id=replica,
            prepend_axis_num=len(before), **more,
        )  # fmt: skip

    def _part(self, key: str, data: Any, before: Any, place: Any, replica: Any) -> Any:
        return self._m.ShardedTensor.from_rank_offsets(
            key, data, *before, place, replica_id=replica, prepend_axis_num=1
        )

    def _glu(self, key: str, t: torch.Tensor, before: Any, replica: Any) -> Any:
        tp, size = self._tp, self._job.tp
        first, second = torch.chunk(t, 2, dim=0)
        return [
            self._part(key, first, before, (1, tp, 2 * size), replica),
            self._part(key, second, before, (1, tp + size, 2 * size), replica),
        ]

    def _experts(self, key: str, t: torch.Tensor, before: Any, replica: Any) -> Any:
        place = (1, self._tp, self._job.tp)
        return self._part(key, t.transpose(-1, -2).contiguous(), before, place, replica)

    def _halves(self, key: str, t: torch.Tensor, before: Any, replica: Any) -> Any:
        place = (2, self._tp, self._job.tp)
        left, right = torch.chunk(t, 2, dim=1)
        return {
            "left": self._part(f"{key}.left", left, before, place, replica),
            "right": self._part(f"{key}.right", right, before, place, replica),
        }

    def _factory(self, key: str, shape: tuple[int, ...], before: Any, build: Any) -> None:
        def build_fn(key: str, t: torch.Tensor, replica: Any, flat: slice | None) -> Any:
            assert flat is None  # like Megatron-Core's, it does not support slices
            with torch.no_grad():
                return build(key, t, before, replica)

        def merge_fn(loaded: Any) -> torch.Tensor:
            if build == self._experts:
                return loaded.transpose(-1, -2)
            parts = list(loaded.values()) if isinstance(loaded, dict) else loaded
            return torch.cat(parts, dim=0 if build == self._glu else 1)

        self.entities[f"{key}.{before}"] = self._m.ShardedTensorFactory(
            key, self._parameter(shape), build_fn, merge_fn, (0, 0, self._dp)
        )

    def local_state(self, name: str, state: str, whole: dict[Any, torch.Tensor]) -> torch.Tensor:
        """The state of a parameter in its local shape, cut out of the whole tensors."""
        entity = self.entities[name]
        if not hasattr(entity, "build_fn"):
            return _cut(entity, whole[state, entity.key])
        built = entity.build_fn(entity.key, entity.data, entity.replica_id, None)

        def cut(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: cut(value) for key, value in tree.items()}
            if isinstance(tree, list):
                return [cut(value) for value in tree]
            return _cut(tree, whole[state, tree.key])

        return entity.merge_fn(cut(built))


def _cut(entity: Any, whole: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(tuple(entity.global_shape), dtype=whole.dtype)
    padded[tuple(slice(0, n) for n in whole.shape)] = whole
    return padded[entity.global_slice()]


def layout_of(
    model: Model, group: int, dp: int, bucket_numel: int | None = 60, stock: bool = False
) -> Layout:
    """Two buffers (all but the norms; the norms), of several buckets with padding.

    Args:
        stock: use Megatron-Core's padding; otherwise there is less padding.
    """
    norms = [e for e in model.entities.values() if e.key == "layers.norm"]
    others = [e for e in model.entities.values() if e.key != "layers.norm"]
    less: dict[str, int] = {} if stock else {"parameter_multiple": 16, "bucket_multiple": 16}
    buffers = (
        pack(others, dp, DTYPES, bucket_numel, **less),
        pack(norms, dp, (torch.float32, torch.float32), bucket_numel, **less),
    )
    return Layout(buffers, group)


def filled(
    model: Model, layout: Layout, dp_rank: int, dp: int, whole: dict[Any, torch.Tensor]
) -> OptimizerShard:
    """A shard filled with the states of the whole tensors."""
    names = iter(_names(model, layout))
    shard = OptimizerShard.allocated(layout, dp_rank, dp, common=common())
    by_place = {
        (i, j, k): next(names)
        for (i, j), bucket in layout.buckets()
        for k in range(len(bucket.parameters))
    }
    for part in shard.slices():
        for state, memory in shard.states[part.place].items():
            local = model.local_state(by_place[part.place], state, whole).flatten()
            memory.copy_(local[part.begin : part.end])
    return shard


def _names(model: Model, layout: Layout) -> list[str]:
    """Names of the parameters in the order of the buffers, which begin with the last parameter."""
    names = list(model.entities)
    norms = [name for name in names if name.startswith("layers.norm")]
    return [name for name in reversed(names) if name not in norms] + norms[::-1]


def common() -> dict[str, Any]:
    return {"optimizer": {"param_groups": [{"lr": 0.5, "step": 7}]}, "grad_scaler": {"scale": 2.0}}
