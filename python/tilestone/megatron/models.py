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

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Dict, Optional, Tuple

import torch

from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone.megatron._models.experts import (
    grouped_experts_state_dict,
    grouped_linear_state_dict,
    sequential_experts_state_dict,
)
from tilestone.megatron._models.factories import (
    apply_qkv_sharded_factory,
    apply_swiglu_sharded_factory,
)
from tilestone.megatron._models.tensors import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    metadata_with_dp_cp_group,
    sharded_state_dict_default,
)
from tilestone.megatron.groups import find_group
from tilestone.megatron.mapping import ShardedStateDict
from tilestone.megatron.utils import replace_prefix_for_sharding

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


def sharded_layers_state_dict(
    layers: Sequence[torch.nn.Module],
    prefix: str = "layers.",
    metadata: Optional[Dict[Any, Any]] = None,
    *,
    first_layer: int,
    num_layers: int,
    non_homogeneous_layers: Optional[bool] = None,
    tp_group: Any = None,
) -> ShardedStateDict:
    """Makes the sharded state dict of a stage's layers, as Megatron's TransformerBlock does.

    Homogeneous layers are stored as one tensor for each weight, with the layer's number as the
    index on its first axis. So they load with any pipeline parallelism. Other layers have their
    number in the keys: PREFIX3.NAME.

    Args:
        layers: the layers of this rank, or of one of its virtual stages, in order.
        prefix: prefix of the keys. In the dict the layer's index in `layers` follows it.
        metadata: passed to the layers; its "dp_cp_group" is looked up if it is absent.
        first_layer: number of the first of these layers in the whole model, from 0.
        num_layers: number of layers of the whole model.
        non_homogeneous_layers: put the numbers into the keys; None: as the metadata's entry of this
            name says. The numbers are always in the keys if the metadata has
            "singleton_local_shards".
        tp_group: for layers without a method sharded_state_dict, looked up by
            `groups.find_group`.

    Raises:
        CheckpointingException: the layers exceed the model's, a number is not an int, a group is
            not known, or a layer raises it.
    """
    first_layer = valid.whole("first_layer", first_layer)
    num_layers = valid.whole("num_layers", num_layers)
    if not 0 <= first_layer <= first_layer + len(layers) <= num_layers:
        raise InvalidArgumentError(
            f"{len(layers)} layers from {first_layer} on are not within the model's {num_layers} "
            "layers",
            key=prefix,
        )
    said = metadata or {}
    if non_homogeneous_layers is None:
        non_homogeneous_layers = bool(said.get("non_homogeneous_layers", False))
    numbered = non_homogeneous_layers or bool(said.get("singleton_local_shards", False))
    sharded: ShardedStateDict = {}
    for local, layer in enumerate(layers):
        metadata = metadata_with_dp_cp_group(metadata, layer)
        number = first_layer + local
        in_dict, offsets = f"{prefix}{local}.", () if numbered else ((0, number, num_layers),)
        made = sharded_state_dict_default(layer, in_dict, offsets, metadata, tp_group=tp_group)
        replace_prefix_for_sharding(made, in_dict, f"{prefix}{number}." if numbered else prefix)
        sharded.update(made)
    return sharded


def allow_vocab_padding(sharded_state_dict: ShardedStateDict, keys: Iterable[str]) -> None:
    """Lets tensors with a padded vocabulary load at another size, in place.

    Rows that are not in the checkpoint are loaded as zeros; surplus rows of the checkpoint are left
    out.

    Args:
        sharded_state_dict: of a model.
        keys: keys in the dict: embedding, output weight and bias. Keys that are not in it are
            ignored, because other stages have them.

    Raises:
        CheckpointingException: keys is a str, or an entry is not a ShardedTensor.
    """
    if isinstance(keys, str):
        raise InvalidArgumentError(f"keys must be a list of keys, not the str {keys!r}", key=keys)
    for key in keys:
        if key not in sharded_state_dict:
            continue
        if not hasattr(sharded_state_dict[key], "allow_shape_mismatch"):
            kind = type(sharded_state_dict[key]).__name__
            raise InvalidArgumentError(
                f"a {kind} has no allow_shape_mismatch: allow it before a factory is made", key=key
            )
        sharded_state_dict[key].allow_shape_mismatch = True


