"""Chooses the checkpoint that a run resumes from: rank 0 decides, all ranks check its files."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import (
    CheckpointError,
    CorruptError,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Deadline, then_one
from tilestone.megatron.core import check_is_distributed_checkpoint
from tilestone.megatron.training import _arguments, _look, names
from tilestone.megatron.training._look import Found, NotPublishedError

logger = logging.getLogger("tilestone.megatron")

_NAMED = 8  # most ranks to name in a message
_TRIES = 3  # attempts to choose a checkpoint that no job removes meanwhile
_WORK = "choice of a checkpoint"

Loaded = TypeVar("Loaded")


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


def load_latest(
    places: Places, group: Any, deadline: Deadline, load: Callable[[Found], Loaded]
) -> tuple[Found, Loaded] | None:
    """Chooses a checkpoint like find_iteration(), and calls load() with it. Every rank calls.

    If another job removes the checkpoint before it is loaded, another one is chosen, a few times.
    If `places.step` names the checkpoint, that is an error.

    Args:
        places: where to look.
        group: the ranks; None: this process alone.
        deadline: of the whole load.
        load: if the checkpoint is missing or damaged, it must raise the same on every rank.

    Returns:
        The checkpoint and the result of load(); None: there is no checkpoint.

    Raises:
        CheckpointingException: as find_iteration() and load().
    """
    failure: CheckpointError | None = None
    for tries in range(_TRIES):
        found = _find(places, group, deadline)
        if found is None and failure is not None:
            raise failure  # not a new start: a part of the state may have been filled
        if found is None:
            return None
        try:
            return found, load(found)
        except (NotFoundError, CorruptError, StorageError, MismatchError) as error:
            if tries + 1 == _TRIES or not _all_hear_that_it_is_gone(places, found, group, deadline):
                raise
            failure = error
    raise AssertionError("every try has ended the loop or failed")


def _all_hear_that_it_is_gone(
    places: Places, found: Found, group: Any, deadline: Deadline
) -> bool:
    def look() -> bytes:
        return b"gone" if _is_gone(places, found) else b""

    return then_one(_WORK, group, lambda: None, look, deadline)[1] != b""


def _is_gone(places: Places, found: Found) -> bool:
    """Whether a checkpoint that was not requested by its iteration no longer exists."""
    if places.step is not None:
        return False
    try:
        _look.examine(os.path.dirname(found.directory), found.iteration, found.release)
    except NotPublishedError as problem:
        logger.warning("Choosing another checkpoint: %s", problem)
        return True
    return False


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
            ranks see other files than rank 0 (the message names them). TimeoutError: some ranks did
            not call in time.
    """
    return _find(places, _ranks.default_group(group), Deadline(timeout))


def _find(places: Places, group: Any, deadline: Deadline) -> Found | None:
    if _ranks.size(group) <= 1:
        return decide(places)
    decided: List[Found | None] = []

    def say(round: int, answer: bytes) -> bytes:
        if round == 0:
            return b""
        decided.append(pickle.loads(answer))
        return _seen(places, decided[-1]).encode()

    def answer(round: int, said: List[bytes]) -> tuple[bytes, bool]:
        if round == 0:
            return pickle.dumps(decide(places)), False
        seen, found = [each.decode() for each in said], decided[-1]
        if round < _TRIES and found is not None and "" in seen and _is_gone(places, found):
            return pickle.dumps(decide(places)), False
        _check_views(seen, places, found, group)
        return b"", True

    _core.agree(_WORK, TorchCommunicator(group), say, answer, deadline.seconds())
    return decided[-1]


def _seen(places: Places, found: Found | None) -> str:
    try:
        if found is not None:
            return _look.fingerprint(found.directory)
        looked = (places.load, places.non_persistent)
        return "".join(_look.fingerprint_of_run(path) for path in looked)
    except OSError as error:
        raise StorageError(message=str(error), errno=error.errno) from error


def _check_views(seen: List[str], places: Places, found: Found | None, group: Any) -> None:
    others = [rank for rank, view in enumerate(seen) if view != seen[0]]
    if not others:
        return
    numbers = [dist.get_global_rank(group, rank) for rank in others]
    more = len(numbers) - _NAMED
    named = ", ".join(map(str, numbers[:_NAMED])) + (f" and {more} more" if more > 0 else "")
    rank0 = dist.get_global_rank(group, 0)
    what = (
        f"rank {rank0} sees no checkpoint in {places.load}" if found is None
        else f"rank {rank0} sees the checkpoint {found.directory}"
    )  # fmt: skip
    nothing = all(seen[rank] == "" for rank in others)
    raise MismatchError(
        f"{what}, and rank{'s'[:len(others) > 1]} {named} see{'s'[len(others) > 1:]} "
        f"{'none' if nothing and found is not None else 'other files'} there",
        file=places.load or "" if found is None else found.directory,
        rank=numbers[0],
        hint="all ranks must see the same file system",
    )


