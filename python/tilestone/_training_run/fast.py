"""The fast tier of a CheckpointManager: directories of the hosts, to which steps are saved first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Sequence
from typing import Any

from tilestone import _core
from tilestone._calls.async_save import EXIT_SECONDS, AsyncSave, AsyncStep
from tilestone._calls.collective import is_destroyed, torch_group
from tilestone._errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilestone._options import valid
from tilestone._protocols import CommunicatorLike


@dataclasses.dataclass(frozen=True)
class Fast:
    """A directory of each host, to which a `CheckpointManager` saves first. See docs/fast_tier.md.

    Args:
        path: the directory: a disk that each host has for itself, or one that hosts share, which
            they find out. For one run alone.
        keep: how many of the newest steps stay there, at least 1.
        copies: 1: each host also keeps the files of another one, so that one lost host loses no
            step. They follow in the background. Needs at least two hosts.
        domains: with copies, a name for each rank, of its rack for example: the copy goes to a host
            of another one. None: to the next host.
        drain_bytes_per_second: how fast each host copies to the run's directory; None: no limit.
    """

    path: str | os.PathLike[str]
    keep: int = 2
    copies: int = 0
    domains: Sequence[str] | None = None
    drain_bytes_per_second: int | None = None

    def checked(self) -> Fast:
        """The same with a path as bytes.

        Raises:
            InvalidArgumentError: a field is out of range.
            UnsupportedError: more than one copy.
        """
        given = valid.directory(self.path)
        if not given or b"\0" in given:
            raise InvalidArgumentError(f"Fast.path can't be {self.path!r}")
        rate = self.drain_bytes_per_second
        if valid.whole("Fast.keep", self.keep, 64) == 0:
            raise InvalidArgumentError("Fast.keep is 0; expected at least 1")
        if rate is not None and valid.whole("Fast.drain_bytes_per_second", rate, 64) == 0:
            raise InvalidArgumentError("Fast.drain_bytes_per_second is 0; None is no limit")
        if valid.whole("Fast.copies", self.copies) > 1:
            raise UnsupportedError("Fast.copies is more than 1", hint="one lost host needs one copy")
        if isinstance(self.domains, str) or (self.domains is not None and not self.copies):
            raise InvalidArgumentError("Fast.domains is a list of names, and needs copies=1")
        domains = [valid.word("Fast.domains", each) for each in self.domains or ()]
        valid.refuse_any_url(self.path, "a fast tier")
        path = valid.absolute(os.fsdecode(given))
        return dataclasses.replace(self, path=path, domains=domains)


class HostSave(AsyncSave):
    """A save to the hosts, and its way to the run's directory.

    Attributes:
        local: the step is whole: all ranks' parts are durable on their hosts.
        durable: the run's directory has the step; of a step that stays on the hosts (drain_every),
            the same as `local`. It fails if the step could not be copied.
    """

    def __init__(self, core: _core.AsyncSave, drained: _core.Pending) -> None:
        super().__init__(core)
        self.local = self.durable
        self.durable = AsyncStep([core.durable, drained], core.seal, core.result)


#: Groups that no tier uses any more, by their names. They stay: other ranks may still be connected.
_spare: dict[str, Any] = {}


def _own_groups(
    comm: CommunicatorLike, count: int, seconds: float
) -> list[tuple[Any, CommunicatorLike]]:
    """Groups of the same ranks, which only the tier's threads use. Collective."""
    if comm.size == 1:
        return [(None, _core.solo())] * count
    group = torch_group(comm)
    if group is None:
        raise UnsupportedError(
            f"a fast tier of several ranks needs a torch process group, not {comm.describe()}",
            hint="pass group=, a group of torch.distributed",
        )
    import torch.distributed as dist

    from tilestone._torch.comm import TorchCommunicator

    ranks = dist.get_process_group_ranks(group)
    made = [_group_named(name, ranks) for name in _agreed_names(comm, ranks, count, seconds)]
    return [(each, TorchCommunicator(each)) for each in made]


def _agreed_names(
    comm: CommunicatorLike, ranks: list[int], count: int, seconds: float
) -> list[str]:
    """Names of groups that all ranks have to spare, and new ones."""
    import torch.distributed as dist

    for name in [name for name, each in _spare.items() if is_destroyed(each)]:
        del _spare[name]
    own = [name for name in _spare if dist.get_process_group_ranks(_spare[name]) == ranks]

    def answer(_: int, said: list[bytes]) -> tuple[bytes, bool]:
        spare = set.intersection(*(set(json.loads(each)) for each in said))
        new = [f"tilestone-{uuid.uuid4()}" for _ in range(count)]
        return json.dumps((sorted(spare) + new)[:count]).encode(), True

    work = "groups of a fast tier"
    names: list[str] = json.loads(
        _core.agree(work, comm, lambda _, __: json.dumps(own).encode(), answer, seconds)
    )
    return names


def _group_named(name: str, ranks: list[int]) -> Any:
    """A gloo group of these ranks, which all make it.

    `new_group` without the ranks outside names a group after the count of groups of which this rank
    is a member. Where ranks differ in that (Megatron's first and last stage have a group of their
    own), they would wait for each other under different names for ever.
    """
    if name in _spare:
        return _spare.pop(name)
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    rank = ranks.index(dist.get_rank())
    group, _ = c10d._new_process_group_helper(
        len(ranks), rank, ranks, dist.Backend("gloo"), c10d._get_default_store(), name,
        timeout=c10d.default_pg_timeout,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {of_all: own for own, of_all in enumerate(ranks)}
    return group


def _give_back(groups: list[tuple[Any, CommunicatorLike]]) -> None:
    for group, _ in groups:
        if group is not None and not is_destroyed(group):
            _spare[str(group.group_name)] = group


class Tier:
    """The tier of a manager.

    Args:
        fast: checked.
        drain_every: steps that are multiples of it are copied to the run's directory.
        reuse: what the step before has is linked, on the hosts and in the run's directory.
        run: the run, made with on_hosts.
        comm: its communicator. All ranks make the tier together.
        seconds: the time limit for that.
    """

    def __init__(
        self,
        fast: Fast,
        drain_every: int,
        reuse: bool,
        run: _core.ManagedRun,
        comm: CommunicatorLike,
        seconds: float,
    ) -> None:
        self._run = run  # the core refers to it
        self.in_flight: Any = None  # the InFlight of the last save
        self._groups = _own_groups(comm, 3 if fast.copies else 2, seconds)
        meeting, draining, *copying = (each for _, each in self._groups)
        path = os.fsencode(fast.path)
        try:
            self.core = _core.FastTier(
                run, path, fast.keep, drain_every, fast.drain_bytes_per_second, reuse, bool(fast.copies),
                list(fast.domains or ()), meeting, draining, copying[0] if copying else None,
                seconds,
            )  # fmt: skip
        except CheckpointError:
            _give_back(self._groups)
            raise

    def end_with_program(self) -> None:
        """Ends the threads, after the save in flight, for which the interpreter's end waits."""
        with contextlib.suppress(UnsupportedError):  # of the parent
            if self.in_flight is not None and not self.in_flight.wait(EXIT_SECONDS):
                self.in_flight.saving.abandon()
        self.core.end()

    def end(self) -> None:
        """Ends the threads."""
        self.core.end()
        groups, self._groups = self._groups, []
        _give_back(groups)
