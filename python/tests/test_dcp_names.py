"""Every public name and parameter of torch.distributed.checkpoint is in tilestone.dcp."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch.distributed.checkpoint as stock
from conftest import TABLES

import tilestone.dcp as dcp

MODULES = [
    module.name for module in pkgutil.iter_modules(stock.__path__) if not module.name[0] == "_"
]
# Names of a module that are its own, and not only imported by it.
OWN = {"__all__", "__file__", "__doc__"}


def parameters(item: Any) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each parameter."""
    return [(each.name, each.kind, each.default) for each in signature(item).parameters.values()]


def signature(item: Any) -> inspect.Signature:
    return inspect.signature(item)


def public(module: Any) -> list[str]:
    """The names that a module says are public, or all without an underscore."""
    return sorted(getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"]))


def compare(ours: Any, theirs: Any, name: str) -> int:
    """Checks that a name has the same meaning. Returns 1 if it is not simply torch's."""
    found, expected = getattr(ours, name), getattr(theirs, name)
    if found is expected or inspect.ismodule(expected):
        return 0
    assert parameters(found) == parameters(expected), name
    if inspect.isclass(expected):
        assert issubclass(found, expected)
        for method in (each for each in vars(expected) if each[0] != "_"):
            ours_of, theirs_of = getattr(found, method), getattr(expected, method)
            if callable(theirs_of) and ours_of != theirs_of:
                assert parameters(ours_of) == parameters(theirs_of), f"{name}.{method}"
    return 1


def test_the_package_has_every_name_and_parameter_of_torchs(
    record_property: pytest.RecordProperty,
) -> None:
    names = public(stock)
    replaced = [name for name in names if compare(dcp, stock, name)]
    assert replaced == [
        "FileSystemReader", "FileSystemWriter", "HuggingFaceStorageReader", "HuggingFaceStorageWriter",
        "async_save", "load", "load_state_dict", "save", "save_state_dict",
    ]  # fmt: skip
    ours = [name for name in dcp.__all__ if name not in names]
    assert ours == ["disable", "enable"]
    record_property(TABLES, f"tilestone.dcp: {len(names)} names of torch's, {len(replaced)} own")


@pytest.mark.parametrize("module", MODULES)
def test_each_module_has_every_name_and_parameter_of_torchs(module: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.checkpoint.{module}")
    ours = importlib.import_module(f"tilestone.dcp.{module}")
    for name in public(theirs):
        compare(ours, theirs, name)
    if ours is not theirs:
        assert set(ours.__all__) == set(theirs.__all__)
        for name in vars(theirs):  # private ones too
            assert hasattr(ours, name) or name in OWN
