"""Python's side of the binding: what an object is to the engine.

torch is never imported here: an object can only be torch's when torch is already loaded.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from typing import Any

import numpy

from tilestone import (
    _containers,
    _core,
    _leaves,
    _megatron,
    _numpy,
    _object_arrays,
    _pickling,
)
from tilestone._copied_back import CopiedBack
from tilestone._dtypes import DType, native_type
from tilestone._entities import (
    LocalNonpersistent,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._opaque import Opaque, make
from tilestone._stateful import Statefuls, below, is_stateful

_ENTITIES = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistent)


_torch_module: Any = None  # tilestone._torch_bridge, from the first call with torch loaded on


def _torch() -> Any:
    """The module tilestone._torch_bridge, or None while torch is not loaded."""
    global _torch_module
    if _torch_module is None and "torch" in sys.modules:
        from tilestone import _torch_bridge

        _torch_module = _torch_bridge
    return _torch_module


def find_view(array: Any, for_load: bool) -> _core.TensorView | None:
    """A view of any array's memory, None for what is no array.

    A load's view of memory that can't be filled as it lies is one of fresh memory, whose owner
    is a `CopiedBack`.
    """
    if isinstance(array, numpy.ndarray):
        return _numpy.view(array, for_load)
    torch = _torch()
    if torch is not None and torch.is_tensor(array):
        found: _core.TensorView = torch.view(array, for_load)
        return found
    if isinstance(array, numpy.generic):
        return None
    if hasattr(type(array), "__dlpack__"):
        return _numpy.dlpack_view(array, for_load)
    return None


def description(array: Any) -> _core.TensorView:
    """Dtype and shape of any array; one on torch's meta device has no more.

    Raises:
        InvalidArgumentError: as for `view`.
    """
    torch = _torch()
    if torch is not None and torch.is_tensor(array) and array.is_meta:
        return _core.TensorView.without_data(torch.dtype_name(array.dtype), tuple(array.shape))
    return view(array, for_load=False)


def view_to_fill(array: Any) -> _core.TensorView:
    """A view through which exactly this array is filled; `written` must follow.

    Raises:
        InvalidArgumentError: it is no array, read-only, or has no memory.
    """
    torch = _torch()
    if isinstance(array, numpy.ndarray):
        writable = array.flags.writeable
    elif torch is not None and torch.is_tensor(array):
        writable = not array.is_meta
    else:
        writable = hasattr(type(array), "__dlpack__") and _numpy.is_writable(array)
    if not writable:
        raise InvalidArgumentError(
            f"a {type(array).__name__} can't be filled: it is read-only or has no memory"
            if hasattr(type(array), "__dlpack__")
            else f"an array is filled, not a {type(array).__name__}"
        )
    return view(array, for_load=True)


def written(filled: _core.TensorView, array: Any) -> None:
    """After the view that view_to_fill gave was filled."""
    if isinstance(filled.owner, CopiedBack):
        filled.owner.finish()
    note_written([array])


def view(array: Any, for_load: bool) -> _core.TensorView:
    """A view of any array's memory.

    Raises:
        InvalidArgumentError: it is no array, or of elements that no checkpoint holds.
    """
    found = find_view(array, for_load)
    if found is None:
        raise InvalidArgumentError(
            f"an array of numbers is needed, not {type(array).__name__}"
            + (f" of {array.dtype}" if hasattr(array, "dtype") else "")
        )
    return found


def note_written(arrays: list[Any]) -> None:
    """Tells autograd that memory of arrays was written, as torch's copy_ does."""
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
    """

    def __init__(
        self,
        for_load: bool = False,
        allow: frozenset[str] = frozenset(),
        framework: str | None = None,
        group: Any = None,
        ranks: int = 1,
        by_rule: bool = False,
        rank: int = 0,
    ) -> None:
        self.for_load = for_load
        self.allow = allow
        self.framework = framework
        self.group = group
        self.ranks = ranks
        self.by_rule = by_rule
        self.rank = rank
        self._unpacked: dict[Any, Any] = {}
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
        if isinstance(item, numpy.generic):
            return False
        return (
            isinstance(item, (*_ENTITIES, numpy.ndarray))
            or hasattr(type(item), "__dlpack__")
            or _megatron.kind_of(item) is not None
            or is_stateful(item)
        )

    def describe(self, item: Any, path: str) -> Any:
        """A view or entity of the engine; None for an object that is neither.

        Of a Stateful, a tuple: its state dict, and the paths in it of which a load takes all.
        """
        if _megatron.kind_of(item) is not None:
            item = _megatron.entity(item, self.for_load)
        if isinstance(item, ShardedTensor):
            return item._entity(self.for_load)
        if isinstance(item, (ShardedObject, ShardedTensorFactory)):
            return item._entity(self)
        if isinstance(item, LocalNonpersistent):
            return _core.LocalNonpersistent.make(item.value)
        torch = _torch()
        if torch is not None and torch.is_distributed(item):
            return torch.distributed_entity(item, path, self)
        try:
            found = find_view(item, self.for_load)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            text = f"a {type(item).__name__} has no memory that can be read: {error}"
            raise InvalidArgumentError(text) from error
        if found is None and is_stateful(item):
            state = self._statefuls.enter(item)
            return state, below(item, state) if self.for_load else ()
        return found

    def check_container(self, container: Any) -> None:
        """Refuses a container that a load could not give back."""
        _containers.check(container)

    def tell_attributes(self, container: Any, key: str) -> None:
        """Logs what a save does not keep of a container of a class of its own."""
        if not self.for_load and self.rank == 0:
            _containers.tell(container, key)

    def rebuilt(self, original: Any, contents: Any) -> Any:
        """A container of the class of the template's."""
        return _containers.rebuilt(original, contents)

    def filled_by(self, original: Any, made: Any) -> Any:
        """What a load gives back for a leaf: a template's array, filled by the stored object."""
        return _object_arrays.filled_by(original, made, _torch())

    def statefuls(self) -> list[int]:
        """id() of the state's Stateful objects."""
        return self._statefuls.ids()

    def state_of(self, item: Any) -> Any:
        """The state dict of a Stateful of the template."""
        return self._statefuls.state_of(item)

    def keep_loaded(self, item: Any, loaded: Any) -> None:
        """What was loaded of a Stateful's state dict."""
        self._statefuls.keep_loaded(item, loaded)

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

    def describe_in_value(self, item: Any) -> Any:
        """A view in host memory, a dtype's name, an Opaque, or None: an object inside a leaf.

        Of a tensor that autograd knows of, (view, whether it is a parameter, whether it requires
        grad). Where torch is loaded, a numpy array is pickled, so that it comes back as one.
        """
        if type(item) is Opaque:
            return item
        if isinstance(item, DType):
            return str(item)
        torch = _torch()
        if (
            isinstance(item, _ENTITIES)
            or _megatron.kind_of(item) is not None
            or (torch is not None and torch.is_distributed(item))
        ):
            raise InvalidArgumentError(
                f"a {type(item).__name__} stands inside a tuple or an object; sharded entities "
                "are found in dicts and lists only"
            )
        if torch is not None:
            if torch.is_dtype(item):
                return torch.dtype_name(item)
            if torch.is_tensor(item):
                return torch.in_value(item)
        elif type(item) is numpy.ndarray and item.dtype.isnative:
            return _numpy.view(item, False)
        return None

    def data_of(self, item: Any) -> Any:
        """The array that stands in a template's place, or None."""
        if isinstance(item, (ShardedTensor, ShardedObject)):
            return item.data
        return _megatron.data_of(item)

    def pickle(self, item: Any, key: str) -> tuple[bytes, bool]:
        """An object that is no plain data, pickled; whether as a torch.save archive.

        Raises:
            InvalidArgumentError: it can't be pickled, or could not be read back.
        """
        _leaves.check(item, _ENTITIES, _torch())
        pickled, archive = _pickling.dumps(item, key)
        _pickling.check_and_tell(pickled, archive, key, tell=self.rank == 0)
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

    def make_opaque(self, *told: Any) -> Any:
        """The object where its class is plain or allowed, what the pickle says of it otherwise."""
        return make(Opaque(*told), self.allow)
