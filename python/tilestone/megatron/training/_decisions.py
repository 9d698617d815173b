"""Steps in which the ranks first compare their decisions, because all must decide alike.

If ranks decided differently, one would wait for messages that the others never send, or a part that
only one rank has would be left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Dict, List, Protocol, TypeVar

import torch.distributed as dist

from tilestone._errors import MismatchError
from tilestone.megatron._ranks import Deadline, agreed
from tilestone.megatron.training import _arguments

_OF_A_SAVE = (
    "no_save_optim", "no_save_rng", "data_parallel_random_init", "use_distributed_optimizer",
    "use_layer_wise_distributed_optimizer", "dist_ckpt_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient", "ckpt_fully_parallel_save",
    "ckpt_fully_parallel_save_process_group", "async_save", "verify_integrity",
)  # fmt: skip
_OF_A_LOAD = (
    "ckpt_step", "finetune", "no_load_optim", "no_load_rng", "data_parallel_random_init",
    "use_distributed_optimizer", "ckpt_fully_parallel_load",
    "ckpt_fully_parallel_load_process_group", "ckpt_fully_parallel_load_exchange_algo",
    "ckpt_load_validate_sharding_integrity", "dist_ckpt_strictness",
)  # fmt: skip


class Decided(Protocol):
    """The preparation of a save or load."""

    def decisions(self) -> Dict[str, str]:
        """What must be equal on all ranks: a description of each decision -> its value."""


Result = TypeVar("Result", bound=Decided)


def of_a_save(args: Any, strategy: Any) -> Dict[str, str]:
    """The decisions of a save: its arguments and its strategy."""
    return _of(args, _OF_A_SAVE) | {"the strategy that saves": type(strategy).__name__}


def of_a_load(args: Any, strategy: Any) -> Dict[str, str]:
    """The decisions of a load; strategy: that of the context, or None."""
    return _of(args, _OF_A_LOAD) | {"the strategy of the context": type(strategy).__name__}


def _of(args: Any, names: tuple[str, ...]) -> Dict[str, str]:
    values = {name: _arguments.read(args, name) for name in names}
    defaults = _arguments.DEFAULTS
    return {
        f"args.{name}": repr(defaults[name] if value is None else value)
        for name, value in values.items()
    }


def prepared(
    work: str, group: Any, prepare: Callable[[], Result], deadline: Deadline
) -> Result:
    """Calls prepare() on every rank of a group, and compares the decisions.

    Raises:
        MismatchError: on every rank: ranks have decided differently.
        Exception: on every rank: what prepare() raises on one rank.
        TimeoutError: some ranks did not call in time.
    """

    def words(made: Result) -> bytes:
        return json.dumps(made.decisions()).encode()

    def decide(said: List[bytes]) -> bytes:
        _compare(work, [json.loads(each) for each in said], group)
        return b""

    return agreed(work, group, prepare, words, decide, deadline)[0]


def _compare(work: str, decided: List[Dict[str, str]], group: Any) -> None:
    for rank, each in enumerate(decided):
        for name, value in decided[0].items():
            if each[name] != value:
                first, other = (dist.get_global_rank(group, number) for number in (0, rank))
                raise MismatchError(
                    f"{work}: {name} is {value} on rank {first} but {each[name]} on rank {other}",
                    rank=other,
                    hint="pass the same arguments on all ranks",
                )
