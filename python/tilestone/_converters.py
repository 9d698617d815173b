"""The registry of converters: what objects of foreign types are to the engine.

A converter knows one type, or several of one kind. Modules of Tilestone register their own with
`add` (torch's when torch is loaded), plug-ins theirs with `tilestone.register_converter`.
Converters are looked up by an object's class, once for each class.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._placements import Placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Node: TypeAlias = (
    _core.TensorView
    | _core.ShardedTensor
    | _core.ShardedObject
    | _core.ShardedTensorFactory
    | _core.LocalNonpersistent
)
Kind: TypeAlias = type | str | Callable[[type], bool]


class Call(Protocol):
    """The save or load for which an object is converted.

    Attributes:
        for_load: the object is a template that a load fills.
        group: the torch process group that takes part; None for the default one, or none.
        ranks: how many ranks take part.
    """

    for_load: bool
    group: ProcessGroup | None
    ranks: int

    def replace(self, item: Any, made: Any, restore: Callable[[Any], Any]) -> None:
        """Notes that `made` stands in the item's place; restore(loaded) undoes it after a load."""


def ranks_in(call: Call, ranks: Sequence[int]) -> list[int]:
    """Global ranks as ranks of the group that takes part; none where that can't be known.

    Without torch.distributed the ranks are the communicator's own.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return list(ranks)
    if call.group is None:
        return list(ranks) if call.ranks == dist.get_world_size() else []
    members = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(call.group))}
    return sorted(members[rank] for rank in ranks if rank in members)


class Layout(NamedTuple):
    """One rank's part of an array that knows how it lies over ranks, as a DTensor does.

    Attributes:
        view: of the local memory; a load gives back its owner.
        global_shape: of the whole, in elements.
        mesh, placements: a placement for each dim of the mesh.
    """

    view: _core.TensorView
    global_shape: tuple[int, ...]
    mesh: _core.Mesh
    placements: Sequence[Placement]


class Converter:
    """What objects of one type are to the engine. Methods get objects of that type only.

    Attributes:
        in_tree: they are parts of the tree: a list that holds one is taken apart.
    """

    in_tree = False

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        """What stands for the object in the tree; None: it is an ordinary object, or a container.

        Args:
            path: dotted, for errors and for what has no key of its own.
        """
        return None

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        """A view of an array's memory; None: it is no array of numbers.

        A load's view of memory that can't be filled as it lies is one of fresh memory, whose
        owner is a `CopiedBack`.
        """
        return None

    def description(self, item: Any) -> _core.TensorView | None:
        """Dtype and shape of an array; its view, where it has memory."""
        return self.view(item, for_load=False)

    def layout(self, item: Any, for_load: bool | None) -> Layout | None:
        """How an array that is a part of a whole lies over ranks; None: it doesn't say.

        Args:
            for_load: for a load, for a save, or (None) only to tell its place.
        """
        return None

    def is_writable(self, item: Any) -> bool:
        """Whether exactly this array may be filled."""
        return False

    def data_of(self, item: Any) -> Any:
        """The array or object that a load gives back in place of a template's item."""
        return item

    def in_value(self, item: Any) -> Any:
        """What a leaf holds of it: a view in host memory, a dtype's name, an Opaque.

        Of a tensor that autograd knows of, (view, whether it is a parameter, whether it requires
        grad). None: it is pickled.

        Raises:
            InvalidArgumentError: it must not stand inside a leaf.
        """
        return None

    def why_not_in_object(self, item: Any) -> str | None:
        """What an object must not hold when one rank pickles it for all; None for the rest."""
        return None

    def is_memory(self, item: Any) -> bool:
        """Whether a pickle of it holds the bytes of its memory, and nothing to look into."""
        return False


class ArrayConverter(Converter):
    """Of arrays: whole on every rank, unless an entity says otherwise."""

    in_tree = True

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        try:
            return self.view(item, call.for_load)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            text = f"a {type(item).__name__} has no memory that can be read: {error}"
            raise InvalidArgumentError(text) from error


