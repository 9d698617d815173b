"""Views of the memory of numpy arrays, and of arrays of other libraries that support DLPack.

Stock PyTorch pickles numpy arrays, so a checkpoint may hold them as objects. A template's array is
filled from either.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import Any

import numpy

from tilestone import _core
from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone._objects import converters
from tilestone._objects.converters import CopiedBack
from tilestone._objects.dtypes import DType, name_of_numpy
from tilestone._protocols import SupportsDlpack

# Classes whose arrays consist only of their elements. Arrays of other subclasses (masked arrays,
# quantities with a unit) are stored as objects, because their elements alone are not enough to
# restore them.
_PLAIN = (numpy.ndarray, numpy.memmap, numpy.matrix, numpy.recarray)


def is_plain(array: numpy.ndarray[Any, Any]) -> bool:
    """Whether an array is stored as a tensor."""
    return type(array) in _PLAIN and name_of_numpy(array.dtype) is not None


def array(loaded: _core.TensorView) -> numpy.ndarray[Any, Any]:
    """A numpy array over the memory of a contiguous view."""
    dtype = DType(loaded.dtype).numpy
    if loaded.nbytes == 0:
        return numpy.empty(loaded.shape, dtype)
    return loaded.bytes.view(dtype).reshape(loaded.shape)


# Whether a load must fill the memory of the arrays themselves.
_in_place: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_place", default=False)


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Within it, arrays that a load does not fill where they are are refused: read-only ones, and others."""
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def _new(shape: Any, dtype: Any) -> numpy.ndarray[Any, Any]:
    """The array that a load fills in the place of another one."""
    if _in_place.get():
        raise InvalidArgumentError(
            "the array can't be changed in place: it is read-only, of a foreign byte order, or a field of records",
            hint="pass a copy of it",
        )
    return numpy.zeros(shape, dtype)


def view(array: numpy.ndarray[Any, Any], for_load: bool) -> _core.TensorView | None:
    """A view of an array's memory; None if a checkpoint can't hold its elements (objects, text).

    For a load, the view of a read-only array is of a new array. If the array has a foreign byte
    order, or strides that are not multiples of the element size (a field of records), the load
    fills new memory, which is then copied to the array.

    Raises:
        InvalidArgumentError: for a load, several elements of the array share memory.
    """
    name = name_of_numpy(array.dtype)
    if name is None or type(array) not in _PLAIN:
        return None
    size = array.dtype.itemsize
    straight = array.dtype.isnative and all(stride % size == 0 for stride in array.strides)
    owner: Any = None
    if for_load and not array.flags.writeable:
        array = _new(array.shape, array.dtype.newbyteorder("="))
    elif for_load:
        if _core.shares_elements((*array.shape, size), (*array.strides, 1)):
            raise InvalidArgumentError(
                "can't fill an array in which several elements share memory"
            )
        if not straight:
            target = array
            array = _new(array.shape, array.dtype.newbyteorder("="))
            owner = CopiedBack(array, target, _copied)
    elif not straight:
        array = numpy.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    data: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous or array.size == 0:
        begin, end = data, data + array.nbytes
    else:
        # numpy has a function for this, under one name before 2.0 and under another one since.
        reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides)]
        begin = data + sum(each for each in reach if each < 0)
        end = data + sum(each for each in reach if each > 0) + size
    strides = [stride // size for stride in array.strides]
    kept = array if owner is None else owner
    return _core.TensorView.strided(data, name, array.shape, strides, begin, end - begin, kept)


def _copied(target: Any, memory: Any) -> Any:
    numpy.copyto(target, memory)
    return target


def _is_immutable(array: SupportsDlpack) -> bool:
    # JAX's arrays are immutable, which DLPack before version 1 can't express.
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _raise_failure(array: SupportsDlpack) -> None:
    """Raises what an export raises, unless it says that the array can't be exported at all."""
    with contextlib.suppress(
        BufferError, TypeError, ValueError, AttributeError, NotImplementedError
    ):
        array.__dlpack__()


class _DlpackConverter(converters.ArrayConverter):
    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        """A view of the array; for a load, if it is read-only, a view of a new array."""
        readable = for_load and _is_immutable(item)
        found = None if readable else _core.TensorView.from_dlpack(item, writable=for_load)
        if found is not None:
            return found
        if for_load:
            found = _core.TensorView.from_dlpack(item, writable=False)
        if found is None:
            _raise_failure(item)
            return None
        return view(_new(found.shape, DType(found.dtype).numpy), for_load)

    def is_writable(self, item: Any) -> bool:
        if _is_immutable(item):
            return False
        return _core.TensorView.from_dlpack(item, writable=True) is not None


class _NumpyConverter(converters.ArrayConverter):
    def view(self, item: Any, for_load: bool) -> _core.TensorView | None:
        return view(item, for_load)

    def is_writable(self, item: Any) -> bool:
        return bool(item.flags.writeable)

    def in_value(self, item: Any) -> Any:
        # If torch is loaded, a numpy array is pickled, so that it comes back as a numpy array.
        plain = type(item) is numpy.ndarray and item.dtype.isnative and "torch" not in sys.modules
        return view(item, False) if plain else None


def is_array(item: Any) -> bool:
    """Whether an object is an array that this module views."""
    return isinstance(converters.find(item), (_NumpyConverter, _DlpackConverter))


converters.add(lambda cls: hasattr(cls, "__dlpack__"), _DlpackConverter())
converters.add(numpy.ndarray, _NumpyConverter())
# numpy's scalars are leaves, although they support DLPack.
converters.add(numpy.generic, converters.Converter())


def _as_numpy(made: Any, torch: Any) -> numpy.ndarray[Any, Any]:
    if torch is not None and torch.is_tensor(made):
        return array(torch.host_view(made.contiguous()))
    if isinstance(made, numpy.generic):
        made = numpy.asarray(made)
    if not isinstance(made, numpy.ndarray):
        raise MismatchError(
            f"an array is wanted, but the checkpoint holds an object of {type(made).__name__}",
            hint="to get the object, use None instead of the array in the template",
        )
    return made


def filled_by(original: Any, made: Any, torch: Any) -> Any:
    """`made`, or the template's array after it was filled from `made`.

    Args:
        original: the template's leaf, or a list of leaves.
        made: the object that the checkpoint holds in this place.
        torch: the module tilestone._torch.tensors, or None while torch is not loaded.

    Raises:
        MismatchError: the template has an array, and the object is not an array of the same dtype
            and shape.
    """
    if type(original) is list and type(made) is list and len(original) == len(made):
        return [filled_by(a, b, torch) for a, b in zip(original, made, strict=True)]
    is_tensor = torch is not None and torch.is_tensor(original)
    if not is_tensor and not (isinstance(original, numpy.ndarray) and is_plain(original)):
        return made
    array = _as_numpy(made, torch)
    dtype = torch.dtype_name(original.dtype) if is_tensor else name_of_numpy(original.dtype)
    stored = name_of_numpy(array.dtype)
    if (stored, array.shape) != (dtype, tuple(original.shape)):
        raise MismatchError(
            f"the checkpoint holds an array of {stored or array.dtype} {list(array.shape)} here, "
            f"as an object, but an array of {dtype} {list(original.shape)} is wanted",
            hint="to get the stored array, use None instead of the array in the template",
        )
    if is_tensor:
        return torch.filled_by(original, array)
    if not original.flags.writeable:
        return array
    numpy.copyto(original, array)
    return original
