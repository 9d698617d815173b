"""What calls of all ranks have in common, and what a save was asked for."""

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

#: The options of a save that don't say who takes part, as `tilestone.save` has them.
USUAL_OPTIONS: dict[str, Any] = {
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

#: Of these what a save by files needs only once it has begun, as a request has it before that.
_LATER_OPTIONS: dict[str, Any] = {
    name: USUAL_OPTIONS[name]
    for name in (
        "threads", "buffer_bytes", "files_per_rank", "tensor_attributes", "progress",
        "max_copy_bytes", "tp_replica_names",
    )
}  # fmt: skip


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


def _group_of_torch(group: ProcessGroup | None) -> ProcessGroup | None:
    """The process group given, or torch's default one where it is initialised, or None."""
    if group is not None or "torch" not in sys.modules:
        return group
    from tilestone import _torch_bridge

    return _torch_bridge.default_group()


def communicator(
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


def is_by_files(coordination: str) -> bool:
    """Whether ranks know of one another by files alone."""
    way = _options.word("coordination", coordination)
    if way not in ("communicator", "files"):
        raise InvalidArgumentError(
            f'coordination is "communicator" or "files", not "{coordination}"'
        )
    return way == "files"


def _by_files(coordination: str, files: Mapping[str, Any]) -> _core.ByFiles | None:
    """This rank's place in a save by files; None where ranks have a communicator.

    Raises:
        InvalidArgumentError: an argument that it needs is missing or out of range, by its name.
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

    def replicate_group(self, given: Any) -> Any:
        """Of a save with replicate="local": its `replicate_group`, of what the caller gave for it."""
        return given

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


def made(state: Any) -> Any:
    return state.make() if isinstance(state, Prepared) else state


def _state_of(state: Any) -> Any:
    state = made(state)
    if state is None:
        raise InvalidArgumentError("a state is a dict, not NoneType")
    return state


def harmless(state: Any) -> frozenset[str]:
    return state.harmless if isinstance(state, Prepared) else frozenset()


def _compared(state: Any) -> Any:
    return state.compared_common() if isinstance(state, Prepared) else None


class SaveCall:
    """A rank's save, as `tilestone.save` was asked for it: its arguments, checked where all ranks hear.

    What says who takes part is checked here, and fails on its rank alone; all else in `prepare`,
    which the engine calls inside the first round.

    Args:
        state, path: as for `tilestone.save`.
        until_the_end: takes what is open as long as the save lasts.
        group, comm, coordination, rank, world_size, token, number, wait, torch_rank_local: who
            takes part, as for `tilestone.save`.
        options: the other options of `tilestone.save`.

    Attributes:
        comm: the communicator or session; None in a save by files.
        files: this rank's place in a save by files; None in others.
        session: that was given for `comm`, or None.

    Raises:
        InvalidArgumentError: who takes part can't be used.
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
        self._state = state
        self.path = path
        self._group = group
        self._options = USUAL_OPTIONS | options
        self._until_the_end = until_the_end
        unknown = options.keys() - USUAL_OPTIONS.keys()
        if unknown:
            raise InvalidArgumentError(f"a save has no option {sorted(unknown)[0]}")
        self.files = _by_files(coordination, self._by_files)
        # Session.save gives it so.
        self.session = comm if isinstance(comm, _core.Session) else None
        if self.files is None:
            self.comm: CommunicatorLike | None = communicator(group, comm)
        elif self.session is None and (group is not None or comm is not None):
            name = "comm" if group is None else "group"
            raise InvalidArgumentError(f'{name} has no meaning with coordination="files"')
        else:
            self.comm = None

    @property
    def place(self) -> bytes:
        """Where to, as far as it can be said before the first round."""
        return _options.place(self.path)

    @property
    def limit(self) -> float:
        """Seconds for the whole save."""
        return _options.limit_of(self._options["timeout"])

    def bare(self) -> _core.SaveRequest:
        """The options that a save by files begins with, without what is made of the state.

        What is wrong with the others is found in `prepare`, where the other ranks hear of it.
        """
        return self._request(True)

    def prepare(self) -> _core.SaveRequest:
        """What this rank brings to the save."""
        return self._request(False)

    def _who(self) -> tuple[int, int]:
        """This rank's number, and how many take part."""
        if self.files is not None:
            return self.files.rank, self.files.world_size
        refuse_files(self._by_files)
        assert self.comm is not None
        return self.comm.rank, self.comm.size

    def _bridge(self) -> Bridge:
        own, ranks = self._who()
        agreement = _options.word("agreement", self._options["agreement"])
        unwrapped = _options.word("dialect", self._options["dialect"]) == "pytorch"
        by_rule = agreement == "rule" or self.files is not None
        return Bridge(
            group=self._group, ranks=ranks, by_rule=by_rule and unwrapped, rank=own,
            harmless=harmless(self._state), common=not unwrapped,
        )  # fmt: skip

    def _copied_ranks(self) -> list[int]:
        group = self._options["replicate_group"]
        if isinstance(self._state, Prepared) and self._options["replicate"] == "local":
            group = self._state.replicate_group(group)
        return _replicated_ranks(group, self._group)

    def _request(self, bare: bool) -> _core.SaveRequest:
        given = self._options | _LATER_OPTIONS if bare else self._options
        own, _ = self._who()
        shown = reporting(_options.sink("progress", given["progress"]), "save", own)
        most = given["max_copy_bytes"]
        return _core.SaveRequest(
            {} if bare else _state_of(self._state),
            _options.directory(self.path),
            self._bridge(),
            _options.word("format", given["format"]),
            _options.word("dialect", given["dialect"]),
            _options.flag("overwrite", given["overwrite"]),
            _options.word("agreement", given["agreement"]),
            _options.flag("validate_access", given["validate_access"]),
            _options.word("common_differs", given["common_differs"]),
            self.limit if bare else _options.seconds("timeout", given["timeout"]),
            _options.whole("threads", given["threads"]),
            _options.whole("buffer_bytes", given["buffer_bytes"], 64),
            _options.whole("files_per_rank", given["files_per_rank"]),
            _options.texts("attributes", given["attributes"]),
            _options.by_key("tensor_attributes", given["tensor_attributes"]),
            None if bare else self._until_the_end.enter_context(shown),
            compared_common=None if bare else _compared(self._state),
            by_files=self.files,
            replicate=_options.word("replicate", given["replicate"]),
            replicate_group=[] if bare else self._copied_ranks(),
            max_copy_bytes=None if most is None else _options.whole("max_copy_bytes", most, 64),
            tp_replica_names=_options.flag("tp_replica_names", given["tp_replica_names"]),
        )
