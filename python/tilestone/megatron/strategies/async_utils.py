"""The request of an asynchronous save, as strategies hand it to whoever schedules it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilestone._errors import InvalidArgumentError


class AsyncRequest(NamedTuple):
    """A save that is prepared, and what makes its checkpoint complete afterwards.

    Attributes:
        async_fn: writes; None: nothing is left to write.
        async_fn_args: its arguments; exactly three where there is a preload_fn.
        finalize_fns: called one after the other, on every rank, once async_fn has ended on all.
        async_fn_kwargs: its keyword arguments.
        preload_fn: called first; what it returns takes the place of the second argument.
        is_frozen: no further function may be added.
        call_idx: the number of the request among those of its scheduler.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function that is called after those that are there.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("a frozen AsyncRequest takes no further functions")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Does all of it now, in this process. Every rank calls: it waits for the others.

        Raises:
            CheckpointingException: there is a preload_fn, and not three arguments.
        """
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) != 3:
                raise InvalidArgumentError(
                    f"preload_fn gives the second of 3 arguments of async_fn, which has {len(args)}"
                )
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        from tilestone.megatron import _ranks

        _ranks.barrier()
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """The same request, which takes no further functions."""
        return self._replace(is_frozen=True)
