"""Progress of long work: callbacks, and a bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """The progress of one phase of long work.

    Attributes:
        phase: "write", "read", "verify" or "repair".
        bytes_done, bytes_total: bytes of this rank.
        seconds: time since the phase began.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    seconds: float


ProgressCallback = Callable[[Progress], object]
_Sink = Callable[[str, int, int, float], None]


class _Bar:
    """One bar for each phase, with the rate and the remaining time."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.progress import TransferSpeedColumn

        self._title = title
        self._tasks: dict[str, Any] = {}
        self.bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def update(self, phase: str, done: int, total: int, _seconds: float) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self.bars.add_task(f"{self._title}: {phase}", total=total)
        self.bars.update(self._tasks[phase], completed=done, total=total)


@contextlib.contextmanager
def reporting(
    progress: bool | ProgressCallback, title: str, rank: int = 0
) -> Iterator[_Sink | None]:
    """What the engine calls for the option `progress`: the caller's function, a bar, or None.

    progress=True shows a bar on rank 0 if standard error is a terminal.
    """
    if callable(progress):
        callback = progress

        def report(phase: str, done: int, total: int, seconds: float) -> None:
            callback(Progress(phase, done, total, seconds))

        yield report
    elif progress and rank == 0 and sys.stderr.isatty():
        bar = _Bar(title)
        with bar.bars:
            yield bar.update
    else:
        yield None
