"""A sharded state dict, taken apart before a save or load. The caller's own is not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Tuple

from tilestone.megatron.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
)
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from tilestone.megatron.utils import (
    _clean_metadata_for_serialization,
    extract_nonpersistent,
    extract_sharded_base,
)
from tilestone.megatron.validation import determine_global_metadata, validate_sharding_integrity


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
) -> Tuple[ShardedStateDict, CommonStateDict]:
    """What a save stores: factories built, non-persistent objects left out, and divided in two.

    Args:
        sharded_state_dict: the state; it stays as it is (Megatron-Core builds factories in it).
        validate_access_integrity: check over all ranks that the parts make whole tensors and
            objects, and log where common state differs; every rank calls then.
        preprocess_common_before_consistancy_check: of a copy of the common state, makes what is
            compared between ranks.

    Returns:
        (entities, common state). Slices of flattened tensors that hold nothing are left out;
        "content_metadata" in the common state has no process group in it.

    Raises:
        CheckpointingException: the parts don't make whole tensors and objects; on every rank.
    """
    built = dict_list_map_outplace(lambda item: item, sharded_state_dict)
    apply_factories(built)
    _, persistent = extract_nonpersistent(built)
    sharded, common = extract_sharded_base(persistent)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if "content_metadata" in common:
        common["content_metadata"] = _clean_metadata_for_serialization(common["content_metadata"])
    if validate_access_integrity:
        compared = common
        if preprocess_common_before_consistancy_check:
            copied = dict_list_map_outplace(lambda item: item, common)
            compared = preprocess_common_before_consistancy_check(copied)
        validate_sharding_integrity(
            determine_global_metadata(sharded)[1], common_state_dict=compared
        )
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> Tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """What a load asks for, and what it puts back in place afterwards.

    Args:
        sharded_state_dict: the template; it stays as it is.

    Returns:
        (the template with factories built, without non-persistent objects and slices of flattened
        tensors that hold nothing; the non-persistent values; the factories, without data, where
        lists are dicts from index to factory)
    """
    template, _ = extract_matching_values(sharded_state_dict, lambda _: True)
    template = filter_out_empty_flatten_tensor(template)
    factories, _ = extract_matching_values(
        template, lambda item: isinstance(item, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(template)
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    nonpersistent, template = extract_nonpersistent(template)
    dict_list_map_inplace(lambda item: item.unwrap(), nonpersistent)
    return template, nonpersistent, factories


def _holds_nothing(item: Any) -> bool:
    flat = getattr(item, "flattened_range", None) if isinstance(item, ShardedTensor) else None
    return flat is not None and flat.start == flat.stop


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """The state without slices of flattened tensors that hold nothing; the argument stays."""
    filtered, _ = extract_matching_values(
        sharded_state_dict, lambda item: not _holds_nothing(item)
    )
    return filtered
