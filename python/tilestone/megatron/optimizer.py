"""Shards optimizer states in the same way as the model's parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._objects import entities
from tilestone.megatron import _ranks
from tilestone.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from tilestone.megatron.utils import entities_by_path

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " Make the model's state dict with `.state_dict(keep_vars=True)`, so that it holds the"
    " parameters themselves and not other tensors over their memory. If a parameter is stored"
    " in another form, use a ShardedTensorFactory."
)


_EXCLUDE_HINT = (
    "put the name of a state that is not a tensor of the parameter's shape (such as torch's `step`)"
    " into exclude_keys, and save that state separately"
)


# Entities of tensors: Megatron-Core's, and Tilestone's own (`from_param`).
_TENSORS = (
    ShardedTensor, ShardedTensorFactory,
    entities.ShardedTensor, entities.ShardedTensorFactory,
)  # fmt: skip


def _local(tensor: Any) -> Any:
    """A DTensor's local tensor, always the same object; any other value is returned unchanged."""
    if isinstance(tensor, torch.Tensor) and hasattr(tensor, "to_local"):
        # From torch 2.13 on, to_local() of a parameter makes a new tensor each time.
        own = getattr(tensor, "_local_tensor", None)
        with torch.no_grad():
            return tensor.to_local() if own is None else own
    return tensor


def _memory(tensor: torch.Tensor) -> Tuple[Any, ...]:
    """Identifies a tensor's elements in memory: equal only for tensors with the same elements."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Maps id() of each parameter to the parameter's number in the optimizer's order.

    For a DTensor it is the id() of its local tensor. A parameter that occurs twice has the number
    of its first place.
    """
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Any]:
    """Maps each parameter's number in the optimizer to the model's entity of the parameter.

    Args:
        model_sharded_state_dict: of any nesting. The entities' data must be the parameters
            themselves; for a parameter that is a DTensor, its local tensor or the result of its
            to_local().
        optim_params_iter: the parameters in the optimizer's order.

    Returns:
        entities by number. Parameters without an entity are left out. If no entity is found, a
        warning is logged.
    """
    parameters = list(optim_params_iter)
    numbers = get_optim_param_to_id_map(parameters)
    places: dict[Any, int] = {}
    for number, parameter in enumerate(parameters):
        if hasattr(parameter, "to_local"):
            places.setdefault(_memory(_local(parameter)), number)
    found = {}
    for path, entity in entities_by_path(model_sharded_state_dict):
        if not isinstance(entity, _TENSORS):
            continue
        data = _local(entity.data)
        place = numbers.get(id(data))
        if place is None and places and isinstance(data, torch.Tensor):
            place = places.get(_memory(data))
        if place is None:
            logger.debug(f"{entity} is not tracked by the optimizer")
        else:
            found[place] = entity
            if hasattr(entity, "found_at"):
                entity.found_at(path)
    if not found and _ranks.rank() == 0:
        logger.warning(
            "Sharded parameters mapping is empty: no tensor of the model's state dict is a"
            " parameter of the optimizer." + KEEP_VARS_HINT
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: Union[ShardedTensor, ShardedTensorFactory], optim_param: torch.Tensor, prefix: str
) -> Union[ShardedTensor, ShardedTensorFactory]:
    """Makes the entity of an optimizer's state: at the parameter's place, under its own key.

    Args:
        model_param: the parameter's entity: Megatron-Core's or Tilestone's.
        optim_param: the state, of the parameter's local shape and any dtype.
        prefix: put before the parameter's key, with a dot between them.

    Raises:
        CheckpointingException: the state is not a tensor, or its shape is not the parameter's.
    """
    given, optim_param = optim_param, _local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if not isinstance(optim_param, torch.Tensor):
        kind = type(optim_param).__name__
        raise MismatchError(
            f"optimizer state is a {kind}, not a tensor", key=key, hint=_EXCLUDE_HINT
        )
    if isinstance(model_param, entities.ShardedTensor):
        return model_param.of_state(prefix, given)
    if isinstance(model_param, entities.ShardedTensorFactory):
        _check_shape(key, optim_param, getattr(model_param.data, "shape", None))
        made = copy(model_param)
        made.key, made.data = key, optim_param
        return made
    if isinstance(model_param, ShardedTensorFactory):
        _check_shape(key, optim_param, getattr(model_param.data, "shape", None))
        return replace(model_param, key=key, data=optim_param)
    _check_shape(key, optim_param, model_param.local_shape)
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def _check_shape(key: str, optim_param: torch.Tensor, expected: Any) -> None:
    """Refuses a state whose shape is not its parameter's; None: that shape is not known."""
    if expected is not None and tuple(optim_param.shape) != tuple(expected):
        raise MismatchError(
            f"optimizer state of shape {tuple(optim_param.shape)} belongs to a parameter of local "
            f"shape {tuple(expected)}",
            key=key,
            hint=_EXCLUDE_HINT,
        )


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, ShardedTensor],
    exclude_keys: Tuple[str, ...] = (),
) -> None:
    """Replaces an optimizer's states by entities, in place.

    A state `exp_avg` of a parameter with key `k` gets the key `optimizer.state.exp_avg.k`. The
    lists of parameters in the groups are not stored: a load returns the caller's.

    Args:
        optim_state_dict: state dict of one of torch's optimizers: "state" and "param_groups".
        id_to_sharded_param_map: the model's entities, see get_param_id_to_sharded_param_map.
        exclude_keys: names of states to leave out; a single name may be a str.

    Raises:
        ValueError: the map lacks a parameter that has states; then nothing is changed.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    sharded: dict[Any, dict[Any, Any]] = {}
    for number, states in optim_state_dict["state"].items():
        kept = {name: state for name, state in states.items() if name not in excluded}
        if kept and number not in id_to_sharded_param_map:
            raise InvalidArgumentError(
                f"Param id {number} does not match any model sharded param." + KEEP_VARS_HINT
            )
        sharded[number] = {
            name: make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], state, f"optimizer.state.{name}"
            )
            for name, state in kept.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = sharded
