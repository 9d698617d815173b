"""Names of a training run's checkpoints: folders of iterations, and the tracker file."""

from __future__ import annotations

import os

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone.megatron._stored import literal

TRACKER = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
PATTERN = "iter_{step:07}"
RELEASE = "release"


def get_checkpoint_name(
    checkpoints_path: str | os.PathLike[str],
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int | None = None,
    pipeline_rank: int | None = None,
    expert_parallel: bool | None = None,
    expert_rank: int | None = None,
    return_base_dir: bool = False,
    basename: str = "model_optim_rng.pt",
) -> str:
    """The path of a checkpoint.

    Args:
        checkpoints_path: the run's directory.
        iteration: iteration of the checkpoint, 0 or more; padded to 7 digits in the name.
        release: name the checkpoint without an iteration.
        pipeline_parallel, tensor_rank, pipeline_rank, expert_parallel, expert_rank, basename: name
            a rank's file in a checkpoint of the legacy format (`torch`). All that apply but
            `basename` must then be given: they are never looked up.
        return_base_dir: return the checkpoint's own directory. A distributed checkpoint has only
            that.

    Returns:
        "PATH/iter_0000100" or "PATH/release"; without return_base_dir the path of the rank's file.

    Raises:
        InvalidArgumentError: the iteration is negative, or a rank is required but was not given.
    """
    if not release and (isinstance(iteration, bool) or iteration < 0):
        raise InvalidArgumentError(f"an iteration must be 0 or more, not {iteration!r}")
    folder = os.path.join(checkpoints_path, RELEASE if release else f"iter_{iteration:07d}")
    if return_base_dir:
        return folder
    needed = {"tensor_rank": tensor_rank, "pipeline_parallel": pipeline_parallel}
    needed["expert_parallel"] = expert_parallel
    if pipeline_parallel:
        needed["pipeline_rank"] = pipeline_rank
    if expert_parallel:
        needed["expert_rank"] = expert_rank
    for name, value in needed.items():
        if value is None:
            raise InvalidArgumentError(
                f"{name} is required for the name of a file of the legacy format",
                hint="return_base_dir=True returns the directory of a distributed checkpoint",
            )
    part = f"mp_rank_{tensor_rank:02d}"
    part += f"_{pipeline_rank:03d}" if pipeline_parallel else ""
    part += f"_{expert_rank:03d}" if expert_parallel else ""
    return os.path.join(folder, part, basename)


def get_checkpoint_tracker_filename(checkpoints_path: str | os.PathLike[str]) -> str:
    """The file that names the run's latest checkpoint: a number, or "release"."""
    return os.path.join(checkpoints_path, TRACKER)


def read_metadata(tracker_filename: str | os.PathLike[str]) -> tuple[int, bool]:
    """Reads a tracker file. Does not communicate with other ranks.

    Returns:
        (iteration, whether it is the release checkpoint, whose iteration is 0)

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is empty, or holds neither a number nor "release".
        StorageError: the file can't be read.
    """
    run, name = os.path.split(os.fspath(tracker_filename))
    return _core.read_megatron_tracker(location(run or os.curdir), name)


def location(directory: str | None) -> bytes:
    """A run's directory for the engine: a leading "~" is an ordinary character."""
    return valid.directory(literal(directory))
