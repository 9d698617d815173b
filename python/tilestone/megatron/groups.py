"""Process groups of Megatron's parallelism, looked up one by one.

Each group is looked up on its own, in this order: the caller's argument; the module's group; the
group in the metadata (only dp_cp); Megatron's own group, if the program has initialised
`parallel_state`. If none of these exists, the group is this rank alone if there are no other ranks;
otherwise an error is raised. Giving one group does not affect the look-up of another.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Tuple

import torch.distributed as dist

from tilestone._errors import InvalidArgumentError

logger = logging.getLogger("tilestone.megatron")


@dataclass(frozen=True)
class _Kind:
    """A kind of group: its name in words and the function of parallel_state that returns it."""

    words: str
    function: str
    options: Mapping[str, bool]


_UNCHECKED = {"check_initialized": False}

_KINDS = {
    "tp": _Kind("tensor parallel", "get_tensor_model_parallel_group", _UNCHECKED),
    "pp": _Kind("pipeline parallel", "get_pipeline_model_parallel_group", _UNCHECKED),
    "cp": _Kind("context parallel", "get_context_parallel_group", _UNCHECKED),
    "dp": _Kind("data parallel", "get_data_parallel_group", {}),
    "dp_cp": _Kind(
        "data and context parallel", "get_data_parallel_group", {"with_context_parallel": True}
    ),
    "ep": _Kind("expert parallel", "get_expert_model_parallel_group", _UNCHECKED),
    "expt_tp": _Kind("expert tensor parallel", "get_expert_tensor_parallel_group", _UNCHECKED),
    "expt_dp": _Kind("expert data parallel", "get_expert_data_parallel_group", _UNCHECKED),
}
# Megatron's expert modules use the attribute names of dense modules for their groups.
_OF_EXPERTS = {"expt_tp": "tp_group", "expt_dp": "dp_group"}
_ALIASES = {"etp": "expt_tp", "edp": "expt_dp"}

#: The names of the groups, as in `find_group` and in Megatron's `pg_collection`.
NAMES = tuple(_KINDS)

_logged: set[str] = set()  # names of the groups whose origin has been logged


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension of the parallelism, and this rank's place among them.

    It can be passed in place of a process group to the functions of this package, and to functions
    of Megatron that call only `size()` and `rank()` of a group.

    Attributes:
        members: the number of ranks.
        position: this rank's rank in the group.
        ranks: global ranks, in the group's order; None: not known.
        process_group: torch's process group; None if this rank is alone in the group and there may
            be no process group.
    """

    members: int
    position: int
    ranks: Tuple[int, ...] | None
    process_group: Any = None

    def size(self) -> int:
        """The number of ranks."""
        return self.members

    def rank(self) -> int:
        """This rank's rank in the group."""
        return self.position


def alone() -> Group:
    """Makes a group of this rank alone, for a dimension that the program does not have.

    It needs no process group of torch.distributed.
    """
    return Group(1, 0, (dist.get_rank(),) if dist.is_initialized() else None)


def get_pg_size(group: Any = None) -> int:
    """The number of ranks of a process group; 1 for None, or without torch.distributed."""
    if group is None or not dist.is_initialized():
        return 1
    return int(group.size())


def get_pg_rank(group: Any = None) -> int:
    """This process's rank in a process group; 0 for None, or without torch.distributed."""
    if group is None or not dist.is_initialized():
        return 0
    return int(group.rank())


def argument_of(name: str) -> str:
    """The name of the argument that takes a group: "tp_group" for "tp"."""
    return f"{_ALIASES.get(name, name)}_group"


def find_group(
    name: str, given: Any = None, module: Any = None, metadata: Mapping[Any, Any] | None = None
) -> Group:
    """Looks up a group. The top of this module lists the places and their order.

    Args:
        name: one of NAMES.
        given: the caller's argument: a process group of torch, a `Group`, or None.
        module: a module that may have the group, as its `tp_group` or in its `pg_collection`. If it
            is a wrapper (DistributedDataParallel, Float16Module), the wrapped modules are searched
            too. In Megatron's expert modules `tp_group` and `dp_group` mean expt_tp and expt_dp.
        metadata: metadata of a sharded state dict, which may have a "dp_cp_group".

    Returns:
        The group. If it comes from Megatron's parallel_state, that is logged once for each name.

    Raises:
        InvalidArgumentError: the group is not found and there are several ranks; or what is found
            is not a process group, or is one that this rank does not belong to. The message names
            the argument.
    """
    name = _ALIASES.get(name, name)
    if name not in _KINDS:
        raise InvalidArgumentError(f"{name!r} is not a group; the groups are {', '.join(NAMES)}")
    places = [("the argument", given)]
    if metadata is not None and name == "dp_cp":
        places.append(("the metadata's", metadata.get("dp_cp_group")))
    for place, found in places:
        if found is not None:
            return _as_group(name, found, place)
    for each in _unwrapped(module):
        found = _of_module(name, each)
        if found is not None:
            return _as_group(name, found, f"{type(each).__name__}'s")
    found = _of_parallel_state(name)
    if found is not None:
        _log_once(name)
        return _as_group(name, found, "megatron.core.parallel_state's")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return alone()
    raise _not_found(name, module)


