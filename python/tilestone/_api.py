"""The functions save, plan_copies and load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core
from tilestone._calls import LoadCall, LoadReport, SaveCall
from tilestone._errors import InvalidArgumentError
from tilestone._progress import ProgressCallback
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._option_types import (
        AllSaveOptions,
        PlanCopiesOptions,
        SessionLoadOptions,
    )


def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    comm: CommunicatorLike | None = None,
    coordination: str = "communicator",
    rank: int | None = None,
    world_size: int | None = None,
    token: str | None = None,
    number: int = 0,
    wait: bool = True,
    torch_rank_local: bool = False,
    format: str = "torch_dist",
    dialect: str = "pytorch",
    overwrite: bool = False,
    agreement: str = "exchange",
    validate_access: bool = False,
    common_differs: str = "warn",
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    threads: int = 0,
    buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
    files_per_rank: int = 1,
    attributes: Mapping[str, str] | None = None,
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool | ProgressCallback = False,
    replicate: str = "none",
    replicate_group: ProcessGroup | Collection[int] | None = None,
    max_copy_bytes: int | None = None,
    tp_replica_names: bool = False,
) -> _core.SaveResult:
    """Saves the state that all ranks hold together. Every rank must call it.

    On return the checkpoint is complete and durable, and stock PyTorch can load it. If anything
    fails on any rank, every rank raises the same error and `path` holds what it held before. This
    includes errors in the options, the path and the state. One kind of error is raised on its own
    rank only: a `coordination`, `group` or `comm` that can't be used, or a rank outside the group.
    The other ranks then wait for that rank until the timeout. `path`, `format`, `dialect`,
    `overwrite`, `agreement`, `validate_access`, `common_differs` and `attributes` must be the same
    on every rank; otherwise MismatchError names the one that differs.

    Args:
        state: a nested dict. Mappings of any class are split into their entries. So are lists of
            any class, if they hold an array, a Mapping or one of the objects named below.
            `ShardedTensor` and `ShardedObject` carry their own keys; the key of anything else is
            its dotted path. A DTensor, and any object that itself says where it stands, is sharded
            (docs/placements.md). Any other array (torch, numpy, DLPack) must be the same on every rank and is written once. Any other
            leaf is stored as one object. Objects with state_dict() and load_state_dict() (modules,
            optimizers) are replaced by their state dict, as in torch's Stateful protocol.
            Megatron-Core's entities have the meaning that they have there. Objects that are not
            plain data are pickled. Stock PyTorch reads a numpy array as a torch tensor, so its
            template there is torch.from_numpy(array).
        path: the checkpoint's directory, on a file system that all ranks see. A leading "~" means
            the home directory; URLs ("s3://...") are refused.
        group: the torch process group that saves. The default is torch.distributed's default
            group if it is initialised. Not allowed with coordination="files".
        comm: a communicator instead of a group: `tilestone.solo()`, `tilestone.mpi_world()`, or
            any object with rank, size, describe, gather, scatter, broadcast and all_to_all.
        coordination: how the ranks communicate. "communicator": through `group` or `comm`.
            "files": only through small files at `path`. This needs no process group, and does not
            use an existing one. The ranks decide who writes what as with agreement="rule" (see
            there) and need not call at the same time; the data of each rank stays on disk until
            the last rank publishes the checkpoint. Only for torch_dist, and only to a path without
            a checkpoint. See docs/saving.md.
        rank, world_size, token: required by coordination="files": the number of this rank, how
            many ranks save (the same on all ranks), and a string of 8 to 256 bytes. The token is
            the same on all ranks of one run of the job and different in every other run, also when
            the scheduler starts the same job again. A rank that was restarted saves the same state
            under the same token and so completes the checkpoint. What it wrote before is not
            written again, and a warning says so; a state with other keys, shapes, dtypes or shards
            raises MismatchError. If the state has DTensors, `rank` must be torch's global rank.
        number: for coordination="files": distinguishes saves that have the same token and the same
            path. A different state needs a different number.
        wait: for coordination="files". True: return once the checkpoint is published. False:
            return once this rank has written its part. The last rank to write then publishes, and
            `SaveResult.published` says whether that was this rank.
        torch_rank_local: for coordination="files": as with torch's use_collectives=False, each
            rank writes everything that it holds, replicas included, and publishes its own
            `__RANK.metadata` as soon as its data is durable; torch's ranks can load these files.
            `wait` then waits until all ranks have done so, and `published` of the result says
            whether they have. `publish` turns such a checkpoint into an ordinary one.
        format: the file format. "torch_dist" is PyTorch's. "zarr" can be read by Megatron-Core up
            to 0.15, the zarr package and tensorstore. With zarr, each array must be sharded into
            the cells of one regular grid, its dtype must be one of numpy's or bfloat16, keys are
            file paths, and agreement must be "exchange".
        dialect: which parts of the state are sharded. "pytorch": as described under `state`; stock
            PyTorch can load the checkpoint. "megatron": only `ShardedTensor`, `ShardedObject`,
            DTensors and Megatron-Core's entities are sharded. Everything else, arrays included,
            forms one common state, which is saved from rank 0; stock Megatron-Core (0.9 and later)
            can load the checkpoint.
        overwrite: replace a valid checkpoint at `path`. The old one stays valid until the new one
            is durable. With format zarr or Megatron-Core's dialect, and when the old checkpoint is
            of one of these kinds, a new directory is built beside the old one and replaces it as a
            whole, in one step.
        agreement: how the ranks agree who writes what. "exchange": through rank 0; works for every
            state. "rule": each rank decides alone, without communication. Replicas are then known
            from placements or `holders`. In PyTorch's dialect, arrays and objects that are not
            wrapped must be on every rank; else the save is refused.
        validate_access: before anything is written, check that the main replicas of all ranks
            (those whose replica_id is 0) hold every element of each array and every place of each
            grid of ShardedObjects exactly once, and raise an error if not. Arrays that are not
            wrapped count once. Without this option, shards of the same box count as replicas of
            each other whatever their replica_ids are, and a grid may have empty places. With
            agreement="rule", the check sends a description of every rank's shards (about 20 bytes
            per shard) to rank 0, as "exchange" does.
        common_differs: what to do when the ranks differ in something of which only one rank's
            version is saved: objects (the order of a dict does not matter) and their replicas,
            Megatron-Core's common state, and replicas of arrays of at most 64 KiB. Larger arrays
            are compared only where DTensors of one key are on disjoint meshes; if they differ, the
            save is refused with "warn" too. "ignore": compare nothing. "warn": rank 0 logs the keys
            and the ranks, each once; in Megatron-Core's dialect the other ranks log their own keys.
            "error": raise MismatchError on every rank, before anything is written.
        timeout: seconds for the whole save, more than 0; None for no limit.
        threads: number of threads on this rank; 0: as many as the machine has, at most 8.
        buffer_bytes: pooled memory of this rank, in bytes.
        files_per_rank: number of data files that each rank writes.
        attributes: strings that describe the checkpoint ({"iteration": "100"}), at most 1 MiB in
            all. `Checkpoint.attributes` returns them, and `tilestone inspect` shows them.
        tensor_attributes: attributes of single tensors, by the tensor's key and the attribute's
            name ({"layer.w": {"kind": "glu", "order": [0, 1]}}). Values are None, bools, 64-bit
            ints, floats, strings, bytes, lists, tuples and dicts, nested at most 16 deep and at
            most 16 MiB in all. Each rank gives attributes of tensors that it holds; those of all
            ranks are merged. `Checkpoint.tensor_attributes` and `tilestone inspect PATH KEY`
            return them.
        progress: True shows a bar on a terminal; a function is called with `Progress`.
        replicate: "local": the shards that this rank holds and another rank of its
            `replicate_group` writes are also written to this rank's own data file, and so are
            objects that are equal here and on the rank that writes them. After a restart with the
            same sharding the rank then reads no other file for them. Stock PyTorch does not see
            these copies. With agreement="rule" only arrays with known holders are copied. "none":
            each shard is written once. Must be the same on every rank.
        replicate_group: with replicate="local", the ranks whose shards this rank copies, itself
            included: a torch process group that it belongs to, or rank numbers in the group that
            saves. Usually this is the model-parallel group. With the data-parallel group every
            rank would copy everything that it shares, up to the whole model.
        max_copy_bytes: the most bytes of elements that this rank copies, smallest arrays first;
            None: no limit. `SaveResult.copies` and `copy_bytes` say what was copied.
        tp_replica_names: in Megatron-Core's dialects: additional names for replicated tensors, as
            in `tilestone.megatron.save`. Must be the same on every rank.

    Raises:
        AlreadyExistsError: there is a checkpoint at `path`, and overwrite is False.
        UnsupportedError: `path` is a URL; the format or dialect is unknown; or a directory can't be
            replaced as a whole because it holds files that belong to no checkpoint, or is a mount
            point or the working directory.
        InvalidArgumentError, MismatchError, CoverageError: the ranks' states contradict each other,
            or some part can't be saved: sharded or device data inside a tuple or another object,
            an element type or a kind of tensor that no checkpoint can hold, a container that a
            load could not recreate, or attributes of a tensor that this rank does not hold. The
            error names the key, and nothing is written. MismatchError is also raised if ranks give
            the same attribute of a tensor different values.
        StorageError, TimeoutError, RankFailedError: the checkpoint could not be written. With
            coordination="files", TimeoutError names the ranks of the first incomplete group that
            are missing when the time is over, and `unpublished` all of them; what was written is
            kept for them. RankFailedError also means that the save was abandoned.
    """
    return save_with(
        state, path, group=group, comm=comm, coordination=coordination, rank=rank,
        world_size=world_size, token=token, number=number, wait=wait,
        torch_rank_local=torch_rank_local, format=format, dialect=dialect,
        overwrite=overwrite, agreement=agreement, validate_access=validate_access,
        common_differs=common_differs, timeout=timeout, threads=threads,
        buffer_bytes=buffer_bytes, files_per_rank=files_per_rank, attributes=attributes,
        tensor_attributes=tensor_attributes, progress=progress, replicate=replicate,
        replicate_group=replicate_group, max_copy_bytes=max_copy_bytes,
        tp_replica_names=tp_replica_names,
    )  # fmt: skip


def save_with(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    **options: Unpack[AllSaveOptions],
) -> _core.SaveResult:
    """`save`, but every rank learns of an option that does not exist."""
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, **options)
        if call.files is not None:
            return _core.save_by_files(call.bare(), call.prepare, call.session)
        return _core.save(call.prepare, call.place, call.comm, call.limit)


def plan_copies(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    replicate_group: ProcessGroup | Collection[int] | None,
    max_copy_bytes: int | None = None,
    **options: Unpack[PlanCopiesOptions],
) -> list[_core.CopyCost]:
    """Says what `replicate="local"` would add to the same `save`. Writes nothing.

    Every rank must call it. With coordination="files" each rank may call it alone.

    Args:
        state, path: as for `save`. Nothing at `path` is read; there may be a checkpoint there.
        replicate_group, max_copy_bytes: as for `save`.
        options: the other options of the save that is planned.

    Returns:
        One cost for each rank, in the order of ranks: `copies`, the number of shards that other
        ranks write and this rank copies, and `bytes`, the bytes of their elements. With
        coordination="files" the list holds only this rank's cost.

    Raises:
        InvalidArgumentError: the options contain replicate, or one that `save` does not have.
        Also what `save` raises before it writes.
    """
    if "replicate" in options:
        raise InvalidArgumentError('plan_copies always uses replicate="local": leave it out')
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(
            state, path, until_the_end, replicate="local", replicate_group=replicate_group,
            max_copy_bytes=max_copy_bytes, **options,
        )  # fmt: skip
        if call.files is not None:
            return [_core.plan_copies_by_files(call.bare(), call.prepare)]
        return _core.plan_copies(call.prepare, call.place, call.comm, call.limit)


def load(
    wanted: Mapping[Any, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    group: ProcessGroup | None = None,
    comm: CommunicatorLike | None = None,
    cast: bool = False,
    allow_classes: Collection[str] = (),
    verify_checksums: bool = True,
    two_phase: str = "auto",
    cache: str = "auto",
    not_in_checkpoint: str = "error",
    not_requested: str | None = None,
    other_shape: str = "error",
    sharded_only: bool = False,
    validate_access: bool = False,
    report: LoadReport | None = None,
    own_rank: int | None = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    threads: int = 0,
    buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
    follow_links: bool = False,
    progress: bool | ProgressCallback = False,
) -> dict[Any, Any]:
    """Loads what `wanted` asks for, however the checkpoint was sharded. Every rank must call it.

    `load(path)`, without a template, gives each rank everything that the checkpoint holds, in new
    arrays (of torch if torch is loaded, otherwise of numpy), nested as it was saved. The keys of
    dicts are what they were if they were strings, 64-bit ints, None, bools, floats, bytes or tuples
    of these; any other key (an Enum's member) is its str(). Stock PyTorch stores all keys as strings,
    and so they come back from its checkpoints; the log says so once. Empty dicts and lists are not stored. If an element of a list left
    nothing in the checkpoint, the list comes back as a dict by index, or as a shorter list if only
    its end is missing. Items without a recorded path (sharded entities with their own keys, and
    everything in zarr) appear at the top level under their keys. Next to them is Megatron-Core's
    common state, with its original keys.

    Args:
        wanted: a state dict as for `save`. Arrays in it are filled in place; arrays without memory
            (on torch's meta device) and read-only numpy arrays are allocated. Other leaves only say
            that their key is wanted. For an object with state_dict() and load_state_dict(): each
            key that the checkpoint holds below the object's key must be in the state dict of the
            object on at least one rank, unless `not_requested` says otherwise. A torch optimizer
            without state receives the state of plain parameters all the same, in the stored shapes,
            because nothing says which shapes it needs; the state of DTensors must exist before the
            load. To load only a part, pass a dict in place of the object:
            {"model": model.state_dict()}.
        path: the checkpoint's directory, as for `save`.
        group, comm: as for `save`. With comm=tilestone.solo() a rank loads alone, also if there is
            a process group: no other rank needs to call, and "every rank" below means this one.
        not_in_checkpoint: what to do about a wanted key that the checkpoint doesn't hold: "error";
            "report", which lists the key in `report` and in a warning of rank 0; or "ignore". If
            the load continues, the leaf keeps its value from the template. The option does not
            apply to values, lists and arrays in the common state (Megatron-Core's dialect): the
            common state comes back as it was saved, and an array of another shape in it is always
            an error.
        not_requested: the same for a key of the checkpoint that no rank wants. By default it is an
            error below the key of an object with state_dict(), and ignored elsewhere.
        other_shape: the same for a tensor whose wanted global shape differs from the stored one.
            These three options must be the same on every rank.
        sharded_only: for a checkpoint in Megatron-Core's dialect: ignore the common state. It is
            neither read nor returned, and the result has exactly the leaves of `wanted`. A leaf
            that is not wrapped then means the stored array or object whose key is the leaf's path.
            Must be the same on every rank. No effect in PyTorch's dialect, which has no common
            state.
        validate_access: before arrays and objects are read, check that the main replicas on all
            ranks want each element exactly once, as in `save`. Must be the same on every rank.
        report: a LoadReport that receives what is reported; its lists are emptied first. If the
            load_state_dict() of an object raises, the report and the arrays are already filled.
        own_rank: load alone, as this rank of the job (0 or more), without communication; `group`
            must not be given. From a rank-local checkpoint (torch's use_collectives=False) this
            rank reads only its own metadata if that holds everything wanted, just as this rank
            wrote it; otherwise it reads the metadata of all ranks. Other ranks need not call.
        cast: convert from the stored dtype to the wanted one where they differ, as torch's .to()
            does (a value too large for float8_e4m3fn becomes the largest number of that dtype).
        allow_classes: names ("argparse.Namespace") of classes whose objects may be created. Objects
            of plain types (sets, paths, dates, numpy's scalars and the like) need no permission. An
            object of any other class comes back as `Opaque`, which `save` writes as the original
            object. Pickles are never run.
        verify_checksums: check every byte that is read; whole blocks of 64 KiB to 4 MiB are read
            for this. Items without checksums of blocks (of other writers, or of earlier versions)
            are checked if one rank, or several together, read them whole; the log says if parts
            were not. False: read exactly what is wanted, unchecked. Must be the same on every rank, else MismatchError; so must `path` and `two_phase`.
        two_phase: whether data that several ranks want, or that one rank would need many short
            reads for, is read once by one rank for all. "auto": through the page cache if all ranks
            run on one host, otherwise by messages. "always": by messages. "never": each rank reads
            for itself.
        cache: "keep" leaves what is read in the page cache, so that another load of the same files
            needs no disk. "bypass" reads large tensors without the page cache, which leaves that
            memory to others. "auto" keeps what fits into this rank's share of half of the memory
            that is available, unless it measures during the load that bypassing is clearly faster.
            Data that is already in the cache is read from there in any case.
        timeout: seconds for the whole load, more than 0; None for no limit.
        follow_links: as for `open`.
        threads, buffer_bytes, progress: as for `save`.

    Returns:
        A new dict with the structure of `wanted` and the loaded values. Arrays that were filled in
        place are the same objects (autograd sees them as changed). A ShardedTensor is replaced by
        its local array, and a DTensor on the meta device by one with memory. A Stateful object is
        the same object, after its load_state_dict() was called (with assign=True for a module on
        the meta device). From a checkpoint in Megatron-Core's dialect the result also has the rest
        of the common state, unless sharded_only is set.

    Raises:
        NotFoundError: there is no checkpoint (if an unpublished save by files is there, the hint
            says what it lacks), or the checkpoint doesn't hold a wanted key (the hint names similar
            ones).
        UnsupportedError: two items of the checkpoint have the same place in its tree (without a
            template); a cast from the stored to the wanted dtype does not exist (complex to real;
            the error names the key); or the process group was inherited by a forked process.
        InvalidArgumentError: an array of the template can't be filled, because several of its
            elements share memory or its memory is a read-only map. The error names the key. A torch
            tensor over an immutable `bytes` object (torch.frombuffer warns of it) can't be
            recognised: its memory is written.
        MismatchError: the dtype or the global shape differs from the stored one; or the checkpoint
            holds state of a Stateful object that no rank asks for; or, with not_requested="error",
            any key that no rank asks for.
        CoverageError: the checkpoint lacks wanted elements.
        CorruptError, UnsafeError: the files are damaged, a data file is missing, or they look like
            an attack.
        StorageError, TimeoutError, RankFailedError: the checkpoint could not be read.
    """
    return load_with(
        wanted, path, group=group, comm=comm, own_rank=own_rank, report=report,
        cast=cast, allow_classes=allow_classes, verify_checksums=verify_checksums,
        two_phase=two_phase, cache=cache, not_in_checkpoint=not_in_checkpoint,
        not_requested=not_requested, other_shape=other_shape, sharded_only=sharded_only,
        validate_access=validate_access, timeout=timeout, threads=threads,
        buffer_bytes=buffer_bytes, follow_links=follow_links, progress=progress,
    )  # fmt: skip


def load_with(
    wanted: Mapping[Any, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None,
    *,
    group: ProcessGroup | None = None,
    comm: CommunicatorLike | None = None,
    **options: Unpack[SessionLoadOptions],
) -> dict[Any, Any]:
    """`load`, but every rank learns of an option that does not exist."""
    with contextlib.ExitStack() as until_the_end:
        call = LoadCall(wanted, path, until_the_end, group=group, comm=comm, **options)
        _core.load(call.prepare, call.take, call.place, call.comm, call.limit)
    return call.result
