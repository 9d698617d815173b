"""Makes the layouts of a job's buckets from its model, in one process, without memory for weights.

A checkpoint with buckets says nothing about the model. `model_layouts` builds the model of each
model-parallel rank on the meta device, and packs its parameters as Megatron-Core does. Megatron-Core
must be installed; a GPU is not needed.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from tilestone._errors import InvalidArgumentError
from tilestone.megatron.distributed_optimizer.layout import Buffer, Dtypes, Layout, pack, to_json
from tilestone.megatron.distributed_optimizer.pieces import Entity, entities_by_data
from tilestone.megatron.optimizer import KEEP_VARS_HINT

_INSTANCES = "num_distributed_optimizer_instances"
_LAYOUTS = "optimizer_layouts"  # in the file, which engine/read/optimizer_layout.cc reads


def write_layouts(path: Union[str, os.PathLike[str]], layouts: Iterable[Layout]) -> None:
    """Writes layouts to a JSON file, for load_optimizer() and `tilestone convert --layout`.

    Args:
        path: the new file; an old one is replaced.
        layouts: those of all model-parallel ranks of a job, as model_layouts() returns them.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_json(layouts))


def model_layouts(
    make_model: Callable[[], Any],
    ddp_config: Any,
    world_size: int,
    *,
    metadata: Optional[Mapping[str, Any]] = None,
    **parallel_sizes: Any,
) -> list[Layout]:
    """Makes the layouts of all model-parallel ranks of a job, in one process on the CPU.

    Args:
        make_model: makes this rank's model as the job made it: a module, or the list of the chunks
            of a virtual pipeline, with or without Float16Module. It is called once for each
            model-parallel rank, on the meta device, while Megatron-Core's `parallel_state` is
            initialized for that rank. The model's config must set `use_cpu_initialization` or unset
            `perform_initialization`.
        ddp_config: the job's DistributedDataParallelConfig. `overlap_grad_reduce`, `bucket_size`,
            `grad_reduce_in_fp32` and `pad_buckets_for_high_nccl_busbw` are read.
        world_size: number of the job's ranks.
        metadata: passed to the model's `sharded_state_dict`, as the job did.
        parallel_sizes: the job's arguments of `parallel_state.initialize_model_parallel`, such as
            `tensor_model_parallel_size`.

    Returns:
        a layout for each model-parallel rank; with experts, two: their optimizer is the second one
        of a chain.

    Raises:
        CheckpointingException: torch.distributed is already initialized in this process, the sizes
            do not divide the world, or a parameter is not in the model's state dict.
    """
    if dist.is_initialized():
        raise InvalidArgumentError(
            "torch.distributed is already initialized; model_layouts initializes it for each rank "
            "of the job, so call it in a process of its own"
        )
    found: dict[tuple[Optional[int], int], Layout] = {}
    mine: dict[tuple[bool, int], list[Buffer]] = {}
    # Layouts do not depend on the number of replicas, so a world with one of each model is enough.
    world, replicas, data_parallel = _smallest_world(world_size, parallel_sizes)
    for rank in range(world):
        with _as_rank(rank, world, parallel_sizes) as (group, expert_group, stage):
            if (False, group) in mine and (True, expert_group) in mine:
                continue
            with _on_meta():
                model = make_model()
                chunks = list(model) if isinstance(model, (list, tuple)) else [model]
                states = [_sharded(chunk, metadata) for chunk in chunks]
            for experts, place in ((False, group), (True, expert_group)):
                sizes = _Sizes(ddp_config, replicas[experts], data_parallel, stage)
                mine[experts, place] = [
                    buffer
                    for number, (chunk, state) in enumerate(zip(chunks, states))
                    for buffer in _buffers(chunk, state, experts, sizes, number)
                ]
    chained = any(buffers for (experts, _), buffers in mine.items() if experts)
    for (experts, place), buffers in mine.items():
        number = int(experts) if chained else None
        if buffers:
            found[number, place] = Layout(tuple(buffers), place, number)
    return [found[each] for each in sorted(found, key=lambda each: (each[0] or 0, each[1]))]


