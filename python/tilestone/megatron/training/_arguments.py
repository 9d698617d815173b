"""The arguments of a training program that are read, their defaults, and what ranks must agree on.

If ranks decided differently, one would wait for messages that the others never send, or a part that
only one rank has would be left out. So they compare the arguments that decide.
"""

from __future__ import annotations

import argparse
import operator
import os
import types
from collections.abc import Callable
from typing import Any, Dict, List, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import InvalidArgumentError, MismatchError, UnsupportedError
from tilestone._objects import pickling
from tilestone.megatron._ranks import Deadline, agreed
from tilestone.megatron.validation import StrictHandling, parse_strict_flag

# Every argument that is read, with its default if the program's arguments do not have it.
DEFAULTS: dict[str, Any] = {
    # Directories and formats.
    "save": None,
    "load": None,
    "ckpt_format": "torch_dist",
    "use_dist_ckpt": True,
    "auto_detect_ckpt_format": False,
    "async_save": False,
    "pretrained_checkpoint": None,
    "ckpt_step": None,
    "exit_on_missing_checkpoint": False,
    "non_persistent_ckpt_type": None,
    "non_persistent_global_ckpt_dir": None,
    "save_retain_interval": None,
    "dataloader_save": None,
    # Parts of the state.
    "finetune": False,
    "no_save_optim": False,
    "no_save_rng": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "data_parallel_random_init": False,
    "fp16": False,
    "bf16": False,
    "load_main_params_from_ckpt": False,
    # Sharding of the optimizer's state.
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": False,
    "dist_ckpt_optim_fully_reshardable": False,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    # How the checkpoint is saved and loaded.
    "ckpt_assume_constant_structure": False,
    "ckpt_load_validate_sharding_integrity": True,
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "verify_integrity": False,
}

_PLAIN = (type(None), bool, int, float, str)

FORMATS = ("torch_dist", "zarr")

# Arguments that must be equal to resume a run, if both sides have them: (name, condition). With a
# condition they are compared only if this run's argument of that name is set.
_EQUAL = (
    ("num_layers", None),
    ("hidden_size", None),
    ("num_attention_heads", None),
    ("add_position_embedding", None),
    ("max_position_embeddings", "vocab_file"),
    ("make_vocab_size_divisible_by", "vocab_file"),
    ("tokenizer_type", "vocab_file"),
    ("data_parallel_random_init", "data_parallel_random_init"),
    ("global_batch_size", "phase_transition_iterations"),
)
# Arguments that are set when a run resumes.
CONSUMED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
# Stored arguments that are read, besides those above.
_STORED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
    "world_size", "no_save_optim", "no_save_rng", "ckpt_fully_parallel_save",
)  # fmt: skip

# Arguments that must be equal on all ranks.
OF_A_SAVE = (
    "no_save_optim", "no_save_rng", "data_parallel_random_init", "use_distributed_optimizer",
    "use_layer_wise_distributed_optimizer", "dist_ckpt_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient", "async_save", "verify_integrity",
)  # fmt: skip
OF_A_LOAD = (
    "ckpt_step", "finetune", "no_load_optim", "no_load_rng", "data_parallel_random_init",
    "use_distributed_optimizer", "ckpt_load_validate_sharding_integrity", "dist_ckpt_strictness",
)  # fmt: skip

Result = TypeVar("Result")


def read(args: Any, name: str) -> Any:
    """Returns an argument, or its default."""
    return getattr(args, name, DEFAULTS[name])


def stored_arguments(args: Any) -> dict[str, Any]:
    """Returns those of the arguments in a checkpoint that decide how it is loaded."""
    return {name: getattr(args, name) for name in _decisive() if hasattr(args, name)}


def _decisive() -> tuple[str, ...]:
    return (*_STORED, *CONSUMED, *(name for name, _ in _EQUAL))


def to_namespace(args: Any) -> argparse.Namespace:
    """Converts the arguments to the Namespace that is saved, from any object with attributes.

    Attributes of the object's class (properties, defaults) are included if a load reads them.

    Raises:
        InvalidArgumentError: an object without its own attributes, a class or a module.
    """
    if isinstance(args, argparse.Namespace):
        return args
    if isinstance(args, (type, types.ModuleType)) or not hasattr(args, "__dict__"):
        text = f"args must be a Namespace or an object with attributes, not {type(args).__name__}"
        raise InvalidArgumentError(text)
    return argparse.Namespace(**stored_arguments(args), **_others(args))


def check_kept(args: argparse.Namespace) -> None:
    """Checks that a checkpoint can hold each of the arguments.

    Raises:
        InvalidArgumentError: it can't hold one; the error's key has the argument's name.
    """
    for name, value in vars(args).items():
        if type(value) not in _PLAIN:
            key = f"args.{name}"
            pickled, is_archive = pickling.dumps(value, key)
            pickling.check(pickled, is_archive, key, log=False)


def _others(args: Any) -> dict[str, Any]:
    """An object's own attributes, except those of stored_arguments()."""
    return {name: value for name, value in vars(args).items() if name not in _decisive()}


