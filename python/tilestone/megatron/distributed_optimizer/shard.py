"""One rank's part of a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.megatron.distributed_optimizer.layout import Layout, Slice

# Adam's states in Megatron-Core: "param" is the parameter itself in float32.
ADAM: Mapping[str, torch.dtype] = {
    "param": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
Place = Tuple[int, int, int]


@dataclass
class OptimizerShard:
    """A rank's part of a distributed optimizer, independent of the optimizer's class.

    Attributes:
        layout: the buffers of the rank's model-parallel rank.
        dp_rank, dp_size: the rank's number among the ranks that divide the buckets, and their
            number.
        states: for the place of each of slices(), the state tensors by name: 1-D, contiguous, with
            one element for each element of the slice. A load fills them in place.
        dtypes: dtypes of the states by name; "param" is the parameter in the precision in which it
            is updated.
        common: the values that are not tensors of a parameter, as in Megatron-Core's
            `state_dict()`: "optimizer" with the "param_groups" (without their parameters, with
            their "step"), and "grad_scaler" if there is one.
        instance: number of the optimizer's instance, if several instances hold the same state.

    Raises:
        CheckpointingException: states are missing or surplus, or have a wrong shape or dtype; a
            bucket can't be divided among dp_size ranks.
    """

    layout: Layout
    dp_rank: int
    dp_size: int
    states: dict[Place, dict[str, torch.Tensor]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=lambda: dict(ADAM))
    common: dict[str, Any] = field(default_factory=dict)
    instance: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise InvalidArgumentError(f"dp_rank {self.dp_rank} is not one of {self.dp_size} ranks")
        self.layout.check_ranks(self.dp_size)
        places = {part.place: part for part in self.slices()}
        for place, part in places.items():
            self._check_states(part, self.states.get(place, {}))
        for place in self.states.keys() - places.keys():
            raise MismatchError(
                f"there are states at {place}, but rank {self.dp_rank} has no slice there"
            )

    def _check_states(self, part: Slice, states: Mapping[str, torch.Tensor]) -> None:
        key = part.parameter.key
        if states.keys() != self.dtypes.keys():
            text = f"the states of a parameter are {sorted(states)}, not {sorted(self.dtypes)}"
            raise MismatchError(text, key=key)
        for name, tensor in states.items():
            shape, dtype = tuple(tensor.shape), self.dtypes[name]
            if shape != (part.numel,) or tensor.dtype != dtype or not tensor.is_contiguous():
                raise MismatchError(
                    f"state {name!r} has {tensor.dtype} and shape {shape}; expected a contiguous "
                    f"tensor of {dtype} and shape {(part.numel,)}",
                    key=key,
                )

    def slices(self) -> Iterator[Slice]:
        """The rank's slices of the parameters, in the order of the buffers."""
        return self.layout.slices(self.dp_rank, self.dp_size)

    @classmethod
    def allocated(
        cls,
        layout: Layout,
        dp_rank: int,
        dp_size: int,
        dtypes: Mapping[str, torch.dtype] = ADAM,
        device: Union[str, torch.device] = "cpu",
        **fields: Any,
    ) -> OptimizerShard:
        """Makes a shard whose states are zeros.

        Args:
            layout, dp_rank, dp_size, dtypes: see the attributes.
            device: device of the states.
            fields: other attributes.

        Raises:
            CheckpointingException: see the class.
        """
        states = {
            part.place: {
                name: torch.zeros(part.numel, dtype=dtype, device=device)
                for name, dtype in dtypes.items()
            }
            for part in layout.slices(dp_rank, dp_size)
        }
        return cls(layout, dp_rank, dp_size, states, dict(dtypes), **fields)
