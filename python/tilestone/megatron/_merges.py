"""What a load does with the subtrees that factories stand for."""

from __future__ import annotations

from typing import Any, Tuple


def merged(loaded: Any, factories: Any, path: Tuple[Any, ...], kind: type) -> Any:
    """Puts what factories merge in the places of their loaded subtrees, in place.

    Args:
        loaded: what was loaded.
        factories: a tree of the factories at their places. A list may be a dict from index to value.
        path: of both, for errors.
        kind: the factories' class.

    Returns:
        loaded; the merged value where factories is a factory itself.

    Raises:
        ValueError: loaded lacks a place of factories.
    """
    if isinstance(factories, kind):
        return factories.merge_fn(loaded)  # type: ignore[attr-defined]
    _check_places(loaded, factories, path)
    places = factories.items() if isinstance(factories, dict) else enumerate(factories)
    for name, inner in places:
        loaded[name] = merged(loaded[name], inner, (*path, name), kind)
    return loaded


def _check_places(loaded: Any, factories: Any, path: Tuple[Any, ...]) -> None:
    """Raises where loaded lacks a place of factories."""
    where = "/".join(map(str, path)) or "the top"
    if isinstance(loaded, dict) and isinstance(factories, dict):
        lacking = [name for name in factories if name not in loaded]
        if lacking:
            raise ValueError(f"no {lacking} was loaded at {where}, where factories stand")
    elif isinstance(loaded, list) and isinstance(factories, list):
        if len(loaded) != len(factories):
            raise ValueError(
                f"a list at {where} has {len(loaded)} loaded elements and {len(factories)} factories"
            )
    elif isinstance(loaded, list) and isinstance(factories, dict):
        for name in factories:
            if not isinstance(name, int) or not 0 <= name < len(loaded):
                raise ValueError(f"{name} is no index of the {len(loaded)} elements at {where}")
    else:
        raise ValueError(
            f"a {type(loaded).__name__} was loaded at {where}, where a {type(factories).__name__} "
            "of factories stands"
        )
