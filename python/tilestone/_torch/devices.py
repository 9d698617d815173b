"""Copies between the memory of torch's devices and host memory; also of lazy tensors on the host.

Each device has a `Lane`. Copies are submitted to it in batches and done in that order, and each
batch is waited for once. On CUDA and ROCm a lane has a stream of its own, which waits for the
streams on which the caller has computed the tensors. On other devices the host waits for these
streams, and each batch ends before its submission returns.

No copy of a whole tensor is made on a device: a tensor that is not contiguous there goes through
scratch memory of at most `Lane.SCRATCH` bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from tilestone import _core, _forked
from tilestone._errors import InvalidArgumentError

_logger = logging.getLogger("tilestone")
# Ordinary exceptions of one wait after which the device counts as failed: its messages may differ.
_MOST_FAILURES = 16
_cuda: Any = torch.cuda  # without types: some of its functions have none

# (tensor, offset and shape of a box of it or None and None, first byte in the C-contiguous copy of
# that box, host memory for the bytes from there on).
Copy: TypeAlias = tuple["DeviceTensor", Any, Any, int, memoryview]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of integers, which every device can copy and slice."""
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


class DeviceTensor:
    """A tensor on a device, for the engine. It keeps the tensor's memory alive.

    Args:
        tensor: any strided tensor, also a lazily conjugated or negated one.
    """

    __slots__ = ("address", "device", "elements", "lane", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.lane = lane_of(tensor.device)
        self.device = str(self.lane.device)
        self.lane.note_caller()
        self.strides = tensor.stride()
        memory = self.lane.memory_of(tensor)
        # The bits of lazy elements are not those in memory.
        lazy = is_lazy(memory)
        self.elements = memory if lazy else as_integers(memory)
        self.address = 0
        if not lazy:
            with contextlib.suppress(RuntimeError):  # of devices whose tensors have no address
                self.address = memory.data_ptr()


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is conjugated or negated without its memory: its elements must be computed."""
    return bool(tensor.is_conj() or tensor.is_neg())


class Transfer:
    """A batch of copies that was submitted. It keeps the tensors until the batch has ended."""

    def __init__(self, lane: Lane, copies: Sequence[Copy], mark: Any) -> None:
        self._lane = lane
        self._copies = copies
        self._mark = mark
        self._ended = False

    def wait(self) -> None:
        """Returns when all copies have ended. Must be called again until it has returned once."""
        if self._ended:
            return  # it has raised what the device reported
        failure = _done_despite_signals(lambda: self._lane.wait(self._mark))
        self._ended = True
        self._copies = ()
        self._lane.end_batch()
        if failure is not None:
            raise failure


def _done_despite_signals(action: Callable[[], object]) -> BaseException | None:
    """Does an action to its end: the copies that it waits for use memory that is released then.

    Returns:
        The first exception of a signal's handler, or what the device reports: that comes again.
    """
    first: BaseException | None = None
    failures: list[str] = []
    while True:
        try:
            action()
            return first
        except BaseException as error:
            first = first or error
            if isinstance(error, Exception):
                failures.append(repr(error))
                if failures[-2:-1] == failures[-1:] or len(failures) == _MOST_FAILURES:
                    return error


class Lane:
    """The copies between one device and host memory. Thread-safe.

    This class does each copy at once. A kind of device that can do better overrides the methods in
    the second half.

    Attributes:
        pins: copies from and to pinned host memory are faster.
        overlaps: batches are done beside what the caller's streams are given later.
    """

    SCRATCH = 16 << 20  # bytes
    LEAST_SCRATCH = 1 << 20  # bytes: with less free memory on the device a copy fails
    pins = False
    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._scratch: torch.Tensor | None = None
        self._batches = 0  # submitted and not ended
        self._callers: list[Any] = []  # streams
        self._callers_lock = threading.Lock()

    def submit(self, to_host: bool, copies: Sequence[Copy]) -> Transfer:
        """Starts copies from this device to host memory, or the other way."""
        with self._lock:
            self.follow_callers()
            self._batches += 1
            try:
                with self._working():
                    for copy in copies:
                        self._start(to_host, *copy)
                    return Transfer(self, copies, self._mark())
            except BaseException:
                _done_despite_signals(self._wait_for_all)  # they still use the host's memory
                self._end_batch()
                raise

    def _wait_for_all(self) -> None:
        with self._working():
            mark = self._mark()
        self.wait(mark)

    def end_batch(self) -> None:
        """Called when a batch has ended."""
        with self._lock:
            self._end_batch()

    def _end_batch(self) -> None:
        self._batches -= 1
        if self._batches == 0:
            self._scratch = None

    def _start(
        self,
        to_host: bool,
        tensor: DeviceTensor,
        offset: tuple[int, ...] | None,
        shape: tuple[int, ...] | None,
        begin: int,
        memory: memoryview,
    ) -> None:
        part = tensor.elements
        if offset is not None and shape is not None:
            part = part[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        host = torch.frombuffer(memory, dtype=torch.uint8)
        if part.is_contiguous() and not is_lazy(part):
            # Not reshape(-1): a contiguous tensor of one element may have any strides.
            flat = part.as_strided((part.numel(),), (1,)).view(torch.uint8)
            device = flat[begin : begin + host.numel()]
            self._move(*((host, device) if to_host else (device, host)))
            return
        size = part.element_size()
        end = begin + host.numel()
        at, last = begin // size * size, -(-end // size) * size
        scratch = self._scratch_for(last - at)
        step = scratch.numel() // size * size
        for first in range(at, last, step):  # in the C-contiguous copy, whole elements
            packed = scratch[: min(step, last - first)]
            low, high = max(begin, first), min(end, first + packed.numel())
            inner = packed[low - first : high - first]
            outer = host[low - begin : high - begin]
            if to_host or inner.numel() < packed.numel():
                for target, source in _boxes(packed, part, first // size):
                    self._arrange(target, source)
            if to_host:
                self._move(outer, inner)
                continue
            self._move(inner, outer)
            for source, target in _boxes(packed, part, first // size):
                self._arrange(target, source)

    def _scratch_for(self, nbytes: int) -> torch.Tensor:
        wanted = min(nbytes, self.SCRATCH)
        if self._scratch is not None and self._scratch.numel() >= wanted:
            return self._scratch
        self._scratch = None
        while True:
            try:
                self._scratch = self._empty(wanted)
                return self._scratch
            except torch.cuda.OutOfMemoryError:
                if wanted <= self.LEAST_SCRATCH:
                    raise
                wanted = max(wanted // 4, self.LEAST_SCRATCH)

    # ---- What a kind of device does in its own way ----

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the methods below take it."""
        return tensor

    def note_caller(self) -> None:
        """Called on the caller's thread with each tensor: it may have been computed only now.

        Raises:
            InvalidArgumentError: nothing can be copied now.
        """
        stream = self._current_stream()
        with self._callers_lock:
            if stream is not None and stream not in self._callers:
                self._callers.append(stream)

    def follow_callers(self) -> None:
        """The next batch begins after all that the callers' streams have been given until now.

        Only streams that were noted since the last call are followed.
        """
        with self._callers_lock:  # whoever calls this meanwhile waits until they are followed
            callers, self._callers = self._callers, []
            for stream in callers:
                self._follow(stream)

    def _follow(self, stream: Any) -> None:
        stream.synchronize()

    def delay_caller(self) -> bool:
        """What this thread's stream is given from now on begins after the batches until now.

        Returns whether that is so. If not, the caller must wait for them.
        """
        return False

    def _current_stream(self) -> Any:
        """This thread's stream on this device, or None if all threads share one (mps)."""
        find = getattr(getattr(torch, self.device.type, None), "current_stream", None)
        return None if find is None else find(self.device)

    def pin(self, address: int, nbytes: int, owner: Any) -> Any:
        """An object that keeps host memory pinned, and its owner alive; None if it can't be."""
        return None

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with torch.inference_mode():  # it may write to inference tensors
            yield

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between this device and the host: contiguous bytes."""
        target.copy_(source)

    def _arrange(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies within this device, between other strides."""
        target.copy_(source)

    def _mark(self) -> Any:
        """Marks the end of a batch, for wait()."""
        # Copies within the device may not have ended, and the caller's stream may be another one.
        stream = self._current_stream()
        if stream is not None:
            stream.synchronize()
        return None

    def wait(self, mark: Any) -> None:
        """Returns when everything before the mark was done."""


def _boxes(
    packed: torch.Tensor, tensor: torch.Tensor, first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (part of `packed`, box of the tensor), each of the same shape and dtype.

    Args:
        packed: bytes of the C-contiguous copy of the tensor, from element `first` on.
    """
    size = tensor.element_size()
    at = 0
    last = first + packed.numel() // size
    for box in _core.flat_range_to_boxes(tuple(tensor.shape), first, last):
        end = at + box.numel * size
        part = tensor[box.slices] if box.shape else tensor
        yield packed[at:end].view(tensor.dtype).view(part.shape), part
        at = end


class _Pinned:
    """Keeps host memory pinned, and its owner alive."""

    __slots__ = ("_address", "_device", "_owner", "_process")

    def __init__(self, address: int, owner: Any, device: torch.device) -> None:
        self._address = address
        self._owner = owner
        self._device = device
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process != os.getpid() or sys.is_finalizing():
            return  # a forked child has no CUDA, and the end of the process unpins everything
        with _cuda.device(self._device):
            error = int(_cuda.cudart().cudaHostUnregister(self._address))
            if error != 0:
                _forget_error(self._device)
        if error != 0:
            _logger.warning("could not unpin host memory: CUDA error %d", error)


def _forget_error(device: torch.device) -> None:
    """Takes this thread's last CUDA error, which the program's next kernel would else report."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class _HostLane(Lane):
    """For lazy tensors in host memory, whose elements torch computes block by block."""

    def _current_stream(self) -> None:
        """None: the host has no streams."""


class _CudaLane(Lane):
    """For CUDA and ROCm."""

    pins = True
    overlaps = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _cuda.Stream(device=device)
        self._warned = False

    def note_caller(self) -> None:
        with _cuda.device(self.device):
            if _cuda.is_current_stream_capturing():
                raise InvalidArgumentError(
                    "tensors can't be saved or loaded while a CUDA graph is captured",
                    hint="call it before or after the capture",
                )
        super().note_caller()

    def _follow(self, stream: Any) -> None:
        self._stream.wait_stream(stream)

    def delay_caller(self) -> bool:
        self._current_stream().wait_stream(self._stream)
        return True

    def _current_stream(self) -> Any:
        return _cuda.current_stream(self.device)

    def pin(self, address: int, nbytes: int, owner: Any) -> Any:
        portable = 1  # cudaHostRegisterPortable: pinned for all devices
        # Without this, CUDA would make a context on the current device.
        with _cuda.device(self.device):
            error = int(_cuda.cudart().cudaHostRegister(address, nbytes, portable))
            if error == 0:
                return _Pinned(address, owner, self.device)
            _forget_error(self.device)
        if not self._warned:
            self._warned = True
            _logger.warning(
                "could not pin %d bytes of host memory (CUDA error %d): copies from and to %s are "
                "slower",
                nbytes,
                error,
                self.device,
            )
        return None

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        # The stream's context alone would, at its end, make a CUDA context on the device that is
        # current in this thread, even if the program does not use that one.
        with _cuda.device(self.device), _cuda.stream(self._stream):
            with torch.inference_mode():
                yield

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _mark(self) -> Any:
        event = _cuda.Event(blocking=True)  # a thread that waits leaves its core to others
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        with _cuda.device(self.device):
            mark.synchronize()


def _at_once(device: torch.device) -> Lane:
    _logger.info(
        "copies from and to %s wait one by one: only on CUDA and ROCm there is a stream for them",
        device,
    )
    return Lane(device)


_kinds: dict[str, Callable[[torch.device], Lane]] = {"cpu": _HostLane, "cuda": _CudaLane}
_lanes: dict[torch.device, Lane] = {}
_lanes_lock = _forked.Lock()


def _forget_lanes() -> None:
    """In a forked child, which can't use its parent's streams."""
    _lanes.clear()


os.register_at_fork(after_in_child=_forget_lanes)


def lane_of(device: torch.device) -> Lane:
    """The lane of a device."""
    found = _lanes.get(device)
    if found is not None:
        return found
    with _lanes_lock:
        if device not in _lanes:
            _lanes[device] = _kinds.get(device.type, _at_once)(device)
        return _lanes[device]


def follow_callers() -> None:
    """Called when the tensors of a call have been described, on the caller's thread.

    What the caller computes from then on is not waited for.
    """
    for lane in list(_lanes.values()):
        lane.follow_callers()
