"""Peak memory of one save or load beyond the tensors, in this fresh process.

    memory.py CONTESTANT save|load MIB DIR

Prints JSON. Peak memory is the kernel's VmHWM minus the resident memory before the call. Pages of
mapped files count while they are mapped. Page cache that no process maps does not count.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from contestants import Contestant, Cpp, Tensors, everybody


def _status(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/{pid}/status has no {name}")


def peak(pid: int, work) -> int:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _status(pid, "VmRSS")
    work()
    return _status(pid, "VmHWM") - before


def _import_all() -> None:
    """Imports all modules now, so that they don't count as memory of the save."""
    import safetensors.torch  # noqa: F401
    import tensorstore  # noqa: F401
    import tilestone  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401
    import torch_checkpointing  # noqa: F401


def measure(entry: Contestant, phase: str, tensors: Tensors, path: Path) -> int:
    pid = entry.pid if isinstance(entry, Cpp) else os.getpid()
    if phase == "save":
        return peak(pid, lambda: entry.save(tensors, path))
    return peak(pid, lambda: entry.load(tensors, path))


def main() -> None:
    name, phase, mib, folder = sys.argv[1:]
    _import_all()
    rows = max(1, int(mib) // 4)
    tensors = {f"w{i}": torch.full((rows, 1 << 18), float(i)) for i in range(4)}  # 1 MiB per row
    known = {entry.name: entry for entry in everybody()}
    path = Path(folder)
    if name == Cpp.name:
        entry: Contestant = Cpp(tensors, path.parent)
        taken = measure(entry, phase, tensors, path)
        entry.close()
    else:
        taken = measure(known[name], phase, tensors, path)
    print(json.dumps({"peak_bytes": taken, "tensor_bytes": sum(t.nbytes for t in tensors.values())}))


if __name__ == "__main__":
    main()
