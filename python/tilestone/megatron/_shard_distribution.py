"""The distribution of shards to the ranks of a group, and how the group agrees on it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from tilestone import _core
from tilestone._errors import CheckpointError, MismatchError
from tilestone._torch_comm import TorchCommunicator
from tilestone.megatron import _shard_files
from tilestone.megatron._shard_lists import ShardList, ShardsByRow, Union, bytes_of, decode, union_of
from tilestone.megatron.mapping import ShardedTensor
from tilestone.megatron.utils import _ShardId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WORK = "distribution of shards"
_NO_FILE = -1


class ShardDistribution(NamedTuple):
    """Which rank of a process group writes each shard, or reads it for the others.

    Ranks are numbered in the group, which the distribution does not name.

    Attributes:
        main_rank_for_shard: the rank that writes or reads.
        shards_in_this_group: the shards that are distributed: those of which the group has the main
            replica, and for a load all.
        shard_to_metadata: entities without data, of other groups' shards too.
        all_ranks_for_shard: the ranks that hold a shard, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: Mapping[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def _sortable(shard_id: Any) -> Any:
    """An id that can be compared with any other one: None before everything."""
    if not isinstance(shard_id, tuple):
        return shard_id
    return tuple(() if part is None else part for part in shard_id)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
) -> dict[T, int]:
    """Gives each shard to one of the ranks that hold it, so that all get about as many bytes.

    Shards that few ranks hold come first, of these large ones, of these in the order of their ids;
    each goes to the holder that has the fewest bytes by then, the lowest of several. The result is
    Megatron-Core's.

    Args:
        shard_to_ranks: the holders of each shard, at least one.
        shard_to_size: bytes of each shard.
        num_ranks: of the group; ranks are 0 to num_ranks - 1.
        cross_parallelization_group_loads: shards whose main replica is in another group: they come
            last.

    Raises:
        InvalidArgumentError: a shard without holders, or a rank outside the group.
    """
    return _distribute(
        shard_to_ranks, shard_to_size, num_ranks, cross_parallelization_group_loads, None
    )


def _distribute(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    outside: Collection[T],
    files: tuple[Mapping[T, int], list[int]] | None,
) -> dict[T, int]:
    outside = outside if isinstance(outside, (set, frozenset)) else set(outside)
    size = {shard: int(shard_to_size[shard]) for shard in shard_to_ranks}
    order = sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in outside,
            len(shard_to_ranks[shard]),
            -size[shard],
            _sortable(shard),
        ),
    )
    sets, holders = _distinct([shard_to_ranks[shard] for shard in order])
    ranks = _core.distribute_shards(
        [size[shard] for shard in order],
        holders,
        [shard in outside for shard in order],
        sets,
        num_ranks,
        None if files is None else ([files[0][shard] for shard in order], files[1]),
    )
    return dict(zip(order, ranks, strict=True))


