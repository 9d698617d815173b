"""How a distributed optimizer packs parameters into flat buffers, and which part a rank has.

The parameters of a model-parallel rank are in buffers, one after the other; there is one buffer for
each pair of dtypes. A buffer is divided into buckets. Each bucket is divided evenly among the
data-parallel ranks, regardless of where parameters begin and end. All offsets and sizes are in
elements; those of parameters are relative to the beginning of their bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional, Tuple, Union

import torch

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.megatron.distributed_optimizer.pieces import Entity, Piece, pieces_of, shape_of

Dtypes = Tuple[torch.dtype, torch.dtype]  # of a buffer's parameters and of their gradients


@dataclass(frozen=True)
class Parameter:
    """A parameter in a bucket.

    Attributes:
        key: key of the model's entity, for error messages.
        numel: number of elements of the local tensor.
        start: its first element in the bucket.
        pieces: the boxes of global tensors as which it is stored.
    """

    key: str
    numel: int
    start: int
    pieces: Tuple[Piece, ...]

    @classmethod
    def of(cls, entity: Entity, start: int) -> Parameter:
        """Describes a parameter of the model.

        Args:
            entity: its ShardedTensor or ShardedTensorFactory in the model. The data is not read.
            start: its first element in the bucket.

        Raises:
            CheckpointingException: the entity is a flattened slice, or a factory without a
                description (see pieces_of).
        """
        return cls(entity.key, math.prod(shape_of(entity)), start, pieces_of(entity))

    @property
    def end(self) -> int:
        """The end of its elements in the bucket (exclusive)."""
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """A part of a buffer that is reduced at once and divided evenly among the ranks.

    Attributes:
        parameters: in their order in the bucket, with or without gaps.
        numel_unpadded: number of elements without the padding at the end, which depends on the
            number of ranks. It includes gaps between parameters, and may include one after the
            last.
        numel: number of elements with that padding.

    Raises:
        CheckpointingException: parameters overlap, are not in order, or exceed the bucket.
    """

    parameters: Tuple[Parameter, ...]
    numel_unpadded: int
    numel: int

    def __post_init__(self) -> None:
        end = 0
        for parameter in self.parameters:
            if parameter.start < end:
                text = f"begins at {parameter.start} of its bucket, but another ends at {end}"
                raise InvalidArgumentError(f"a parameter {text}", key=parameter.key)
            end = parameter.end
            if end > self.numel_unpadded:
                text = f"ends at {end} of its bucket, which has {self.numel_unpadded} elements"
                raise InvalidArgumentError(f"a parameter {text}", key=parameter.key)
        if self.numel_unpadded > self.numel:
            text = f"{self.numel_unpadded} elements has only {self.numel} with its padding"
            raise InvalidArgumentError(f"a bucket of {text}")


@dataclass(frozen=True)
class Buffer:
    """The parameters of one pair of dtypes.

    Attributes:
        dtypes: dtypes of the parameters and of their gradients.
        buckets: in the order of the buffer.
    """

    dtypes: Dtypes
    buckets: Tuple[Bucket, ...]


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that one data-parallel rank has.

    Attributes:
        place: the numbers of the buffer, the bucket and the parameter.
        parameter: the whole parameter.
        begin, end: the range of its flattened elements.
    """

    place: Tuple[int, int, int]
    parameter: Parameter
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements of the slice."""
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """The buffers of one model-parallel rank, which its data-parallel ranks share.

    Attributes:
        buffers: in the optimizer's order.
        group: number of the model-parallel rank: Megatron-Core's `data_parallel_group_idx`.
        chain: number of the optimizer in a chain of several (dense parameters, experts); None:
            there is only one.
    """

    buffers: Tuple[Buffer, ...]
    group: int = 0
    chain: Optional[int] = None

    @cached_property
    def prefix(self) -> str:
        """Prefix of the keys of this model-parallel rank in the formats that store buckets."""
        chained = "" if self.chain is None else f"chained_{self.chain}."
        return f"{chained}optimizer.distributed.dp_group_idx_{self.group}"

    def bucket_key(self, buffer: int, bucket: int) -> str:
        """Prefix of the keys of a bucket's tensors; ".STATE" follows."""
        dtypes = self.buffers[buffer].dtypes
        return f"{self.prefix}.gbuf_idx_{buffer}.dtype_{dtypes}.bucket_idx_{bucket}"

    def buckets(self) -> Iterator[Tuple[Tuple[int, int], Bucket]]:
        """Yields all buckets with their buffer's number and their number in the buffer."""
        for i, buffer in enumerate(self.buffers):
            for j, bucket in enumerate(buffer.buckets):
                yield (i, j), bucket

    def check_ranks(self, dp_size: int) -> None:
        """Refuses a number of ranks among which a bucket can't be divided evenly.

        Raises:
            CheckpointingException: with the key of the bucket.
        """
        for (i, j), bucket in self.buckets():
            if bucket.numel % dp_size:
                raise InvalidArgumentError(
                    f"a bucket of {bucket.numel} elements can't be divided among {dp_size} ranks",
                    key=self.bucket_key(i, j),
                )

    def slices(self, dp_rank: int, dp_size: int) -> Iterator[Slice]:
        """Yields a data-parallel rank's parts of the parameters, in the order of the buffers.

        Parameters of which the rank has no element are left out.
        """
        for (i, j), bucket in self.buckets():
            local = bucket.numel // dp_size
            low, high = dp_rank * local, (dp_rank + 1) * local
            for k, parameter in enumerate(bucket.parameters):
                begin = max(low, parameter.start) - parameter.start
                end = min(high, parameter.end) - parameter.start
                if begin < end:
                    yield Slice((i, j, k), parameter, begin, end)

    def to_plain(self) -> dict[str, Any]:
        """The layout as dicts, lists, ints and text, which the engine reads."""
        buffers = [
            {
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in buffer.dtypes],
                "buckets": [
                    {
                        "numel": bucket.numel,
                        "numel_unpadded": bucket.numel_unpadded,
                        "parameters": [_plain(p) for p in bucket.parameters],
                    }
                    for bucket in buffer.buckets
                ],
            }
            for buffer in self.buffers
        ]
        return {"version": 1, "group": self.group, "chain": self.chain, "buffers": buffers}


