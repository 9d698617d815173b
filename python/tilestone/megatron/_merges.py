"""Merging of the loaded subtrees that belong to factories."""

from __future__ import annotations

from typing import Any, Tuple


def merged(loaded: Any, factories: Any, path: Tuple[Any, ...], kind: type) -> Any:
    """Replaces the loaded subtrees of factories by the merged values, in place.

    Args:
        loaded: the loaded state.
        factories: a tree of the factories, each in its place. A list may be a dict from index to
            value.
        path: path of both, for error messages.
        kind: class of the factories.

    Returns:
        loaded; the merged value if factories is itself a factory.

    Raises:
        ValueError: loaded lacks the place of a factory.
    """
    if isinstance(factories, kind):
        return factories.merge_fn(loaded)  # type: ignore[attr-defined]
    _check_places(loaded, factories, path)
    places = factories.items() if isinstance(factories, dict) else enumerate(factories)
    for name, inner in places:
        loaded[name] = merged(loaded[name], inner, (*path, name), kind)
    return loaded


def _check_places(loaded: Any, factories: Any, path: Tuple[Any, ...]) -> None:
    """Raises if loaded lacks the place of a factory."""
    where = "/".join(map(str, path)) or "the top"
    if isinstance(loaded, dict) and isinstance(factories, dict):
        lacking = [name for name in factories if name not in loaded]
        if lacking:
            raise ValueError(f"{lacking} of the factories was not loaded at {where}")
    elif isinstance(loaded, list) and isinstance(factories, list):
        if len(loaded) != len(factories):
            raise ValueError(
                f"{len(loaded)} elements were loaded at {where}, but there are {len(factories)} "
                "factories"
            )
    elif isinstance(loaded, list) and isinstance(factories, dict):
        for name in factories:
            if not isinstance(name, int) or not 0 <= name < len(loaded):
                raise ValueError(
                    f"{name} is not an index of the {len(loaded)} elements loaded at {where}"
                )
    else:
        raise ValueError(
            f"a {type(loaded).__name__} was loaded at {where}, but its factories are in a "
            f"{type(factories).__name__}"
        )