def decide(places: Places) -> Found | None:
    """Chooses the checkpoint to load, by what this rank sees.

    Raises:
        NotFoundError, CorruptError: as find_iteration().
    """
    if places.step is not None:
        return _of_step(places, places.step)
    found, fleeting = _latest_of_both(places)
    if fleeting is not None and (found is None or fleeting.iteration >= found.iteration):
        return dataclasses.replace(fleeting, non_persistent=True)
    if fleeting is not None and found is not None:
        logger.info(
            "The non-persistent checkpoint of iteration %d is older than the one of iteration %d",
            fleeting.iteration, found.iteration,
        )  # fmt: skip
    if found is None and places.pretrained is not None:
        start = _latest(places.pretrained)
        if start is None:
            raise NotFoundError(
                f"there is no checkpoint in {places.load} or in {places.pretrained}",
                file=places.pretrained,
            )
        return dataclasses.replace(start, finetune=True)
    return found


def _latest_of_both(places: Places) -> tuple[Found | None, Found | None]:
    """The latest checkpoint, and the latest non-persistent one.

    Raises:
        CorruptError: one of them can't be found, and the other does not exist.
    """
    problems: List[CorruptError] = []

    def latest(directory: str | None, may_be_release: bool) -> Found | None:
        try:
            return _latest(directory, may_be_release)
        except CorruptError as problem:
            problems.append(problem)
            return None

    found = latest(places.load, True), latest(places.non_persistent, False)
    if problems and found == (None, None):
        raise problems[0]
    for problem in problems:
        logger.warning("Skipping a directory: %s", problem)
    return found


def _of_step(places: Places, step: int) -> Found:
    problems: List[NotPublishedError] = []
    for directory in (places.load, places.non_persistent):
        if directory is None:
            continue
        try:
            found = _look.examine(directory, step)
        except NotPublishedError as problem:
            problems.append(problem)
            continue
        return dataclasses.replace(found, non_persistent=directory == places.non_persistent)
    damaged = any(problem.damaged for problem in problems)
    raise (CorruptError if damaged else NotFoundError)(
        f"there is no {'intact ' * damaged}checkpoint of iteration {step} (ckpt_step): "
        f"{'; '.join(map(str, problems))}",
        file=places.load or "",
    )


def _latest(directory: str | None, may_be_release: bool = True) -> Found | None:
    """The checkpoint that the tracker names; if it can't be loaded, the newest valid one."""
    if directory is None:
        return None
    tracker = names.get_checkpoint_tracker_filename(directory)
    tried: List[tuple[int, bool]] = []
    while True:
        try:
            named = names.read_metadata(tracker)
            tried.append(named)
            if named[1] and not may_be_release:
                raise CorruptError(f"{tracker} names a release, which can't be non-persistent")
        except (NotFoundError, CorruptError) as problem:
            has_tracker = not isinstance(problem, NotFoundError)
            return _newest_valid(directory, tried, str(problem), has_tracker)
        try:
            return _look.examine(directory, *named)
        except NotPublishedError as problem:
            why = f"the tracker {tracker} names a checkpoint that can't be loaded: {problem}"
        # Another job may have moved the tracker and removed the checkpoint that it named.
        if names.previous(tracker) in (named, None) or len(tried) == _TRIES:
            return _newest_valid(directory, tried, why, True)


def _newest_valid(
    directory: str, tried: List[tuple[int, bool]], why: str, has_tracker: bool
) -> Found | None:
    candidates = [(iteration, False) for iteration in names.stored_iterations(directory)]
    for name, right in names.misnamed_iterations(directory):
        logger.warning(
            "%s is not recognised as a checkpoint: its folder would have to be named %s",
            os.path.join(directory, name), right,
        )  # fmt: skip
    if os.path.isdir(os.path.join(directory, names.RELEASE)):
        candidates.append((0, True))
    if candidates or has_tracker:
        logger.warning("%s; looking for the newest valid checkpoint", why)
    damaged: List[NotPublishedError] = []
    for iteration, release in candidates:
        if (iteration, release) in tried:
            continue
        try:
            found = _look.examine(directory, iteration, release)
        except NotPublishedError as problem:
            logger.warning("Skipping a checkpoint: %s", problem)
            damaged += [problem] * problem.damaged
            continue
        logger.warning("The newest valid checkpoint is %s", found.directory)
        return found
    if has_tracker:
        raise CorruptError(
            f"{why}; {directory} does not hold a valid checkpoint",
            file=names.get_checkpoint_tracker_filename(directory),
            hint="remove the tracker to start a new run",
        )
    if damaged:
        raise CorruptError(
            f"{directory} does not hold a valid checkpoint, but a damaged one: {damaged[0]}",
            file=directory,
            hint="remove it to start a new run",
        )
    _refuse_checkpoint(directory)
    return None


def _refuse_checkpoint(directory: str) -> None:
    """Refuses a checkpoint where a run's directory is expected, instead of starting a new run."""
    if not check_is_distributed_checkpoint(directory):
        return
    run, name = os.path.split(os.path.abspath(directory))
    found = names.iteration_of(name)
    step = "" if found is None else f", and ckpt_step={found}"
    raise InvalidArgumentError(
        "a checkpoint is given where the directory of a run is expected",
        file=directory,
        hint=f"give {run}{step}",
    )