def to_json(layouts: Iterable[Layout]) -> str:
    """Layouts as text, which engine/read/optimizer_layout.cc reads."""
    return json.dumps({"optimizer_layouts": [layout.to_plain() for layout in layouts]})


def _plain(parameter: Parameter) -> dict[str, Any]:
    pieces = [
        [
            piece.key,
            *map(list, (piece.global_shape, piece.offset, piece.shape, piece.strides)),
            piece.start,
            piece.allow_shape_mismatch,
        ]
        for piece in parameter.pieces
    ]
    return {
        "key": parameter.key,
        "numel": parameter.numel,
        "start": parameter.start,
        "pieces": pieces,
    }


def pack(
    entities: Iterable[Entity],
    dp_size: int,
    dtypes: Dtypes = (torch.float32, torch.float32),
    bucket_numel: Optional[int] = None,
    *,
    alone: Collection[str] = (),
    parameter_multiple: int = 64,
    bucket_multiple: int = 128,
) -> Buffer:
    """Packs parameters in the order of Megatron-Core's buffers: the last parameter comes first.

    Args:
        entities: the model's entities of the parameters, in the model's order.
        dp_size: number of ranks among which each bucket is divided.
        dtypes: dtypes of the parameters and of their gradients.
        bucket_numel: a bucket ends with the parameter that makes it at least this long; None: one
            bucket for all.
        alone: keys of parameters that get their own bucket (embeddings that pipeline stages
            share).
        parameter_multiple: each parameter begins at a multiple of this number.
        bucket_multiple: each bucket ends at a multiple of this number and of dp_size.

    Raises:
        CheckpointingException: as Parameter.of().
    """
    multiple = math.lcm(dp_size, bucket_multiple)
    buckets: list[Bucket] = []
    waiting: list[Parameter] = []

    def close(end: int) -> None:
        if waiting:
            buckets.append(Bucket(tuple(waiting), end, _up(end, multiple)))
            waiting.clear()

    for entity in reversed(list(entities)):
        begin = sum(bucket.numel for bucket in buckets)  # begin of the new bucket in the buffer
        start = _up(begin + (waiting[-1].end if waiting else 0), parameter_multiple) - begin
        if entity.key in alone and waiting:
            close(start)  # the gap before the parameter belongs to the bucket before it
            start = 0
        waiting.append(Parameter.of(entity, start))
        full = bucket_numel is not None and waiting[-1].end >= bucket_numel
        if full or entity.key in alone:
            close(waiting[-1].end)
    if waiting:
        close(waiting[-1].end)
    return Buffer(dtypes, tuple(buckets))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---- One rank's part ----

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
