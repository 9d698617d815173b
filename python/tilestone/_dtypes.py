"""Element types: one name for what numpy, ml_dtypes and torch call it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import ml_dtypes
import numpy

from tilestone import _core


class DType(str):
    """An element type, by torch's name: "float32", "bfloat16", "float8_e4m3fn".

    Equal to its name as text. All names: `tilestone.dtype_names()`.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> DType:
        if name not in _itemsizes():
            _core.itemsize(name)  # raises, naming it
        return super().__new__(cls, name)

    def __repr__(self) -> str:
        return f"tilestone.DType({str.__repr__(self)})"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _itemsizes()[str(self)]

    @property
    def numpy(self) -> numpy.dtype[Any]:
        """The numpy (or ml_dtypes) dtype of the same elements.

        numpy knows no complex32 and no packed 4-bit pairs: they are structured dtypes,
        (re, im) of float16 and a byte named `e2m1x2`.
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
    """The name of a numpy dtype; None where no checkpoint can hold it."""
    return _names_by_numpy().get(dtype.newbyteorder("=") if not dtype.isnative else dtype)


def native_type(name: str) -> Any:
    """torch's dtype when torch is loaded, a DType otherwise."""
    torch = sys.modules.get("torch")
    return DType(name) if torch is None else getattr(torch, name)
