"""Loads a distributed optimizer's state from any stored format into shards of any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Tuple, Union

import torch

from tilestone import _core
from tilestone._errors import MismatchError, NotFoundError, UnsupportedError
from tilestone._options.values import Differences
from tilestone.megatron._calls import engine_calls
from tilestone.megatron.distributed_optimizer.formats import (
    DP_RESHARDABLE,
    DP_ZERO,
    PARAM_STATE,
    SHARDING_TYPE,
    check_chain,
    flat_tensor,
    model_space_tensors,
)
from tilestone.megatron.distributed_optimizer.layout import Layout, Slice
from tilestone.megatron.distributed_optimizer.pieces import Piece
from tilestone.megatron.distributed_optimizer.shard import OptimizerShard
from tilestone.megatron.distributed_optimizer.sources import SharedBox, Sources
from tilestone.megatron.distributed_optimizer.stored import Stored
from tilestone.megatron.mapping import ShardedObject, StateDict

_CONTENT_METADATA = "content_metadata"
_OBJECTS = "objects of the distributed optimizer"  # key in templates, unlike any in common state
_HINT_LAYOUTS = (
    "to read buckets into another TP or PP layout, pass the layouts of the job that saved them as "
    "`layouts=`, or save with `layout_object`"
)


def load_optimizer(
    checkpoint_dir: Union[str, os.PathLike[str]],
    shards: Sequence[OptimizerShard],
    *,
    place: str = "optimizer",
    layouts: Optional[Iterable[Layout]] = None,
    process_group: Any = None,
    timeout: Optional[float] = _core.DEFAULT_TIMEOUT,
    allow_classes: Any = (),
    cast: bool = True,
) -> list[dict[str, Any]]:
    """Loads the state of a distributed optimizer into a rank's shards. Every rank calls.

    The format is found by the checkpoint's keys, content metadata and common state.

    - `fully_reshardable` and `fully_sharded_model_space` load into any layout. So do checkpoints of
      optimizers that are not distributed, if they hold all states (their "param" is stored as
      "fp32_param").
    - `dp_reshardable` and `dp_zero_gather_scatter` load into the same TP x PP layout with any
      number of data-parallel ranks. They load into another layout if the layouts of the saving job
      are known: from `layouts`, or from the objects that `layout_object` adds to a checkpoint.

    Args:
        checkpoint_dir: the checkpoint's directory.
        shards: one shard, or those of a chain of optimizers. Their states are filled in place.
        place: key of the optimizer's part in the checkpoint's common state.
        layouts: layouts of all model-parallel ranks of the job that saved; None: those stored in
            the checkpoint, or else the shards' own.
        process_group, timeout, allow_classes, cast: as for `tilestone.megatron.load`.

    Returns:
        for each shard, what the checkpoint has beside its states: "optimizer" with the param
        groups, and "grad_scaler" if it was saved. The shards' own `common` is not changed.

    Raises:
        CheckpointingException: on every rank; the states may be partly filled. The format is
            unknown, a state or parameter is not in the checkpoint, or buckets have another layout
            than the shards and no description of it is available.
    """
    stored, failure = Stored(), None
    try:
        check_chain(shards)
        stored = Stored.read(checkpoint_dir, _keys_of(shards))
    except Exception as error:
        failure = error

    def call(template: Any, check: Callable[[], None], sharded_only: bool) -> StateDict:
        return engine_calls.engine_load(
            engine_calls.Asked(template, check),
            checkpoint_dir,
            group=process_group,
            timeout=timeout,
            allow_classes=allow_classes,
            cast=cast,
            sharded_only=sharded_only,
            differences=Differences(not_requested="ignore"),
        )

    known = stored.layouts if layouts is None else []
    objects = {str(i): ShardedObject(key, None, (1,), (0,)) for i, key in enumerate(known)}
    common = call({_OBJECTS: objects} if objects else {}, engine_calls.raiser(failure), False)
    plan = _Plan(stored, place)
    try:
        found = layouts
        if objects:
            found = [Layout.from_plain(plain) for plain in common.pop(_OBJECTS).values()]
        plan.make(shards, common, None if found is None else list(found))
    except Exception as error:
        failure = error
    plan.fill(call(plan.template, engine_calls.raiser(failure), True))
    return plan.commons


def _keys_of(shards: Sequence[OptimizerShard]) -> set[str]:
    """Keys of the model's tensors as which the shards' parameters are stored."""
    return {
        piece.key
        for shard in shards
        for _, bucket in shard.layout.buckets()
        for parameter in bucket.parameters
        for piece in parameter.pieces
    }


@dataclass
class _Copy:
    """Elements of a stored flat tensor that go to a box of a state.

    Attributes:
        ours: the box in the state's memory.
        theirs: the box in `memory`, which begins at element `begin`.
        memory: the stored elements; None: they are part of an object, see `path`.
        path: path of the flat tensor in the loaded objects.
        numel: number of elements of that tensor.
    """

    ours: torch.Tensor
    theirs: Piece
    begin: int = 0
    memory: Optional[torch.Tensor] = None
    path: Tuple[Any, ...] = ()
    numel: int = 0

    def run(self, objects: Any) -> None:
        memory = self.memory
        if memory is None:
            memory = _at(objects, self.path)
            if memory.shape != (self.numel,):
                raise MismatchError(
                    f"the optimizer's object holds tensors of shape {tuple(memory.shape)}, but the "
                    f"layout's buffer has {self.numel} elements",
                    key=str(self.path[0]),
                    hint=_HINT_LAYOUTS,
                )
        self.ours.copy_(self.theirs.of(memory, self.begin))


def _at(objects: Any, path: Tuple[Any, ...]) -> torch.Tensor:
    found = objects
    for step in path:
        if not isinstance(found, dict) or step not in found:
            where = " ".join(map(str, path))
            raise MismatchError(
                f"the optimizer's stored object has no entry {step} on the path {where}",
                hint=_HINT_LAYOUTS,
            )
        found = found[step]
    if not isinstance(found, torch.Tensor):
        raise MismatchError(f"a {type(found).__name__} is stored at {path}, not a tensor")
    return found.contiguous()


@dataclass
class _Plan:
    """What a rank loads, and where it puts it.

    Attributes:
        stored: what the checkpoint holds.
        place: key of the optimizer in the common state.
        template: the request.
        commons: the result, filled by take().
    """

    stored: Stored
    place: str
    template: dict[str, Any] = field(default_factory=dict)
    commons: list[dict[str, Any]] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)
    _tensors: list[Any] = field(default_factory=list)
    _objects: dict[str, Any] = field(default_factory=dict)
    _parts: list[Any] = field(default_factory=list)  # per shard: common values, or keys of objects

    def make(
        self, shards: Sequence[OptimizerShard], common: StateDict, layouts: Optional[list[Layout]]
    ) -> None:
        """Plans the load of all shards."""
        part = common.get(self.place)
        content = common.get(_CONTENT_METADATA) or {}
        declared = content.get("distrib_optim_sharding_type") or _declared(part)
        kind = self.stored.format(declared)
        shared = None if layouts is None else Sources(layouts)
        for shard in shards:
            if kind in (DP_RESHARDABLE, DP_ZERO):
                sources = shared or self._own_sources(shard)
                groups = self._plan_buckets(shard, sources, kind == DP_ZERO)
                self._plan_common_objects(shard, groups)
            else:
                self._plan_model_space(shard)
                self._parts.append(_common_of(part, shard, self.place))
        self.template = {"tensors": self._tensors, _OBJECTS: self._objects}

    # ---- The model's space ----

    def _plan_model_space(self, shard: OptimizerShard) -> None:
        for part in shard.slices():
            for state, memory in shard.states[part.place].items():
                for tensor in model_space_tensors(part, "", memory, shard.instance):
                    tensor.key = self._key_of(state, tensor.key)
                    self._tensors.append(tensor)

    def _key_of(self, state: str, key: str) -> str:
        names = [state, "fp32_param"] if state == "param" else [state]
        for name in names:
            if (name, key) in self.stored.states:
                return self.stored.states[name, key]
        raise NotFoundError(
            f"the checkpoint has no state {' or '.join(map(repr, names))} of the parameter",
            key=key,
            hint="an optimizer without its own float32 parameters does not store them"
            if state == "param"
            else "",
        )

    # ---- The buckets' space ----

    def _own_sources(self, shard: OptimizerShard) -> Sources:
        """The shard's own layout, unless the checkpoint shows that the saving job had another one.

        The sizes of the buckets do not prove it, because another layout may have the same sizes.
        """
        for _, bucket in shard.layout.buckets():
            for parameter in bucket.parameters:
                for piece in parameter.pieces:
                    if not self.stored.holds_box(piece):
                        raise MismatchError(
                            f"no rank of the job that saved held the model's box at {piece.offset} "
                            f"of shape {piece.shape}, so its buckets had another layout",
                            key=piece.key,
                            hint=_HINT_LAYOUTS,
                        )
        return Sources([shard.layout])

    def _plan_buckets(self, shard: OptimizerShard, sources: Sources, in_object: bool) -> list[str]:
        """Plans a shard's load; returns the prefixes of the model-parallel ranks that are read."""
        read: dict[str, None] = {}
        for part in shard.slices():
            found = sources.find(part)
            for state, memory in shard.states[part.place].items():
                if sum(one.ours.numel for one in found) < part.numel:
                    memory.zero_()  # the missing elements are padding
                for one in found:
                    read[one.source.layout.prefix] = None
                    if in_object:
                        self._copy_of_object(one, part, state, memory)
                    else:
                        self._read_bucket(one, part, state, memory)
        return sorted(read)

    def _read_bucket(self, found: SharedBox, part: Slice, state: str, memory: torch.Tensor) -> None:
        layout, theirs, ours = found.source.layout, found.theirs, found.ours
        key = f"{layout.bucket_key(*found.source.place)}.{state}"
        numel = self._bucket_numel(key, layout, found.source.place, part)
        target = ours.of(memory, part.begin)
        if ours.is_contiguous and theirs.is_contiguous:
            self._tensors.append(flat_tensor(key, numel, theirs.start, target.flatten()))
            return
        buffer = torch.empty(theirs.span, dtype=memory.dtype)
        self._tensors.append(flat_tensor(key, numel, theirs.start, buffer))
        self._copies.append(_Copy(target, theirs, theirs.start, buffer))

    def _bucket_numel(
        self, key: str, layout: Layout, place: Tuple[int, int], part: Slice
    ) -> int:
        """The number of stored elements of a bucket, which must match the layout."""
        numel = self.stored.buckets.get(key)
        if numel is None:
            there = sorted({each.rpartition(".")[0] for each in self.stored.buckets})
            raise MismatchError(
                f"the checkpoint has no {key!r}, in which the layout has the parameter; it has "
                f"{', '.join(there[:5])}{', ...' if len(there) > 5 else ''}",
                key=part.parameter.key,
                hint=_HINT_LAYOUTS,
            )
        bucket = layout.buffers[place[0]].buckets[place[1]]
        # Early versions of Megatron-Core also stored the padding at the end, but no sizes.
        padded = f"{layout.prefix}.per_bucket_numel_unpadded" not in self.stored.objects
        if numel != bucket.numel_unpadded and not (padded and numel > bucket.numel_unpadded):
            raise MismatchError(
                f"the bucket is stored with {numel} elements, but has {bucket.numel_unpadded} in "
                "the layout",
                key=key,
                hint=_HINT_LAYOUTS,
            )
        return numel

    def _copy_of_object(
        self, found: SharedBox, part: Slice, state: str, memory: torch.Tensor
    ) -> None:
        layout = found.source.layout
        key = f"{layout.prefix}.{PARAM_STATE}"
        self._ask_object(key)
        number, bucket = found.source.place
        buffer = layout.buffers[number]
        before = sum(each.numel_unpadded for each in buffer.buckets[:bucket])
        target = found.ours.of(memory, part.begin)
        self._copies.append(
            _Copy(
                target,
                found.theirs.moved(before),
                path=(key, number, buffer.dtypes, state),
                numel=sum(each.numel_unpadded for each in buffer.buckets),
            )
        )

    def _ask_object(self, key: str) -> None:
        if key not in self.stored.objects:
            raise NotFoundError(
                "the optimizer's object is not in the checkpoint", key=key, hint=_HINT_LAYOUTS
            )
        self._objects.setdefault(key, ShardedObject(key, None, (1,), (0,)))

    def _plan_common_objects(self, shard: OptimizerShard, groups: Sequence[str]) -> None:
        """Plans to load the param groups of the shard's model-parallel rank, or of one it reads."""
        for prefix in [shard.layout.prefix, *groups]:
            if f"{prefix}.optimizer" in self.stored.objects:
                break
        else:
            raise NotFoundError(
                "the param groups are not in the checkpoint", key=f"{prefix}.optimizer"
            )
        keys = {}
        for name in ("optimizer", "grad_scaler"):
            if f"{prefix}.{name}" in self.stored.objects:
                keys[name] = f"{prefix}.{name}"
                self._ask_object(keys[name])
        self._parts.append(lambda objects: {name: objects[key] for name, key in keys.items()})

    # ---- After the load ----

    def fill(self, loaded: StateDict) -> None:
        """Puts the loaded values into their places."""
        objects = loaded.get(_OBJECTS, {})
        for key, value in objects.items():
            if key.endswith(f".{PARAM_STATE}") and not value.get("buckets_coalesced"):
                raise UnsupportedError(
                    "the optimizer's object was saved by Megatron-Core before February 2024",
                    key=key,
                    hint="convert it with Megatron's --ckpt-convert-update-legacy-dist-opt-format",
                )
        with torch.no_grad():
            for copy in self._copies:
                copy.run(objects)
        self.commons = [part(objects) if callable(part) else part for part in self._parts]


