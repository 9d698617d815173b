"""numpy arrays between Tilestone, which stores them as tensors, and stock, which stores objects."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tilestone

ARRAYS = {
    "plain": numpy.arange(6.0).reshape(2, 3),
    "fortran": numpy.asfortranarray(numpy.arange(6, dtype="i4").reshape(2, 3)),
    "foreign": numpy.arange(4, dtype=">f4"),
    "scalar": numpy.array(3.5),
    "empty": numpy.zeros((0, 2)),
    "bool": numpy.array([True, False]),
    "complex": numpy.array([1 + 2j]),
}


def blank(array: Any) -> Any:
    return numpy.zeros(array.shape, array.dtype)


@pytest.mark.parametrize("framework", ["numpy", "torch", "meta", "none"])
@pytest.mark.parametrize("writer", ["stock", "tilestone"])
def test_templates_of_either_kind_are_filled_from_either_writer(
    writer: str, framework: str, ckpt: str
) -> None:
    state = {"a": {"b": dict(ARRAYS)}, "list": [ARRAYS["plain"], ARRAYS["fortran"]]}
    if writer == "stock":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    else:
        tilestone.save(state, ckpt)

    def template(array: Any) -> Any:
        if framework == "numpy":
            return blank(array)
        if framework == "none" and writer == "stock":
            return None
        device = "meta" if framework == "meta" else "cpu"
        native = array.astype(array.dtype.newbyteorder("="))
        return torch.zeros_like(torch.from_numpy(native), device=device)

    wanted = {
        "a": {"b": {name: template(array) for name, array in ARRAYS.items()}},
        "list": [template(state["list"][0]), template(state["list"][1])],
    }
    if framework == "none" and writer == "stock":
        wanted["list"] = None
    loaded = tilestone.load(wanted, ckpt)
    for name, array in ARRAYS.items():
        got = loaded["a"]["b"][name]
        if framework in ("numpy", "torch"):
            assert got is wanted["a"]["b"][name]
        assert tuple(got.shape) == array.shape and got.tolist() == array.tolist(), name
    assert [item.tolist() for item in loaded["list"]] == [a.tolist() for a in state["list"]]


@pytest.mark.parametrize(
    "wanted",
    [numpy.zeros((3, 2)), numpy.zeros((2, 3), "f4"), torch.zeros(2, 3), torch.zeros(6).double()],
    ids=["shape", "dtype", "torch dtype", "torch shape"],
)
def test_an_array_stored_as_an_object_must_fit_the_template(wanted: Any, ckpt: str) -> None:
    dcp.save({"a": {"x": ARRAYS["plain"], "s": "text"}}, checkpoint_id=ckpt, no_dist=True)
    with pytest.raises(tilestone.MismatchError, match="float64") as raised:
        tilestone.load({"a": {"x": wanted}}, ckpt)
    assert raised.value.key == "a.x"
    with pytest.raises(tilestone.MismatchError, match="str") as raised:
        tilestone.load({"a": {"s": wanted}}, ckpt)
    assert raised.value.key == "a.s"


def test_stock_reads_our_arrays_of_numpy_as_tensors(ckpt: str) -> None:
    arrays = {name: array for name, array in ARRAYS.items() if name != "foreign"}
    tilestone.save({"a": arrays}, ckpt)
    targets = {name: numpy.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    # As the documentation of save describes, the tensors share the arrays' memory.
    state = {"a": {name: torch.from_numpy(target) for name, target in targets.items()}}
    dcp.load(state, checkpoint_id=ckpt, no_dist=True)
    for name, array in arrays.items():
        assert targets[name].tolist() == array.tolist(), name
