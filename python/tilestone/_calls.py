"""What all collective calls have in common, and the arguments of a save and of a load."""

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
from tilestone._progress import reporting
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The options of `tilestone.save` with their defaults, without those that say who takes part.
SAVE_OPTIONS: dict[str, Any] = {
    "format": "torch_dist",
    "dialect": "pytorch",
    "overwrite": False,
    "agreement": "exchange",
    "validate_access": False,
    "common_differs": "warn",
    "timeout": _core.DEFAULT_TIMEOUT,
    "threads": 0,
    "buffer_bytes": _core.DEFAULT_BUFFER_BYTES,
    "files_per_rank": 1,
    "attributes": None,
    "tensor_attributes": None,
    "progress": False,
    "replicate": "none",
    "replicate_group": None,
    "max_copy_bytes": None,
    "tp_replica_names": False,
}

#: The options that a save by files needs only after it has begun; its first request has defaults.
_LATER_OPTIONS: dict[str, Any] = {
    name: SAVE_OPTIONS[name]
    for name in (
        "threads", "buffer_bytes", "files_per_rank", "tensor_attributes", "progress",
        "max_copy_bytes", "tp_replica_names",
    )
}  # fmt: skip

#: The options of `tilestone.load` with their defaults, without `group`, `comm`, `own_rank` and
#: `report`.
LOAD_OPTIONS: dict[str, Any] = {
    "cast": False,
    "allow_classes": (),
    "verify_checksums": True,
    "two_phase": "auto",
    "cache": "auto",
    "not_in_checkpoint": "error",
    "not_requested": None,
    "other_shape": "error",
    "sharded_only": False,
    "validate_access": False,
    "timeout": _core.DEFAULT_TIMEOUT,
    "threads": 0,
    "buffer_bytes": _core.DEFAULT_BUFFER_BYTES,
    "follow_links": False,
    "progress": False,
}


def _refuse_unknown(what: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = options.keys() - known.keys()
    if unknown:
        raise InvalidArgumentError(f"a {what} has no option {sorted(unknown)[0]}")


@dataclasses.dataclass
class LoadReport:
    """Differences between a load's templates and the checkpoint: the union over all ranks.

    Every rank gets the same report. A list is empty unless the option of its name is "report".

    Attributes:
        not_in_checkpoint: wanted keys that are not in the checkpoint, sorted.
        not_requested: keys of the checkpoint that no rank wants, sorted.
        other_shape: keys of tensors whose wanted global shape differs from the stored one, sorted.
    """

    not_in_checkpoint: list[str] = dataclasses.field(default_factory=list)
    not_requested: list[str] = dataclasses.field(default_factory=list)
    other_shape: list[str] = dataclasses.field(default_factory=list)


def _group_of_torch(group: ProcessGroup | None) -> ProcessGroup | None:
    """The given process group, or torch's default one if it is initialised, or None."""
    if group is not None or "torch" not in sys.modules:
        return group
    from tilestone import _torch_bridge

    return _torch_bridge.default_group()


def communicator(
    group: ProcessGroup | None, comm: CommunicatorLike | None
) -> CommunicatorLike:
    """The communicator of a call.

    An error here is raised on this rank only, because it has no connection yet to tell the others.
    """
    if comm is not None and group is not None and not isinstance(comm, _core.Session):
        raise InvalidArgumentError("group and comm exclude each other; pass only one of them")
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


def is_by_files(coordination: str) -> bool:
    """Whether the ranks communicate through files only."""
    way = _options.word("coordination", coordination)
    if way not in ("communicator", "files"):
        raise InvalidArgumentError(
            f'coordination must be "communicator" or "files", not "{coordination}"'
        )
    return way == "files"


def _by_files(coordination: str, files: Mapping[str, Any]) -> _core.ByFiles | None:
    """This rank's part in a save by files; None if the ranks have a communicator.

    Raises:
        InvalidArgumentError: a required argument is missing or out of range; the error names it.
    """
    if not is_by_files(coordination):
        return None
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


def refuse_files(files: Mapping[str, Any]) -> None:
    """Refuses the arguments of a save by files in a save with a communicator."""
    usual = {"number": 0, "wait": True, "torch_rank_local": False}
    for name, value in files.items():
        if value is not usual.get(name):
            raise InvalidArgumentError(f'{name} is only allowed with coordination="files"')


class Prepared(abc.ABC):
    """A state that is made in a call's first round, and receives the result in its last one.

    `save` and `load` accept one in place of a state. An exception of its methods is this rank's
    failure, and every rank raises it.
    """

    #: Classes whose objects may be created without permission, if they can be imported.
    harmless: frozenset[str] = frozenset()
    #: LoadOptions::objects_by_grid: sharded objects are compared by the key of their grid.
    objects_by_grid: bool = False
    #: LoadOptions::unmarked: the dialect of a checkpoint of which no file names one.
    unmarked: str = "pytorch"
    #: LoadOptions::log_report: rank 0 logs the LoadReport.
    log_report: bool = True

    @abc.abstractmethod
    def make(self) -> Mapping[Any, Any]:
        """Makes the state of this rank; nothing has been written or read yet."""

    def compared_common(self) -> Mapping[Any, Any] | None:
        """For a save: what is compared between ranks instead of the common state; None: all of it.

        Called after `make`.
        """
        return None

    def replicate_group(self, given: Any) -> Any:
        """For a save with replicate="local": its `replicate_group`, made from the caller's."""
        return given

    def take(self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]) -> dict[Any, Any]:
        """Takes what was loaded; returns what the load returns.

        Args:
            loaded: the loaded tree.
            report: the differences that were found, the same on every rank.
            kept: keys of this rank's items that were not loaded because the options allow it.
        """
        return loaded


