"""What all collective calls have in common, and the arguments of a save and of a load."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilestone import _core, _forked
from tilestone._calls.binding import Bridge, described
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.load_report import LoadReport
from tilestone._options.progress import reporting
from tilestone._options.values import ByFiles, LoadOptions, LocalCopies, SaveOptions
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The options that a save by files needs only after it has begun; its first request has defaults.
_LATER_OPTIONS = ("resources", "tensor_attributes", "progress", "copies")


def _group_of_torch(group: ProcessGroup | None) -> ProcessGroup | None:
    """The given process group, or torch's default one if it is initialised, or None."""
    if group is not None or "torch" not in sys.modules:
        return group
    from tilestone._torch import tensors

    return tensors.default_group()


def _is_communicator(group: Any) -> bool:
    """Whether this is a communicator; torch's process groups lack some of these methods."""
    return all(hasattr(group, name) for name in ("describe", "all_to_all", "broadcast"))


def torch_group(group: ProcessGroup | CommunicatorLike | None) -> ProcessGroup | None:
    """The process group that was given, or that of the given communicator, if it has one."""
    return getattr(group, "process_group", None) if _is_communicator(group) else group  # type: ignore[return-value]


def group_of(group: ProcessGroup | CommunicatorLike | None) -> Any:
    """What a call with this `group` uses: a communicator, a process group, or None: it is alone."""
    return group if _is_communicator(group) else _group_of_torch(torch_group(group))


def communicator(group: ProcessGroup | CommunicatorLike | None) -> CommunicatorLike:
    """The communicator of a call.

    An error here is raised on this rank only, because it has no connection yet to tell the others.
    """
    if _is_communicator(group):
        return group  # type: ignore[return-value]
    found = _group_of_torch(torch_group(group))
    if found is None:
        return _core.solo()
    hint = "of a DeviceMesh: mesh.get_group()" if hasattr(found, "get_group") else ""
    if "torch" not in sys.modules:
        raise InvalidArgumentError(f"group can't be {found!r}: it is no communicator")
    _forked.check(found, os.getpid())
    if is_destroyed(found):
        raise InvalidArgumentError("the process group was destroyed")
    from tilestone._torch.comm import TorchCommunicator

    try:
        return TorchCommunicator(found)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"group can't be {found!r}: {error}", hint=hint) from error


def is_destroyed(group: Any) -> bool:
    """Whether this is a process group that torch knows no more."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not isinstance(group, c10d.ProcessGroup):
        return False
    return group not in c10d._world.pg_map


def files_of(by_files: Any) -> ByFiles:
    """A save's ByFiles, with all that it needs.

    Raises:
        InvalidArgumentError: it is no ByFiles, or lacks a field; the error names it.
    """
    if not isinstance(by_files, ByFiles):
        raise InvalidArgumentError(f"by_files must be a tilestone.ByFiles, not {by_files!r}")
    for name in ("rank", "world_size", "token"):
        if getattr(by_files, name) is None:
            raise InvalidArgumentError(f"a save by files needs by_files.{name}")
    return by_files


def check_options(options: SaveOptions) -> None:
    """Raises what a save with these options raises, but for what needs its state and its ranks."""
    if options.copies is not None:
        options = dataclasses.replace(options, copies=LocalCopies(()))
    _core.check_options(options.fill(_core.SaveOptions()))


class Prepared(abc.ABC):
    """A state that is made within a call, and receives the result in a load's last round.

    `save` and `load` accept one in place of a state. An exception of its methods is this rank's
    failure, and every rank raises it.
    """

    #: Classes whose objects may be created without permission, if they can be imported.
    harmless: frozenset[str] = frozenset()
    #: Only torch's tensors are tensors, and objects with state_dict() are ordinary ones.
    as_torch: bool = False
    #: Fields of the engine's options that are no keywords of `save` and `load`.
    engine: Mapping[str, Any] = MappingProxyType({})
    #: For a load of a distributed optimizer's states: the fields of an OptimizerRequest.
    optimizer: Sequence[str] = ()

    @abc.abstractmethod
    def make(self) -> Mapping[Any, Any]:
        """Makes the state of this rank; nothing has been written or read yet."""

    def compared_common(self) -> Mapping[Any, Any] | None:
        """For a save: what is compared between ranks instead of the common state; None: all of it.

        Called after `make`.
        """
        return None

    def copied_group(self, given: Any) -> Any:
        """For a save with local copies: their group, made from the caller's."""
        return given

    def set_in(self, options: Any) -> Any:
        """Sets the fields that are no keywords in the engine's options; returns them."""
        for name, value in self.engine.items():
            if hasattr(options, name):  # a state may be saved and loaded
                setattr(options, name, value)
        return options

    def finish(self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]) -> dict[Any, Any]:
        """Finishes a load; returns what the load returns.

        Args:
            loaded: the loaded tree.
            report: the differences that were found, the same on every rank.
            kept: keys of this rank's items that were not loaded because the options allow it.
        """
        return loaded


