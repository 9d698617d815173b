"""Parts of tensors that FSDP2 divides over data parallelism, in addition to tensor parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Tuple

import torch

from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._torch.parts import states_position
from tilestone.megatron.groups import Group


@dataclass(frozen=True)
class FsdpPart:
    """The rows of a tensor that FSDP2 has assigned to a rank.

    Attributes:
        shape: shape of the tensor before FSDP2 divided its axis 0.
        begin: the first row of the part.
        place, fragments: the part's number, and the number of parts.
    """

    shape: Tuple[int, ...]
    begin: int
    place: int
    fragments: int

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same number of rows, at least one."""
        return self.shape[0] > 0 and self.shape[0] % self.fragments == 0


def fsdp_part(tensor: Any, key: str, dp_cp: Group) -> Tuple[torch.Tensor, FsdpPart | None]:
    """Returns the local tensor of a tensor, and which part of it that is (None: all of it).

    The sizes are those of torch.chunk. (Megatron-Core assumes that all parts are equal, and gathers
    the tensor if there are more ranks than rows.)

    Raises:
        InvalidArgumentError: it is not a tensor.
        UnsupportedError: a DTensor on a mesh other than the ranks of dp_cp, or divided along
            an axis other than 0.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise InvalidArgumentError(f"expected a tensor, not a {kind}", key=key)
    if not hasattr(tensor, "device_mesh") and not states_position(tensor):
        return tensor, None
    if states_position(tensor):
        raise _refusal(key, "whose methods or attributes say where it stands")
    divided: Any = tensor
    mesh, placements = divided.device_mesh, divided.placements
    local: torch.Tensor = divided._local_tensor
    ranks = sorted(mesh.mesh.flatten().tolist())
    if mesh.ndim != 1 or len(ranks) != dp_cp.size() or ranks != sorted(dp_cp.ranks or ranks):
        raise _refusal(key, f"on a mesh of ranks {ranks} in {mesh.ndim} dims, which is not dp_cp")
    if placements[0].is_replicate():
        return local, None
    if type(placements[0]) is not torch.distributed.tensor.Shard or placements[0].dim != 0:
        raise _refusal(key, f"with placements {tuple(placements)}")
    shape, count, place = tuple(tensor.shape), len(ranks), mesh.get_local_rank()
    rows = math.ceil(shape[0] / count)
    begin, end = (min(n * rows, shape[0]) for n in (place, place + 1))
    if local.shape[0] != end - begin:
        raise _refusal(key, f"with {local.shape[0]} rows on this rank instead of {end - begin}")
    return local, FsdpPart(shape, begin, place, count)


def _refusal(key: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"unsupported: a DTensor {found}",
        key=key,
        hint="the functions make_... accept DTensors whose axis 0 FSDP2 divides over dp_cp; put "
        "other DTensors into the state dict unchanged, because they describe their own sharding",
    )
