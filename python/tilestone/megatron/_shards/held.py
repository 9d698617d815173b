"""What the ranks hold of a state, and checks of all together.

That the parts of all ranks make whole tensors and objects is checked by the engine
(`_core.check_access`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, List, Tuple

import torch

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import agreed
from tilestone.megatron._shards.entities import boxes_of
from tilestone.megatron.dict_utils import diff
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)


def bytes_of(shard: ShardedTensor) -> int:
    """The size in bytes of a rank's elements of a shard."""
    flat = getattr(shard, "flattened_range", None)
    count = math.prod(shard.local_shape) if flat is None else flat.stop - flat.start
    return int(count) * shard.dtype.itemsize


@contextlib.contextmanager
def describing(entity: Any) -> Iterator[None]:
    """Makes errors of a wrong attribute of the entity an InvalidArgumentError with its key."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        key = str(getattr(entity, "key", ""))
        raise InvalidArgumentError(f"an entity has wrong attributes: {error}", key=key) from error


_WORK = "check of the ranks' entities"
_Part = Tuple[str, str, Tuple[int, ...], Tuple[int, ...], Tuple[int, ...], bool]


def gather(
    entities: Sequence[Any], group: torch.distributed.ProcessGroup | None = None
) -> list[List[Any]]:
    """Collects the entities of every rank of a group. Every rank calls.

    Args:
        entities: this rank's entities, without data.
        group: None: the ranks of the call that is under way, or the default group.

    Raises:
        CheckpointingException: on every rank, if any rank failed.
    """
    everybodys: list[List[Any]]
    _, everybodys = agreed(_WORK, _ranks.default_group(group), lambda: entities, list, list)
    return everybodys


def _encoded(rank: int, entities: Iterable[Any]) -> bytes:
    """Describes a rank's entities, as `_core.check_access` takes it.

    Raises:
        InvalidArgumentError: an entity can't be described.
    """
    tensors: list[_Part] = []
    objects: list[Tuple[str, bool]] = []
    try:
        for entity in entities:
            with describing(entity):
                main = is_main_replica(entity.replica_id)
                if isinstance(entity, ShardedObject):
                    objects.append((entity.unique_key, main))
                else:
                    tensors += _parts(entity, main)
        return _core.encode_access(tensors, objects)
    except CheckpointError as error:
        text = f"Invalid access pattern: the entities of rank {rank}: {error.message}"
        raise InvalidArgumentError(text, key=error.key) from error


def _parts(entity: Any, main: bool) -> list[_Part]:
    """The boxes of a tensor that an entity consists of; an empty box for an empty slice."""
    dtype = str(entity.dtype).removeprefix("torch.")
    shape = tuple(entity.global_shape)
    flat = getattr(entity, "flattened_range", None)
    boxes = boxes_of(
        entity.local_shape,
        entity.global_offset,
        entity.prepend_axis_num,
        None if flat is None else (flat.start, flat.stop),
    )
    nothing = (0,) * len(shape)
    full = [box for box in boxes if math.prod(box[1])] or [(nothing, nothing)]
    return [(entity.key, dtype, shape, *box, main) for box in full]


def check_access(global_metadata: Iterable[Iterable[Any]]) -> None:
    """Checks the entities of all ranks.

    Args:
        global_metadata: for each rank its ShardedTensors and ShardedObjects, with or without data.

    Raises:
        CheckpointingException: ranks describe a tensor or object differently, or main replicas
            overlap, leave a part out or exceed the tensor. The message names the key and the ranks.
            The same metadata gives the same error on every rank.
    """
    _core.check_access([_encoded(rank, held) for rank, held in enumerate(global_metadata)])


def check_together(
    entities_of: Callable[[], Iterable[Any]],
    group: torch.distributed.ProcessGroup | None,
) -> None:
    """Checks the entities of all ranks, on one rank for all. Every rank calls.

    Args:
        entities_of: returns this rank's entities; if it raises, every rank raises the same.
        group: the ranks; None: those of the call that is under way, or the default group, or this
            process without torch.distributed.

    Raises:
        CheckpointingException: as check_access; on every rank.
    """
    group = _ranks.default_group(group)
    if group is None:
        check_access([entities_of()])
        return
    rank = _ranks.rank(group)

    def described() -> bytes:
        return _encoded(rank, entities_of())

    agreed(_WORK, group, described, bytes, _core.check_access)


logger = logging.getLogger("tilestone.megatron.validation")  # as in Megatron-Core


def log_differences(common_state_dict: CommonStateDict, group: Any = None) -> None:
    """Logs the differences on each rank whose common state differs from rank 0's. All ranks call.

    Hashes are compared first. Rank 0 sends its state to the others only if a hash differs.
    """
    distributed = torch.distributed
    group = _ranks.default_group(group)
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return
    rank = distributed.get_rank(group)
    problem, pickled = _pickled(common_state_dict)
    digests: list[Any] = [None] * distributed.get_world_size(group)
    own = None if problem else hashlib.blake2b(pickled, digest_size=16).digest()
    distributed.all_gather_object(digests, own, group=group)
    if digests[0] is not None and len(set(digests)) == 1:
        return
    first: list[Any] = [(problem, pickled) if rank == 0 else None]
    distributed.broadcast_object_list(first, group=group, group_src=0)
    problem, pickled = first[0]
    if problem is not None:
        raise InvalidArgumentError(f"common state can't be compared: {problem}", rank=0)
    if rank == 0 or digests[0] == digests[rank]:
        return
    try:
        of_rank_0 = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)
        only_first, only_here, mismatched = diff(of_rank_0, common_state_dict)
    except Exception as error:  # the states differ whether or not this rank can say where
        logger.warning(
            f"Rank {rank} common state dict differs from rank 0 common state dict. Where they "
            f"differ can't be found: {type(error).__name__}: {error}"
        )
        return
    if only_first or only_here or mismatched:
        logger.warning(
            f"Rank {rank} common state dict differs from rank 0 common state dict. "
            f"Keys only on rank 0: {only_first}, "
            f"Keys only on {rank}: {only_here}, "
            f"Mismatched keys: {mismatched}"
        )


def _pickled(common_state_dict: CommonStateDict) -> tuple[str | None, bytes]:
    """(why it can't be pickled, or its pickle): told in any case, so that no rank waits in vain."""
    try:
        written = io.BytesIO()
        torch.save(common_state_dict, written)  # pickle itself can't restore every dtype of torch
        return None, written.getvalue()
    except Exception as error:
        return f"rank 0 can't pickle it: {type(error).__name__}: {error}", b""
