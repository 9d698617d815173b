"""One save of a training run: where it writes, with which groups, and what it replaces."""

from __future__ import annotations

import copy
import dataclasses
import logging
import operator
import os
from collections.abc import Callable
from typing import Any, Dict

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilestone.megatron import serialization
from tilestone.megatron._calls import save_call
from tilestone.megatron._ranks import Deadline
from tilestone.megatron.distributed_optimizer import layout_objects
from tilestone.megatron.mapping import CommonStateDict, StateDict
from tilestone.megatron.training import _arguments, names
from tilestone.megatron.training._choice import (
    check_non_persistent_type,
    non_persistent_directory,
)
from tilestone.megatron.training._program import Groups
from tilestone.megatron.training.names import get_checkpoint_name
from tilestone.megatron.training.rng import get_rng_state
from tilestone.megatron.training.state import (
    build_sharded_state_dict_metadata,
    generate_state_dict,
)

logger = logging.getLogger("tilestone.megatron")

_LAST_ITERATION = 10**18 - 1
_IN_BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter")
_OF_ONE_RANK = ("rank", "local_rank")  # arguments that are different on every rank


def _layouts(optimizer: Any, made: Dict[str, Any]) -> Dict[str, Any]:
    """The layouts of the optimizer's buckets, without which nobody can convert them."""
    if not all(
        hasattr(one, "gbuf_ranges") or getattr(one, "is_stub_optimizer", False)
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
    ):
        return {}  # it has no buckets
    models = {key: value for key, value in made.items() if key.startswith("model")}
    try:
        return {"optimizer_layouts": layout_objects(optimizer, models)}
    except CheckpointError as error:
        logger.warning("The layout of the optimizer's buckets is not stored: %s", error)
        return {}


def without_own_arguments(common: CommonStateDict) -> StateDict:
    """The common state without the arguments that are different on every rank."""
    if "args" not in common:
        return common
    args = copy.copy(common["args"])
    for name in _OF_ONE_RANK:
        vars(args).pop(name, None)
    return {**common, "args": args}


def _iteration(given: Any) -> int:
    """Checks that a folder's name and the tracker can hold an iteration."""
    try:
        found = operator.index(given)
    except TypeError:
        found = None
    if found is None or isinstance(given, bool) or not 0 <= found <= _LAST_ITERATION:
        raise InvalidArgumentError(
            f"an iteration must be an int of at least 0 with at most {len(str(_LAST_ITERATION))} "
            f"digits, not {given!r}"
        )
    return found


