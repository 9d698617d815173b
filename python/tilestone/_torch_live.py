"""Torch's tensors that a save reads after its call (stage="lazy"), and what their counters say.

A tensor has a counter of changes (`_version`), which it shares with its views. An operation raises
it after it has changed the elements. Some operations never do, so this is not the only guard:

- torch's fused optimizers: `Optimizer.step` of any optimizer ends the staging before it begins;
- running statistics, which the forward pass changes: small tensors are copied in the call.

The others are listed in docs/saving.md.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tilestone._torch_meta import PLAIN

#: Tensors of at most so many bytes are copied in the call.
SMALL_BYTES = 64 << 10


class Watched:
    """The tensors that one rank's save reads after its call. Made and used by the binding."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        # Each with its key, its counter, and its address. They are aliases, which keep the memory
        # alive even if the program gives its tensor another one.
        self._tensors: list[tuple[str, torch.Tensor, int, int]] = []

    def watch(self, arrays: list[tuple[str, Any, int]]) -> list[bool]:
        """Called in the save's call.

        Args:
            arrays: of each array the key, the object that owns it, and the address.

        Returns:
            For each whether it is watched. The others must be copied now.
        """
        return [self._add(*each) for each in arrays]

    def _add(self, key: str, tensor: Any, address: int) -> bool:
        # A DTensor, its aliases and its local tensor have a counter each.
        if type(tensor) not in PLAIN or tensor.is_inference() or tensor.device.type != "cpu":
            return False
        if tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            return False
        alias = tensor.detach()
        storage = alias.untyped_storage()
        first = storage.data_ptr()
        if not first <= address < first + storage.nbytes():  # what is saved is a copy
            return False
        self._tensors.append((key, alias, alias._version, first))
        return True

    def changed(self) -> str | None:
        """The key of a tensor that was changed since it is watched, or None.

        Called once, on the program's thread or while that waits.
        """
        tensors, self._tensors = self._tensors, []
        for key, alias, version, first in tensors:
            if alias._version != version or alias.untyped_storage().data_ptr() != first:
                return key
        return None

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's step may change one of the tensors."""
        if self._process != os.getpid():
            return False
        if self._thread == threading.get_ident():
            return True  # perhaps not the step, but what its caller does next
        own = {first for *_, first in self._tensors}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        plain = (each for each in parameters + states if type(each) in PLAIN)
        return any(each.untyped_storage().data_ptr() in own for each in plain)


# What is not staged yet: the step of the save, which has to end, and the tensors.
_pending: dict[Any, Watched] = {}


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for staged, watched in list(_pending.items()):
        if watched.concerns(optimizer):
            staged.exception()


@functools.cache
def _install() -> None:
    # For good: a hook can't be removed while torch calls the hooks.
    register_optimizer_step_pre_hook(_before_step)


def stage_before_steps(staged: Any, watched: Watched) -> None:
    """Lets the next step of an optimizer wait for `AsyncSave.staged`.

    If staging fails, the step raises nothing: `AsyncSave.durable` has the error.
    """
    _install()
    _pending[staged] = watched
    staged.add_done_callback(lambda done: _pending.pop(done, None))
