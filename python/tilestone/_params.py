"""Parameters that the checkpoint lays over other ranks than they say themselves."""

from __future__ import annotations

import operator
from typing import Any

from tilestone import _converters, _core, _placements
from tilestone._converters import Layout
from tilestone._copied_back import CopiedBack
from tilestone._errors import InvalidArgumentError
from tilestone._placements import PlacementRules


class Param:
    """A parameter, and where it is in the checkpoint: what `ShardedTensor.from_param` is given.

    Args:
        param: any array, a DTensor, or an object like one.
        checkpoint_mesh: a Mesh, or a torch DeviceMesh.
        placements: over that mesh: rules, or what `Spec` takes.
        rank: this process's global rank; None: as a torch mesh says.

    Raises:
        InvalidArgumentError, UnsupportedError: as for `ShardedTensor.from_param`.
    """

    __slots__ = ("_mesh", "_param", "_placements", "_rank")

    def __init__(
        self, param: Any, checkpoint_mesh: Any, placements: Any, rank: int | None
    ) -> None:
        self._param = param
        self._mesh = _placements.to_mesh(checkpoint_mesh)
        if rank is None:
            rank = _placements.rank_in(checkpoint_mesh, getattr(param, "device_mesh", None))
        if rank is None:
            raise InvalidArgumentError(
                "neither mesh says which rank this process is", hint="give rank="
            )
        self._rank = operator.index(rank)
        self._placements: PlacementRules | list[_placements.Placement]
        if isinstance(placements, PlacementRules):
            self._placements = placements
        else:
            self._placements = _placements.Spec(placements).over(self._mesh)

    @property
    def needs_name(self) -> bool:
        """Whether the placements follow from the name."""
        return isinstance(self._placements, PlacementRules)

    def check(self) -> None:
        """Raises what is wrong with the parameter alone."""
        self._layout(None)

    def entity(self, key: str, for_load: bool | None) -> _core.ShardedTensor:
        """The sharded tensor of a name: for a load, for a save, or (None) to tell its place."""
        local, shape, mesh, own = self._layout(for_load)
        given = self._placements
        over = given.over(key, self._mesh) if isinstance(given, PlacementRules) else given
        return _core.ShardedTensor.from_param(
            key, local, shape, mesh, own, self._mesh, over, self._rank
        )

    def _layout(self, for_load: bool | None) -> Layout:
        """How the parameter lies over its own mesh: a plain array is whole on this rank."""
        converter = _converters.find(self._param)
        found = None if converter is None else converter.layout(self._param, for_load)
        if found is not None:
            return found
        if hasattr(self._param, "device_mesh") and hasattr(self._param, "placements"):
            return _like_dtensor(self._param, for_load)
        local = _local_view(self._param, for_load)
        return Layout(local, local.shape, _core.Mesh((), [self._rank]), [])


def _local_view(array: Any, for_load: bool | None) -> _core.TensorView:
    if for_load is None:
        return _converters.description(array)
    return _converters.view(array, for_load)


def _like_dtensor(param: Any, for_load: bool | None) -> Layout:
    """The layout of an object that is like a DTensor; a load gives back the object."""
    if not callable(getattr(param, "to_local", None)):
        raise InvalidArgumentError(
            f"a {type(param).__name__} has device_mesh and placements, but no to_local()"
        )
    local = _local_view(param.to_local(), for_load)
    if for_load:
        local = local.with_owner(CopiedBack(local.owner, param, lambda target, _: target))
    return Layout(
        local,
        tuple(param.shape),
        _placements.to_mesh(param.device_mesh),
        [_placements.to_placement(each) for each in param.placements],
    )