class _Sizes:
    """What the buckets of a model chunk depend on, besides its parameters."""

    def __init__(self, config: Any, replicas: int, data_parallel: int, stage: int) -> None:
        self.replicas = replicas
        self.in_float32 = bool(config.grad_reduce_in_fp32)
        self.bucket: Optional[int] = None
        if config.overlap_grad_reduce and stage == 0:
            size = config.bucket_size
            self.bucket = max(40_000_000, 1_000_000 * data_parallel) if size is None else size
        wide = getattr(config, "pad_buckets_for_high_nccl_busbw", False)
        self.multiple = 1 << 16 if wide else 128


def _smallest_world(
    world_size: int, sizes: Mapping[str, Any]
) -> tuple[int, tuple[int, int], int]:
    """The sizes that follow from the job's.

    Returns:
        ranks of a world with every model-parallel rank; the numbers of ranks among which buckets of
        dense parameters and of experts are divided; the data-parallel size.
    """
    tp = sizes.get("tensor_model_parallel_size", 1)
    pp = sizes.get("pipeline_model_parallel_size", 1)
    cp = sizes.get("context_parallel_size", 1)
    ep = sizes.get("expert_model_parallel_size", 1)
    etp = sizes.get("expert_tensor_parallel_size") or tp
    dense, experts = tp * cp, etp * ep
    if world_size % (dense * pp) or world_size % (experts * pp):
        raise InvalidArgumentError(
            f"{world_size} ranks can't be divided into models of {dense * pp} ranks, with experts "
            f"of {experts * pp}"
        )
    replicas = (world_size // (tp * pp), world_size // (experts * pp))
    return math.lcm(dense, experts) * pp, replicas, world_size // (dense * pp)


@contextlib.contextmanager
def _as_rank(
    rank: int, world: int, sizes: Mapping[str, Any]
) -> Iterator[tuple[int, int, int]]:
    """Initializes Megatron-Core as on a rank, without other processes.

    Yields:
        the rank's number in its model, in its model with experts, and its pipeline stage.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel_state = importlib.import_module("megatron.core.parallel_state")
    # One instance: the small world has no others, and they hold the same.
    sizes = {name: value for name, value in sizes.items() if name != _INSTANCES}

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(**{"create_gloo_process_groups": False, **sizes})
        yield (
            parallel_state.get_model_parallel_group().rank(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group().rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


class _KeepOnMeta(torch.overrides.TorchFunctionMode):
    """Makes tensors on the meta device although the model names a GPU or the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.cpu:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment,return-value]
    try:
        with torch.device("meta"), _KeepOnMeta():
            yield
    finally:
        torch.cuda.current_device = current_device


def _sharded(chunk: Any, metadata: Optional[Mapping[str, Any]]) -> dict[int, Entity]:
    """The entities of a chunk's parameters, by the parameters' ids."""
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    return entities_by_data(model.sharded_state_dict(metadata=dict(metadata or {})))


def _buffers(
    chunk: Any, entities: Mapping[int, Entity], experts: bool, sizes: _Sizes, number: int
) -> Iterator[Buffer]:
    """The buffers of a chunk's parameters, as DistributedDataParallel makes them."""
    by_dtypes: dict[Dtypes, list[Entity]] = {}
    alone = set()
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad or getattr(parameter, "allreduce", True) == experts:
            continue
        entity = entities.get(id(parameter))
        if entity is None:
            raise InvalidArgumentError(
                f"the parameter {name} is not in the model's state dict." + KEEP_VARS_HINT
            )
        dtype = _trained_dtype(chunk, parameter)
        gradients = torch.float32 if sizes.in_float32 else dtype
        by_dtypes.setdefault((dtype, gradients), []).append(entity)
        if getattr(parameter, "shared_embedding", False):
            alone.add(entity.key)
    for dtypes, packed in by_dtypes.items():
        yield pack(
            packed,
            sizes.replicas,
            dtypes,
            sizes.bucket if number == 0 else None,
            alone=alone,
            bucket_multiple=sizes.multiple,
        )


def _trained_dtype(chunk: Any, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that Float16Module gives a parameter."""
    config = getattr(chunk, "config", None)
    if parameter.is_floating_point():
        if getattr(config, "fp16", False):
            return torch.float16
        if getattr(config, "bf16", False):
            return torch.bfloat16
    return parameter.dtype
