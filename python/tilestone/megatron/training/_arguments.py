"""What is read of a training program's arguments, and what an argument is where it is missing."""

from __future__ import annotations

import argparse
import operator
import os
import types
from typing import Any

from tilestone import _pickling
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone.megatron.training import _program
from tilestone.megatron.validation import StrictHandling, parse_strict_flag

# Every argument that is read, with its value where the program's arguments lack it.
DEFAULTS: dict[str, Any] = {
    # Where, and in what form.
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
    # Which parts of the state.
    "finetune": False,
    "no_save_optim": False,
    "no_save_rng": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "data_parallel_random_init": False,
    "fp16": False,
    "bf16": False,
    "load_main_params_from_ckpt": False,
    # How the optimizer's state is sharded.
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": False,
    "dist_ckpt_optim_fully_reshardable": False,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    # How it is saved and loaded.
    "ckpt_fully_parallel_save": False,
    "ckpt_fully_parallel_save_process_group": "dp",
    "ckpt_fully_parallel_load": False,
    "ckpt_fully_parallel_load_process_group": "dp",
    "ckpt_fully_parallel_load_exchange_algo": "broadcast",
    "ckpt_assume_constant_structure": False,
    "ckpt_load_validate_sharding_integrity": True,
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "verify_integrity": False,
}

_PLAIN = (type(None), bool, int, float, str)

FORMATS = ("torch_dist", "zarr")

# What must be equal to resume a run, where both sides have it: (name, only if this run's
# argument of that name is set).
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
# Set on the arguments of a run that resumes.
CONSUMED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
# What is looked at of the stored arguments, beside the above.
_STORED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
    "world_size", "no_save_optim", "no_save_rng", "ckpt_fully_parallel_save",
)  # fmt: skip


def read(args: Any, name: str) -> Any:
    """An argument, or its default."""
    return getattr(args, name, DEFAULTS[name])


def stored_arguments(args: Any) -> dict[str, Any]:
    """Of the arguments in a checkpoint, those that decide how it is loaded."""
    return {name: getattr(args, name) for name in _decisive() if hasattr(args, name)}


def _decisive() -> tuple[str, ...]:
    return (*_STORED, *CONSUMED, *(name for name, _ in _EQUAL))


def given_or_global(args: Any) -> Any:
    """The arguments that the caller gave; of None, Megatron's global ones.

    Raises:
        InvalidArgumentError: there are neither.
    """
    found = _program.arguments() if args is None else args
    if found is None:
        raise InvalidArgumentError(
            "args was not given, and Megatron's global arguments (get_args() of "
            "megatron.training.global_vars) are not set up",
            hint="give args, the program's arguments",
        )
    return found


def to_namespace(args: Any) -> argparse.Namespace:
    """The arguments as they are saved: a Namespace, whatever object the program has.

    Of another object, those attributes that are its class's (properties, defaults) are in it too,
    where a load asks for them.

    Raises:
        InvalidArgumentError: an object without attributes of its own, a class or a module.
    """
    if isinstance(args, argparse.Namespace):
        return args
    if isinstance(args, (type, types.ModuleType)) or not hasattr(args, "__dict__"):
        text = f"args is a Namespace or another object with attributes, not {type(args).__name__}"
        raise InvalidArgumentError(text)
    return argparse.Namespace(**stored_arguments(args), **_others(args))


def check_kept(args: argparse.Namespace) -> None:
    """Looks whether a checkpoint can hold each of the arguments.

    Raises:
        InvalidArgumentError: it can't hold one, whose name is in the key.
    """
    for name, value in vars(args).items():
        if type(value) not in _PLAIN:
            key = f"args.{name}"
            pickled, is_archive = _pickling.dumps(value, key)
            _pickling.check(pickled, is_archive, key, log=False)


def _others(args: Any) -> dict[str, Any]:
    """An object's own attributes without those of stored_arguments()."""
    return {name: value for name, value in vars(args).items() if name not in _decisive()}


