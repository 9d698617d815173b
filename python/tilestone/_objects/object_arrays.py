"""Arrays that a checkpoint holds as objects, because PyTorch pickles numpy arrays.

Tilestone stores numpy arrays as tensors. A template's array is filled from either.
"""

from __future__ import annotations

from typing import Any

import numpy

from tilestone._errors import MismatchError
from tilestone._objects import host_arrays


def _as_numpy(made: Any, torch: Any) -> numpy.ndarray[Any, Any]:
    if torch is not None and torch.is_tensor(made):
        return host_arrays.array(torch.host_view(made.contiguous()))
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
    is_plain = isinstance(original, numpy.ndarray) and host_arrays.is_plain(original)
    if not is_tensor and not is_plain:
        return made
    array = _as_numpy(made, torch)
    dtype = torch.dtype_name(original.dtype) if is_tensor else host_arrays.dtype_name(original)
    stored = host_arrays.dtype_name(array)
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
