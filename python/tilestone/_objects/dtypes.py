"""Element types: one name for each type of numpy, ml_dtypes and torch."""

from __future__ import annotations

import functools
import sys
from typing import Any

import ml_dtypes
import numpy

from tilestone import _core


class DType(str):
    """An element type with torch's name: "float32", "bfloat16", "float8_e4m3fn".

    A DType is a str and equals its name. `tilestone.dtype_names()` lists all names.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> DType:
        if name not in _itemsizes():
            _core.itemsize(name)  # raises an error with the name
        return super().__new__(cls, name)

    def __repr__(self) -> str:
        return f"tilestone.DType({str.__repr__(self)})"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _itemsizes()[str(self)]

    @property
    def numpy(self) -> numpy.dtype[Any]:
        """The numpy (or ml_dtypes) dtype of the same elements.

        numpy has no complex32 and no packed pairs of 4-bit floats. They become structured dtypes:
        (re, im) of float16, and one byte named `e2m1x2`.
        """
        return _numpy_dtypes()[str(self)]

    @property
    def torch(self) -> Any:
        """The torch.dtype; imports torch."""
        import torch

        return getattr(torch, str(self))


def dtype_names() -> list[str]:
    """The names of all element types that a checkpoint can hold."""
    return _core.dtypes()


@functools.cache
def _itemsizes() -> dict[str, int]:
    return {name: _core.itemsize(name) for name in _core.dtypes()}


@functools.cache
def _numpy_dtypes() -> dict[str, numpy.dtype[Any]]:
    special: dict[str, Any] = {
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
        "complex32": [("re", numpy.float16), ("im", numpy.float16)],
        "float4_e2m1fn_x2": [("e2m1x2", numpy.uint8)],
    }
    return {name: numpy.dtype(special.get(name, name)) for name in _core.dtypes()}


@functools.cache
def _names_by_numpy() -> dict[numpy.dtype[Any], str]:
    return {dtype: name for name, dtype in _numpy_dtypes().items()}


def name_of_numpy(dtype: numpy.dtype[Any]) -> str | None:
    """The name of a numpy dtype; None if a checkpoint can't hold it."""
    return _names_by_numpy().get(dtype.newbyteorder("=") if not dtype.isnative else dtype)


def native_type(name: str) -> Any:
    """A torch dtype if torch is loaded, otherwise a DType."""
    torch = sys.modules.get("torch")
    return DType(name) if torch is None else getattr(torch, name)
