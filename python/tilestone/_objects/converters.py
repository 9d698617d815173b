"""The registry of converters, which translate objects of foreign types for the engine.

A converter handles one type, or several of one kind. Tilestone's own modules register converters
with `add` (those for torch once torch is loaded); plug-ins use `tilestone.register_converter`.
Converters are looked up by an object's class, once for each class.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, overload

from tilestone import _core
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._objects.given import Placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CopiedBack:
    """Owns memory that is filled in place of an array, and passes it on when it is full.

    Args:
        memory: what is filled: an array, or the owner of a view.
        target: the object in the template.
        put: put(target, memory) returns what the load returns: the target after the memory was
            copied into it, or an object that replaces the target.
    """

    __slots__ = ("_memory", "_put", "_target")

    def __init__(self, memory: Any, target: Any, put: Callable[[Any, Any], Any]) -> None:
        self._memory = memory
        self._target = target
        self._put = put

    def finish(self) -> Any:
        """Passes the filled memory on; returns what the load returns."""
        memory = self._memory
        if isinstance(memory, CopiedBack):
            memory = memory.finish()
        return self._put(self._target, memory)


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
        group: the torch process group that takes part; None for the default group, or if there is
            no group.
        ranks: how many ranks take part.
        positions: Tilestone's own: entities of arrays so far, without data, by where these stand.
    """

    for_load: bool
    group: ProcessGroup | None
    ranks: int
    positions: dict[Any, Any]

    def replace(self, item: Any, made: Any, restore: Callable[[Any], Any]) -> None:
        """Records that `made` replaces the item; restore(loaded) undoes this after a load."""


def ranks_in(call: Call, ranks: Sequence[int]) -> list[int]:
    """Translates global ranks to ranks of the group that takes part.

    Without torch.distributed, `ranks` already are the communicator's own numbers. The result is
    empty if the translation is not known.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return list(ranks)
    if call.group is None:
        return list(ranks) if call.ranks == dist.get_world_size() else []
    members = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(call.group))}
    return sorted(members[rank] for rank in ranks if rank in members)


class Layout(NamedTuple):
    """One rank's part of an array that knows how it is sharded over ranks, as a DTensor does.

    Attributes:
        view: a view of the local memory; a load returns the view's owner.
        global_shape: shape of the whole array, in elements.
        mesh, placements: one placement for each dim of the mesh.
    """

    view: _core.TensorView
    global_shape: tuple[int, ...]
    mesh: _core.Mesh
    placements: Sequence[Placement]


class Converter:
    """Translates objects of one type for the engine. Methods are called with that type only.

    Attributes:
        in_tree: objects of the type belong to the tree: a list that holds one is split into its
            elements.
        may_be_part: `add_parts` applies to objects of the type.
    """

    in_tree = False
    may_be_part = False  # an object of the type may say itself that it is a part of a whole

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        """The object's node in the tree; None for an ordinary object or a container.

        Args:
            path: the dotted path, for errors and as the key of objects without their own key.
        """
        return None

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        """A view of an array's memory; None if it is not an array of numbers.

        For a load, if the array's memory can't be filled in place, the view is of new memory, and
        its owner is a `CopiedBack`.
        """
        return None

    def description(self, item: Any) -> _core.TensorView | None:
        """Dtype and shape of an array, with a view of its memory if it has any."""
        return self.view(item, for_load=False)

    def layout(self, item: Any, for_load: bool | None) -> Layout | None:
        """How an array that is part of a whole is sharded over ranks; None if it doesn't say.

        Args:
            for_load: True for a load, False for a save, None if only the position is needed.
        """
        return None

    def part(self, item: Any, key: str, for_load: bool | None) -> Any:
        """The engine's entity for an array that says itself where it stands; None if it doesn't.

        Args:
            for_load: as for `layout`.
        """
        return None

    def is_writable(self, item: Any) -> bool:
        """Whether this array's own memory may be filled."""
        return False

    def data_of(self, item: Any) -> Any:
        """The array or object that a load returns in place of a template's item."""
        return item

    def in_value(self, item: Any) -> Any:
        """What a leaf stores for the object: a view in host memory, a dtype's name, or an Opaque.

        For a tensor that autograd tracks: (view, whether it is a parameter, whether it requires
        grad). None: the object is pickled.

        Raises:
            InvalidArgumentError: the object is not allowed inside a leaf.
        """
        return None

    def why_not_in_object(self, item: Any) -> str | None:
        """The reason, as a noun phrase, why an object that one rank pickles for all must not hold
        this one; None if it may.
        """
        return None


