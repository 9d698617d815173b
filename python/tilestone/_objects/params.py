"""Parameters whose sharding in the checkpoint is not the one that they state themselves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from tilestone import _core
from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._objects import converters, given
from tilestone._objects.converters import CopiedBack, Layout
from tilestone._objects.given import Placement, PlacementRules
from tilestone._options import valid
from tilestone._protocols import DeviceMeshLike, DtensorLike, PlacementLike, SupportsDlpack

ParamLike: TypeAlias = SupportsDlpack | DtensorLike
MeshLike: TypeAlias = _core.Mesh | DeviceMeshLike
#: One placement, or a placement's class that needs no argument.
OnePlacement: TypeAlias = Placement | PlacementLike | type[Placement] | type[PlacementLike]
PlacementsLike: TypeAlias = (
    PlacementRules | OnePlacement | Sequence[OnePlacement] | Mapping[str, OnePlacement]
)


_log = logging.getLogger("tilestone")


class Param:
    """A parameter and its position in the checkpoint: the arguments of `ShardedTensor.from_param`.

    Args:
        param: any array, a DTensor, or an object like a DTensor.
        checkpoint_mesh: a Mesh, or a torch DeviceMesh.
        placements: placements over that mesh: PlacementRules, or what `Spec` takes.
        rank: this process's global rank; None: the rank that a torch mesh states.

    Raises:
        InvalidArgumentError, UnsupportedError: as for `ShardedTensor.from_param`.
    """

    __slots__ = ("_mesh", "_of", "_param", "_placements", "_rank")

    def __init__(
        self,
        param: ParamLike,
        checkpoint_mesh: MeshLike,
        placements: PlacementsLike,
        rank: int | None,
    ) -> None:
        self._param = param
        self._of: ParamLike | None = None  # the parameter whose state `param` is
        self._mesh = given.to_mesh(checkpoint_mesh)
        if rank is None:
            rank = given.rank_in(checkpoint_mesh, getattr(param, "device_mesh", None))
        if rank is None:
            raise InvalidArgumentError(
                "neither mesh says which rank this process is", hint="pass rank="
            )
        self._rank = valid.whole("rank", rank)
        self._placements: PlacementRules | list[given.Placement]
        if isinstance(placements, PlacementRules):
            self._placements = placements
        else:
            self._placements = given.Spec(placements).over(self._mesh)

    @property
    def needs_name(self) -> bool:
        """Whether the placements depend on the tensor's name."""
        return isinstance(self._placements, PlacementRules)

    def check(self) -> None:
        """Raises the errors that can be found in the parameter alone, without its name."""
        if self._own_part("", None) is None:
            self._layout(None)

    def of_state(self, state: ParamLike) -> Param:
        """The place of an optimizer's state of the parameter: that of the parameter.

        Args:
            state: an array of the parameter's local shape, or one that is sharded as it is.
        """
        made = copy.copy(self)
        made._param, made._of = state, self._param
        return made

    def entity(
        self, key: str, for_load: bool | None, name: str | None = None
    ) -> _core.ShardedTensor:
        """The sharded tensor under a key.

        Args:
            name: to which the rules apply; by default the key.
            for_load: True for a load, False for a save, None if only the position is needed.
        """
        over = self._placements
        if isinstance(over, PlacementRules):
            over = over.over(name or key, self._mesh)
        if all(isinstance(each, _core.Replicate) for each in over):
            part = self._own_part(key, for_load)
            if part is not None:
                return part
        local, shape, mesh, own = self._layout(for_load)
        if for_load is False and own:
            self._say_if_no_rule_fits(name or key, mesh)
        return _core.ShardedTensor.from_param(
            key, local, shape, mesh, own, self._mesh, over, self._rank
        )

    def _say_if_no_rule_fits(self, name: str, own: _core.Mesh) -> None:
        rules = self._placements
        if not isinstance(rules, PlacementRules) or rules.has_warned or rules.find(name):
            return
        if not set(self._mesh.ranks) <= set(own.ranks):
            rules.has_warned = True
            _log.warning(
                "%s: no rule fits this name, so the ranks outside the parameter's own mesh count as "
                "copies of those in it, and their elements are not saved; a rule '**': Replicate "
                "says that this is meant",
                name,
            )

    def _own_part(self, key: str, for_load: bool | None) -> _core.ShardedTensor | None:
        """The sharded tensor of a parameter that says itself where it stands."""
        converter = converters.find(self._param)
        part = None if converter is None else converter.part(self._param, key, for_load)
        return cast("_core.ShardedTensor | None", part)

    def _layout(self, for_load: bool | None) -> Layout:
        """How the parameter is sharded over its own mesh; a plain array is whole on this rank."""
        converter = converters.find(self._param)
        found = None if converter is None else converter.layout(self._param, for_load)
        if found is not None:
            return found
        if hasattr(self._param, "device_mesh") and hasattr(self._param, "placements"):
            return _like_dtensor(cast("DtensorLike", self._param), for_load)
        local = converters.view(self._param, for_load)
        if self._of is None:
            return Layout(local, local.shape, _core.Mesh((), [self._rank]), [])
        parameter = self.of_state(self._of)
        parameter._of = None
        found = parameter._layout(None)
        if local.shape != found.view.shape:
            raise MismatchError(
                f"optimizer state of shape {tuple(local.shape)} belongs to a parameter of local "
                f"shape {tuple(found.view.shape)}"
            )
        return found._replace(view=local)


def _like_dtensor(param: DtensorLike, for_load: bool | None) -> Layout:
    """The layout of an object that is like a DTensor; a load returns the object itself."""
    if not callable(getattr(param, "to_local", None)):
        raise InvalidArgumentError(
            f"a {type(param).__name__} has device_mesh and placements, but no to_local()"
        )
    local = converters.view(param.to_local(), for_load)
    if for_load:
        local = local.with_owner(CopiedBack(local.owner, param, lambda target, _: target))
    return Layout(
        local,
        tuple(param.shape),
        given.to_mesh(param.device_mesh),
        [given.to_placement(each) for each in param.placements],
    )
