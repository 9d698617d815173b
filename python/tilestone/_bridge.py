"""Python's side of the binding: what the engine asks of objects, and says of them.

What an object of a foreign type is, the registry of converters says (`_converters`). torch is
never imported here: an object can only be torch's when torch is already loaded.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from tilestone import (
    _containers,
    _converters,
    _core,
    _entities,
    _leaves,
    _megatron,
    _numpy,
    _object_arrays,
    _pickling,
)
from tilestone._copied_back import CopiedBack
from tilestone._dtypes import DType, native_type
from tilestone._errors import InvalidArgumentError
from tilestone._opaque import Opaque, make
from tilestone._stateful import Statefuls, below, is_stateful

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Imported for the converters that they register.
_REGISTERED = (_entities, _megatron, _numpy)


class _DtypeConverter(_converters.Converter):
    def in_value(self, item: Any) -> Any:
        return str(item)


class _OpaqueConverter(_converters.Converter):
    def in_value(self, item: Any) -> Any:
        return item


def _register_torchs() -> None:
    from tilestone import _torch_bridge

    _torch_bridge.register()


_converters.add(DType, _DtypeConverter())
_converters.add(Opaque, _OpaqueConverter())
_converters.add_lazily("torch", _register_torchs)

_torch_module: Any = None  # tilestone._torch_bridge, from the first call with torch loaded on


def _torch() -> Any:
    """The module tilestone._torch_bridge, or None while torch is not loaded."""
    global _torch_module
    if _torch_module is None and "torch" in sys.modules:
        from tilestone import _torch_bridge

        _torch_module = _torch_bridge
    return _torch_module


def written(filled: _core.TensorView, array: Any) -> None:
    """After the view that view_to_fill gave was filled."""
    if isinstance(filled.owner, CopiedBack):
        filled.owner.finish()
    note_written([array])


def note_written(arrays: list[Any]) -> None:
    """Marks memory of arrays as written for autograd, as torch's copy_ does."""
    torch = _torch()
    if torch is not None:
        torch.note_written(arrays)


