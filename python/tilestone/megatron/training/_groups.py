"""The process groups of a save or load of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Dict

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import groups
from tilestone.megatron.training import _arguments

_SHARING = {"dp": "dp_cp", "ep_dp": "expt_dp"}


@dataclass(frozen=True)
class Groups:
    """The groups that the caller gave, and a module that may have others. Each group is looked up
    on its own, when it is needed."""

    arguments: Mapping[str, Any]
    module: Any = None

    @staticmethod
    def given(tp: Any, pp: Any, dp_cp: Any, dp: Any, expt_dp: Any) -> Groups:
        """Makes Groups of the arguments of a call."""
        return Groups({"tp": tp, "pp": pp, "dp_cp": dp_cp, "dp": dp, "expt_dp": expt_dp})

    def of_module(self, module: Any) -> Groups:
        """The same Groups; groups that were not given are taken from a module if it has them."""
        return replace(self, module=module)

    def find(self, name: str) -> groups.Group:
        """Looks up a group by its name.

        Raises:
            InvalidArgumentError: the group is not known.
        """
        return groups.find_group(name, self.arguments[name], self.module)

    def sharing(self, args: Any, argument: str) -> groups.Group:
        """The ranks that share the work of a fully parallel save or load.

        Raises:
            InvalidArgumentError: the argument does not name a group, or that group is not known.
        """
        named = _arguments.read(args, argument)
        if named not in _SHARING:
            raise InvalidArgumentError(f"args.{argument} must be 'dp' or 'ep_dp', not {named!r}")
        found = self.find(_SHARING[named])
        if found.size() > 1 and found.process_group is None:
            raise InvalidArgumentError(
                f"{_SHARING[named]}_group has no process group, which its ranks need to share work"
            )
        return found

    def for_random_states(self, args: Any) -> Dict[str, Any]:
        """Returns the groups as arguments of get_rng_state().

        Raises:
            InvalidArgumentError: a group is not known.
        """
        found = {f"{name}_group": self.find(name) for name in ("tp", "pp", "dp_cp")}
        if _arguments.read(args, "data_parallel_random_init"):
            found["dp_group"] = self.find("dp")
        return found
