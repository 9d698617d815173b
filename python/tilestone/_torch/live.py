"""Torch's tensors that a save reads after its call (stage="lazy"), and what their counters say.

A tensor has a counter of changes (`_version`), which it shares with its views. An operation raises
it after it has changed the elements. A DTensor has two: its own, which it shares with its aliases
and which an operation on a DTensor raises, and its local tensor's, which operations on that and on
`to_local()` raise.

Some operations raise none, so this is not the only guard:

- torch's fused optimizers, and `torch._foreach_*` of DTensors, with which optimizers make their
  steps: `Optimizer.step` of any optimizer ends the staging before it begins;
- running statistics, which the forward pass changes: small tensors are copied in the call;
- the others, which docs/saving.md lists: the engine compares samples of the bits, in host memory.

An operation on a device raises the counter when it is called, and runs later. The copies are
submitted in the call (devices.py) and waited for before the counters are compared.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tilestone import _core
from tilestone._torch.devices import DeviceTensor, Lane
from tilestone._torch.meta import PLAIN
from tilestone._torch.parts import local_of

#: Tensors of at most so many bytes are copied in the call.
SMALL_BYTES = 64 << 10


class _Seen(NamedTuple):
    """A tensor as it was in the call.

    Attributes:
        counted: what has the counters: an alias of the tensor, which keeps the memory alive even if
            the program gives its tensor another one, and perhaps the DTensor around it.
        counters: their counters.
        address: the storage's.
    """

    key: str
    counted: tuple[torch.Tensor, ...]
    counters: tuple[int, ...]
    address: int


class Watched:
    """The tensors that one rank's save reads after its call. Made and used by the binding."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._tensors: list[_Seen] = []
        self._lanes: set[Lane] = set()

    def watch(self, arrays: list[tuple[str, Any, int | DeviceTensor]]) -> list[bool]:
        """Called in the save's call.

        Args:
            arrays: of each array the key, the object that owns it, and the address in host memory
                or the tensor on a device.

        Returns:
            For each whether it is watched. The others must be copied now.
        """
        self._lanes = {each.lane for *_, each in arrays if isinstance(each, DeviceTensor)}
        return [self._add(*each) for each in arrays]

    def delay_program(self) -> bool:
        """Called in the save's call, when the copies of tensors that are not watched are submitted.

        Returns:
            Whether what this thread's streams are given from now on comes after these copies.
        """
        lanes, self._lanes = self._lanes, set()
        return all([lane.delay_caller() for lane in lanes])

    def _add(self, key: str, owner: Any, memory: int | DeviceTensor) -> bool:
        whole = owner[0] if type(owner) is tuple else owner  # beside a part of it, or a copy
        local = local_of(whole)
        if type(local) not in PLAIN or local.nbytes <= SMALL_BYTES:
            return False
        if local.is_inference() or whole is not local and whole.is_inference():
            return False
        if isinstance(memory, DeviceTensor) == (local.device.type == "cpu"):
            return False  # what is saved is a copy
        if isinstance(memory, DeviceTensor):
            if not memory.lane.overlaps:
                return False
            memory = memory.elements.data_ptr()
        alias = local.detach()
        storage = alias.untyped_storage()
        first = storage.data_ptr()
        if not first <= memory < first + storage.nbytes():  # what is saved is a copy
            return False
        counted = (alias,) if whole is local else (alias, whole)
        self._tensors.append(_Seen(key, counted, tuple(each._version for each in counted), first))
        return True

    def started(self, core: _core.AsyncSave) -> None:
        """Called when the save has begun, at the end of its call: steps of optimizers seal it."""
        if not core.staged.done():
            _seal_before_steps(core, self)

    def changed(self) -> str | None:
        """The key of a tensor that was changed since it is watched, or None.

        Called once, on the program's thread or while that waits.
        """
        tensors, self._tensors = self._tensors, []
        for key, counted, counters, first in tensors:
            if tuple(each._version for each in counted) != counters:
                return key
            if counted[0].untyped_storage().data_ptr() != first:
                return key
        return None

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's step may change one of the tensors."""
        if self._process != os.getpid():
            return False
        if self._thread == threading.get_ident():
            return True  # perhaps not the step, but what its caller does next
        own = {each.address for each in self._tensors}
        local = (local_of(each) for each in _tensors_in([optimizer.param_groups, optimizer.state]))
        return any(type(each) in PLAIN and each.untyped_storage().data_ptr() in own for each in local)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples. Optimizers keep their states in all of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in list(value.values()) if isinstance(value, dict) else value:
            yield from _tensors_in(each)


# What is not staged yet: the save and its tensors.
_pending: dict[_core.AsyncSave, Watched] = {}


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for save, watched in list(_pending.items()):
        if watched.concerns(optimizer):
            _seal(save)
            _pending.pop(save, None)


def _seal(save: _core.AsyncSave) -> None:
    """Ends the staging. If that fails, it raises nothing: `AsyncSave.durable` has the error."""
    save.seal()
    save.staged.wait()


@functools.cache
def _install() -> None:
    # For good: a hook can't be removed while torch calls the hooks.
    register_optimizer_step_pre_hook(_before_step)


def _seal_before_steps(save: _core.AsyncSave, watched: Watched) -> None:
    """Lets the next step of an optimizer seal the save first."""
    _install()
    _pending[save] = watched
    save.staged.on_done(lambda: _pending.pop(save, None))
