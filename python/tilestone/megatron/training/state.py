"""The content of a training run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Dict, List

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import groups
from tilestone.megatron._calls import engine_calls
from tilestone.megatron._models.tensors import to_pass
from tilestone.megatron.training import _arguments

CHECKPOINT_VERSION = 3.0
# The shardings of a distributed optimizer's state that do not require the same TP and PP.
FULLY_RESHARDABLE = frozenset(["fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor"])
_WRAPPERS = {
    "DistributedDataParallel", "TorchFullyShardedDataParallel", "FullyShardedDataParallel",
    "Float16Module",
}  # fmt: skip


def unwrap_model(model: Any) -> Any:
    """Removes the wrappers for data parallelism and half precision; a list gives a list."""
    if isinstance(model, (list, tuple)):
        return [unwrap_model(each) for each in model]
    while _WRAPPERS & {kind.__name__ for kind in type(model).__mro__} and hasattr(model, "module"):
        model = model.module
    return model


def as_list(model: Any) -> List[Any]:
    """The stages of a model: a list is copied, a module is one stage."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def model_key(stage: int, stages: int) -> str:
    """The key of a virtual pipeline stage: "model", or "model0", "model1", ... of several."""
    return "model" if stages == 1 else f"model{stage}"


def build_sharded_state_dict_metadata(
    args: Any, dp_cp_group: Any = None, *, module: Any = None
) -> Dict[str, Any]:
    """Makes the `metadata` that `sharded_state_dict` methods get in a save.

    It is saved with the checkpoint as its content metadata, without the group. In a load the
    methods get the saved metadata with the group put back.

    Args:
        args: the program's arguments; `ckpt_format`, `use_distributed_optimizer`,
            `use_layer_wise_distributed_optimizer`, `dist_ckpt_optim_fully_reshardable` and
            `distrib_optim_fully_reshardable_mem_efficient` are read.
        dp_cp_group: the group of data and context parallelism; None: looked up, see
            `tilestone.megatron.groups.find_group`.
        module: a module that may have the group.

    Returns:
        `distrib_optim_sharding_type` if there is a distributed optimizer ("dp_reshardable",
        "fully_reshardable" with `distrib_optim_fully_reshardable_mem_efficient`, "fsdp_dtensor"),
        `singleton_local_shards` False, `chained_optim_avoid_prefix` True, and `dp_cp_group`.

    Raises:
        InvalidArgumentError: the group is not known.
    """
    metadata: Dict[str, Any] = {}
    optimizers = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
    if any(_arguments.read(args, name) for name in optimizers):
        metadata.update(_optimizer_metadata(args))
    metadata["singleton_local_shards"] = False
    metadata["chained_optim_avoid_prefix"] = True
    metadata["dp_cp_group"] = to_pass(groups.find_group("dp_cp", dp_cp_group, module))
    return metadata


def _optimizer_metadata(args: Any) -> Dict[str, Any]:
    kind, efficient = "distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient"
    if _arguments.read(args, "ckpt_format") == "fsdp_dtensor":
        return {kind: "fsdp_dtensor"}
    if _arguments.read(args, "dist_ckpt_optim_fully_reshardable"):
        return {kind: "fully_reshardable", efficient: _arguments.read(args, efficient)}
    return {kind: "dp_reshardable"}