def _declared(part: Any) -> Any:
    """The format that the common state declares for one optimizer or the first of a chain."""
    if not isinstance(part, dict):
        return None
    if SHARDING_TYPE in part:
        return part[SHARDING_TYPE]
    return next((each[SHARDING_TYPE] for each in part.values() if _has_type(each)), None)


def _has_type(value: Any) -> bool:
    return isinstance(value, dict) and SHARDING_TYPE in value


def _common_of(part: Any, shard: OptimizerShard, place: str) -> dict[str, Any]:
    """The common state of a shard's optimizer, without its states and their format."""
    chain = shard.layout.chain
    found = part if chain is None or not isinstance(part, dict) else part.get(chain)
    if not isinstance(found, dict):
        where = place if chain is None else f"{place}.{chain}"
        raise NotFoundError(
            "the common state of the optimizer is not in the checkpoint", key=where
        )
    kept = {
        name: value for name, value in found.items() if name not in (PARAM_STATE, SHARDING_TYPE)
    }
    inner = kept.get("optimizer")
    states = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(inner, dict) and isinstance(states, dict) and "common_step" in states:
        # An optimizer that is not distributed keeps the step with the states.
        step = states["common_step"]
        step = step.item() if isinstance(step, torch.Tensor) else step
        groups = [{**group, "step": step} for group in inner["param_groups"]]
        kept["optimizer"] = {"param_groups": groups}
    return kept
