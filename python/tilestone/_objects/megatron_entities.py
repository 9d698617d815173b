"""Converts the entities of Megatron-Core and of `tilestone.megatron` to the engine's.

They are recognised by the module and name of their class. So every version of Megatron-Core works,
and Megatron-Core is not imported.
"""

from __future__ import annotations

from typing import Any

from tilestone import _core
from tilestone._errors import InvalidArgumentError, UnsupportedError
from tilestone._objects import converters
from tilestone._objects.converters import Call, Node
from tilestone._objects.entities import (
    LocalNonpersistent, ShardedObject, ShardedTensor, ShardedTensorFactory,
)
from tilestone._options import valid

_MODULES = ("dist_checkpointing.mapping", "tilestone.megatron.mapping")
_KINDS = {
    "ShardedTensor",
    "ShardedObject",
    "ShardedTensorFactory",
    "LocalNonpersistentObject",
    "ShardedBase",
}


def kind_of(cls: type) -> str | None:
    """Which entity of a sharded state dict a class is; None for any other class."""
    for base in cls.__mro__:
        if base.__name__ in _KINDS and base.__module__.endswith(_MODULES):
            return str(base.__name__)
    return None


def _data(item: Any, for_load: bool) -> Any:
    """The local array; for a load of an entity without data, a meta tensor to allocate."""
    if item.data is not None:
        return item.data
    if not for_load:
        raise InvalidArgumentError("a Megatron-Core ShardedTensor without data", key=item.key)
    import torch

    if item.flattened_range is None:
        return torch.empty(tuple(item.local_shape), dtype=item.dtype, device="meta")
    count = item.flattened_range.stop - item.flattened_range.start
    return torch.empty(count, dtype=item.dtype, device="meta")


def _tensor(item: Any, for_load: bool) -> ShardedTensor:
    key = valid.entity_key(item.key)
    options: dict[str, Any] = {
        "replica_id": item.replica_id,
        "prepend_axis_num": item.prepend_axis_num,
        "allow_shape_mismatch": bool(item.allow_shape_mismatch),
        "holders": getattr(item, "holders", None),  # Megatron-Core's own class has no holders
    }
    local = valid.entries("local_shape", item.local_shape, key)
    offset = valid.entries("global_offset", item.global_offset, key)
    data = _data(item, for_load)
    box = _core.Box(offset, (1,) * item.prepend_axis_num + local)
    flat = getattr(item, "flattened_range", None)
    if flat is not None:
        return ShardedTensor.from_box_flat(
            key, data, item.global_shape, box, flattened_range=flat, **options
        )
    return ShardedTensor.from_box(key, data, item.global_shape, box, **options)


def _factory(item: Any) -> ShardedTensorFactory:
    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        if hasattr(item, "build_of"):  # tilestone.megatron's class, which passes holders on
            return item.build_of(key, data)
        return item.build_fn(key, data, item.replica_id, item.flattened_range)

    if item.data is None:
        raise InvalidArgumentError(
            "a Megatron-Core ShardedTensorFactory without data", key=item.key
        )
    return ShardedTensorFactory(
        item.key, item.data, build, item.merge_fn, item.replica_id, item.flattened_range
    )


def entity(
    item: Any, for_load: bool
) -> ShardedTensor | ShardedObject | ShardedTensorFactory | LocalNonpersistent:
    """Tilestone's entity with the same meaning: key, position, replica id and data.

    Args:
        item: an object for whose class kind_of() is not None.
        for_load: the item is part of a template; data that is None is allocated.

    Raises:
        InvalidArgumentError, UnsupportedError: the item can't be converted; the error names its
            key.
    """
    kind = kind_of(type(item))
    if kind == "ShardedTensor":
        return _tensor(item, for_load)
    if kind == "ShardedObject":
        return ShardedObject(
            item.key, item.data, item.global_shape, item.global_offset, item.replica_id
        )
    if kind == "ShardedTensorFactory":
        return _factory(item)
    if kind == "LocalNonpersistentObject":
        return LocalNonpersistent(item.obj)
    raise UnsupportedError(f"Tilestone does not know the Megatron-Core class {type(item).__name__}")


class _MegatronConverter(converters.PartConverter):
    def node(self, item: Any, path: str, call: Call) -> Node | None:
        ours = entity(item, call.for_load)
        converter = converters.find(ours)
        assert converter is not None
        return converter.node(ours, path, call)

    def data_of(self, item: Any) -> Any:
        return item.data if kind_of(type(item)) in ("ShardedTensor", "ShardedObject") else item


converters.add(lambda cls: kind_of(cls) is not None, _MegatronConverter())
