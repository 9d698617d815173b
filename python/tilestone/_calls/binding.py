"""The Python side of the binding: the methods that the C++ binding calls to handle Python objects.

The registry of converters (`converters`) decides how objects of foreign types are handled. torch
is never imported here: an object can only be torch's if torch is already loaded.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._objects import (
    containers,
    converters,
    entities,
    host_arrays,
    megatron_entities,
    pickling,
)
from tilestone._objects.converters import CopiedBack
from tilestone._objects.dtypes import DType, native_type
from tilestone._objects.opaque import Opaque, make
from tilestone._objects.stateful import (
    Below,
    below,
    give_back,
    is_optimizer,
    is_stateful,
    of_optimizer,
    state_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# These modules are imported because they register converters.
_REGISTERED = (entities, megatron_entities, host_arrays)


class _DtypeConverter(converters.Converter):
    def in_value(self, item: Any) -> Any:
        return str(item)


class _OpaqueConverter(converters.Converter):
    def in_value(self, item: Any) -> Any:
        return item


def _register_torchs() -> None:
    from tilestone._torch import tensors

    tensors.register()


converters.add(DType, _DtypeConverter())
converters.add(Opaque, _OpaqueConverter())
converters.add_lazily("torch", _register_torchs)

_torch_module: Any = None  # tilestone._torch.tensors; set by the first call after torch is loaded


def _torch() -> Any:
    """The module tilestone._torch.tensors, or None while torch is not loaded."""
    global _torch_module
    if _torch_module is None and "torch" in sys.modules:
        from tilestone._torch import tensors

        _torch_module = tensors
    return _torch_module


def written(filled: _core.TensorView, array: Any) -> None:
    """Finishes an array whose view (from view_to_fill) was filled; call it after the filling."""
    if isinstance(filled.owner, CopiedBack):
        filled.owner.finish()
    note_written([array])


def note_written(arrays: list[Any]) -> None:
    """Tells autograd that the arrays' memory was written, as torch's copy_ does."""
    torch = _torch()
    if torch is not None:
        torch.note_written(arrays)


def described() -> None:
    """Called when every object of a tree was described."""
    devices = sys.modules.get("tilestone._torch.devices")
    if devices is not None:
        devices.follow_callers()


@dataclasses.dataclass(eq=False)
class Bridge:
    """Handles the Python objects of one save, load or read. The binding calls its functions, which
    `Bridge` in python/src/bindings.h lists.

    Args:
        for_load: the tree is a template that a load fills.
        allow: names of the classes whose objects may be created.
        framework: "torch" or "numpy": the kind of new arrays. None: numpy if the template's array
            is one of numpy or if torch is not loaded, otherwise torch.
        group: the torch process group, for translating the ranks of DTensors.
        ranks: how many ranks take part.
        by_rule: the ranks agree without communication, so every rank is assumed to hold each plain
            array.
        rank: this rank's number; rank 0 logs what is the same on all ranks.
        harmless: names of further classes whose objects may be created if they can be imported.
        common: what is not sharded is saved as common state, and its dict keys are not converted.
        as_torch: the tree is split as torch.distributed.checkpoint does it: other arrays than
            torch's and objects with state_dict() are leaves. A load still fills such arrays.
    """

    for_load: bool = False
    allow: frozenset[str] = frozenset()
    framework: str | None = None
    group: ProcessGroup | None = None
    ranks: int = 1
    by_rule: bool = False
    rank: int = 0
    harmless: frozenset[str] = frozenset()
    common: bool = False
    as_torch: bool = False

    copied_back = CopiedBack  # the class of view owners whose finish() returns the array
    check_container = staticmethod(containers.check)
    rebuilt = staticmethod(containers.rebuilt)
    note_filled = staticmethod(note_written)
    make_dtype = staticmethod(native_type)

    def __post_init__(self) -> None:
        self.positions: dict[Any, Any] = {}
        #: How many ranks are assumed to hold each plain array; 0 if that is not known.
        self.everywhere = self.ranks if self.by_rule else 0
        #: Whether a dict without sharded parts may have keys that are neither text nor ints.
        self.keeps_keys = self.common and not self.for_load
        # (item, its stand-in, restore), by id(item); the items are kept alive.
        self._replaced: dict[int, tuple[Any, Any, Callable[[Any], Any]]] = {}
        # (Stateful, its state dict, what was loaded for that), in the order of the tree.
        self._loaded: list[tuple[Any, Any, Any]] = []
        self._memory: Any = None  # of the template's tensors on torch's meta device

    def unpack(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state as a dict."""
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(
                f"a state must be a dict, not {type(state).__name__}",
                hint='a dict may hold it: {"model": model}' if is_stateful(state) else "",
            )
        return state if isinstance(state, dict) else dict(state.items())

    def is_entity(self, item: Any) -> bool:
        """Whether an object in a list belongs to the tree: an array, an entity or a Stateful."""
        if self._is_leaf(item):
            return False
        converter = converters.find(item)
        return converter is not None and converter.in_tree or is_stateful(item)

    def _is_leaf(self, item: Any) -> bool:
        """Whether an object is a leaf only because the tree is split as torch does it."""
        return self.as_torch and (host_arrays.is_array(item) or is_stateful(item))

    def describe(self, item: Any, path: str) -> Any:
        """The engine's view or entity for an object; None if the object is neither.

        For a Stateful, a tuple: its state dict, and what `below` says of it.
        """
        if self._is_leaf(item) and not (self.for_load and host_arrays.is_array(item)):
            return None
        converter = converters.find(item)
        found = None if converter is None else self._node(converter, item, path)
        if found is None and is_stateful(item):
            state = self._state_of(item)
            return state, *(below(item, state) if self.for_load else ((), ()))
        return found

    def _state_of(self, item: Any) -> Any:
        """The state dict of a Stateful; state_dict() is called once."""
        if id(item) not in self._replaced:
            state = state_of(item)

            def keep(loaded: Any) -> Any:
                self._loaded.append((item, state, loaded))
                return item

            self._replaced[id(item)] = (item, state, keep)
        return self._replaced[id(item)][1]

    def optimizer_places(self, state: Mapping[Any, Any]) -> tuple[Below, Below]:
        """What a load adds to a template's dict if it is the state dict of an optimizer."""
        if self.as_torch:
            return (), ()
        known = self._replaced.values()
        is_objects = any(made is state and is_optimizer(item) for item, made, _ in known)
        return of_optimizer(state, is_objects)

    def _node(self, converter: converters.Converter, item: Any, path: str) -> Any:
        torch = _torch() if self.for_load else None
        if torch is None:
            return converter.node(item, path, self)
        if self._memory is None:
            self._memory = torch.new_memory()
        with torch.memory_of_load(self._memory):
            return converter.node(item, path, self)

    def log_attributes(self, container: containers.Container, key: str) -> None:
        """Logs which parts of a container of a special class a save does not keep."""
        if not self.for_load and self.rank == 0:
            containers.warn(container, key)

    def filled_by(self, original: Any, made: Any) -> Any:
        """What a load returns for a leaf: the template's array, filled from the stored object."""
        if self.as_torch:  # there, an object takes the place of any leaf
            return made
        return host_arrays.filled_by(original, made, _torch())

    def replace(self, item: Any, made: Any, restore: Callable[[Any], Any]) -> None:
        """Records the stand-in that a converter made for the item, and how a load restores it."""
        if self.for_load:
            self._replaced[id(item)] = (item, made, restore)

    def replaced(self) -> list[int]:
        """The id() of each object of the template for which a stand-in was filled."""
        return list(self._replaced)

    def stand_in_of(self, item: Any) -> Any:
        """The item's stand-in: a Stateful's state dict, or what a converter made."""
        return self._replaced[id(item)][1]

    def restored(self, item: Any, loaded: Any) -> Any:
        """What the load returns for the item; `loaded`: what was loaded for its stand-in."""
        return self._replaced[id(item)][2](loaded)

    def give_back(self) -> None:
        """Passes the loaded state to the Stateful objects."""
        give_back(self._loaded)
        self._loaded.clear()

    def variable(self, tensor: Any) -> Any:
        """(view in host memory, is a parameter, requires grad) of a torch tensor, or None."""
        torch = _torch()
        if torch is None or not torch.is_tensor(tensor):
            return None
        return torch.variable_in_common(tensor)

    def describe_in_value(self, item: Any) -> Any:
        """What a leaf stores for an object inside it (Converter.in_value); None: it is pickled."""
        converter = converters.find(item)
        return None if converter is None else converter.in_value(item)

    def data_of(self, item: Any) -> Any:
        """The array that an object of a template holds, or None."""
        converter = converters.find(item)
        return item if converter is None else converter.data_of(item)

    def pickle(self, item: Any, key: str) -> tuple[bytes, bool]:
        """Pickles an object that is not plain data.

        Returns:
            The bytes, and whether they are a torch.save archive.

        Raises:
            InvalidArgumentError: the object can't be pickled, or could not be read back.
        """
        pickled, archive = pickling.dumps(item, key, self.as_torch)
        log = self.rank == 0 and not self.as_torch  # torch's loads create objects of any class
        pickling.check(pickled, archive, key, log, self.harmless)
        return pickled, archive

    def make_array(self, loaded: _core.TensorView, original: Any) -> Any:
        """An array over a view's memory, of torch or numpy like the template's array."""
        torch = _torch()
        framework = self.framework
        if framework is None:
            numpys = isinstance(original, numpy.ndarray) or torch is None
            framework = "numpy" if numpys else "torch"
        if framework == "torch":
            from tilestone._torch import tensors

            return tensors.tensor(loaded, original)
        return host_arrays.array(loaded)

    def make_variable(self, made: Any, parameter: bool, requires_grad: bool) -> Any:
        """A tensor inside an object, with the parameter type and requires_grad that it had."""
        torch = _torch()
        if torch is None or not torch.is_tensor(made):
            return made
        return torch.variable(made, parameter, requires_grad)

    def make_ordered_dict(self, entries: dict[Any, Any], attributes: dict[str, Any] | None) -> Any:
        """An OrderedDict with its attributes (a module's state dict has "_metadata")."""
        made = collections.OrderedDict(entries)
        vars(made).update(attributes or {})
        return made

    def make_opaque(self, *parts: Any) -> Any:
        """The object itself if its class is plain or allowed, otherwise an `Opaque`."""
        return make(Opaque(*parts), self.allow, self.harmless)
