"""Objects that return and accept their own state: torch's Stateful protocol.

They may be in any dict or list of a state that is split into entries. A save stores the result of
state_dict(); a load fills it and calls load_state_dict() on the same object.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._protocols import Stateful

Below = Sequence[tuple[str | int, ...]]


def is_stateful(item: Any) -> TypeGuard[Stateful]:
    """Whether an object implements torch's Stateful protocol (modules, optimizers, dataloaders)."""
    return (
        not isinstance(item, type)
        and callable(getattr(item, "state_dict", None))
        and callable(getattr(item, "load_state_dict", None))
    )


def is_optimizer(item: Any) -> bool:
    """Whether an object is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.optim.Optimizer)


def state_of(item: Stateful) -> Any:
    """The state dict of an object."""
    state = item.state_dict()
    if is_stateful(state):
        raise InvalidArgumentError(
            f"state_dict() of a {type(item).__name__} returns a {type(state).__name__}, "
            "which has a state_dict() itself"
        )
    return state


def give_back(loaded: Sequence[tuple[Stateful, Any, Any]]) -> None:
    """Calls load_state_dict() of each object with what was loaded for it.

    Args:
        loaded: for each object, in the order of the tree: the object, the state dict that was its
            template, and what was loaded.

    Raises:
        InvalidArgumentError: an object still has tensors on the meta device afterwards.
    """
    ties = _ties([item for item, *_ in loaded])
    for item, template, made in loaded:
        _give(item, template, made)
    _tie(ties)


def below(item: Stateful, state: Any) -> tuple[Below, Below]:
    """What a load does below an object's key although its state dict does not say so.

    A torch optimizer creates the state of a parameter in its first step. If the parameter is a
    plain tensor, which is whole on every rank, so is its state, and everything that the checkpoint
    holds for it is loaded. How the state of a DTensor is sharded is not known before it exists.

    Returns:
        Paths that are loaded without a template, and empty dicts that stay empty: the state of
        DTensors, and a module without any.
    """
    torch = sys.modules.get("torch")
    if torch is None or not is_optimizer(item):
        return (), [()] if torch is not None and isinstance(item, torch.nn.Module) else ()
    optimizer: Any = item
    try:
        named = [index for group in state["param_groups"] for index in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = state["state"]
    except (KeyError, TypeError):
        return (), [("state",)]
    if len(named) != len(params):
        return (), [("state",)]
    plain = (torch.Tensor, torch.nn.Parameter)
    return [
        ("state", index)
        for index, param in zip(named, params, strict=True)
        if type(index) is int and index not in known and type(param) in plain
    ], [("state",)]


def of_optimizer(state: Mapping[Any, Any], is_objects: bool) -> tuple[Below, Below]:
    """What a load adds to a dict that may be an optimizer's state dict.

    Everything in its groups is loaded: a scheduler adds keys to them. So is the state of its
    parameters if it has none yet, under the keys (ints) by which the groups name them.

    Args:
        is_objects: the dict comes from a torch optimizer, for which `below` has named the state.

    Returns:
        LoadOptions::subtrees and LoadOptions::unmade, below the dict.
    """
    groups, known = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(known, Mapping):
        return (), ()
    named = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    if not all(isinstance(params, list) for params in named):
        return (), ()
    keys = [] if known or is_objects else [key for params in named for key in params or ()]
    return (
        [("param_groups", number) for number in range(len(groups))],
        [("state", key) for key in keys if type(key) in (int, str)],
    )


def _holds_meta(state: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    waiting = [state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            if item.is_meta:
                return True
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
    return False


# A tied parameter or buffer: (its name, the dict of a module that holds it, its name there).
Tie = list[tuple[str, dict[str, Any], str]]


def _ties(items: Sequence[Any]) -> list[Tie]:
    """The parameters and buffers on the meta device that modules hold at several places.

    load_state_dict(assign=True) replaces each place by a new object.
    """
    torch = sys.modules.get("torch")
    places: dict[int, Tie] = {}
    for item in items:
        is_module = torch is not None and isinstance(item, torch.nn.Module)
        modules = item.named_modules() if is_module else ()
        for path, module in modules:
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        full = f"{path}.{name}" if path else name
                        places.setdefault(id(tensor), []).append((full, held, name))
    return [tie for tie in places.values() if len(tie) > 1]


def _tie(ties: Sequence[Tie]) -> None:
    """Makes one object of each tie again.

    Raises:
        MismatchError: the objects were loaded with different values.
    """
    for places in ties:
        filled = [place for place in places if not place[1][place[2]].is_meta]
        if not filled:
            continue
        first, of_first, name = filled[0]
        kept = of_first[name]
        for full, held, other in places:
            found = held[other]
            if found is not kept and not found.is_meta and not _same(found, kept):
                raise MismatchError(
                    f'the parameter is tied to "{first}", but the checkpoint has different values '
                    "for the two",
                    key=full,
                    hint="load the two into a model that does not tie them",
                )
            held[other] = kept


def _same(one: Any, other: Any) -> bool:
    if type(one) is type(other) and hasattr(one, "_local_tensor"):
        one, other = one._local_tensor, other._local_tensor
    if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
        return True
    return one.shape == other.shape and bool((one == other).all())


def _assigning(item: Any, loaded: Any) -> Any:
    """`loaded` for load_state_dict(assign=True): parameters with memory stay the same objects."""
    kept = dict(item.named_parameters(remove_duplicate=False))
    for name, parameter in kept.items():
        if name in loaded and not parameter.is_meta and not loaded[name].is_meta:
            if parameter.untyped_storage() is loaded[name].untyped_storage():
                loaded[name] = parameter
    return loaded


def _give(item: Stateful, template: Any, loaded: Any) -> None:
    if not _holds_meta(template):
        item.load_state_dict(loaded)
        return
    assigns = "assign" in inspect.signature(item.load_state_dict).parameters
    if assigns:
        module: Any = item
        module.load_state_dict(_assigning(item, loaded), assign=True)
    else:
        item.load_state_dict(loaded)
    if _holds_meta(item.state_dict()):
        raise InvalidArgumentError(
            f"{type(item).__name__} still has tensors on torch's meta device after "
            "load_state_dict(): the loaded data is lost",
            hint="allocate its memory before the load (to_empty), or use a dict in its place",
        )
