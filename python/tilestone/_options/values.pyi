"""The options, with their types. Made by `tools/options --fix`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from torch.distributed import ProcessGroup

from tilestone._options.load_report import LoadReport
from tilestone._options.kinds import Options, Value
from tilestone._options.progress import ProgressCallback
from tilestone._options.rename import Rename

VALUES: tuple[type[Value], ...]
CALLS: dict[str, type[Options]]

@dataclasses.dataclass(frozen=True, repr=False)
class ByFiles(Value):
    """A save in which the ranks communicate only through small files at the path.

    This needs no process group, and does not use an existing one. The ranks decide without
    communication who writes what, and need not call at the same time; the data of each rank stays
    on disk until the last rank publishes the checkpoint. A shard whose holders are declared or
    known from placements is written once, by one of them. Any other shard is written by each rank
    that has a main replica of it, and these replicas must be equal. Objects that are not wrapped
    must be on every rank. Only for torch_dist, without `overwrite` and `checks.access`, and only to
    a path without a checkpoint. See docs/saving_by_files.md.

    `save` needs the first three fields. In a `Session` with a group they come from the group.

    Args:
        rank: The number of this rank. If the state has DTensors, it must be torch's global rank.
        world_size: how many ranks save; the same on all ranks.
        token: A string of 8 to 256 bytes, the same on all ranks of one run of the job and different
            in every other run, also when the scheduler starts the same job again. A rank that was
            restarted saves the same state under the same token and so completes the checkpoint.
            What it wrote before is not written again, and a warning says so; a state with other
            keys, shapes, dtypes or shards is MismatchError.
        number: Distinguishes saves that have the same token and the same path. A different state
            needs a different number. A session counts its saves itself.
        wait: True: return once the checkpoint is published. False: return once this rank has
            written its part. The last rank to write then publishes, and SaveResult.published says
            whether that was this rank.
        torch_rank_local: As with torch's use_collectives=False, each rank writes everything that it
            holds, replicas included, and `__RANK.metadata` describes what it has written. Torch's
            ranks can load these files. They appear once all ranks have written, which `wait` waits
            for, and `published` of the result says. `publish` turns such a checkpoint into an
            ordinary one."""

    rank: int | None = ...
    world_size: int | None = ...
    token: str | None = ...
    number: int = ...
    wait: bool = ...
    torch_rank_local: bool = ...

@dataclasses.dataclass(frozen=True, repr=False)
class LocalCopies(Value):
    """Each rank also writes to its own data file what it holds and another rank of its group writes,
    and objects that are equal here and on the rank that writes them. After a restart with the same
    sharding the rank then reads no other file for them. Only the manifest lists copies, so stock
    PyTorch does not see them. Replicas must hold equal elements, else the save is MismatchError
    with the key. By files only arrays with known holders are copied, and replicas whose id has
    Megatron's three numbers and ends with 0. Either all ranks of a save give copies or none.
    UnsupportedError in formats that store each chunk in its own file.

    Args:
        group: The ranks whose shards this rank copies, itself included: a torch process group that
            it belongs to, or rank numbers in the group that saves. Usually this is the model-
            parallel group. With the data-parallel group every rank would copy everything that it
            shares, up to the whole model. `save` needs it; in `tilestone.megatron.save`, None is
            the model-parallel group of Megatron's parallel_state.
        max_bytes: The most bytes of elements and of objects' items that this rank copies, smallest
            first, because a small copy saves as many reads as a large one; None: no limit.
            `SaveResult.copies` and `copy_bytes` say what was copied."""

    group: ProcessGroup | Collection[int] | None = ...
    max_bytes: int | None = ...

@dataclasses.dataclass(frozen=True, repr=False)
class Checks(Value):
    """What is checked. Each call uses the fields that concern it, so one value may serve all calls of
    a program.

    Args:
        access: `save`: before anything is written, check that the main replicas of all ranks (those
            whose replica_id is 0) hold every element of each array and every cell of each grid of
            ShardedObjects exactly once, and raise an error if not. Arrays that are not wrapped
            count once. Without this option, shards of the same box count as replicas of each other
            whatever their replica_ids are, and a grid may have empty cells. Not possible by files.
            `load`: before arrays and objects are read, check the same of what the ranks want; a
            rank that loads everything, without a template, is not checked. Must be the same on
            every rank.
        common_differs: `save`: what to do when the ranks differ in something of which only one
            rank's version is saved: objects (the order of a dict does not matter) and their
            replicas, Megatron-Core's common state, and replicas of arrays of at most 64 KiB. Larger
            arrays are compared only where DTensors of one key are on disjoint meshes; if they
            differ, the save is refused with "warn" too. "ignore": compare nothing. "warn": rank 0
            logs the keys and the ranks, each once; in Megatron-Core's dialect the other ranks log
            their own keys. "error": MismatchError on every rank, before anything is written. Must
            be the same on every rank of a save.
        checksums: `load` and `open`: check every byte that is read; whole blocks of 64 KiB to 4 MiB
            are read for this. Items without checksums of blocks (of other writers, or of earlier
            versions) are checked if one rank, or several together, read them whole; the log says if
            parts were not. False: read exactly what is wanted, unchecked. Must be the same on every
            rank of a load."""

    access: bool = ...
    common_differs: str = ...
    checksums: bool = ...

@dataclasses.dataclass(frozen=True, repr=False)
class Differences(Value):
    """What a load does about differences between the templates and the checkpoint.

    "error" raises; "report" lists the key in `report` and in a warning of rank 0; "ignore" goes on
    without a warning. If the load continues, the leaf keeps its value from the template. The three
    policies don't apply to values, lists and arrays in the common state (Megatron-Core's dialect):
    the common state comes back as it was saved, and an array of another shape in it is always an
    error.

    Args:
        not_in_checkpoint: A wanted key that the checkpoint doesn't hold. Must be the same on every
            rank.
        not_requested: A key of the checkpoint that no rank wants. None: an error below the key of
            an object with state_dict(); below other dicts and lists of the template one warning,
            with keys and bytes; ignored elsewhere. `report` lists what is below dicts and lists
            whatever this says. Must be the same on every rank.
        other_shape: A tensor whose wanted global shape differs from the stored one. Must be the
            same on every rank.
        report: Receives what is reported; its lists are emptied first. If the load_state_dict() of
            an object raises, the report and the arrays are already filled."""

    not_in_checkpoint: str = ...
    not_requested: str | None = ...
    other_shape: str = ...
    report: LoadReport | None = ...

@dataclasses.dataclass(frozen=True, repr=False)
class Reading(Value):
    """How files are read.

    Args:
        two_phase: `load`: whether data that several ranks want, or that one rank would need many
            short reads for, is read once by one rank for all. "auto": through the page cache of
            files if all ranks run on one host, otherwise by messages. "always": by messages.
            "never": each rank reads for itself. Must be the same on every rank.
        cache: "keep" leaves what is read in the page cache, so that another load of the same files
            needs no disk. "bypass" reads large tensors without the page cache, which leaves that
            memory to others. None: keep where what is read fits into half of the memory that is
            available (docs/cache.md); `verify` keeps only with "keep". Data that is already in the
            cache is read from there in any case, and ranks of one host that read for one another
            through the page cache leave what they read there.
        follow_links: Read files through any symbolic link that leads out of the directory. Without
            it, the only such links that are followed lead into a directory "blobs" next to the
            checkpoint or next to one of its parent directories, as in the Hugging Face hub's cache.
            Other links are UnsafeError, because a checkpoint from somebody else could name any file
            that you may read (docs/links.md)."""

    two_phase: str = ...
    cache: str | None = ...
    follow_links: bool = ...

@dataclasses.dataclass(frozen=True, repr=False)
class Resources(Value):
    """What a call uses of the machine, on this rank.

    Args:
        threads: number of threads; 0: as many as the machine has, at most 8.
        buffer_bytes: Pooled memory, in bytes; in two-phase reading also for the messages.
        files_per_rank: `save`: number of data files that each rank writes."""

    threads: int = ...
    buffer_bytes: int = ...
    files_per_rank: int = ...

@dataclasses.dataclass(frozen=True, repr=False)
class Keep(Value):
    """Which checkpoints of a run a `CheckpointManager` keeps: those that any of these rules keeps.

    Only complete checkpoints are removed, and only those of steps that the one that has just become
    durable continues. Steps of other runs stay. Those of a branch that the run has left when it
    went back are removed once `last` newer ones are durable, whatever the other rules say.

    Args:
        last: how many of the newest; at least 1.
        every: Those whose step is a multiple of it; None, in C++ 0: no such rule.
        best: (metric, "min" or "max", count): the `count` steps whose metric of this name is the
            lowest or the highest. Steps without that metric, or where it is NaN, don't count.
        newer_than: Those that were saved less than this many seconds ago, and those of unknown age."""

    last: int = ...
    every: int | None = ...
    best: tuple[str, str, int] | None = ...
    newer_than: float | None = ...

@dataclasses.dataclass(frozen=True, repr=False)
class SaveOptions(Options):
    """The options of a save."""

    format: str = ...
    dialect: str = ...
    overwrite: bool = ...
    checks: Checks = ...
    copies: LocalCopies | None = ...
    reuse: str | os.PathLike[str] | None = ...
    resources: Resources = ...
    timeout: float | None = ...
    attributes: Mapping[str, str] | None = ...
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None = ...
    progress: bool | ProgressCallback = ...

@dataclasses.dataclass(frozen=True, repr=False)
class AsyncSaveOptions(SaveOptions):
    """The options that a save in the background has beside those of a save."""

    stage: str = ...
    on_error: str = ...
    in_flight: str = ...
    max_staged_bytes: int | None = ...

@dataclasses.dataclass(frozen=True, repr=False)
class LoadOptions(Options):
    """The options of a load."""

    allow_classes: Collection[str] = ...
    own_rank: int | None = ...
    format: str | None = ...
    cast: bool = ...
    differences: Differences = ...
    checks: Checks = ...
    reading: Reading = ...
    resources: Resources = ...
    timeout: float | None = ...
    rename: Rename | None = ...
    progress: bool | ProgressCallback = ...

@dataclasses.dataclass(frozen=True, repr=False)
class OpenOptions(Options):
    """The options of opening a checkpoint."""

    framework: str = ...
    format: str | None = ...
    checks: Checks = ...
    reading: Reading = ...
    resources: Resources = ...

class SaveKeywords(TypedDict, total=False):
    """The options of a save."""

    format: str
    dialect: str
    overwrite: bool
    checks: Checks
    copies: LocalCopies | None
    reuse: str | os.PathLike[str] | None
    resources: Resources
    timeout: float | None
    attributes: Mapping[str, str] | None
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None
    progress: bool | ProgressCallback

class AsyncSaveKeywords(TypedDict, total=False):
    """The options that a save in the background has beside those of a save."""

    stage: str
    on_error: str
    in_flight: str
    max_staged_bytes: int | None
    format: str
    dialect: str
    overwrite: bool
    checks: Checks
    copies: LocalCopies | None
    reuse: str | os.PathLike[str] | None
    resources: Resources
    timeout: float | None
    attributes: Mapping[str, str] | None
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None
    progress: bool | ProgressCallback

class LoadKeywords(TypedDict, total=False):
    """The options of a load."""

    allow_classes: Collection[str]
    own_rank: int | None
    format: str | None
    cast: bool
    differences: Differences
    checks: Checks
    reading: Reading
    resources: Resources
    timeout: float | None
    rename: Rename | None
    progress: bool | ProgressCallback

class OpenKeywords(TypedDict, total=False):
    """The options of opening a checkpoint."""

    framework: str
    format: str | None
    checks: Checks
    reading: Reading
    resources: Resources
