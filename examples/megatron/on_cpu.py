"""Megatron-Core on CPU ranks over gloo.

Megatron-Core trains on GPUs, and asks CUDA for devices, tensor types and random numbers. Inside
`on_cpu()` these calls use the CPU instead, so that examples and tests can run Megatron-Core's own
models, optimizers and schedules without a GPU. Don't train with it: it is slow, and it leaves out
all overlap of communication and computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import types
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks share a model: the sizes of Megatron-Core's groups. The rest is data parallelism.

    Attributes:
        tp: tensor-parallel size.
        pp: number of pipeline stages.
        ep: expert-parallel size.
        etp: tensor-parallel size within an expert; 0 means the same as `tp`.
        cp: context-parallel size.
        vpp: number of model chunks on each pipeline stage, if there are several.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    cp: int = 1
    vpp: int = 1

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self).items()
        parts = [f"{name.upper()} {n}" for name, n in sizes if n > 1 or (name == "etp" and n)]
        return " x ".join(parts) or "one rank"


def import_megatron() -> None:
    """Imports Megatron-Core without torch.compile and without warnings about missing packages."""
    with warnings.catch_warnings(), unittest.mock.patch.object(torch, "compile", _as_it_is):
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        importlib.import_module("torch._dynamo")  # torch's optimizers import it
    torch.compiler.set_stance("force_eager")  # for functions compiled before this call


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return function if function is not None else _as_it_is


class _CpuForCuda(torch.overrides.TorchFunctionMode):
    """Keeps tensors on the CPU that are created on or moved to a GPU, with a GPU tensor's type."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _get_generator(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_generator(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


_groups: dict[Any, Any] = {}


def _group_of(ranks: list[int], *_: Any, **options: Any) -> Any:
    """The process group of these ranks, created once.

    Megatron-Core has dozens of groups, and most of them have the same ranks as another one. Over
    gloo, each group would take sockets and threads of its own.
    """
    key = (dist.group.WORLD, tuple(ranks))
    if key not in _groups:
        _groups[key] = dist.new_group(ranks)
    return _groups[key]


def _grouped_product(
    tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Multiplies each expert's tokens with its weight, like the grouped GEMM library for GPUs."""
    parts = tokens.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


class FusedAdam(torch.optim.Optimizer):
    """Adam with the same state as that of Apex and TransformerEngine, which Megatron-Core uses.

    The step count belongs to a parameter group, not to each parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool,
    ) -> None:
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        grad, lr = parameter.grad, group["lr"]
        first, second = group["betas"]
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        scale = (1 - second ** group["step"]) ** 0.5
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(
            state["exp_avg"],
            state["exp_avg_sq"].sqrt().div_(scale).add_(group["eps"]),
            value=-lr / (1 - first ** group["step"]),
        )


class Norm:
    """A layer norm that supports sequence parallelism, as Apex's does and torch's does not."""

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any
    ) -> torch.nn.LayerNorm:
        norm = torch.nn.LayerNorm(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _replacements() -> list[tuple[Any, str, Any]]:
    """(module, name, replacement inside on_cpu())."""
    from megatron.core import optimizer, parallel_state
    from megatron.core.models import backends
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import grouped_gemm_util as grouped
    from megatron.core.transformer.moe import moe_utils

    return [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.default_generator.manual_seed),
        (torch.cuda, "get_rng_state", _get_generator),
        (torch.cuda, "set_rng_state", _set_generator),
        (torch.cuda.random, "get_rng_state", _get_generator),
        (random, "_set_cuda_rng_state", _set_generator),
        (parallel_state, "create_group", _group_of),
        (grouped, "assert_grouped_gemm_is_available", lambda: None),
        (grouped, "ops", types.SimpleNamespace(gmm=_grouped_product)),
        (moe_utils, "te_general_gemm", None),  # undefined without TransformerEngine
        (backends, "LNImpl", Norm),
        (transformer_block, "LayerNormImpl", Norm),
        (optimizer, "Adam", FusedAdam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "gc", types.SimpleNamespace(collect=lambda: 0)),  # a collection is slow
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Makes this process run Megatron-Core on the CPU until the context ends."""
    import_megatron()
    # The CPU's generator serves as both generators. The tracker logs this each time it is used.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_CpuForCuda())
        for owner, name, value in _replacements():
            patch = unittest.mock.patch.object(owner, name, value, create=True)
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def laid_over(layout: Layout, seed: int = 1) -> Iterator[None]:
    """Initializes Megatron-Core's groups and seeds for this layout. Use it inside on_cpu()."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    try:
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
    finally:
        # The groups are kept for the next layout.
        with unittest.mock.patch.object(dist, "destroy_process_group", lambda *_: None):
            parallel_state.destroy_model_parallel()
