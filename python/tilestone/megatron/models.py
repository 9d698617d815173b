"""Builds sharded state dicts of models from their parts.

The functions that have a name of Megatron-Core 0.16 have its parameters, defaults and results:

- `megatron.core.utils`: make_tp_sharded_tensor_for_checkpoint, make_sharded_tensor_for_checkpoint
- `megatron.core.transformer.utils`: make_sharded_tensors_for_checkpoint,
  make_sharded_object_for_checkpoint, sharded_state_dict_default, ensure_metadata_has_dp_cp_group
- `megatron.core.transformer.mlp`: apply_swiglu_sharded_factory
- `megatron.core.transformer.multi_token_prediction`: tie_word_embeddings_state_dict,
  tie_output_layer_state_dict

The other functions do what methods of Megatron-Core's modules do. Each function looks up the groups
that it needs (`tilestone.megatron.groups`). Each ShardedTensor records which ranks hold the same
shard.
"""

from tilestone.megatron._experts import (
    grouped_experts_state_dict,
    grouped_linear_state_dict,
    sequential_experts_state_dict,
)
from tilestone.megatron._factories import apply_qkv_sharded_factory, apply_swiglu_sharded_factory
from tilestone.megatron._layers import (
    allow_vocab_padding,
    sharded_layers_state_dict,
    tie_embeddings_and_output_weights_state_dict,
    tie_output_layer_state_dict,
    tie_word_embeddings_state_dict,
)
from tilestone.megatron._model_tensors import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    sharded_state_dict_default,
)

__all__ = [
    "allow_vocab_padding",
    "apply_qkv_sharded_factory",
    "apply_swiglu_sharded_factory",
    "ensure_metadata_has_dp_cp_group",
    "grouped_experts_state_dict",
    "grouped_linear_state_dict",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensor_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "sequential_experts_state_dict",
    "sharded_layers_state_dict",
    "sharded_state_dict_default",
    "tie_embeddings_and_output_weights_state_dict",
    "tie_output_layer_state_dict",
    "tie_word_embeddings_state_dict",
]
