"""What callers give: boxes, flat ranges, meshes, placements, and rules by name for placements.

torch is not imported: its meshes and placements are recognised by their attributes and methods.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError, UnsupportedError

Placement: TypeAlias = _core.Shard | _core.StridedShard | _core.Replicate | _core.Partial
_KINDS = (_core.Shard, _core.StridedShard, _core.Replicate, _core.Partial)


def to_placement(given: Any) -> Placement:
    """Converts a placement of Tilestone or torch, or a placement class that needs no argument.

    Raises:
        InvalidArgumentError: it is not a placement.
        UnsupportedError: Tilestone doesn't know this placement of torch's.
    """
    if isinstance(given, _KINDS):
        return given
    if isinstance(given, type) and given.__name__ in ("Replicate", "Partial"):
        return to_placement(given())
    if isinstance(given, type) or not hasattr(given, "is_replicate"):
        raise InvalidArgumentError(f"a placement must be Shard(dim) or Replicate, not {given!r}")
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
def _of_device_mesh(device_mesh: Any) -> _core.Mesh | None:
    # torch computes this tensor anew for each caller, which takes as long as converting a tensor.
    ranks = getattr(device_mesh, "mesh", None)
    if ranks is None:
        return None
    names = list(device_mesh.mesh_dim_names or ())
    return _core.Mesh(tuple(ranks.shape), [int(rank) for rank in ranks.flatten().tolist()], names)


def to_mesh(given: Any) -> _core.Mesh:
    """A Mesh of global ranks, from a Mesh or a torch DeviceMesh.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(given, _core.Mesh):
        return given
    mesh = _of_device_mesh(given) if hasattr(given, "mesh_dim_names") else None
    if mesh is not None:
        return mesh
    kind = type(given).__name__
    raise InvalidArgumentError(
        f"a mesh must be a torch DeviceMesh or a tilestone.geometry.Mesh, not {kind}"
    )


def in_order(
    mesh: _core.Mesh, placements: Sequence[Placement], order: Sequence[Sequence[int]]
) -> tuple[_core.Mesh, list[Placement]]:
    """The same sharding, with the mesh dims of each tensor dim from outer to inner.

    Args:
        order: for each tensor dim that is sharded, its mesh dims from outer to inner (torch's
            `shard_order`). Empty: left to right, as placements say.

    Raises:
        InvalidArgumentError: the order does not list the mesh dims that the placements shard.
    """
    if all(list(dims) == sorted(dims) for dims in order):
        return mesh, list(placements)
    listed = [dim for dims in order for dim in dims]
    sharded = {d: p.dim for d, p in enumerate(placements) if isinstance(p, _core.Shard)}
    if sorted(listed) != [*sharded] or any(len({sharded[d] for d in o}) > 1 for o in order):
        raise InvalidArgumentError(
            f"shard_order {[tuple(dims) for dims in order]} is not an order of the mesh dims that "
            f"the placements {list(placements)} shard"
        )
    dims = [d for d in range(len(placements)) if d not in listed] + listed
    ranks = numpy.array(mesh.ranks).reshape(mesh.shape).transpose(dims)
    names = [mesh.names[d] for d in dims] if mesh.names else []
    turned = _core.Mesh(ranks.shape, ranks.flatten().tolist(), names)
    return turned, [placements[d] for d in dims]


def rank_in(*meshes: Any) -> int | None:
    """This process's global rank from the first torch mesh among these; None if there is none."""
    for mesh in meshes:
        if hasattr(mesh, "get_rank"):
            return int(mesh.get_rank())
    return None


