"""Arrays that a checkpoint holds as objects: PyTorch pickles those of numpy.

Tilestone stores them as tensors. A template's array is filled from either.
"""

from __future__ import annotations

from typing import Any

import numpy

from tilestone import _numpy
from tilestone._errors import MismatchError


def _as_numpy(made: Any, torch: Any) -> numpy.ndarray[Any, Any]:
    if torch is not None and torch.is_tensor(made):
        return _numpy.array(torch.host_view(made.contiguous()))
    if isinstance(made, numpy.generic):
        made = numpy.asarray(made)
    if not isinstance(made, numpy.ndarray):
        raise MismatchError(
            f"an array is wanted where the checkpoint has an object of {type(made).__name__}",
            hint="want None in the array's place to get the object",
        )
    return made


def filled_by(original: Any, made: Any, torch: Any) -> Any:
    """`made`, or the template's array after it was filled with what `made` holds.

    Args:
        original: the template's leaf, or a list of leaves.
        made: what the checkpoint has as an object there.
        torch: the module tilestone._torch_bridge, or None while torch is not loaded.

    Raises:
        MismatchError: the template has an array, and the object is none of its dtype and shape.
    """
    if type(original) is list and type(made) is list and len(original) == len(made):
        return [filled_by(a, b, torch) for a, b in zip(original, made, strict=True)]
    is_tensor = torch is not None and torch.is_tensor(original)
    if not is_tensor and not (isinstance(original, numpy.ndarray) and _numpy.is_plain(original)):
        return made
    array = _as_numpy(made, torch)
    dtype = torch.dtype_name(original.dtype) if is_tensor else _numpy.dtype_name(original)
    stored = _numpy.dtype_name(array)
    if (stored, array.shape) != (dtype, tuple(original.shape)):
        raise MismatchError(
            f"the checkpoint has an array of {stored or array.dtype} {list(array.shape)} here, as "
            f"an object, but one of {dtype} {list(original.shape)} is wanted",
            hint="want None in the array's place to get it as it is",
        )
    if is_tensor:
        return torch.filled_by(original, array)
    if not original.flags.writeable:
        return array
    numpy.copyto(original, array)
    return original
