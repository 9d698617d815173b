"""Memory for a template's tensors on torch's meta device.

Tensors that are tied there, which means that they are the same view of one storage, get the same
memory in one load, so that they are tied in what the load returns.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tilestone._errors import InvalidArgumentError
from tilestone._torch.parts import dtensor_type, move_statements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (torch.Tensor, torch.nn.Parameter)  # not their subclasses


class Memory:
    """The memory that one load has given to tensors on the meta device."""

    def __init__(self) -> None:
        self._views: dict[Any, tuple[Any, torch.Tensor]] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # by id: the template, what replaces it

    def of(
        self, tensor: torch.Tensor, device: torch.device | str, order: torch.memory_format
    ) -> torch.Tensor:
        """Memory with a tensor's dtype and shape: the same for all that are tied."""
        storage = tensor.untyped_storage()
        view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        place = (storage._cdata, *view)
        if place not in self._views:
            made = torch.empty_like(
                tensor, device=device, memory_format=order, requires_grad=False
            )
            self._views[place] = (storage, made)
        return self._views[place][1]

    def known(self, item: Any) -> Any:
        """What replaces an object of the template; None if `keep` was not called for it."""
        return self._made[id(item)][1] if id(item) in self._made else None

    def keep(self, item: Any, made: Any) -> Any:
        """Records what replaces an object of the template; returns it."""
        self._made[id(item)] = (item, made)
        return made


_current: contextvars.ContextVar[Memory | None] = contextvars.ContextVar("memory", default=None)


@contextlib.contextmanager
def of_load(memory: Memory) -> Iterator[None]:
    """While it lasts, tensors on the meta device get their memory from `memory`."""
    token = _current.set(memory)
    try:
        yield
    finally:
        _current.reset(token)


def _memory() -> Memory:
    return _current.get() or Memory()


def replaced(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for an ordinary tensor, and what a load returns for the tensor."""
    memory = _memory()
    plain = memory.of(tensor, "cpu", torch.contiguous_format)
    known = memory.known(tensor)
    return plain, memory.keep(tensor, _like(plain.detach(), tensor)) if known is None else known


def _like(made: Any, template: Any) -> Any:
    """A new tensor as a parameter, or with requires_grad, like its template on the meta device."""
    if isinstance(template, torch.nn.Parameter):
        made = torch.nn.Parameter(made, template.requires_grad)
        vars(made).update(vars(template))
        return made
    return made.requires_grad_() if template.requires_grad and template.is_leaf else made


def dtensor_with_memory(item: DTensor, local: torch.Tensor) -> Any:
    """A new DTensor with memory, that stands where one on the meta device stands."""
    memory = _memory()
    if (known := memory.known(item)) is not None:
        return known
    kind = item.device_mesh.device_type
    current = None if kind == "cpu" else getattr(getattr(torch, kind, None), "current_device", None)
    device = torch.device(kind) if current is None else torch.device(kind, current())
    made = dtensor_type().from_local(
        memory.of(local, device, torch.preserve_format),
        item.device_mesh,
        item.placements,
        run_check=False,
        shape=item.size(),
        stride=item.stride(),
    )
    made._spec = item._spec  # with its order of shards
    move_statements(local, made._local_tensor)
    return memory.keep(item, _like(made, item))


def part_with_memory(item: Any, own: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What a load returns for an object that says itself where it stands, and its new memory.

    Args:
        own: its local tensor, which is on the meta device.

    Raises:
        InvalidArgumentError: only the object's class knows how to give it memory.
    """
    if isinstance(item, dtensor_type()):
        made = dtensor_with_memory(item, own)
        move_statements(item, made)
        return made, made._local_tensor
    if type(item) not in PLAIN:
        raise InvalidArgumentError(
            f"a {type(item).__name__} on the meta device has no memory, and only its class knows "
            "how to give it some"
        )
    plain, made = replaced(item)
    move_statements(item, made)
    return made, plain
