"""Takes a sharded state dict apart before a save or load. The caller's dict is not changed."""

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
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from tilestone.megatron.utils import (
    _clean_metadata_for_serialization,
    extract_nonpersistent,
    extract_sharded_base,
    is_empty_slice,
)
from tilestone.megatron.validation import determine_global_metadata, validate_sharding_integrity


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
) -> Tuple[ShardedStateDict, CommonStateDict]:
    """Returns what a save stores: factories are built, non-persistent objects are left out.

    Args:
        sharded_state_dict: the state; it is not changed (Megatron-Core builds factories in it).
        validate_access_integrity: check over all ranks that the parts make whole tensors and
            objects, and log where common state differs; every rank must then call.
        preprocess_common_before_consistancy_check: takes a copy of the common state and returns
            what the ranks compare.

    Returns:
        (entities, common state). Empty slices of flattened tensors are left out;
        "content_metadata" in the common state has no process group.

    Raises:
        CheckpointingException: the parts do not make whole tensors and objects; on every rank.
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
    """Divides a template into what a load requests and what is put into its result afterwards.

    Args:
        sharded_state_dict: the template; it is not changed.

    Returns:
        (the template with factories built, without non-persistent objects and empty slices of
        flattened tensors; the non-persistent values; the factories without data, in a tree whose
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


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """Returns the state without empty slices of flattened tensors; the argument is not changed."""
    filtered, _ = extract_matching_values(
        sharded_state_dict, lambda item: not is_empty_slice(item)
    )
    return filtered
