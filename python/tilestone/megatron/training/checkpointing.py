"""Saving and resuming a training run: the functions of Megatron's `training/checkpointing.py`.

Directories, files and state are the same as Megatron's, so either side can resume the other's runs.
What Megatron takes from global state is an argument here. The program's arguments are `args=`
(None: Megatron's global ones). Each process group is an argument, and is looked up on its own if it
is None (see `tilestone.megatron.groups.find_group`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Dict, Tuple

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Deadline, together
from tilestone.megatron.mapping import CommonStateDict, StateDict
from tilestone.megatron.training import _arguments, _program, state
from tilestone.megatron.training._arguments import prepared
from tilestone.megatron.training._choice import Places, find
from tilestone.megatron.training._program import Groups
from tilestone.megatron.training._resume import Resume
from tilestone.megatron.training._saving import Saving, without_own_arguments
from tilestone.megatron.training.async_utils import (
    Finalizing,
    maybe_finalize_async_save,
    scheduler,
)
from tilestone.megatron.training.names import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    location,
    read_metadata,
)
from tilestone.megatron.training.rng import get_rng_state, restore_rng_state
from tilestone.megatron.training.state import (
    build_sharded_state_dict_metadata,
    generate_state_dict,
    unwrap_model,
)

logger = logging.getLogger("tilestone.megatron")

__all__ = [
    "build_sharded_state_dict_metadata",
    "generate_state_dict",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
    "get_rng_state",
    "load_checkpoint",
    "read_metadata",
    "restore_rng_state",
    "save_checkpoint",
    "unwrap_model",
]

_build_sharded_state_dict_metadata = build_sharded_state_dict_metadata  # Megatron's name


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: Any,
    checkpointing_context: Dict[str, Any] | None = None,
    pipeline_rank: int | None = None,
    expert_rank: int | None = None,
    tensor_rank: int | None = None,
    pipeline_parallel: bool | None = None,
    expert_parallel: bool | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Callable[[CommonStateDict], StateDict] | None = None,
    release: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
    dp_group: Any = None,
    expt_dp_group: Any = None,
    rng_state_key_prefix: str = "",
    *,
    args: Any = None,
    rng_tracker: Any = None,
    rerun_state_machine: Any = None,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
) -> _core.SaveResult | None:
    """Saves a training run into `args.save`, in the directory of its iteration. Every rank calls.

    When the call returns, the checkpoint is complete and durable, and the tracker file names it.
    With `args.async_save` the call returns when the state may change, and all this is so once
    maybe_finalize_async_save() has finalized the save. The tracker is replaced atomically after
    the checkpoint is published, so after a crash it names a complete checkpoint. With
    `args.save_retain_interval` the checkpoint that the tracker named before is then removed, unless
    its iteration is a multiple of the interval, it is a symbolic link, or it has not been published.

    Args:
        iteration: number of iterations that the run has done.
        model: a module, or the list of this rank's virtual pipeline stages. Wrappers for data
            parallelism and half precision are removed. Each has `sharded_state_dict(metadata=)`.
        optimizer: has `sharded_state_dict(model_state, metadata=)`; or None.
        opt_param_scheduler: has `state_dict()`; or None.
        num_floating_point_operations_so_far: saved, and returned by load_checkpoint().
        checkpointing_context: a dict that the program keeps from save to save. Its "save_strategy"
            saves; if it has none, the strategy that is made from `args` is stored there. Its
            "async_calls" is the queue of the saves in flight (Megatron-Core's or Tilestone's); if it
            has none, one is stored there. Without `args` Megatron's own queue is used, if loaded.
        pipeline_rank, expert_rank, tensor_rank, pipeline_parallel, expert_parallel: ignored: they
            name files of the legacy format.
        non_persistent_ckpt: save a checkpoint that the next one replaces, into the directory
            "non_persistent" of `args.save` (or `args.non_persistent_global_ckpt_dir`).
            `args.non_persistent_ckpt_type` must be "global".
        train_data_iterator: passed to the rerun state machine.
        preprocess_common_state_dict_fn: takes a copy of the common state and returns what the ranks
            compare; None: the common state without the arguments `rank` and `local_rank`.
        release: save as "release", without an iteration in the name.
        tp_group, pp_group: tensor and pipeline parallel ranks. They give the place of the random
            states.
        dp_cp_group: data and context parallel ranks. Passed to the `sharded_state_dict` methods in
            their metadata; also says which copy of the random states a rank has.
        dp_group: data parallel ranks; used with `args.data_parallel_random_init`.
        expt_dp_group: ignored: the engine shares the work among all ranks.
        rng_state_key_prefix: as key_prefix of get_rng_state().
        args: the program's arguments, which are also saved, as a Namespace.
            `tilestone.megatron.training.ARGUMENTS` lists what is read of them, with the defaults.
            None: Megatron's global arguments, if the program has set them up.
        rng_tracker: as for get_rng_state().
        rerun_state_machine: that of Megatron-Core; None: the one that the program has made.
        process_group: the ranks that save; None: torch's default group.
        timeout: limit for the whole call in seconds; None: no limit. Code of the program (its
            `sharded_state_dict` methods, its own strategy) is not interrupted.

    Returns:
        What `tilestone.save` returns, such as the bytes that this rank wrote; None if a strategy
        class of the program has saved, or the save goes on in the background.

    Raises:
        CheckpointingException: the save failed; raised on every rank. An existing checkpoint in the
            directory is unchanged, and the tracker names what it named before. UnsupportedError:
            local non-persistent checkpoints and other formats; the message has the argument.
            InvalidArgumentError: the directory is a checkpoint's own. AlreadyExistsError: another
            job is saving the same checkpoint. TimeoutError: with the step and the ranks that did
            not reach it. A rank that fails while it waits for the end of the last step can't know
            whether the tracker was moved.
    """
    deadline = Deadline(timeout)
    group = _group(process_group)
    given = Groups.given(tp_group, pp_group, dp_cp_group, dp_group)

    def prepare() -> Saving:
        deadline.check()
        made = Saving(
            _program.given_or_global(args), iteration, release, non_persistent_ckpt,
            train_data_iterator, given.of_module(_first(unwrap_model(model))),
            checkpointing_context,
        )  # fmt: skip
        if _arguments.read(made.args, "async_save"):
            made.schedule = scheduler(checkpointing_context, args, process_group)
        if _ranks.rank(group) == 0:
            _core.expect_megatron_run(location(made.run_directory))
        return made

    save = prepared("preparation of a save", group, prepare, deadline)
    if save.schedule is None:  # otherwise one that is in flight would move the tracker back later
        maybe_finalize_async_save(checkpointing_context, blocking=True)

    def generate() -> Dict[str, Any]:
        save.rng = save.random_states(rng_state_key_prefix, rng_tracker, deadline)
        machine = rerun_state_machine or _program.rerun_state_machine()
        rerun = None if machine is None else machine.state_dict(
            data_iterator=train_data_iterator, ckpt_format=_arguments.read(save.args, "ckpt_format")
        )  # fmt: skip
        made = save.state_dict(unwrap_model(model), optimizer, opt_param_scheduler, rerun)
        _arguments.check_kept(made["args"])
        made["num_floating_point_operations_so_far"] = num_floating_point_operations_so_far
        return made

    made = together("state of a training run", group, generate, deadline)
    preprocess = preprocess_common_state_dict_fn or without_own_arguments
    result = save.write(made, preprocess, process_group, deadline)
    finalize = Finalizing(save, group, deadline)
    if save.schedule is not None:
        save.schedule(finalize.instead_of(result))
        return None
    finalize()
    return result  # type: ignore[no-any-return]


def _group(given: Any) -> Any:
    """Returns the ranks that take part.

    Raises:
        InvalidArgumentError: this rank is not one of them.
    """
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            "this rank is not in the process_group that was passed",
            hint="call only on the ranks of the group",
        )
    return _ranks.default_group(given)


def _first(model: Any) -> Any:
    stages = state.as_list(model)
    return stages[0] if stages else None


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
    dp_group: Any = None,
    expt_dp_group: Any = None,
    rng_state_key_prefix: str = "",
    *,
    args: Any = None,
    rng_tracker: Any = None,
    rerun_state_machine: Any = None,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    allow_classes: Any = (),
) -> Tuple[int, Any]:
    """Resumes a training run from `args.load`, in any layout. Every rank calls.

    The tracker names the checkpoint. If the tracker is empty, damaged or missing, or names a
    checkpoint that can't be loaded, the newest valid one is loaded, with a warning. One rank
    chooses for all.

    Args:
        ddp_model: a module, or the list of this rank's virtual pipeline stages. It is filled in
            place, and `load_state_dict` is called on what was passed, wrapped or not.
        optimizer, opt_param_scheduler: as for save_checkpoint(); loaded by `load_state_dict`.
        load_arg: the attribute of `args` that names the run's directory.
        strict: passed to `load_state_dict` of the modules; False is passed if
            `args.dist_ckpt_strictness` allows entities that are not in the checkpoint.
        checkpointing_context: its "load_strategy" loads.
        skip_load_to_model_and_opt: do not call `load_state_dict` of modules and optimizer, because
            their tensors have been filled in place.
        tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group, rng_state_key_prefix: as for
            save_checkpoint(). `dp_cp_group` is put into the checkpoint's content metadata, which is
            passed to the `sharded_state_dict` methods.
        args: as for save_checkpoint(). consumed_train_samples, skipped_train_samples and
            consumed_valid_samples are set to the checkpoint's values, and `finetune` is set to True
            if `pretrained_checkpoint` was loaded.
        rng_tracker, rerun_state_machine, process_group: as for save_checkpoint().
        timeout: limit for the whole call in seconds, as for save_checkpoint().
        allow_classes: as for `tilestone.load`. Namespaces, signals and Megatron's enums are always
            allowed.

    Returns:
        (iteration, num_floating_point_operations_so_far); (0, 0) if there is no checkpoint. The
        iteration is also 0 for a release checkpoint, and with `finetune`.

    Raises:
        CheckpointingException: on every rank. NotFoundError: there is no checkpoint and
            `args.exit_on_missing_checkpoint` is set, or something is not in the checkpoint.
            InvalidArgumentError: arguments that must be equal differ. MismatchError: a rank sees
            other files. TimeoutError: with the step and the ranks that did not reach it.
    """
    deadline = Deadline(timeout)
    group = _group(process_group)
    given = Groups.given(tp_group, pp_group, dp_cp_group, dp_group)

    def prepare() -> Resume:
        deadline.check()
        found = _program.given_or_global(args)
        return Resume(
            found, Places.of(found, load_arg), given.of_module(_first(unwrap_model(ddp_model))),
            rng_state_key_prefix, rng_tracker,
            rerun_state_machine or _program.rerun_state_machine(), _ranks.size(group),
            checkpointing_context,
        )  # fmt: skip

    resume = prepared("preparation of a load", group, prepare, deadline)

    found = find(resume.places, group, deadline)
    if found is None:
        together("choice of a checkpoint", group, resume.report_none, deadline)
        return 0, 0

    def ask() -> Dict[str, Any]:
        resume.decide(found, _ranks.rank(group) == 0, optimizer)
        fills = [] if skip_load_to_model_and_opt else state.as_list(ddp_model)
        resume.check_loads(fills, optimizer, opt_param_scheduler)
        return resume.template(unwrap_model(ddp_model), optimizer, opt_param_scheduler, deadline)

    wanted = together("state of a training run", group, ask, deadline)
    loaded = resume.load(wanted, process_group, deadline, allow_classes)

    def give_back() -> Tuple[int, Any]:
        if not skip_load_to_model_and_opt:
            resume.load_modules(state.as_list(ddp_model), loaded, strict)
        resume.load_optimizer(
            optimizer, opt_param_scheduler, loaded, skip_load_to_model_and_opt
        )
        return resume.restore(loaded)

    result = together("resumption of a training run", group, give_back, deadline)
    if _ranks.rank(group) == 0:
        logger.info("Loaded the checkpoint %s at iteration %d", found.directory, result[0])
    return result
