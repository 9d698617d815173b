"""The request of an asynchronous save, and a queue of such requests."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import agreed

# Modules of the queues that run a request in a process that was started earlier. That process knows
# only the queue's own class, and may have imported both.
_QUEUES = (
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    "megatron.core.dist_checkpointing.strategies.async_utils",
)


class AsyncRequest(NamedTuple):
    """A prepared save, and the functions that then complete its checkpoint.

    Attributes:
        async_fn: does the writing, or waits for it; None: nothing is left to write.
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
        args = self.loaded_args()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        _ranks.barrier()
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Calls finalize_fns, as the queue of nvidia-resiliency-ext asks a request to. Every rank calls.

        Args:
            validate_matching_call_idx: ignored: if the ranks finalize different saves, the first of
                finalize_fns raises that on all of them.

        Returns:
            call_idx.
        """
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx

    def loaded_args(self) -> list[Any]:
        """The arguments of async_fn, after the preload_fn.

        Raises:
            CheckpointingException: as execute_sync().
        """
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) != 3:
                raise InvalidArgumentError(
                    f"preload_fn needs an async_fn with 3 arguments, but there are {len(args)}"
                )
            args[1] = self.preload_fn()
        return args

    def freeze(self) -> AsyncRequest:
        """Returns the same request, to which no more functions can be added."""
        return self._replace(is_frozen=True)

    def __reduce__(self) -> Any:
        return _unpickled, tuple(self)


def _unpickled(*fields: Any) -> Any:
    """A request in another process: of the classes that the queues there know."""
    found = (getattr(sys.modules.get(module), "AsyncRequest", None) for module in _QUEUES)
    kinds = tuple(dict.fromkeys(kind for kind in found if kind is not None)) or (AsyncRequest,)
    kind: Any = kinds[0] if len(kinds) == 1 else type("AsyncRequest", kinds, {"__slots__": ()})
    return kind(*fields)


class _Running:
    """A scheduled request, whose function runs in a thread."""

    def __init__(self, request: AsyncRequest) -> None:
        self.request = request
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:
            args = request.loaded_args()
            self._thread = threading.Thread(
                target=self._run, args=(request.async_fn, args), name="tilestone-queue", daemon=True
            )
            self._thread.start()

    def _run(self, function: Callable[..., Any], args: list[Any]) -> None:
        try:
            function(*args, **self.request.async_fn_kwargs)
        except BaseException as error:
            self._failure = error

    def is_over(self, blocking: bool) -> bool:
        """Whether the function has ended; with `blocking`, once it has.

        Raises:
            BaseException: what the function has raised.
        """
        if self._thread is not None:
            self._thread.join(None if blocking else 0)
            if self._thread.is_alive():
                return False
        if self._failure is not None:
            raise self._failure
        return True

    def abandon(self) -> None:
        """Abandons the save, if it is one of Tilestone."""
        for finalize in self.request.finalize_fns:
            getattr(finalize, "abandon", lambda: None)()


class AsyncCallsQueue:
    """Asynchronous saves in flight. Every rank schedules and finalizes them in the same order.

    No process is started: a request's function runs in a thread. That of Tilestone's saves only
    waits for the thread that writes.

    Attributes:
        call_idx: number of the last request; -1 before the first.
    """

    def __init__(self, persistent: bool = False, *, process_group: Any = None) -> None:
        """
        Args:
            persistent: ignored: there is no process to keep.
            process_group: the ranks that save; None: torch's default group.
        """
        self.persistent = persistent
        self.call_idx = -1
        self._group = process_group
        self._calls: deque[tuple[int, _Running]] = deque()

    def schedule_async_request(self, async_request: Any) -> int:
        """Starts a request's function, and returns the request's number. Every rank calls.

        Args:
            async_request: an AsyncRequest, of this class or of Megatron-Core's.
        """
        self.call_idx += 1
        fields = {name: getattr(async_request, name) for name in AsyncRequest._fields[:5]}
        request = AsyncRequest(**fields).freeze()._replace(call_idx=self.call_idx)
        self._calls.append((self.call_idx, _Running(request)))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalizes the requests, oldest first, whose function has ended. Every rank calls.

        Args:
            blocking: wait until all requests can be finalized. Otherwise a request that is still
                running on any rank, and those after it, are left for a later call.
            no_dist: the ranks do not ask one another whether they have all ended. Each rank then
                finalizes what has ended there, and waits for the others in the finalizing itself.

        Returns:
            The numbers of the requests that were finalized.

        Raises:
            CheckpointingException: a save failed; on every rank, and its request is dropped.
        """
        finalized = []
        while self._calls:
            number, running = self._calls[0]
            try:
                if not self._have_all_ended(running, blocking, no_dist):
                    break
            except BaseException:
                self._calls.popleft()[1].abandon()
                raise
            self._calls.popleft()
            for finalize in running.request.finalize_fns:
                finalize()
            finalized.append(number)
        return finalized

    def _have_all_ended(self, running: _Running, blocking: bool, no_dist: bool) -> bool:
        if no_dist:
            return running.is_over(blocking)
        _, all_ended = agreed(
            "end of the writing of a save", _ranks.default_group(self._group),
            lambda: running.is_over(blocking), bool, all,
        )  # fmt: skip
        return bool(all_ended)

    def get_num_unfinalized_calls(self) -> int:
        """The number of saves in flight."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalizes all saves; with `abort`, abandons them instead. Every rank calls."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        while self._calls:
            self._calls.popleft()[1].abandon()
