"""Objects that Megatron has set up in this process. Never imports or creates any of them."""

from __future__ import annotations

import sys
from typing import Any

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


def schedule_async_save() -> Any:
    """Megatron's function that queues a save; None if its training is not loaded."""
    found = sys.modules.get("megatron.training.async_utils")
    return getattr(found, "schedule_async_save", None)


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