class Bridge:
    """One call's view of Python's objects; the binding calls its methods.

    Args:
        for_load: the tree is a template that a load fills.
        allow: names of the classes of which objects may be made.
        framework: "torch", "numpy" or None: torch when it is loaded.
        group: the torch process group, where ranks of DTensors must be translated.
        ranks: how many ranks take part.
        by_rule: ranks agree without a word, so that every rank is taken to hold a plain array.
        rank: which of the ranks this one is; rank 0 logs what all have in common.
        harmless: names of further classes, for those of them that can be imported.
        common: what is not sharded is saved as common state, whose keys stay as they are.
    """

    def __init__(
        self,
        for_load: bool = False,
        allow: frozenset[str] = frozenset(),
        framework: str | None = None,
        group: ProcessGroup | None = None,
        ranks: int = 1,
        by_rule: bool = False,
        rank: int = 0,
        harmless: frozenset[str] = frozenset(),
        common: bool = False,
    ) -> None:
        self.for_load = for_load
        self.allow = allow
        self.harmless = harmless
        self.framework = framework
        self.group = group
        self.ranks = ranks
        self.by_rule = by_rule
        self.rank = rank
        self.common = common
        self._unpacked: dict[Any, Any] = {}
        self._replaced: dict[int, tuple[Any, Any, Callable[[Any], Any]]] = {}  # by id of the first
        self._statefuls = Statefuls()

    def unpack(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state as a dict."""
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(f"a state is a dict, not {type(state).__name__}")
        self._unpacked = state if isinstance(state, dict) else dict(state.items())
        return self._unpacked

    def unpacked(self) -> dict[Any, Any]:
        """What unpack made."""
        return self._unpacked

    def is_entity(self, item: Any) -> bool:
        """Whether an object in a list is a part of the tree: an array, an entity, a Stateful."""
        converter = _converters.find(item)
        return converter is not None and converter.in_tree or is_stateful(item)

    def describe(self, item: Any, path: str) -> Any:
        """A view or entity of the engine; None for an object that is neither.

        Of a Stateful, a tuple: its state dict, and the paths in it of which a load takes all.
        """
        converter = _converters.find(item)
        found = None if converter is None else converter.node(item, path, self)
        if found is None and is_stateful(item):
            state = self._statefuls.enter(item)
            return state, below(item, state) if self.for_load else ()
        return found

    def check_container(self, container: _containers.Container) -> None:
        """Refuses a container that a load could not give back."""
        _containers.check(container)

    def log_attributes(self, container: _containers.Container, key: str) -> None:
        """Logs what a save does not keep of a container of a class of its own."""
        if not self.for_load and self.rank == 0:
            _containers.warn(container, key)

    def rebuilt(
        self, original: _containers.Container, contents: _containers.Contents
    ) -> _containers.Container:
        """A container of the class of the template's."""
        return _containers.rebuilt(original, contents)

    def filled_by(self, original: Any, made: Any) -> Any:
        """What a load gives back for a leaf: a template's array, filled by the stored object."""
        return _object_arrays.filled_by(original, made, _torch())

    def replace(self, item: Any, made: Any, restore: Callable[[Any], Any]) -> None:
        """Notes what a converter put in the item's place, and what undoes it after a load."""
        if self.for_load:
            self._replaced[id(item)] = (item, made, restore)

    def replaced(self) -> list[int]:
        """id() of the template's objects in whose place something else was filled."""
        return [*self._statefuls.ids(), *self._replaced]

    def stand_in_of(self, item: Any) -> Any:
        """What was filled in the item's place: a Stateful's state dict, what a converter made."""
        if id(item) in self._replaced:
            return self._replaced[id(item)][1]
        return self._statefuls.state_of(item)

    def restored(self, item: Any, loaded: Any) -> Any:
        """What the load gives back for the item; `loaded`: what was loaded for its stand-in."""
        if id(item) in self._replaced:
            return self._replaced[id(item)][2](loaded)
        self._statefuls.keep_loaded(item, loaded)
        return item

    def copied_back(self) -> type:
        """The class of the owner of a view of which finish() gives the array."""
        return CopiedBack

    def note_filled(self, arrays: list[Any]) -> None:
        """The arrays that a load filled in place."""
        note_written(arrays)

    def give_back(self) -> None:
        """Gives the Stateful objects what was loaded for them."""
        self._statefuls.give_back()

    def everywhere(self) -> int:
        """How many ranks are taken to hold each plain array; 0 where that is not known."""
        return self.ranks if self.by_rule else 0

    def keeps_keys(self) -> bool:
        """Whether a dict without sharded parts is saved with keys that are no text and no ints."""
        return self.common and not self.for_load

    def variable(self, tensor: Any) -> Any:
        """(view in host memory, is a parameter, requires grad) of a tensor; None of any other array."""
        torch = _torch()
        if torch is None or not torch.is_tensor(tensor):
            return None
        return torch.variable_in_common(tensor)

    def describe_in_value(self, item: Any) -> Any:
        """What a leaf holds of an object inside it, see Converter.in_value; None: it is pickled."""
        converter = _converters.find(item)
        return None if converter is None else converter.in_value(item)

    def data_of(self, item: Any) -> Any:
        """The array that stands in a template's place, or None."""
        converter = _converters.find(item)
        return item if converter is None else converter.data_of(item)

    def pickle(self, item: Any, key: str) -> tuple[bytes, bool]:
        """An object that is no plain data, pickled; whether as a torch.save archive.

        Raises:
            InvalidArgumentError: it can't be pickled, or could not be read back.
        """
        _leaves.check(item)
        pickled, archive = _pickling.dumps(item, key)
        _pickling.check(pickled, archive, key, self.rank == 0, self.harmless)
        return pickled, archive

    def make_array(self, loaded: _core.TensorView, original: Any) -> Any:
        """An array over a view's memory: torch's or numpy's as the template's is."""
        torch = _torch()
        framework = self.framework
        if framework is None:
            numpys = isinstance(original, numpy.ndarray) or torch is None
            framework = "numpy" if numpys else "torch"
        if framework == "torch":
            from tilestone import _torch_bridge

            return _torch_bridge.tensor(loaded, original)
        return _numpy.array(loaded)

    def make_variable(self, made: Any, parameter: bool, requires_grad: bool) -> Any:
        """A tensor of an object as the parameter, or with the need of grad, that it had."""
        torch = _torch()
        if torch is None or not torch.is_tensor(made):
            return made
        return torch.variable(made, parameter, requires_grad)

    def make_dtype(self, name: str) -> Any:
        """torch's dtype when torch is loaded, a DType otherwise."""
        return native_type(name)

    def make_ordered_dict(self, entries: dict[Any, Any], attributes: dict[str, Any] | None) -> Any:
        """An OrderedDict with the attributes that it had (a module's state dict has "_metadata")."""
        made = collections.OrderedDict(entries)
        vars(made).update(attributes or {})
        return made

    def make_opaque(self, *parts: Any) -> Any:
        """The object where its class is plain or allowed, what the pickle says of it otherwise."""
        return make(Opaque(*parts), self.allow, self.harmless)