class Spec:
    """Placements over a mesh that is not known yet: one placement, one for each dim, or by name.

    Args:
        given: one placement (any for a mesh with one dim, Replicate for any mesh); a sequence with
            one for each mesh dim; or a mapping from names of mesh dims to placements, in which
            missing dims are Replicate.

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
            InvalidArgumentError: the placements don't fit the mesh's dims.
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
                    f"got {len(self._in_order)} placements for the {count} dims of the "
                    "checkpoint's mesh"
                )
            return list(self._in_order)
        assert self._one is not None
        if count != 1 and not isinstance(self._one, _core.Replicate):
            raise InvalidArgumentError(
                f"{self._one!r} does not say which of the {count} dims of the checkpoint's mesh it "
                "is for",
                hint="give one placement for each dim, or {name of a dim: placement}",
            )
        return [self._one] * count


def _of_rule(error: CheckpointError, pattern: str) -> CheckpointError:
    return type(error)(f"rule {pattern!r}: {error.message}", hint=error.hint)


class PlacementRules:
    """How the checkpoint shards parameters over its mesh, by the parameters' names.

        rules = PlacementRules({
            "experts": {"ep": Shard(0)},
            "experts.router": Replicate,
            "head": {"tp": Shard(0)},
            "hc_head.*": Replicate,
        })

    A pattern is a dotted path of whole components. A component is literal, `*` for exactly one
    component, or `**` for any number of components, including none. A pattern matches a name if it
    matches a run of consecutive components in the name: "head" matches "head.weight" and
    "model.head.weight", but not "hc_head.weight" or "heads.weight".

    If several patterns match a name, the most specific one is used: the one with more literal
    components; if equal, the one with more `*`, which is longer; if still equal, the one with fewer
    `**`. The order of the rules does not matter. If no pattern matches, the parameter keeps its own
    placements, and the first save of such a DTensor says so at level WARNING if the
    checkpoint's mesh has ranks that its own mesh lacks.

    Args:
        rules: pattern -> placements over the checkpoint's mesh: one placement (of torch, of
            Tilestone, or the class Replicate; any for a mesh with one dim, Replicate for any mesh);
            a sequence with one for each mesh dim; or a mapping from names of mesh dims to
            placements, in which missing dims are Replicate.

    Raises:
        InvalidArgumentError: a pattern is not a dotted path, or a value is not a placement.
        UnsupportedError: Tilestone doesn't know one of torch's placements.
    """

    __slots__ = ("_patterns", "_specs", "has_warned")

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self.has_warned = False  # of a name that no rule fits
        self._patterns: list[str] = []
        self._specs: list[Spec] = []
        for pattern, given in rules.items():
            if not isinstance(pattern, str) or not all(pattern.split(".")):
                raise InvalidArgumentError(
                    f"a rule's pattern must be a dotted path, not {pattern!r}"
                )
            try:
                self._specs.append(Spec(given))
            except (InvalidArgumentError, UnsupportedError) as error:
                raise _of_rule(error, pattern) from error
            self._patterns.append(pattern)

    def find(self, name: str) -> str | None:
        """The pattern that is used for a name; None if no pattern matches.

        Raises:
            InvalidArgumentError: two matching patterns are equally specific.
        """
        place = _core.find_rule(self._patterns, name)
        return None if place is None else self._patterns[place]

    def over(self, name: str, mesh: _core.Mesh) -> list[Placement]:
        """The placements of a name over the dims of a mesh; all Replicate if no pattern matches.

        Raises:
            InvalidArgumentError: as for `find`, or the rule doesn't fit the mesh's dims.
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


# ---- Boxes and flat ranges ----

BoxLike: TypeAlias = _core.Box | Sequence[tuple[int, int] | slice]


def flat_range(key: str, flattened_range: slice | tuple[int, int]) -> tuple[int, int]:
    """(begin, end) of the flat range of this key."""
    pair: Any = flattened_range
    if isinstance(flattened_range, slice) and flattened_range.step in (None, 1):
        pair = (flattened_range.start, flattened_range.stop)
    try:
        begin, end = pair
        return operator.index(begin), operator.index(end)
    except (TypeError, ValueError):
        what = f"flattened_range must be slice(begin, end) or (begin, end), not {flattened_range!r}"
        raise InvalidArgumentError(what, key=str(key)) from None


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Adds the key to an error that does not name one."""
    try:
        yield
    except CheckpointError as error:
        error.add_key(str(key))
        raise


def box_of(key: str, box: _core.Box | Sequence[tuple[int, int]]) -> _core.Box:
    """The box of this key."""
    with naming(key):
        return to_box(box)


def to_box(box: BoxLike) -> _core.Box:
    """A Box from (start, stop) pairs or slices with both ends.

    Raises:
        InvalidArgumentError: it is something else; a start or stop is missing or is not a 64-bit
            whole number; or a stop is before its start.
    """
    if isinstance(box, _core.Box):
        return box
    try:
        pairs = [_ends(part) for part in box]
        offset, shape = [start for start, _ in pairs], [stop - start for start, stop in pairs]
    except TypeError:
        offset, shape = [-1], []
    if len(offset) != len(shape) or any(not 0 <= n < 1 << 63 for n in offset + shape):
        raise InvalidArgumentError(f"a box must be (start, stop) for each dim, not {box!r}")
    return _core.Box(offset, shape)


def _ends(part: Any) -> tuple[int, int]:
    """(start, stop) of one dim of a box; TypeError if it is neither a pair nor a slice."""
    if isinstance(part, (str, bytes)) or (isinstance(part, slice) and part.step not in (None, 1)):
        raise TypeError
    ends: tuple[Any, ...] = (
        (part.start, part.stop) if isinstance(part, slice) else tuple(part)
    )
    if len(ends) != 2:
        raise TypeError
    return operator.index(ends[0]), operator.index(ends[1])
