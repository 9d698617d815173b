"""save and load."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core, _forked, _options
from tilestone._bridge import Bridge
from tilestone._errors import InvalidArgumentError
from tilestone._progress import ProgressCallback, reporting
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _group_of_torch(group: ProcessGroup | None) -> ProcessGroup | None:
    """The process group given, or torch's default one where it is initialised, or None."""
    if group is not None or "torch" not in sys.modules:
        return group
    from tilestone import _torch_bridge

    return _torch_bridge.default_group()


def _communicator(
    group: ProcessGroup | None, comm: CommunicatorLike | None
) -> CommunicatorLike:
    """Who takes part. A failure here is this rank's alone: nobody is connected yet who could learn of it."""
    if comm is not None and group is not None and not isinstance(comm, _core.Session):
        raise InvalidArgumentError("group and comm both say who takes part; give one of them")
    if comm is not None:
        return comm
    group = _group_of_torch(group)
    if group is None:
        return _core.solo()
    _forked.check(group, os.getpid())
    from tilestone._torch_comm import TorchCommunicator

    try:
        return TorchCommunicator(group)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"group {group!r}: {error}") from error


def _by_files(coordination: str, files: Mapping[str, Any]) -> _core.ByFiles | None:
    """This rank's place in a save by files; None where ranks have a communicator.

    Raises:
        InvalidArgumentError: an argument that it needs is missing or out of range, by its name.
    """
    way = _options.word("coordination", coordination)
    if way == "communicator":
        return None
    if way != "files":
        raise InvalidArgumentError(
            f'coordination is "communicator" or "files", not "{coordination}"'
        )
    for name, value in files.items():
        if value is None:
            raise InvalidArgumentError(f'coordination="files" needs {name}')
    return _core.ByFiles(
        _options.whole("rank", files["rank"]),
        _options.whole("world_size", files["world_size"]),
        _options.word("token", files["token"]),
        _options.whole("number", files["number"], 64),
        _options.flag("wait", files["wait"]),
        _options.flag("torch_rank_local", files["torch_rank_local"]),
    )


def _refuse_files(files: Mapping[str, Any]) -> None:
    """Refuses what only a save by files has, in one that has a communicator."""
    usual = {"number": 0, "wait": True, "torch_rank_local": False}
    for name, value in files.items():
        if value is not usual.get(name):
            raise InvalidArgumentError(f'{name} has a meaning with coordination="files" only')


class Prepared(abc.ABC):
    """A state that is made inside a call's first round, and taken in its last one.

    `save` and `load` take one in the place of a state. What its methods raise is this rank's
    failure, which every rank raises.
    """

    #: Classes of which objects are made without being allowed, where they can be imported.
    harmless: frozenset[str] = frozenset()
    #: LoadOptions::objects_by_grid: sharded objects are looked at by the key of their grid.
    objects_by_grid: bool = False
    #: LoadOptions::log_report: rank 0 logs what was found of keys.
    log_report: bool = True

    @abc.abstractmethod
    def make(self) -> Mapping[Any, Any]:
        """The state, on this rank; nothing has been written or read yet."""

    def compared_common(self) -> Mapping[Any, Any] | None:
        """Of a save: what is compared between ranks in the common state's place; None: all of it.

        Called after `make`.
        """
        return None

    def take(self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]) -> dict[Any, Any]:
        """What the load returns.

        Args:
            loaded: the loaded tree.
            report: what the ranks found, see LoadOptions; the same on every rank.
            kept: keys of this rank's items that were not loaded, as the policies let them.
        """
        return loaded


def _replicated_ranks(
    replicate_group: ProcessGroup | Collection[int] | None, group: ProcessGroup | None
) -> list[int]:
    """The ranks of `replicate_group`, as the group that saves numbers them."""
    if replicate_group is None:
        return []
    if isinstance(replicate_group, Collection) and not isinstance(replicate_group, (str, bytes)):
        return [_options.whole("replicate_group", rank) for rank in replicate_group]
    if "torch" in sys.modules:
        from tilestone import _torch_bridge

        ranks = _torch_bridge.ranks_within(replicate_group, _group_of_torch(group))
        if ranks is not None:
            return ranks
    raise InvalidArgumentError(
        f"replicate_group is a torch process group or a list of ranks, not {replicate_group!r}"
    )


def _made(state: Any) -> Any:
    return state.make() if isinstance(state, Prepared) else state


def _harmless(state: Any) -> frozenset[str]:
    return state.harmless if isinstance(state, Prepared) else frozenset()