class _Made(Prepared):
    """A state that the caller has made."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def make(self) -> Mapping[Any, Any]:
        """Returns the state; only None is refused here, the binding checks all else."""
        if self._state is None:
            raise InvalidArgumentError("a state must be a dict, not NoneType")
        given: Mapping[Any, Any] = self._state
        return given


def prepared(state: Any) -> Prepared:
    """The caller's state, or what will make it."""
    return state if isinstance(state, Prepared) else _Made(state)


def _replicated_ranks(
    replicate_group: ProcessGroup | Collection[int] | None, group: ProcessGroup | None
) -> list[int]:
    """The ranks of `replicate_group`, numbered as in the group that saves."""
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
        f"replicate_group must be a torch process group or a list of ranks, not {replicate_group!r}"
    )


class SaveCall:
    """One rank's call of `tilestone.save`: its arguments, and the checks of them.

    The arguments that say who takes part are checked here; their errors are raised on this rank
    only. All others are checked in `prepare`, which the engine calls inside the first round, so
    that every rank gets the error.

    Args:
        state, path: as for `tilestone.save`.
        until_the_end: receives context managers that must stay open until the save ends.
        group, comm, coordination, rank, world_size, token, number, wait, torch_rank_local: who
            takes part, as for `tilestone.save`.
        options: the other options of `tilestone.save`.

    Attributes:
        comm: the communicator or session; None in a save by files.
        files: this rank's part in a save by files; otherwise None.
        session: the session, if one was passed as `comm`; otherwise None.

    Raises:
        InvalidArgumentError: an argument that says who takes part can't be used.
    """

    def __init__(
        self,
        state: Any,
        path: str | os.PathLike[str],
        until_the_end: contextlib.ExitStack,
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
        **options: Any,
    ) -> None:
        self._by_files = {
            "rank": rank, "world_size": world_size, "token": token, "number": number,
            "wait": wait, "torch_rank_local": torch_rank_local,
        }  # fmt: skip
        self._state = prepared(state)
        self.path = path
        self._group = group
        self._options = SAVE_OPTIONS | options
        self._until_the_end = until_the_end
        self.files = _by_files(coordination, self._by_files)
        # Session.save passes itself as comm.
        self.session = comm if isinstance(comm, _core.Session) else None
        if self.files is None:
            self.comm: CommunicatorLike | None = communicator(group, comm)
        elif self.session is None and (group is not None or comm is not None):
            name = "comm" if group is None else "group"
            raise InvalidArgumentError(f'{name} is not allowed with coordination="files"')
        else:
            self.comm = None

    @property
    def place(self) -> bytes:
        """The location as bytes; empty for an invalid path, which the first round reports."""
        return _options.place(self.path)

    @property
    def limit(self) -> float:
        """Seconds for the whole save."""
        return _options.limit_of(self._options["timeout"])

    def bare(self) -> _core.SaveRequest:
        """The request with which a save by files begins: the options, without the state.

        Errors in the other options are found in `prepare`, where the other ranks learn of them.
        """
        return self._request(True)

    def prepare(self) -> _core.SaveRequest:
        """This rank's request, with its state."""
        return self._request(False)

    def _who(self) -> tuple[int, int]:
        """This rank's number, and how many ranks take part."""
        if self.files is not None:
            return self.files.rank, self.files.world_size
        refuse_files(self._by_files)
        assert self.comm is not None
        return self.comm.rank, self.comm.size

    def _bridge(self) -> Bridge:
        own, ranks = self._who()
        _refuse_unknown("save", self._options, SAVE_OPTIONS)
        agreement = _options.word("agreement", self._options["agreement"])
        unwrapped = _options.word("dialect", self._options["dialect"]) == "pytorch"
        by_rule = agreement == "rule" or self.files is not None
        return Bridge(
            group=self._group, ranks=ranks, by_rule=by_rule and unwrapped, rank=own,
            harmless=self._state.harmless, common=not unwrapped,
        )  # fmt: skip

    def _copied_ranks(self) -> list[int]:
        group = self._options["replicate_group"]
        if self._options["replicate"] == "local":
            group = self._state.replicate_group(group)
        return _replicated_ranks(group, self._group)

    def _request(self, bare: bool) -> _core.SaveRequest:
        given = self._options | _LATER_OPTIONS if bare else self._options
        own, _ = self._who()
        shown = reporting(_options.sink("progress", given["progress"]), "save", own)
        state = {} if bare else self._state.make()
        options = self._engine_options(given, bare)
        return _core.SaveRequest(
            state,
            _options.directory(self.path),
            self._bridge(),
            options,
            tensor_attributes=_options.by_key("tensor_attributes", given["tensor_attributes"]),
            progress=None if bare else self._until_the_end.enter_context(shown),
            compared_common=None if bare else self._state.compared_common(),
        )

    def _engine_options(self, given: Mapping[str, Any], bare: bool) -> _core.SaveOptions:
        """The checked options, without those that need the state or Python's functions."""
        options = _core.SaveOptions()
        options.format = _options.word("format", given["format"])
        options.dialect = _options.word("dialect", given["dialect"])
        options.overwrite = _options.flag("overwrite", given["overwrite"])
        options.agreement = _options.word("agreement", given["agreement"])
        options.validate_access = _options.flag("validate_access", given["validate_access"])
        options.common_differs = _options.word("common_differs", given["common_differs"])
        options.timeout = self.limit if bare else _options.seconds("timeout", given["timeout"])
        options.threads = _options.whole("threads", given["threads"])
        options.buffer_bytes = _options.whole("buffer_bytes", given["buffer_bytes"], 64)
        options.files_per_rank = _options.whole("files_per_rank", given["files_per_rank"])
        options.attributes = _options.texts("attributes", given["attributes"])
        options.by_files = self.files
        options.replicate = _options.word("replicate", given["replicate"])
        options.replicate_group = [] if bare else self._copied_ranks()
        if given["max_copy_bytes"] is not None:
            most = _options.whole("max_copy_bytes", given["max_copy_bytes"], 64)
            options.max_copy_bytes = most
        options.tp_replica_names = _options.flag("tp_replica_names", given["tp_replica_names"])
        return options