class ArrayConverter(Converter):
    """For arrays, which are whole on every rank unless an entity says otherwise."""

    in_tree = True

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        try:
            return self.view(item, call.for_load)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            text = f"can't read the memory of a {type(item).__name__}: {error}"
            raise InvalidArgumentError(text) from error


class PartConverter(Converter):
    """For objects that describe a part of a whole, which have no meaning inside a leaf."""

    in_tree = True

    def in_value(self, item: Any) -> Any:
        raise InvalidArgumentError(
            f"a {type(item).__name__} is inside a tuple or another object; sharded entities are "
            "only allowed in dicts and lists"
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
        self._parts: tuple[Callable[[Any], bool], Converter] | None = None
        self._waiting: dict[str, Callable[[], None]] = {}
        self._found: weakref.WeakKeyDictionary[type, Converter | None] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, kind: Kind, converter: Converter, *, plugged: bool = False) -> None:
        """Registers a converter. If several match a class, the one that was registered last is used.

        Args:
            kind: a class (which includes its subclasses), the full name of a class, or a function
                that says whether a class matches.
            converter: used for objects of that kind.
            plugged: it comes from a plug-in, and has priority over Tilestone's own converters.
        """
        with self._lock:
            known = self._plugged if plugged else self._own
            known[:] = [each for each in known if each[0] != kind]
            known.insert(0, (kind, converter))
            self._found = weakref.WeakKeyDictionary()

    def add_lazily(self, module: str, load: Callable[[], None]) -> None:
        """Arranges that load(), which adds converters, is called once the module is imported."""
        self._waiting[module] = load

    def add_parts(self, states: Callable[[Any], bool], converter: Converter) -> None:
        """Registers a converter for single objects: those for which states(item) is true.

        It comes before torch's converter of ordinary tensors, and after every converter of a class.
        """
        self._parts = (states, converter)

    def find(self, item: Any) -> Converter | None:
        """The converter of an object; None for a plain value, a container, or any other object."""
        converter = self._of_class(type(item))
        if self._parts is not None and (converter is None or converter.may_be_part):
            states, of_parts = self._parts
            return of_parts if states(item) else converter
        return converter

    def _of_class(self, cls: type) -> Converter | None:
        for module in tuple(self._waiting):
            if module in sys.modules:
                self._waiting[module]()
                self._waiting.pop(module, None)
        found = self._found  # matches what is registered now; `add` starts a new dict
        try:
            return found[cls]
        except KeyError:
            known = (c for kind, c in (*self._plugged, *self._own) if _matches(kind, cls))
            converter = found[cls] = next(known, None)
            return converter


_registry = _Registry()
add, add_lazily, add_parts = _registry.add, _registry.add_lazily, _registry.add_parts
find = _registry.find


def view(array: Any, for_load: bool | None) -> _core.TensorView:
    """A view of any array's memory; if for_load is None, its dtype and shape, also of an array
    without memory (on torch's meta device).

    Raises:
        InvalidArgumentError: it is not an array, or its dtype can't be stored in a checkpoint.
    """
    converter, found = find(array), None
    if converter is not None:
        described = for_load is None
        found = converter.description(array) if described else converter.view(array, bool(for_load))
    if found is not None:
        return found
    raise InvalidArgumentError(
        f"expected an array of numbers, not {type(array).__name__}"
        + (f" of {array.dtype}" if hasattr(array, "dtype") else "")
    )


def view_to_fill(array: Any) -> _core.TensorView:
    """A view through which the array's own memory is filled.

    Raises:
        InvalidArgumentError: it is not an array, is read-only, or has no memory.
    """
    converter = find(array)
    if converter is None or not converter.is_writable(array):
        raise InvalidArgumentError(
            f"a {type(array).__name__} can't be filled: it is read-only or has no memory"
            if hasattr(type(array), "__dlpack__")
            else f"only an array can be filled, not a {type(array).__name__}"
        )
    return view(array, for_load=True)


Convert = Callable[[Any, bool], Any]
Restore = Callable[[Any, Any], Any]
_Function = TypeVar("_Function", bound=Convert)