class PartConverter(Converter):
    """Of what describes a part of a whole, and means nothing inside a leaf."""

    in_tree = True

    def in_value(self, item: Any) -> Any:
        raise InvalidArgumentError(
            f"a {type(item).__name__} stands inside a tuple or an object; sharded entities are "
            "found in dicts and lists only"
        )

    def why_not_in_object(self, item: Any) -> str | None:
        return f"a {type(item).__name__}, which describes a part of a whole"


def _matches(kind: Kind, cls: type) -> bool:
    if isinstance(kind, type):
        return issubclass(cls, kind)
    if isinstance(kind, str):
        return any(kind == f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return bool(kind(cls))


class _Registry:
    """Converters by kind of class. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: list[tuple[Kind, Converter]] = []
        self._plugged: list[tuple[Kind, Converter]] = []
        self._waiting: dict[str, Callable[[], None]] = {}
        self._found: weakref.WeakKeyDictionary[type, Converter | None] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, kind: Kind, converter: Converter, plugged: bool) -> None:
        with self._lock:
            known = self._plugged if plugged else self._own
            known[:] = [each for each in known if each[0] != kind]
            known.insert(0, (kind, converter))
            self._found = weakref.WeakKeyDictionary()

    def add_lazily(self, module: str, load: Callable[[], None]) -> None:
        self._waiting[module] = load

    def find(self, cls: type) -> Converter | None:
        for module in tuple(self._waiting):
            if module in sys.modules:
                self._waiting[module]()
                self._waiting.pop(module, None)
        found = self._found  # of what is registered now: `add` begins another
        try:
            return found[cls]
        except KeyError:
            pass
        known = (c for kind, c in (*self._plugged, *self._own) if _matches(kind, cls))
        converter = next(known, None)
        found[cls] = converter
        return converter


_registry = _Registry()


def add(kind: Kind, converter: Converter, *, plugged: bool = False) -> None:
    """Registers a converter; of those of a class, the one that was registered last is used.

    Args:
        kind: a class (its subclasses too), the full name of one, or a function of a class.
        converter: used for objects of that kind.
        plugged: it comes from a plug-in: it is preferred to Tilestone's own.
    """
    _registry.add(kind, converter, plugged)


def add_lazily(module: str, load: Callable[[], None]) -> None:
    """Has load() called, which adds converters, once the module is loaded by somebody."""
    _registry.add_lazily(module, load)


def find(item: Any) -> Converter | None:
    """The converter of an object; None for a plain value, a container, or any other object."""
    return _registry.find(type(item))


def find_view(array: Any, for_load: bool) -> _core.TensorView | None:
    """A view of any array's memory; None for what is no array of numbers."""
    converter = find(array)
    return None if converter is None else converter.view(array, for_load)


def _checked(found: _core.TensorView | None, array: Any) -> _core.TensorView:
    if found is not None:
        return found
    raise InvalidArgumentError(
        f"an array of numbers is needed, not {type(array).__name__}"
        + (f" of {array.dtype}" if hasattr(array, "dtype") else "")
    )


def view(array: Any, for_load: bool) -> _core.TensorView:
    """A view of any array's memory.

    Raises:
        InvalidArgumentError: it is no array, or of elements that no checkpoint holds.
    """
    return _checked(find_view(array, for_load), array)


def description(array: Any) -> _core.TensorView:
    """Dtype and shape of any array; one on torch's meta device has no more.

    Raises:
        InvalidArgumentError: as for `view`.
    """
    converter = find(array)
    return _checked(None if converter is None else converter.description(array), array)


def view_to_fill(array: Any) -> _core.TensorView:
    """A view through which exactly this array is filled.

    Raises:
        InvalidArgumentError: it is no array, read-only, or has no memory.
    """
    converter = find(array)
    if converter is None or not converter.is_writable(array):
        raise InvalidArgumentError(
            f"a {type(array).__name__} can't be filled: it is read-only or has no memory"
            if hasattr(type(array), "__dlpack__")
            else f"an array is filled, not a {type(array).__name__}"
        )
    return view(array, for_load=True)
