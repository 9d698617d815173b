"""How the entities of `tilestone.megatron.mapping` and Megatron-Core's count as one another's."""

from __future__ import annotations

import sys
from abc import ABCMeta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_OURS = "tilestone.megatron.mapping"
_FOREIGN_MODULE = "dist_checkpointing.mapping"
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.mapping"
_ENTITIES = ("ShardedBase", "ShardedTensor", "ShardedObject", "ShardedTensorFactory")


class EntityType(ABCMeta):
    """Type of classes as a subclass of which Megatron-Core's class of the same name counts.

    And the other way round: once a program has imported Megatron-Core, its functions take these
    classes for its own. They would save an entity that they don't know as part of the common state.
    """

    counted: Any = None  # Megatron-Core's module that takes these classes for its own

    def __subclasscheck__(cls, other: type) -> bool:
        # A user's subclass is not what Megatron-Core's class is.
        if cls.__module__ == _OURS and not EntityType.is_counting:
            for base in getattr(other, "__mro__", ()):
                if base.__name__ == cls.__name__ and base.__module__.endswith(_FOREIGN_MODULE):
                    return True
        return super().__subclasscheck__(other)

    is_counting = False  # while Megatron-Core's classes ask whether they are subclasses of these

    @staticmethod
    def count(megatrons: Any) -> None:
        """Makes these classes count as those of Megatron-Core's module."""
        if not all(hasattr(megatrons, name) for name in _ENTITIES):
            return  # it is being imported
        EntityType.counted = megatrons
        EntityType.is_counting = True
        try:
            for name in _ENTITIES:
                getattr(megatrons, name).register(getattr(sys.modules[_OURS], name))
        finally:
            EntityType.is_counting = False


class Entity(metaclass=EntityType):
    """What the entities have in common; Megatron-Core's are made to count when one is made."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        megatrons = sys.modules.get(_MEGATRON_MODULE)
        if megatrons is not None and megatrons is not EntityType.counted:
            EntityType.count(megatrons)
        return super().__new__(cls)