def path(args: Any, name: str) -> str | None:
    """The directory that an argument names; None: none.

    Raises:
        InvalidArgumentError: no path, or an empty one, which would be the working directory.
    """
    given = getattr(args, name, None)
    if given is None:
        return None
    try:
        found = os.fsdecode(given)
    except TypeError:
        raise InvalidArgumentError(
            f"args.{name} is a path, not {type(given).__name__}: {given!r}"
        ) from None
    if not found:
        raise InvalidArgumentError(f"args.{name} is an empty path", hint="None: no directory")
    return found


def whole_number(args: Any, name: str, least: int) -> int | None:
    """An argument that is a number or None.

    Raises:
        InvalidArgumentError: it is neither, or less than `least`.
    """
    given = read(args, name)
    if given is None:
        return None
    try:
        found = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = least - 1
    if found < least:
        raise InvalidArgumentError(
            f"args.{name} is {least} or more, or None, not {given!r}"
        )
    return found


def check_saveable(args: Any, train_data_iterator: Any) -> None:
    """Refuses what a save can't keep.

    Raises:
        UnsupportedError: asynchronous saves, formats that are not torch_dist or zarr, the state
            of a data loader.
        InvalidArgumentError: `args` has no attributes.
    """
    to_namespace(args)
    if read(args, "async_save"):
        raise UnsupportedError(
            "args.async_save: asynchronous saves are not there yet",
            hint="leave async_save False: the save returns when the checkpoint is durable",
        )
    check_format(args)
    if read(args, "dataloader_save") and train_data_iterator is not None:
        raise UnsupportedError(
            "args.dataloader_save: the state of a data loader is not saved with the checkpoint",
            hint="save it beside the checkpoint, and leave dataloader_save None",
        )


def check_format(args: Any) -> None:
    """Refuses formats of checkpoints that are none of `dist_checkpointing`.

    Raises:
        UnsupportedError: with the format's name.
    """
    found = read(args, "ckpt_format")
    if found not in FORMATS or not read(args, "use_dist_ckpt"):
        named = "use_dist_ckpt=False" if found in FORMATS else f"ckpt_format={found!r}"
        known = ", ".join(FORMATS)
        raise UnsupportedError(f"args.{named}: checkpoints are saved and loaded as {known}")


def strictness(args: Any) -> StrictHandling:
    """The mode of `dist_ckpt_strictness`.

    Raises:
        ValueError: there is no such mode.
        InvalidArgumentError: a mode that returns keys, for which there is no place.
    """
    mode = parse_strict_flag(read(args, "dist_ckpt_strictness"))
    if StrictHandling.requires_returning_mismatch_keys(mode):
        raise InvalidArgumentError(
            f"args.dist_ckpt_strictness={mode.value!r}: load_checkpoint can't return keys",
            hint="log_all or log_unexpected logs them",
        )
    return mode


def check_equal(args: Any, stored: dict[str, Any]) -> None:
    """Compares what must be equal to resume a run.

    Raises:
        InvalidArgumentError: an argument differs; with its name and both values.
    """
    for name, condition in _EQUAL:
        if condition is not None and not getattr(args, condition, None):
            continue
        if name in stored and hasattr(args, name) and getattr(args, name) != stored[name]:
            raise InvalidArgumentError(
                f"args.{name} is {getattr(args, name)!r}, and the checkpoint's is {stored[name]!r}",
                hint="resume with the checkpoint's, or set finetune",
            )


def take_over(args: Any, stored: dict[str, Any]) -> None:
    """Sets how many samples the run has consumed, as the checkpoint has it.

    Raises:
        InvalidArgumentError: an argument can't be set.
    """
    for name in CONSUMED:
        set_argument(args, name, stored.get(name, 0))


def check_taking_over(args: Any) -> None:
    """Looks whether take_over() can set what it sets, which stays as it is.

    Raises:
        InvalidArgumentError: an argument can't be set.
    """
    for name in CONSUMED:
        had = hasattr(args, name)
        set_argument(args, name, getattr(args, name, 0))
        if not had:
            delattr(args, name)


def set_argument(args: Any, name: str, value: Any) -> None:
    """Sets an argument of the program.

    Raises:
        InvalidArgumentError: it can't be set (a frozen dataclass, a property).
    """
    try:
        setattr(args, name, value)
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"args.{name} can't be set: {error}",
            hint="a load sets what the run has consumed: give args whose attributes can be set",
        ) from error
