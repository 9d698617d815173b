"""Converters that users register for types that Tilestone does not know."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._objects import converters
from tilestone._objects.converters import Call, Kind, Node
from tilestone._objects.copied_back import CopiedBack

Convert = Callable[[Any, bool], Any]
Restore = Callable[[Any, Any], Any]
_Function = TypeVar("_Function", bound=Convert)


class _Plugged(converters.PartConverter):
    """Replaces an object by what the plug-in's function makes of it."""

    def __init__(self, convert: Convert, restore: Restore | None) -> None:
        self._convert = convert
        self._restore = restore

    def _made(self, item: Any, for_load: bool) -> tuple[Any, converters.Converter]:
        made = self._convert(item, for_load)
        converter = converters.find(made)
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
    converters.add(kind, _Plugged(convert, restore), plugged=True)
    return convert
