"""Names of a training run's checkpoints: folders of iterations, and the tracker file."""

from __future__ import annotations

import os
import re

from tilestone._errors import CorruptError, InvalidArgumentError, NotFoundError, StorageError

TRACKER = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,})")
_NEARLY = re.compile(r"iter_?([0-9]+)")
_LONGEST_TRACKER = 64  # bytes: an iteration and white space


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
    path = os.fspath(tracker_filename)
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST_TRACKER + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no tracker file {path}", file=path) from None
    except OSError as error:
        message = f"can't read the tracker file {path}"
        raise StorageError(message=message, file=path, errno=error.errno) from error
    text = content.strip().decode("ascii", errors="replace")
    if text == RELEASE:
        return 0, True
    if len(content) > _LONGEST_TRACKER or not re.fullmatch(r"[0-9]+", text):
        raise CorruptError(f"the tracker file {path} holds no iteration: {text!r}", file=path)
    return int(text), False


def previous(tracker_filename: str) -> tuple[int, bool] | None:
    """As read_metadata(); None if the file does not exist or its content is invalid.

    Raises:
        StorageError: the file can't be read.
    """
    try:
        return read_metadata(tracker_filename)
    except (NotFoundError, CorruptError):
        return None


def stored_iterations(checkpoints_path: str | os.PathLike[str]) -> list[int]:
    """The iterations for which a run's directory has a folder, the newest first.

    Raises:
        StorageError: the directory exists but can't be read.
    """
    found = [iteration_of(name) for name in _names_in(os.fspath(checkpoints_path))]
    return sorted((number for number in found if number is not None), reverse=True)


def misnamed_iterations(checkpoints_path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Folders whose names resemble those of iterations but are wrong, such as iter_100.

    Returns:
        (name, correct name for that number), sorted by name.

    Raises:
        StorageError: as stored_iterations().
    """
    path = os.fspath(checkpoints_path)
    found = []
    for name in sorted(_names_in(path)):
        match = _NEARLY.fullmatch(name)
        if match and iteration_of(name) is None and os.path.isdir(os.path.join(path, name)):
            found.append((name, f"iter_{match[1].lstrip('0'):0>7}"))
    return found


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message = f"can't read {path}"
        raise StorageError(message=message, file=path, errno=error.errno) from error


def iteration_of(name: str) -> int | None:
    """The iteration that a folder's name denotes; None for any other name."""
    match = _ITERATION.fullmatch(name)
    if match is None or f"iter_{int(match[1]):07d}" != name:
        return None
    return int(match[1])
