"""One load of a training run: what it takes from a checkpoint, and how it restores that."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection
from typing import Any, Dict, List, Tuple

from tilestone._errors import NotFoundError, UnsupportedError
from tilestone.megatron import serialization
from tilestone.megatron._models.tensors import to_pass
from tilestone.megatron._ranks import Deadline
from tilestone.megatron.training import _arguments, _program, state
from tilestone.megatron.training._choice import Found, Places
from tilestone.megatron.training._program import Groups
from tilestone.megatron.training.rng import RNG_KEY, get_rng_state, restore_rng_state
from tilestone.megatron.validation import StrictHandling

logger = logging.getLogger("tilestone.megatron")

_STRICT = (
    StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL,
)  # fmt: skip
_SHARDING = "distrib_optim_sharding_type"
_NO_OPTIMIZER_HINT = "set no_load_optim or finetune to load without it"


@dataclasses.dataclass(eq=False)
class Resume:
    """A load, from its arguments to its result. Methods raise on this rank only.

    Attributes:
        args: the program's arguments.
        places: where to look for the checkpoint.
        groups: the process groups.
        key_prefix: what the key of the random states begins with.
        rng_tracker, rerun_machine: the program's, or None.
        world: the number of ranks that load.
        context: the program's checkpointing_context, or None.
        mode: what to do about keys that are requested and not stored, or the reverse.
    """

    args: Any
    places: Places
    groups: Groups
    key_prefix: str
    rng_tracker: Any
    rerun_machine: Any
    world: int
    context: Dict[str, Any] | None

    def __post_init__(self) -> None:
        """
        Raises:
            CheckpointError: an argument is invalid, or a group is not known.
        """
        args, given = self.args, self.groups
        _arguments.to_namespace(args)  # raises if args has no attributes
        if not _arguments.read(args, "auto_detect_ckpt_format"):
            _arguments.check_format(args)
        self.mode = _arguments.strictness(args)
        self._given_strategy = (self.context or {}).get("load_strategy")
        self.decisions = _arguments.decisions(args, _arguments.OF_A_LOAD)
        self.decisions["the strategy of the context"] = type(self._given_strategy).__name__
        self._tp, self._pp = given.find("tp"), given.find("pp")
        self._dp_cp = given.find("dp_cp")
        if not _arguments.read(args, "no_load_rng"):
            given.for_random_states(args)

    def report_none(self) -> None:
        """Logs or raises that there is no checkpoint.

        Raises:
            NotFoundError: `args.exit_on_missing_checkpoint` is set.
        """
        load = self.places.load
        text = "no directory is given" if load is None else f"there is no checkpoint in {load}"
        if _arguments.read(self.args, "exit_on_missing_checkpoint"):
            raise NotFoundError(text, file=load or "")
        if self._tp.rank() == self._pp.rank() == self._dp_cp.rank() == 0:
            logger.warning("%s: the run starts from its initial state", text)

    def decide(self, found: Found, speaks: bool, optimizer: Any) -> None:
        """Decides what to load from a checkpoint. A further call decides for another checkpoint.

        Args:
            found: the checkpoint.
            speaks: whether this rank logs what is the same on all ranks.
            optimizer: the program's optimizer, or None.

        Raises:
            CheckpointError: the run can't be resumed from the checkpoint.
        """
        self._found = found
        self._say = logger.warning if speaks else (lambda *words: None)
        if found.finetune:
            _arguments.set_argument(self.args, "finetune", True)
        self._finetune = bool(_arguments.read(self.args, "finetune"))
        self._stored = found.arguments or {}
        if not self._finetune:
            _arguments.check_equal(self.args, self._stored)
        self._takes_over = found.arguments is not None and not self._finetune
        is_new = found.release or self._finetune
        self._has_layout = self._stored_layout() == (self._pp.size(), self._tp.size())
        self._with_optimizer = not is_new and not _arguments.read(self.args, "no_load_optim")
        self._with_rng = (
            not is_new and not _arguments.read(self.args, "no_load_rng") and self._keeps_rng()
        )
        self._with_rerun = not is_new and self._keeps_rerun()
        self._metadata = dict(found.content_metadata or {})
        if self._with_optimizer and state.has_state(optimizer):
            self._check_optimizer(optimizer)
        self._metadata["dp_cp_group"] = to_pass(self._dp_cp)

    def _stored_layout(self) -> Tuple[int, int]:
        """(PP, TP) sizes of the run that saved."""
        grid = self._found.rng_grids.get(f"{self.key_prefix}{RNG_KEY}", ())
        if len(grid) == 2:
            return grid[0], grid[1]
        sizes = []
        for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
            if name not in self._stored:
                self._say("The checkpoint's arguments have no %s; assuming 1", name)
            sizes.append(self._stored.get(name, 1))
        return sizes[0], sizes[1]

    def _layouts(self) -> str:
        pp, tp = self._stored_layout()
        return (
            f"it was saved with TP {tp} x PP {pp}, but this run has TP {self._tp.size()} x "
            f"PP {self._pp.size()}"
        )

    def _keeps_rng(self) -> bool:
        """Whether the random states can be restored; logs why if not."""
        if self._stored.get("no_save_rng"):
            self._say("Random states are not restored: the checkpoint has none (no_save_rng)")
            return False
        key = f"{self.key_prefix}{RNG_KEY}"
        if key not in self._found.rng_grids:
            raise NotFoundError(
                f"{self._found.directory} does not hold random states",
                key=key,
                hint="set no_load_rng or finetune to load without them",
            )
        if not self._has_layout:
            self._say("Random states of the checkpoint are not restored: %s", self._layouts())
        return self._has_layout

    def _keeps_rerun(self) -> bool:
        """Whether a step that was to be run again can be run again."""
        if self.rerun_machine is None or not self.rerun_machine.validate_state_dict(self._found.rerun_state):
            return False
        same = self._has_layout and self._stored.get("world_size", 0) == self.world
        if "data_parallel_size" in self._stored and hasattr(self.args, "data_parallel_size"):
            same &= self._stored["data_parallel_size"] == self.args.data_parallel_size
        if not same:
            self._say("The state of the rerun state machine is ignored: the layout has changed")
        return same

    def _check_optimizer(self, optimizer: Any) -> None:
        if self._stored.get("no_save_optim"):
            raise NotFoundError(
                f"{self._found.directory} was saved without the optimizer (no_save_optim)",
                key="optimizer",
                hint=_NO_OPTIMIZER_HINT,
            )
        if not _arguments.read(self.args, "use_distributed_optimizer"):
            return
        if self._found.content_metadata is None:  # saved before Megatron-Core 0.13
            fully_parallel = self._stored.get("ckpt_fully_parallel_save")
            self._metadata[_SHARDING] = (
                "fully_sharded_model_space" if fully_parallel else "dp_zero_gather_scatter"
            )
        kind = self._metadata.get(_SHARDING)
        known = getattr(
            optimizer, "checkpoint_fully_reshardable_formats", state.FULLY_RESHARDABLE
        )
        if kind is not None and kind not in known and not self._has_layout:
            raise UnsupportedError(
                f"the optimizer's state in {self._found.directory} is sharded as {kind!r}, which "
                f"requires the same TP and PP: {self._layouts()}",
                key="optimizer",
                hint="convert the checkpoint with `tilestone convert --optimizer "
                "fully_reshardable`, save with dist_ckpt_optim_fully_reshardable, or set "
                "no_load_optim",
            )

    def check_loads(self, stages: List[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
        """Checks, before anything is loaded, that the program's objects have the methods for it.

        Args:
            stages: the modules that will get their state.
            optimizer, opt_param_scheduler: of the program, or None.

        Raises:
            InvalidArgumentError: a method is missing.
        """
        for module in stages:
            state.check_has(module, "load_state_dict")
        if not self._with_optimizer:
            if self._reloads(optimizer):
                state.check_has(optimizer, "reload_model_params")
            return
        if stages and state.has_state(optimizer):
            state.check_has(optimizer, "load_state_dict")
        if opt_param_scheduler is not None:
            state.check_has(opt_param_scheduler, "load_state_dict")

    def _reloads(self, optimizer: Any) -> bool:
        """Whether an optimizer that gets no state copies the model's parameters again."""
        halves = _arguments.read(self.args, "fp16") or _arguments.read(self.args, "bf16")
        return bool(halves) and optimizer is not None

    def template(
        self, model: Any, optimizer: Any, opt_param_scheduler: Any, deadline: Deadline
    ) -> Dict[str, Any]:
        """The request. With data_parallel_random_init all data parallel ranks must call."""
        rng = rerun = None
        if self._with_rng:
            rng = get_rng_state(
                "torch_dist",
                **self.groups.for_random_states(self.args),
                key_prefix=self.key_prefix,
                args=self.args,
                rng_tracker=self.rng_tracker,
                timeout=deadline.timeout(),
            )
        if self._with_rerun:
            rerun = self.rerun_machine.state_dict(
                data_iterator=None, ckpt_format="torch_dist", force=True
            )
        return state.generate_state_dict(
            argparse.Namespace(),  # those of a save leave parts out
            model,
            optimizer if self._with_optimizer else None,
            opt_param_scheduler if self._with_optimizer else None,
            rng,
            None,
            {"metadata": self._metadata, "is_loading": True},
            {"metadata": self._metadata},
            rerun,
        )

    def known_classes(self, allow_classes: Collection[str]) -> Collection[str]:
        """Names of the classes that may be instantiated: the caller's and Megatron's own."""
        is_named = isinstance(allow_classes, str)  # the load refuses a str
        if is_named or not self._with_rerun:
            return allow_classes
        return [*allow_classes, *_program.RERUN_CLASSES]

    def load(
        self,
        wanted: Dict[str, Any],
        process_group: Any,
        deadline: Deadline,
        allow_classes: Collection[str],
    ) -> Dict[str, Any]:
        """Loads the request. Every rank calls."""
        checks_access = _arguments.read(self.args, "ckpt_load_validate_sharding_integrity")
        loaded = serialization.load(
            wanted,
            self._found.directory,
            self._given_strategy,
            validate_access_integrity=checks_access,
            strict=self.mode,
            verify_integrity=_arguments.read(self.args, "verify_integrity"),
            process_group=process_group,
            timeout=deadline.timeout(),
            allow_classes=self.known_classes(allow_classes),
        )
        assert isinstance(loaded, dict)  # the mode does not return keys
        return loaded

    def load_modules(self, stages: List[Any], loaded: Dict[str, Any], strict: bool) -> None:
        """Passes the loaded state to the stages of the model."""
        strict = strict and self.mode in _STRICT
        for stage, module in enumerate(stages):
            key = state.model_key(stage, len(stages))
            if key in loaded or len(stages) == 1:  # one of several stages may have no parameters
                module.load_state_dict(self._part(loaded, key), strict=strict)

    def load_optimizer(
        self, optimizer: Any, opt_param_scheduler: Any, loaded: Dict[str, Any], skip: bool
    ) -> None:
        """Passes the loaded state to optimizer and scheduler. If they are not loaded, the optimizer
        copies the model's parameters again."""
        if not self._with_optimizer:
            if self._reloads(optimizer):
                main = _arguments.read(self.args, "load_main_params_from_ckpt")
                optimizer.reload_model_params(**({"state_dict": loaded} if main else {}))
            return
        if state.has_state(optimizer) and not skip:
            optimizer.load_state_dict(self._part(loaded, "optimizer"))
        if opt_param_scheduler is not None:
            older = "lr_scheduler"
            key = older if older in loaded else "opt_param_scheduler"
            opt_param_scheduler.load_state_dict(self._part(loaded, key))

    def _part(self, loaded: Dict[str, Any], key: str) -> Any:
        if key in loaded:
            return loaded[key]
        hint = "" if key.startswith("model") else _NO_OPTIMIZER_HINT
        raise NotFoundError(
            f"{self._found.directory} does not hold {key!r}", key=key, hint=hint
        )

    def restore(self, loaded: Dict[str, Any]) -> Tuple[int, Any]:
        """Restores everything but model and optimizer.

        Returns:
            (iteration, floating point operations) at which the run continues.
        """
        if self._with_rerun:
            self.rerun_machine.load_state_dict(self._part(loaded, "rerun_state_machine"))
        if self._takes_over:
            _arguments.set_consumed(self.args, self._stored)
            _program.update_num_microbatches(self.args.consumed_train_samples)
        if self._with_rng:
            found = self.groups.for_random_states(self.args)
            restore_rng_state(
                self._part(loaded, RNG_KEY),
                args=self.args,
                dp_group=found.get("dp_group"),
                rng_tracker=self.rng_tracker,
            )
        return self._iteration(loaded), loaded.get("num_floating_point_operations_so_far", 0)

    def _iteration(self, loaded: Dict[str, Any]) -> int:
        if self._found.release or self._finetune:
            return 0
        older = "total_iters"
        return int(self._part(loaded, "iteration" if "iteration" in loaded else older))