def model_parallel_group(given: Any = None) -> Any:
    """The ranks that together hold one copy of the model: the group of a save's local copies.

    Args:
        given: the caller's `LocalCopies.group`: a process group of torch, a `Group`, ranks, or None
            for the tensor and pipeline parallel group of Megatron's parallel_state.

    Returns:
        `given` itself; for a `Group`, its process group or its ranks.

    Raises:
        InvalidArgumentError: `given` is None and parallel_state is not initialised; or the ranks of
            a Group are not known.
    """
    if given is None:
        state = sys.modules.get("megatron.core.parallel_state")
        function = getattr(state, "get_model_parallel_group", None)
        found = None if function is None else function(check_initialized=False)
        if found is not None:
            return found
        raise InvalidArgumentError(
            "copies needs a group: the default is Megatron's model-parallel "
            "group, but Megatron's parallel_state is not initialised",
            hint="pass the ranks that together hold one copy of the model as LocalCopies.group",
        )
    if not isinstance(given, Group):
        return given
    if given.process_group is None and given.ranks is None:
        raise InvalidArgumentError("copies.group is a Group whose ranks are not known")
    return list(given.ranks or ()) if given.process_group is None else given.process_group


def _not_found(name: str, module: Any) -> InvalidArgumentError:
    argument = argument_of(name)
    of_module = "" if module is None else f", {type(module).__name__} has no such group"
    return InvalidArgumentError(
        f"the {_KINDS[name].words} group is not known: there are {dist.get_world_size()} ranks, "
        f"{argument} was not given{of_module}, and Megatron's parallel_state is not initialised",
        rank=dist.get_rank(),
        hint=f"pass {argument}; if the program does not use this parallelism, pass "
        "tilestone.megatron.groups.alone()",
    )


def _as_group(name: str, found: Any, place: str) -> Group:
    """Makes a Group of a process group of torch, or of an object with size() and rank()."""
    if isinstance(found, Group):
        return found
    argument = argument_of(name)
    here = dist.get_rank() if dist.is_initialized() else -1
    if isinstance(found, int) and found == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(f"this rank is not in {place} {argument}", rank=here)
    methods = [getattr(found, method, None) for method in ("size", "rank")]
    if isinstance(found, type) or not all(map(callable, methods)):
        raise InvalidArgumentError(
            f"{place} {argument} is not a process group but a {type(found).__name__}: {found!r}",
            rank=here,
        )
    members, position = int(found.size()), int(found.rank())
    if not 0 <= position < members:
        raise InvalidArgumentError(f"this rank is not in {place} {argument}", rank=here)
    return Group(members, position, _ranks_of(found), found)


def _ranks_of(process_group: Any) -> Tuple[int, ...] | None:
    """The global ranks in the group's order; None if torch.distributed does not know the group."""
    if not dist.is_initialized():
        return None
    try:
        return tuple(dist.get_process_group_ranks(process_group))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None  # not a group of torch: only its size and this rank's place are known


def _unwrapped(module: Any) -> Iterator[Any]:
    """Yields a module, then the modules that it wraps, from the outside in."""
    seen: set[int] = set()
    while module is not None and id(module) not in seen:
        seen.add(id(module))
        yield module
        module = getattr(module, "module", None)


def _of_module(name: str, module: Any) -> Any:
    """The group that the module itself has, or None."""
    found = getattr(getattr(module, "pg_collection", None), name, None)
    if found is not None:
        return found
    attribute = argument_of(name)
    if hasattr(module, "ep_group") and hasattr(module, "num_local_experts"):
        if attribute in _OF_EXPERTS.values():
            return None  # in an expert module this attribute is a group of experts
        attribute = _OF_EXPERTS.get(name, attribute)
    return getattr(module, attribute, None)


def _of_parallel_state(name: str) -> Any:
    """Megatron's own group; None if Megatron is not imported or does not have the group (yet)."""
    state = sys.modules.get("megatron.core.parallel_state")
    function = getattr(state, _KINDS[name].function, None)
    if function is None:
        return None
    try:
        return function(**_KINDS[name].options)
    except AssertionError:
        return None  # parallel_state raises this before it is initialised


def _log_once(name: str) -> None:
    if name not in _logged:
        _logged.add(name)
        logger.info(
            "The %s group is taken from Megatron's parallel_state, because %s was not given",
            _KINDS[name].words, argument_of(name),
        )  # fmt: skip


def holders_of(*groups: Group) -> Tuple[int, ...] | None:
    """The ranks that hold the same data, if the data is the same along each of these groups.

    They are the product of the groups. A rank knows only the members of its own groups and assumes
    that the other groups lie in the same way: that a rank's number is a sum with one stride for
    each dimension. Megatron numbers ranks like this, and so does a DeviceMesh of ascending ranks.

    Returns:
        global ranks, ascending, including this one; None if they can't be known: the ranks of a
        group are unknown, are not at regular strides, or can't be combined.
    """
    if not dist.is_initialized():
        return None
    ranks = tuple(group.ranks for group in groups if group.ranks is not None)
    if len(ranks) < len(groups):
        return None
    return _product(ranks, dist.get_rank(), dist.get_world_size())


@lru_cache(maxsize=256)
def _product(groups: Tuple[Tuple[int, ...], ...], here: int, world: int) -> Tuple[int, ...] | None:
    ranks = [here]
    for group in groups:
        if here not in group or not _lies_at_strides(sorted(group)):
            return None
        ranks = [rank + other - here for rank in ranks for other in group]
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < world for rank in ranks):
        return None
    return tuple(sorted(ranks))


def _lies_at_strides(ranks: list[int]) -> bool:
    """Whether ascending numbers are the first one plus all sums of multiples of some strides."""
    while len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        run = 1
        while run < len(ranks) and ranks[run] - ranks[run - 1] == stride:
            run += 1
        if len(ranks) % run != 0:
            return False
        firsts = ranks[::run]
        if ranks != [first + i * stride for first in firsts for i in range(run)]:
            return False
        ranks = firsts
    return True
