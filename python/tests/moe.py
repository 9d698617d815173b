"""A small mixture-of-experts transformer over real ranks, for tests.

Dense mesh [pp, dp, cp, tp], expert mesh [pp, edp, ep, etp], both over all ranks in the same order.
FSDP2 shards dense parameters over dp and cp, and expert weights over edp. Tensor parallelism shards
only the head's rows, and expert tensor parallelism the experts' hidden size. Each rank of cp gets
its own sequences. So FSDP2 determines a parameter's placements, which don't include tp, ep and etp:
by these placements alone, the experts of all expert-parallel ranks would be the same.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tilestone import PlacementRules, ShardedTensor

WIDTH, HIDDEN, EXPERTS, VOCABULARY, LAYERS, SEQUENCE = 8, 12, 8, 16, 2, 6

DENSE_RULES = PlacementRules(
    {
        "head": {"tp": Shard(0)},
        "head.*.step": Replicate,
        "hc_head.*": Replicate,
        "**": Replicate,
    }
)
EXPERT_RULES = PlacementRules(
    {
        "experts.w1": {"ep": Shard(0), "etp": Shard(2)},
        "experts.w2": {"ep": Shard(0), "etp": Shard(1)},
        "experts.*.step": Replicate,
    }
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The parallel sizes of four ranks; the rest is data parallelism."""

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __str__(self) -> str:
        named = [f"{name.upper()} {size}" for name, size in vars(self).items() if size > 1]
        return ", ".join(named) or "EP 1"


class Meshes:
    """The meshes of a layout. Every rank creates them."""

    def __init__(self, sizes: Sizes) -> None:
        world = dist.get_world_size()
        dp = world // (sizes.pp * sizes.cp * sizes.tp)
        edp = world // (sizes.pp * sizes.ep * sizes.etp)
        names = ("pp", "dp", "cp", "tp")
        self.dense = init_device_mesh(
            "cpu", (sizes.pp, dp, sizes.cp, sizes.tp), mesh_dim_names=names
        )
        names = ("pp", "edp", "ep", "etp")
        self.expert = init_device_mesh(
            "cpu", (sizes.pp, edp, sizes.ep, sizes.etp), mesh_dim_names=names
        )
        self.dense_data = self.dense["dp", "cp"]._flatten("dp_cp")
        self.expert_data = self.expert["edp"]
        self.experts = self.expert["ep", "etp"]._flatten("ep_etp").get_group()
        # The mesh of a checkpoint's dense tensors. Without pp, because stages have own parameters.
        self.dense_ranks = self.dense["dp", "cp", "tp"]
        self.expert_ranks = self.expert["edp", "ep", "etp"]


def at(mesh: DeviceMesh, name: str) -> int:
    return mesh[name].get_local_rank()


