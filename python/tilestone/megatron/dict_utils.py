"""Functions over trees of dicts and lists; anything else, tuples too, is a leaf."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

U, V = TypeVar("U"), TypeVar("V")


def _is_container(x: Any) -> bool:
    return isinstance(x, (dict, list))


def _items(x: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def extract_matching_values(
    x: dict[Any, Any] | list[Any],
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,
) -> tuple[Any, Any]:
    """Divides a tree into two trees of the same nesting: the matching leaves, and all others.

    A container without matching leaves is left out of the first tree; one with only matching leaves
    is left out of the second. An empty container in a dict counts as not matching; one in a list is
    passed to the predicate (as in Megatron-Core). The leaves are the same objects; the containers
    are new.

    Args:
        x: a dict or list.
        predicate: called with each leaf.
        return_lists_as_dicts: turn lists into dicts from index to value, so that values keep their
            index.

    Returns:
        (matching, not matching)

    Raises:
        ValueError: x is neither a dict nor a list.
    """
    if not _is_container(x):
        raise ValueError(f"Unexpected top-level object type: {type(x)}")
    in_dict = isinstance(x, dict)
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for name, value in _items(x):
        if _is_container(value) and (in_dict or value):
            inner, rest = extract_matching_values(value, predicate, return_lists_as_dicts)
            if inner:
                matching[name] = inner
            if rest or not value:
                others[name] = rest
        else:
            (matching if predicate(value) else others)[name] = value
    if in_dict or return_lists_as_dicts:
        return matching, others
    return list(matching.values()), list(others.values())


def diff(
    x1: Any, x2: Any, prefix: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Any], list[Any]]:
    """Compares two trees.

    Lists, tuples and numpy arrays are compared element by element, tensors as a whole, entities
    (objects with a replica_id) by their data. Values that can't be compared differ. Equal tensors
    on different devices are equal; tensors of different shapes differ, even if they broadcast.

    Args:
        x1, x2: any values.
        prefix: path of both, prepended to the paths that are returned.

    Returns:
        (only in x1, only in x2, mismatches). The first two contain paths (tuples) of dict entries,
        and plain indices of the surplus elements of a longer list. A mismatch is (path, type in x1,
        type in x2), followed for tensors by either (number, shape, indices) of the elements that
        differ, or both shapes.
    """
    left: list[Any] = []
    right: list[Any] = []
    wrong: list[Any] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        left += [(*prefix, name) for name in x1 if name not in x2]
        right += [(*prefix, name) for name in x2 if name not in x1]
        pairs = [(name, x1[name], x2[name]) for name in x1 if name in x2]
    elif _are_sequences(x1, x2):
        left += range(len(x1) - 1, len(x2) - 1, -1)
        right += range(len(x2) - 1, len(x1) - 1, -1)
        pairs = [] if _same_array(x1, x2) else [(i, *both) for i, both in enumerate(zip(x1, x2))]
    elif type(x1) is type(x2) and hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
        pairs = [(type(x1), x1.data, x2.data)]
    else:
        wrong += _leaf_mismatch(x1, x2, prefix)
        pairs = []
    for name, one, other in pairs:
        for found, inner in zip((left, right, wrong), diff(one, other, (*prefix, name))):
            found.extend(inner)
    return left, right, wrong


def _are_sequences(x1: Any, x2: Any) -> bool:
    if type(x1) is not type(x2):
        return False
    if isinstance(x1, np.ndarray):
        return bool(x1.ndim and x2.ndim)
    return isinstance(x1, (list, tuple))


def _same_array(x1: Any, x2: Any) -> bool:
    """Whether both are equal arrays of numbers; this avoids comparing each element."""
    if not isinstance(x1, np.ndarray) or x1.dtype.hasobject or x2.dtype.hasobject:
        return False
    return bool(np.array_equal(x1, x2))


def _leaf_mismatch(x1: Any, x2: Any, prefix: tuple[Any, ...]) -> list[Any]:
    """A list with the mismatch of two leaves; empty if they are equal."""
    both = (prefix, type(x1), type(x2))
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        details = _tensor_mismatch(x1, x2)
        return [] if details is None else [both + details]
    try:
        differ = bool(x1 != x2)
    except Exception:  # the value's own comparison may raise; then the values differ
        differ = True
    return [both] if differ else []


def _tensor_mismatch(x1: torch.Tensor, x2: torch.Tensor) -> tuple[Any, ...] | None:
    if x1.shape != x2.shape:
        return (x1.shape, x2.shape)
    if x1.device != x2.device:
        x1, x2 = x1.cpu(), x2.cpu()
    try:
        differing = x1 != x2
        if not torch.any(differing):
            return None
        return (differing.sum(), differing.shape, differing.nonzero().tolist())
    except (RuntimeError, TypeError, ValueError):
        return (x1.shape, x2.shape)


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """The leaves of a tree, in order."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(
    x: dict[Any, Any] | list[Any],
) -> Iterator[tuple[dict[Any, Any] | list[Any], Any, Any]]:
    """Yields (container, key or index, leaf) for each leaf of a tree, in order."""
    for name, value in _items(x):
        if _is_container(value):
            yield from nested_items_iter(value)
        else:
            yield x, name, value


def leaves_by_path(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, leaf) for each leaf of a tree, in order; a leaf is a tree of one."""
    if not _is_container(x):
        yield path, x
        return
    for name, value in _items(x):
        yield from leaves_by_path(value, f"{path}.{name}" if path else str(name))


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replaces each leaf of a tree by f(leaf), in place.

    Returns:
        x itself; f(x) if x is a leaf.
    """
    if isinstance(x, dict):
        for name, value in x.items():
            x[name] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
        return x
    return f(x)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Copies a tree, with each leaf replaced by f(leaf); returns f(x) if x is a leaf."""
    if isinstance(x, dict):
        return {name: dict_list_map_outplace(f, value) for name, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: tuple[str | int, ...] = ()) -> Any:
    """Puts the leaves of x2 into x1, in place.

    Args:
        x1, x2: trees that have no leaf in common; their lists are equally long.
        key: path of both, for errors.

    Returns:
        x1

    Raises:
        ValueError: both have a leaf at a path, or lists of different lengths.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(
                f"Cannot merge two lists with different lengths ({len(x1)} and {len(x2)}, "
                f"encountered at level {key})"
            )
        x1[:] = [merge(one, other, (*key, i)) for i, (one, other) in enumerate(zip(x1, x2))]
    else:
        raise ValueError(
            f"Duplicate non-dict and non-list values encountered: `{x1}` and `{x2}` "
            f"(at level {key})"
        )
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Groups values: a dict from key_fn(x) to reduce_fn([value_fn(x), ...]), in order of xs."""
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
