"""What a program has set up: its process groups, and the objects of Megatron in this process.

Megatron's objects are found, never imported or created.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Dict

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import groups
from tilestone.megatron.training import _arguments


@dataclass(frozen=True)
class Groups:
    """The groups that the caller gave, and a module that may have others. Each group is looked up
    on its own, when it is needed."""

    arguments: Mapping[str, Any]
    module: Any = None

    @staticmethod
    def given(tp: Any, pp: Any, dp_cp: Any, dp: Any) -> Groups:
        """Makes Groups of the arguments of a call."""
        return Groups({"tp": tp, "pp": pp, "dp_cp": dp_cp, "dp": dp})

    def of_module(self, module: Any) -> Groups:
        """The same Groups; groups that were not given are taken from a module if it has them."""
        return replace(self, module=module)

    def find(self, name: str) -> groups.Group:
        """Looks up a group by its name.

        Raises:
            InvalidArgumentError: the group is not known.
        """
        return groups.find_group(name, self.arguments[name], self.module)

    def for_random_states(self, args: Any) -> Dict[str, Any]:
        """Returns the groups as arguments of get_rng_state().

        Raises:
            InvalidArgumentError: a group is not known.
        """
        found = {f"{name}_group": self.find(name) for name in ("tp", "pp", "dp_cp")}
        if _arguments.read(args, "data_parallel_random_init"):
            found["dp_group"] = self.find("dp")
        return found


# ---- Megatron's objects ----

# Named tuples in the state of the rerun state machine.
_RERUN = "megatron.core.rerun_state_machine"
RERUN_CLASSES = (f"{_RERUN}.Call", f"{_RERUN}.Caller")


def _found(module: str, attribute: str) -> Any:
    return getattr(sys.modules.get(f"megatron.core.{module}"), attribute, None)


def arguments() -> Any:
    """Megatron's global arguments; None if the program has none, or has not set them up yet."""
    get_args = getattr(sys.modules.get("megatron.training.global_vars"), "get_args", None)
    if get_args is None:
        return None
    try:
        return get_args()
    except AssertionError:
        return None  # get_args() raises this before the arguments are set up


def async_saves() -> Any:
    """Megatron's module with the queue of its saves; None if its training is not loaded."""
    return sys.modules.get("megatron.training.async_utils")


def rng_tracker() -> Any:
    """The tracker of the CUDA generators; None if the program has none."""
    return _found("tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER")


def to_tracker_state(tracker: Any, state: Any) -> Any:
    """Converts a generator's state to the form that the tracker keeps."""
    is_graph_safe = _found("tensor_parallel.random", "is_graph_safe_cuda_rng_tracker")
    convert = _found("tensor_parallel.random", "convert_cuda_rng_state")
    if is_graph_safe is None or convert is None:
        return state
    return convert(state, to_graphable=is_graph_safe(tracker))


def rerun_state_machine() -> Any:
    """The rerun state machine; None if the program has none."""
    return _found("rerun_state_machine", "_GLOBAL_RERUN_STATE_MACHINE")


def update_num_microbatches(consumed_samples: int) -> None:
    """Passes the number of consumed samples to Megatron's calculator of micro-batches."""
    if _found("num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR") is not None:
        update = _found("num_microbatches_calculator", "update_num_microbatches")
        update(consumed_samples=consumed_samples, verbose=True)


def given_or_global(args: Any) -> Any:
    """Returns the caller's arguments, or Megatron's global ones for None.

    Raises:
        InvalidArgumentError: there are none.
    """
    found = arguments() if args is None else args
    if found is None:
        raise InvalidArgumentError(
            "args was not given, and Megatron's global arguments (get_args() of "
            "megatron.training.global_vars) are not set up",
            hint="pass args, the program's arguments",
        )
    return found
