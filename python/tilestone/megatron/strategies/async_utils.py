"""The request of an asynchronous save, which a strategy passes to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks


class AsyncRequest(NamedTuple):
    """A prepared save, and the functions that then complete its checkpoint.

    Attributes:
        async_fn: does the writing; None: nothing is left to write.
        async_fn_args: its arguments; exactly three if there is a preload_fn.
        finalize_fns: called one after the other, on every rank, once async_fn has ended on all.
        async_fn_kwargs: its keyword arguments.
        preload_fn: called first; its result replaces the second argument.
        is_frozen: no more functions may be added.
        call_idx: number of the request in its scheduler.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function that is called after the existing ones.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("can't add a function to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Does everything now, in this process. Every rank calls: each waits for the others.

        Raises:
            CheckpointingException: there is a preload_fn, but there are not exactly 3 arguments.
        """
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) != 3:
                raise InvalidArgumentError(
                    f"preload_fn needs an async_fn with 3 arguments, but there are {len(args)}"
                )
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        _ranks.barrier()
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Returns the same request, to which no more functions can be added."""
        return self._replace(is_frozen=True)
