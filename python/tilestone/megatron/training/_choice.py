"""Chooses the checkpoint that a run resumes from: rank 0 decides, and examines it for all."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from tilestone import _core
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron import _ranks, _stored
from tilestone.megatron._ranks import Deadline, on_one
from tilestone.megatron.mapping import ShardedObject
from tilestone.megatron.training import _arguments, names
from tilestone.megatron.training.rng import RNG_KEY


@dataclass(frozen=True)
class Found:
    """A checkpoint of a training run, and what decides how it is loaded.

    Attributes:
        directory: the checkpoint's own directory.
        iteration: 0 for the release checkpoint.
        release: whether it is the release checkpoint.
        content_metadata: the content metadata of the program that saved; None: there is none.
        arguments: the stored arguments that matter for a load; None: no arguments are stored.
        rng_grids: for each key of random states, the grid (PP, TP) as which they are stored.
        rerun_state: the common part of the rerun state machine's state, or None.
        non_persistent: whether the next checkpoint of its kind replaces it.
        finetune: whether a new run starts from it.
    """

    directory: str
    iteration: int
    release: bool
    content_metadata: Dict[Any, Any] | None = None
    arguments: Dict[str, Any] | None = None
    rng_grids: Dict[str, Tuple[int, ...]] = field(default_factory=dict)
    rerun_state: Any = None
    non_persistent: bool = False
    finetune: bool = False


@dataclass(frozen=True)
class Places:
    """Where to look for the checkpoint of a run.

    Attributes:
        load: the run's directory, or None.
        non_persistent: directory of the run's non-persistent checkpoints; None: it has none.
        pretrained: directory from which a new run starts if `load` has no checkpoint; or None.
        step: the iteration to load; None: the latest.
    """

    load: str | None
    non_persistent: str | None = None
    pretrained: str | None = None
    step: int | None = None

    @staticmethod
    def of(args: Any, load_arg: str = "load") -> Places:
        """The places that a program's arguments name.

        Raises:
            UnsupportedError: non-persistent checkpoints of the local or of an unknown type.
            InvalidArgumentError: `args` has no attribute `load_arg`; or a path or an iteration is
                invalid.
        """
        if load_arg not in _arguments.DEFAULTS and not hasattr(args, load_arg):
            raise InvalidArgumentError(f"args has no attribute {load_arg!r} (load_arg)")
        load = _arguments.path(args, load_arg)
        has_fleeting = check_non_persistent_type(args) is not None
        return Places(
            load,
            non_persistent_directory(args, load) if has_fleeting else None,
            _arguments.path(args, "pretrained_checkpoint"),
            _arguments.whole_number(args, "ckpt_step", 0),
        )


def check_non_persistent_type(args: Any) -> str | None:
    """Checks `args.non_persistent_ckpt_type`: "global" or None.

    Raises:
        UnsupportedError: another type; the message has its name.
    """
    kind: str | None = _arguments.read(args, "non_persistent_ckpt_type")
    if kind not in (None, "global"):
        raise UnsupportedError(
            f"args.non_persistent_ckpt_type={kind!r} is not supported; non-persistent checkpoints "
            "must be of the type 'global'"
        )
    return kind


def non_persistent_directory(args: Any, directory: str | None) -> str | None:
    """The directory of a run's non-persistent checkpoints.

    Args:
        args: the program's arguments.
        directory: directory of the run's other checkpoints.
    """
    given = _arguments.read(args, "non_persistent_global_ckpt_dir")
    if given:
        return _arguments.path(args, "non_persistent_global_ckpt_dir")
    return None if directory is None else os.path.join(directory, names.NON_PERSISTENT)


def find_iteration(
    places: Places, group: Any = None, *, timeout: float | None = _core.DEFAULT_TIMEOUT
) -> Found | None:
    """Chooses the checkpoint to load. Every rank of the group calls; rank 0 decides for all.

    Args:
        places: where to look. Rank 0's value is used.
        group: the ranks; None: torch's default group, or this process alone.
        timeout: time limit in seconds; None: no limit.

    Returns:
        The same on every rank; None: there is no checkpoint.

    Raises:
        CheckpointingException: on every rank: the checkpoint of `step` does not exist or is
            damaged; there is a tracker or a damaged checkpoint, but none that can be loaded; or
            the ranks see different folders (the message names them). TimeoutError: some ranks did
            not call in time.
    """
    return find(places, _ranks.default_group(group), Deadline(timeout))


def find(places: Places, group: Any, deadline: Deadline) -> Found | None:
    if _ranks.size(group) > 1:
        comm = TorchCommunicator(group)
        for path in filter(None, (places.load, places.non_persistent)):
            run = _core.ManagedRun(names.location(path), 1, None, names.PATTERN, False, False, False)
            run.expect_same_steps(comm, [], deadline.seconds())

    return on_one("choice of a checkpoint", group, lambda: _chosen(places), deadline)


def _chosen(places: Places) -> Found | None:
    """Chooses by what this rank sees, and reads what decides how the checkpoint is loaded."""
    paths = {
        "load": places.load, "non_persistent": places.non_persistent,
        "pretrained": places.pretrained,
    }  # fmt: skip
    load, fleeting, start = (
        None if path is None else names.location(path) for path in paths.values()
    )
    chosen = _core.choose_megatron_step(load, fleeting, start, places.step)
    if chosen is None:
        return None
    iteration, release, place = chosen
    path = names.get_checkpoint_name(paths[place] or "", iteration, release, return_base_dir=True)
    with _stored.open_stored(path) as checkpoint:
        common = _stored.common_of(checkpoint) or {}
        grids = _rng_grids(checkpoint.object_keys())
    args = common.get("args")
    return Found(
        path,
        iteration,
        release,
        common.get("content_metadata"),
        None if args is None else _arguments.stored_arguments(args),
        grids,
        common.get("rerun_state_machine"),
        non_persistent=place == "non_persistent",
        finetune=place == "pretrained",
    )


def _rng_grids(unique_keys: List[str]) -> Dict[str, Tuple[int, ...]]:
    grids = {}
    for unique_key in unique_keys:
        try:
            entity = ShardedObject.empty_from_unique_key(unique_key)
        except InvalidArgumentError:
            continue  # an object without a grid
        if entity.key.endswith(RNG_KEY):
            grids[entity.key] = tuple(entity.global_shape)
    return grids