class _Plugged(PartConverter):
    """Replaces an object by what the plug-in's function makes of it."""

    def __init__(self, convert: Convert, restore: Restore | None) -> None:
        self._convert = convert
        self._restore = restore

    def _made(self, item: Any, for_load: bool) -> tuple[Any, Converter]:
        made = self._convert(item, for_load)
        converter = find(made)
        if converter is None or isinstance(converter, _Plugged) or not converter.in_tree:
            raise InvalidArgumentError(
                f"the converter of {type(item).__name__} returned a {type(made).__name__}, which "
                "is neither an array nor one of Tilestone's entities"
            )
        return made, converter

    def _restored(self, item: Any, loaded: Any) -> Any:
        return loaded if self._restore is None else self._restore(item, loaded)

    def node(self, item: Any, path: str, call: Call) -> Node | None:
        made, converter = self._made(item, call.for_load)
        found = converter.node(made, path, call)
        if found is None:
            raise InvalidArgumentError(
                f"the converter of {type(item).__name__} returned a {type(made).__name__} that a "
                "checkpoint can't hold as a tensor"
            )
        if isinstance(found, _core.TensorView):
            return self._owned(item, found, call.for_load)
        call.replace(item, made, functools.partial(self._restored, item))
        return found

    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        made, converter = self._made(item, for_load)
        found = converter.view(made, for_load)
        return None if found is None else self._owned(item, found, for_load)

    def _owned(self, item: Any, found: _core.TensorView, for_load: bool) -> _core.TensorView:
        if not for_load:
            return found
        return found.with_owner(CopiedBack(found.owner, item, self._restored))

    def description(self, item: Any) -> _core.TensorView | None:
        made, converter = self._made(item, False)
        return converter.description(made)

    def why_not_in_object(self, item: Any) -> str | None:
        return f"a {type(item).__name__}, which needs its registered converter"


_NEVER_ASKED = (dict, collections.OrderedDict, list, tuple, type(None), object)
_PLAIN = (int, float, str, bytes)  # subclasses too
_TORCHS = ("torch.Tensor", "torch.nn.parameter.Parameter")


def _check_kind(kind: Any) -> None:
    if isinstance(kind, type):
        torch = sys.modules.get("torch")
        own = () if torch is None else (torch.Tensor, torch.nn.Parameter)
        if kind not in _NEVER_ASKED and kind not in own and not issubclass(kind, _PLAIN):
            return
    elif (isinstance(kind, str) and kind not in _TORCHS) or callable(kind):
        return
    raise InvalidArgumentError(
        f"kind must be a class, a class's full name or a function of a class, not {kind!r}"
        if not isinstance(kind, (type, str))
        else f"can't register a converter for {kind!r}: Tilestone handles its objects itself"
    )


@overload
def register_converter(
    kind: Kind, convert: None = None, *, restore: Restore | None = None
) -> Callable[[_Function], _Function]: ...
@overload
def register_converter(
    kind: Kind, convert: _Function, *, restore: Restore | None = None
) -> _Function: ...
def register_converter(
    kind: Kind, convert: Any = None, *, restore: Restore | None = None
) -> Any:
    """Registers how objects of a type that Tilestone does not know are saved and loaded.

        @tilestone.register_converter(Quantized, restore=lambda item, loaded: item.set_(loaded))
        def _(item, for_load):
            return item.dequantize()

    Such objects may then be in dicts and lists of a state, and be the `data` of a `ShardedTensor`
    (Megatron-Core's too). Inside tuples and other objects they are refused like sharded tensors,
    with an error that names the key.

    Args:
        kind: a class, which includes its subclasses; the full name of a class
            ("package.module.Class"), so that its module need not be imported; or a function that
            takes a class and says whether its objects are handled. It is called once for each
            class.
        convert: convert(item, for_load) returns what is saved in place of the item: an array
            (torch, numpy, DLPack) of any shape, the same on every rank, or an entity
            (`ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`, `LocalNonpersistent`).
            With for_load=True it returns what a load fills: an array with the stored dtype and
            global shape, or an entity. It may be called several times for one item, and must do the
            same on every rank. If `convert` is omitted, this function is a decorator.
        restore: restore(item, loaded) returns what a load returns in place of the item. `loaded`
            is the array that was filled, or what a load returns for the entity. Without `restore`,
            the load returns `loaded` itself.

    Returns:
        `convert`.

    Raises:
        InvalidArgumentError: `kind` is invalid, or is a class that Tilestone handles itself: dict,
            OrderedDict, list, tuple, a plain value, torch.Tensor or Parameter. (Subclasses of these
            may be registered, except those of int, float, str and bytes.) A save or load raises
            it, with the key, if `convert` returns anything else than described.

    If several converters match a class, the one registered last is used, and always before
    Tilestone's own. Registering the same kind again replaces its converter. Exceptions of `convert`
    and `restore` are raised from the call on that rank, with the key as a note. Inside a factory's
    tree, `merge_fn` gets what was loaded for an entity, without `restore`.
    """
    _check_kind(kind)
    if convert is None:
        return functools.partial(register_converter, kind, restore=restore)
    if not callable(convert) or not (restore is None or callable(restore)):
        raise InvalidArgumentError("convert and restore must be functions")
    add(kind, _Plugged(convert, restore), plugged=True)
    return convert