@dataclasses.dataclass(eq=False)
class Saving:
    """A save, from its arguments to the tracker. Methods raise on this rank only.

    Raises:
        CheckpointError: an argument is not supported or invalid, or a group is not known.
    """

    args: Any
    iteration: int
    release: bool
    non_persistent: bool
    train_data_iterator: Any
    groups: Groups
    context: Dict[str, Any] | None
    rng: Any = None
    schedule: Callable[[Any], Any] | None = None  # takes the request of an async save

    def __post_init__(self) -> None:
        args = self.args
        _arguments.check_saveable(args, self.train_data_iterator)
        self.release, self.iteration = bool(self.release), _iteration(self.iteration)
        self.run_directory = self._run_directory()
        self.path = get_checkpoint_name(
            self.run_directory, self.iteration, self.release, return_base_dir=True
        )
        self.metadata = build_sharded_state_dict_metadata(args, self.groups.find("dp_cp"))
        self.interval = _arguments.whole_number(args, "save_retain_interval", 1)
        self._choose_strategy(self.context)
        self.decisions = _arguments.decisions(args, _arguments.OF_A_SAVE)
        self.decisions["the strategy that saves"] = type(self.strategy).__name__
        if not _arguments.read(args, "no_save_rng"):
            self.groups.for_random_states(args)

    def _run_directory(self) -> str:
        directory = _arguments.path(self.args, "save")
        if self.non_persistent:
            if check_non_persistent_type(self.args) is None:
                raise InvalidArgumentError(
                    "non_persistent_ckpt=True needs args.non_persistent_ckpt_type='global'"
                )
            if self.release:
                raise UnsupportedError("a release checkpoint can't be a non-persistent one")
            directory = non_persistent_directory(self.args, directory)
            self._check_is_apart(directory)
        if not directory:
            raise InvalidArgumentError("args.save must name the directory to save to")
        return directory

    def _check_is_apart(self, directory: str | None) -> None:
        """Checks that non-persistent checkpoints, of which only the newest is kept, are apart.

        Raises:
            InvalidArgumentError: their directory is also that of persistent checkpoints.
        """
        for name in ("save", "load", "pretrained_checkpoint"):
            other = _arguments.path(self.args, name)
            if directory and other and os.path.realpath(directory) == os.path.realpath(other):
                raise InvalidArgumentError(
                    f"args.non_persistent_global_ckpt_dir is the same as args.{name}, {directory}: "
                    "the next non-persistent checkpoint would remove all others there",
                    hint="use a separate directory for it",
                )

    def _choose_strategy(self, context: Dict[str, Any] | None) -> None:
        if context is not None and "save_strategy" in context:
            self.strategy = context["save_strategy"]
            self.validates = not _arguments.read(self.args, "ckpt_assume_constant_structure")
            return
        self.validates = True
        self.strategy = serialization.get_default_save_sharded_strategy(
            _arguments.read(self.args, "ckpt_format")
        )
        if context is not None:
            context["save_strategy"] = self.strategy

    def random_states(self, key_prefix: str, rng_tracker: Any, deadline: Deadline) -> Any:
        """The random states' entity. With data_parallel_random_init all of dp_group must call."""
        if _arguments.read(self.args, "no_save_rng"):
            return None
        return get_rng_state(
            _arguments.read(self.args, "ckpt_format"),
            **self.groups.for_random_states(self.args),
            key_prefix=key_prefix,
            args=self.args,
            rng_tracker=rng_tracker,
            timeout=deadline.timeout(),
        )

    def state_dict(
        self, model: Any, optimizer: Any, opt_param_scheduler: Any, rerun: Any
    ) -> Dict[str, Any]:
        """The state to save, with sharded entities."""
        metadata = {"metadata": self.metadata}
        made = generate_state_dict(
            self.args, model, optimizer, opt_param_scheduler, self.rng, self.iteration,
            metadata, metadata, rerun,
        )  # fmt: skip
        if "optimizer" in made and self.metadata.get("distrib_optim_sharding_type") in _IN_BUCKETS:
            made.update(_layouts(optimizer, made))
        return made

    def write(
        self,
        made: Dict[str, Any],
        preprocess: Callable[[CommonStateDict], StateDict],
        process_group: Any,
        deadline: Deadline,
    ) -> Any:
        """Saves and publishes the checkpoint, and returns what the save did. Every rank calls.

        With args.async_save it is not published yet, and the request is returned.
        """
        return save_call.save(
            made,
            self.path,
            self.strategy,
            validate_access_integrity=self.validates,
            preprocess=preprocess,
            content_metadata=self.metadata,
            process_group=process_group,
            async_sharded_save=self.schedule is not None,
            verify_integrity=_arguments.read(self.args, "verify_integrity"),
            timeout=deadline.timeout(),
        )

    def publish(self) -> None:
        """Names the checkpoint in the tracker.

        Raises:
            StorageError: the tracker can't be written.
        """
        self._replaced = _core.move_megatron_tracker(
            names.location(self.run_directory),
            self.iteration,
            self.release,
            self.interval or 0,
            self.non_persistent,
        )
        logger.info("Saved the checkpoint of iteration %d: %s", self.iteration, self.path)

    def remove_replaced(self) -> None:
        """Removes the checkpoints that this one replaces. Failures are logged."""
        if self.interval is not None or self.non_persistent:
            _core.remove_megatron_steps(names.location(self.run_directory), self._replaced)