class _Gather(torch.autograd.Function):
    """Concatenates the rows of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.rank, ctx.count = group, dist.get_rank(group), rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.rank * ctx.count : (ctx.rank + 1) * ctx.count], None


class _SumAndTakeOwn(torch.autograd.Function):
    """Sums the ranks' rows over a group; each rank keeps its own part of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.size = group, dist.get_world_size(group)
        rows = rows.contiguous().clone()
        dist.all_reduce(rows, group=group)
        return rows.chunk(ctx.size)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        parts = [torch.empty_like(grad) for _ in range(ctx.size)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class _Columns(torch.autograd.Function):
    """Concatenates the columns of all ranks of a group; all ranks get the same whole."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(own) for _ in range(ctx.size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.size, -1)[ctx.rank].contiguous(), None


def _made(shape: tuple[int, ...], generator: torch.Generator) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.3)


class Experts(torch.nn.Module):
    """This rank's experts, and its part of their hidden size."""

    def __init__(self, meshes: Meshes, generator: torch.Generator) -> None:
        super().__init__()
        ep, etp = at(meshes.expert, "ep"), at(meshes.expert, "etp")
        w1 = _made((EXPERTS, WIDTH, HIDDEN), generator).data
        w2 = _made((EXPERTS, HIDDEN, WIDTH), generator).data
        sizes = meshes.expert["ep"].size(), meshes.expert["etp"].size()
        self.w1 = torch.nn.Parameter(w1.chunk(sizes[0])[ep].chunk(sizes[1], 2)[etp].clone())
        self.w2 = torch.nn.Parameter(w2.chunk(sizes[0])[ep].chunk(sizes[1], 1)[etp].clone())
        self.first = ep * (EXPERTS // sizes[0])

    def forward(self, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        own = gates[:, self.first : self.first + self.w1.shape[0]]
        hidden = torch.relu(torch.einsum("td,edh->teh", rows, self.w1))
        return torch.einsum("teh,ehd,te->td", hidden, self.w2, own).clone()


class Block(torch.nn.Module):
    def __init__(self, meshes: Meshes, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = _made((3 * WIDTH, WIDTH), generator)
        self.router = _made((EXPERTS, WIDTH), generator)
        self.experts = Experts(meshes, generator)
        self.group = meshes.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.norm(x) @ self.qkv.T).chunk(3, -1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = x.reshape(-1, WIDTH)
        best = torch.topk(rows @ self.router.T, 2)
        gates = torch.zeros(rows.shape[0], EXPERTS).scatter(1, best.indices, best.values.softmax(-1))
        mixed = self.experts(_Gather.apply(rows, self.group), _Gather.apply(gates, self.group))
        return x + _SumAndTakeOwn.apply(mixed, self.group).reshape(x.shape)


class HyperHead(torch.nn.Module):
    """Replicated over tp, unlike "head". Its three numbers give some ranks empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.mean()


class Head(torch.nn.Module):
    def __init__(self, meshes: Meshes, generator: torch.Generator) -> None:
        super().__init__()
        whole = _made((VOCABULARY, WIDTH), generator).data
        tp = meshes.dense["tp"]
        self.weight = torch.nn.Parameter(whole.chunk(tp.size())[tp.get_local_rank()].clone())
        self.group = tp.get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Columns.apply(x @ self.weight.T, self.group)


class Stage(torch.nn.Module):
    """This rank's layers. The first stage has the embedding, the last one has the heads."""

    def __init__(self, meshes: Meshes, seed: int) -> None:
        super().__init__()
        stage, stages = at(meshes.dense, "pp"), meshes.dense["pp"].size()
        generator = torch.Generator().manual_seed(seed)
        first, last = stage == 0, stage == stages - 1
        self.embedding = _made((VOCABULARY, WIDTH), generator) if first else None
        blocks = [Block(meshes, generator) for _ in range(LAYERS)]
        own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.layers = torch.nn.ModuleDict({str(i): blocks[i] for i in own})
        self.hc_head = HyperHead() if last else None
        self.head = Head(meshes, generator) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding[x]
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None or self.hc_head is None else self.head(self.hc_head(x))


class Training:
    """A model and its optimizer on this rank."""

    def __init__(self, meshes: Meshes, seed: int) -> None:
        self.meshes = meshes
        self.model: Any = Stage(meshes, seed)
        for block in self.model.layers.values():
            fully_shard(block.experts, mesh=meshes.expert_data)
            fully_shard(block, mesh=meshes.dense_data)
        fully_shard(self.model, mesh=meshes.dense_data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def step(self, number: int) -> None:
        """One step on the batch of this number, which is equal within a tensor-parallel group."""
        data = self.meshes.dense_data
        generator = torch.Generator().manual_seed(1000 * number + data.get_local_rank())
        batch = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
        self.optimizer.zero_grad()
        self._forward_and_backward(batch[:, :-1], batch[:, 1:])
        for name, parameter in self.model.named_parameters():
            if ".experts." not in name and not name.startswith("head."):
                group = self.meshes.dense["tp"].get_group()
                dist.all_reduce(parameter.grad._local_tensor, group=group)
        self.optimizer.step()

    def _forward_and_backward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> None:
        pipeline = self.meshes.dense["pp"].get_group()
        ranks = dist.get_process_group_ranks(pipeline)
        stage = ranks.index(dist.get_rank())
        x = tokens
        if stage > 0:
            x = torch.empty(2, SEQUENCE, WIDTH)
            dist.recv(x, ranks[stage - 1], group=pipeline)
            x.requires_grad_()
        y = self.model(x)
        if stage < len(ranks) - 1:
            grad = torch.empty_like(y)
            dist.send(y.detach().contiguous(), ranks[stage + 1], group=pipeline)
            dist.recv(grad, ranks[stage + 1], group=pipeline)
            y.backward(grad)
        else:
            torch.nn.functional.cross_entropy(y.flatten(0, 1), wanted.flatten()).backward()
        if stage > 0:
            dist.send(x.grad.contiguous(), ranks[stage - 1], group=pipeline)

    def tensors(self) -> dict[str, Any]:
        """All parameters and their optimizer states by dotted path."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter
            for part, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{part}"] = value
        return found

    def state(self) -> dict[str, Any]:
        """A nested state dict in which each tensor has its placements."""
        tree: dict[str, Any] = {}
        for path, tensor in self.tensors().items():
            *outer, last = path.split(".")
            place = functools.reduce(lambda part, name: part.setdefault(name, {}), outer, tree)
            place[last] = self.placed(path, tensor)
        return tree

    def placed(self, path: str, tensor: Any) -> ShardedTensor:
        if ".experts." in path:
            return ShardedTensor.from_param(tensor, self.meshes.expert_ranks, EXPERT_RULES)
        return ShardedTensor.from_param(tensor, self.meshes.dense_ranks, DENSE_RULES)

    def local(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's local tensors by path."""
        return {
            path: (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().clone()
            for path, tensor in self.tensors().items()
        }

    def gathered(self) -> dict[str, torch.Tensor]:
        """All whole tensors of the model, assembled by the ranks' coordinates."""
        own = {
            path: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for path, tensor in self.tensors().items()
        }
        dense = {name: at(self.meshes.dense, name) for name in ("pp", "tp")}
        expert = {name: at(self.meshes.expert, name) for name in ("ep", "etp")}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (dense, expert, own))
        parts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        for dense, expert, tensors in everywhere:
            for path, tensor in tensors.items():
                place = (expert["ep"], expert["etp"]) if ".experts." in path else (dense["tp"], 0)
                parts.setdefault(path, {}).setdefault(place, tensor)
        return {path: _assembled(path, places) for path, places in parts.items()}


def _assembled(path: str, places: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    if path.endswith(".step"):
        return next(iter(places.values()))
    if ".experts." in path:
        dim = 2 if ".w1" in path else 1
        rows = sorted({ep for ep, _ in places})
        columns = sorted({etp for _, etp in places})
        return torch.cat([torch.cat([places[r, c] for c in columns], dim) for r in rows])
    if ".head." in path:
        return torch.cat([places[place] for place in sorted(places)])
    return places[0, 0]
