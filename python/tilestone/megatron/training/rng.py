"""The states of a rank's random number generators, in the form of Megatron's training."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Dict, List

import numpy as np
import torch

from tilestone import _core
from tilestone._errors import InvalidArgumentError, MismatchError, NotFoundError, UnsupportedError
from tilestone.megatron import groups
from tilestone.megatron._ranks import Deadline, agreed
from tilestone.megatron.mapping import ShardedObject
from tilestone.megatron.training import _arguments, _program

logger = logging.getLogger("tilestone.megatron")

RNG_KEY = "rng_state"
_PARTS = (
    "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states",
)  # fmt: skip


def get_rng_state(
    ckpt_format: str,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
    dp_group: Any = None,
    key_prefix: str = "",
    *,
    args: Any = None,
    module: Any = None,
    rng_tracker: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
) -> ShardedObject:
    """Returns the states of this rank's generators, as the entity that a checkpoint holds.

    There is one object for each (pipeline rank, tensor rank); the ranks along data and context
    parallelism hold copies of it. With `args.data_parallel_random_init` the states differ along
    data parallelism: each object then holds all of them, and every rank of `dp_group` must call.

    Args:
        ckpt_format: "torch_dist" or "zarr".
        tp_group, pp_group: they give the object's cell in the grid (PP, TP).
        dp_cp_group: gives which copy of the object this rank has.
        dp_group: the ranks whose states one object holds; looked up only if the states differ.
        key_prefix: put before the key "rng_state", so that programs that share a checkpoint have
            different keys.
        args: the program's arguments; `data_parallel_random_init` is read. None: Megatron's global
            arguments.
        module: a module that may have the groups that were not given, see
            `tilestone.megatron.groups.find_group`.
        rng_tracker: has the named states of CUDA generators (`get_states()`); None: that of
            Megatron-Core, if the program has made one.
        timeout: limit in seconds for waiting for the ranks of `dp_group`; None: no limit.

    Returns:
        The entity. Its data is a list of dicts with the states of Python's generator, numpy's,
        torch's on the CPU and on the current CUDA device (empty without CUDA), and the tracker's
        states by name.

    Raises:
        UnsupportedError: another format.
        InvalidArgumentError: a group is not known (the message names it), or there are no
            arguments.
        TimeoutError: some ranks of `dp_group` did not call in time.
    """
    args = _program.given_or_global(args)
    if ckpt_format not in _arguments.FORMATS:
        raise UnsupportedError(f"can't keep random states in the format {ckpt_format!r}")
    tp = groups.find_group("tp", tp_group, module)
    pp = groups.find_group("pp", pp_group, module)
    dp_cp = groups.find_group("dp_cp", dp_cp_group, module)
    tracker = _program.rng_tracker() if rng_tracker is None else rng_tracker
    if _arguments.read(args, "data_parallel_random_init"):
        dp = groups.find_group("dp", dp_group, module)
        states = _of_all(lambda: _own_state(tracker), dp, Deadline(timeout))
    else:
        states = [_own_state(tracker)]
    return ShardedObject(
        f"{key_prefix}{RNG_KEY}",
        states,
        (pp.size(), tp.size()),
        (pp.rank(), tp.rank()),
        replica_id=dp_cp.rank(),
    )


def _own_state(rng_tracker: Any) -> Dict[str, Any]:
    has_cuda = torch.cuda.is_available()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": (
            torch.cuda.get_rng_state() if has_cuda else torch.empty(0, dtype=torch.uint8)
        ),
        "rng_tracker_states": {} if rng_tracker is None else rng_tracker.get_states(),
    }


def _of_all(
    own: Callable[[], Dict[str, Any]], dp: groups.Group, deadline: Deadline
) -> List[Dict[str, Any]]:
    """The states of all ranks of a group, by rank."""
    if dp.size() == 1:
        return [own()]
    if dp.process_group is None:
        raise InvalidArgumentError(
            "dp_group has no process group, which its ranks need to exchange their random states"
        )
    states: List[Dict[str, Any]]
    work = "random states of data parallel ranks"
    _, states = agreed(work, dp.process_group, own, lambda state: state, list, deadline)
    return states


def restore_rng_state(
    rng_state: List[Dict[str, Any]],
    *,
    args: Any = None,
    dp_group: Any = None,
    module: Any = None,
    rng_tracker: Any = None,
) -> bool:
    """Sets this rank's generators to loaded states.

    Args:
        rng_state: the loaded data of the entity of get_rng_state().
        args: the program's arguments; `data_parallel_random_init` is read. None: Megatron's global
            arguments.
        dp_group: says which of the states is this rank's, with `data_parallel_random_init`.
        module, rng_tracker: as for get_rng_state(); the tracker's `set_states()` is called.

    Returns:
        False if nothing was set because the states are those of another number of data parallel
        ranks; a warning is logged.

    Raises:
        NotFoundError: a part of the state is missing; the message names it.
        MismatchError: `rng_state` is not a list of states.
        InvalidArgumentError: the group is not known, or there are no arguments.
    """
    args = _program.given_or_global(args)
    if not isinstance(rng_state, list) or not rng_state:
        raise MismatchError(f"the random state must be a list, not {type(rng_state).__name__}")
    own = rng_state[0]
    if _arguments.read(args, "data_parallel_random_init"):
        dp = groups.find_group("dp", dp_group, module)
        if dp.size() != len(rng_state):
            if dp.rank() == 0:
                logger.warning(
                    "Random states are not restored: the checkpoint has those of %d data parallel "
                    "ranks, but this run has %d",
                    len(rng_state), dp.size(),
                )  # fmt: skip
            return False
        own = rng_state[dp.rank()]
    for part in _PARTS:
        if not isinstance(own, Mapping) or part not in own:
            raise NotFoundError(
                f"the random state has no {part!r}", key=RNG_KEY, hint="set no_load_rng or finetune"
            )
    random.setstate(own["random_rng_state"])
    np.random.set_state(own["np_rng_state"])
    torch.set_rng_state(own["torch_rng_state"])
    _restore_cuda(own["cuda_rng_state"])
    tracker = _program.rng_tracker() if rng_tracker is None else rng_tracker
    _restore_tracker(own["rng_tracker_states"], tracker)
    return True


def _restore_cuda(state: torch.Tensor) -> None:
    if state.numel() == 0 and torch.cuda.is_available():
        logger.warning("The CUDA generator keeps its state: the checkpoint is from a CPU run")
    elif state.numel() > 0 and not torch.cuda.is_available():
        logger.warning("The state of the CUDA generator is not restored: this rank has no CUDA")
    elif state.numel() > 0:
        torch.cuda.set_rng_state(state)


def _restore_tracker(states: Mapping[str, Any], rng_tracker: Any) -> None:
    if not states:
        return
    if rng_tracker is None:
        logger.warning(
            "The states %s of the CUDA generators' tracker are not restored: there is no tracker",
            ", ".join(map(repr, states)),
        )
        return
    convert = _program.to_tracker_state
    rng_tracker.set_states(
        {name: convert(rng_tracker, state) for name, state in states.items()}
    )
