"""A small Megatron-Core GPT, its optimizer, and weights whose values don't depend on the layout.

Call everything here inside on_cpu() and laid_over() of the module on_cpu.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from on_cpu import Layout

# Returns the whole tensor for a key and a global shape.
Value = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's sizes and features. Every size must be divisible by the Layout's sizes.

    Attributes:
        experts: number of experts in each layer; 0 for a dense model.
        grouped: store the experts as one weight instead of a list.
        gated: SwiGLU, without biases.
        tied: the output layer shares the embedding's weight.
        rotary: rotary positions instead of learned ones.
        half: weights in bfloat16.
        dropout: dropout rate of hidden states and attention.
    """

    layers: int = 4
    width: int = 32
    heads: int = 4
    vocabulary: int = 64
    context: int = 16
    experts: int = 0
    grouped: bool = False
    gated: bool = False
    tied: bool = False
    rotary: bool = False
    half: bool = False
    dropout: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.half else torch.float32


def config_of(shape: Shape, layout: Layout) -> Any:
    """Megatron-Core's TransformerConfig.

    It does not set context parallelism, which Megatron-Core's own attention does not support. Only
    the groups use it, and no weight depends on it.
    """
    from megatron.core.transformer import TransformerConfig

    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": 2,
            "moe_grouped_gemm": shape.grouped,
            "moe_ffn_hidden_size": 2 * shape.width,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "sequence_parallel": layout.tp > 1,  # Megatron-Core requires it for experts under TP
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        ffn_hidden_size=2 * shape.width,
        num_attention_heads=shape.heads,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=not (shape.gated or shape.grouped),
        use_cpu_initialization=True,
        params_dtype=shape.dtype,
        pipeline_dtype=shape.dtype,
        bf16=shape.half,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        **experts,
    )


def make_chunks(shape: Shape, layout: Layout) -> list[Any]:
    """This rank's GPTModels: one for each virtual pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = config_of(shape, layout)
    spec = get_gpt_layer_local_spec(shape.experts or None, shape.grouped)
    chunks = []
    for chunk in range(layout.vpp):
        model = GPTModel(
            config,
            spec,
            shape.vocabulary,
            shape.context,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope" if shape.rotary else "learned_absolute",
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        chunks.append(model)
    return chunks


def wrapped(chunks: list[Any], bucket: int | None = None, **options: Any) -> list[Any]:
    """Wraps the model chunks in Megatron-Core's DistributedDataParallel.

    Args:
        chunks: the result of make_chunks().
        bucket: number of elements of a gradient bucket. None uses one bucket for all.
        options: options of DistributedDataParallelConfig.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    result = []
    for chunk in chunks:
        config = chunk.config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16,
            overlap_grad_reduce=bucket is not None,
            bucket_size=bucket,
            **options,
        )
        inner = Float16Module(config, chunk) if config.bf16 else chunk
        result.append(DistributedDataParallel(config, ddp, inner))
    return result


def make_optimizer(models: list[Any], distributed: bool = True) -> Any:
    """Megatron-Core's optimizer for the models of wrapped(): Adam, without gradient clipping."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = models[0].config
    options = OptimizerConfig(
        lr=0.01,
        min_lr=0.0,
        weight_decay=0.01,
        clip_grad=0.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    return get_megatron_optimizer(options, models)


def unwrapped(model: Any) -> Any:
    """The GPTModel without the wrappers of wrapped(), which put `module.` before its keys."""
    while hasattr(model, "module"):
        model = model.module
    return model


def model_state(models: list[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The chunks' sharded state dicts under the keys of Megatron's training: model, or model0, …"""
    states = [unwrapped(m).sharded_state_dict(metadata=dict(metadata or {})) for m in models]
    if len(states) == 1:
        return {"model": states[0]}
    return {f"model{number}": state for number, state in enumerate(states)}


def load_models(models: list[Any], state: dict[str, Any]) -> None:
    """Copies a loaded model_state() into the chunks."""
    for number, model in enumerate(models):
        name = "model" if len(models) == 1 else f"model{number}"
        unwrapped(model).load_state_dict(state[name], strict=True)


# Values that depend on key and position only, not on the layout.


