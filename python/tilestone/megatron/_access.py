"""What each rank holds, and whether the parts of all ranks make whole tensors and objects, each once.

The check itself is the engine's (`_core.check_access`): each rank describes what it holds in a few
bytes, and the ranks' bytes are checked together.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, List, Tuple

import torch

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._torch_comm import TorchCommunicator
from tilestone.megatron.mapping import ShardedObject, is_main_replica

_WORK = "check of what the ranks hold"
_Part = Tuple[str, str, Tuple[int, ...], Tuple[int, ...], Tuple[int, ...], bool]


@dataclass
class Held:
    """What a rank holds.

    Attributes:
        encoded: as `_core.check_access` takes it.
        problem: why it can't be encoded; empty where it can.
        key: of the entity that can't be.
        packed: the entities themselves, without data, for those who ask for them.
    """

    encoded: bytes
    problem: str = ""
    key: str = ""
    packed: bytes = b""


class AllRanks(Sequence[List[Any]]):
    """The entities of every rank, without data; a rank's are unpacked when they are asked for."""

    def __init__(self, ranks: Sequence[Held]) -> None:
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        return pickle.loads(zlib.decompress(self.ranks[rank].packed))

    def __iter__(self) -> Iterator[List[Any]]:
        return (self[rank] for rank in range(len(self)))


def gather(entities: Sequence[Any]) -> AllRanks:
    """What every rank of the default group holds. Every rank calls.

    Args:
        entities: this rank's, without data.
    """
    mine = held_by(entities)
    mine.packed = zlib.compress(pickle.dumps(entities, protocol=5), 1)
    everybodys: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, mine)
    return AllRanks(everybodys)


def held_by(entities: Iterable[Any]) -> Held:
    """The description of a rank's entities."""
    tensors: list[_Part] = []
    objects: list[Tuple[str, bool]] = []
    key = ""
    try:
        for entity in entities:
            key = entity.key
            main = is_main_replica(entity.replica_id)
            if isinstance(entity, ShardedObject):
                objects.append((entity.unique_key, main))
            else:
                tensors += _parts(entity, main)
        return Held(_core.encode_access(tensors, objects))
    except CheckpointError as error:
        return Held(b"", error.message, error.key or key)
    except (AttributeError, TypeError, ValueError) as error:
        return Held(b"", f"no description of a shard: {error}", key)


def _parts(entity: Any, main: bool) -> list[_Part]:
    """The boxes of a tensor that an entity is; one without elements for an empty slice."""
    dtype = str(entity.dtype).removeprefix("torch.")
    shape = tuple(entity.global_shape)
    offset, local = tuple(entity.global_offset), tuple(entity.local_shape)
    leading = entity.prepend_axis_num
    flat = getattr(entity, "flattened_range", None)
    if flat is None:
        boxes = [((0,) * len(local), local)]
    else:
        found = _core.flat_range_to_boxes(local, flat.start, flat.stop)
        boxes = [(tuple(box.offset), tuple(box.shape)) for box in found]
    parts = []
    for inside, size in boxes:
        if math.prod(size):
            begin = tuple(o + i for o, i in zip(offset, (0,) * leading + inside))
            parts.append((entity.key, dtype, shape, begin, (1,) * leading + size, main))
    nothing = (0,) * len(shape)
    return parts or [(entity.key, dtype, shape, nothing, nothing, main)]


def check_access(global_metadata: Iterable[Iterable[Any]]) -> None:
    """Checks the entities of all ranks.

    Args:
        global_metadata: for each rank its ShardedTensors and ShardedObjects, with or without data.

    Raises:
        CheckpointingException: ranks describe a tensor or object differently, or main replicas
            overlap, leave something out or reach beyond it; naming key and ranks. The same error
            wherever the same metadata is checked.
    """
    if isinstance(global_metadata, AllRanks):
        ranks: Sequence[Held] = global_metadata.ranks
    else:
        ranks = [held_by(entities) for entities in global_metadata]
    _core.check_access([_encoded(rank, held) for rank, held in enumerate(ranks)])


def _encoded(rank: int, held: Held) -> bytes:
    """What `_core.check_access` takes.

    Raises:
        InvalidArgumentError: there is nothing of the kind.
    """
    if held.problem:
        text = f"Invalid access pattern: what rank {rank} holds: {held.problem}"
        raise InvalidArgumentError(text, key=held.key)
    return held.encoded


def check_together(
    entities_of: Callable[[], Iterable[Any]], group: torch.distributed.ProcessGroup | None
) -> None:
    """Checks what all ranks hold, on one of them for all. Every rank calls.

    Args:
        entities_of: gives this rank's entities; what it raises every rank raises.
        group: the ranks; None for the default group, or one rank without torch.distributed.

    Raises:
        CheckpointingException: as check_access; on every rank.
    """
    distributed = torch.distributed
    if group is None and not distributed.is_initialized():
        check_access([entities_of()])
        return
    group = distributed.group.WORLD if group is None else group
    rank = distributed.get_rank(group)

    def decide(round: int, said: list[bytes]) -> tuple[bytes, bool]:
        _core.check_access(said)
        return b"", True

    _core.agree(
        _WORK,
        TorchCommunicator(group),
        lambda round, answer: _encoded(rank, held_by(entities_of())),
        decide,
        _core.DEFAULT_TIMEOUT,
    )