def tie_word_embeddings_state_dict(
    sharded_state_dict: ShardedStateDict,
    word_emb_weight: torch.Tensor,
    word_emb_weight_key: str,
    tp_group: Any,
    dp_cp_group: Any,
) -> None:
    """Makes the word embedding of a later stage a replica of the first stage's, in place.

    Args:
        sharded_state_dict: of a stage for multi-token prediction, which has its own embedding.
        word_emb_weight: weight of that embedding.
        word_emb_weight_key: key of the weight in the dict; also the key of the first stage's
            embedding in the checkpoint.
        tp_group, dp_cp_group: looked up by `groups.find_group`.

    Raises:
        CheckpointingException: the state dict has no such key, or a group is not known.
    """
    _tie(
        sharded_state_dict, word_emb_weight, word_emb_weight_key, word_emb_weight_key,
        tp_group, dp_cp_group,
    )  # fmt: skip


def tie_output_layer_state_dict(
    sharded_state_dict: ShardedStateDict,
    output_layer_weight: torch.Tensor,
    output_layer_weight_key: str,
    tp_group: Any,
    dp_cp_group: Any,
) -> None:
    """Makes the output layer of a stage a replica of the last stage's, in place.

    Args:
        sharded_state_dict: of a stage for multi-token prediction, which has its own output layer.
        output_layer_weight: weight of that layer.
        output_layer_weight_key: key of the weight in the dict and in the checkpoint.
        tp_group, dp_cp_group: looked up by `groups.find_group`.

    Raises:
        CheckpointingException: the state dict has no such key, or a group is not known.
    """
    _tie(
        sharded_state_dict, output_layer_weight, output_layer_weight_key, output_layer_weight_key,
        tp_group, dp_cp_group,
    )  # fmt: skip


def tie_embeddings_and_output_weights_state_dict(
    sharded_state_dict: ShardedStateDict,
    output_layer_weight: torch.Tensor,
    output_layer_weight_key: str,
    first_stage_word_emb_key: str,
    *,
    tp_group: Any = None,
    dp_cp_group: Any = None,
) -> None:
    """Makes the last stage's output weight a replica of the first stage's embedding, in place.

    Call it on the last stage. The entry gets the embedding's key and the replica id (1, 0, rank in
    dp_cp), so the ranks of the first stage write the tensor. Its holders are not known. If the last
    stage is also the first one, it has the embedding already, and the entry of the output is
    removed.

    Args:
        sharded_state_dict: of the last stage's model.
        output_layer_weight: the shared weight.
        output_layer_weight_key: key in the dict of the output layer's weight.
        first_stage_word_emb_key: key of the embedding in the checkpoint.
        tp_group, dp_cp_group: looked up by `groups.find_group`.

    Raises:
        CheckpointingException: a group is not known.
    """
    if first_stage_word_emb_key in sharded_state_dict:
        sharded_state_dict.pop(output_layer_weight_key, None)
        return
    sharded_state_dict.setdefault(output_layer_weight_key, None)
    _tie(
        sharded_state_dict, output_layer_weight, output_layer_weight_key, first_stage_word_emb_key,
        tp_group, dp_cp_group,
    )  # fmt: skip


def _tie(
    sharded_state_dict: ShardedStateDict,
    weight: torch.Tensor,
    entry: str,
    key: str,
    tp_group: Any,
    dp_cp_group: Any,
) -> None:
    """Replaces an entry by a replica of another stage's tensor."""
    if entry not in sharded_state_dict:
        raise InvalidArgumentError("the state dict does not have the entry to be tied", key=entry)
    dp_cp = find_group("dp_cp", dp_cp_group)
    is_divided = any(each.is_shard() for each in getattr(weight, "placements", ()))
    replica_id: Tuple[int, ...] = (1, 0, 0 if is_divided else dp_cp.rank())
    sharded_state_dict[entry] = make_tp_sharded_tensor_for_checkpoint(
        weight,
        key,
        replica_id=replica_id,
        allow_shape_mismatch=True,
        tp_group=tp_group,
        dp_cp_group=dp_cp,
    )