def path(args: Any, name: str) -> str | None:
    """Returns the directory that an argument names; None if it is None.

    Raises:
        InvalidArgumentError: not a path, or an empty one, which would be the working directory; or
            it is a file.
        UnsupportedError: a URL.
    """
    given = getattr(args, name, None)
    if given is None:
        return None
    try:
        found = os.fsdecode(given)
    except TypeError:
        raise InvalidArgumentError(
            f"args.{name} must be a path, not {type(given).__name__}: {given!r}"
        ) from None
    if not found:
        raise InvalidArgumentError(f"args.{name} is an empty path", hint="None: no directory")
    _core.refuse_url(os.fsencode(found))
    if os.path.isfile(found):
        raise InvalidArgumentError(
            f"args.{name} is a file, not the directory of a run: {found}", file=found
        )
    return found


def whole_number(args: Any, name: str, least: int) -> int | None:
    """Returns an argument that is an integer or None.

    Raises:
        InvalidArgumentError: it is neither, or is less than `least`.
    """
    given = read(args, name)
    if given is None:
        return None
    try:
        found = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = least - 1
    if not least <= found < 1 << 63:
        raise InvalidArgumentError(
            f"args.{name} must be {least} or more, or None, not {given!r}",
            hint="integers have up to 63 bits" if found >= 1 << 63 else "",
        )
    return found


def check_saveable(args: Any, train_data_iterator: Any) -> None:
    """Refuses arguments that a save does not support.

    Raises:
        UnsupportedError: formats other than torch_dist and zarr, the state of a data loader.
        InvalidArgumentError: `args` has no attributes.
    """
    to_namespace(args)
    check_format(args)
    if read(args, "dataloader_save") and train_data_iterator is not None:
        raise UnsupportedError(
            "args.dataloader_save: the state of a data loader is not saved with the checkpoint",
            hint="save it separately, and leave dataloader_save None",
        )


def check_format(args: Any) -> None:
    """Refuses formats that `dist_checkpointing` does not have.

    Raises:
        UnsupportedError: with the format's name.
    """
    found = read(args, "ckpt_format")
    if found not in FORMATS or not read(args, "use_dist_ckpt"):
        named = "use_dist_ckpt=False" if found in FORMATS else f"ckpt_format={found!r}"
        known = ", ".join(FORMATS)
        raise UnsupportedError(f"args.{named} is not supported; the formats are {known}")


def strictness(args: Any) -> StrictHandling:
    """Returns the mode of `dist_ckpt_strictness`.

    Raises:
        ValueError: there is no such mode.
        InvalidArgumentError: the mode returns keys, which load_checkpoint() can't do.
    """
    mode = parse_strict_flag(read(args, "dist_ckpt_strictness"))
    if StrictHandling.requires_returning_mismatch_keys(mode):
        raise InvalidArgumentError(
            f"args.dist_ckpt_strictness={mode.value!r}: load_checkpoint can't return keys",
            hint="use log_all or log_unexpected to log them",
        )
    return mode


def check_equal(args: Any, stored: dict[str, Any]) -> None:
    """Compares the arguments that must be equal to resume a run.

    Raises:
        InvalidArgumentError: an argument differs; the message has its name and both values.
    """
    for name, condition in _EQUAL:
        if condition is not None and not getattr(args, condition, None):
            continue
        if name in stored and hasattr(args, name) and getattr(args, name) != stored[name]:
            raise InvalidArgumentError(
                f"args.{name} is {getattr(args, name)!r}, but the checkpoint's is {stored[name]!r}",
                hint="use the checkpoint's value, or set finetune",
            )


def set_consumed(args: Any, stored: dict[str, Any]) -> None:
    """Sets the numbers of samples that the run has consumed to the checkpoint's.

    Raises:
        InvalidArgumentError: an argument can't be set.
    """
    for name in CONSUMED:
        set_argument(args, name, stored.get(name, 0))


def set_argument(args: Any, name: str, value: Any) -> None:
    """Sets one of the program's arguments.

    Raises:
        InvalidArgumentError: it can't be set (frozen dataclass, property).
    """
    try:
        setattr(args, name, value)
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"can't set args.{name}: {error}",
            hint="a load sets the consumed samples: pass args whose attributes can be set",
        ) from error


def decisions(args: Any, names: tuple[str, ...]) -> Dict[str, str]:
    """What must be equal on all ranks: a description of each of these arguments -> its value."""
    given = {name: read(args, name) for name in names}
    return {
        f"args.{name}": repr(DEFAULTS[name] if value is None else value)
        for name, value in given.items()
    }


def prepared(
    work: str, group: Any, prepare: Callable[[], Result], deadline: Deadline
) -> Result:
    """Calls prepare() on every rank of a group, and compares the `decisions` of the results.

    Raises:
        MismatchError: on every rank: ranks have decided differently.
        Exception: on every rank: what prepare() raises on one rank.
        TimeoutError: some ranks did not call in time.
    """

    return agreed(
        work, group, prepare, lambda made: made.decisions,  # type: ignore[attr-defined]
        lambda said: _compare(work, said, group), deadline,
    )[0]  # fmt: skip


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
