"""Makes the entities of `tilestone.megatron.mapping` and Megatron-Core's count as each other."""

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
    """Metaclass: Megatron-Core's class of the same name counts as a subclass.

    The reverse holds too: once a program has imported Megatron-Core, its functions accept these
    classes as its own. Without that they would save such an entity as part of the common state.
    """

    counted: Any = None  # Megatron-Core's module that accepts these classes

    def __subclasscheck__(cls, other: type) -> bool:
        # A user's subclass must not accept Megatron-Core's class.
        if cls.__module__ == _OURS and not EntityType.is_counting:
            for base in getattr(other, "__mro__", ()):
                if base.__name__ == cls.__name__ and base.__module__.endswith(_FOREIGN_MODULE):
                    return True
        return super().__subclasscheck__(other)

    is_counting = False  # True while Megatron-Core's classes ask whether they are subclasses

    @staticmethod
    def count(megatrons: Any) -> None:
        """Makes Megatron-Core's classes in a module accept these classes."""
        if not all(hasattr(megatrons, name) for name in _ENTITIES):
            return  # the module is still being imported
        EntityType.counted = megatrons
        EntityType.is_counting = True
        try:
            for name in _ENTITIES:
                getattr(megatrons, name).register(getattr(sys.modules[_OURS], name))
        finally:
            EntityType.is_counting = False


class Entity(metaclass=EntityType):
    """Base of the entities. Creating one makes Megatron-Core's classes accept them."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        megatrons = sys.modules.get(_MEGATRON_MODULE)
        if megatrons is not None and megatrons is not EntityType.counted:
            EntityType.count(megatrons)
        return super().__new__(cls)
