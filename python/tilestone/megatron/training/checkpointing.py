"""Saving and resuming a training run: the functions of Megatron's `training/checkpointing.py`.

Directories, files and state are Megatron's, so that either side resumes the other's runs. What
Megatron takes from global state is an argument here: the program's arguments are `args=` (Megatron's
global ones, where it is None), and each process group is an argument that is looked up by itself
where it is None (see `tilestone.megatron.groups.find_group`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Dict, List, Tuple, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron.mapping import CommonStateDict, StateDict
from tilestone.megatron.strategies._together import (
    Deadline,
    agreed,
    default_group,
    together,
)
from tilestone.megatron.training import _arguments, _program, state
from tilestone.megatron.training._alike import prepared
from tilestone.megatron.training._choice import Places, load_latest
from tilestone.megatron.training._groups import Groups
from tilestone.megatron.training._look import Found
from tilestone.megatron.training._resume import Resume
from tilestone.megatron.training._saving import Saving, without_own_arguments
from tilestone.megatron.training.names import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    read_metadata,
)
from tilestone.megatron.training.rng import get_rng_state, restore_rng_state
from tilestone.megatron.training.state import (
    build_sharded_state_dict_metadata,
    generate_state_dict,
    unwrap_model,
)

Result = TypeVar("Result")

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

_build_sharded_state_dict_metadata = build_sharded_state_dict_metadata  # Megatron's name for it



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
) -> None:
    """Saves a training run into `args.save`, in the directory of its iteration. Every rank calls.

    When it returns, the checkpoint is complete and durable, and the tracker file names it. The
    tracker is replaced in one step after the checkpoint is published: a crash leaves it naming a
    whole one. With `args.save_retain_interval` the checkpoint that the tracker named before is then
    removed, unless its iteration is a multiple of the interval, it is a symbolic link, or it has
    not been published.

    Args:
        iteration: how many iterations the run has done.
        model: a module, or the list of this rank's virtual pipeline stages; wrappers for data
            parallelism and half precision are taken off. Each has `sharded_state_dict(metadata=)`.
        optimizer: has `sharded_state_dict(model_state, metadata=)`; or None.
        opt_param_scheduler: has `state_dict()`; or None.
        num_floating_point_operations_so_far: saved, and given back by load_checkpoint().
        checkpointing_context: kept by the program from save to save. "save_strategy" in it saves;
            where it has none, the strategy that is made from `args` is put there.
        pipeline_rank, expert_rank, tensor_rank, pipeline_parallel, expert_parallel: without meaning
            here: they name files of the legacy format.
        non_persistent_ckpt: save one of those that the next one replaces, into the directory
            "non_persistent" of `args.save` (or `args.non_persistent_global_ckpt_dir`).
            `args.non_persistent_ckpt_type` must be "global".
        train_data_iterator: given to the machine that reruns steps.
        preprocess_common_state_dict_fn: of a copy of the common state, makes what is compared
            between ranks; by default the arguments without `rank` and `local_rank`.
        release: save as "release", without an iteration in the name.
        tp_group, pp_group: tensor and pipeline parallel ranks: the place of the random states.
        dp_cp_group: data and context parallel ranks: goes to the `sharded_state_dict` methods in
            their metadata, and says which copy of the random states a rank has.
        dp_group: data parallel ranks; used with `args.data_parallel_random_init`.
        expt_dp_group: expert data parallel ranks; used where
            `args.ckpt_fully_parallel_save_process_group` is "ep_dp".
        rng_state_key_prefix: as key_prefix of get_rng_state().
        args: the program's arguments; it is saved, as a Namespace. What is read of it, and the
            defaults, are in `tilestone.megatron.training.ARGUMENTS`. None: Megatron's global ones,
            where the program has set them up.
        rng_tracker: as for get_rng_state().
        rerun_state_machine: Megatron-Core's; by default the one that the program has made.
        process_group: the ranks that save; None: torch's default group.
        timeout: seconds for the whole call; None for no limit. Code of the program (its
            `sharded_state_dict` methods, a strategy of its own) is not stopped.

    Raises:
        CheckpointingException: on every rank; what stood in the directory still stands, and the
            tracker names what it named. UnsupportedError: asynchronous saves, local non-persistent
            checkpoints and other formats, by their argument. AlreadyExistsError: another job is
            saving the same checkpoint. TimeoutError: with the step, and the ranks that did not
            come to it; a rank that waits for the end of the last one can't know whether the tracker
            was moved.
    """
    deadline = Deadline(timeout)
    group = _group(process_group)
    given = Groups.given(tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)

    def prepare() -> Saving:
        deadline.check()
        return Saving(
            _arguments.given_or_global(args), iteration, release, non_persistent_ckpt, train_data_iterator,
            given.of_module(_first(unwrap_model(model))), checkpointing_context,
        )  # fmt: skip

    save = prepared("preparation of a save", group, prepare, deadline)

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

    try:
        made = _one_works(
            "state of a training run", group, generate, save.locks.begin, deadline
        )
        preprocess = preprocess_common_state_dict_fn or without_own_arguments
        save.write(made, preprocess, process_group, deadline)
        _one_works("tracker of a training run", group, _nothing, save.publish, deadline)
    finally:
        save.locks.end()
    if _ranks.rank(group) == 0:
        save.remove_files()


def _group(given: Any) -> Any:
    """The ranks that take part.

    Raises:
        InvalidArgumentError: this rank is not one of them.
    """
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            "this rank is not in the process_group that it gives",
            hint="call on the ranks of the group alone",
        )
    return default_group(given)


def _one_works(
    work: str,
    group: Any,
    step: Callable[[], Result],
    then: Callable[[Deadline], None],
    deadline: Deadline,
) -> Result:
    """step() on every rank, and then() on one, once all have done it. All raise what one raises."""

    def decide(said: List[bytes]) -> bytes:
        then(deadline)
        return b""

    return agreed(work, group, step, lambda result: b"", decide, deadline)[0]


def _nothing() -> None:
    """What the ranks do while one works."""


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
    """Resumes a training run from `args.load`, at any layout. Every rank calls.

    The tracker names the checkpoint. Where it is empty, torn, missing, or names one that can't be
    loaded, the newest valid one is taken, and a warning says so. One rank decides for all.

    Args:
        ddp_model: a module, or the list of this rank's virtual pipeline stages; filled in place,
            by `load_state_dict` of what is given, wrapped or not.
        optimizer, opt_param_scheduler: as for save_checkpoint(); loaded by `load_state_dict`.
        load_arg: the attribute of `args` that names the run's directory.
        strict: of `load_state_dict` of the modules. Where `args.dist_ckpt_strictness` lets keys be
            missing, they are left out of that as well.
        checkpointing_context: "load_strategy" in it loads.
        skip_load_to_model_and_opt: don't call `load_state_dict` of modules and optimizer: what they
            hold has been filled in place.
        tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group, rng_state_key_prefix: as for
            save_checkpoint(). `dp_cp_group` is put into the content metadata of the checkpoint,
            which goes to the `sharded_state_dict` methods.
        args: as for save_checkpoint(). Its consumed_train_samples,
            skipped_train_samples and consumed_valid_samples are set to the checkpoint's, and
            `finetune` to True where `pretrained_checkpoint` was loaded.
        rng_tracker, rerun_state_machine, process_group: as for save_checkpoint().
        timeout: seconds for the whole call, as for save_checkpoint().
        allow_classes: as for `tilestone.load`. Namespaces, signals and Megatron's enums need not
            be named.

    Returns:
        (iteration, num_floating_point_operations_so_far); (0, 0) where there is no checkpoint. The
        iteration is 0 too after loading a release checkpoint, or with `finetune`.

    Raises:
        CheckpointingException: on every rank. NotFoundError: no checkpoint, with
            `args.exit_on_missing_checkpoint`, or something in it is missing. InvalidArgumentError:
            arguments that must be equal are not. MismatchError: a rank sees other files.
            TimeoutError: with the step, and the ranks that did not come to it.
    """
    deadline = Deadline(timeout)
    group = _group(process_group)
    given = Groups.given(tp_group, pp_group, dp_cp_group, dp_group, expt_dp_group)

    def prepare() -> Resume:
        deadline.check()
        found = _arguments.given_or_global(args)
        return Resume(
            found, Places.of(found, load_arg), given.of_module(_first(unwrap_model(ddp_model))),
            rng_state_key_prefix, rng_tracker,
            rerun_state_machine or _program.rerun_state_machine(), _ranks.size(group),
            checkpointing_context,
        )  # fmt: skip

    resume = prepared("preparation of a load", group, prepare, deadline)

    def load(found: Found) -> Dict[str, Any]:
        def ask() -> Tuple[Dict[str, Any], Any]:
            resume.take(found, _ranks.rank(group) == 0, optimizer)
            fills = [] if skip_load_to_model_and_opt else state.as_list(ddp_model)
            resume.check_loads(fills, optimizer, opt_param_scheduler)
            strategy = resume.strategy()
            model = unwrap_model(ddp_model)
            return resume.template(model, optimizer, opt_param_scheduler, deadline), strategy

        return resume.load(
            *together("state of a training run", group, ask, deadline),
            process_group, deadline, allow_classes,
        )  # fmt: skip

    chosen = load_latest(resume.places, group, deadline, load)
    if chosen is None:
        together("choice of a checkpoint", group, resume.report_none, deadline)
        return 0, 0
    found, loaded = chosen

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
