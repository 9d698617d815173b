"""Second names of replicated tensors: KEY.__tp_replica_RANK, for one tensor-parallel rank's copy.

A checkpoint lists such tensors under KEY alone, and a load finds them under any such name. So what
is stored can be compared with what is requested only once the request is known.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable
from typing import Any

_SECOND = re.compile(r"(.+)\.__tp_replica_(0|[1-9][0-9]*)", re.DOTALL)


class StoredEntities(dict[str, Any]):
    """The entities of a checkpoint that Tilestone reads, without data, by key or unique key."""

    def as_requested(self, keys: Iterable[str]) -> list[Any]:
        """The entities, each tensor under the names by which these keys request it.

        Args:
            keys: the keys that are requested.
        """
        stored = {entity.key for entity in super().values()}
        requested = set(keys)
        names: dict[str, list[str]] = {}
        for key in sorted(requested - stored):
            found = self._stored_as(key, stored)
            if found is not None:
                names.setdefault(found, [found] if found in requested else []).append(key)
        entities = []
        for entity in super().values():
            for name in names.get(entity.key, [entity.key]):
                named = entity if name == entity.key else copy.copy(entity)
                named.key = name
                entities.append(named)
        return entities

    @staticmethod
    def _stored_as(key: str, stored: set[str]) -> str | None:
        """The stored key that a load takes for a requested one; None if there is none."""
        second = _SECOND.fullmatch(key)
        if second is None:
            return None
        plain = second[1]
        if plain in stored:
            return plain
        others = [name for name in stored if name.startswith(plain)]
        ranks = {name: match for name in others if (match := _SECOND.fullmatch(name))}
        same = [name for name, match in ranks.items() if match[1] == plain]
        return min(same, key=lambda name: int(ranks[name][2]), default=None)


class StockStoredEntities(StoredEntities):
    """The same for Megatron-Core, which compares these values with what is requested.

    Its strategies never learn what is requested before they load, and it leaves out what it does not
    find among these values. So `values` looks for the request among the local variables of the
    function that compares: `local_metadata`, `global_metadata`. For any other caller the tensors
    have their plain names.
    """

    def values(self) -> Any:
        """The entities, under the names by which the calling comparison's ranks request them."""
        local = sys._getframe(1).f_locals
        ranks = [*(local.get("global_metadata") or ()), local.get("local_metadata") or ()]
        if "local_metadata" not in local:
            return super().values()
        return self.as_requested(entity.key for entities in ranks for entity in entities)