def generate_state_dict(
    args: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    optim_sd_kwargs: Mapping[str, Any] | None = None,
    model_sd_kwargs: Mapping[str, Any] | None = None,
    rerun_state: Any = None,
) -> Dict[str, Any]:
    """Makes the state dict of a training run, with sharded entities of model and optimizer.

    Args:
        args: the program's arguments, which are saved as a Namespace. `no_save_optim` and
            `no_save_rng` are read.
        model: a module, or the list of a rank's virtual pipeline stages; `sharded_state_dict()` of
            each is called.
        optimizer: its `sharded_state_dict(state)` is called, unless it is a stub; or None.
        opt_param_scheduler: its `state_dict()` is called; or None.
        rng_state: the result of get_rng_state(), or None.
        iteration: of the run; None: left out.
        optim_sd_kwargs, model_sd_kwargs: arguments of the two methods; None: `metadata` with only
            the `dp_cp_group`, which is looked up.
        rerun_state: of the rerun state machine, or None.

    Returns:
        those that exist of `args`, `checkpoint_version` 3.0, `iteration`, `model` (`model0`,
        `model1`, ... if there are several stages), `optimizer`, `opt_param_scheduler`,
        `rerun_state_machine`, `rng_state`.

    Raises:
        InvalidArgumentError: a module or optimizer has no `sharded_state_dict`, or the method does
            not return a dict, or returns only plain tensors of a model; a scheduler has no
            `state_dict`, or the method returns None; the model has no stages; or a group is not
            known.
    """
    if _arguments.read(args, "no_save_optim"):
        optimizer = opt_param_scheduler = None
    if _arguments.read(args, "no_save_rng"):
        rng_state = None
    stages = as_list(model)
    if not stages:
        raise InvalidArgumentError("the model is an empty list: there is nothing to save or load")

    def metadata() -> Dict[str, Any]:
        found = groups.find_group("dp_cp", None, stages[0])
        return {"metadata": {"dp_cp_group": to_pass(found)}}

    state: Dict[str, Any] = {"args": _arguments.to_namespace(args)}
    state["checkpoint_version"] = CHECKPOINT_VERSION
    if iteration is not None:
        state["iteration"] = iteration
    for stage, module in enumerate(stages):
        made = _sharded_state_dict_of(module)(**(model_sd_kwargs or metadata()))
        state[model_key(stage, len(stages))] = _is_sharded(module, _as_dict(module, made))
    if has_state(optimizer):
        sharded = _sharded_state_dict_of(optimizer)
        state["optimizer"] = _as_dict(optimizer, sharded(state, **(optim_sd_kwargs or metadata())))
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = _state_of_scheduler(opt_param_scheduler)
    if rerun_state:
        state["rerun_state_machine"] = rerun_state
    if rng_state:
        state["rng_state"] = rng_state
    return state


def has_state(optimizer: Any) -> bool:
    """Whether there is an optimizer that is not a stub."""
    return optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False)


def check_has(item: Any, method: str) -> None:
    """
    Raises:
        InvalidArgumentError: an object lacks a method.
    """
    if not callable(getattr(item, method, None)):
        raise InvalidArgumentError(f"{type(item).__name__} has no method {method}")


def _state_of_scheduler(scheduler: Any) -> Any:
    """Returns the state of a scheduler.

    Raises:
        InvalidArgumentError: it has no state_dict(), or that returns None and can't be restored.
    """
    check_has(scheduler, "state_dict")
    made = scheduler.state_dict()
    if made is None:
        raise InvalidArgumentError(f"state_dict() of {type(scheduler).__name__} returned None")
    return made


def _as_dict(item: Any, made: Any) -> Any:
    """Checks the result of a method sharded_state_dict.

    Raises:
        InvalidArgumentError: it is not a dict, so the state would be lost.
    """
    if not isinstance(made, Mapping):
        kind = type(made).__name__
        text = f"sharded_state_dict() of {type(item).__name__} returned a {kind}, not a dict"
        raise InvalidArgumentError(text)
    return made


def _is_sharded(model: Any, made: Any) -> Any:
    """Checks a model's sharded state dict.

    Raises:
        InvalidArgumentError: it holds tensors but no entities. As common state, only one rank's
            tensors would be saved, and the others lost.
    """
    if not engine_calls.holds_entities(made) and engine_calls.holds_tensors(made):
        raise InvalidArgumentError(
            f"sharded_state_dict() of {type(model).__name__} returned plain tensors without "
            "sharded entities, which say which part of the model this rank has",
            hint="tilestone.megatron.models.sharded_state_dict_default makes entities",
        )
    return made


def _sharded_state_dict_of(item: Any) -> Any:
    method = getattr(item, "sharded_state_dict", None)
    if method is None:
        raise InvalidArgumentError(
            f"{type(item).__name__} has no method sharded_state_dict, which is needed to know "
            "how its state is sharded"
        )
    return method
