"""save, plan_copies and load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core, _options
from tilestone._bridge import Bridge
from tilestone._calls import LoadReport, Prepared, SaveCall, communicator, harmless, made
from tilestone._errors import InvalidArgumentError
from tilestone._progress import ProgressCallback, reporting
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    """Saves the state that all ranks hold together. Every rank calls.

    On return the checkpoint is complete and durable, and stock PyTorch can load it. When anything
    fails on any rank, every rank raises the same error and what stood at `path` still stands. That
    includes bad options, paths and states; only a `coordination`, `group` or `comm` that can't be
    used, or a rank outside the group, fails on its rank alone, and the others wait for it until the
    timeout. `path`, `format`, `dialect`, `overwrite`, `agreement`, `validate_access`, `common_differs` and
    `attributes` are the same on every rank, else MismatchError names what differs.

    Args:
        state: a nested dict. Mappings of any class are taken apart, and so are lists of any class
            that hold an array, a Mapping or what is named next. `ShardedTensor` and
            `ShardedObject` have keys of their own; anything else gets its dotted path as key: a
            DTensor is sharded by its placements, any other array (torch, numpy, DLPack) is the
            same on every rank and written once, another leaf is one object. Objects with
            state_dict() and load_state_dict() (modules, optimizers) are asked for their state
            dict, as torch's Stateful protocol says, and Megatron-Core's entities mean what they
            mean there. Objects that are no plain data are pickled. Stock PyTorch reads an array
            of numpy as a tensor of torch: its template there is torch.from_numpy(array).
        path: the checkpoint's directory, on a file system that all ranks see. A leading "~" is
            the home directory; URLs ("s3://...") are refused.
        group: the torch process group that saves; by default torch.distributed's default group
            where it is initialised. Not with coordination="files".
        comm: a communicator instead of a group: `tilestone.solo()`, `tilestone.mpi_world()`, or
            any object with rank, size, describe, gather, scatter, broadcast and all_to_all.
        coordination: how ranks know of one another. "communicator": through `group` or `comm`.
            "files": through small files at `path` alone; no process group is needed, and one that
            is there is not used. Ranks agree by rule, as with agreement="rule" (which see), and
            need not come at the same time; what each has written stays until the last one
            publishes the checkpoint. For torch_dist, to a path where no checkpoint stands. See
            docs/saving.md.
        rank, world_size, token: for coordination="files", which needs them: this rank's number, how
            many ranks save (the same on all), and a text of 8 to 256 bytes that all ranks of one
            run of the job have and no other run, not even the same job started again by its
            scheduler. A rank that was started again saves the same state under the same token, and
            completes the checkpoint; what it saved before is not written again, as a warning says,
            and a state of other keys, shapes, dtypes or shards is MismatchError. `rank` is torch's global one where a state has DTensors.
        number: for coordination="files": tells saves under one token to one path apart. Another
            state needs another number.
        wait: for coordination="files": return once the checkpoint is published. False: once this
            rank has written; the last rank to write publishes, and `SaveResult.published` says
            whether it was this one.
        torch_rank_local: for coordination="files": as torch does with use_collectives=False, each
            rank writes all that it holds, replicas too, and publishes its own `__RANK.metadata` as
            soon as its data is durable; torch's ranks load it so. `wait` waits until all ranks
            have, which `published` of the result says. `publish` makes an ordinary checkpoint of
            it.
        format: how the bytes are laid out: "torch_dist", PyTorch's, or "zarr", which Megatron-Core
            up to 0.15, the zarr package and tensorstore read. In zarr every array is sharded as
            the cells of one regular grid and has a dtype of numpy's or bfloat16, keys are paths
            of files, and agreement is "exchange".
        dialect: what of the state is sharded. "pytorch": as said of `state`, for stock PyTorch to
            load. "megatron": only `ShardedTensor`, `ShardedObject`, DTensors and Megatron-Core's
            entities are; everything else, arrays too, is one common state, that of rank 0, and
            stock Megatron-Core (0.9 and later) loads the checkpoint.
        overwrite: replace a valid checkpoint that stands at `path`; it stays valid until the new
            one is durable. By zarr or in Megatron-Core's dialect, and over such a checkpoint, the
            directory is replaced as a whole, in one step, by one that is made beside it.
        agreement: how ranks agree who writes what. "exchange": through rank 0, right for every
            state. "rule": each rank alone, without a word; replicas are known from placements or
            `holders`, and arrays that are not wrapped must be on every rank.
        validate_access: before anything is written, refuse what the main replicas of all ranks
            (those whose replica_id is 0) don't hold exactly once: elements of an array, places of a
            grid of ShardedObjects. Arrays that are not wrapped count once. Without it, replicas of
            one box are the same whatever their ids say, and a grid may lack places. By rule it
            takes what every rank holds (about 20 bytes a shard) to rank 0, as "exchange" does.
        common_differs: what it means when ranks differ in what they have in common, of which one
            rank's is saved: in Megatron-Core's dialect the common state (the order of a dict is no
            difference), in PyTorch's the objects (with agreement "exchange" alone; its arrays are
            not compared): "ignore"; "warn", rank 0 logs up to ten paths and the ranks; or "error",
            MismatchError.
        timeout: seconds for the whole save, more than 0; None for no limit.
        threads: that work on this rank; 0: as many as the machine has, at most 8.
        buffer_bytes: pooled memory of this rank, bytes.
        files_per_rank: data files that each rank writes.
        attributes: texts that say something of the checkpoint ({"iteration": "100"}), at most
            1 MiB in all. `Checkpoint.attributes` has them, and `tilestone inspect` shows them.
        tensor_attributes: what is to be known of single tensors, by the tensor's key and a name
            ({"layer.w": {"kind": "glu", "order": [0, 1]}}): None, bools, ints of 64 bits, floats,
            text, bytes, lists, tuples and dicts, at most 16 deep and 16 MiB in all. Each rank
            gives them for tensors that it holds; those of all ranks are put together.
            `Checkpoint.tensor_attributes` and `tilestone inspect PATH KEY` give them back.
        progress: True for a bar on a terminal, or a function that gets `Progress`.
        replicate: "local": what this rank holds and another rank of its `replicate_group` writes
            goes into this rank's own data file too, so that a restart in the same layout reads no
            other file for it, objects that are the same included. Stock PyTorch does not see
            these copies. With agreement "rule" only arrays with known holders are copied. The same
            on every rank. "none": each shard is written once.
        replicate_group: with replicate="local", the ranks whose shards this rank copies, itself
            among them: a torch process group of which it is a member, or their ranks in the group
            that saves. Mostly the model-parallel group: over data parallelism every rank would
            copy whatever it shares, up to the whole model.
        max_copy_bytes: bytes of elements that this rank copies at most, the smallest arrays
            first; None: no limit. `SaveResult.copies` and `copy_bytes` say what was copied.
        tp_replica_names: in Megatron-Core's dialects: second names of replicated tensors, as for
            `tilestone.megatron.save`. The same on every rank.

    Raises:
        AlreadyExistsError: a checkpoint stands at `path`, and overwrite is False.
        UnsupportedError: `path` is a URL; an unknown format or dialect; a directory that can't be
            replaced as a whole: one with files that belong to no checkpoint, a mount point, the
            working directory.
        InvalidArgumentError, MismatchError, CoverageError: the ranks' states contradict each other,
            or not all of them can be kept: sharded or device data inside a tuple or another object,
            an element type or a kind of tensor that no checkpoint holds, a container of which
            a load could not make another, attributes of a tensor that this rank does not have.
            The error names the key, and nothing is written. Ranks that give a tensor's attribute
            two values end the save too.
        StorageError, TimeoutError, RankFailedError: it could not be written. With
            coordination="files" the time runs out while ranks are missing, whom TimeoutError names:
            what was written is kept for them, see `unpublished`. RankFailedError: the save was
            abandoned.
    """
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(
            state, path, until_the_end, group=group, comm=comm, coordination=coordination,
            rank=rank, world_size=world_size, token=token, number=number, wait=wait,
            torch_rank_local=torch_rank_local, format=format, dialect=dialect,
            overwrite=overwrite, agreement=agreement, validate_access=validate_access,
            common_differs=common_differs, timeout=timeout, threads=threads,
            buffer_bytes=buffer_bytes, files_per_rank=files_per_rank, attributes=attributes,
            tensor_attributes=tensor_attributes, progress=progress, replicate=replicate,
            replicate_group=replicate_group, max_copy_bytes=max_copy_bytes,
            tp_replica_names=tp_replica_names,
        )  # fmt: skip
        if call.files is not None:
            return _core.save_by_files(call.bare(), call.prepare, call.session)
        return _core.save(call.prepare, call.place, call.comm, call.limit)


def plan_copies(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    replicate_group: ProcessGroup | Collection[int] | None,
    max_copy_bytes: int | None = None,
    **options: Any,
) -> list[_core.CopyCost]:
    """What `replicate="local"` would add to the same `save`; nothing is written. Every rank calls.

    With coordination="files" a rank is alone: no other needs to come.

    Args:
        state, path: as for `save`. Of `path` nothing is looked at: a checkpoint may stand there.
        replicate_group, max_copy_bytes: as for `save`.
        options: the other options of `save`, which are those of the save that is meant.

    Returns:
        For each rank, by its number, a cost with `copies`, the shards that other ranks write and
        this one copies, and `bytes` of their elements. With coordination="files" this rank's alone.

    Raises:
        InvalidArgumentError: replicate is among the options, or an option that `save` has not.
        As `save`, of what it refuses before it writes.
    """
    if "replicate" in options:
        raise InvalidArgumentError('replicate is "local" in plan_copies: leave it out')
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
    cache: str = "bypass",
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
    """Loads what `wanted` asks for, however the checkpoint was sharded. Every rank calls.

    `load(path)`, without a template, gives each rank all that the checkpoint holds, in new arrays
    (torch's where torch is loaded, else numpy's), nested as it was saved: keys of dicts are text,
    an empty dict or list has left nothing, and a list of which an element has left nothing is a
    dict by index, or shorter where that was its end. What has no recorded path (sharded entities
    with keys of their own, and all of zarr) stands under its key at the top, Megatron-Core's common
    state, whose keys are as they were, beside it.

    Args:
        wanted: a state dict as `save` takes it. Arrays in it are filled in place, those without
            memory (torch's meta device; read-only numpy arrays) are allocated; other leaves say
            only that their key is wanted. Of an object with state_dict() and load_state_dict(),
            what the checkpoint holds below its key must be asked for by its state dict, on one
            rank at least, unless `not_requested` says otherwise; a torch optimizer without state
            gets the state of plain parameters all the same, in the shapes that are stored, since
            nothing says what it should be; that of DTensors must be made before.
            To load a part, want a dict in place of the object: {"model": model.state_dict()}.
        path: the checkpoint's directory, as for `save`.
        group, comm: as for `save`. With comm=tilestone.solo() a rank loads alone, beside a process
            group too: no other rank needs to come, and "every rank" is this one below.
        not_in_checkpoint: what a wanted key means that the checkpoint doesn't hold: "error";
            "report", which lists it in `report`, and in a warning of rank 0; or "ignore". Where
            the load goes on, the leaf stays what it is in the template. Of values, lists and
            arrays in the common state (Megatron-Core's dialect) none of this is asked: it comes
            back as it was saved, and an array of another shape there is always an error.
        not_requested: the same for a key of the checkpoint that no rank wants; by default it is
            an error below the key of an object with state_dict(), and ignored elsewhere.
        other_shape: the same for a tensor that is wanted in another global shape than is stored.
            All three are the same on every rank.
        sharded_only: of a checkpoint in Megatron-Core's dialect, leave the common state alone: it
            is neither read nor given back, and the result has wanted's leaves and no others. A
            leaf that is not wrapped is then the stored array or object whose key is its path. The
            same on every rank; without meaning in PyTorch's dialect, which has no such state.
        validate_access: before arrays and objects are read, refuse what ranks want unless their
            main replicas want each element once, as for `save`. The same on every rank.
        report: gets what is reported; its lists are emptied first. Where load_state_dict() of an
            object raises, it has been filled, and so have the arrays.
        own_rank: load alone, as this rank of the job (0 or more), with no word to the others;
            no `group` is given then. Of a rank-local checkpoint (torch's
            use_collectives=False) this rank reads its own metadata if all that it wants stands
            there, as it wrote it itself, and all ranks' otherwise. The others need not call.
        cast: convert from the stored dtype where it differs from the wanted one, as torch's
            .to() does (what is too large for float8_e4m3fn becomes its largest number).
        allow_classes: names ("argparse.Namespace") of classes of which objects may be made.
            Objects of plain types (sets, paths, dates, numpy's scalars and the like) come back
            without it; one of another class comes back as `Opaque`, which `save` writes as the
            object that it was: pickles are never run.
        verify_checksums: check every item that is read whole, by one rank or by several together.
            The same on every rank, else MismatchError, like `path` and `two_phase`.
        two_phase: whether what several ranks want, and what would take a rank many short reads,
            is read once by one rank for all: "auto" by way of the page cache where all ranks run
            on one host and by messages elsewhere, "always" by messages, or "never".
        cache: "keep" leaves what is read in the page cache, so that another load of the same files
            needs no disk; "bypass" reads large tensors past it, which leaves memory to others.
            What is in the cache is read from there in either case.
        timeout: seconds for the whole load, more than 0; None for no limit.
        follow_links: as for `open`.
        threads, buffer_bytes, progress: as for `save`.

    Returns:
        A new dict of wanted's structure with the loaded values: the same array objects where
        they were filled in place (autograd sees them as changed), a ShardedTensor's local array
        in its place, a DTensor on the meta device as one with memory, Stateful objects after
        their load_state_dict() was called (with assign=True for a module on the meta device).
        Of a checkpoint in Megatron-Core's dialect, also all the rest of its common state, unless
        sharded_only is set.

    Raises:
        NotFoundError: no checkpoint (where a save by files is not published yet the hint says what
            it lacks), or a key that it doesn't hold (the hint names similar ones).
        UnsupportedError: two items of the checkpoint in one place of its tree (without a
            template); a dtype to which cast has no conversion (complex to real), with its key;
            or a process group that a forked process has inherited.
        InvalidArgumentError: a template that can't be filled, with its key: one with several
            elements in one place, or on a read-only map. That torch's memory is an immutable
            `bytes` object (torch.frombuffer warns of it) can't be found out: it is written.
        MismatchError: dtype or global shape differ from the stored ones, or the checkpoint holds
            state of a Stateful object for which no rank asks, or, with not_requested="error", any
            key that no rank asks for.
        CoverageError: the checkpoint lacks elements that are wanted.
        CorruptError, UnsafeError: the files are damaged, or look like an attack.
        StorageError, TimeoutError, RankFailedError: it could not be read.
    """
    alone = None if own_rank is None else _options.whole("own_rank", own_rank)
    if alone is not None and group is not None:
        raise InvalidArgumentError("own_rank loads alone: give no group with it")
    comm = comm or _core.solo() if alone is not None else communicator(group, comm)
    where: Any = wanted if path is None else path
    place = b"" if isinstance(where, Mapping) else _options.place(where)
    result: dict[Any, Any] = {}
    bridge: Bridge | None = None
    with contextlib.ExitStack() as until_the_end:

        def prepare() -> _core.LoadRequest:
            nonlocal bridge
            if isinstance(where, Mapping):
                raise InvalidArgumentError("the path of the checkpoint is needed beside a template")
            if wanted is None:
                raise InvalidArgumentError("a state is a dict, not NoneType")
            if report is not None and not isinstance(report, LoadReport):
                raise InvalidArgumentError(f"report is a LoadReport or None, not {report!r}")
            if report is not None:
                vars(report).update(vars(LoadReport()))
            shown = reporting(_options.sink("progress", progress), "load", comm.rank)
            allowed = _options.names("allow_classes", allow_classes)
            known = harmless(wanted)
            bridge = Bridge(True, allowed, group=group, ranks=comm.size, harmless=known)
            return _core.LoadRequest(
                None if path is None else made(wanted),
                _options.directory(where),
                bridge,
                _options.flag("follow_links", follow_links),
                _options.flag("cast", cast),
                _options.flag("verify_checksums", verify_checksums),
                _options.word("two_phase", two_phase),
                _options.word("cache", cache),
                _options.word("not_in_checkpoint", not_in_checkpoint),
                None if not_requested is None else _options.word("not_requested", not_requested),
                _options.word("other_shape", other_shape),
                _options.flag("sharded_only", sharded_only),
                _options.flag("validate_access", validate_access),
                _options.seconds("timeout", timeout),
                _options.whole("threads", threads),
                _options.whole("buffer_bytes", buffer_bytes, 64),
                until_the_end.enter_context(shown),
                objects_by_grid=isinstance(wanted, Prepared) and wanted.objects_by_grid,
                log_report=not isinstance(wanted, Prepared) or wanted.log_report,
                own_rank=alone,
            )

        def take(
            loaded: dict[Any, Any],
            missing: list[str],
            rest: list[str],
            other: list[str],
            kept: set[str],
        ) -> None:
            nonlocal result
            assert bridge is not None
            if report is not None:
                report.not_in_checkpoint = missing
                report.not_requested = rest
                report.other_shape = other
            bridge.give_back()
            found = LoadReport(missing, rest, other)
            result = wanted.take(loaded, found, kept) if isinstance(wanted, Prepared) else loaded

        _core.load(prepare, take, place, comm, _options.limit_of(timeout))
    return result
