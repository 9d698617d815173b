"""A device for tests that needs no hardware: its tensors are in host memory, but behave as on a GPU.

`put(tensor)` moves a tensor there. Only `tilestone._torch.devices` reaches its memory in batches. A
batch is done by a thread, in the order of submission, when somebody waits for it or a later one
(`Lane.eager`: as soon as possible). So what is read before the wait has wrong bytes, and memory
that is changed before the wait is copied with the changes, as on a device that is as late as it may
be. Lanes count what they do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tilestone._torch import devices, live

KIND = "privateuseone"  # a kind of device that torch knows and that no library here implements
_POISON = 0xDB


class Forced(torch.Tensor):
    """A tensor on a forced device. Its views and copies are on that device too."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(KIND, self.__dict__.get("index", 0))

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def detach(self) -> torch.Tensor:
        return put(self.as_subclass(torch.Tensor).detach(), self.device.index)


def put(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The tensor, in the same memory, on a forced device."""
    made = tensor.as_subclass(Forced)
    made.__dict__["index"] = index
    return made


class Lane(devices.Lane):
    """A forced device's lane.

    Attributes:
        eager: copies are done as soon as the thread comes to it.
        counts: batches, copies (between device and host), moved (their bytes), arranged (copies
            within the device), waits, idle_waits (for the batch that was submitted last), pins.
        unpinned: bytes moved from or to host memory that was not pinned.
        peak: most bytes of scratch memory at a time.
        pinned: bytes pinned now.
    """

    pins = True
    overlaps = True
    eager = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pinned: dict[int, int] = {}
        self.reset()
        self.failure: BaseException | None = None  # of the device itself
        self._now = 0
        self._changed = threading.Condition()
        self._queue: list[tuple[int, Callable[[], Any] | None]] = []
        self._submitted = 0
        self._allowed = 0  # the number of the last batch that may be done
        self._done = 0
        threading.Thread(target=self._serve, daemon=True, name="forced-device").start()

    def reset(self) -> None:
        """All counts start again."""
        self.counts = dict.fromkeys(
            ("batches", "copies", "moved", "arranged", "waits", "idle_waits", "pins"), 0
        )
        self.unpinned = 0
        self.peak = 0
        self.callers = 0

    # ---- What the lane does ----

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor)

    def note_caller(self) -> None:
        self.callers += 1

    def pin(self, address: int, nbytes: int, owner: Any) -> Any:
        self.counts["pins"] += 1
        self.pinned[address] = nbytes
        return _Pinned(self.pinned, address, owner)

    def _empty(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._now += nbytes
        self.peak = max(self.peak, self._now)

        def freed() -> None:
            self._now -= nbytes

        weakref.finalize(made, freed)
        return made

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.counts["copies"] += 1
        self.counts["moved"] += target.numel()
        if self._in_pinned(target) == self._in_pinned(source):
            self.unpinned += target.numel()
        if self._in_pinned(target):
            target.fill_(_POISON)
        self._enqueue(lambda: target.copy_(source))

    def _arrange(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.counts["arranged"] += 1
        self._enqueue(lambda: target.copy_(source))

    def _mark(self) -> Any:
        self.counts["batches"] += 1
        self._enqueue(None)
        self._submitted += 1
        return self._submitted

    def wait(self, mark: Any) -> None:
        self.counts["waits"] += 1
        self.counts["idle_waits"] += int(mark == self._submitted)
        with self._changed:
            self._allowed = max(self._allowed, mark)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= mark)
        if self.failure is not None:
            raise self.failure

    # ---- The device ----

    def _in_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        ranges = list(self.pinned.items())
        return any(begin <= address < begin + nbytes for begin, nbytes in ranges)

    def _enqueue(self, work: Callable[[], Any] | None) -> None:
        with self._changed:
            self._queue.append((self._submitted + 1, work))
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return bool(self._queue) and (self.eager or self._queue[0][0] <= self._allowed)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                batch, work = self._queue.pop(0)
                if work is None:  # the end of the batch
                    self._done = batch
                    self._changed.notify_all()
                    continue
            try:
                with torch.inference_mode():
                    work()
            except BaseException as error:
                self.failure = error
            del work


class _Pinned:
    def __init__(self, ranges: dict[int, int], address: int, owner: Any) -> None:
        self._ranges = ranges
        self._address = address
        self._owner = owner

    def __del__(self) -> None:
        self._ranges.pop(self._address, None)


def lane(index: int = 0) -> Lane:
    """The lane of a forced device, with its counts reset."""
    found = devices.lane_of(torch.device(KIND, index))
    assert isinstance(found, Lane)
    found.reset()
    return found


devices._kinds[KIND] = Lane
live.PLAIN = (*live.PLAIN, Forced)  # it has torch's counters
