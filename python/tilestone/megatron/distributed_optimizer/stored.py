"""Reads from a checkpoint's metadata what it holds of distributed optimizers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Tuple, Union

from tilestone._errors import CorruptError, NotFoundError, UnsupportedError
from tilestone.megatron._stored import open_stored
from tilestone.megatron.distributed_optimizer.formats import (
    DP_RESHARDABLE,
    DP_ZERO,
    FORMATS,
    FULLY_RESHARDABLE,
    LAYOUT,
    MODEL_SPACE,
)
from tilestone.megatron.distributed_optimizer.pieces import Piece
from tilestone.megatron.mapping import ShardedObject

_CHAIN = r"(?:chained_\d+\.)?"
_GROUP = re.compile(
    _CHAIN + r"optimizer\.distributed\.dp_group_idx_\d+\.(?P<rest>.+)", re.DOTALL
)
_BUCKET = re.compile(r"gbuf_idx_\d+\.dtype_\(.*\)\.bucket_idx_\d+\.[^.]+")
_STATE = re.compile(_CHAIN + r"optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)", re.DOTALL)
_Numbers = Tuple[int, ...]
# Names of formats in earlier versions of Megatron-Core.
_OLD_NAMES = {"fully_sharded_bucket_space": DP_RESHARDABLE}


@dataclass
class Stored:
    """What a checkpoint holds of distributed optimizers.

    Attributes:
        buckets: the 1-D tensors of the format dp_reshardable: key -> number of elements.
        objects: keys of the objects of model-parallel ranks.
        states: (state, model's key) -> key in the checkpoint, for the formats in the model's space.
        boxes: for the model's own tensors: key -> (offset, shape) of the stored chunks.
    """

    buckets: dict[str, int] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    states: dict[Tuple[str, str], str] = field(default_factory=dict)
    boxes: dict[str, set[Tuple[_Numbers, _Numbers]]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, checkpoint_dir: Union[str, os.PathLike[str]], model_keys: Collection[str]
    ) -> Stored:
        """Reads a checkpoint's metadata. Each rank calls on its own.

        Args:
            checkpoint_dir: the checkpoint's directory.
            model_keys: keys of the model's tensors whose chunks are wanted.

        Raises:
            CheckpointingException: there is no checkpoint, it can't be read, or two chained
                optimizers hold the same state of a parameter.
        """
        stored = cls()
        with open_stored(checkpoint_dir) as checkpoint:
            for unique in checkpoint.object_keys():
                stored._add_object(ShardedObject.empty_from_unique_key(unique).key)
            for key in checkpoint.tensor_keys():
                stored._add_tensor(key, checkpoint[key])
                if key in model_keys:
                    boxes = checkpoint[key].boxes
                    stored.boxes[key] = {(tuple(box.offset), tuple(box.shape)) for box in boxes}
        return stored

    def _add_object(self, key: str) -> None:
        if _GROUP.fullmatch(key):
            self.objects.add(key)

    def _add_tensor(self, key: str, tensor: Any) -> None:
        group = _GROUP.fullmatch(key)
        if group is not None and _BUCKET.fullmatch(group["rest"]):
            self.buckets[key] = int(tensor.shape[0])
        state = _STATE.fullmatch(key)
        if state is not None:
            name = (state["state"], state["key"])
            if name in self.states:
                text = f"the state {name[0]!r} is stored twice, also as {self.states[name]}"
                raise CorruptError(text, key=key)
            self.states[name] = key

    def holds_box(self, piece: Piece) -> bool:
        """Whether a rank of the job that saved had this part of the model.

        False if the checkpoint holds the model's tensor, divided in another way. True if the
        checkpoint does not hold it.
        """
        return (piece.offset, piece.shape) in self.boxes.get(
            piece.key, {(piece.offset, piece.shape)}
        )

    @property
    def layouts(self) -> list[str]:
        """Keys of the objects that describe layouts."""
        return sorted(key for key in self.objects if key.endswith(f".{LAYOUT}"))

    def formats(self) -> list[str]:
        """The formats of the keys that the checkpoint holds."""
        found = [DP_RESHARDABLE] if self.buckets else []
        found += [DP_ZERO] if any(key.endswith(".param_state") for key in self.objects) else []
        names = {state for state, _ in self.states}
        if "fp32_param" in names:
            found.append(MODEL_SPACE)
        elif names:
            found.append(FULLY_RESHARDABLE)
        return found

    def format(self, declared: Any) -> str:
        """Determines the format to read.

        Args:
            declared: the format according to the program that saved; None: not declared.

        Raises:
            CheckpointingException: there is no state of an optimizer, its format is unknown, or the
                keys are not those of the declared format.
        """
        there = self.formats()
        declared = _OLD_NAMES.get(declared, declared)
        if declared is not None and declared not in FORMATS:
            raise UnsupportedError(
                f"the format {declared!r} of the checkpoint's optimizer is not supported",
                hint=f"formats that can be read: {', '.join(FORMATS)}",
            )
        if not there:
            raise NotFoundError("the checkpoint does not hold the state of a distributed optimizer")
        if declared is None:
            return there[0]
        in_model_space = {FULLY_RESHARDABLE, MODEL_SPACE}
        if declared in there or (declared in in_model_space and in_model_space & set(there)):
            return str(declared)
        raise CorruptError(
            f"the checkpoint declares the optimizer format {declared!r}, but its keys are those of "
            f"{' and '.join(there)}"
        )
