"""A GPT in Megatron-Core's layout: Tilestone compared with stock dist_checkpointing on torch ranks.

Contestants get a description of the state, from which they make entities for each call. This is
part of the measured time, because stock's calls modify the state dicts that they get.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ranks
from contestants import Contestant, sync_tree
from measure import CONTROL, Case, Plan

TP = 2  # ranks of a tensor-parallel group; the remaining factor is data parallelism


@dataclass
class Part:
    """A rank's part of a tensor: its cell along an axis (-1: the whole tensor), and its replica."""

    data: torch.Tensor
    axis: int
    place: int
    replica: tuple[int, ...]
    cells: int = TP  # along the axis

    def entity(self, key: str, kind: Any) -> Any:
        grid = () if self.axis < 0 else ((self.axis, self.place, self.cells),)
        return kind.from_rank_offsets(key, self.data, *grid, replica_id=self.replica)


Parts = dict[str, Part]


def state(scale: float, width: int = 1024) -> Parts:
    """This rank's parts of parameters and AdamW's two moments, all float32."""
    width = max(64, int(width * scale**0.5) // 64 * 64)
    tp, dp = dist.get_rank() % TP, dist.get_rank() // TP
    parts = {}
    for name, (shape, axis) in ranks.gpt_shapes(10, width, 4 * width).items():
        local = list(shape)
        if axis >= 0:
            local[axis] //= TP
        replica = (0, 0 if axis >= 0 else tp, dp)
        for kind in ("model", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq"):
            parts[f"{kind}.{name}"] = Part(torch.randn(local), axis, tp, replica)
    return parts


class _Megatron(Contestant):
    """One of the two packages that have Megatron-Core's interface."""

    def __init__(self, name: str, parallel: bool = False) -> None:
        self.name = name
        self._parallel = parallel

    def _package(self) -> Any:
        raise NotImplementedError

    def _strategies(self) -> tuple[Any, Any]:
        """The strategies for a save and for a load. None means the package's default."""
        return None, None

    def wrapped(self) -> tuple[Any, Any]:
        """_strategies(), in fully parallel wrappers if the contestant is parallel."""
        save, load = self._strategies()
        if not self._parallel:
            return save, load
        package = self._package()
        stock = import_module(f"{package.__name__}.strategies.torch")
        wrappers = import_module(f"{package.__name__}.strategies.fully_parallel")
        save = save or stock.TorchDistSaveShardedStrategy("torch_dist", 1)
        load = load or stock.TorchDistLoadShardedStrategy()
        return (wrappers.FullyParallelSaveStrategyWrapper(save),
                wrappers.FullyParallelLoadStrategyWrapper(load))

    def _entities(self, parts: Parts) -> dict[str, Any]:
        kind = self._package().ShardedTensor
        return {key: part.entity(key, kind) for key, part in parts.items()}

    def save(self, tensors: Parts, path: Path) -> None:
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self._package().save(self._entities(tensors), str(path), self.wrapped()[0])

    def load(self, tensors: Parts, path: Path) -> None:
        self._package().load(self._entities(tensors), str(path), self.wrapped()[1])


class Native(_Megatron):
    def _package(self) -> Any:
        import tilestone.megatron

        return tilestone.megatron


class Stock(_Megatron):
    """Stock. It syncs its data files; the timed part also syncs the index here."""

    def _package(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import dist_checkpointing
        return dist_checkpointing

    def save(self, tensors: Parts, path: Path) -> None:
        super().save(tensors, path)
        if dist.get_rank() == 0:
            sync_tree(path)


class PlugIn(Stock):
    """Stock with Tilestone's strategies."""

    def _strategies(self) -> tuple[Any, Any]:
        from tilestone.megatron import TilestoneLoadStrategy, TilestoneSaveStrategy

        return TilestoneSaveStrategy(), TilestoneLoadStrategy()


def without_cuda() -> None:
    """Keeps stock's tensors on the CPU.

    Stock's fully parallel load moves every tensor to a GPU, and its save moves flags there.
    """
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment,method-assign]
    real = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def on_cpu(name: str) -> Any:
        def make(*args: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device")).startswith("cuda"):
                options["device"] = "cpu"
            return real[name](*args, **options)

        return make

    for name in real:
        setattr(torch, name, on_cpu(name))
    # A default that was taken when the module was imported, by a process that this one was forked from.
    mapping = import_module("megatron.core.dist_checkpointing.mapping")
    mapping.ShardedTensor.init_data.__defaults__ = (torch.empty,)


def _job(case: Case, plan: Plan) -> None:
    without_cuda()
    warnings.simplefilter("ignore")  # stock uses deprecated functions of torch
    saved, wanted = state(plan.scale), state(plan.scale)
    whole = sum(part.data.nbytes * (TP if part.axis >= 0 else 1) for part in saved.values())
    case.bytes = whole
    who = [Native("tilestone"), Native(CONTROL), Native("tilestone, fully parallel", True),
           PlugIn("stock with Tilestone's strategies"), Stock("stock"),
           Stock("stock, fully parallel", True)]
    for each in who:
        each.wrapped()  # imports take seconds
    ranks.measure(case, plan, who, saved, wanted, count_reads=True)


def megatron(case: Case, plan: Plan) -> Case:
    return ranks.run(_job, 4, case, plan)