def _compared(state: Any) -> Any:
    return state.compared_common() if isinstance(state, Prepared) else None


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
            publishes the checkpoint. For torch_dist in PyTorch's dialect, to a path where no
            checkpoint stands. See docs/saving.md.
        rank, world_size, token: for coordination="files", which needs them: this rank's number, how
            many ranks save (the same on all), and a text of 8 to 256 bytes that all ranks of one
            run of the job have and no other run, not even the same job started again by its
            scheduler. A rank that was started again saves the same state under the same token, and
            completes the checkpoint. `rank` is torch's global one where a state has DTensors.
        number: for coordination="files": tells saves under one token to one path apart.
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
            other file for it. Stock PyTorch does not see these copies. With agreement "rule" only
            what has known holders is copied. The same on every rank. "none": each shard is
            written once.
        replicate_group: with replicate="local", the ranks whose shards this rank copies, itself
            among them: a torch process group of which it is a member, or their ranks in the group
            that saves. Mostly the model-parallel group: over data parallelism every rank would
            copy whatever it shares, up to the whole model.
        max_copy_bytes: bytes of elements that this rank copies at most, the smallest arrays
            first; None: no limit. `SaveResult.copies` and `copy_bytes` say what was copied.

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
    by_files = {
        "rank": rank, "world_size": world_size, "token": token, "number": number, "wait": wait,
        "torch_rank_local": torch_rank_local,
    }  # fmt: skip
    files = _by_files(coordination, by_files)
    session = comm if isinstance(comm, _core.Session) else None  # Session.save gives it so
    if files is None:
        comm = _communicator(group, comm)
    elif session is None and (group is not None or comm is not None):
        name = "comm" if group is None else "group"
        raise InvalidArgumentError(f'{name} has no meaning with coordination="files"')
    # What can fail on one rank alone stands in prepare, which runs inside the first round.
    with contextlib.ExitStack() as until_the_end:

        def prepare(bare: bool = False) -> _core.SaveRequest:
            """`bare`: the options alone, without what is made of the state."""
            if files is None:
                _refuse_files(by_files)
                assert comm is not None
                own, ranks = comm.rank, comm.size
            else:
                own, ranks = files.rank, files.world_size
            shown = reporting(_options.sink("progress", progress), "save", own)
            by_rule = _options.word("agreement", agreement) == "rule" or files is not None
            unwrapped = _options.word("dialect", dialect) == "pytorch"
            return _core.SaveRequest(
                {} if bare else _made(state),
                _options.directory(path),
                Bridge(
                    group=group, ranks=ranks, by_rule=by_rule and unwrapped, rank=own,
                    harmless=_harmless(state), common=not unwrapped,
                ),
                _options.word("format", format),
                _options.word("dialect", dialect),
                _options.flag("overwrite", overwrite),
                agreement,
                _options.flag("validate_access", validate_access),
                _options.word("common_differs", common_differs),
                _options.seconds("timeout", timeout),
                _options.whole("threads", threads),
                _options.whole("buffer_bytes", buffer_bytes, 64),
                _options.whole("files_per_rank", files_per_rank),
                _options.texts("attributes", attributes),
                {} if bare else _options.by_key("tensor_attributes", tensor_attributes),
                None if bare else until_the_end.enter_context(shown),
                compared_common=None if bare else _compared(state),
                by_files=files,
                replicate=_options.word("replicate", replicate),
                replicate_group=_replicated_ranks(replicate_group, group),
                max_copy_bytes=(
                    None
                    if max_copy_bytes is None
                    else _options.whole("max_copy_bytes", max_copy_bytes, 64)
                ),
            )

        if files is not None:
            return _core.save_by_files(prepare(bare=True), prepare, session)
        return _core.save(prepare, _options.place(path), comm, _options.limit_of(timeout))


@dataclasses.dataclass
class LoadReport:
    """What the ranks of a load found of keys: the union over all ranks, the same on each.

    An option that is not "report" leaves its list empty.

    Attributes:
        not_in_checkpoint: keys that are wanted and not in the checkpoint, sorted.
        not_requested: keys of the checkpoint that no rank wants, sorted.
        other_shape: keys of tensors that are wanted in another global shape, sorted.
    """

    not_in_checkpoint: list[str] = dataclasses.field(default_factory=list)
    not_requested: list[str] = dataclasses.field(default_factory=list)
    other_shape: list[str] = dataclasses.field(default_factory=list)


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
    comm = comm or _core.solo() if alone is not None else _communicator(group, comm)
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
            known = _harmless(wanted)
            bridge = Bridge(True, allowed, group=group, ranks=comm.size, harmless=known)
            return _core.LoadRequest(
                None if path is None else _made(wanted),
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