class Made(Prepared):
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
    return state if isinstance(state, Prepared) else Made(state)


def _copied_ranks(given: Any, group: ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of `copies.group`, numbered as in the group that saves."""
    if given is None:
        return ()
    if isinstance(given, Collection) and not isinstance(given, (str, bytes)):
        return tuple(valid.whole("copies.group", rank) for rank in given)
    if "torch" in sys.modules:
        from tilestone._torch import tensors

        ranks = tensors.ranks_within(given, _group_of_torch(group))
        if ranks is not None:
            return tuple(ranks)
    raise InvalidArgumentError(
        f"copies.group must be a torch process group or a list of ranks, not {given!r}"
    )


class SaveCall:
    """One rank's call of `tilestone.save`: its arguments, and the checks of them.

    The arguments that say who takes part are checked here; their errors are raised on this rank
    only. All others are checked in `prepare`, whose error is this rank's first message to the
    others, so that every rank gets it.

    Args:
        state, path: as for `tilestone.save`.
        until_the_end: receives context managers that must stay open until the save ends.
        group, by_files: who takes part, as for `tilestone.save`.
        session: the session that saves; then both may be given.
        kind: the class of the other options.
        options: the other options of `tilestone.save`, or of `tilestone.async_save`.

    Attributes:
        comm: the communicator or session; None in a save by files.
        files: this rank's part in a save by files; otherwise None.
        session: the session.
        given: the other options, not checked yet.

    Raises:
        InvalidArgumentError: an argument that says who takes part can't be used.
    """

    def __init__(
        self,
        state: Any,
        path: str | os.PathLike[str],
        until_the_end: contextlib.ExitStack,
        *,
        group: ProcessGroup | CommunicatorLike | None = None,
        by_files: ByFiles | None = None,
        session: _core.Session | None = None,
        kind: type[SaveOptions] = SaveOptions,
        **options: Any,
    ) -> None:
        self._state = prepared(state)
        self.path = path
        self.given = options
        self._kind = kind
        self._until_the_end = until_the_end
        self._group = torch_group(group)
        self.files: _core.ByFiles | None = None
        self.comm: Any = session
        if by_files is not None:
            if group is not None and session is None:
                raise InvalidArgumentError("group and by_files exclude each other")
            self.files = files_of(by_files).made()
        elif session is None:
            self.comm = communicator(group)

    @property
    def location(self) -> bytes:
        """The location as bytes; empty for an invalid path, which the first round reports."""
        return valid.location(self.path)

    @property
    def limit(self) -> float:
        """Seconds for the whole save."""
        return valid.limit_of(self.given.get("timeout", _core.DEFAULT_TIMEOUT))

    def bare(self) -> _core.SaveRequest | None:
        """The request with which a save by files begins: the options, without the state; or None.

        Errors in the other options are found in `prepare`, where the other ranks learn of them.
        """
        if self.files is None:
            return None
        given = {name: v for name, v in self.given.items() if name not in _LATER_OPTIONS}
        options = checked("save", self._kind, given | {"timeout": self.limit})
        if isinstance(self.given.get("copies"), LocalCopies):
            options = dataclasses.replace(options, copies=LocalCopies(()))
        return self._request(options, {})

    def prepare(self) -> _core.SaveRequest:
        """This rank's request, with its state."""
        options = checked("save", self._kind, self.given)
        own, _ = self._who()
        shown = reporting(options.progress, "save", own)
        state = self._state.make()
        if options.copies is not None:
            ranks = _copied_ranks(self._state.copied_group(options.copies.group), self._group)
            copies = dataclasses.replace(options.copies, group=ranks)
            options = dataclasses.replace(options, copies=copies)
        return self._request(
            options,
            state,
            tensor_attributes=options.tensor_attributes,
            progress=self._until_the_end.enter_context(shown),
            compared_common=self._state.compared_common(),
        )

    def _who(self) -> tuple[int, int]:
        """This rank's number, and how many ranks take part."""
        if self.files is not None:
            return self.files.rank, self.files.world_size
        return self.comm.rank, self.comm.size

    def _request(
        self,
        options: SaveOptions,
        state: Mapping[Any, Any],
        *,
        tensor_attributes: Any = None,
        progress: Any = None,
        compared_common: Mapping[Any, Any] | None = None,
    ) -> _core.SaveRequest:
        own, ranks = self._who()
        unwrapped = options.dialect == "pytorch"
        bridge = Bridge(
            group=self._group, ranks=ranks, by_rule=self.files is not None and unwrapped, rank=own,
            harmless=self._state.harmless, common=not unwrapped, as_torch=self._state.as_torch,
        )  # fmt: skip
        engine: _core.SaveOptions = self._state.set_in(options.fill(_core.SaveOptions()))
        engine.by_files = self.files
        request = _core.SaveRequest(
            bridge.unpack(state),
            valid.directory(self.path),
            bridge,
            engine,
            tensor_attributes=tensor_attributes or {},
            progress=progress,
            compared_common=compared_common,
        )
        described()
        return request


class LoadCall:
    """One rank's call of `tilestone.load`: its arguments, the checks of them, and its result.

    As in SaveCall, only the arguments that say who takes part are checked here.

    Args:
        wanted, path: as for `tilestone.load`.
        until_the_end: receives context managers that must stay open until the load ends.
        group, own_rank: who takes part, as for `tilestone.load`.
        options: the other options of `tilestone.load`.

    Attributes:
        comm: the communicator.
        result: what the load returns; set by `finish`.

    Raises:
        InvalidArgumentError: an argument that says who takes part can't be used.
    """

    def __init__(
        self,
        wanted: Any,
        path: str | os.PathLike[str] | None,
        until_the_end: contextlib.ExitStack,
        *,
        group: ProcessGroup | CommunicatorLike | None = None,
        own_rank: int | None = None,
        **options: Any,
    ) -> None:
        self._group = torch_group(group)
        if own_rank is not None:
            options["own_rank"] = valid.whole("own_rank", own_rank)
            if self._group is not None:
                raise InvalidArgumentError(
                    "own_rank and group exclude each other: own_rank loads alone"
                )
            group = _core.solo() if group is None else group
        self.comm = communicator(group)
        self._template = prepared(wanted)
        self._has_template = path is not None
        self._path: Any = wanted if path is None else path
        self._until_the_end = until_the_end
        self._given = options
        self._report: LoadReport | None = None
        self._bridge: Bridge | None = None
        self.result: dict[Any, Any] = {}

    @property
    def location(self) -> bytes:
        """The location as bytes; empty for an invalid path, which the first round reports."""
        return b"" if isinstance(self._path, Mapping) else valid.location(self._path)

    @property
    def limit(self) -> float:
        """Seconds for the whole load."""
        return valid.limit_of(self._given.get("timeout", _core.DEFAULT_TIMEOUT))

    def prepare(self) -> _core.LoadRequest:
        """This rank's request, with its template. Called before the ranks meet in the first round."""
        options = checked("load", LoadOptions, self._given)
        if not self._has_template and isinstance(self._path, Mapping):
            raise InvalidArgumentError("a template needs the checkpoint's path with it")
        path = valid.directory(self._path)
        self._report = options.differences.report
        if self._report is not None:
            vars(self._report).update(vars(LoadReport()))
        shown = reporting(options.progress, "load", self.comm.rank)
        self._bridge = Bridge(
            True, frozenset(options.allow_classes), group=self._group, ranks=self.comm.size,
            harmless=self._template.harmless, as_torch=self._template.as_torch,
        )  # fmt: skip
        template = self._template.make()
        engine: _core.LoadOptions = self._template.set_in(options.fill(_core.LoadOptions()))
        request = _core.LoadRequest(
            self._bridge.unpack(template) if self._has_template else None,
            path,
            self._bridge,
            engine,
            progress=self._until_the_end.enter_context(shown),
            optimizer=self._template.optimizer,
        )
        described()
        return request

    def note(self, bytes_loaded: int, timings: dict[str, float]) -> None:
        """Tells the caller's report what the load has taken."""
        if self._report is not None:
            self._report.bytes_loaded = bytes_loaded
            self._report.timings = timings

    def finish(
        self,
        loaded: dict[Any, Any],
        missing: list[str],
        rest: list[str],
        other: list[str],
        kept: set[str],
    ) -> None:
        """Makes the result. The engine calls it inside the last round.

        Args:
            loaded: the loaded tree.
            missing, rest, other: the lists of a LoadReport, in its order.
            kept: as for Prepared.finish.
        """
        assert self._bridge is not None
        found = LoadReport(missing, rest, other)
        if self._report is not None:
            vars(self._report).update(vars(found))
        self.give_back()
        self.result = self._template.finish(loaded, found, kept)

    def give_back(self) -> None:
        """Passes what was filled to the objects with load_state_dict() in the template."""
        assert self._bridge is not None
        self._bridge.give_back()
