"""CUDA for tests that need no GPU: what `devices` uses of it, with streams that are late.

`put(tensor)` moves a tensor to a device, and `compute(tensor, work)` gives work on it to the
current stream, as a kernel would be. A stream does what it was given when somebody waits for it,
and no sooner: what is copied, read or changed without the needed waits has wrong elements. The
engine's copies go through the real `_CudaLane`.

Each thread has its current device and its current streams. A call that would make a context on a
device that has none is noted in `contexts`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tilestone._calls import async_save
from tilestone._torch import devices, live

_POISON = 0xDB
_NO_FUNCTION = torch._C.DisableTorchFunctionSubclass


class Stream:
    """A queue of work. Work is done in its order when it, or something after it, is waited for."""

    def __init__(self, device: torch.device, name: str = "own") -> None:
        self.device = device
        self.name = name
        self.process = os.getpid()
        self.work: list[Callable[[], Any]] = []
        self.done = 0

    def run_to(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            with torch.inference_mode():
                self.work[self.done - 1]()

    def wait_stream(self, other: Stream) -> None:
        assert self.process == os.getpid(), "a forked child uses a stream of its parent"
        end = len(other.work)
        self.work.append(lambda: other.run_to(end))

    def synchronize(self) -> None:
        self.run_to(len(self.work))


class Event:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking  # else a thread that waits occupies a core
        self._stream: Stream | None = None
        self._at = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._at = stream, len(stream.work)

    def synchronize(self) -> None:
        assert self._stream is not None
        assert self._stream.process == os.getpid(), "a forked child waits for its parent's stream"
        with cuda.lock:
            Cuda.waits += 1
            self._stream.run_to(self._at)


class Cuda(threading.local):
    """In place of torch.cuda. Its attributes but for the thread's own are those of the class."""

    lock = threading.RLock()
    Event = Event
    pinned: dict[int, int]
    contexts: set[int]
    waits: int
    capturing: bool
    pin_error: int
    sticky: int  # the error that the next kernel reports
    names: int

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[torch.device, Stream] = {}

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.contexts.add(device.index)
        return Stream(device)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.index = self.index, device.index
        yield
        self.index = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream.device.index == self.index, "a stream of a device that is not the current one"
        before = self.current_stream(stream.device)
        self.streams[stream.device] = stream
        yield
        self.streams[stream.device] = before

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams.get(device) or _default_stream(device)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.contexts.add(self.index)
        assert flags == 1  # portable: there may be several devices
        if Cuda.pin_error:
            Cuda.sticky = Cuda.pin_error
            return Cuda.pin_error
        with self.lock:
            assert address not in self.pinned
            self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.contexts.add(self.index)
        with self.lock:
            if self.pinned.pop(address, None) is not None:
                return 0
            Cuda.sticky = 713
            return 713


cuda = Cuda()
_defaults: dict[torch.device, Stream] = {}
_devices: dict[int, int] = {}  # index, by address of the storage


def _default_stream(device: torch.device) -> Stream:
    with Cuda.lock:
        return _defaults.setdefault(device, Stream(device, "default"))


class Tensor(torch.Tensor):
    """A tensor on a simulated device, in host memory. Its views are on that device too."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        with _NO_FUNCTION():
            return torch.device("cuda", _devices[self.untyped_storage().data_ptr()])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.copy_:
            _copy(*args, **(kwargs or {}))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in its memory, as the host would see it."""
    with _NO_FUNCTION():
        return tensor.as_subclass(torch.Tensor)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, with a counter of their own."""
    return plain(tensor).data


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    within = isinstance(target, Tensor) and isinstance(source, Tensor)
    device = target.device if isinstance(target, Tensor) else source.device
    to, of = _memory(target), _memory(source)
    if isinstance(target, Tensor):
        torch.autograd.graph.increment_version(target)
    if not isinstance(target, Tensor):
        to.fill_(_POISON)
    with Cuda.lock:
        stream = cuda.current_stream(device)
        stream.work.append(lambda: to.copy_(of))
        if not non_blocking and not within:
            stream.synchronize()


def put(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The tensor, in the same memory, on a device."""
    _devices[tensor.untyped_storage().data_ptr()] = index
    return tensor.as_subclass(Tensor)


def compute(tensor: torch.Tensor, work: Callable[[torch.Tensor], Any]) -> None:
    """Gives work on a tensor to this thread's current stream of its device, and counts nothing."""
    memory = _memory(tensor)
    with Cuda.lock:
        cuda.current_stream(tensor.device).work.append(lambda: work(memory))


def operate(tensor: torch.Tensor, work: Callable[[torch.Tensor], Any]) -> None:
    """As an operation of torch does: the tensor's counter is raised now, and the work comes later."""
    torch.autograd.graph.increment_version(tensor)
    compute(tensor, work)


class Lane(devices._CudaLane):
    def _empty(self, nbytes: int) -> torch.Tensor:
        return put(torch.empty(nbytes, dtype=torch.uint8), self.device.index)


def _forget_error(device: torch.device) -> None:
    assert cuda.index == device.index
    Cuda.sticky = 0


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Replaces torch.cuda in `devices`, and the sessions of `async_save`."""
    Cuda.pinned, Cuda.contexts = {}, set()
    Cuda.waits, Cuda.pin_error, Cuda.sticky = 0, 0, 0
    Cuda.capturing = False
    cuda.streams = {}
    _defaults.clear()
    monkeypatch.setattr(devices, "_cuda", cuda)
    monkeypatch.setattr(devices, "_forget_error", _forget_error)
    monkeypatch.setattr(devices, "_kinds", {"cuda": Lane})
    monkeypatch.setattr(devices, "_lanes", {})
    monkeypatch.setattr(live, "PLAIN", (*live.PLAIN, Tensor))
    monkeypatch.setattr(async_save, "_sessions", async_save._Sessions())
    yield cuda
    async_save._sessions.close()
    gc.collect()  # unpins the sessions' memory
    assert Cuda.sticky == 0, "the program's next kernel would fail"
