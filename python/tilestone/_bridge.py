"""Python's side of the binding: what an object is to the engine.

torch is never imported here: an object can only be torch's when torch is already loaded.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import numpy

from tilestone import _core
from tilestone._dtypes import DType, name_of_numpy, native_type
from tilestone._entities import (
    LocalNonpersistent,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tilestone._errors import InvalidArgumentError
from tilestone._opaque import Opaque, make

_ENTITIES = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistent)


_torch_module: Any = None  # tilestone._torch_bridge, from the first call with torch loaded on


def _torch() -> Any:
    """The module tilestone._torch_bridge, or None while torch is not loaded."""
    global _torch_module
    if _torch_module is None and "torch" in sys.modules:
        from tilestone import _torch_bridge

        _torch_module = _torch_bridge
    return _torch_module


def numpy_view(array: numpy.ndarray[Any, Any], for_load: bool) -> _core.TensorView | None:
    """A view of an array's memory; None for elements that no checkpoint holds (objects, text)."""
    name = name_of_numpy(array.dtype)
    if name is None:
        return None
    size = array.dtype.itemsize
    whole = all(stride % size == 0 for stride in array.strides)
    if for_load and not (array.flags.writeable and array.dtype.isnative and whole):
        array = numpy.zeros(array.shape, array.dtype.newbyteorder("="))
    if not (array.dtype.isnative and whole):
        array = numpy.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    data: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous or array.size == 0:
        begin, end = data, data + array.nbytes
    else:
        begin, end = numpy.lib.array_utils.byte_bounds(array)
    strides = [stride // size for stride in array.strides]
    return _core.TensorView.strided(data, name, array.shape, strides, begin, end - begin, array)


def _dlpack_view(array: Any, for_load: bool) -> _core.TensorView | None:
    view = _core.TensorView.from_dlpack(array, writable=for_load)
    if view is not None or not for_load:
        return view
    readable = _core.TensorView.from_dlpack(array, writable=False)
    if readable is None:
        return None
    return numpy_view(numpy.zeros(readable.shape, DType(readable.dtype).numpy), for_load)


def find_view(array: Any, for_load: bool) -> _core.TensorView | None:
    """A view of any array's memory, None for what is no array."""
    if isinstance(array, numpy.ndarray):
        return numpy_view(array, for_load)
    torch = _torch()
    if torch is not None and torch.is_tensor(array):
        found: _core.TensorView = torch.view(array, for_load)
        return found
    if isinstance(array, numpy.generic):
        return None
    if hasattr(type(array), "__dlpack__"):
        return _dlpack_view(array, for_load)
    return None


def view(array: Any, for_load: bool) -> _core.TensorView:
    """A view of any array's memory.

    Raises:
        InvalidArgumentError: it is no array, or of elements that no checkpoint holds.
    """
    found = find_view(array, for_load)
    if found is None:
        raise InvalidArgumentError(
            f"the data of a sharded tensor is an array, not {type(array).__name__}"
            + (f" of {array.dtype}" if hasattr(array, "dtype") else "")
        )
    return found


def is_stateful(item: Any) -> bool:
    """torch's Stateful protocol; modules, optimizers and dataloaders follow it."""
    return (
        not isinstance(item, type)
        and callable(getattr(item, "state_dict", None))
        and callable(getattr(item, "load_state_dict", None))
    )


class Bridge:
    """One call's view of Python's objects; the binding calls its methods.

    Args:
        for_load: the tree is a template that a load fills.
        allow: names of the classes of which objects may be made.
        framework: "torch", "numpy" or None: torch when it is loaded.
        group: the torch process group, where ranks of DTensors must be translated.
        ranks: how many ranks take part.
        by_rule: ranks agree without a word, so that every rank is taken to hold a plain array.
    """

    def __init__(
        self,
        for_load: bool = False,
        allow: frozenset[str] = frozenset(),
        framework: str | None = None,
        group: Any = None,
        ranks: int = 1,
        by_rule: bool = False,
    ) -> None:
        self.for_load = for_load
        self.allow = allow
        self.framework = framework
        self.group = group
        self.ranks = ranks
        self.by_rule = by_rule
        self._unpacked: Mapping[Any, Any] = {}

    def unpack(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The state with the state dicts of its Stateful values in their places."""
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(f"a state is a dict, not {type(state).__name__}")
        self._unpacked = state
        if any(is_stateful(value) for value in state.values()):
            self._unpacked = {k: v.state_dict() if is_stateful(v) else v for k, v in state.items()}
        return self._unpacked

    def unpacked(self) -> Mapping[Any, Any]:
        """What unpack made."""
        return self._unpacked

    def is_entity(self, item: Any) -> bool:
        """Whether the object is an array or a wrapped entity."""
        if isinstance(item, numpy.generic):
            return False
        return isinstance(item, (*_ENTITIES, numpy.ndarray)) or hasattr(type(item), "__dlpack__")

    def describe(self, item: Any, path: str) -> Any:
        """A view or entity of the engine; None for an object that is neither."""
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
            return find_view(item, self.for_load)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"{error.message} (key {path})", message=error.message, key=path, hint=error.hint
            ) from None

    def everywhere(self) -> int:
        """How many ranks are taken to hold each plain array; 0 where that is not known."""
        return self.ranks if self.by_rule else 0

    def describe_in_value(self, item: Any) -> Any:
        """A view in host memory, a dtype's name, or None: an object inside a leaf."""
        if isinstance(item, DType):
            return str(item)
        torch = _torch()
        if isinstance(item, _ENTITIES) or (torch is not None and torch.is_distributed(item)):
            raise InvalidArgumentError(
                f"a {type(item).__name__} stands inside a tuple or an object; sharded entities "
                "are found in dicts and lists only"
            )
        if torch is not None:
            if torch.is_dtype(item):
                return torch.dtype_name(item)
            if torch.is_tensor(item):
                return torch.host_view(item)
        return numpy_view(item, False) if isinstance(item, numpy.ndarray) else None

    def data_of(self, item: Any) -> Any:
        """The array that stands in a template's place, or None."""
        if isinstance(item, (ShardedTensor, ShardedObject)):
            return item.data
        return item

    def pickle(self, item: Any) -> tuple[bytes, bool]:
        """An object that is no plain data, pickled; whether as a torch.save archive."""
        if "torch" in sys.modules:
            import torch

            buffer = io.BytesIO()
            torch.save(item, buffer)
            return buffer.getvalue(), True
        return pickle.dumps(item, protocol=2), False

    def new_mapping(self, original: Any) -> dict[Any, Any]:
        """An empty dict, ordered where the template's is an OrderedDict."""
        ordered = isinstance(original, collections.OrderedDict)
        return collections.OrderedDict() if ordered else {}

    def make_array(self, loaded: _core.TensorView, original: Any) -> Any:
        """An array over a view's memory: torch's or numpy's as the template's is."""
        torch = _torch()
        framework = self.framework
        if framework is None:
            numpys = isinstance(original, numpy.ndarray) or torch is None
            framework = "numpy" if numpys else "torch"
        if framework == "torch":
            from tilestone import _torch_bridge

            return _torch_bridge.tensor(loaded)
        return to_numpy(loaded)

    def make_dtype(self, name: str) -> Any:
        """torch's dtype when torch is loaded, a DType otherwise."""
        return native_type(name)

    def make_opaque(self, *told: Any) -> Any:
        """The object where its class is allowed, what the pickle says of it otherwise."""
        return make(Opaque(*told), self.allow)


def to_numpy(loaded: _core.TensorView) -> numpy.ndarray[Any, Any]:
    """A numpy array over the memory of a contiguous view."""
    dtype = DType(loaded.dtype).numpy
    if loaded.nbytes == 0:
        return numpy.empty(loaded.shape, dtype)
    return loaded.bytes.view(dtype).reshape(loaded.shape)