class LoadCall:
    """One rank's call of `tilestone.load`: its arguments, the checks of them, and its result.

    As in SaveCall, only the arguments that say who takes part are checked here.

    Args:
        wanted, path: as for `tilestone.load`.
        until_the_end: receives context managers that must stay open until the load ends.
        group, comm, own_rank: who takes part, as for `tilestone.load`.
        report: as for `tilestone.load`.
        options: the other options of `tilestone.load`.

    Attributes:
        comm: the communicator.
        result: what the load returns; set by `take`.

    Raises:
        InvalidArgumentError: an argument that says who takes part can't be used.
    """

    def __init__(
        self,
        wanted: Any,
        path: str | os.PathLike[str] | None,
        until_the_end: contextlib.ExitStack,
        *,
        group: ProcessGroup | None = None,
        comm: CommunicatorLike | None = None,
        own_rank: int | None = None,
        report: LoadReport | None = None,
        **options: Any,
    ) -> None:
        self._alone = None if own_rank is None else _options.whole("own_rank", own_rank)
        if self._alone is not None and group is not None:
            raise InvalidArgumentError(
                "own_rank and group exclude each other: own_rank loads alone"
            )
        is_alone = self._alone is not None
        self.comm = comm or _core.solo() if is_alone else communicator(group, comm)
        self._template = prepared(wanted)
        self._has_template = path is not None
        self._path: Any = wanted if path is None else path
        self._until_the_end = until_the_end
        self._group = group
        self._report = report
        self._options = LOAD_OPTIONS | options
        self._bridge: Bridge | None = None
        self.result: dict[Any, Any] = {}

    @property
    def place(self) -> bytes:
        """The location as bytes; empty for an invalid path, which the first round reports."""
        return b"" if isinstance(self._path, Mapping) else _options.place(self._path)

    @property
    def limit(self) -> float:
        """Seconds for the whole load."""
        return _options.limit_of(self._options["timeout"])

    def prepare(self) -> _core.LoadRequest:
        """This rank's request, with its template. The engine calls it inside the first round."""
        given, report = self._options, self._report
        _refuse_unknown("load", given, LOAD_OPTIONS)
        if isinstance(self._path, Mapping):
            raise InvalidArgumentError("a template needs the checkpoint's path with it")
        if report is not None and not isinstance(report, LoadReport):
            raise InvalidArgumentError(f"report must be a LoadReport or None, not {report!r}")
        if report is not None:
            vars(report).update(vars(LoadReport()))
        shown = reporting(_options.sink("progress", given["progress"]), "load", self.comm.rank)
        allowed = _options.names("allow_classes", given["allow_classes"])
        self._bridge = Bridge(
            True, allowed, group=self._group, ranks=self.comm.size,
            harmless=self._template.harmless,
        )  # fmt: skip
        template = self._template.make()
        return _core.LoadRequest(
            template if self._has_template else None,
            _options.directory(self._path),
            self._bridge,
            _options.flag("follow_links", given["follow_links"]),
            self._engine_options(),
            progress=self._until_the_end.enter_context(shown),
        )

    def _engine_options(self) -> _core.LoadOptions:
        """The checked options, without those that need Python's functions."""
        given = self._options
        options = _core.LoadOptions()
        options.cast = _options.flag("cast", given["cast"])
        options.verify_checksums = _options.flag("verify_checksums", given["verify_checksums"])
        options.two_phase = _options.word("two_phase", given["two_phase"])
        options.cache = _options.word("cache", given["cache"])
        options.not_in_checkpoint = _options.word("not_in_checkpoint", given["not_in_checkpoint"])
        if given["not_requested"] is not None:
            options.not_requested = _options.word("not_requested", given["not_requested"])
        options.other_shape = _options.word("other_shape", given["other_shape"])
        options.sharded_only = _options.flag("sharded_only", given["sharded_only"])
        options.validate_access = _options.flag("validate_access", given["validate_access"])
        options.timeout = _options.seconds("timeout", given["timeout"])
        options.threads = _options.whole("threads", given["threads"])
        options.buffer_bytes = _options.whole("buffer_bytes", given["buffer_bytes"], 64)
        options.objects_by_grid = self._template.objects_by_grid
        options.log_report = self._template.log_report
        options.unmarked = self._template.unmarked
        options.own_rank = self._alone
        return options

    def take(
        self,
        loaded: dict[Any, Any],
        missing: list[str],
        rest: list[str],
        other: list[str],
        kept: set[str],
    ) -> None:
        """Takes what was loaded. The engine calls it inside the last round.

        Args:
            loaded: the loaded tree.
            missing, rest, other: the lists of a LoadReport, in its order.
            kept: as for Prepared.take.
        """
        assert self._bridge is not None
        found = LoadReport(missing, rest, other)
        if self._report is not None:
            vars(self._report).update(vars(found))
        self._bridge.give_back()
        self.result = self._template.take(loaded, found, kept)