def _distinct(lists: list[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The distinct ones of some lists of ranks, and for each of them all which one it is."""
    sets: list[list[int]] = []
    numbers: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    last: Sequence[int] | None = None
    for ranks in lists:
        # Neighbours often have the same ranks, and comparing is quicker than hashing.
        if ranks is last or ranks == last:
            found.append(found[-1])
            continue
        last, key = ranks, tuple(ranks)
        number = numbers.setdefault(key, len(sets))
        if number == len(sets):
            sets.append(list(key))
        found.append(number)
    return sets, found


@dataclass
class Agreed:
    """A distribution that all ranks of a group have, and may use again.

    Attributes:
        distribution: the same on all ranks.
        token: of this agreement, the same on all ranks.
        structures: of this rank's state dicts for which it was made.
        checkpoint_dir: the checkpoint whose files it goes by, or None.
    """

    distribution: ShardDistribution
    token: str
    structures: set[str]
    checkpoint_dir: str | None


def structure_of(shards: ShardList) -> str:
    """Names a rank's shards and which of them are main replicas."""
    return f"{shards.digest.hex()}/{shards.mains:x}"


def agree_on_distribution(
    state_of: Callable[[], Any],
    group: dist.ProcessGroup,
    ignore_groups: bool = False,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    only_if_checkpoint: bool = False,
    known: Agreed | None = None,
    seconds: float = _core.DEFAULT_TIMEOUT,
) -> Agreed:
    """The distribution of what the ranks of a group hold. Every rank of the group calls.

    Args:
        state_of: gives this rank's state dict, whose ShardedTensors are distributed; what it raises
            every rank raises.
        group: of more than one rank.
        ignore_groups: shards whose main replica is in another group are distributed, too.
        checkpoint_dir: a checkpoint that is to be read: shards go to the writers of their files.
        only_if_checkpoint: a directory without a checkpoint that can be opened is no error.
        known: an earlier result of this group, which is returned if no rank's shards have changed.
        seconds: how long it may take; infinite for no limit.

    Raises:
        CheckpointError: the same on every rank, whichever of them failed.
    """
    agreement = _Agreement(
        state_of, group, ignore_groups, checkpoint_dir, only_if_checkpoint, known
    )
    try:
        answer = _core.agree(
            _WORK, TorchCommunicator(group), agreement.say, agreement.decide, seconds
        )
    except CheckpointError as error:
        _name_globally(error, group)
        raise
    if not answer:
        assert known is not None
        return known
    union, given = _unpack(answer)
    distribution = ShardDistribution(
        dict(given),
        set(given),
        ShardsByRow(union.rows),
        {shard: union.holders[shard] for shard in given},
    )
    token = hashlib.blake2b(answer, digest_size=16).hexdigest()
    return Agreed(
        distribution, token, {structure_of(agreement.shards)}, place_of(checkpoint_dir)
    )


def _name_globally(error: CheckpointError, group: dist.ProcessGroup) -> None:
    """Names the rank that failed as the program knows it, not by its place in a group."""
    if not 0 <= error.rank < dist.get_world_size(group):
        return
    number = dist.get_global_rank(group, error.rank)
    error.text = error.text.replace(f"(rank {error.rank})", f"(rank {number})")
    error.rank = number


def place_of(checkpoint_dir: str | os.PathLike[str] | None) -> str | None:
    """A directory as an Agreed has it."""
    return None if checkpoint_dir is None else os.fspath(checkpoint_dir)


class _Agreement:
    """This rank's part in working out a distribution.

    Round 0: each rank names its list of shards by its digest. Round 1: the lowest rank with a list
    sends it, and rank 0 makes the distribution. All ranks get the lists with it.
    """

    def __init__(
        self,
        state_of: Callable[[], Any],
        group: dist.ProcessGroup,
        ignore_groups: bool,
        checkpoint_dir: str | os.PathLike[str] | None,
        only_if_checkpoint: bool,
        known: Agreed | None,
    ) -> None:
        self._state_of = state_of
        self._group = group
        self._ignore_groups = ignore_groups
        self._directory = checkpoint_dir
        self._only_if_checkpoint = only_if_checkpoint
        self._known = known
        self.shards = ShardList([], b"", 0)
        self._classes: list[int] = []  # of rank 0, from here on
        self._providers: list[int] = []
        self._mains: list[int] = []

    def say(self, round: int, answer: bytes) -> bytes:
        """This rank's words."""
        if round == 1:
            chosen = dist.get_rank(self._group) in json.loads(answer)
            return self.shards.encode() if chosen else b""
        self.shards = ShardList.of(self._state_of())
        known = self._known
        same = known is not None and structure_of(self.shards) in known.structures
        words = {
            "digest": self.shards.digest.hex(),
            "mains": f"{self.shards.mains:x}",
            "known": known.token if known is not None and same else "",
            "had": known is not None,
            "options": [self._ignore_groups, self._directory is not None],
        }
        return json.dumps(words).encode()

    def decide(self, round: int, said: list[bytes]) -> tuple[bytes, bool]:
        """Rank 0: what follows from all ranks' words."""
        if round == 1:
            return self._distributed([said[rank] for rank in self._providers]), True
        words = [json.loads(each) for each in said]
        if any(each["options"] != words[0]["options"] for each in words):
            raise MismatchError("the ranks want distributions of different kinds (save or load)")
        if words[0]["known"] and all(each["known"] == words[0]["known"] for each in words):
            return b"", True
        if any(each["had"] for each in words):
            changed = [rank for rank, each in enumerate(words) if not each["known"]]
            logger.warning(
                "the shards of ranks %s have changed since they were distributed; they are "
                "distributed anew",
                changed,
            )
        numbers: dict[str, int] = {}
        for rank, each in enumerate(words):
            number = numbers.setdefault(each["digest"], len(numbers))
            if number == len(self._providers):
                self._providers.append(rank)
                self._mains.append(0)
            self._classes.append(number)
            self._mains[number] |= int(each["mains"], 16)
        return json.dumps(self._providers).encode(), False

    def _distributed(self, lists: list[bytes]) -> bytes:
        union = union_of([decode(each) for each in lists], self._classes, self._mains)
        chosen = [shard for shard in union.rows if self._ignore_groups or shard in union.mains]
        given = _distribute(
            {shard: union.holders[shard] for shard in chosen},
            {shard: bytes_of(union.rows[shard]) for shard in chosen},
            len(self._classes),
            {shard for shard in chosen if shard not in union.mains},
            self._files(union, chosen),
        )
        return _pack(lists, self._classes, self._mains, list(union.rows), given)

    def _files(
        self, union: Union, chosen: list[_ShardId]
    ) -> tuple[dict[_ShardId, int], list[int]] | None:
        """The files of these shards by number, and the ranks of the group that wrote them."""
        if self._directory is None:
            return None
        try:
            files = _shard_files.files_of(self._directory, [union.rows[shard] for shard in chosen])
        except CheckpointError as error:
            if not self._only_if_checkpoint:
                raise
            logger.debug("shards are distributed without a look at their files: %s", error)
            return None
        members = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(self._group))}
        numbers: dict[str, int] = {}
        for file in files:
            if file is not None:
                numbers.setdefault(file, len(numbers))
        writers = [_shard_files.writer_of(file) for file in numbers]
        return (
            {
                shard: _NO_FILE if file is None else numbers[file]
                for shard, file in zip(chosen, files, strict=True)
            },
            [-1 if writer is None else members.get(writer, -1) for writer in writers],
        )


def _pack(
    lists: list[bytes],
    classes: list[int],
    mains: list[int],
    shards: list[_ShardId],
    given: dict[_ShardId, int],
) -> bytes:
    """All that a rank needs to know the distribution."""
    header = {
        "classes": classes,
        "mains": [f"{each:x}" for each in mains],
        "given": [given.get(shard, -1) for shard in shards],
        "sizes": [len(each) for each in lists],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(lists)


def _unpack(packed: bytes) -> tuple[Union, dict[_ShardId, int]]:
    (length,) = struct.unpack_from("<Q", packed)
    header = json.loads(packed[8 : 8 + length])
    lists, at = [], 8 + length
    for size in header["sizes"]:
        lists.append(decode(packed[at : at + size]))
        at += size
    union = union_of(lists, header["classes"], [int(each, 16) for each in header["mains"]])
    given = zip(union.rows, header["given"], strict=True)
    return union, {shard: rank for shard, rank in given if rank >= 0}
