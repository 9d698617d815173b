"""Which ranks hold the same shard: what entities know of it beside Megatron-Core's fields."""

from __future__ import annotations

from typing import Any, Optional, Tuple


class Held:
    """An entity that may know its holders.

    Attributes:
        replica_id: which copy of its data this is.
        holders: global ranks that hold the same data, this one included; None: not known. Whoever
            gives the entity another replica_id changes what it is a copy of, so they are not known
            any more.
    """

    replica_id: Any
    holders: Optional[Tuple[int, ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "replica_id" and "holders" in vars(self) and value != self.replica_id:
            object.__setattr__(self, "holders", None)
        object.__setattr__(self, name, value)


def passed_on(factory: Held, built: Any) -> Any:
    """A subtree that a factory has built; entities in it get its holders, in place.

    Those that know their own keep them, and so does what has another replica_id.
    """
    if factory.holders is not None:
        _pass_on(factory, built)
    return built


def _pass_on(factory: Held, built: Any) -> None:
    if isinstance(built, (dict, list)):
        for inner in built.values() if isinstance(built, dict) else built:
            _pass_on(factory, inner)
    elif isinstance(built, Held) and built.holders is None:
        if built.replica_id == factory.replica_id:
            built.holders = factory.holders
