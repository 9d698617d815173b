"""Saves of a training run that are written in the background.

`save_checkpoint` with `args.async_save` puts each save into a queue. The program calls
`maybe_finalize_async_save` between its steps, and with blocking=True before it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict

from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._ranks import Deadline, on_one
from tilestone.megatron.strategies.async_utils import AsyncCallsQueue
from tilestone.megatron.training import _program
from tilestone.megatron.training._saving import Saving

QUEUE = "async_calls"  # the queue's place in a program's checkpointing_context


def scheduler(
    context: Dict[str, Any] | None, args: Any, process_group: Any
) -> Callable[[Any], Any]:
    """The function that takes the request of a save.

    Args:
        context: the program's checkpointing_context. Its queue takes the request, and is created
            if there is none.
        args: as for save_checkpoint(). With None the program is one of Megatron's, whose own queue
            takes the request, unless the context has one.
        process_group: the ranks that save.

    Raises:
        InvalidArgumentError: nothing could finalize the request.
    """
    if context is not None and QUEUE in context:
        return context[QUEUE].schedule_async_request  # type: ignore[no-any-return]
    programs = _program.async_saves() if args is None else None
    if programs is not None:
        return programs.schedule_async_save  # type: ignore[no-any-return]
    if context is None:
        raise InvalidArgumentError(
            "args.async_save needs a checkpointing_context, which keeps the saves in flight",
            hint="pass the same dict to each save, and to maybe_finalize_async_save between steps",
        )
    context[QUEUE] = AsyncCallsQueue(process_group=process_group)
    return context[QUEUE].schedule_async_request  # type: ignore[no-any-return]


def maybe_finalize_async_save(
    checkpointing_context: Dict[str, Any] | bool | None = None,
    blocking: bool = False,
    terminate: bool = False,
) -> list[int]:
    """Publishes the saves in flight that have been written, and moves the tracker. Every rank calls.

    Args:
        checkpointing_context: the dict that was passed to save_checkpoint(). If it has no queue, the
            saves are in that of Megatron's training, whose function is called. A bool is that
            function's own first parameter, `blocking`.
        blocking: wait until all saves are written.
        terminate: also end the queue. Without `blocking` the saves that are not written yet are
            then abandoned.

    Returns:
        The numbers of the saves that were finalized, counted from 0; [] if Megatron's queue has them.

    Raises:
        CheckpointingException: a save failed, on every rank; the tracker names what it named before.
    """
    if isinstance(checkpointing_context, bool):
        blocking, terminate = checkpointing_context, blocking or terminate
        checkpointing_context = None
    queue = (checkpointing_context or {}).get(QUEUE)
    if queue is None:
        programs = _program.async_saves()
        if programs is not None and _program.arguments() is not None:
            programs.maybe_finalize_async_save(blocking, **({"terminate": True} if terminate else {}))
        return []
    finalized: list[int] = queue.maybe_finalize_async_calls(blocking)
    if terminate:
        queue.close(abort=not blocking)
    return finalized


def is_empty_async_queue(checkpointing_context: Dict[str, Any] | None = None) -> bool:
    """Whether no save is in flight. Where they are: as for `maybe_finalize_async_save`."""
    queue = (checkpointing_context or {}).get(QUEUE)
    if queue is not None:
        return bool(queue.get_num_unfinalized_calls() == 0)
    programs = _program.async_saves()
    return programs is None or bool(programs.is_empty_async_queue())


class Finalizing:
    """Finalizes a save of a training run: publishes the checkpoint, then moves the tracker, and
    removes what the checkpoint replaces."""

    def __init__(self, save: Saving, group: Any, deadline: Deadline) -> None:
        self._functions: list[Callable[[], Any]] = []  # publish the checkpoint
        self._save = save
        self._group = group
        self._deadline = deadline

    def instead_of(self, request: Any) -> Any:
        """Takes the place of a request's functions, and calls them first."""
        self._functions = list(request.finalize_fns)
        request.finalize_fns[:] = [self]
        return request

    def __call__(self) -> None:
        """Finalizes. Every rank calls.

        Raises:
            CheckpointingException: the save failed, or the tracker can't be moved; on every rank.
        """
        for function in self._functions:
            function()
        work = "tracker of a training run"
        on_one(work, self._group, self._save.publish, self._deadline)
        if _ranks.rank(self._group) == 0:
            self._save.remove_replaced()

    def abandon(self) -> None:
        """Abandons the save."""
        for function in self._functions:
            getattr(function, "abandon", lambda: None)()
