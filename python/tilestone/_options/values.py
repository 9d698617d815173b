"""The table of options: each stands here once, with its type, default, check and explanation.

From it come the value objects (`Checks`, `Reading`, ...), the keywords of `save`, `load` and `open`
with their checks, the engine's structs of the same names, types.py and docs/options.md (the
last two by `tools/options --fix`). A new option is a field here, of the engine's struct, and in
python/src/options.cc.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.load_report import LoadReport
from tilestone._options.rename import Rename, renaming

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tilestone._options.progress import ProgressCallback

Check = Callable[[str, Any], Any]
Made = TypeVar("Made", bound="Options")


def _option(default: Any, check: Check, text: str, *, engine: bool = True) -> Any:
    """A field of the table.

    Args:
        default: its default.
        check: takes the option's name and a value; returns what the engine gets, or raises
            InvalidArgumentError.
        text: the explanation.
        engine: whether the engine's struct has this field.
    """
    about = {"check": check, "text": inspect.cleandoc(text), "engine": engine}
    return dataclasses.field(default=default, metadata=about)


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> str:
        word = valid.word(name, value)
        if word in words:
            return word
        *most, last = (f'"{each}"' for each in words)
        raise InvalidArgumentError(f'{name} must be {", ".join(most)} or {last}, not "{word}"')

    return check


def _bytes(name: str, value: Any) -> int:
    return valid.whole(name, value, 64)


def _count(name: str, value: Any) -> int:
    number = valid.whole(name, value, 64)
    if number == 0:
        raise InvalidArgumentError(f"{name} is 0; expected at least 1")
    return number


def _made(kind: type[Made]) -> Check:
    def check(name: str, value: Any) -> Made:
        if isinstance(value, kind):
            return value
        raise InvalidArgumentError(f"{name} must be a tilestone.{kind.__name__}, not {value!r}")

    return check


def _report(name: str, value: Any) -> LoadReport:
    if isinstance(value, LoadReport):
        return value
    raise InvalidArgumentError(f"{name} must be a LoadReport or None, not {value!r}")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that belong together. The types of the fields are checked when one is made."""

    #: What an error calls a field, with the field's name in place of {}.
    _called: ClassVar[str] = "{}"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = self._called.format(field.name)
            value = field.metadata["check"](name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def table(cls) -> Iterator[tuple[str, str, str]]:
        """(name, type and default, explanation) of each option, its own before inherited ones."""
        for field in subclass_fields_first(cls):
            yield field.name, f"{field.type} = {field.default!r}", field.metadata["text"]

    def fill(self, engine: Any) -> Any:
        """Sets the fields of the engine's struct; returns it."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata["engine"] and value is not None:
                setattr(engine, field.name, value.made() if isinstance(value, Value) else value)
        return engine


def subclass_fields_first(cls: type[Options]) -> list[dataclasses.Field[Any]]:
    """The fields of a class: its own first, then those of its bases."""
    own = [field for field in dataclasses.fields(cls) if field.name in cls.__annotations__]
    return own + [field for field in dataclasses.fields(cls) if field not in own]


class Value(Options):
    """Options that a user makes as one value. The engine has a struct of the same name."""

    def __init_subclass__(cls) -> None:
        cls._called = f"{cls.__name__}.{{}}"
        lines = [inspect.cleandoc(cls.__doc__ or ""), "Args:"]
        for name, field in list(vars(cls).items()):
            if isinstance(field, dataclasses.Field):
                text = f"{name}: {field.metadata['text']}"
                lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent=" " * 8)
        cls.__doc__ = "\n".join([lines[0], "", *lines[1:]])

    def made(self) -> Any:
        """The engine's struct."""
        return self.fill(getattr(_core, type(self).__name__)())

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class ByFiles(Value):
    """A save in which the ranks communicate only through small files at the path.

    This needs no process group, and does not use an existing one. The ranks decide without
    communication who writes what, and need not call at the same time; the data of each rank stays
    on disk until the last rank publishes the checkpoint. Replicas are known from placements or
    `holders`. Only for torch_dist, and only to a path without a checkpoint. See
    docs/saving_by_files.md.

    `save` needs the first three fields. In a `Session` with a group they come from
    the group.
    """

    rank: int | None = _option(
        None, _optional(valid.whole),
        """the number of this rank. If the state has DTensors, it must be torch's global rank.""",
    )  # fmt: skip
    world_size: int | None = _option(
        None, _optional(valid.whole), "how many ranks save; the same on all ranks."
    )
    token: str | None = _option(
        None, _optional(valid.word),
        """a string of 8 to 256 bytes, the same on all ranks of one run of the job and different in
        every other run, also when the scheduler starts the same job again. A rank that was
        restarted saves the same state under the same token and so completes the checkpoint. What it
        wrote before is not written again, and a warning says so; a state with other keys, shapes,
        dtypes or shards raises MismatchError.""",
    )  # fmt: skip
    number: int = _option(
        0, _bytes,
        """distinguishes saves that have the same token and the same path. A different state needs a
        different number. A session counts its saves itself.""",
    )  # fmt: skip
    wait: bool = _option(
        True, valid.flag,
        """True: return once the checkpoint is published. False: return once this rank has written
        its part. The last rank to write then publishes, and `SaveResult.published` says whether
        that was this rank.""",
    )  # fmt: skip
    torch_rank_local: bool = _option(
        False, valid.flag,
        """as with torch's use_collectives=False, each rank writes everything that it holds,
        replicas included, and publishes its own `__RANK.metadata` as soon as its data is durable;
        torch's ranks can load these files. `wait` then waits until all ranks have done so, and
        `published` of the result says whether they have. `publish` turns such a checkpoint into an
        ordinary one.""",
    )  # fmt: skip


def _ranks_or_group(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        raise InvalidArgumentError(
            f"{name} must be a torch process group or a list of ranks, not {value!r}"
        )
    if isinstance(value, Collection):
        try:
            ranks = list(value)
        except TypeError as error:  # an array without dims
            raise InvalidArgumentError(f"{name} can't be {value!r}: {error}") from None
        return tuple(valid.whole(name, rank) for rank in ranks)
    return value  # torch's sign for a group without this rank is an int, which a save refuses


@dataclasses.dataclass(frozen=True, repr=False)
class LocalCopies(Value):
    """Each rank also writes to its own data file what it holds and another rank of its group
    writes, and objects that are equal here and on the rank that writes them. After a restart with
    the same sharding the rank then reads no other file for them. Stock PyTorch does not see these
    copies. By files only arrays with known holders are copied, and
    replicas whose id has Megatron's three numbers and ends with 0. Either all ranks of a save give
    copies or none.
    """

    group: ProcessGroup | Collection[int] | None = _option(
        None, _ranks_or_group,
        """the ranks whose shards this rank copies, itself included: a torch process group that it
        belongs to, or rank numbers in the group that saves. Usually this is the model-parallel
        group. With the data-parallel group every rank would copy everything that it shares, up to
        the whole model. `tilestone.save` needs it; in `tilestone.megatron.save`, None is the
        model-parallel group of Megatron's parallel_state.""",
    )  # fmt: skip
    max_bytes: int | None = _option(
        None, _optional(_bytes),
        """the most bytes of elements that this rank copies, smallest arrays first; None: no limit.
        `SaveResult.copies` and `copy_bytes` say what was copied.""",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Checks(Value):
    """What is checked. Each call uses the fields that concern it, so one value may serve all calls
    of a program. Must be the same on every rank.
    """

    access: bool = _option(
        False, valid.flag,
        """`save`: before anything is written, check that the main replicas of all ranks (those
        whose replica_id is 0) hold every element of each array and every cell of each grid of
        ShardedObjects exactly once, and raise an error if not. Arrays that are not wrapped count
        once. Without this option, shards of the same box count as replicas of each other whatever
        their replica_ids are, and a grid may have empty cells. Not possible by files. `load`:
        before arrays and objects are read, check the same of what the ranks want.""",
    )  # fmt: skip
    common_differs: str = _option(
        "warn", _one_of("ignore", "warn", "error"),
        """`save`: what to do when the ranks differ in something of which only one rank's version is
        saved: objects (the order of a dict does not matter) and their replicas, Megatron-Core's
        common state, and replicas of arrays of at most 64 KiB. Larger arrays are compared only
        where DTensors of one key are on disjoint meshes; if they differ, the save is refused with
        "warn" too. "ignore": compare nothing. "warn": rank 0 logs the keys and the ranks, each
        once; in Megatron-Core's dialect the other ranks log their own keys. "error": raise
        MismatchError on every rank, before anything is written.""",
    )  # fmt: skip
    checksums: bool = _option(
        True, valid.flag,
        """`load` and `open`: check every byte that is read; whole blocks of 64 KiB to 4 MiB are
        read for this. Items without checksums of blocks (of other writers, or of earlier versions)
        are checked if one rank, or several together, read them whole; the log says if parts were
        not. False: read exactly what is wanted, unchecked.""",
    )  # fmt: skip


_POLICY = _one_of("error", "report", "ignore")


@dataclasses.dataclass(frozen=True, repr=False)
class Differences(Value):
    """What a load does about differences between the templates and the checkpoint.

    "error" raises; "report" lists the key in `report` and in a warning of rank 0; "ignore" goes on
    without a warning. If the load continues, the leaf keeps its value from the template. The three policies
    must be the same on every rank. They don't apply to values, lists and arrays in the common state
    (Megatron-Core's dialect): the common state comes back as it was saved, and an array of another
    shape in it is always an error.
    """

    not_in_checkpoint: str = _option(
        "error", _POLICY, "a wanted key that the checkpoint doesn't hold."
    )
    not_requested: str | None = _option(
        None, _optional(_POLICY),
        """a key of the checkpoint that no rank wants. None: an error below the key of an object
        with state_dict(); below other dicts and lists of the template one warning, with keys and
        bytes; ignored elsewhere. `report` lists what is below dicts and lists whatever this says.""",
    )  # fmt: skip
    other_shape: str = _option(
        "error", _POLICY,
        "a tensor whose wanted global shape differs from the stored one.",
    )  # fmt: skip
    report: LoadReport | None = _option(
        None, _optional(_report),
        """receives what is reported; its lists are emptied first. If the load_state_dict() of an
        object raises, the report and the arrays are already filled.""",
        engine=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Reading(Value):
    """How files are read."""

    two_phase: str = _option(
        "auto", _one_of("auto", "always", "never"),
        """`load`: whether data that several ranks want, or that one rank would need many short
        reads for, is read once by one rank for all. "auto": through the page cache if all ranks run
        on one host, otherwise by messages. "always": by messages. "never": each rank reads for
        itself. Must be the same on every rank.""",
    )  # fmt: skip
    cache: str | None = _option(
        None, _optional(_one_of("bypass", "keep")),
        """"keep" leaves what is read in the page cache, so that another load of the same files
        needs no disk. "bypass" reads large tensors without the page cache, which leaves that memory
        to others. None: keep where what is read fits into half of the memory that is available
        (docs/cache.md); `verify` keeps only with "keep". Data that is already in the cache is read
        from there in any case.""",
    )  # fmt: skip
    follow_links: bool = _option(
        False, valid.flag,
        """read files through any symbolic link that leads out of the directory. Without it, the
        only such links that are followed lead into a directory "blobs" next to the checkpoint or
        next to one of its parent directories, as in the Hugging Face hub's cache. Other links raise
        UnsafeError, because a checkpoint from somebody else could name any file that you may read
        (docs/links.md).""",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Resources(Value):
    """What a call uses of the machine, on this rank."""

    threads: int = _option(
        0, valid.whole, "number of threads; 0: as many as the machine has, at most 8."
    )
    buffer_bytes: int = _option(_core.DEFAULT_BUFFER_BYTES, _bytes, "pooled memory, in bytes.")
    files_per_rank: int = _option(
        1, valid.whole, "`save`: number of data files that each rank writes."
    )


def _best(name: str, value: Any) -> tuple[str, str, int]:
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise InvalidArgumentError(
            f'{name} must be a tuple like ("loss", "min", 2), not {value!r}'
        )
    metric, mode, *count = value
    return (
        valid.word(f"{name}[0]", metric),
        _one_of("min", "max")(f"{name}[1]", mode),
        _count(f"{name}[2]", count[0]) if count else 1,
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Keep(Value):
    """Which checkpoints of a run a `CheckpointManager` keeps: those that any of these rules keeps.

    Only complete checkpoints are removed, and only those of steps that the one that has just become
    durable continues. Steps of other runs stay. Those of a branch that the run has left when it
    went back are removed once `last` newer ones are durable, whatever the other rules say.
    """

    last: int = _option(1, _count, "how many of the newest; at least 1.")
    every: int | None = _option(
        None, _optional(_count), "those whose step is a multiple of it; None: no such rule."
    )
    best: tuple[str, str, int] | None = _option(
        None, _optional(_best),
        """(metric, "min" or "max", count): the `count` steps whose metric of this name is the
        lowest or the highest. Steps without that metric, or where it is NaN, don't count.""",
    )  # fmt: skip
    newer_than: float | None = _option(
        None, _optional(valid.seconds),
        "those that were saved less than this many seconds ago.",
    )  # fmt: skip


#: The value objects, in the order of docs/options.md.
VALUES: tuple[type[Value], ...] = (
    ByFiles, LocalCopies, Checks, Differences, Reading, Resources, Keep,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _OfAll(Options):
    """The options of `save`, `load` and `open`."""

    checks: Checks = _option(Checks(), _made(Checks), "what is checked.")
    resources: Resources = _option(Resources(), _made(Resources), "threads, memory and files.")


@dataclasses.dataclass(frozen=True)
class _OfRanks(_OfAll):
    """The options of calls in which ranks take part together."""

    timeout: float | None = _option(
        _core.DEFAULT_TIMEOUT, valid.seconds,
        "seconds for the whole call, more than 0; None for no limit.",
    )  # fmt: skip
    progress: bool | ProgressCallback = _option(
        False, valid.sink,
        "True shows a bar on a terminal; a function is called with `Progress`.",
        engine=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _OfReads(_OfAll):
    """The options of `load` and `open`."""

    format: str | None = _option(
        None, _optional(valid.word),
        'the file format, "torch_dist" or "zarr"; None: found from the files.',
    )  # fmt: skip
    reading: Reading = _option(Reading(), _made(Reading), "how files are read.")


@dataclasses.dataclass(frozen=True)
class SaveOptions(_OfRanks):
    """The options of `save`, except who takes part."""

    format: str = _option(
        "torch_dist", valid.word,
        """the file format. "torch_dist" is PyTorch's. "zarr" can be read by Megatron-Core up to
        0.15, the zarr package and tensorstore. With zarr, each array must be sharded into the cells
        of one regular grid, its dtype must be one of numpy's or bfloat16, keys are file paths, and
        the ranks need a communicator. Must be the same on every rank.""",
    )  # fmt: skip
    dialect: str = _option(
        "pytorch", valid.word,
        """which parts of the state are sharded. "pytorch": as described under `state`; stock
        PyTorch can load the checkpoint. "megatron": only `ShardedTensor`, `ShardedObject`, DTensors
        and Megatron-Core's entities are sharded. Everything else, arrays included, forms one common
        state, which is saved from rank 0; stock Megatron-Core (0.9 and later) can load the
        checkpoint. Must be the same on every rank.""",
    )  # fmt: skip
    overwrite: bool = _option(
        False, valid.flag,
        """replace a valid checkpoint at `path`. The old one stays valid until the new one is
        durable. With format zarr or Megatron-Core's dialect, and when the old checkpoint is of one
        of these kinds, a new directory is built beside the old one and replaces it as a whole, in
        one step. Must be the same on every rank. Not possible by files.""",
    )  # fmt: skip
    copies: LocalCopies | None = _option(
        None, _optional(_made(LocalCopies)),
        "also write copies of what other ranks write; None: each shard is written once.",
        engine=False,
    )  # fmt: skip
    attributes: Mapping[str, str] | None = _option(
        None, valid.texts,
        """strings that describe the checkpoint ({"iteration": "100"}), at most 1 MiB in all.
        `Checkpoint.attributes` returns them, and `tilestone inspect` shows them. Must be the same
        on every rank.""",
    )  # fmt: skip
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None = _option(
        None, valid.by_key,
        """attributes of single tensors, by the tensor's key and the attribute's name ({"layer.w":
        {"kind": "glu", "order": [0, 1]}}). Values are None, bools, 64-bit ints, floats, strings,
        bytes, lists, tuples and dicts, nested at most 16 deep and at most 16 MiB in all. Each rank
        gives attributes of tensors that it holds; those of all ranks are merged.
        `Checkpoint.tensor_attributes` and `tilestone inspect PATH KEY` return them.""",
        engine=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AsyncSaveOptions(SaveOptions):
    """The options of `async_save`, except who takes part."""

    stage: str = _option(
        "copy", _one_of("copy", "lazy"),
        """when arrays are copied. "copy": before the call returns. "lazy": torch's tensors and
        DTensors of more than 64 KiB, in host memory and on GPUs, are copied after it, while forward
        and backward run. The next step of a torch optimizer, or `AsyncSave.staged.result()`, ends that:
        it copies the rest. A snapshot is one step, or the save fails and names the key;
        docs/saving.md says what torch does not notice. Other arrays are copied before the call
        returns.""",
        engine=False,
    )  # fmt: skip
    on_error: str = _option(
        "raise", _one_of("raise", "warn"),
        """what happens when a save fails and a rank does not ask for its result. "raise": the next
        save of the session, or of the group, raises the error on every rank. "warn": it logs it and
        saves.
        With "warn", a failure of the storage or of another rank before the call returns
        (StorageError, NotFoundError, TimeoutError, RankFailedError) is not raised either: it is
        logged, and is the result of the save. A state or an option that can't be saved is always an error. Must be the
        same on every rank.""",
        engine=False,
    )  # fmt: skip
    in_flight: str = _option(
        "wait", _one_of("wait", "fail", "skip"),
        """what happens if the previous save has not ended on some rank. "wait": wait for it.
        "fail": raise AlreadyExistsError on every rank. "skip": save nothing, on every rank
        (`AsyncSave.skipped`); not possible by files. Must be the same on every rank.""",
        engine=False,
    )  # fmt: skip
    max_staged_bytes: int | None = _option(
        None, _optional(_bytes),
        """the most memory that this rank uses for copies of arrays, in bytes. Arrays that do not fit
        are written before the call returns. None: all are copied. Not possible by files.""",
        engine=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoadOptions(_OfReads, _OfRanks):
    """The options of `load`, except who takes part."""

    cast: bool = _option(
        False, valid.flag,
        """convert from the stored dtype to the wanted one where they differ, as torch's .to() does
        (a value too large for float8_e4m3fn becomes the largest number of that dtype).""",
    )  # fmt: skip
    differences: Differences = _option(
        Differences(), _made(Differences),
        "what to do about differences between the templates and the checkpoint.",
    )  # fmt: skip
    rename: Rename | None = _option(
        None, renaming,
        """gives the checkpoint's keys the names that `state` has: a function of a key, such as
        `tilestone.strip_prefix("_orig_mod.")`, or pairs (regular expression, replacement), of which
        the first one that is found in a key replaces what it finds. An empty name hides the key.
        Must be the same on every rank.""",
    )  # fmt: skip
    own_rank: int | None = _option(
        None, _optional(valid.whole),
        """load alone, as this rank of the job (0 or more), without communication; `group` must not
        be given. From a rank-local checkpoint (torch's use_collectives=False) this rank reads only
        its own metadata if that holds everything wanted, just as this rank wrote it; otherwise it
        reads the metadata of all ranks. Other ranks need not call.""",
    )  # fmt: skip
    allow_classes: Collection[str] = _option(
        (), valid.names,
        """names ("argparse.Namespace") of classes whose objects may be created. Objects of plain
        types (sets, paths, dates, numpy's scalars and the like) need no permission. An object of
        any other class comes back as `Opaque`, which `save` writes as the original object. Pickles
        are never run.""",
        engine=False,
    )  # fmt: skip


def checked_framework(name: str, value: Any) -> str:
    """"numpy" or "torch"."""
    if isinstance(value, str) and value in ("numpy", "torch"):
        return value
    raise InvalidArgumentError(f'{name} must be "numpy" or "torch", not {value!r}')


@dataclasses.dataclass(frozen=True)
class OpenOptions(_OfReads):
    """The options of `open`."""

    framework: str = _option(
        "numpy", checked_framework,
        '"numpy" or "torch": the kind of arrays that `read` returns.',
        engine=False,
    )  # fmt: skip


#: The options of each call, by the name of its TypedDict.
CALLS: dict[str, type[Options]] = {
    "SaveKeywords": SaveOptions, "AsyncSaveKeywords": AsyncSaveOptions,
    "LoadKeywords": LoadOptions, "OpenKeywords": OpenOptions,
}  # fmt: skip
