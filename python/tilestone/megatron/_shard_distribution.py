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
from tilestone._torch.comm import TorchCommunicator
from tilestone.megatron import _shard_files
from tilestone.megatron._shard_lists import (
    ShardList,
    ShardsByRow,
    Union,
    bytes_of,
    decode,
    union_of,
)
from tilestone.megatron.mapping import ShardedTensor
from tilestone.megatron.utils import _ShardId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WORK = "distribution of shards"
_NO_FILE = -1


class ShardDistribution(NamedTuple):
    """Which rank of a process group writes each shard, or reads it for the others.

    Ranks are group ranks; the distribution does not contain the group.

    Attributes:
        main_rank_for_shard: the rank that writes or reads the shard.
        shards_in_this_group: the shards that are distributed: those whose main replica is in the
            group; for a load, all.
        shard_to_metadata: entities without data, also of other groups' shards.
        all_ranks_for_shard: the ranks that hold a shard, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: Mapping[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def _sortable(shard_id: Any) -> Any:
    """An id that can be compared with any other id: None comes before everything."""
    if not isinstance(shard_id, tuple):
        return shard_id
    return tuple(() if part is None else part for part in shard_id)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
) -> dict[T, int]:
    """Assigns each shard to one of its holders, so that all ranks get about equally many bytes.

    Shards with few holders come first; among these, large ones; among these, the order of their
    ids. Each goes to the holder with the fewest bytes so far (the lowest rank if several). The
    result is the same as Megatron-Core's.

    Args:
        shard_to_ranks: the holders of each shard, at least one.
        shard_to_size: size of each shard in bytes.
        num_ranks: number of ranks of the group; ranks are 0 to num_ranks - 1.
        cross_parallelization_group_loads: shards whose main replica is in another group: they come
            last.

    Raises:
        InvalidArgumentError: a shard has no holders, or a rank is outside the group.
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
    """The distinct lists among some lists of ranks, and for each list its number among them."""
    sets: list[list[int]] = []
    numbers: dict[tuple[int, ...], int] = {}
    found: list[int] = []
    last: Sequence[int] | None = None
    for ranks in lists:
        # Neighbours often have the same ranks, and comparing is faster than hashing.
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
        token: identifies this agreement; the same on all ranks.
        structures: structures of this rank's state dicts that it is valid for.
        checkpoint_dir: the checkpoint whose files it follows, or None.
    """

    distribution: ShardDistribution
    token: str
    structures: set[str]
    checkpoint_dir: str | None


def structure_of(shards: ShardList) -> str:
    """Identifies a rank's shards and which of them are main replicas."""
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
    """Distributes the shards that the ranks of a group hold. Every rank of the group calls.

    Args:
        state_of: returns this rank's state dict, whose ShardedTensors are distributed; if it
            raises, every rank raises the same.
        group: a group of more than one rank.
        ignore_groups: distribute shards whose main replica is in another group, too.
        checkpoint_dir: a checkpoint that is to be read: shards go to the writers of their files.
        only_if_checkpoint: ignore a directory that holds no checkpoint that can be opened.
        known: an earlier result of this group, which is returned if no rank's shards have changed.
        seconds: time limit; infinity for no limit.

    Raises:
        CheckpointError: any rank failed; the same on every rank.
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
    """Replaces the failed rank's group rank in an error by its global rank."""
    if not 0 <= error.rank < dist.get_world_size(group):
        return
    error.rank = dist.get_global_rank(group, error.rank)


def place_of(checkpoint_dir: str | os.PathLike[str] | None) -> str | None:
    """A directory in the form that Agreed has."""
    return None if checkpoint_dir is None else os.fspath(checkpoint_dir)


class _Agreement:
    """This rank's part in agreeing on a distribution.

    Round 0: each rank sends the digest of its list of shards. Round 1: the lowest rank with each
    list sends it, and rank 0 makes the distribution. The answer has the lists and the distribution.
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
        self._classes: list[int] = []  # this and the following are used on rank 0 only
        self._providers: list[int] = []
        self._mains: list[int] = []

    def say(self, round: int, answer: bytes) -> bytes:
        """Returns this rank's message for a round."""
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
        """On rank 0: returns the answer to all ranks' messages, and whether it is the last one."""
        if round == 1:
            return self._distributed([said[rank] for rank in self._providers]), True
        words = [json.loads(each) for each in said]
        if any(each["options"] != words[0]["options"] for each in words):
            raise MismatchError("the ranks ask for different distributions (save or load)")
        if words[0]["known"] and all(each["known"] == words[0]["known"] for each in words):
            return b"", True
        if any(each["had"] for each in words):
            changed = [rank for rank, each in enumerate(words) if not each["known"]]
            logger.warning(
                "the shards of ranks %s have changed since they were distributed; distributing "
                "again",
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
        """The number of each shard's file, and for each file the group rank that wrote it."""
        if self._directory is None:
            return None
        try:
            files = _shard_files.files_of(self._directory, [union.rows[shard] for shard in chosen])
        except CheckpointError as error:
            if not self._only_if_checkpoint:
                raise
            logger.debug("distributing shards without regard to their files: %s", error)
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
    """Encodes all that a rank needs to know the distribution."""
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
