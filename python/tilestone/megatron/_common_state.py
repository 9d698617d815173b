"""Compares the common state of the ranks, and logs how it differs."""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from typing import Any

import torch

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron.dict_utils import diff
from tilestone.megatron.mapping import CommonStateDict

logger = logging.getLogger("tilestone.megatron.validation")  # as in Megatron-Core


class _Hashed:
    """A file that only computes a hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> str:
        return self._hash.hexdigest()


class _HashingPickler(pickle.Pickler):
    """Pickles tensors by their content, because torch's own pickles contain addresses."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or type(item) not in _PLAIN_TENSORS:
            return NotImplemented
        if item.layout != torch.strided or item.is_quantized or item.is_meta:
            return NotImplemented
        packed = item.detach().cpu().contiguous()
        # Not reshape(-1): a contiguous tensor of one element may have any strides.
        flat = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
        elements = pickle.PickleBuffer(flat.numpy().data)
        return (str, (str((item.dtype, tuple(item.shape))), elements))


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _digest(value: Any) -> str | None:
    """A hash that is equal for values with equal pickles; None: the value can't be pickled."""
    hashed = _Hashed()
    try:
        _HashingPickler(hashed, protocol=5).dump(value)
    except Exception:  # any object of the program may raise; it is then compared value by value
        return None
    return hashed.digest()


def log_differences(common_state_dict: CommonStateDict, group: Any = None) -> None:
    """Logs the differences on each rank whose common state differs from rank 0's. All ranks call.

    Hashes are compared first. Rank 0 sends its state to the others only if a hash differs.
    """
    distributed = torch.distributed
    group = _ranks.default_group(group)
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return
    rank = distributed.get_rank(group)
    digests: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(digests, _digest(common_state_dict), group=group)
    if digests[0] is not None and len(set(digests)) == 1:
        return
    first: list[Any] = [_sendable(common_state_dict) if rank == 0 else None]
    distributed.broadcast_object_list(first, group=group, group_src=0)
    problem, pickled = first[0]
    if problem is not None:
        raise InvalidArgumentError(f"common state can't be compared: {problem}", rank=0)
    if rank == 0 or (digests[0] is not None and digests[0] == digests[rank]):
        return
    try:
        of_rank_0 = torch.load(io.BytesIO(pickled), weights_only=False)
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


def _sendable(common_state_dict: CommonStateDict) -> tuple[str | None, bytes]:
    """(why it can't be pickled, or its pickle): sent in any case, so that no rank waits in vain."""
    try:
        written = io.BytesIO()
        torch.save(common_state_dict, written)  # pickle itself can't restore every dtype of torch
        return None, written.getvalue()
    except Exception as error:
        return f"rank 0 can't pickle it: {type(error).__name__}: {error}", b""