@functools.lru_cache(maxsize=None)
def known(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random numbers. The key is the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def initial(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Initial weights: small random numbers, and norm scales near 1."""
    is_scale = "norm" in key and key.endswith("weight")
    return 0.1 * known(key, shape) + is_scale


def entities(tree: Any) -> Iterator[Any]:
    """The sharded tensors and factories of a state dict that have data."""
    if isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from entities(item)
    elif is_entity(tree):
        yield tree


def is_entity(item: Any) -> bool:
    """Whether the item is a sharded tensor or factory that has data."""
    named = hasattr(item, "axis_fragmentations") or hasattr(item, "merge_fn")
    return named and isinstance(item.data, torch.Tensor)


def local_value(entity: Any, value: Value) -> torch.Tensor:
    """The entity's part of the whole tensor that `value` returns for its key."""
    if hasattr(entity, "merge_fn"):
        return entity.merge_fn(_local_values(entity.build(), value))
    whole = value(entity.key, tuple(entity.global_shape))
    sizes = (1,) * entity.prepend_axis_num + tuple(entity.local_shape)
    box = tuple(slice(o, o + n) for o, n in zip(entity.global_offset, sizes, strict=True))
    return whole[box].reshape(entity.local_shape).to(entity.dtype)


def _local_values(tree: Any, value: Value) -> Any:
    if isinstance(tree, dict):
        return {key: _local_values(item, value) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_local_values(item, value) for item in tree]
    if hasattr(tree, "global_shape"):
        return local_value(tree, value)
    return tree.unwrap() if hasattr(tree, "unwrap") else tree


def filled(tree: Any, value: Value) -> Any:
    """The state dict that a load returns from a checkpoint with these values."""
    if isinstance(tree, dict):
        return {key: filled(item, value) for key, item in tree.items()}
    if isinstance(tree, list):
        return [filled(item, value) for item in tree]
    if is_entity(tree):
        return local_value(tree, value)
    if hasattr(tree, "unwrap"):
        return tree.unwrap()
    return tree.data if hasattr(tree, "replica_id") else tree


@torch.no_grad()
def fill(models: list[Any], value: Value) -> None:
    """Sets every weight to its value."""
    for entity in entities(model_state(models)):
        entity.data.copy_(local_value(entity, value))


@torch.no_grad()
def differences(tree: Any, value: Value) -> list[str]:
    """Keys of the entities whose data differs from the value in any bit."""
    return [
        entity.key
        for entity in entities(tree)
        if not torch.equal(entity.data, local_value(entity, value).to(entity.data.dtype))
    ]


# Training.

SEQUENCES = 4  # per step, divided among the data-parallel ranks; a rank takes one at a time


def sequences_of(step: int, shape: Shape, part: int, parts: int) -> Iterator[torch.Tensor]:
    """A data-parallel rank's sequences of a step. All ranks' sequences don't depend on `parts`."""
    for number in range(part * SEQUENCES // parts, (part + 1) * SEQUENCES // parts):
        generator = torch.Generator().manual_seed(1000 * step + number)
        start, stride = torch.randint(shape.vocabulary, (2,), generator=generator).tolist()
        yield (start + stride * torch.arange(shape.context + 1)).remainder(shape.vocabulary)[None]


def _forward_step(sequences: Iterator[torch.Tensor], model: Any) -> Any:
    sequence = next(sequences)
    tokens, labels = sequence[:, :-1], sequence[:, 1:].contiguous()
    places = torch.arange(tokens.shape[1])[None]

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return model(tokens, places, None, labels=labels), loss_of


def train_step(models: list[Any], optimizer: Any, shape: Shape, step: int) -> float | None:
    """Runs one step of Megatron-Core's schedule.

    Returns the mean loss on ranks of the last pipeline stage, None on the others.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    part = parallel_state.get_data_parallel_rank()
    parts = parallel_state.get_data_parallel_world_size()
    config = models[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[sequences_of(step, shape, part, parts) for _ in models],
        model=models,
        num_microbatches=SEQUENCES // parts,
        seq_length=shape.context,
        micro_batch_size=1,
    )
    optimizer.step()
    return float(sum(loss["loss"] for loss in losses)) / len(losses) if losses else None
