"""The holders of an entity: the ranks that hold the same shard, beside Megatron-Core's fields."""

from __future__ import annotations

from typing import Any, Optional, Tuple


class WithHolders:
    """An entity whose holders may be known.

    Attributes:
        replica_id: which copy of its data this is.
        holders: global ranks that hold the same data, including this one; None: not known. Setting
            another replica_id sets it to None, because the entity is then a copy of other data.
    """

    replica_id: Any
    holders: Optional[Tuple[int, ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "replica_id" and "holders" in vars(self) and value != self.replica_id:
            object.__setattr__(self, "holders", None)
        object.__setattr__(self, name, value)


def passed_on(factory: WithHolders, built: Any) -> Any:
    """Gives the entities of a subtree that a factory has built the factory's holders, in place.

    Entities that have holders keep them. Entities with another replica_id get none.
    """
    if factory.holders is not None:
        _pass_on(factory, built)
    return built


def _pass_on(factory: WithHolders, built: Any) -> None:
    if isinstance(built, (dict, list)):
        for inner in built.values() if isinstance(built, dict) else built:
            _pass_on(factory, inner)
    elif isinstance(built, WithHolders) and built.holders is None:
        if built.replica_id == factory.replica_id:
            built.holders = factory.holders
