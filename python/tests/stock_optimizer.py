"""Megatron-Core's own DistributedOptimizer on the CPU, with all ranks of a job in one process."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import types
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import stock_queue
import torch
from optimizer_model import DTYPES, Model, Ranks

_KINDS = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Keeps tensors on the CPU that stock creates on a GPU, with the type of GPU tensors."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _KINDS[args[0].dtype]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Group:
    """A data-parallel group whose ranks run one after another."""

    def __init__(self, rank: int, size: int, sent: list[list[torch.Tensor]]) -> None:
        self._rank, self._size, self.sent = rank, size, sent

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _gather(tensor: torch.Tensor, into: Any, dst: int, group: Group) -> None:
    """Ranks other than 0 run first and store the tensors that they send."""
    group.sent[group.rank()].append(tensor.clone())
    if group.rank() == 0:
        number = len(group.sent[0]) - 1
        for memory, sent in zip(into, group.sent, strict=True):
            memory.copy_(sent[number])


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Runs Megatron-Core's optimizers without a GPU and without process groups."""
    patch = unittest.mock.patch.object
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing.strategies import filesystem_async
    with (
        _OnCpu(),
        patch(torch.cuda, "synchronize", lambda *_: None),
        patch(torch.cuda, "current_device", lambda: "cpu"),
        patch(gc, "collect", lambda *_: 0),  # stock calls it for every state dict
        patch(filesystem_async, "_get_write_results_queue", stock_queue.results_queue),
        patch(torch.distributed, "gather", _gather),
        patch(torch.distributed, "get_process_group_ranks", lambda g: list(range(g.size()))),
        # Stock's writers are child processes.
        unittest.mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def optimizer(
    model: Model, group_index: int, group: Any, bucket_numel: int | None, filled: Any = None
) -> Any:
    """Stock's optimizer of a rank, with norms in float32 and all other parameters in bfloat16.

    Args:
        filled: (name of a parameter, state) -> its local tensor. None means no states yet.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    names = {entity.data: name for name, entity in model.entities.items()}
    by_dtype: dict[torch.dtype, list[Any]] = {DTYPES[0]: [], torch.float32: []}
    for parameter in names:
        by_dtype[parameter.dtype].append(parameter)
    one = Group(0, 1, [[]])
    with unittest.mock.patch.object(buffers, "log_on_each_pipeline_stage", lambda *_, **__: None):
        made = [
            buffers._ParamAndGradBuffer(
                config, dtype, torch.float32, parameters, group, bucket_numel, names, 1.0,
                list(range(len(parameters))), False, types.SimpleNamespace(tp=one, dp_cp=group),
            )
            for dtype, parameters in by_dtype.items()
        ]  # fmt: skip
    marks = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    param_groups = [
        {"params": parameters, "wd_mult": wd_mult, **marks}
        for wd_mult, parameters in zip((1.0, 0.0), by_dtype.values(), strict=True)
    ]
    inner = torch.optim.AdamW(param_groups, lr=0.25)
    result = DistributedOptimizer(
        inner, OptimizerConfig(bf16=True, lr=0.25), None, None,
        [types.SimpleNamespace(ddp_config=config, config=None)],
        {0: made}, group, group, group_index, 0,
    )  # fmt: skip
    if filled is not None:
        _fill(result, names, filled)
    return result


def _fill(optimizer: Any, names: dict[Any, str], filled: Any) -> None:
    for parameter in optimizer.model_param_gbuf_map:
        flat = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]

        def part(state: str, parameter: Any = parameter, flat: Any = flat) -> torch.Tensor:
            return filled(names[parameter], state).flatten()[flat.start : flat.end].clone()

        main.data.copy_(part("param"))
        state = {"exp_avg": part("exp_avg"), "exp_avg_sq": part("exp_avg_sq")}
        optimizer.optimizer.state[main] = {"step": torch.tensor(7.0), **state}


def states_of(optimizer: Any) -> dict[Any, dict[str, torch.Tensor]]:
    """Parameter -> its states on this rank."""
    return {
        parameter: optimizer._get_main_param_and_optimizer_states(parameter)
        for parameter in optimizer.model_param_gbuf_map
    }


def groups_of(job: Ranks) -> list[Group]:
    """The members of one data-parallel group."""
    sent: list[list[torch.Tensor]] = [[] for _ in range(job.dp)]
    return [Group(rank, job.dp, sent) for rank in range(job.dp)]
