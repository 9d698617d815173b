"""Meshes and placements as callers give them, torch's or Tilestone's, and rules that name them.

torch is not imported: its meshes and placements are known by what they can do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError, UnsupportedError

Placement: TypeAlias = _core.Shard | _core.StridedShard | _core.Replicate | _core.Partial
_KINDS = (_core.Shard, _core.StridedShard, _core.Replicate, _core.Partial)


def to_placement(given: Any) -> Placement:
    """A placement of Tilestone's or torch's, or a class of either that needs no argument.

    Raises:
        InvalidArgumentError: it is no placement.
        UnsupportedError: a placement of torch's that Tilestone doesn't know.
    """
    if isinstance(given, _KINDS):
        return given
    if isinstance(given, type) and given.__name__ in ("Replicate", "Partial"):
        return to_placement(given())
    if isinstance(given, type) or not hasattr(given, "is_replicate"):
        raise InvalidArgumentError(f"a placement is Shard(dim) or Replicate, not {given!r}")
    split = getattr(given, "split_factor", None)
    if split is not None:
        return _core.StridedShard(given.dim, int(split))
    if given.is_partial():
        return _core.Partial()
    if given.is_replicate():
        return _core.Replicate()
    if given.is_shard():
        return _core.Shard(given.dim)
    raise UnsupportedError(f"placement {given} is not supported")


@functools.lru_cache(maxsize=64)
def _of_device_mesh(device_mesh: Any) -> _core.Mesh:
    ranks = device_mesh.mesh
    names = list(device_mesh.mesh_dim_names or ())
    return _core.Mesh(tuple(ranks.shape), [int(rank) for rank in ranks.flatten().tolist()], names)


def to_mesh(given: Any) -> _core.Mesh:
    """A Mesh of global ranks, from one or from a torch DeviceMesh.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(given, _core.Mesh):
        return given
    if hasattr(given, "mesh") and hasattr(given, "mesh_dim_names"):
        return _of_device_mesh(given)
    kind = type(given).__name__
    raise InvalidArgumentError(
        f"a mesh is a torch DeviceMesh or a tilestone.geometry.Mesh, not {kind}"
    )


def rank_in(*meshes: Any) -> int | None:
    """This process's global rank as torch's meshes among these say it; None where there is none."""
    for mesh in meshes:
        if hasattr(mesh, "get_rank"):
            return int(mesh.get_rank())
    return None


class Spec:
    """Placements over a mesh that is not known yet: one for all its dims, or for each, or by name.

    Args:
        given: a placement (over a mesh of one dim; Replicate over any), a sequence with one for
            each mesh dim, or a mapping from names of mesh dims, the others being Replicate.

    Raises:
        InvalidArgumentError, UnsupportedError: as for `to_placement`.
    """

    __slots__ = ("_by_name", "_in_order", "_one")

    def __init__(self, given: Any) -> None:
        self._one: Placement | None = None
        self._in_order: list[Placement] | None = None
        self._by_name: dict[str, Placement] | None = None
        if isinstance(given, Mapping):
            self._by_name = {str(name): to_placement(each) for name, each in given.items()}
        elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
            self._in_order = [to_placement(each) for each in given]
        else:
            self._one = to_placement(given)

    def over(self, mesh: _core.Mesh) -> list[Placement]:
        """One placement for each dim of the mesh.

        Raises:
            InvalidArgumentError: the mesh has other dims.
        """
        count = len(mesh.shape)
        if self._by_name is not None:
            unknown = sorted(set(self._by_name) - set(mesh.names))
            if unknown:
                raise InvalidArgumentError(
                    f"the checkpoint's mesh has the dims {list(mesh.names)}, not {unknown[0]!r}"
                )
            replicate = _core.Replicate()
            named: list[Placement] = [self._by_name.get(name, replicate) for name in mesh.names]
            return named if named else [replicate] * count
        if self._in_order is not None:
            if len(self._in_order) != count:
                raise InvalidArgumentError(
                    f"{len(self._in_order)} placements for the {count} dims of the checkpoint's mesh"
                )
            return list(self._in_order)
        assert self._one is not None
        if count != 1 and not isinstance(self._one, _core.Replicate):
            raise InvalidArgumentError(
                f"{self._one!r} alone does not say over which of the {count} dims of the "
                "checkpoint's mesh",
                hint="give one placement for each dim, or {name of a dim: placement}",
            )
        return [self._one] * count


def _of_rule(error: CheckpointError, pattern: str) -> CheckpointError:
    return type(error)(f"rule {pattern!r}: {error.message}", hint=error.hint)


class PlacementRules:
    """How the checkpoint lays parameters over its mesh, by their names.

        rules = PlacementRules({
            "experts": {"ep": Shard(0)},
            "experts.router": Replicate,
            "head": {"tp": Shard(0)},
            "hc_head.*": Replicate,
        })

    A pattern is a dotted path of whole components: literal ones, `*` for any one component, `**`
    for any number of them, also none. It fits a name in which it matches a run of components:
    "head" fits "head.weight" and "model.head.weight", and neither "hc_head.weight" nor
    "heads.weight".

    Of the patterns that fit a name the most specific one counts: the one with more literal
    components; of those with as many the one with more `*`, which is the longer; of those the one
    with fewer `**`. The order in which they are given has no meaning. A name that no pattern fits
    keeps the parameter's own placements.

    Args:
        rules: pattern -> placements over the checkpoint's mesh: a placement (torch's, Tilestone's,
            or the class Replicate) over a mesh of one dim, and Replicate over any; a sequence with
            one for each mesh dim; or a mapping from the names of mesh dims, where the dims that it
            does not name are Replicate.

    Raises:
        InvalidArgumentError: a pattern that is no dotted path, or what is no placement.
        UnsupportedError: a placement of torch's that Tilestone doesn't know.
    """

    __slots__ = ("_patterns", "_specs")

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._patterns: list[str] = []
        self._specs: list[Spec] = []
        for pattern, given in rules.items():
            if not isinstance(pattern, str) or not all(pattern.split(".")):
                raise InvalidArgumentError(f"a rule's pattern is a dotted path, not {pattern!r}")
            try:
                self._specs.append(Spec(given))
            except (InvalidArgumentError, UnsupportedError) as error:
                raise _of_rule(error, pattern) from error
            self._patterns.append(pattern)

    def find(self, name: str) -> str | None:
        """The pattern that counts for a name; None: none fits.

        Raises:
            InvalidArgumentError: two patterns that fit are equally specific.
        """
        place = _core.find_rule(self._patterns, name)
        return None if place is None else self._patterns[place]

    def over(self, name: str, mesh: _core.Mesh) -> list[Placement]:
        """The placements of a name over the dims of a mesh; all Replicate where no pattern fits.

        Raises:
            InvalidArgumentError: as for `find`, or the mesh has other dims than the rule.
        """
        place = _core.find_rule(self._patterns, name)
        if place is None:
            return [_core.Replicate()] * len(mesh.shape)
        try:
            return self._specs[place].over(mesh)
        except InvalidArgumentError as error:
            raise _of_rule(error, self._patterns[place]) from error

    def __repr__(self) -> str:
        return f"PlacementRules({self._patterns})"
