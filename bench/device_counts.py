"""Counts the copies that saves and loads of device tensors make, on devices that need no hardware.

    .venv/bin/python bench/device_counts.py

With a package that copies in batches, the lanes of the tests' device count
(python/tests/forced_device.py). A package from before that is counted from outside: a class of
tensors notes what torch is asked to do with them, and each copy is one wait. With the package of
another revision, which `tools/bench_against REVISION` has built:

    PYTHONPATH=$(echo build/against/008878b*/package) .venv/bin/python bench/device_counts.py
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

import tilestone

MIB = 1 << 20
HEAD = (
    "copies",
    "waits",
    "MiB copied",
    "of it not pinned",
    "copies on the device",
    "peak MiB there",
)
# What is counted, in the order of HEAD.
Counts = tuple[int, int, float, float, int, float]


class Outside(torch.Tensor):
    """A tensor on a device of which only torch knows. Its memory is the host's."""

    lock = threading.RLock()
    copies = arranged = moved = now = peak = 0
    made: dict[int, list[int]] = {}  # of new memory: [tensors that use it, bytes], by address
    given: set[int] = set()  # memory of the state

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("privateuseone", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = super().__torch_function__(func, types, args, kwargs or {})
        with cls.lock, torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.copy_:
                cls._count_copy(*args[:2])
            elif isinstance(done, Outside):
                cls._note(done)
        return done

    @classmethod
    def _count_copy(cls, target: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(target, Outside) and isinstance(source, Outside):
            cls.arranged += 1
            return
        cls.copies += 1
        cls.moved += target.numel() * target.element_size()

    @classmethod
    def _note(cls, tensor: Outside) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in cls.given:
            return
        if address not in cls.made:
            cls.made[address] = [0, nbytes]
            cls.now += nbytes
            cls.peak = max(cls.peak, cls.now)
        cls.made[address][0] += 1
        weakref.finalize(tensor, cls._drop, address)

    @classmethod
    def _drop(cls, address: int) -> None:
        with cls.lock:
            use = cls.made[address]
            use[0] -= 1
            if use[0] == 0:
                del cls.made[address]
                cls.now -= use[1]


class CountedOutside:
    name = "from outside"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        Outside.given.add(tensor.untyped_storage().data_ptr())
        return tensor.as_subclass(Outside)

    def reset(self) -> None:
        Outside.copies = Outside.arranged = Outside.moved = Outside.peak = 0

    def counts(self) -> Counts:
        copies, moved = Outside.copies, Outside.moved / MIB
        return copies, copies, moved, moved, Outside.arranged, Outside.peak / MIB


class CountedByLane:
    name = "by the lanes"

    def __init__(self) -> None:
        sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "python" / "tests"))
        import forced_device

        self._lane = forced_device.lane()
        self.put: Callable[[torch.Tensor], torch.Tensor] = forced_device.put

    def reset(self) -> None:
        self._lane.reset()

    def counts(self) -> Counts:
        lane = self._lane
        found = lane.counts
        moved, unpinned = found["moved"] / MIB, lane.unpinned / MIB
        return found["copies"], found["waits"], moved, unpinned, found["arranged"], lane.peak / MIB


def stage(state: dict[str, Any], path: pathlib.Path) -> None:
    tilestone.async_save(state, path).result()


def main() -> None:
    has_lanes = importlib.util.find_spec("tilestone._torch.devices") is not None
    device = CountedByLane() if has_lanes else CountedOutside()
    large = {f"t{i}": torch.rand(4 * MIB) for i in range(8)}  # 16 MiB each
    small = {f"s{i}": torch.rand(10) for i in range(1000)}
    four = {key: large[key] for key in list(large)[:4]}
    wide = torch.rand(4096, 8192)  # 128 MiB
    conjugated = torch.view_as_complex(wide.view(4096, 4096, 2)).conj()

    def there(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: device.put(each) for key, each in state.items()}

    print(f"{tilestone.__file__}, counted {device.name}")
    print("| call | " + " | ".join(HEAD) + " |")
    print("|---" * (len(HEAD) + 1) + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tilestone.save(large | small, folder / "host")
        tilestone.save({"x": wide.t()}, folder / "wide")
        targets = there({key: torch.zeros_like(each) for key, each in (large | small).items()})
        target = device.put(torch.zeros_like(wide)).t()
        calls: dict[str, Callable[[], Any]] = {
            "save of 4 tensors of 16 MiB": lambda: tilestone.save(there(four), folder / "a"),
            "`stage()` of these and 1000 small ones": lambda: stage(
                there(four | small), folder / "b"
            ),
            "load of 8 of 16 MiB and 1000 small ones": lambda: tilestone.load(
                targets, folder / "host"
            ),
            "save of a transposed tensor of 128 MiB": lambda: tilestone.save(
                {"x": device.put(wide).t()}, folder / "c"
            ),
            "load into one": lambda: tilestone.load({"x": target}, folder / "wide"),
            "save of a conjugated tensor of 128 MiB": lambda: tilestone.save(
                {"x": device.put(conjugated)}, folder / "d"
            ),
        }
        for call, make in calls.items():
            device.reset()
            make()
            cells = [f"{each:.0f}" for each in device.counts()]
            print(f"| {call} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
